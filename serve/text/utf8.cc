#include "serve/text/utf8.h"

namespace stockpot {

Utf8Step NextCodePoint(std::string_view text, size_t offset) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[offset + i]); };
  const uint8_t lead = byte(0);
  Utf8Step step;
  if (lead < 0x80) return {lead, 1, true, false};
  int length = 0;
  uint8_t low = 0x80, high = 0xBF;  // bounds of the second byte: no overlong form, no surrogate
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  }
  step.code_point = 0xFFFD;
  if (length == 0) return step;
  char32_t code_point = lead & (0x7F >> length);
  for (int i = 1; i < length; ++i) {
    if (offset + i >= text.size()) {
      step.bytes = i;
      step.truncated = true;
      return step;
    }
    const uint8_t next = byte(i);
    if (next < low || next > high) {
      step.bytes = i;
      return step;
    }
    low = 0x80, high = 0xBF;
    code_point = (code_point << 6) | (next & 0x3F);
  }
  return {code_point, length, true, false};
}

bool IsValidUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = NextCodePoint(text, i);
    if (!step.valid) return false;
    i += step.bytes;
  }
  return true;
}

std::string ToValidUtf8(std::string_view text) {
  std::string pending(text), out;
  DrainUtf8(&pending, /*last=*/true, &out);
  return out;
}

size_t PreviousCodePoint(std::string_view text, size_t end) {
  size_t i = end - 1;
  while (i > 0 && (static_cast<uint8_t>(text[i]) & 0xC0) == 0x80) --i;
  return i;
}

void AppendUtf8(char32_t code_point, std::string* out) {
  const auto put = [&](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | (code_point >> 6));
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | (code_point >> 12));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | (code_point >> 18));
    put(0x80 | ((code_point >> 12) & 0x3F));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

void DrainUtf8(std::string* pending, bool last, std::string* out) {
  const std::string_view text = *pending;
  size_t i = 0;
  while (i < text.size()) {
    const Utf8Step step = NextCodePoint(text, i);
    if (step.truncated && !last) break;
    if (step.valid) {
      out->append(text.substr(i, step.bytes));
    } else {
      out->append(kReplacementCharacter);
    }
    i += step.bytes;
  }
  pending->erase(0, i);
}

}  // namespace stockpot
