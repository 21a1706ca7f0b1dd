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
  std::vector<TensorView> views;  // point into, or read from, `keep_alive`
  std::vector<torch::Tensor> keep_alive;
};

// All named parameters and buffers, dtype as it is. A tensor that is contiguous on the CPU is not
// copied, one of a device is copied once, by OnStep into staging: the views are valid until the
// module changes. A strided one on the CPU is copied to its logical, contiguous form. Tensors that
// share memory wholly (tied weights) become aliases of the first one registered. InvalidArgument
// names a tensor whose dtype has no safetensors name (complex, quantised).
Result<TorchTensors> CollectTensors(const torch::nn::Module& module);

// For CheckpointHookOptions::allocate: page-locked memory, which a GPU copies into at full speed
// and without a copy in between. Null where there is no CUDA: then pageable memory is as good.
StagingAllocator PinnedStaging();

}  // namespace stockpot
