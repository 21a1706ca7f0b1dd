// bitdelta_compress beside the memory's own rate of reading two streams and beside torch code of
// the same rule.
//
//   compress_bench [--quick] [--only SUBSTRING] [--threads N] [--raw FOLDER]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <vector>

#include "kernels/bitdelta/compress.h"
#include "kernels/bitdelta/signs.h"
#include "tests/bench/bench.h"
#include "tests/bench/memory_read.h"
#include "tests/bench/weights.h"

namespace stockpot {
namespace {

// BitDelta's rule as a user of torch writes it (diff.py: subtract, mean, sign, pack by shifts).
void TorchCompress(const at::Tensor& base, const at::Tensor& tuned) {
  const at::Tensor delta = tuned.to(at::kFloat) - base.to(at::kFloat);
  const at::Tensor alpha = delta.abs().mean(1);
  const at::Tensor bits = delta.ge(0).to(at::kByte).view({kBenchDOut, kBenchDIn / 8, 8});
  const at::Tensor weights =
      at::bitwise_left_shift(at::ones({8}, at::kByte), at::arange(8, at::kByte));
  const at::Tensor packed = (bits * weights).sum(2, false, at::kByte);
}

void Bench(const BenchReport& report) {
  if (!report.Wants({"compress_bandwidth", "compress_vs_torch"})) return;
  at::set_num_threads(report.options().threads);
  ThreadPool threads(report.options().threads);
  RotatingWeights weights(DType::kBF16);
  const int64_t pairs = weights.size() / 2;
  std::vector<uint8_t> signs(static_cast<size_t>(SignBytes(kBenchDOut, kBenchDIn)));
  std::vector<float> alpha(static_cast<size_t>(kBenchDOut));
  Comparison comparison(report, "compress", report.options().Rounds(11));
  comparison.Add(
      "stockpot",
      [&] {
        for (int64_t i = 0; i < pairs; ++i) {
          const Result<DeltaStats> stats =
              BitDeltaCompressCpu({weights[2 * i], weights[2 * i + 1], signs, alpha}, threads);
          TORCH_CHECK(stats.ok(), stats.status().ToString());
        }
      },
      static_cast<double>(pairs));
  if (report.Wants({"compress_bandwidth"})) {
    AddMemoryRead(comparison, weights.Buffers(), weights.bytes(), 2, threads);
  }
  if (report.Wants({"compress_vs_torch"})) {
    const auto tensor = [&](int64_t i) {
      return at::from_blob(weights.data(i), {kBenchDOut, kBenchDIn}, at::kBFloat16);
    };
    comparison.Add("torch", [base = tensor(0), tuned = tensor(1)] { TorchCompress(base, tuned); });
  }
  comparison.Run();
  const double ours = comparison.Seconds("stockpot");
  if (report.Wants({"compress_bandwidth"})) {
    const double read = comparison.Seconds("read/") / static_cast<double>(pairs);
    std::fprintf(stderr, "compress reads %.1f GB/s, plain loops %.1f GB/s\n",
                 2e-9 * static_cast<double>(weights.bytes()) / ours,
                 2e-9 * static_cast<double>(weights.bytes()) / read);
    report.Ratio("compress_bandwidth", read / ours,
                 {.goal = 0.7, .limit = 1.0, .better = Budget::Better::kHigher}, kBenchSizes);
  }
  if (report.Wants({"compress_vs_torch"})) {
    report.Ratio("compress_vs_torch", comparison.Seconds("torch") / ours,
                 {.goal = 5, .better = Budget::Better::kHigher}, kBenchSizes);
  }
}

}  // namespace
}  // namespace stockpot

int main(int argc, char** argv) { return stockpot::BenchMain(argc, argv, stockpot::Bench); }
