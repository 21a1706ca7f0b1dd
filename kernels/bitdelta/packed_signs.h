// How PackedSigns lies in memory. For the kernels and their tests only.
//
// The kernels look up the sum of +-x over 4 columns in a table of 16 sums a token (8 of them,
// mirrored, where a register holds 8 floats). A word holds 32 columns of one row, 16 rows lie
// beside each other:
//
//   words[plane][row / 16][column / 32][row % 16]     32-bit; columns 4g .. 4g + 3 of the 32 in
//   bits 4g .. 4g + 3
//
// so that one load brings the words of 16 rows (two loads with 8 lanes, four with 4) and one shift
// their table indices. The layout is the same for every SIMD target. The index of a group is stored
// folded: where the bit of its last column is 1, its three lower bits are inverted. Entry 8 + j of
// the table is then -entry j, and a target with small registers keeps the first 8 and flips the
// sign.
//
// Rows are padded to 16 with alpha 0; columns to 32 with bits that meet zeros of x.
#pragma once

#include <cstdint>

#include "kernels/base/aligned_buffer.h"
#include "kernels/bitdelta/linear.h"

namespace stockpot {

inline constexpr int64_t kSignBlockRows = 16;
inline constexpr int64_t kSignWordColumns = 32;
inline constexpr int64_t kSignGroupColumns = 4;  // columns of one table lookup

// Inverts the lower three bits of every group of four whose last bit is 1; its own inverse.
inline uint32_t FoldSignGroups(uint32_t word) {
  const uint32_t last = (word >> 3) & 0x11111111u;
  return word ^ (last * 7u);
}

struct PackedSigns::Layout {
  int64_t d_out = 0;
  int64_t d_in = 0;
  int64_t planes = 1;
  int64_t row_blocks = 0;         // ceil(d_out / 16)
  int64_t column_words = 0;       // ceil(d_in / 32)
  AlignedBuffer<uint32_t> words;  // [planes, row_blocks, column_words, 16]
  AlignedBuffer<float> alpha;     // [planes, row_blocks * 16]

  const uint32_t* block(int64_t plane, int64_t row_block) const {
    return words.data() + (plane * row_blocks + row_block) * column_words * kSignBlockRows;
  }
  const float* scales(int64_t plane) const {
    return alpha.data() + plane * row_blocks * kSignBlockRows;
  }

  // +1 or -1, unfolded. For the reference and the tests.
  float SignAt(int64_t plane, int64_t row, int64_t col) const;
};

// InvalidArgument naming the field of `args` whose shape or index does not fit.
Status CheckLinearArgs(const LinearArgs& args);

// What batch row t uses of `output`, or null: base only. REQUIRES: CheckLinearArgs is OK.
inline const LayerDelta* VariantOfRow(const LinearArgs& args, const LinearOutput& output,
                                      int64_t t) {
  if (args.variant_of_row.empty() || args.variant_of_row[t] < 0) return nullptr;
  return &output.variants[args.variant_of_row[t]];
}

// The bias that row t adds, or null.
inline const float* BiasOfRow(const LinearArgs& args, const LinearOutput& output, int64_t t) {
  const LayerDelta* variant = VariantOfRow(args, output, t);
  return variant != nullptr && variant->bias != nullptr ? variant->bias : output.bias;
}

}  // namespace stockpot
