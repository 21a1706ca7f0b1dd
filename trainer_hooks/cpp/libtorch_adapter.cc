#include "trainer_hooks/cpp/libtorch_adapter.h"

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

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
  Status Add(const std::string& name, const torch::Tensor& tensor) {
    if (!tensor.defined()) return OkStatus();
    const std::optional<DType> dtype = DTypeOf(tensor.scalar_type());
    if (!dtype || tensor.layout() != torch::kStrided) {
      return InvalidArgument("tensor '" + name + "': a checkpoint cannot hold " +
                             std::string(torch::toString(tensor.scalar_type())));
    }
    TensorView view{.name = name, .dtype = *dtype, .shape = tensor.sizes().vec()};
    if (tensor.numel() > 0) {
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

  TorchTensors Take() { return std::move(result_); }

 private:
  std::map<Identity, std::string> names_;
  TorchTensors result_;
};

}  // namespace

Result<TorchTensors> CollectTensors(const torch::nn::Module& module) {
  try {
    const torch::NoGradGuard no_grad;
    Collector collector;
    for (const auto& item : module.named_parameters()) {
      STOCKPOT_RETURN_IF_ERROR(collector.Add(item.key(), item.value()));
    }
    for (const auto& item : module.named_buffers()) {
      STOCKPOT_RETURN_IF_ERROR(collector.Add(item.key(), item.value()));
    }
    return collector.Take();
  } catch (const std::exception& error) {
    return Internal("while collecting the module's tensors: " + std::string(error.what()));
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
