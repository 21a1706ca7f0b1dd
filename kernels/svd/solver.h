// Which solver decomposes a matrix, and what is tried when one does not converge. Pure functions.
//
//   gesvdr    randomised, few singular values of a large matrix (cuSOLVER)
//   gesvdj    Jacobi, small matrices (cuSOLVER)
//   Xgesvdp   polar decomposition, the fast full SVD (cuSOLVER)
//   gesvd     QR iteration: slow, the last resort (cuSOLVER)
//   gesdd     divide and conquer (LAPACK), in float32 or float64
//   syevd     eigenvalues of the Gram matrix in float64 (LAPACK)
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"

namespace stockpot {

enum class SvdSolver { kGesvdr, kGesvdj, kXgesvdp, kGesvd, kGesddF32, kGesddF64, kSyevd };

// "gesvdr", "gesvdj", "Xgesvdp", "gesvd", "gesdd", "gesdd (float64)", "syevd".
std::string_view SvdSolverName(SvdSolver solver);

enum class SvdDevice { kCpu, kCuda };

struct SvdProblem {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t rank = 0;          // min(rows, cols): full
  int64_t oversampling = 0;  // of a truncated one
};

// gesvdr beats a full SVD while r + p is at most this share of the smaller side.
inline constexpr int64_t kGesvdrShare = 4;
// Jacobi's sweeps fit on one device block's worth of columns up to here.
inline constexpr int64_t kGesvdjMostSide = 512;

// What to try, in order; never empty. On a GPU: gesvdr where (r + p) * kGesvdrShare <= min(m, n),
// gesvdj where neither side is over kGesvdjMostSide, then Xgesvdp, then gesvd. On a CPU (full SVDs
// and cores): gesdd in float32, in float64, syevd.
std::vector<SvdSolver> SvdSolverChain(const SvdProblem& problem, SvdDevice device);

// Calls attempt(solver) along the chain until one converges, and returns that solver. attempt:
// true = converged, false = it did not, a Status = an error that the next solver would meet too
// (no device, out of memory), returned as it is. Internal names all that were tried.
Result<SvdSolver> RunSvdSolvers(std::span<const SvdSolver> chain,
                                const std::function<Result<bool>(SvdSolver)>& attempt);

}  // namespace stockpot
