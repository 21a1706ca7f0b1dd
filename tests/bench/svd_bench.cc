// The truncated SVD beside LibTorch's full one, in one run: r = 64 of 2048 x 2048. at::linalg_svd
// is timed on one thread and on all, and the faster counts. To stderr: the errors of five spectra
// as ratios to the optimum's, which is known by construction, and the Gram matrix beside the full
// SVD where 95 % of the energy is wanted.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <cstdio>

#include "kernels/svd/svd.h"
#include "tests/bench/bench.h"
#include "tests/unit/kernels/svd_spectra.h"

namespace stockpot {
namespace {

constexpr int64_t kSide = 2048;
constexpr int64_t kRank = 64;
constexpr int64_t kEnergySide = 512;

SvdArgs Args(const at::Tensor& a) {
  return {.name = "bench",
          .fine_tuned = {a.const_data_ptr(), DType::kF32, a.size(0), a.size(1), a.size(1)}};
}

void PrintErrors(const Spectrum& spectrum, const at::Tensor& a, int64_t oversampling,
                 int iterations) {
  const Svd svd =
      TruncatedSvdCpu(Args(a),
                      {.rank = kRank, .oversampling = oversampling, .iterations = iterations})
          .value();
  const double best = BestCaptured(spectrum.s, kRank);
  std::fprintf(stderr, "%-18s p = %2d, q = %d: error %.4f, captured %.4f of the optimum's\n",
               spectrum.name.c_str(), static_cast<int>(oversampling), iterations,
               svd.relative_error / std::sqrt(1 - best), svd.captured / best);
}

void BenchSvd(const BenchReport& report) {
  if (!report.Wants({"svd_vs_full"})) return;
  const int threads = report.options().threads;
  at::set_num_threads(threads);
  at::manual_seed(1);
  at::Tensor noise;
  for (const Spectrum& spectrum : Spectra(kSide)) {
    const at::Tensor a = MatrixWith(spectrum.s);
    if (!noise.defined()) noise = a;
    PrintErrors(spectrum, a, 8, 2);
    PrintErrors(spectrum, a, kRank, 4);
  }
  const at::Tensor small = noise.slice(0, 0, kEnergySide).slice(1, 0, kEnergySide).contiguous();
  Comparison comparison(report, "svd", report.options().Rounds(5));
  comparison.Add("truncated", [&] { TORCH_CHECK(TruncatedSvdCpu(Args(noise), {}).ok()); });
  comparison.Add("accurate", [&] {
    TORCH_CHECK(TruncatedSvdCpu(Args(noise), {.oversampling = kRank, .iterations = 4}).ok());
  });
  const auto full = [&](int count) {
    return [&noise, count, threads] {
      at::set_num_threads(count);
      at::linalg_svd(noise, false);
      at::set_num_threads(threads);
    };
  };
  comparison.Add("full/1", full(1));
  if (threads > 1) comparison.Add("full/all", full(threads));
  comparison.Add("energy", [&] { TORCH_CHECK(EnergySvdCpu(Args(small), 0.95).ok()); });
  comparison.Add("energy by full", [&] { TORCH_CHECK(FullSvdCpu(Args(small)).ok()); });
  comparison.Run();
  const double seconds = comparison.Seconds("full/");
  std::fprintf(stderr,
               "seconds: truncated %.3f, accurate (p = 64, q = 4) %.3f, at::linalg_svd %.3f; 95 %% "
               "of 512 x 512: Gram matrix %.3f, full SVD %.3f\n",
               comparison.Seconds("truncated"), comparison.Seconds("accurate"), seconds,
               comparison.Seconds("energy"), comparison.Seconds("energy by full"));
  report.Ratio("svd_vs_full", seconds / comparison.Seconds("truncated"),
               {.goal = 20, .better = Budget::Better::kHigher},
               "r = 64 of 2048 x 2048 fp32, p = 8, q = 2");
}

}  // namespace
}  // namespace stockpot

int main(int argc, char** argv) { return stockpot::BenchMain(argc, argv, stockpot::BenchSvd); }
