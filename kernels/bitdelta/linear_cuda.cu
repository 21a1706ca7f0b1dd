// Launchers of bitdelta_linear on a GPU (linear_cuda.h); the kernels are in linear_cuda*.cuh.
#include "kernels/base/cuda_memory.h"
#include "kernels/base/cuda_mma.cuh"
#include "kernels/base/cuda_platform.cuh"
#include "kernels/bitdelta/linear_cuda_launch.cuh"
#include "kernels/bitdelta/sign_tiles_cuda.cuh"

namespace stockpot {
namespace {

// More than 48 KiB of dynamic shared memory is asked for by name.
template <typename Kernel>
Status AllowSharedBytes(Kernel* kernel, int64_t bytes) {
  if (bytes <= 48 << 10) return OkStatus();
  return CudaStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)),
                    "bitdelta_linear: shared memory of a block");
}

}  // namespace

Status LaunchBitDeltaLinearCuda(const CudaLinearArgs& args, void* stream) {
  return LaunchLinear(args, [stream](const LinearLaunch& shape, auto* kernel, auto... arguments) {
    STOCKPOT_RETURN_IF_ERROR(AllowSharedBytes(kernel, shape.shared_bytes));
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads,
             static_cast<size_t>(shape.shared_bytes), static_cast<cudaStream_t>(stream)>>>(
        arguments...);
    return CudaStatus(cudaGetLastError(), "launching bitdelta_linear");
  });
}

Status LaunchPackSignTilesCuda(const CudaSignTilesArgs& args, void* stream) {
  STOCKPOT_RETURN_IF_ERROR(CheckCudaSignTilesArgs(args));
  const int64_t blocks = SignTilesBlocks(args);
  if (blocks == 0) return OkStatus();
  PackSignTilesKernel<<<static_cast<unsigned>(blocks), kSignTilesThreads, 0,
                        static_cast<cudaStream_t>(stream)>>>(args);
  return CudaStatus(cudaGetLastError(), "launching the packing of sign tiles");
}

}  // namespace stockpot
