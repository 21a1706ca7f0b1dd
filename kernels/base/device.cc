#include "kernels/base/device.h"

#include <hwy/highway.h>

#if STOCKPOT_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace stockpot {
namespace {

#if STOCKPOT_HAS_CUDA
// Only the runtime library is linked: libcuda would keep the program from starting without a
// driver.
void ProbeCuda(DeviceReport* report) {
  int count = 0;  // stays untouched when the call fails
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    report->cuda_reason = cudaGetErrorString(error);
    return;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    report->cuda.push_back({.index = i,
                            .name = properties.name,
                            .compute_major = properties.major,
                            .compute_minor = properties.minor,
                            .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem)});
  }
  if (report->cuda.empty()) report->cuda_reason = "the driver answers and shows no device";
}
#endif

}  // namespace

DeviceReport ProbeDevices() {
  DeviceReport report;
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  report.simd_target = hwy::TargetName(targets & -targets);  // the lowest bit is the best target
#if STOCKPOT_HAS_CUDA
  report.cuda_compiled = true;
  ProbeCuda(&report);
#else
  report.cuda_reason = "built without CUDA";
#endif
  return report;
}

}  // namespace stockpot
