// torch.ops.stockpot.*: schemas and shape inference. The arithmetic stands in ops_cpu.cc and
// ops_cuda.cc, the gradients in ops_autograd.cc.
//
//   bitdelta_compress    kernels/bitdelta/compress.h
//   bitdelta_linear      kernels/bitdelta/linear.h
//   sparse_delta_linear  kernels/sparse/sparse_delta.h
//   lora_linear          kernels/lora/lora_linear.h
//   truncated_svd        kernels/svd/svd.h
//
// What each takes and returns, for Python: trainer_hooks/python/src/stockpot/ops.py.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

#include "kernels/torch_ops/op_checks.h"

namespace stockpot {
namespace {

at::Tensor New(const at::Tensor& like, std::vector<c10::SymInt> shape, at::ScalarType dtype) {
  return like.new_empty_symint(shape, like.options().dtype(dtype));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> CompressMeta(const at::Tensor& base,
                                                            const at::Tensor& fine_tuned) {
  CheckBitDeltaCompress(base, fine_tuned);
  const c10::SymInt d_out = base.sym_size(0), bytes = (base.sym_size(1) + 7) / 8;
  return {New(base, {d_out, bytes}, at::kByte), New(base, {d_out}, at::kFloat),
          New(base, {7}, at::kDouble)};
}

at::Tensor LinearMeta(const at::Tensor& x, const at::Tensor& base, const at::Tensor& signs,
                      const at::Tensor& alpha, const OptionalTensor& variant_of_row,
                      const OptionalTensor& bias, bool) {
  const BitDeltaSizes sizes = CheckBitDeltaLinear(x, base, signs, alpha, variant_of_row, bias);
  return New(x, OutputShape(x, sizes.d_out), x.scalar_type());
}

std::tuple<at::Tensor, at::Tensor> LinearBackwardMeta(const at::Tensor& grad, const at::Tensor& x,
                                                      const at::Tensor&, const at::Tensor&,
                                                      const at::Tensor& alpha,
                                                      const OptionalTensor&) {
  return {New(grad, x.sym_sizes().vec(), x.scalar_type()),
          New(grad, alpha.sym_sizes().vec(), alpha.scalar_type())};
}

at::Tensor SparseMeta(const at::Tensor& x, const at::Tensor& row_offsets, const at::Tensor& columns,
                      const at::Tensor& values, const OptionalTensor& delta_of_row) {
  const DeltaSizes sizes = CheckSparseDelta(x, row_offsets, columns, values, delta_of_row);
  return New(x, OutputShape(x, sizes.d_out), x.scalar_type());
}

at::Tensor LoraMeta(const at::Tensor& x, const at::Tensor& a, const at::Tensor& b, double,
                    const OptionalTensor& delta_of_row) {
  const DeltaSizes sizes = CheckLora(x, a, b, delta_of_row);
  return New(x, OutputShape(x, sizes.d_out), x.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> SvdMeta(
    const at::Tensor& fine_tuned, const OptionalTensor& base, int64_t rank, int64_t oversampling,
    int64_t iterations, int64_t, c10::string_view) {
  CheckTruncatedSvd(fine_tuned, base, {rank, oversampling, iterations});
  return {New(fine_tuned, {fine_tuned.sym_size(0), rank}, at::kFloat),
          New(fine_tuned, {rank}, at::kFloat),
          New(fine_tuned, {fine_tuned.sym_size(1), rank}, at::kFloat),
          fine_tuned.new_empty_symint({c10::SymInt(3)}, fine_tuned.options().dtype(at::kDouble))};
}

}  // namespace
}  // namespace stockpot

TORCH_LIBRARY(stockpot, m) {
  m.def(
      "bitdelta_compress(Tensor base, Tensor fine_tuned) -> "
      "(Tensor signs, Tensor alpha, Tensor stats)");
  m.def(
      "bitdelta_linear(Tensor x, Tensor base, Tensor signs, Tensor alpha, "
      "Tensor? variant_of_row=None, Tensor? bias=None, bool folded=False) -> Tensor");
  m.def(
      "bitdelta_linear_backward(Tensor grad, Tensor x, Tensor base, Tensor signs, Tensor alpha, "
      "Tensor? variant_of_row=None) -> (Tensor grad_x, Tensor grad_alpha)");
  m.def(
      "sparse_delta_linear(Tensor x, Tensor row_offsets, Tensor columns, Tensor values, "
      "Tensor? delta_of_row=None) -> Tensor");
  m.def(
      "lora_linear(Tensor x, Tensor a, Tensor b, float scale, Tensor? delta_of_row=None) -> "
      "Tensor");
  m.def(
      "truncated_svd(Tensor fine_tuned, Tensor? base, int rank, int oversampling=8, "
      "int iterations=2, int seed=0, str name=\"\") -> "
      "(Tensor u, Tensor s, Tensor v, Tensor report)");
}

TORCH_LIBRARY_IMPL(stockpot, Meta, m) {
  m.impl("bitdelta_compress", stockpot::CompressMeta);
  m.impl("bitdelta_linear", stockpot::LinearMeta);
  m.impl("bitdelta_linear_backward", stockpot::LinearBackwardMeta);
  m.impl("sparse_delta_linear", stockpot::SparseMeta);
  m.impl("lora_linear", stockpot::LoraMeta);
  m.impl("truncated_svd", stockpot::SvdMeta);
}
