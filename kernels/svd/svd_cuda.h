// svd.h on a GPU, by cuSOLVER: gesvdr, gesvdj, Xgesvdp or gesvd as solver.h chooses, and the next
// of the chain where one does not converge.
//
// Host memory in and out: the delta is lifted and checked for NaN and infinity on the host
// (cuSOLVER only says EXECUTION_FAILED), copied to the current device, decomposed there in float32,
// and sent once more for the residual. Device memory: the float32 matrix, the factors and
// cuSOLVER's workspace. gesvdr draws its own sketch: `seed` and `name` do not reach it.
//
// The errors of svd.h, and Unavailable where the binary has no CUDA backend or no device answers.
// Thread promise: any thread; each call makes its own handles and waits for its own stream.
#pragma once

#include "kernels/svd/svd.h"

namespace stockpot {

Result<Svd> TruncatedSvdCuda(const SvdArgs& args, const TruncatedSvdOptions& options);
Result<Svd> FullSvdCuda(const SvdArgs& args);

}  // namespace stockpot
