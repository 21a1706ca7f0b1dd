// Gradients of torch.ops.stockpot.*: bitdelta_linear with respect to x, alpha and bias. The base is
// frozen and signs have no gradient; the other operators say that they have none.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "kernels/torch_ops/op_checks.h"

namespace stockpot {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor CallLinear(const at::Tensor& x, const at::Tensor& base, const at::Tensor& signs,
                      const at::Tensor& alpha, const OptionalTensor& variant_of_row,
                      const OptionalTensor& bias, bool folded) {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                 const OptionalTensor&, const OptionalTensor&, bool);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("stockpot::bitdelta_linear", "")
                             .typed<Signature>();
  return op.call(x, base, signs, alpha, variant_of_row, bias, folded);
}

std::tuple<at::Tensor, at::Tensor> CallBackward(const at::Tensor& grad, const at::Tensor& x,
                                                const at::Tensor& base, const at::Tensor& signs,
                                                const at::Tensor& alpha,
                                                const OptionalTensor& variant_of_row) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                       const at::Tensor&, const at::Tensor&,
                                                       const at::Tensor&, const OptionalTensor&);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("stockpot::bitdelta_linear_backward", "")
                             .typed<Signature>();
  return op.call(grad, x, base, signs, alpha, variant_of_row);
}

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& base,
                            const at::Tensor& signs, const at::Tensor& alpha,
                            const OptionalTensor& variant_of_row, const OptionalTensor& bias,
                            bool folded) {
    context->save_for_backward({x, base, signs, alpha, variant_of_row.value_or(at::Tensor())});
    if (bias.has_value()) context->saved_data["bias"] = bias->scalar_type();
    const at::AutoDispatchBelowADInplaceOrView below;
    return CallLinear(x, base, signs, alpha, variant_of_row, bias, folded);
  }

  // One gradient an argument of forward.
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& grad = grads[0];
    const OptionalTensor rows = saved[4].defined() ? OptionalTensor(saved[4]) : OptionalTensor();
    const auto [grad_x, grad_alpha] =
        CallBackward(grad, saved[0], saved[1], saved[2], saved[3], rows);
    at::Tensor grad_bias;
    const auto bias = context->saved_data.find("bias");
    if (bias != context->saved_data.end()) {
      std::vector<int64_t> dimensions;
      for (int64_t i = 0; i + 1 < grad.dim(); ++i) dimensions.push_back(i);
      grad_bias = dimensions.empty() ? grad : grad.sum(dimensions);
      grad_bias = grad_bias.to(bias->second.toScalarType());
    }
    return {grad_x, Variable(), Variable(), grad_alpha, Variable(), grad_bias, Variable()};
  }
};

at::Tensor LinearWithGradients(const at::Tensor& x, const at::Tensor& base, const at::Tensor& signs,
                               const at::Tensor& alpha, const OptionalTensor& variant_of_row,
                               const OptionalTensor& bias, bool folded) {
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && base.requires_grad()),
                    "bitdelta_linear: base: requires a gradient; the base is frozen, detach it");
  return LinearFunction::apply(x, base, signs, alpha, variant_of_row, bias, folded);
}

}  // namespace
}  // namespace stockpot

TORCH_LIBRARY_IMPL(stockpot, Autograd, m) {
  m.impl("bitdelta_linear", stockpot::LinearWithGradients);
  for (const char* name : {"bitdelta_compress", "bitdelta_linear_backward", "sparse_delta_linear",
                           "lora_linear", "truncated_svd"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}
