// The algorithms of kernels/svd/svd.h on at::Tensor, for LibTorch's CPU and, through LibTorch's own
// cuSOLVER, its CUDA tensors. For svd_cpu.cc and torch_ops.cc.
//
// On the CPU every product with A is cut into panels of kSvdPanel rows or columns, each computed by
// one thread, and factorisations run on one thread: the bits do not depend on at::get_num_threads()
// (where LibTorch's BLAS is MKL).
// Throws what LibTorch throws. Thread promise: any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "kernels/svd/solver.h"
#include "kernels/svd/svd.h"

namespace stockpot {

inline constexpr int64_t kSvdPanel = 256;  // rows or columns of A

struct TensorSvd {
  at::Tensor u, s, v;  // float32 [m, r], [r], [n, r]
  double relative_error = 0;
  std::string solver;
};

struct SvdFactors {
  at::Tensor u, s, v;  // [m, k], [k], [n, k], k = min(m, n); of the dtype that the solver worked in
};

// All singular values of `a`, not empty, by one solver: kGesddF32, kGesddF64 or kSyevd. False if it
// did not converge.
Result<bool> SolveSvd(const at::Tensor& a, SvdSolver solver, SvdFactors& out);

// `a` float32 [m, n], contiguous, finite, of ||a||_F^2 = energy; it is overwritten (by the
// residual). Signs are as they come. Options have been checked.
Result<TensorSvd> SubspaceSvd(at::Tensor a, double energy, std::string_view name,
                              const TruncatedSvdOptions& options);
Result<TensorSvd> FullSvd(at::Tensor a, double energy);
Result<TensorSvd> EnergySvd(at::Tensor a, double energy, double floor);

}  // namespace stockpot
