// Runs the device code of bitdelta_linear under the host emulation.
#pragma once

#include <optional>

#include "kernels/base/status.h"
#include "kernels/bitdelta/linear_cuda.h"
#include "tests/unit/kernels/cuda_emulation/block.h"

namespace stockpot {

// As LaunchBitDeltaLinearCuda; `path`: instead of the one that sizes would choose.
Status EmulateLinear(const CudaLinearArgs& args, const emulation::Schedule& schedule = {},
                     std::optional<CudaLinearPath> path = std::nullopt);

}  // namespace stockpot
