#include "store/names.h"

#include <algorithm>
#include <cstdint>

namespace stockpot {
namespace {

constexpr size_t kMaxRunNameBytes = 128;
constexpr size_t kMaxRouteNameBytes = 256;
constexpr size_t kMaxGroupNameBytes = 64;

bool IsAlphanumeric(char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

bool IsContinuation(uint8_t byte) { return (byte & 0xC0) == 0x80; }

}  // namespace

bool IsUtf8(std::string_view text) {
  const auto* p = reinterpret_cast<const uint8_t*>(text.data());
  const auto* end = p + text.size();
  while (p < end) {
    const uint8_t lead = *p++;
    if (lead < 0x80) continue;
    const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    if (lead < 0xC2 || lead > 0xF4 || end - p < more) return false;
    // The second byte's range excludes overlong forms, surrogates and code points past U+10FFFF.
    const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (*p < low || *p > high) return false;
    for (int i = 1; i < more; ++i) {
      if (!IsContinuation(p[i])) return false;
    }
    p += more;
  }
  return true;
}

bool IsPrintableName(std::string_view name, size_t max_bytes) {
  if (name.empty() || name.size() > max_bytes || !IsUtf8(name)) return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    const auto byte = static_cast<uint8_t>(c);
    return byte >= 0x20 && byte != 0x7F;
  });
}

bool IsValidRunName(std::string_view name) {
  if (name.empty() || name.size() > kMaxRunNameBytes || !IsAlphanumeric(name[0])) return false;
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return IsAlphanumeric(c) || c == '.' || c == '_' || c == '-'; });
}

bool IsValidGroupName(std::string_view name) {
  // RUN@STEP.merge and RUN@STEP.full are names of something else.
  if (name.size() > kMaxGroupNameBytes || name == "merge" || name == "full") return false;
  return IsValidRunName(name) && name.find('.') == std::string_view::npos;
}

bool IsValidRouteName(std::string_view name) { return IsPrintableName(name, kMaxRouteNameBytes); }

bool IsValidFileName(std::string_view name) { return IsValidRunName(name); }

}  // namespace stockpot
