// How SparseDelta lies in memory. For the kernels and their tests only.
//
// Compressed rows without the empty ones: element k of stored row i adds values[k] * x[columns[k]]
// to output outputs[i]. Columns take 16 bits where d_in allows it, so an element is 6 bytes and a
// decode step reads no more than that. Values stay float32: differences of bf16 values need up to
// 16 more bits, so a 16-bit value would not be exact.
//
// Stored rows form chunks of about kSparseChunkElements elements, from which the tasks of a thread
// are made: ranges of equal work, whatever the rows' lengths. Within a chunk rows are sorted by
// length: the trip count of the inner loop, which the branch predictor would miss once a row, then
// repeats.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/sparse/sparse_delta.h"

namespace stockpot {

inline constexpr int64_t kSparseChunkElements = 16 * 1024;  // 96 KiB
inline constexpr int64_t kSparseNarrowColumns = int64_t{1} << 16;

struct SparseDelta::Layout {
  int64_t d_out = 0;
  int64_t d_in = 0;
  int64_t changed = 0;
  AlignedBuffer<uint32_t> outputs;         // [stored_rows]
  AlignedBuffer<uint32_t> starts;          // [stored_rows + 1]: elements of a stored row
  AlignedBuffer<uint16_t> narrow_columns;  // [changed] if d_in <= kSparseNarrowColumns,
  AlignedBuffer<uint32_t> wide_columns;    // else here
  AlignedBuffer<float> values;             // [changed]
  std::vector<uint32_t> chunks = {0};      // [chunk_count + 1]: stored rows of a chunk

  bool narrow() const { return d_in <= kSparseNarrowColumns; }
  int64_t chunk_count() const { return static_cast<int64_t>(chunks.size()) - 1; }
  int64_t stored_rows() const { return chunks.back(); }
  int64_t column(int64_t element) const {
    return narrow() ? narrow_columns.data()[element] : wide_columns.data()[element];
  }
};

// InvalidArgument naming the field of `args` whose shape or index does not fit.
Status CheckSparseArgs(const SparseDeltaArgs& args);

}  // namespace stockpot
