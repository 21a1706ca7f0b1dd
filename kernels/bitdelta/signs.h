// The 1-bit format of a delta, on disk and in memory (BitDelta, arXiv 2402.10193; the rule below).
//
//   delta = W_ft - W_base             per linear weight, [d_out, d_in]
//   W_ft  ~ W_base + alpha * sign(delta)
//   alpha = mean |delta|              one float32 per output row (or one for the matrix)
//
// Canonical signs (what is stored, hashed, exported and sent): row-major, ceil(d_in / 8) bytes a
// row with no padding between rows, least significant bit first: bit i of byte w of row r is column
// 8 * w + i. A bit is 1 where delta >= 0, so sign(0) = +1; this is part of the format. Bits past
// d_in are 0.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace stockpot {

// Bytes of one canonical row and of a canonical matrix.
constexpr int64_t SignRowBytes(int64_t d_in) { return (d_in + 7) / 8; }
constexpr int64_t SignBytes(int64_t d_out, int64_t d_in) { return d_out * SignRowBytes(d_in); }

// sign of canonical element (row, col): +1 or -1.
inline float SignAt(const uint8_t* signs, int64_t d_in, int64_t row, int64_t col) {
  const uint8_t byte = signs[row * SignRowBytes(d_in) + col / 8];
  return (byte >> (col % 8)) & 1 ? 1.0f : -1.0f;
}

}  // namespace stockpot
