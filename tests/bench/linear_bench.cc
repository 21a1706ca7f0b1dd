// bitdelta_linear beside its yardsticks: base only, at::linear on the same base, B dense weights,
// the memory's own rate of reading. Decode shapes rotate over more than 512 MB of weights.
//
//   linear_bench [--quick] [--only SUBSTRING] [--threads N] [--raw FOLDER]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/bitdelta/linear.h"
#include "tests/bench/bench.h"
#include "tests/bench/memory_read.h"
#include "tests/bench/weights.h"

namespace stockpot {
namespace {

using Better = Budget::Better;

constexpr int64_t kMostVariants = 14;
constexpr int64_t kPrefillRows = 512;
constexpr float kAlpha = 1e-3f;

// The variant of batch row t.
using VariantOfRow = int32_t (*)(int64_t t);
constexpr int32_t BaseOnly(int64_t) { return -1; }
constexpr int32_t OwnVariant(int64_t t) { return static_cast<int32_t>(t); }
constexpr int32_t OneVariant(int64_t) { return 0; }

// Bases and their variants, each made when it is first asked for.
class Layers {
 public:
  RotatingWeights& bf16() {
    if (!bf16_) bf16_.emplace(DType::kBF16);
    return *bf16_;
  }
  RotatingWeights& fp32() {
    if (!fp32_) fp32_.emplace(DType::kF32);
    return *fp32_;
  }

  // Variants [0, count) of every base: a table for each.
  std::vector<std::vector<LayerDelta>> Variants(int64_t count, int64_t planes) {
    std::vector<std::vector<LayerDelta>> tables(static_cast<size_t>(bf16().size()));
    for (int64_t v = 0; v < count; ++v) {
      for (size_t copy = 0; copy < tables.size(); ++copy) {
        tables[copy].push_back({.signs = &Signs(copy, v, planes)});
      }
    }
    return tables;
  }

 private:
  const PackedSigns& Signs(size_t copy, int64_t variant, int64_t planes) {
    auto& made = planes == 1 ? one_plane_ : two_planes_;
    made.resize(static_cast<size_t>(bf16().size()));
    auto& of_copy = made[copy];
    while (static_cast<int64_t>(of_copy.size()) <= variant) {
      const std::vector<float> alpha(static_cast<size_t>(planes * kBenchDOut), kAlpha);
      of_copy.push_back(std::make_unique<PackedSigns>(
          PackedSigns::Pack(kBenchDOut, kBenchDIn, RandomSigns(copy * 100 + of_copy.size(), planes),
                            alpha, planes)
              .value()));
    }
    return *of_copy[static_cast<size_t>(variant)];
  }

  std::optional<RotatingWeights> bf16_, fp32_;
  std::vector<std::vector<std::unique_ptr<PackedSigns>>> one_plane_,
      two_planes_;  // [copy][variant]
};

class LinearBench {
 public:
  explicit LinearBench(const BenchReport& report)
      : report_(report), threads_(report.options().threads) {
    at::set_num_threads(report.options().threads);
  }

  void Decode();
  void Prefill();

 private:
  // Our kernel over the first `copies` bases, `rows` tokens each.
  struct Ours {
    int64_t rows = 1;
    int64_t copies = 1;
    VariantOfRow variant = BaseOnly;
    int64_t planes = 1;
    DeltaSum sum = DeltaSum::kApart;
    DType x = DType::kF32;
  };
  void AddOurs(Comparison& comparison, const std::string& name, const Ours& ours);
  // A dense model a token: `models` bases after another, one token each.
  void AddDense(Comparison& comparison, const std::string& name, int64_t models);
  void AddTorch(Comparison& comparison, const std::string& name, RotatingWeights& weights,
                int64_t rows, int64_t copies);
  void AddDecodeBodies(Comparison& comparison);
  void Ratio(std::string_view name, const Comparison& comparison, std::string_view over,
             std::string_view under, const Budget& budget) const;

  const BenchReport& report_;
  ThreadPool threads_;
  LinearScratch scratch_;
  Layers layers_;
};

void LinearBench::AddOurs(Comparison& comparison, const std::string& name, const Ours& ours) {
  const int64_t rows = ours.rows;
  std::vector<int32_t> variant_of_row;
  for (int64_t t = 0; t < rows; ++t) variant_of_row.push_back(ours.variant(t));
  const int64_t variants = *std::max_element(variant_of_row.begin(), variant_of_row.end()) + 1;
  comparison.Add(
      name,
      [this, rows, ours, variant_of_row, tables = layers_.Variants(variants, ours.planes),
       sums = std::vector<DeltaSum>(static_cast<size_t>(rows), ours.sum),
       x = at::randn({rows, kBenchDIn}).to(ours.x == DType::kBF16 ? at::kBFloat16 : at::kFloat),
       y = at::empty({rows, kBenchDOut})] {
        for (int64_t copy = 0; copy < ours.copies; ++copy) {
          const LinearOutput output{.base = layers_.bf16()[copy],
                                    .variants = tables[static_cast<size_t>(copy)],
                                    .y = {y.data_ptr<float>(), rows, kBenchDOut, kBenchDOut}};
          const Status status =
              BitDeltaLinearCpu({.x = {x.const_data_ptr(), ours.x, rows, kBenchDIn, kBenchDIn},
                                 .outputs = {&output, 1},
                                 .variant_of_row = variant_of_row,
                                 .sum_of_row = sums},
                                scratch_, threads_);
          TORCH_CHECK(status.ok(), status.ToString());
        }
      },
      static_cast<double>(ours.copies));
}

void LinearBench::AddDense(Comparison& comparison, const std::string& name, int64_t models) {
  comparison.Add(
      name, [this, models, x = at::randn({1, kBenchDIn}), y = at::empty({1, kBenchDOut})] {
        for (int64_t model = 0; model < models; ++model) {
          const LinearOutput output{.base = layers_.bf16()[model % layers_.bf16().size()],
                                    .y = {y.data_ptr<float>(), 1, kBenchDOut, kBenchDOut}};
          const Status status = BitDeltaLinearCpu(
              {.x = {x.data_ptr<float>(), 1, kBenchDIn, kBenchDIn}, .outputs = {&output, 1}},
              scratch_, threads_);
          TORCH_CHECK(status.ok(), status.ToString());
        }
      });
}

void LinearBench::AddTorch(Comparison& comparison, const std::string& name,
                           RotatingWeights& weights, int64_t rows, int64_t copies) {
  const at::ScalarType dtype = weights[0].dtype == DType::kBF16 ? at::kBFloat16 : at::kFloat;
  std::vector<at::Tensor> tensors;
  for (int64_t i = 0; i < copies; ++i) {
    tensors.push_back(at::from_blob(weights.data(i), {kBenchDOut, kBenchDIn}, dtype));
  }
  comparison.Add(
      name,
      [tensors, x = at::randn({rows, kBenchDIn}).to(dtype)] {
        for (const at::Tensor& weight : tensors) at::linear(x, weight);
      },
      static_cast<double>(copies));
}

void LinearBench::AddDecodeBodies(Comparison& comparison) {
  const int64_t copies = layers_.bf16().size();
  const auto wants = [&](std::string_view name) { return report_.Wants({name}); };
  const auto fused = [&](const std::string& name, int64_t rows, int64_t planes = 1) {
    AddOurs(comparison, name,
            {.rows = rows, .copies = copies, .variant = OwnVariant, .planes = planes});
  };
  AddOurs(comparison, "base/1", {.copies = copies});
  if (wants("decode_b1")) fused("fused/1", 1);
  if (wants("decode_planes2")) fused("planes2/1", 1, 2);
  if (wants("decode_b4") || wants("dense_over_b4")) fused("fused/4", 4);
  if (wants("decode_b14") || wants("dense_over_b14")) fused("fused/14", kMostVariants);
  if (wants("dense_over_b4")) AddDense(comparison, "dense/4", 4);
  if (wants("dense_over_b14")) AddDense(comparison, "dense/14", kMostVariants);
  // The same x on both sides, in bf16 and in fp32.
  for (const int64_t rows : {int64_t{1}, kMostVariants}) {
    if (!wants(rows == 1 ? "at_linear_over_base_fp32" : "at_linear_over_base14_fp32")) continue;
    const std::string of = std::to_string(rows);
    AddOurs(comparison, "base" + of + "/bf16", {.rows = rows, .copies = copies, .x = DType::kBF16});
    AddTorch(comparison, "at_linear" + of + "/bf16", layers_.bf16(), rows, copies);
    if (rows > 1) AddOurs(comparison, "base" + of + "/fp32", {.rows = rows, .copies = copies});
    AddTorch(comparison, "at_linear" + of + "/fp32", layers_.fp32(), rows, layers_.fp32().size());
  }
  if (wants("base_bandwidth")) {
    AddMemoryRead(comparison, layers_.bf16().Buffers(), layers_.bf16().bytes(), 1, threads_);
  }
}

void LinearBench::Ratio(std::string_view name, const Comparison& comparison, std::string_view over,
                        std::string_view under, const Budget& budget) const {
  if (!report_.Wants({name})) return;
  report_.Ratio(name, comparison.Seconds(over) / comparison.Seconds(under), budget, kBenchSizes);
}

void LinearBench::Decode() {
  if (!report_.Wants({"decode_b1", "decode_b4", "decode_b14", "decode_planes2", "dense_over_b4",
                      "dense_over_b14", "at_linear_over_base_fp32", "at_linear_over_base14_fp32",
                      "base_bandwidth"})) {
    return;
  }
  Comparison t(report_, "decode", report_.options().Rounds(11));
  AddDecodeBodies(t);
  t.Run();
  // The limits: base read once, a sixteenth of it for each sign plane (bf16).
  Ratio("decode_b1", t, "fused/1", "base/1", {.goal = 1.10, .limit = 1.0625});
  Ratio("decode_b4", t, "fused/4", "base/1", {.goal = 1.8, .limit = 1.25});
  Ratio("decode_b14", t, "fused/14", "base/1", {.goal = 4.7, .limit = 1.875});
  Ratio("decode_planes2", t, "planes2/1", "base/1", {.limit = 1.125});
  Ratio("dense_over_b4", t, "dense/4", "fused/4", {.limit = 3.2, .better = Better::kHigher});
  Ratio("dense_over_b14", t, "dense/14", "fused/14", {.limit = 7.47, .better = Better::kHigher});
  const Budget as_fast{.goal = 1.0, .better = Better::kHigher};
  Ratio("at_linear_over_base", t, "at_linear1/bf16", "base1/bf16", as_fast);
  Ratio("at_linear_over_base_fp32", t, "at_linear1/fp32", "base/1", as_fast);
  Ratio("at_linear_over_base14", t, "at_linear14/bf16", "base14/bf16", as_fast);
  Ratio("at_linear_over_base14_fp32", t, "at_linear14/fp32", "base14/fp32", as_fast);
  if (report_.Wants({"base_bandwidth"})) {
    const double read = t.Seconds("read/") / static_cast<double>(layers_.bf16().size());
    report_.Ratio("base_bandwidth", read / t.Seconds("base/1"),
                  {.limit = 1.0, .better = Better::kHigher}, kBenchSizes);
  }
}

void LinearBench::Prefill() {
  if (!report_.Wants({"prefill512_fp32"})) return;
  Comparison t(report_, "prefill", report_.options().Rounds(7));
  const auto fused = [&](const std::string& name, DeltaSum sum, DType x) {
    AddOurs(t, name, {.rows = kPrefillRows, .variant = OneVariant, .sum = sum, .x = x});
  };
  fused("fused512/fp32", DeltaSum::kFolded, DType::kF32);
  fused("fused512/bf16", DeltaSum::kFolded, DType::kBF16);
  fused("apart512/bf16", DeltaSum::kApart, DType::kBF16);
  AddOurs(t, "base512/fp32", {.rows = kPrefillRows});
  AddOurs(t, "base512/bf16", {.rows = kPrefillRows, .x = DType::kBF16});
  AddTorch(t, "at_linear512/bf16", layers_.bf16(), kPrefillRows, 1);
  AddTorch(t, "at_linear512/fp32", layers_.fp32(), kPrefillRows, 1);
  t.Run();
  const std::string sizes = "512 rows, 11008 x 4096 bf16, one variant";
  const Budget budget{.goal = 1.25, .limit = 1.0};
  report_.Ratio("prefill512", t.Seconds("fused512/") / t.Seconds("at_linear512/"), budget, sizes);
  report_.Ratio("prefill512_fp32", t.Seconds("fused512/fp32") / t.Seconds("at_linear512/fp32"),
                budget, sizes);
}

}  // namespace
}  // namespace stockpot

int main(int argc, char** argv) {
  return stockpot::BenchMain(argc, argv, [](const stockpot::BenchReport& report) {
    stockpot::LinearBench bench(report);
    bench.Decode();
    bench.Prefill();
  });
}
