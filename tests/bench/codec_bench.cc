// The other codecs of a delta beside the base they add to: exact sparse changes and low-rank
// adapters, one token and 14 tokens of 14 variants, in units of at::linear on the base at one token
// (bf16 or fp32, the faster).
//
//   codec_bench [--quick] [--only SUBSTRING] [--threads N] [--raw FOLDER]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/lora/lora_linear.h"
#include "kernels/sparse/sparse_delta.h"
#include "tests/bench/bench.h"
#include "tests/bench/weights.h"

namespace stockpot {
namespace {

constexpr int64_t kVariants = 14;
constexpr int64_t kRank = 16;
constexpr double kChangedShare = 0.01;

// One element in a hundred, on average evenly spread.
SparseDelta RandomSparse(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::geometric_distribution<int64_t> gap(kChangedShare);
  SparseElements elements;
  elements.row_offsets.push_back(0);
  int64_t at = gap(random);
  for (int64_t r = 0; r < kBenchDOut; ++r) {
    for (; at < (r + 1) * kBenchDIn; at += 1 + gap(random)) {
      elements.columns.push_back(static_cast<uint32_t>(at - r * kBenchDIn));
      elements.values.push_back(1e-3f);
    }
    elements.row_offsets.push_back(static_cast<int64_t>(elements.columns.size()));
  }
  return SparseDelta::FromElements(kBenchDOut, kBenchDIn, elements).value();
}

LoraDelta RandomLora() {
  const at::Tensor a = at::randn({kRank, kBenchDIn}).to(at::kBFloat16);
  const at::Tensor b = at::randn({kBenchDOut, kRank}).to(at::kBFloat16);
  return LoraDelta::Pack({a.data_ptr(), DType::kBF16, kRank, kBenchDIn, kBenchDIn},
                         {b.data_ptr(), DType::kBF16, kBenchDOut, kRank, kRank}, 0.5f)
      .value();
}

class CodecBench {
 public:
  explicit CodecBench(const BenchReport& report)
      : report_(report), threads_(report.options().threads) {
    at::set_num_threads(report.options().threads);
    rows_.resize(kVariants);
    std::iota(rows_.begin(), rows_.end(), 0);
  }

  void Run() {
    const bool sparse = report_.Wants({"sparse1_b1", "sparse1_b14"});
    const bool lora = report_.Wants({"lora16_b1", "lora16_b14"});
    if (!sparse && !lora) return;
    Comparison t(report_, "codecs", report_.options().Rounds(11));
    if (sparse) MakeSparse();
    if (lora) MakeLora();
    for (const int64_t rows : {int64_t{1}, kVariants}) {
      AddBase(t, rows == 1 ? DType::kBF16 : DType::kF32);  // reads more than any cache holds
      if (sparse) AddSparse(t, rows);
      if (lora) AddLora(t, rows);
    }
    t.Run();
    // The limits are bytes: 6 an element changed, 2 an element of A and B, over the base's.
    const double rank_share =
        static_cast<double>(kRank * (kBenchDOut + kBenchDIn)) / static_cast<double>(kBenchElements);
    Ratio(t, "sparse1_b1", "sparse/1", 3 * kChangedShare);
    Ratio(t, "sparse1_b14", "sparse/14", 3 * kChangedShare * kVariants);
    Ratio(t, "lora16_b1", "lora/1", rank_share);
    Ratio(t, "lora16_b14", "lora/14", rank_share * kVariants);
  }

 private:
  void AddBase(Comparison& t, DType dtype) {
    RotatingWeights& weights = *bases_.emplace_back(std::make_unique<RotatingWeights>(dtype));
    const at::ScalarType type = dtype == DType::kBF16 ? at::kBFloat16 : at::kFloat;
    std::vector<at::Tensor> tensors;
    for (int64_t i = 0; i < weights.size(); ++i) {
      tensors.push_back(at::from_blob(weights.data(i), {kBenchDOut, kBenchDIn}, type));
    }
    t.Add(
        std::string("at_linear/") + (dtype == DType::kBF16 ? "bf16" : "fp32"),
        [tensors, x = at::randn({1, kBenchDIn}).to(type)] {
          for (const at::Tensor& weight : tensors) at::linear(x, weight);
        },
        static_cast<double>(tensors.size()));
  }

  void MakeSparse() {
    for (int64_t v = 0; v < kVariants; ++v) {
      sparse_.push_back(std::make_unique<SparseDelta>(RandomSparse(static_cast<uint64_t>(v))));
      sparse_table_.push_back(sparse_.back().get());
    }
  }

  void MakeLora() {
    for (int64_t v = 0; v < kVariants; ++v) {
      lora_.push_back(std::make_unique<LoraDelta>(RandomLora()));
      lora_table_.push_back(lora_.back().get());
    }
  }

  // All variants once: `rows` of them a call.
  void AddSparse(Comparison& t, int64_t rows) {
    t.Add(
        "sparse/" + std::to_string(rows),
        [this, rows] {
          for (int64_t v = 0; v < kVariants; v += rows) {
            const Status status =
                SparseDeltaLinearCpu({.x = {x_.data_ptr<float>(), rows, kBenchDIn, kBenchDIn},
                                      .deltas = sparse_table_,
                                      .delta_of_row = std::span(rows_).subspan(v, rows),
                                      .y = {y_.data_ptr<float>(), rows, kBenchDOut, kBenchDOut}},
                                     sparse_scratch_, threads_);
            TORCH_CHECK(status.ok(), status.ToString());
          }
        },
        static_cast<double>(kVariants / rows));
  }

  void AddLora(Comparison& t, int64_t rows) {
    t.Add(
        "lora/" + std::to_string(rows),
        [this, rows] {
          for (int64_t v = 0; v < kVariants; v += rows) {
            const Status status =
                LoraLinearCpu({.x = {x_.data_ptr<float>(), rows, kBenchDIn, kBenchDIn},
                               .deltas = lora_table_,
                               .delta_of_row = std::span(rows_).subspan(v, rows),
                               .y = {y_.data_ptr<float>(), rows, kBenchDOut, kBenchDOut}},
                              lora_scratch_, threads_);
            TORCH_CHECK(status.ok(), status.ToString());
          }
        },
        static_cast<double>(kVariants / rows));
  }

  void Ratio(const Comparison& t, std::string_view name, std::string_view body, double limit) {
    if (!report_.Wants({name})) return;
    report_.Ratio(name, t.Seconds(body) / t.Seconds("at_linear/"), {.limit = limit},
                  "added to 11008 x 4096 bf16: 1 % of the elements, or rank 16 of bf16");
  }

  const BenchReport& report_;
  ThreadPool threads_;
  std::vector<int32_t> rows_;
  at::Tensor x_ = at::randn({kVariants, kBenchDIn});
  at::Tensor y_ = at::zeros({kVariants, kBenchDOut});
  std::vector<std::unique_ptr<RotatingWeights>> bases_;
  std::vector<std::unique_ptr<SparseDelta>> sparse_;
  std::vector<const SparseDelta*> sparse_table_;
  SparseScratch sparse_scratch_;
  std::vector<std::unique_ptr<LoraDelta>> lora_;
  std::vector<const LoraDelta*> lora_table_;
  LoraScratch lora_scratch_;
};

}  // namespace
}  // namespace stockpot

int main(int argc, char** argv) {
  return stockpot::BenchMain(
      argc, argv, [](const stockpot::BenchReport& report) { stockpot::CodecBench(report).Run(); });
}
