#include "trainer_hooks/cpp/libtorch_adapter.h"

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>
#include <optional>
#include <tuple>

namespace stockpot {
namespace {

std::optional<DType> DTypeOf(torch::ScalarType type) {
  switch (type) {
    case torch::kFloat64:
      return DType::kF64;
    case torch::kFloat32:
      return DType::kF32;
    case torch::kFloat16:
      return DType::kF16;
    case torch::kBFloat16:
      return DType::kBF16;
    case torch::kInt64:
      return DType::kI64;
    case torch::kInt32:
      return DType::kI32;
    case torch::kInt16:
      return DType::kI16;
    case torch::kInt8:
      return DType::kI8;
    case torch::kUInt64:
      return DType::kU64;
    case torch::kUInt32:
      return DType::kU32;
    case torch::kUInt16:
      return DType::kU16;
    case torch::kUInt8:
      return DType::kU8;
    case torch::kBool:
      return DType::kBool;
    case torch::kFloat8_e4m3fn:
      return DType::kF8E4M3;
    case torch::kFloat8_e5m2:
      return DType::kF8E5M2;
    default:
      return std::nullopt;
  }
}

// Copies a tensor of a device to its logical, contiguous form. Returns when the bytes are there.
Status CopyOut(const torch::Tensor& tensor, std::span<std::byte> out) {
  try {
    const torch::NoGradGuard no_grad;
    at::from_blob(out.data(), tensor.sizes(), tensor.options().device(torch::kCPU)).copy_(tensor);
    return OkStatus();
  } catch (const std::exception& error) {
    return Internal(error.what());
  }
}

// Two tensors with the same identity are one tensor under two names.
using Identity =
    std::tuple<const void*, torch::ScalarType, std::vector<int64_t>, std::vector<int64_t>>;

class Collector {
 public:
  // Of weights, or of a group, whose tensors are ones of their own also where they share memory.
  explicit Collector(TorchTensors& into, std::string group = "")
      : result_(into), group_(std::move(group)) {}

  Status Add(const std::string& name, const torch::Tensor& tensor) {
    if (!tensor.defined()) return OkStatus();
    const std::optional<DType> dtype = DTypeOf(tensor.scalar_type());
    if (!dtype || tensor.layout() != torch::kStrided) {
      return InvalidArgument("tensor '" + name + "': a checkpoint cannot hold " +
                             std::string(torch::toString(tensor.scalar_type())));
    }
    TensorView view{.name = name, .dtype = *dtype, .shape = tensor.sizes().vec()};
    view.group = group_;
    if (tensor.numel() > 0 && group_.empty()) {
      const Identity identity{tensor.const_data_ptr(), tensor.scalar_type(), view.shape,
                              tensor.strides().vec()};
      const auto [first, is_new] = names_.emplace(identity, name);
      if (!is_new) view.alias_of = first->second;
    }
    if (view.alias_of.empty() && tensor.device().is_cpu()) {
      result_.keep_alive.push_back(tensor.detach().contiguous());
      view.data = result_.keep_alive.back().const_data_ptr();
    } else if (view.alias_of.empty()) {
      result_.keep_alive.push_back(tensor.detach());
      view.read = [kept = result_.keep_alive.back()](std::span<std::byte> out) {
        return CopyOut(kept, out);
      };
    }
    result_.views.push_back(std::move(view));
    return OkStatus();
  }

  // A number that an optimizer keeps beside its tensors.
  Status AddNumber(const std::string& name, int64_t number) {
    return Add(name, torch::tensor(number, torch::kInt64));
  }

 private:
  TorchTensors& result_;
  const std::string group_;
  std::map<Identity, std::string> names_;
};

// What an optimizer keeps of one parameter, as tensors called NAME/exp_avg and the like.
Status AddParameterState(const std::string& name, const torch::optim::OptimizerParamState& state,
                         Collector& collector) {
  const auto add_moments = [&](const auto& adam) -> Status {
    STOCKPOT_RETURN_IF_ERROR(collector.AddNumber(name + "/step", adam.step()));
    STOCKPOT_RETURN_IF_ERROR(collector.Add(name + "/exp_avg", adam.exp_avg()));
    STOCKPOT_RETURN_IF_ERROR(collector.Add(name + "/exp_avg_sq", adam.exp_avg_sq()));
    return collector.Add(name + "/max_exp_avg_sq", adam.max_exp_avg_sq());
  };
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWParamState*>(&state)) {
    return add_moments(*adamw);
  }
  if (const auto* adam = dynamic_cast<const torch::optim::AdamParamState*>(&state)) {
    return add_moments(*adam);
  }
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(&state)) {
    return collector.Add(name + "/momentum_buffer", sgd->momentum_buffer());
  }
  return InvalidArgument("parameter '" + name +
                         "': the state of this optimizer is not known; hand its tensors to "
                         "AddTensors");
}

}  // namespace

Result<TorchTensors> CollectTensors(const torch::nn::Module& module) {
  try {
    const torch::NoGradGuard no_grad;
    TorchTensors tensors;
    Collector collector(tensors);
    for (const auto& item : module.named_parameters()) {
      STOCKPOT_RETURN_IF_ERROR(collector.Add(item.key(), item.value()));
    }
    for (const auto& item : module.named_buffers()) {
      STOCKPOT_RETURN_IF_ERROR(collector.Add(item.key(), item.value()));
    }
    return tensors;
  } catch (const std::exception& error) {
    return Internal("while collecting the module's tensors: " + std::string(error.what()));
  }
}

Status AddTensors(const std::map<std::string, torch::Tensor>& tensors, const std::string& group,
                  TorchTensors& into) {
  try {
    const torch::NoGradGuard no_grad;
    Collector collector(into, group);
    for (const auto& [name, tensor] : tensors) {
      STOCKPOT_RETURN_IF_ERROR(collector.Add(name, tensor));
    }
    return OkStatus();
  } catch (const std::exception& error) {
    return Internal("while collecting group '" + group + "': " + error.what());
  }
}

Status AddOptimizer(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                    const std::string& group, TorchTensors& into) {
  try {
    const torch::NoGradGuard no_grad;
    Collector collector(into, group);
    std::map<const void*, std::string> names;  // by what an optimizer calls a parameter
    for (const auto& item : module.named_parameters()) {
      names.emplace(item.value().unsafeGetTensorImpl(), item.key());
    }
    for (const auto& [parameter, state] : optimizer.state()) {
      const auto named = names.find(parameter);
      if (named == names.end()) {
        return InvalidArgument("the optimizer has a parameter that is not the module's");
      }
      STOCKPOT_RETURN_IF_ERROR(AddParameterState(group + "/" + named->second, *state, collector));
    }
    return OkStatus();
  } catch (const std::exception& error) {
    return Internal("while collecting the optimizer's state: " + std::string(error.what()));
  }
}

StagingAllocator PinnedStaging() {
  if (!at::hasCUDA()) return nullptr;
  return [](int64_t bytes) -> std::shared_ptr<void> {
    try {
      auto block = std::make_shared<c10::DataPtr>(
          at::getHostAllocator(at::kCUDA)->allocate(static_cast<size_t>(bytes)));
      return {block, block->get()};
    } catch (const std::exception&) {
      return nullptr;
    }
  };
}

}  // namespace stockpot
