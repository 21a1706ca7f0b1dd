#include "kernels/svd/solver.h"

#include <algorithm>
#include <string>

namespace stockpot {

std::string_view SvdSolverName(SvdSolver solver) {
  switch (solver) {
    case SvdSolver::kGesvdr:
      return "gesvdr";
    case SvdSolver::kGesvdj:
      return "gesvdj";
    case SvdSolver::kXgesvdp:
      return "Xgesvdp";
    case SvdSolver::kGesvd:
      return "gesvd";
    case SvdSolver::kGesddF32:
      return "gesdd";
    case SvdSolver::kGesddF64:
      return "gesdd (float64)";
    case SvdSolver::kSyevd:
      return "syevd";
  }
  return "?";
}

std::vector<SvdSolver> SvdSolverChain(const SvdProblem& problem, SvdDevice device) {
  if (device == SvdDevice::kCpu) {
    return {SvdSolver::kGesddF32, SvdSolver::kGesddF64, SvdSolver::kSyevd};
  }
  const int64_t smaller = std::min(problem.rows, problem.cols);
  std::vector<SvdSolver> chain;
  if (problem.rank > 0 && problem.rank + problem.oversampling <= smaller / kGesvdrShare) {
    chain.push_back(SvdSolver::kGesvdr);
  } else if (std::max(problem.rows, problem.cols) <= kGesvdjMostSide) {
    chain.push_back(SvdSolver::kGesvdj);
  }
  chain.push_back(SvdSolver::kXgesvdp);
  chain.push_back(SvdSolver::kGesvd);
  return chain;
}

Result<SvdSolver> RunSvdSolvers(std::span<const SvdSolver> chain,
                                const std::function<Result<bool>(SvdSolver)>& attempt) {
  std::string tried;
  for (const SvdSolver solver : chain) {
    STOCKPOT_ASSIGN_OR_RETURN(const bool converged, attempt(solver));
    if (converged) return solver;
    tried += (tried.empty() ? "" : ", ") + std::string(SvdSolverName(solver));
  }
  return Internal("the SVD did not converge: tried " + (tried.empty() ? "nothing" : tried));
}

}  // namespace stockpot
