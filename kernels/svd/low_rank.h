// The best part of low rank of one matrix, without LibTorch: E ~ B A by a randomised subspace
// iteration (svd.h says which), on the caller's thread pool.
//
//   Y = E Omega, Q = orth(Y), 2 times {Q = orth(E^T Q), Q = orth(E Q)}, C = Q^T E,
//   C C^T = V L V^T, B = Q V, A = V^T C
//
// with p = max(8, r) columns more than the rank. Products in float32, orthonormalisation
// (Gram-Schmidt, twice) and the small eigenproblem (Jacobi) in float64. Every sum runs in an order
// that does not depend on the number of threads: on one machine the same call gives the same bits.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/base/threads.h"
#include "kernels/base/view.h"

namespace stockpot {

struct LowRank {
  int64_t rank = 0;      // r, min(m, n) at most
  std::vector<float> b;  // [m, r], orthonormal columns, by falling singular value
  std::vector<float> a;  // [r, n]: the first k of both are the best part of rank k
};

// `e` [m, n]: finite; rows on cache lines (PanelStride, panel_products.h), what is behind n zero.
// `name` picks the sketch. Memory beside e: about 3 (m + n) (2 r + 8) floats.
LowRank BestLowRank(std::string_view name, const FloatMatrix& e, int64_t rank, ThreadPool& threads);

}  // namespace stockpot
