// The parameters and buffers of a torch::nn::Module, and training state beside them, as the views
// CheckpointHook takes.
//
//   STOCKPOT_ASSIGN_OR_RETURN(TorchTensors tensors, CollectTensors(*model));
//   STOCKPOT_RETURN_IF_ERROR(AddOptimizer(optimizer, *model, "optimizer", tensors));
//   hook->OnStep(step, tensors.views, {{"loss", loss}});
//
// A rank that holds a piece of a tensor sets `global_shape` and `offsets` of its view.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
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

// Adds tensors as they are to a group: the state RUN@STEP.GROUP. Their names are not those of the
// weights. InvalidArgument as above.
Status AddTensors(const std::map<std::string, torch::Tensor>& tensors, const std::string& group,
                  TorchTensors& into);

// Adds what Adam, AdamW or SGD keeps of the module's parameters, as GROUP/PARAMETER/exp_avg,
// .../exp_avg_sq, .../max_exp_avg_sq, .../step (I64) and .../momentum_buffer: nothing before its
// first step. InvalidArgument: another optimizer, or one of another module's parameters.
Status AddOptimizer(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                    const std::string& group, TorchTensors& into);

// For CheckpointHookOptions::allocate: page-locked memory, which a GPU copies into at full speed
// and without a copy in between. Null where there is no CUDA: then pageable memory is as good.
StagingAllocator PinnedStaging();

}  // namespace stockpot
