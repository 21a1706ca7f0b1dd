// What a merge does to the delta (fine-tuned - base) of one matrix: the part that needs singular
// values. Merges over whole models: store/merge.h.
//
//   TruncateDeltas  U_r S_r V_r^T; r is the smallest rank that keeps a share of ||delta||_F^2, or
//                   fixed
//   ReweightDelta   high * delta_k + low * (delta - delta_k), delta_k = U_k S_k V_k^T: the paper's
//                   MonoSoup, arXiv 2602.09689
//
// Both work in place on `delta` [rows, cols], row-major float32; what it holds after an error is
// unspecified. The spectrum comes from the eigenvalues of the Gram matrix of the smaller side.
//
// ReweightDelta computes in float64, and so does TruncateDeltas where the smaller side is short. A
// larger one it cuts in float32 (kernels/svd/partial_eigen.h, kernels/dense/product.h), which is
// off by about 1e-6 ||delta||_F, measures what that keeps, and takes float64 where the rank is not
// certain or its last direction not apart from the next. So the rank is always that of float64.
//
// Repeatable: the same bytes, on one machine and number of threads, where `delta` begins on a cache
// line. Thread promise: any thread; LibTorch's own threads do the work.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/status.h"
#include "kernels/dense/product.h"
#include "kernels/svd/partial_eigen.h"
#include "store/records.h"

namespace stockpot {

struct MatrixReport {
  int64_t rank = 0;        // r or k; of a zero delta: 0
  double kept_energy = 1;  // sum_{i <= rank} s_i^2 / ||delta||_F^2; of a zero delta: 1
  double low = 0;          // what the directions after `rank` are multiplied by,
  double high = 1;         // and those up to it
  // Whether the result is the delta itself: nothing is dropped or reweighted.
  bool unchanged = true;
};

// Memory of TruncateDeltas() that one call leaves to the next: pages that are new cost more than
// what is done with them. One user at a time; what it was used for before changes no result.
struct MatrixWorkspace {
  std::array<PartialEigen, 2> eigens;    // so many deltas are decomposed side by side
  std::vector<ProductScratch> products;  // one a thread
  AlignedBuffer<float> part;

  int64_t bytes() const;
};

// Of one matrix of several checkpoints: each of `deltas` [rows, cols] is cut for itself, and has
// the bits and the report that it would have alone; two take less time together. InvalidArgument: a
// value is not finite, or a fixed rank keeps less than options.energy and options.force is not set.
// REQUIRES: rows, cols >= 1 and CheckMergeOptions().
Result<std::vector<MatrixReport>> TruncateDeltas(int64_t rows, int64_t cols,
                                                 const MergeOptions& options,
                                                 std::span<float* const> deltas,
                                                 MatrixWorkspace& workspace);

// `spectral`: 0 for k = ceil(exp(entropy of s / sum s)), the effective rank; otherwise R, and k is
// the least with which the first k keep R of ||delta||_F^2. With P = kept_energy,
// rho = (s_{k+1} / s_1)^2 (0 where k is min(rows, cols)) and c = sqrt(1 - P):
// low = rho + (1 - rho) c, high = 1 - low, both in [0, 1].
// A delta of ||delta||_F / (base_norm + 1e-12) < 1e-6 stays as it is.
// InvalidArgument: a value is not finite.
Result<MatrixReport> ReweightDelta(int64_t rows, int64_t cols, double spectral, double base_norm,
                                   float* delta);

// body(i) for i in [0, n), on LibTorch's threads: each takes the next i when it is done, and what
// LibTorch does inside `body` then stays on that thread. With n = 1, LibTorch's threads are body's
// own.
void RunSideBySide(size_t n, const std::function<void(size_t)>& body);

}  // namespace stockpot
