// The sparse format of a delta: the elements whose bytes differ from the base's, exactly. For
// fine-tunes that touch few weights, where it is smaller than one bit a weight and loses nothing.
//
//   "counts"   [d_out] uint32: changed elements of each row
//   "columns"  [changed] uint16, uint32 where d_in > 65536: row by row, strictly ascending
//   "values"   [changed] the tensor's own dtype: the fine-tuned values themselves
//   "rows"     [more, d_in] likewise: only of a table that has more rows than the base's (a
//              vocabulary that grew); d_out above is then the base's. A table with fewer rows is
//              over the base's first ones, and has no such part.
//
// All little-endian. Reading is total: whatever the bytes, an error or a matrix.
// Thread promise: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/status.h"

namespace stockpot {

// Bytes of one column number.
constexpr int64_t SparseColumnBytes(int64_t d_in) { return d_in <= 65536 ? 2 : 4; }

// Stored bytes of `changed` elements of `element_bytes` each.
constexpr int64_t SparseBytes(int64_t d_out, int64_t d_in, int64_t element_bytes, int64_t changed) {
  return 4 * d_out + changed * (SparseColumnBytes(d_in) + element_bytes);
}

struct SparseShape {
  int64_t d_out = 0;
  int64_t d_in = 0;
  int64_t element_bytes = 0;  // 2 or 4
};

struct SparseParts {
  std::vector<uint32_t> counts;
  std::vector<std::byte> columns;
  std::vector<std::byte> values;
};

// Elements of two row-major matrices whose bytes differ.
int64_t CountChanged(const std::byte* base, const std::byte* tuned, const SparseShape& shape);
SparseParts EncodeSparse(const std::byte* base, const std::byte* tuned, const SparseShape& shape);

// Where each row's elements begin, [d_out + 1]. Corruption: counts over d_in, or another sum than
// `changed`.
Result<std::vector<int64_t>> SparseOffsets(std::span<const uint32_t> counts, int64_t d_in,
                                           int64_t changed);

// The columns of rows whose elements begin at `offsets` (the first may be any number), from their
// stored bytes. Corruption: out of range, or not ascending within a row.
Result<std::vector<uint32_t>> SparseColumns(std::span<const int64_t> offsets,
                                            std::span<const std::byte> columns, int64_t d_in);

}  // namespace stockpot
