// The GPU backend of a binary that was built without CUDA. Bad arguments are refused all the same.
#include "kernels/svd/svd_checks.h"
#include "kernels/svd/svd_cuda.h"

namespace stockpot {
namespace {

Status Absent() { return Unavailable("this binary was built without CUDA"); }

}  // namespace

Result<Svd> TruncatedSvdCuda(const SvdArgs& args, const TruncatedSvdOptions& options) {
  STOCKPOT_RETURN_IF_ERROR(CheckTruncatedSvd(args, options));
  return Absent();
}

Result<Svd> FullSvdCuda(const SvdArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckSvdArgs(args));
  return Absent();
}

}  // namespace stockpot
