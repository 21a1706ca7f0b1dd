// The kernels beside their yardsticks, measured in one run: base only, at::linear, the memory's own
// read bandwidth, torch code of the compress rule. Every ratio is one JSON line on stdout
//   {"name", "value", "goal", "limit", "better", "sizes", "machine"}
// and the times behind it go to stderr.
//
//   kernels_bench [--quick] [--only SUBSTRING] [--threads N]
//
// Weights rotate over more than 512 MB, so that no cache keeps them; what is compared is timed in
// alternation, round by round, and the medians are divided.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/device.h"
#include "kernels/bitdelta/compress.h"
#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/signs.h"

namespace stockpot {
namespace {

constexpr int64_t kDOut = 11008;
constexpr int64_t kDIn = 4096;
constexpr int64_t kWeightBytes = kDOut * kDIn * 2;            // bf16
constexpr int64_t kRotateBytes = int64_t{513} << 20;          // more than this is walked through
constexpr int64_t kCopies = kRotateBytes / kWeightBytes + 1;  // bf16 weights
constexpr int64_t kFloatCopies = kCopies / 2 + 1;             // the same bytes in float32
constexpr int64_t kMostVariants = 14;
constexpr int64_t kPrefillRows = 512;

struct Options {
  bool quick = false;
  std::string only;
  int threads = 2;
};

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string CpuModel() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Times several bodies in alternation and returns the median seconds of each.
std::vector<double> Alternate(int rounds, const std::vector<std::function<void()>>& bodies) {
  for (const auto& body : bodies) body();  // warm up: pages, scratch memory, caches of plans
  std::vector<std::vector<double>> times(bodies.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < bodies.size(); ++i) {
      const double start = Seconds();
      bodies[i]();
      times[i].push_back(Seconds() - start);
    }
  }
  std::vector<double> medians;
  for (auto& t : times) medians.push_back(Median(std::move(t)));
  return medians;
}

class Report {
 public:
  explicit Report(const Options& options)
      : options_(options),
        machine_(CpuModel() + ", " + std::to_string(options.threads) + " threads, " +
                 ProbeDevices().simd_target) {}

  bool Wants(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (std::strstr(name, options_.only.c_str()) != nullptr) return true;
    }
    return false;
  }

  void Ratio(const char* name, double value, double goal, double limit, const char* better,
             const std::string& sizes) const {
    if (!Wants({name})) return;
    std::printf(
        "{\"name\": \"%s\", \"value\": %.4f, \"goal\": %g, \"limit\": %g, \"better\": \"%s\", "
        "\"sizes\": \"%s\", \"machine\": \"%s\"}\n",
        name, value, goal, limit, better, sizes.c_str(), machine_.c_str());
    std::fflush(stdout);
  }

 private:
  const Options& options_;
  std::string machine_;
};

// bf16 weights near N(0, 0.02^2), quickly made: a table of draws, walked at random offsets.
at::Tensor RandomWeight(at::ScalarType dtype, uint64_t seed) {
  static const at::Tensor draws = at::randn({1 << 16}) * 0.02;
  std::mt19937_64 random(seed);
  at::Tensor w = at::empty({kDOut, kDIn}, dtype);
  for (int64_t r = 0; r < kDOut; ++r) {
    const int64_t start = static_cast<int64_t>(random() % ((1 << 16) - kDIn));
    w[r].copy_(draws.slice(0, start, start + kDIn));
  }
  return w;
}

WeightMatrix View(const at::Tensor& w) {
  const DType dtype = w.scalar_type() == at::kBFloat16 ? DType::kBF16 : DType::kF32;
  return {w.data_ptr(), dtype, w.size(0), w.size(1), w.size(1)};
}

PackedSigns RandomSigns(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> bits(SignBytes(kDOut, kDIn) / 8);
  for (uint64_t& b : bits) b = random();
  const std::vector<float> alpha(kDOut, 1e-3f);
  const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(bits.data()),
                                       bits.size() * 8);
  return PackedSigns::Pack(kDOut, kDIn, bytes, alpha).value();
}

// The weights all decode and prefill measurements share.
struct Weights {
  Weights() {
    for (int64_t i = 0; i < kCopies; ++i) bf16.push_back(RandomWeight(at::kBFloat16, i));
    for (int64_t i = 0; i < kFloatCopies; ++i) fp32.push_back(RandomWeight(at::kFloat, i));
    for (int64_t i = 0; i < kCopies * kMostVariants; ++i) signs.push_back(RandomSigns(i));
  }
  std::vector<at::Tensor> bf16, fp32;
  std::vector<PackedSigns> signs;  // kMostVariants for each bf16 weight
};

// Our kernel over all copies of the base: `rows` tokens, each with the variant that `variant`
// names.
std::function<void()> OurLinear(const Weights& weights, const at::Tensor& x, const at::Tensor& y,
                                ThreadPool& threads, LinearScratch& scratch, int64_t copies,
                                const std::function<int32_t(int64_t)>& variant) {
  return [&, x, y, copies, variant] {
    const int64_t rows = x.size(0);
    std::vector<int32_t> variant_of_row(rows);
    for (int64_t t = 0; t < rows; ++t) variant_of_row[t] = variant(t);
    for (int64_t copy = 0; copy < copies; ++copy) {
      std::vector<LayerDelta> variants(kMostVariants);
      for (int64_t v = 0; v < kMostVariants; ++v) {
        variants[v].signs = &weights.signs[copy * kMostVariants + v];
      }
      const LinearOutput output{.base = View(weights.bf16[copy]),
                                .variants = variants,
                                .y = {y.data_ptr<float>(), rows, kDOut, kDOut}};
      const std::vector<DeltaSum> sum_of_row(
          rows, rows == kPrefillRows ? DeltaSum::kFolded : DeltaSum::kApart);
      const Status status = BitDeltaLinearCpu({.x = {x.data_ptr<float>(), rows, kDIn, kDIn},
                                               .outputs = {&output, 1},
                                               .variant_of_row = variant_of_row,
                                               .sum_of_row = sum_of_row},
                                              scratch, threads);
      TORCH_CHECK(status.ok(), status.ToString());
    }
  };
}

std::function<void()> AtLinear(const std::vector<at::Tensor>& weights, const at::Tensor& x,
                               int64_t copies) {
  const at::Tensor input = x.to(weights[0].scalar_type());
  return [&weights, input, copies] {
    for (int64_t copy = 0; copy < copies; ++copy) at::linear(input, weights[copy]);
  };
}

constexpr int32_t BaseOnly(int64_t) { return -1; }
constexpr int32_t OwnVariant(int64_t t) { return static_cast<int32_t>(t); }
constexpr int32_t OneVariant(int64_t) { return 0; }

void BenchDecode(const Options& options, const Report& report, const Weights& weights,
                 ThreadPool& threads) {
  LinearScratch scratch;
  const auto ours = [&](int64_t rows, int32_t (*variant)(int64_t)) {
    return OurLinear(weights, at::randn({rows, kDIn}), at::empty({rows, kDOut}), threads, scratch,
                     kCopies, variant);
  };
  const at::Tensor one = at::randn({1, kDIn});
  const at::Tensor fourteen = at::randn({14, kDIn});
  const std::vector<double> t = Alternate(
      options.quick ? 3 : 11,
      {ours(1, BaseOnly), ours(1, OwnVariant), ours(4, OwnVariant), ours(14, OwnVariant),
       ours(14, BaseOnly), AtLinear(weights.bf16, one, kCopies),
       AtLinear(weights.fp32, one, kFloatCopies), AtLinear(weights.bf16, fourteen, kCopies),
       AtLinear(weights.fp32, fourteen, kFloatCopies), ours(4, BaseOnly)});
  const auto per_call = [&](int i, int64_t copies) { return t[i] / static_cast<double>(copies); };
  const double base = per_call(0, kCopies);
  const double at1 = std::min(per_call(5, kCopies), per_call(6, kFloatCopies));
  const double at14 = std::min(per_call(7, kCopies), per_call(8, kFloatCopies));
  std::fprintf(stderr,
               "decode, ms a call: base 1 %.2f (%.1f GB/s), 4 %.2f, 14 %.2f; fused 1 %.2f, 4 %.2f, "
               "14 %.2f; at::linear bf16 1 %.2f, 14 %.2f; fp32 1 %.2f, 14 %.2f\n",
               base * 1e3, kWeightBytes / base / 1e9, per_call(9, kCopies) * 1e3,
               per_call(4, kCopies) * 1e3, per_call(1, kCopies) * 1e3, per_call(2, kCopies) * 1e3,
               per_call(3, kCopies) * 1e3, per_call(5, kCopies) * 1e3, per_call(7, kCopies) * 1e3,
               per_call(6, kFloatCopies) * 1e3, per_call(8, kFloatCopies) * 1e3);
  const std::string sizes = "11008 x 4096 bf16, 6 bases rotating";
  report.Ratio("decode_b1", per_call(1, kCopies) / base, 1.10, 1.0625, "lower", sizes);
  report.Ratio("decode_b4", per_call(2, kCopies) / base, 1.8, 1.25, "lower", sizes);
  report.Ratio("decode_b14", per_call(3, kCopies) / base, 4.7, 1.875, "lower", sizes);
  report.Ratio("at_linear_over_base", at1 / base, 1.0, 1.0, "higher", sizes);
  report.Ratio("at_linear_over_base14", at14 / per_call(4, kCopies), 1.0, 1.0, "higher", sizes);
}

void BenchPrefill(const Options& options, const Report& report, const Weights& weights,
                  ThreadPool& threads) {
  LinearScratch scratch;
  const at::Tensor x = at::randn({kPrefillRows, kDIn});
  const at::Tensor y = at::empty({kPrefillRows, kDOut});
  const std::vector<double> t = Alternate(
      options.quick ? 1 : 5, {OurLinear(weights, x, y, threads, scratch, 1, OneVariant),
                              OurLinear(weights, x, y, threads, scratch, 1, BaseOnly),
                              AtLinear(weights.bf16, x, 1), AtLinear(weights.fp32, x, 1)});
  const double flop = 2.0 * kPrefillRows * kDOut * kDIn;
  std::fprintf(stderr,
               "prefill 512, ms: fused %.1f, base %.1f (%.0f GFLOP/s), at::linear bf16 %.1f, fp32 "
               "%.1f (%.0f GFLOP/s)\n",
               t[0] * 1e3, t[1] * 1e3, flop / t[1] / 1e9, t[2] * 1e3, t[3] * 1e3,
               flop / t[3] / 1e9);
  report.Ratio("prefill512", t[0] / std::min(t[2], t[3]), 1.25, 1.0, "lower",
               "512 rows, 11008 x 4096 bf16, one variant");
}

// Sums two streams with all threads: what the memory gives to a loop that does nothing else.
double TwoStreamReadBandwidth(const std::vector<at::Tensor>& weights, int rounds,
                              ThreadPool& threads) {
  const auto read = [&](int64_t unroll) {
    return [&weights, &threads, unroll] {
      for (size_t i = 0; i + 1 < weights.size(); i += 2) {
        const auto* a = static_cast<const uint64_t*>(weights[i].data_ptr());
        const auto* b = static_cast<const uint64_t*>(weights[i + 1].data_ptr());
        threads.ParallelFor(kWeightBytes / 8, unroll, [&](int64_t begin, int64_t end) {
          uint64_t sums[8] = {};
          for (int64_t j = begin; j + 8 <= end; j += 8) {
            for (int k = 0; k < 8; ++k) sums[k] += a[j + k] ^ b[j + k];
          }
          volatile uint64_t sink =
              sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
          (void)sink;
        });
      }
    };
  };
  // A plain loop is no upper bound by itself: the best of several range lengths counts.
  const std::vector<double> t = Alternate(rounds, {read(4 << 10), read(32 << 10), read(1 << 20)});
  const double bytes = static_cast<double>(weights.size() / 2 * 2 * kWeightBytes);
  return bytes / *std::min_element(t.begin(), t.end());
}

// BitDelta's rule as a user of torch writes it (diff.py: subtract, sign, mean, pack by shifts).
void TorchCompress(const at::Tensor& base, const at::Tensor& tuned) {
  const at::Tensor delta = tuned.to(at::kFloat) - base.to(at::kFloat);
  const at::Tensor alpha = delta.abs().mean(1);
  const at::Tensor bits = delta.ge(0).to(at::kByte).view({kDOut, kDIn / 8, 8});
  const at::Tensor weights =
      at::bitwise_left_shift(at::ones({8}, at::kByte), at::arange(8, at::kByte));
  at::Tensor packed = (bits * weights).sum(2, false, at::kByte);
}

void BenchCompress(const Options& options, const Report& report, const Weights& weights,
                   ThreadPool& threads) {
  std::vector<uint8_t> signs(SignBytes(kDOut, kDIn));
  std::vector<float> alpha(kDOut);
  const int64_t pairs = kCopies / 2;
  const int rounds = options.quick ? 3 : 9;
  const auto ours = [&] {
    for (int64_t i = 0; i < pairs; ++i) {
      const auto stats = BitDeltaCompressCpu(
          {View(weights.bf16[2 * i]), View(weights.bf16[2 * i + 1]), signs, alpha}, threads);
      TORCH_CHECK(stats.ok(), stats.status().ToString());
    }
  };
  const double bandwidth = TwoStreamReadBandwidth(weights.bf16, rounds, threads);
  const std::vector<double> t =
      Alternate(rounds, {ours, [&] { TorchCompress(weights.bf16[0], weights.bf16[1]); }});
  const double call = t[0] / static_cast<double>(pairs);
  const double rate = 2 * kWeightBytes / call;
  std::fprintf(stderr, "compress, GB/s read: %.1f of %.1f; ms a weight: ours %.1f, torch %.1f\n",
               rate / 1e9, bandwidth / 1e9, call * 1e3, t[1] * 1e3);
  const std::string sizes = "11008 x 4096 bf16 pairs rotating";
  report.Ratio("compress_bandwidth", rate / bandwidth, 0.7, 1.0, "higher", sizes);
  report.Ratio("compress_vs_torch", t[1] / call, 5, 0, "higher", sizes);
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--quick") {
      options.quick = true;
    } else if (arg == "--only" && i + 1 < argc) {
      options.only = argv[++i];
    } else if (arg == "--threads" && i + 1 < argc) {
      options.threads = std::max(1, std::atoi(argv[++i]));
    } else {
      std::fprintf(stderr, "usage: kernels_bench [--quick] [--only SUBSTRING] [--threads N]\n");
      return 2;
    }
  }
  at::set_num_threads(options.threads);
  ThreadPool threads(options.threads);
  const Report report(options);
  const Weights weights;
  if (report.Wants({"decode_b1", "decode_b4", "decode_b14", "at_linear_over_base",
                    "at_linear_over_base14"})) {
    BenchDecode(options, report, weights, threads);
  }
  if (report.Wants({"prefill512"})) BenchPrefill(options, report, weights, threads);
  if (report.Wants({"compress_bandwidth", "compress_vs_torch"})) {
    BenchCompress(options, report, weights, threads);
  }
  return 0;
}

}  // namespace
}  // namespace stockpot

int main(int argc, char** argv) { return stockpot::Main(argc, argv); }
