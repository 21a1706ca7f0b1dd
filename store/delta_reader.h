// The logical bytes of a tensor that is stored as a difference to its base's: codec bitdelta (base
// + sum of alpha * sign, + B A: store/bitdelta_parts.h) or sparse (the base with its changed
// elements, and rows of its own behind them). One decoder for the store and for clients, so that an
// export has the same bits wherever it is made.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "store/manifest.h"
#include "store/raw_tensor_reader.h"

namespace stockpot {

// Thread promise: as the PartReader's. Memory: a few MiB, 12 bytes a row for sparse, and a
// residual's factors.
class DeltaReader {
 public:
  // Whether `entry` (codec bitdelta or sparse) can be over `base`. Corruption says why not.
  static Status Check(const TensorEntry& entry, const TensorEntry& base);

  // Both must outlive the reader. REQUIRES: Check().ok(). `as_f32`: bitdelta's values in float32,
  // in which they are exact to one rounding, instead of rounded once to the entry's dtype.
  DeltaReader(const TensorEntry& entry, const TensorEntry& base, PartReader read,
              bool as_f32 = false);

  DType dtype() const { return dtype_; }  // of what Read gives
  // Bytes [offset, offset + out.size()) of the tensor, row-major. InvalidArgument: past the end.
  // Corruption: the stored parts contradict themselves.
  Status Read(int64_t offset, std::span<std::byte> out) const;

 private:
  Status DecodeRows(int64_t row, int64_t rows, std::byte* out) const;
  Status DecodeSigns(int64_t row, int64_t rows, const std::byte* base, std::byte* out) const;
  // Of rows [row, row + rows), onto `weights` [rows, d_in].
  Status AddPlanes(int64_t row, int64_t rows, std::span<double> weights) const;
  Status AddResidual(int64_t row, int64_t rows, std::span<double> weights) const;
  Status Patch(int64_t row, int64_t rows, std::byte* out) const;
  Status ReadRowsBehind(int64_t row, int64_t rows, std::byte* out) const;

  const TensorEntry& entry_;
  const TensorEntry& base_;
  const PartReader read_;
  const DType dtype_;
};

}  // namespace stockpot
