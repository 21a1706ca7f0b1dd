#include "kernels/torch_ops/dense_reference.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace stockpot {
namespace {

// +1 / -1 matrix [d_out, d_in] of canonical signs [d_out, ceil(d_in / 8)].
at::Tensor UnpackSigns(const at::Tensor& signs, int64_t d_in, at::ScalarType dtype) {
  const at::Tensor shifts = at::arange(8, signs.options());
  const at::Tensor bits = signs.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and(1);
  return bits.flatten(1).narrow(1, 0, d_in).to(dtype).mul_(2).sub_(1);
}

// Signs as [variants, planes, d_out, bytes], alpha as [variants, planes, d_out].
at::Tensor Stacked(at::Tensor t, int64_t dimensions) {
  while (t.dim() < dimensions) t = t.unsqueeze(0);
  return t;
}

// Calls body(variant, its rows as an int64 index, or nothing for all rows).
template <typename Body>
void ForVariants(int64_t variants, const OptionalTensor& variant_of_row, const Body& body) {
  if (!variant_of_row.has_value()) return body(0, OptionalTensor());
  IndexOfRows(kVariantOfRow, variant_of_row, variant_of_row->numel(), variants);  // checks
  const at::Tensor index = variant_of_row->to(at::kLong);
  for (int64_t v = 0; v < variants; ++v) {
    const at::Tensor rows = index.eq(v).nonzero().squeeze(1);
    if (rows.numel() > 0) body(v, OptionalTensor(rows));
  }
}

at::Tensor Select(const at::Tensor& t, const OptionalTensor& rows) {
  return rows.has_value() ? t.index_select(0, *rows) : t;
}

void AddTo(at::Tensor& t, const OptionalTensor& rows, const at::Tensor& part) {
  if (rows.has_value()) {
    t.index_add_(0, *rows, part);
  } else {
    t.add_(part);
  }
}

at::ScalarType WorkType(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

at::Tensor DenseBitDeltaLinear(const at::Tensor& x, const at::Tensor& base, const at::Tensor& signs,
                               const at::Tensor& alpha, const OptionalTensor& variant_of_row,
                               const OptionalTensor& bias) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = WorkType(x);
  const int64_t d_out = base.size(0), d_in = base.size(1);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = d_out;
  int64_t count = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) count *= x.size(i);
  const at::Tensor rows_of_x = x.reshape({count, d_in}).to(type);
  at::Tensor y = at::mm(rows_of_x, base.to(type).t());
  if (bias.has_value()) y.add_(bias->to(type));
  const at::Tensor all_signs = Stacked(signs, 4), scales = Stacked(alpha, 3).to(type);
  ForVariants(all_signs.size(0), variant_of_row, [&](int64_t v, const OptionalTensor& rows) {
    const at::Tensor part = Select(rows_of_x, rows);
    for (int64_t p = 0; p < all_signs.size(1); ++p) {
      const at::Tensor s = UnpackSigns(all_signs[v][p], d_in, type);
      AddTo(y, rows, at::mm(part, s.t()).mul_(scales[v][p]));
    }
  });
  return y.to(x.scalar_type()).reshape(shape);
}

std::tuple<at::Tensor, at::Tensor> DenseBitDeltaBackward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& base, const at::Tensor& signs,
    const at::Tensor& alpha, const OptionalTensor& variant_of_row) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = WorkType(x);
  const int64_t d_out = base.size(0), d_in = base.size(1);
  const int64_t count = d_out > 0 ? grad.numel() / d_out : (d_in > 0 ? x.numel() / d_in : 0);
  const at::Tensor g = grad.reshape({count, d_out}).to(type);
  const at::Tensor rows_of_x = x.reshape({count, d_in}).to(type);
  at::Tensor grad_x = at::mm(g, base.to(type));
  const at::Tensor all_signs = Stacked(signs, 4), scales = Stacked(alpha, 3).to(type);
  at::Tensor grad_alpha = at::zeros_like(scales, at::MemoryFormat::Contiguous);
  ForVariants(all_signs.size(0), variant_of_row, [&](int64_t v, const OptionalTensor& rows) {
    const at::Tensor part_g = Select(g, rows), part_x = Select(rows_of_x, rows);
    for (int64_t p = 0; p < all_signs.size(1); ++p) {
      const at::Tensor s = UnpackSigns(all_signs[v][p], d_in, type);
      AddTo(grad_x, rows, at::mm(part_g * scales[v][p], s));
      grad_alpha[v][p].copy_((part_g * at::mm(part_x, s.t())).sum(0));
    }
  });
  return {grad_x.reshape(x.sizes()).to(x.scalar_type()),
          grad_alpha.reshape(alpha.sizes()).to(alpha.scalar_type())};
}

}  // namespace stockpot
