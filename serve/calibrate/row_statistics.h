// What the closed form needs of one linear layer: per output row i the sums, over tokens t, of the
// products of a_ti = x_t (delta_i - residual_i)^T and b_tip = x_t s_ip^T for each sign plane p.
// They stand in for C, the covariance of the inputs, which is never made: s C s^T is the sum of
// b^2, and d C s^T that of a b.
//
// Thread promise: one caller at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/view.h"
#include "store/calibration.h"

namespace stockpot {

class RowStatistics {
 public:
  RowStatistics(int64_t rows, int64_t planes);

  // a [tokens, n] and b [planes], each [tokens, n], of output rows [first, first + n).
  void Add(int64_t first, ConstFloatMatrix a, std::span<const ConstFloatMatrix> b);

  // The scales with the least squared output error, row by row: alpha_p of sum_q (b_p b_q) alpha_q
  // = sum (a b_p). Where these are not positive and finite, or not better than those of `draft`
  // [planes][rows], the draft's stay. Errors as in CalibratedTensor.
  CalibratedTensor Solve(const std::vector<std::vector<float>>& draft) const;

 private:
  // sum (a - sum_p alpha_p b_p)^2 of a row.
  double Error(const double* sums, std::span<const double> alpha) const;
  // False: no such scales.
  bool SolveRow(const double* sums, std::span<double> alpha) const;
  int64_t GramIndex(int64_t p, int64_t q) const;  // in a row's sums

  const int64_t rows_;
  const int64_t planes_;
  const int64_t stride_;      // sums of a row: aa, ab [planes], bb [planes (planes + 1) / 2]
  std::vector<double> sums_;  // [rows, stride]
};

}  // namespace stockpot
