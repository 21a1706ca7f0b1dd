// The parameters and buffers of a torch::nn::Module as the views CheckpointHook takes.
//
//   STOCKPOT_ASSIGN_OR_RETURN(const TorchTensors tensors, CollectTensors(*model));
//   hook->OnStep(step, tensors.views, {{"loss", loss}});
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "trainer_hooks/cpp/checkpoint_hook.h"

namespace stockpot {

struct TorchTensors {
  std::vector<TensorView> views;  // point into `keep_alive`
  std::vector<torch::Tensor> keep_alive;
};

// All named parameters and buffers, dtype as it is. A tensor that is contiguous on the CPU is not
// copied: the views are valid until the module changes. A strided or device tensor is copied to its
// logical, contiguous CPU form. Tensors that share memory wholly (tied weights) become aliases of
// the first one registered. InvalidArgument names a tensor whose dtype has
// no safetensors name (complex, quantised).
Result<TorchTensors> CollectTensors(const torch::nn::Module& module);

}  // namespace stockpot
