// The CUDA launcher of a binary that was built without CUDA.
#include "kernels/sparse/sparse_delta_cuda.h"

namespace stockpot {

Status LaunchSparseDeltaLinearCuda(const CudaSparseArgs&, void*) {
  return Unavailable("this binary was built without CUDA");
}

}  // namespace stockpot
