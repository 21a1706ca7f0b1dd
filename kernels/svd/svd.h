// Singular value decompositions of a delta (fine_tuned - base), or of one matrix: A ~ U diag(S)
// V^T.
//
//   truncated   randomised subspace iteration: the r largest, a small multiple of r passes over A
//   full        every singular value; LAPACK here, cuSOLVER on a GPU (svd_cuda.h)
//   energy      the smallest r that keeps a share of ||A||_F^2, from the eigenvalues of the Gram
//               matrix of the smaller side: the right tool where most of the spectrum is needed
//
// Source: Halko, Martinsson, Tropp, "Finding structure with randomness" (arXiv 0909.4061),
// algorithms 4.4 and 5.1: Y = A Omega, Q = qr(Y), q times {Q = qr(A^T Q), Q = qr(A Q)}, then the
// SVD of Q^T A.
//
// Any weight dtype is lifted to float32 first (exact), and the delta is taken in float32.
//
// Repeatable: Omega is a function of (seed, name of the tensor, row, column) alone (sketch.h), and
// every sum of the CPU backend runs in an order that does not depend on the number of threads
// (where LibTorch's BLAS is MKL): on one machine the same call gives the same bits, always.
//
// Signs: a pair (u_i, v_i) may be negated together. Here the entry of u_i that is largest in
// magnitude (the first of equals) is positive, in every backend.
//
// Thread promise: pure functions, any thread. The CPU backend (kernels/torch_ops/svd_cpu.cc, the
// target stockpot_svd_cpu) uses LibTorch's threads for products with A and one thread for
// factorisations; called inside a parallel region of LibTorch it stays on the calling thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/base/view.h"

namespace stockpot {

struct SvdArgs {
  std::string_view name;    // of the tensor: picks the sketch; if not empty, starts every error
  WeightMatrix fine_tuned;  // [m, n]
  const WeightMatrix* base = nullptr;  // [m, n], any weight dtype; null: fine_tuned alone
  int64_t max_bytes = 0;               // refuse a call whose bound (below) is over it; 0: no limit
};

// The ratio of the error to the optimum's, n = 2048, r = 64, by spectrum (Frobenius / captured):
//                        p = 8, q = 0   p = 8, q = 2   p = 64, q = 4
//   noise                1.03  / .56    1.009 / .86    1.002 / .97
//   i^-0.5               1.20  / .69    1.006 / .99    1.00  / 1.00
//   i^-1                 1.50  / .988   1.007 / 1.0    1.00  / 1.0
// q = 0 is refused. Where the singular values themselves matter take p = r, q = 4.
struct TruncatedSvdOptions {
  int64_t rank = 64;         // r, in [0, min(m, n)]
  int64_t oversampling = 8;  // p >= 0; r + p is cut at min(m, n)
  int iterations = 2;        // q, in [1, kMaxSvdIterations]
  uint64_t seed = 0;         // of the sketch, beside the tensor's name
};
inline constexpr int kMaxSvdIterations = 64;
inline constexpr double kMaxSvdNorm = 1e37;  // of ||A||_F: products stay within float32 (3e38)

struct Svd {
  int64_t rows = 0;           // m
  int64_t cols = 0;           // n
  int64_t rank = 0;           // r
  std::vector<float> u;       // [m, r], row-major, orthonormal columns
  std::vector<float> s;       // [r], descending, >= 0
  std::vector<float> v;       // [n, r], row-major, orthonormal columns
  double energy = 0;          // ||A||_F^2
  double captured = 1;        // sum s_i^2 / ||A||_F^2, in [0, 1]; 1 for a zero matrix
  double relative_error = 0;  // ||A - U S V^T||_F / ||A||_F, measured; 0 for a zero matrix
  std::string solver;  // what decomposed it: "subspace+gesdd", "gesdd", "syevd", "Xgesvdp", ...
  TruncatedSvdOptions asked;  // of a truncated SVD; otherwise rank = r and the rest as it comes
};

// Errors of all of these. InvalidArgument, beginning with the tensor's name: a shape, dtype, stride
// or option that does not fit (r > min(m, n), q = 0), or a value of `fine_tuned`, `base` or the
// delta that is NaN or infinite, with its place, or (references aside) an ||A||_F over
// kMaxSvdNorm; this is checked before any factorisation. ResourceExhausted: the bound is over
// max_bytes. Internal: no solver converged.
// A matrix without elements has rank 0 and captures 1.

// One-sided Jacobi in double precision, loops only: the optimum that the others are held against.
// Options beyond the rank are ignored.
Result<Svd> TruncatedSvdReference(const SvdArgs& args, const TruncatedSvdOptions& options);
Result<Svd> FullSvdReference(const SvdArgs& args);

Result<Svd> TruncatedSvdCpu(const SvdArgs& args, const TruncatedSvdOptions& options);
Result<Svd> FullSvdCpu(const SvdArgs& args);
// The smallest r that keeps `floor` of the energy, floor in (0, 1]. Singular values under about
// 1e-8 of the largest cannot be told from zero by this route.
Result<Svd> EnergySvdCpu(const SvdArgs& args, double floor);

// The most bytes that a call of the CPU backend holds at once, result included (LAPACK's own
// buffers of a few hundred KiB aside). In units of the float32 matrix, 4 m n bytes, for square A:
// truncated 1 + 7 (r + p) / n + 24 ((r + p) / n)^2, full 12, energy 15.
int64_t TruncatedSvdBytes(int64_t rows, int64_t cols, const TruncatedSvdOptions& options);
int64_t FullSvdBytes(int64_t rows, int64_t cols);
int64_t EnergySvdBytes(int64_t rows, int64_t cols);

// The smallest r with s_1^2 + ... + s_r^2 >= floor * sum of all s_i^2. `s` is the whole spectrum,
// descending; a zero spectrum has r = 0. InvalidArgument: floor not in (0, 1], an s_i that is
// negative, not finite or larger than its predecessor.
Result<int64_t> RankForEnergy(std::span<const float> s, double floor);

}  // namespace stockpot
