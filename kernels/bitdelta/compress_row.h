// What the backends of bitdelta_compress share: the fixed order of the sums, which makes their
// results equal bit for bit, and the checks of the arguments.
//
// Order of the sums of one row (float64): kCompressLanes partial sums, lane j taking columns j, j +
// 32, j + 64, ... in this order; then the lanes are folded in halves (lane j += lane j + 16, + 8,
// ...). That is one warp of a GPU and four AVX-512 registers. The rows' sums are added in the order
// of rows. |delta| and delta^2 of float32 are exact in float64, so fused or separate multiply-add
// agree.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/bitdelta/compress.h"

namespace stockpot {

inline constexpr int kCompressLanes = 32;

// The statistics of one row; elements whose delta is not finite are left out of the sums and of
// max.
struct CompressedRow {
  double sum_abs = 0;
  double sum_square = 0;
  int64_t changed = 0;
  int64_t non_finite = 0;
  float max_abs = 0;
};

// Folds the partial sums in halves. Overwrites `lanes`.
inline double SumLanes(double* lanes) {
  for (int half = kCompressLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

// InvalidArgument naming the field that does not fit.
Status CheckCompressArgs(const CompressArgs& args);

// Writes alpha[r] = sum |delta| of row r / d_in and adds the rows up.
DeltaStats FinishCompress(std::span<const CompressedRow> rows, int64_t d_in,
                          std::span<float> alpha);

}  // namespace stockpot
