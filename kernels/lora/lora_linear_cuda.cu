// Launcher of lora_linear on a GPU (lora_linear_cuda.h); the kernels are in lora_linear_cuda.cuh.
#include "kernels/base/cuda_memory.h"
#include "kernels/base/cuda_platform.cuh"
#include "kernels/lora/lora_linear_cuda.cuh"

namespace stockpot {

Status LaunchLoraLinearCuda(const CudaLoraArgs& args, void* stream) {
  const std::string rows = std::to_string(args.x.rows);
  if (args.y.rows != args.x.rows) {
    return InvalidArgument("y: " + std::to_string(args.y.rows) + " rows, x has " + rows);
  }
  if (args.hidden.rows < args.x.rows) {
    return InvalidArgument("hidden: " + std::to_string(args.hidden.rows) + " rows, x has " + rows);
  }
  if (args.x.rows <= 0 || args.y.cols <= 0 || args.hidden.cols <= 0 ||
      args.delta_of_row == nullptr) {
    return OkStatus();
  }
  const auto on = static_cast<cudaStream_t>(stream);
  const LoraGrid shrink = GridOfShrink(args.x.rows, args.hidden.cols);
  LoraShrinkKernel<<<dim3(shrink.x, shrink.y), dim3(kLoraWarps * kLoraWarpLanes), 0, on>>>(args);
  STOCKPOT_RETURN_IF_ERROR(CudaStatus(cudaGetLastError(), "launching lora_linear (shrink)"));
  const LoraGrid expand = GridOfExpand(args.x.rows, args.y.cols);
  LoraExpandKernel<<<dim3(expand.x, expand.y), dim3(kLoraExpandThreads), 0, on>>>(args);
  return CudaStatus(cudaGetLastError(), "launching lora_linear (expand)");
}

}  // namespace stockpot
