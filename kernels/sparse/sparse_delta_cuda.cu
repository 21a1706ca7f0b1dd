// Launcher of sparse_delta_linear on a GPU (sparse_delta_cuda.h); the kernel is in
// sparse_delta_cuda.cuh.
#include "kernels/base/cuda_memory.h"
#include "kernels/base/cuda_platform.cuh"
#include "kernels/sparse/sparse_delta_cuda.cuh"

namespace stockpot {

Status LaunchSparseDeltaLinearCuda(const CudaSparseArgs& args, void* stream) {
  if (args.y.rows != args.x.rows) {
    return InvalidArgument("y: " + std::to_string(args.y.rows) + " rows, x has " +
                           std::to_string(args.x.rows));
  }
  if (args.x.rows <= 0 || args.y.cols <= 0 || args.delta_of_row == nullptr) return OkStatus();
  const SparseGrid blocks = GridOfSparse(args.x.rows, args.y.cols);
  const dim3 block(kSparseWarps * kSparseLanes);
  SparseDeltaKernel<<<dim3(blocks.x, blocks.y), block, 0, static_cast<cudaStream_t>(stream)>>>(
      args);
  return CudaStatus(cudaGetLastError(), "launching sparse_delta_linear");
}

}  // namespace stockpot
