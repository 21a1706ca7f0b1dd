// Texts cut into the sequences that a calibration runs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace stockpot {

// Windows of at most `window` consecutive tokens, up to `max_tokens` of them together: the first of
// each text, then the second of each, and so on. They point into `texts`.
std::vector<std::span<const int32_t>> TokenWindows(std::span<const std::vector<int32_t>> texts,
                                                   int64_t window, int64_t max_tokens);

}  // namespace stockpot
