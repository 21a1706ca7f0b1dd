// The CUDA launcher of a binary that was built without CUDA.
#include "kernels/lora/lora_linear_cuda.h"

namespace stockpot {

Status LaunchLoraLinearCuda(const CudaLoraArgs&, void*) {
  return Unavailable("this binary was built without CUDA");
}

}  // namespace stockpot
