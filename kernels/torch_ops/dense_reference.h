// bitdelta_linear and its gradients by dense products of LibTorch, for tensors of any device and
// dtype: the float64 path of the operator (gradcheck wants one), and the backward pass.
// Unpacks one sign plane of one variant at a time: one [d_out, d_in] matrix of x's dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "kernels/torch_ops/op_checks.h"

namespace stockpot {

// The arguments have passed CheckBitDeltaLinear and are of x's device. y [..., d_out] of x's dtype.
// ValueError: an index of variant_of_row outside [-1, variants).
at::Tensor DenseBitDeltaLinear(const at::Tensor& x, const at::Tensor& base, const at::Tensor& signs,
                               const at::Tensor& alpha, const OptionalTensor& variant_of_row,
                               const OptionalTensor& bias);

// grad_x = g W + sum_p (g * alpha_p) S_p;  grad_alpha[v, p, o] = sum over v's rows of
// g[t, o] (S_p x[t])[o]. In float32, or float64 where x is; rounded once to x's and alpha's dtypes.
std::tuple<at::Tensor, at::Tensor> DenseBitDeltaBackward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& base, const at::Tensor& signs,
    const at::Tensor& alpha, const OptionalTensor& variant_of_row);

}  // namespace stockpot
