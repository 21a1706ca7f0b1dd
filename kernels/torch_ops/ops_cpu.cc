// torch.ops.stockpot.* for CPU tensors: lends them to the kernels as views.
//
// Activations are lifted to float32 (bitdelta_linear takes bfloat16 as it is) and the result is
// rounded once to x's dtype. A packed layout of the signs that rows use (or of a delta) is made in
// every call, by all threads, which one token notices (BENCHMARKS.md); a server that keeps variants
// resident uses the kernels directly.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "kernels/bitdelta/compress.h"
#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/signs.h"
#include "kernels/lora/lora_linear.h"
#include "kernels/sparse/sparse_delta.h"
#include "kernels/svd/svd.h"
#include "kernels/torch_ops/dense_reference.h"
#include "kernels/torch_ops/op_checks.h"

namespace stockpot {
namespace {

constexpr int64_t kMostPlainWork = int64_t{1} << 16;  // multiply-adds worth one thread only

// Threads of one call; starting them costs some ten microseconds.
ThreadPool MakeThreads(int64_t work) {
  const bool plain = work < kMostPlainWork || at::in_parallel_region();
  return ThreadPool(plain ? 1 : at::get_num_threads());
}

at::Tensor Rows(const at::Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return x.reshape({rows, x.size(-1)});
}

at::Tensor FloatRows(const at::Tensor& x) { return Rows(x).to(at::kFloat).contiguous(); }

ConstFloatMatrix View(const at::Tensor& t) {
  return {t.const_data_ptr<float>(), t.size(0), t.size(1), t.size(1)};
}
FloatMatrix MutableView(at::Tensor& t) {
  return {t.mutable_data_ptr<float>(), t.size(0), t.size(1), t.size(1)};
}

// The variants that some row uses, ascending; `index` of rows becomes one into these.
std::vector<int64_t> KeepUsed(std::vector<int32_t>& index) {
  std::map<int32_t, int32_t> place;
  for (const int32_t v : index) {
    if (v >= 0) place[v] = 0;
  }
  std::vector<int64_t> kept;
  for (auto& [v, at] : place) {
    at = static_cast<int32_t>(kept.size());
    kept.push_back(v);
  }
  for (int32_t& v : index) {
    if (v >= 0) v = place[v];
  }
  return kept;
}

at::Tensor Finish(const at::Tensor& y, const at::Tensor& x) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = y.size(1);
  return y.to(x.scalar_type()).reshape(shape);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> Compress(const at::Tensor& base,
                                                        const at::Tensor& fine_tuned) {
  CheckBitDeltaCompress(base, fine_tuned);
  const at::Tensor b = DenseRows(base), f = DenseRows(fine_tuned);
  const int64_t d_out = b.size(0), d_in = b.size(1);
  at::Tensor signs = at::empty({d_out, SignRowBytes(d_in)}, b.options().dtype(at::kByte));
  at::Tensor alpha = at::empty({d_out}, b.options().dtype(at::kFloat));
  ThreadPool threads = MakeThreads(b.numel());
  const Result<DeltaStats> stats = BitDeltaCompressCpu(
      {.base = WeightView(b),
       .fine_tuned = WeightView(f),
       .signs = {signs.mutable_data_ptr<uint8_t>(), static_cast<size_t>(signs.numel())},
       .alpha = {alpha.mutable_data_ptr<float>(), static_cast<size_t>(d_out)}},
      threads);
  RaiseUnlessOk("bitdelta_compress", stats.status());
  const double numbers[] = {static_cast<double>(stats->elements),
                            static_cast<double>(stats->changed),
                            static_cast<double>(stats->non_finite),
                            stats->sum_abs,
                            stats->sum_square,
                            stats->max_abs,
                            stats->OneBitError()};
  at::Tensor report = at::empty({7}, at::kDouble);
  std::memcpy(report.mutable_data_ptr<double>(), numbers, sizeof numbers);
  return {signs, alpha, report};
}

// One PackedSigns for each of `variants`.
std::vector<PackedSigns> Pack(const at::Tensor& signs, const at::Tensor& alpha, int64_t d_in,
                              const std::vector<int64_t>& variants, ThreadPool& threads) {
  const int64_t d_out = signs.size(-2);
  const int64_t planes = signs.dim() >= 3 ? signs.size(-3) : 1;
  std::vector<PackedSigns> packed;
  for (const int64_t v : variants) {
    const bool stacked = signs.dim() == 4;
    const at::Tensor bits = (stacked ? signs[v] : signs).contiguous();
    const at::Tensor scales = (stacked ? alpha[v] : alpha).to(at::kFloat).contiguous();
    auto one = PackedSigns::Pack(
        d_out, d_in, {bits.const_data_ptr<uint8_t>(), static_cast<size_t>(bits.numel())},
        {scales.const_data_ptr<float>(), static_cast<size_t>(scales.numel())}, planes, &threads);
    RaiseUnlessOk("bitdelta_linear", one.status());
    packed.push_back(std::move(*one));
  }
  return packed;
}

at::Tensor Linear(const at::Tensor& x, const at::Tensor& base, const at::Tensor& signs,
                  const at::Tensor& alpha, const OptionalTensor& variant_of_row,
                  const OptionalTensor& bias, bool folded) {
  const BitDeltaSizes sizes = CheckBitDeltaLinear(x, base, signs, alpha, variant_of_row, bias);
  if (x.scalar_type() == at::kDouble) {
    return DenseBitDeltaLinear(x, base, signs, alpha, variant_of_row, bias);
  }
  const bool takes_bf16 = x.scalar_type() == at::kBFloat16;
  const at::Tensor rows = takes_bf16 ? Rows(x).contiguous() : FloatRows(x);
  const at::Tensor weight = DenseRows(base);
  at::Tensor y = at::empty({rows.size(0), weight.size(0)}, rows.options().dtype(at::kFloat));
  std::vector<int32_t> index =
      IndexOfRows(kVariantOfRow, variant_of_row, rows.size(0), sizes.variants.expect_int());
  if (y.numel() == 0) return Finish(y, x);
  const at::Tensor offset = bias.has_value() ? bias->to(at::kFloat).contiguous() : at::Tensor();
  ThreadPool threads = MakeThreads(rows.numel() * weight.size(0));
  const std::vector<PackedSigns> packed =
      Pack(signs, alpha, weight.size(1), KeepUsed(index), threads);
  std::vector<LayerDelta> variants;
  for (const PackedSigns& one : packed) variants.push_back({.signs = &one});
  const std::vector<DeltaSum> sums(index.size(), folded ? DeltaSum::kFolded : DeltaSum::kApart);
  const LinearOutput output{.base = WeightView(weight),
                            .bias = bias.has_value() ? offset.const_data_ptr<float>() : nullptr,
                            .variants = variants,
                            .y = MutableView(y)};
  LinearScratch scratch;
  RaiseUnlessOk("bitdelta_linear",
                BitDeltaLinearCpu({.x = {rows.const_data_ptr(), DTypeOf(rows), rows.size(0),
                                         rows.size(1), rows.size(1)},
                                   .outputs = {&output, 1},
                                   .variant_of_row = index,
                                   .sum_of_row = sums},
                                  scratch, threads));
  return Finish(y, x);
}

at::Tensor Sparse(const at::Tensor& x, const at::Tensor& row_offsets, const at::Tensor& columns,
                  const at::Tensor& values, const OptionalTensor& delta_of_row) {
  CheckSparseDelta(x, row_offsets, columns, values, delta_of_row);
  const at::Tensor rows = FloatRows(x), offsets = row_offsets.contiguous();
  const at::Tensor places = columns.contiguous(), numbers = values.contiguous();
  const int64_t ends = offsets.size(-1), d_out = ends - 1, changed = places.size(0);
  const int64_t count = offsets.dim() == 2 ? offsets.size(0) : 1;
  std::vector<SparseDelta> deltas;
  for (int64_t v = 0; v < count; ++v) {
    const int64_t* own = offsets.const_data_ptr<int64_t>() + v * ends;
    CheckSparseParts(v, {own, static_cast<size_t>(ends)},
                     {places.const_data_ptr<int32_t>(), static_cast<size_t>(changed)},
                     rows.size(1));
    const int64_t first = own[0], last = own[d_out];
    std::vector<int64_t> relative(own, own + ends);
    for (int64_t& offset : relative) offset -= first;
    const auto length = static_cast<size_t>(last - first);
    auto delta = SparseDelta::FromElements(
        d_out, rows.size(1), relative,
        {reinterpret_cast<const uint32_t*>(places.const_data_ptr<int32_t>()) + first, length},
        {numbers.const_data_ptr<float>() + first, length});
    RaiseUnlessOk("sparse_delta_linear", delta.status());
    deltas.push_back(std::move(*delta));
  }
  std::vector<const SparseDelta*> table;
  for (const SparseDelta& delta : deltas) table.push_back(&delta);
  const std::vector<int32_t> index =
      IndexOfRows(kSparseDeltaOfRow, delta_of_row, rows.size(0), count);
  at::Tensor y = at::zeros({rows.size(0), d_out}, rows.options());
  ThreadPool threads = MakeThreads(rows.size(0) * changed);
  SparseScratch scratch;
  RaiseUnlessOk("sparse_delta_linear",
                SparseDeltaLinearCpu(
                    {.x = View(rows), .deltas = table, .delta_of_row = index, .y = MutableView(y)},
                    scratch, threads));
  return Finish(y, x);
}

at::Tensor Lora(const at::Tensor& x, const at::Tensor& a, const at::Tensor& b, double scale,
                const OptionalTensor& delta_of_row) {
  CheckLora(x, a, b, delta_of_row);
  const at::Tensor rows = FloatRows(x);
  const at::Tensor all_a = a.dim() == 3 ? a : a.unsqueeze(0);
  const at::Tensor all_b = b.dim() == 3 ? b : b.unsqueeze(0);
  std::vector<int32_t> index =
      IndexOfRows(kLoraDeltaOfRow, delta_of_row, rows.size(0), all_a.size(0));
  std::vector<LoraDelta> deltas;
  for (const int64_t v : KeepUsed(index)) {
    const at::Tensor one_a = DenseRows(all_a[v]), one_b = DenseRows(all_b[v]);
    auto delta = LoraDelta::Pack(WeightView(one_a), WeightView(one_b), static_cast<float>(scale));
    RaiseUnlessOk("lora_linear", delta.status());
    deltas.push_back(std::move(*delta));
  }
  std::vector<const LoraDelta*> table;
  for (const LoraDelta& delta : deltas) table.push_back(&delta);
  at::Tensor y = at::zeros({rows.size(0), all_b.size(1)}, rows.options());
  ThreadPool threads = MakeThreads(rows.size(0) * (a.numel() + b.numel()));
  LoraScratch scratch;
  RaiseUnlessOk(
      "lora_linear",
      LoraLinearCpu({.x = View(rows), .deltas = table, .delta_of_row = index, .y = MutableView(y)},
                    scratch, threads));
  return Finish(y, x);
}

at::Tensor Owned(const std::vector<float>& values, std::vector<int64_t> shape) {
  at::Tensor t = at::empty(shape, at::kFloat);
  std::copy(values.begin(), values.end(), t.mutable_data_ptr<float>());
  return t;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> TruncatedSvd(
    const at::Tensor& fine_tuned, const OptionalTensor& base, int64_t rank, int64_t oversampling,
    int64_t iterations, int64_t seed, c10::string_view name) {
  CheckTruncatedSvd(fine_tuned, base, {rank, oversampling, iterations});
  const at::Tensor tuned = DenseRows(fine_tuned);
  const at::Tensor other = base.has_value() ? DenseRows(*base) : at::Tensor();
  const WeightMatrix base_view = base.has_value() ? WeightView(other) : WeightMatrix{};
  const Result<Svd> svd = TruncatedSvdCpu({.name = {name.data(), name.size()},
                                           .fine_tuned = WeightView(tuned),
                                           .base = base.has_value() ? &base_view : nullptr},
                                          {.rank = rank,
                                           .oversampling = oversampling,
                                           .iterations = static_cast<int>(iterations),
                                           .seed = static_cast<uint64_t>(seed)});
  RaiseUnlessOk("truncated_svd", svd.status());
  at::Tensor report = at::empty({3}, at::kDouble);
  double* numbers = report.mutable_data_ptr<double>();
  numbers[0] = svd->energy;
  numbers[1] = svd->captured;
  numbers[2] = svd->relative_error;
  return {Owned(svd->u, {svd->rows, rank}), Owned(svd->s, {rank}), Owned(svd->v, {svd->cols, rank}),
          report};
}

}  // namespace
}  // namespace stockpot

TORCH_LIBRARY_IMPL(stockpot, CPU, m) {
  m.impl("bitdelta_compress", stockpot::Compress);
  m.impl("bitdelta_linear", stockpot::Linear);
  m.impl("bitdelta_linear_backward", stockpot::DenseBitDeltaBackward);
  m.impl("sparse_delta_linear", stockpot::Sparse);
  m.impl("lora_linear", stockpot::Lora);
  m.impl("truncated_svd", stockpot::TruncatedSvd);
}
