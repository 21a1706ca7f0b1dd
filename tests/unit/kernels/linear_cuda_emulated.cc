#include "tests/unit/kernels/linear_cuda_emulated.h"

#include "tests/unit/kernels/cuda_emulation/cuda_emulation.h"
// After the emulation, which stands in for the platform.
#include "kernels/bitdelta/linear_cuda_launch.cuh"

namespace stockpot {

Status EmulateLinear(const CudaLinearArgs& args, const emulation::Schedule& schedule,
                     std::optional<CudaLinearPath> path) {
  const auto launch = [&](const LinearLaunch& shape, auto* kernel, const auto&... arguments) {
    EmulateLaunch(schedule, {static_cast<unsigned>(shape.blocks)},
                  {static_cast<unsigned>(shape.threads)}, static_cast<size_t>(shape.shared_bytes),
                  kernel, arguments...);
    return OkStatus();
  };
  if (!path.has_value()) return LaunchLinear(args, launch);
  STOCKPOT_RETURN_IF_ERROR(CheckCudaLinearArgs(args));
  if (args.x.rows == 0 || args.base.rows == 0) return OkStatus();
  return LaunchLinearPath(args, *path, launch);
}

}  // namespace stockpot
