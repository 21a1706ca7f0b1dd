#include "serve/calibrate/token_windows.h"

#include <algorithm>

namespace stockpot {

std::vector<std::span<const int32_t>> TokenWindows(std::span<const std::vector<int32_t>> texts,
                                                   int64_t window, int64_t max_tokens) {
  std::vector<std::span<const int32_t>> windows;
  bool more = true;
  for (int64_t begin = 0; more && max_tokens > 0; begin += window) {
    more = false;
    for (const std::vector<int32_t>& text : texts) {
      const auto left = static_cast<int64_t>(text.size()) - begin;
      const int64_t count = std::min({left, window, max_tokens});
      if (count <= 0) continue;
      windows.push_back(
          std::span(text).subspan(static_cast<size_t>(begin), static_cast<size_t>(count)));
      max_tokens -= count;
      more = true;
    }
  }
  return windows;
}

}  // namespace stockpot
