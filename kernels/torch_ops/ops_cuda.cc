// torch.ops.stockpot.* for CUDA tensors: launches the kernels on the current stream of the tensors'
// device. Results that the host must see (statistics, checked indices of a sparse delta, an SVD's
// convergence) wait for it. In a build without CUDA every operator says so.
//
// The signs are dealt into the tensor cores' tiles, and the table of variants is sent, in every
// call; a server that keeps variants resident uses the launchers directly.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "kernels/torch_ops/op_checks.h"

#if STOCKPOT_HAS_CUDA
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>

#include "kernels/bitdelta/compress_cuda.h"
#include "kernels/bitdelta/linear_cuda.h"
#include "kernels/bitdelta/sign_tiles_cuda.h"
#include "kernels/bitdelta/signs.h"
#include "kernels/lora/lora_linear_cuda.h"
#include "kernels/sparse/sparse_delta.h"
#include "kernels/sparse/sparse_delta_cuda.h"
#include "kernels/svd/svd_checks.h"
#include "kernels/torch_ops/dense_reference.h"
#include "kernels/torch_ops/svd_tensor.h"
#endif

namespace stockpot {
namespace {

#if STOCKPOT_HAS_CUDA

void* CurrentStream(const at::Tensor& t) {
  return c10::cuda::getCurrentCUDAStream(t.device().index()).stream();
}

// Bytes of host structures on t's device; the copy is done when this returns.
template <typename T>
at::Tensor ToDevice(const std::vector<T>& table, const at::Tensor& t) {
  const auto bytes = static_cast<int64_t>(table.size() * sizeof(T));
  at::Tensor host = at::empty({std::max<int64_t>(bytes, 1)}, at::kByte);
  std::memcpy(host.mutable_data_ptr<uint8_t>(), table.data(), static_cast<size_t>(bytes));
  return host.to(t.device());
}

at::Tensor FloatRows(const at::Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return x.reshape({rows, x.size(-1)}).to(at::kFloat).contiguous();
}

ConstFloatMatrix View(const at::Tensor& t) {
  return {t.const_data_ptr<float>(), t.size(0), t.size(1), t.size(1)};
}
FloatMatrix MutableView(at::Tensor& t) {
  return {t.mutable_data_ptr<float>(), t.size(0), t.size(1), t.size(1)};
}

// IndexOfRows on the device.
at::Tensor DeviceIndex(const RowIndexName& name, const OptionalTensor& index,
                       const at::Tensor& rows, int64_t deltas) {
  if (!index.has_value()) return at::zeros({rows.size(0)}, rows.options().dtype(at::kInt));
  IndexOfRows(name, index, rows.size(0), deltas);  // checks
  return index->to(at::kInt).contiguous();
}

at::Tensor Finish(const at::Tensor& y, const at::Tensor& x) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = y.size(1);
  return y.to(x.scalar_type()).reshape(shape);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> Compress(const at::Tensor& base,
                                                        const at::Tensor& fine_tuned) {
  CheckBitDeltaCompress(base, fine_tuned);
  const c10::DeviceGuard guard(base.device());
  const at::Tensor b = DenseRows(base), f = DenseRows(fine_tuned);
  const int64_t d_out = b.size(0), d_in = b.size(1);
  at::Tensor signs = at::empty({d_out, SignRowBytes(d_in)}, b.options().dtype(at::kByte));
  at::Tensor rows = at::empty({d_out * static_cast<int64_t>(sizeof(CompressedRow))},
                              b.options().dtype(at::kByte));
  RaiseUnlessOk("bitdelta_compress",
                LaunchBitDeltaCompressCuda(
                    {.base = WeightView(b),
                     .fine_tuned = WeightView(f),
                     .signs = signs.mutable_data_ptr<uint8_t>(),
                     .rows = reinterpret_cast<CompressedRow*>(rows.mutable_data_ptr<uint8_t>())},
                    CurrentStream(b)));
  const at::Tensor host = rows.cpu();
  std::vector<CompressedRow> summed(static_cast<size_t>(d_out));
  std::memcpy(summed.data(), host.const_data_ptr<uint8_t>(), static_cast<size_t>(host.numel()));
  at::Tensor alpha = at::empty({d_out}, at::kFloat);
  const DeltaStats stats =
      FinishCompress(summed, d_in, {alpha.mutable_data_ptr<float>(), static_cast<size_t>(d_out)});
  const at::Tensor report =
      at::tensor({static_cast<double>(stats.elements), static_cast<double>(stats.changed),
                  static_cast<double>(stats.non_finite), stats.sum_abs, stats.sum_square,
                  static_cast<double>(stats.max_abs), stats.OneBitError()},
                 at::kDouble);
  return {signs, alpha.to(b.device()), report.to(b.device())};
}

at::Tensor Linear(const at::Tensor& x, const at::Tensor& base, const at::Tensor& signs,
                  const at::Tensor& alpha, const OptionalTensor& variant_of_row,
                  const OptionalTensor& bias, bool folded) {
  const BitDeltaSizes sizes = CheckBitDeltaLinear(x, base, signs, alpha, variant_of_row, bias);
  const c10::DeviceGuard guard(x.device());
  if (x.scalar_type() == at::kDouble) {
    return DenseBitDeltaLinear(x, base, signs, alpha, variant_of_row, bias);
  }
  const at::Tensor rows = FloatRows(x), weight = DenseRows(base);
  const int64_t d_out = weight.size(0), d_in = weight.size(1);
  at::Tensor y = at::empty({rows.size(0), d_out}, rows.options());
  const int64_t planes = sizes.planes.expect_int(), variants = sizes.variants.expect_int();
  const at::Tensor index = DeviceIndex(kVariantOfRow, variant_of_row, rows, variants);
  if (y.numel() == 0) return Finish(y, x);
  const at::Tensor bits = signs.contiguous(), scales = alpha.to(at::kFloat).contiguous();
  const int64_t plane_words = SignTileWords(d_out, d_in);
  at::Tensor words = at::empty({variants * planes * plane_words}, rows.options().dtype(at::kInt));
  auto* tiles = reinterpret_cast<uint32_t*>(words.mutable_data_ptr<int32_t>());
  RaiseUnlessOk("bitdelta_linear", LaunchPackSignTilesCuda({.planes = variants * planes,
                                                            .d_out = d_out,
                                                            .d_in = d_in,
                                                            .signs = bits.const_data_ptr<uint8_t>(),
                                                            .words = tiles},
                                                           CurrentStream(x)));
  std::vector<CudaLayerDelta> table;
  for (int64_t v = 0; v < variants; ++v) {
    table.push_back({.signs = tiles + v * planes * plane_words,
                     .alpha = scales.const_data_ptr<float>() + v * planes * d_out,
                     .planes = static_cast<int32_t>(planes)});
  }
  const at::Tensor device_table = ToDevice(table, x);
  const at::Tensor offset = bias.has_value() ? bias->to(at::kFloat).contiguous() : at::Tensor();
  CudaLinearArgs args{
      .x = View(rows),
      .base = WeightView(weight),
      .bias = bias.has_value() ? offset.const_data_ptr<float>() : nullptr,
      .variants = reinterpret_cast<const CudaLayerDelta*>(device_table.const_data_ptr<uint8_t>()),
      .variant_count = variants,
      .variant_of_row = index.const_data_ptr<int32_t>(),
      .max_planes = static_cast<int32_t>(planes),
      .allow_folded = folded,
      .y = MutableView(y)};
  at::Tensor order, row_tiles;
  if (rows.size(0) > kCudaDecodeRows) {  // tiles of one variant pay for the host's look at the rows
    const at::Tensor host = index.cpu();
    const CudaRowPlan plan = PlanCudaRows(
        rows.size(0), {host.const_data_ptr<int32_t>(), static_cast<size_t>(host.numel())});
    order = ToDevice(plan.order, x);
    row_tiles = ToDevice(plan.tiles, x);
    args.order = reinterpret_cast<const int32_t*>(order.const_data_ptr<uint8_t>());
    args.tiles = reinterpret_cast<const CudaRowTile*>(row_tiles.const_data_ptr<uint8_t>());
    args.tile_count = static_cast<int64_t>(plan.tiles.size());
    args.segments = plan.segments;
  }
  RaiseUnlessOk("bitdelta_linear", LaunchBitDeltaLinearCuda(args, CurrentStream(x)));
  return Finish(y, x);
}

std::tuple<at::Tensor, at::Tensor> LinearBackward(const at::Tensor& grad, const at::Tensor& x,
                                                  const at::Tensor& base, const at::Tensor& signs,
                                                  const at::Tensor& alpha,
                                                  const OptionalTensor& variant_of_row) {
  const c10::DeviceGuard guard(x.device());
  return DenseBitDeltaBackward(grad, x, base, signs, alpha, variant_of_row);
}

// The kernel trusts its arrays, so they are checked on the host first.
void CheckSparseArrays(const at::Tensor& offsets, const at::Tensor& columns,
                       const at::Tensor& values, int64_t d_in) {
  const at::Tensor o = offsets.cpu(), c = columns.cpu(), w = values.cpu();
  const int64_t ends = o.size(1), d_out = ends - 1;
  const std::span<const int32_t> places{c.const_data_ptr<int32_t>(),
                                        static_cast<size_t>(c.numel())};
  for (int64_t v = 0; v < o.size(0); ++v) {
    const int64_t* own = o.const_data_ptr<int64_t>() + v * ends;
    CheckSparseParts(v, {own, static_cast<size_t>(ends)}, places, d_in);
    std::vector<int64_t> relative(own, own + ends);
    for (int64_t& offset : relative) offset -= own[0];
    const auto length = static_cast<size_t>(own[d_out] - own[0]);
    RaiseUnlessOk("sparse_delta_linear",
                  SparseDelta::FromElements(
                      d_out, d_in, relative,
                      {reinterpret_cast<const uint32_t*>(places.data()) + own[0], length},
                      {w.const_data_ptr<float>() + own[0], length})
                      .status());
  }
}

at::Tensor Sparse(const at::Tensor& x, const at::Tensor& row_offsets, const at::Tensor& columns,
                  const at::Tensor& values, const OptionalTensor& delta_of_row) {
  CheckSparseDelta(x, row_offsets, columns, values, delta_of_row);
  const c10::DeviceGuard guard(x.device());
  const at::Tensor rows = FloatRows(x);
  const at::Tensor offsets =
      (row_offsets.dim() == 2 ? row_offsets : row_offsets.unsqueeze(0)).contiguous();
  const at::Tensor places = columns.contiguous(), numbers = values.contiguous();
  CheckSparseArrays(offsets, places, numbers, rows.size(1));
  const int64_t ends = offsets.size(1);
  std::vector<CudaSparseDelta> table;
  for (int64_t v = 0; v < offsets.size(0); ++v) {  // offsets count from the start of all elements
    table.push_back({.row_offsets = offsets.const_data_ptr<int64_t>() + v * ends,
                     .columns = reinterpret_cast<const uint32_t*>(places.const_data_ptr<int32_t>()),
                     .values = numbers.const_data_ptr<float>()});
  }
  const at::Tensor device_table = ToDevice(table, x);
  const at::Tensor index = DeviceIndex(kSparseDeltaOfRow, delta_of_row, rows, offsets.size(0));
  at::Tensor y = at::zeros({rows.size(0), ends - 1}, rows.options());
  RaiseUnlessOk("sparse_delta_linear",
                LaunchSparseDeltaLinearCuda({.x = View(rows),
                                             .deltas = reinterpret_cast<const CudaSparseDelta*>(
                                                 device_table.const_data_ptr<uint8_t>()),
                                             .delta_count = offsets.size(0),
                                             .delta_of_row = index.const_data_ptr<int32_t>(),
                                             .y = MutableView(y)},
                                            CurrentStream(x)));
  return Finish(y, x);
}

at::Tensor Lora(const at::Tensor& x, const at::Tensor& a, const at::Tensor& b, double scale,
                const OptionalTensor& delta_of_row) {
  CheckLora(x, a, b, delta_of_row);
  const c10::DeviceGuard guard(x.device());
  const at::Tensor rows = FloatRows(x);
  const at::Tensor all_a = (a.dim() == 3 ? a : a.unsqueeze(0)).contiguous();
  const at::Tensor all_b =
      (b.dim() == 3 ? b : b.unsqueeze(0)).to(at::kFloat).mul(scale).transpose(1, 2).contiguous();
  std::vector<at::Tensor> keep;
  std::vector<CudaLoraDelta> table;
  for (int64_t v = 0; v < all_a.size(0); ++v) {
    keep.push_back(all_a[v]);
    const WeightMatrix one_a = WeightView(keep.back());
    keep.push_back(all_b[v]);
    table.push_back({.a = one_a, .b = WeightView(keep.back())});
  }
  const at::Tensor device_table = ToDevice(table, x);
  const at::Tensor index = DeviceIndex(kLoraDeltaOfRow, delta_of_row, rows, all_a.size(0));
  at::Tensor hidden = at::empty({rows.size(0), all_a.size(1)}, rows.options());
  at::Tensor y = at::zeros({rows.size(0), all_b.size(2)}, rows.options());
  RaiseUnlessOk(
      "lora_linear",
      LaunchLoraLinearCuda(
          {.x = View(rows),
           .deltas = reinterpret_cast<const CudaLoraDelta*>(device_table.const_data_ptr<uint8_t>()),
           .delta_count = all_a.size(0),
           .delta_of_row = index.const_data_ptr<int32_t>(),
           .hidden = MutableView(hidden),
           .y = MutableView(y)},
          CurrentStream(x)));
  return Finish(y, x);
}

// By the tensors' own library, so that one process needs one cuSOLVER.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> TruncatedSvd(
    const at::Tensor& fine_tuned, const OptionalTensor& base, int64_t rank, int64_t oversampling,
    int64_t iterations, int64_t seed, c10::string_view name) {
  CheckTruncatedSvd(fine_tuned, base, {rank, oversampling, iterations});
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard guard(fine_tuned.device());
  at::Tensor delta = fine_tuned.to(at::kFloat, false, true).contiguous();
  if (base.has_value()) delta.sub_(*base);
  const SvdArgs named{.name = {name.data(), name.size()}, .fine_tuned = {}};
  if (!delta.isfinite().all().item<bool>()) {
    RaiseUnlessOk("truncated_svd",
                  SvdError(named, "fine_tuned, base or their difference holds NaN or infinity"));
  }
  const double norm =
      at::linalg_vector_norm(delta, 2, std::nullopt, false, at::kDouble).item<double>();
  const double energy = norm * norm;
  RaiseUnlessOk("truncated_svd", CheckSvdEnergy(named, energy));
  auto svd = SubspaceSvd(delta, energy, named.name,
                         {.rank = rank,
                          .oversampling = oversampling,
                          .iterations = static_cast<int>(iterations),
                          .seed = static_cast<uint64_t>(seed)});
  RaiseUnlessOk("truncated_svd", svd.status());
  if (svd->u.numel() > 0) {  // the sign convention of svd.h
    const at::Tensor largest = svd->u.gather(0, svd->u.abs().argmax(0, true));
    const at::Tensor sign = at::where(largest.lt(0), -1.0, 1.0).to(at::kFloat);
    svd->u.mul_(sign);
    svd->v.mul_(sign);
  }
  const double kept = svd->s.to(at::kDouble).square().sum().item<double>();
  const at::Tensor report = at::tensor(
      {energy, energy > 0 ? std::min(1.0, kept / energy) : 1.0, svd->relative_error}, at::kDouble);
  return {svd->u, svd->s, svd->v, report.to(delta.device())};
}

#else

[[noreturn]] void RaiseAbsent() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "Unavailable: this libstockpot_torch_ops was built without CUDA; move "
      "the tensors to the CPU or build with STOCKPOT_CUDA=ON");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> Compress(const at::Tensor&, const at::Tensor&) {
  RaiseAbsent();
}
at::Tensor Linear(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                  const OptionalTensor&, const OptionalTensor&, bool) {
  RaiseAbsent();
}
std::tuple<at::Tensor, at::Tensor> LinearBackward(const at::Tensor&, const at::Tensor&,
                                                  const at::Tensor&, const at::Tensor&,
                                                  const at::Tensor&, const OptionalTensor&) {
  RaiseAbsent();
}
at::Tensor Sparse(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                  const OptionalTensor&) {
  RaiseAbsent();
}
at::Tensor Lora(const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                const OptionalTensor&) {
  RaiseAbsent();
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> TruncatedSvd(const at::Tensor&,
                                                                        const OptionalTensor&,
                                                                        int64_t, int64_t, int64_t,
                                                                        int64_t, c10::string_view) {
  RaiseAbsent();
}

#endif

}  // namespace
}  // namespace stockpot

TORCH_LIBRARY_IMPL(stockpot, CUDA, m) {
  m.impl("bitdelta_compress", stockpot::Compress);
  m.impl("bitdelta_linear", stockpot::Linear);
  m.impl("bitdelta_linear_backward", stockpot::LinearBackward);
  m.impl("sparse_delta_linear", stockpot::Sparse);
  m.impl("lora_linear", stockpot::Lora);
  m.impl("truncated_svd", stockpot::TruncatedSvd);
}
