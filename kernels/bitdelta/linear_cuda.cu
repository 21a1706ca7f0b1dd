// Launcher of bitdelta_linear on a GPU (linear_cuda.h); the kernel is in linear_cuda.cuh.
#include "kernels/base/cuda_memory.h"
#include "kernels/base/cuda_platform.cuh"
#include "kernels/bitdelta/linear_cuda.cuh"

namespace stockpot {

Status LaunchBitDeltaLinearCuda(const CudaLinearArgs& args, void* stream) {
  if (!IsWeightDType(args.base.dtype)) return InvalidArgument("base: not F32, F16 or BF16");
  if (args.x.cols != args.base.cols) {
    return InvalidArgument("x: the base takes " + std::to_string(args.base.cols) + " columns");
  }
  if (args.y.rows != args.x.rows || args.y.cols != args.base.rows) {
    return InvalidArgument("y: need [" + std::to_string(args.x.rows) + ", " +
                           std::to_string(args.base.rows) + "]");
  }
  if (args.x.rows == 0 || args.base.rows == 0) return OkStatus();
  const LinearGrid blocks = GridOfLinear(args.x.rows, args.base.rows);
  const dim3 block(kLinearWarps * kLinearLanes);
  LinearKernel<<<dim3(blocks.x, blocks.y), block, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return CudaStatus(cudaGetLastError(), "launching bitdelta_linear");
}

}  // namespace stockpot
