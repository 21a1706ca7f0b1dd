// bitdelta_compress: every backend gives the reference's bits, alphas and statistics exactly, and
// the reference gives torch's.
#include "kernels/bitdelta/compress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/bitdelta/compress_row.h"
#include "kernels/bitdelta/signs.h"
#include "tests/unit/kernels/backends.h"
#include "tests/unit/kernels/cuda_emulation/cuda_emulation.h"
#include "tests/unit/kernels/golden_file.h"
#include "tests/unit/kernels/matrices.h"
// After the emulation, which stands in for the platform.
#include "kernels/bitdelta/compress_cuda.cuh"

namespace stockpot {
namespace {

struct Compressed {
  Compressed(int64_t d_out, int64_t d_in)
      : signs(static_cast<size_t>(SignBytes(d_out, d_in)), 0xEE), alpha(d_out, std::nanf("")) {}
  std::vector<uint8_t> signs;
  std::vector<float> alpha;
  DeltaStats stats;
};

using Run = std::function<Result<DeltaStats>(const CompressArgs&)>;

struct Backend {
  std::string name;
  Run run;
};

Result<DeltaStats> RunEmulated(const CompressArgs& args, const emulation::Schedule& schedule) {
  STOCKPOT_RETURN_IF_ERROR(CheckCompressArgs(args));
  std::vector<CompressedRow> rows(static_cast<size_t>(args.base.rows));
  const CudaCompressArgs cuda{args.base, args.fine_tuned, args.signs.data(), rows.data()};
  const emulation::Dim3 grid{static_cast<unsigned>(CompressBlocks(args.base.rows))};
  EmulateLaunch(schedule, grid, {kCompressWarps * kWarpLanes}, CompressKernel, cuda);
  return FinishCompress(rows, args.base.cols, args.alpha);
}

void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }

std::vector<Backend> Backends() {
  std::vector<Backend> backends;
  for (const SimdTarget& target : SimdTargets()) {
    for (const int count : {1, 3}) {
      backends.push_back(
          {target.name + "x" + std::to_string(count), [target, count](const CompressArgs& args) {
             const ScopedSimdTarget scoped(target);
             ThreadPool threads(count);
             return BitDeltaCompressCpu(args, threads);
           }});
    }
  }
  for (const auto& [name, order] : {std::pair{"Forward", emulation::ThreadOrder::kForward},
                                    {"Reverse", emulation::ThreadOrder::kReverse},
                                    {"Shuffled", emulation::ThreadOrder::kShuffled}}) {
    backends.push_back(
        {std::string("CudaEmulated") + name, [order = order](const CompressArgs& args) {
           return RunEmulated(args, {order, 7});
         }});
  }
  return backends;
}

Compressed RunBackend(const Run& run, const OwnedWeight& base, const OwnedWeight& tuned) {
  Compressed out(base.view().rows, base.view().cols);
  out.stats = run({base.view(), tuned.view(), out.signs, out.alpha}).value();
  return out;
}

// Equal in every bit, NaN included.
void ExpectSame(const Compressed& got, const Compressed& want, const std::string& what) {
  EXPECT_EQ(got.signs, want.signs) << what;
  for (size_t r = 0; r < want.alpha.size(); ++r) {
    EXPECT_EQ(std::bit_cast<uint32_t>(got.alpha[r]), std::bit_cast<uint32_t>(want.alpha[r]))
        << what << " row " << r << ": " << got.alpha[r] << " for " << want.alpha[r];
  }
  EXPECT_EQ(got.stats.elements, want.stats.elements) << what;
  EXPECT_EQ(got.stats.changed, want.stats.changed) << what;
  EXPECT_EQ(got.stats.non_finite, want.stats.non_finite) << what;
  EXPECT_EQ(got.stats.sum_abs, want.stats.sum_abs) << what;
  EXPECT_EQ(got.stats.sum_square, want.stats.sum_square) << what;
  EXPECT_EQ(got.stats.max_abs, want.stats.max_abs) << what;
}

class CompressTable : public testing::TestWithParam<Backend> {};

constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

// A Gaussian weight whose rows are followed by NaN, which no backend may look at.
OwnedWeight Guarded(DType dtype, int64_t d_out, int64_t d_in, Random& random, int64_t padding) {
  OwnedWeight w = OwnedWeight::Gaussian(dtype, d_out, d_in, 0.02f, random, padding);
  for (int64_t r = 0; r + 1 < d_out; ++r) {
    for (int64_t c = d_in; c < d_in + padding; ++c) w.Set(r, c, std::nanf(""));
  }
  return w;
}

TEST_P(CompressTable, EqualsReferenceBitForBit) {
  struct Shape {
    int64_t d_out, d_in;
  };
  // 0, 1, primes; around 8 bits, 32 columns, and the 1024 that a warp writes at once.
  constexpr Shape kShapes[] = {{0, 0},    {0, 7},    {5, 0},   {1, 1},  {7, 1},  {3, 7},
                               {1, 8},    {2, 9},    {3, 31},  {4, 32}, {5, 33}, {5, 61},
                               {1, 63},   {1, 64},   {2, 65},  {3, 95}, {4, 97}, {5, 257},
                               {1, 1023}, {2, 1024}, {3, 1057}};
  Random random(11);
  for (const DType base_type : kTypes) {
    for (const DType tuned_type : kTypes) {
      for (const auto [d_out, d_in] : kShapes) {
        const OwnedWeight base = Guarded(base_type, d_out, d_in, random, d_in % 3);
        OwnedWeight tuned = Guarded(tuned_type, d_out, d_in, random, 1 + d_in % 5);
        for (int64_t c = 0; c < d_in && d_out > 0; c += 3) tuned.Set(0, c, base.view().at(0, c));
        ExpectSame(RunBackend(GetParam().run, base, tuned),
                   RunBackend(BitDeltaCompressReference, base, tuned),
                   std::to_string(d_out) + " x " + std::to_string(d_in) + " " +
                       std::string(DTypeName(base_type)) + " " +
                       std::string(DTypeName(tuned_type)));
      }
    }
  }
}

TEST_P(CompressTable, SeveralRangesOfRowsEqualTheReference) {
  Random random(12);
  // More than one range of work a thread (64 Ki elements), the last one short; a row alone.
  for (const auto& [d_out, d_in] : {std::pair<int64_t, int64_t>{211, 1057}, {3, 70001}}) {
    const OwnedWeight base = Guarded(DType::kBF16, d_out, d_in, random, 3);
    const OwnedWeight tuned = Guarded(DType::kBF16, d_out, d_in, random, 0);
    ExpectSame(RunBackend(GetParam().run, base, tuned),
               RunBackend(BitDeltaCompressReference, base, tuned), std::to_string(d_out) + " rows");
  }
}

TEST_P(CompressTable, CountsNonFiniteAndLeavesThemOut) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const DType base_type : kTypes) {
    for (const DType tuned_type : kTypes) {
      OwnedWeight base(base_type, 3, 70);
      OwnedWeight tuned(tuned_type, 3, 70);
      for (int64_t c = 0; c < 70; ++c) tuned.Set(1, c, 0.5f);
      tuned.Set(1, 3, std::nanf(""));
      tuned.Set(1, 40, infinity);
      tuned.Set(1, 69, -infinity);
      base.Set(1, 5, infinity);  // the base's own
      base.Set(1, 7, -std::nanf(""));
      base.Set(1, 6, -infinity);
      tuned.Set(1, 6, -infinity);  // delta is NaN
      tuned.Set(2, 68, -std::nanf(""));
      const Compressed got = RunBackend(GetParam().run, base, tuned);
      EXPECT_EQ(got.stats.non_finite, 7);
      EXPECT_EQ(got.stats.changed, 71);
      EXPECT_EQ(got.alpha[0], 0.0f);
      EXPECT_EQ(got.alpha[1], static_cast<float>(64 * 0.5 / 70));
      EXPECT_EQ(got.alpha[2], 0.0f);
      EXPECT_EQ(got.stats.max_abs, 0.5f);
      EXPECT_EQ(SignAt(got.signs.data(), 70, 1, 3), -1.0f);  // NaN >= 0 is false
      EXPECT_EQ(SignAt(got.signs.data(), 70, 1, 6), -1.0f);
      EXPECT_EQ(SignAt(got.signs.data(), 70, 1, 7), -1.0f);
      EXPECT_EQ(SignAt(got.signs.data(), 70, 2, 68), -1.0f);
      EXPECT_EQ(SignAt(got.signs.data(), 70, 1, 40), 1.0f);
      EXPECT_EQ(SignAt(got.signs.data(), 70, 1, 69), -1.0f);
      EXPECT_EQ(SignAt(got.signs.data(), 70, 0, 0), 1.0f);  // sign(0) = +1
      ExpectSame(got, RunBackend(BitDeltaCompressReference, base, tuned), "non-finite");
    }
  }
}

TEST_P(CompressTable, CountsADifferenceThatOverflowsAndLeavesItOut) {
  const float most = std::numeric_limits<float>::max();
  OwnedWeight base(DType::kF32, 1, 33);
  OwnedWeight tuned(DType::kF32, 1, 33);
  base.Set(0, 1, -most);
  tuned.Set(0, 1, most);  // both finite, their difference is not
  tuned.Set(0, 32, most);
  const Compressed got = RunBackend(GetParam().run, base, tuned);
  EXPECT_EQ(got.stats.non_finite, 1);
  EXPECT_EQ(got.stats.changed, 2);
  EXPECT_EQ(got.stats.max_abs, most);
  EXPECT_EQ(got.stats.sum_abs, static_cast<double>(most));
  EXPECT_EQ(got.signs, std::vector<uint8_t>({0xFF, 0xFF, 0xFF, 0xFF, 0x01}));
}

// The statistics by their definition, added plainly in long double.
TEST_P(CompressTable, StatisticsAreThoseOfTheDelta) {
  constexpr int64_t kDOut = 5, kDIn = 997;
  Random random(13);
  for (const DType base_type : kTypes) {
    const OwnedWeight base = Guarded(base_type, kDOut, kDIn, random, 1);
    OwnedWeight tuned = Guarded(DType::kBF16, kDOut, kDIn, random, 2);
    for (int64_t c = 0; c < kDIn; c += 2) tuned.Set(1, c, base.view().at(1, c));
    long double sum_abs = 0, sum_square = 0;
    int64_t changed = 0;
    float max_abs = 0;
    for (int64_t r = 0; r < kDOut; ++r) {
      for (int64_t c = 0; c < kDIn; ++c) {
        const float delta = tuned.view().at(r, c) - base.view().at(r, c);
        changed += delta != 0;
        sum_abs += std::fabs(delta);
        sum_square += static_cast<long double>(delta) * delta;
        max_abs = std::max(max_abs, std::fabs(delta));
      }
    }
    const DeltaStats got = RunBackend(GetParam().run, base, tuned).stats;
    EXPECT_EQ(got.elements, kDOut * kDIn);
    EXPECT_EQ(got.changed, changed);
    EXPECT_EQ(got.max_abs, max_abs);
    // n additions of terms of one sign lose at most n roundings of the sum.
    const double bound = kDOut * kDIn * std::numeric_limits<double>::epsilon() / 2;
    EXPECT_NEAR(got.sum_abs, static_cast<double>(sum_abs), bound * got.sum_abs);
    EXPECT_NEAR(got.sum_square, static_cast<double>(sum_square), bound * got.sum_square);
  }
}

TEST_P(CompressTable, TinyDifferencesKeepTheirSign) {
  OwnedWeight base(DType::kF32, 1, 4);
  OwnedWeight tuned(DType::kF32, 1, 4);
  const float least = std::numeric_limits<float>::denorm_min();
  tuned.Set(0, 0, least);
  tuned.Set(0, 1, -least);
  base.Set(0, 2, 1.0f);
  tuned.Set(0, 2, std::nextafter(1.0f, 0.0f));
  tuned.Set(0, 3, -0.0f);
  const Compressed got = RunBackend(GetParam().run, base, tuned);
  EXPECT_EQ(got.signs[0], 0b1001);
  EXPECT_EQ(got.stats.changed, 3);
}

TEST_P(CompressTable, MatchesTorch) {
  GoldenFile golden;
  ASSERT_TRUE(golden.ok());
  int cases = 0;
  while (golden.NextCase() == "compress") {
    ++cases;
    const int64_t d_out = golden.Number();
    const int64_t d_in = golden.Number();
    const DType base_type = golden.Type();
    const DType tuned_type = golden.Type();
    const OwnedWeight base = golden.Weight(base_type, d_out, d_in);
    const OwnedWeight tuned = golden.Weight(tuned_type, d_out, d_in);
    const std::vector<uint8_t> signs = golden.Bytes(SignBytes(d_out, d_in));
    const std::vector<float> alpha = golden.Floats(d_out);
    const Compressed got = RunBackend(GetParam().run, base, tuned);
    EXPECT_EQ(got.signs, signs);
    // Torch adds in another order: float64 sums differ by less than a float32 rounding step.
    for (int64_t r = 0; r < d_out; ++r) EXPECT_FLOAT_EQ(got.alpha[r], alpha[r]);
  }
  EXPECT_EQ(cases, 4);
}

INSTANTIATE_TEST_SUITE_P(All, CompressTable, testing::ValuesIn(Backends()),
                         [](const auto& backend) { return backend.param.name; });

TEST(Compress, OneBitErrorOfKnownShapes) {
  // All |delta| equal: one bit loses nothing. One element of n changed: 1 - 1/n is lost.
  DeltaStats stats{.elements = 100, .changed = 100, .sum_abs = 25, .sum_square = 6.25};
  EXPECT_NEAR(stats.OneBitError(), 0, 1e-12);
  stats = {.elements = 100, .changed = 1, .sum_abs = 2, .sum_square = 4};
  EXPECT_NEAR(stats.OneBitError(), 0.99, 1e-12);
  EXPECT_EQ(DeltaStats().OneBitError(), 0);
}

TEST(Compress, NamesTheFieldThatDoesNotFit) {
  Random random(3);
  const OwnedWeight base = OwnedWeight::Gaussian(DType::kF32, 4, 10, 1, random);
  const OwnedWeight other = OwnedWeight::Gaussian(DType::kF32, 4, 9, 1, random);
  std::vector<uint8_t> signs(8);
  std::vector<float> alpha(4);
  const CompressArgs good{base.view(), base.view(), signs, alpha};
  ThreadPool threads(1);
  const auto reject = [&](const CompressArgs& args, const std::string& field) {
    for (const auto& result :
         {BitDeltaCompressReference(args), BitDeltaCompressCpu(args, threads)}) {
      EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(result.status().message().rfind(field + ":", 0), 0u) << result.status().ToString();
    }
  };
  ASSERT_TRUE(BitDeltaCompressCpu(good, threads).ok());
  CompressArgs bad = good;
  bad.fine_tuned = other.view();
  reject(bad, "fine_tuned");
  bad = good;
  bad.base.dtype = DType::kI8;
  reject(bad, "base");
  bad = good;
  bad.base.stride = 9;
  reject(bad, "base");
  bad = good;
  bad.base.data = nullptr;
  reject(bad, "base");
  bad = good;
  bad.signs = std::span(signs).first(7);
  reject(bad, "signs");
  bad = good;
  bad.alpha = std::span(alpha).first(3);
  reject(bad, "alpha");
}

}  // namespace
}  // namespace stockpot
