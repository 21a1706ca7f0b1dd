// bitdelta_linear: every backend against double precision, over shapes, dtypes and batches; and its
// promise that a row's bits do not depend on its batch.
#include "kernels/bitdelta/linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/bitdelta/packed_signs.h"
#include "kernels/bitdelta/signs.h"
#include "tests/unit/kernels/backends.h"
#include "tests/unit/kernels/golden_file.h"
#include "tests/unit/kernels/matrices.h"

namespace stockpot {
namespace {

// A 1-bit delta in canonical form and packed.
struct OwnedDelta {
  OwnedDelta(int64_t d_out, int64_t d_in, int64_t scales, Random& random)
      : signs(SignBytes(d_out, d_in)), alpha(scales) {
    for (int64_t r = 0; r < d_out; ++r) {
      for (int64_t c = 0; c < d_in; ++c) {
        if (random() & 1) signs[r * SignRowBytes(d_in) + c / 8] |= 1u << (c % 8);
      }
    }
    for (float& a : alpha) a = 0.01f * std::fabs(Gaussian(random));
    packed.emplace(PackedSigns::Pack(d_out, d_in, signs, alpha).value());
  }

  std::vector<uint8_t> signs;
  std::vector<float> alpha;
  std::optional<PackedSigns> packed;
};

// Everything a call needs; variants 0, 1: 1-bit; 2: dense; 3: 1-bit with one scale and a bias.
struct Problem {
  Problem(int64_t rows, int64_t d_out, int64_t d_in, DType dtype, uint64_t seed)
      : random(seed),
        x(OwnedFloats::Gaussian(rows, d_in, random, 3)),
        y(rows, d_out, 5, std::nanf("")),
        base(OwnedWeight::Gaussian(dtype, d_out, d_in, 0.02f, random, 7)),
        dense(OwnedWeight::Gaussian(DType::kF32, d_out, d_in, 0.02f, random, 1)),
        dense_view(dense.view()),
        bias(d_out),
        variant_bias(d_out) {
    for (int i = 0; i < 3; ++i) deltas.emplace_back(d_out, d_in, i == 2 ? 1 : d_out, random);
    for (float& b : bias) b = 0.1f * Gaussian(random);
    for (float& b : variant_bias) b = 0.1f * Gaussian(random);
    variants.push_back({.signs = &*deltas[0].packed});
    variants.push_back({.signs = &*deltas[1].packed});
    variants.push_back({.dense = &dense_view});
    variants.push_back({.signs = &*deltas[2].packed, .bias = variant_bias.data()});
    for (int64_t t = 0; t < rows; ++t) {
      variant_of_row.push_back(static_cast<int32_t>(random() % 5) - 1);
    }
  }

  LinearArgs args() {
    return {.x = x.cview(),
            .base = base.view(),
            .bias = bias.data(),
            .variants = variants,
            .variant_of_row = variant_of_row,
            .y = y.view()};
  }

  Random random;
  OwnedFloats x, y;
  OwnedWeight base, dense;
  WeightMatrix dense_view;
  std::vector<OwnedDelta> deltas;
  std::vector<float> bias, variant_bias;
  std::vector<LayerDelta> variants;
  std::vector<int32_t> variant_of_row;
};

// The scale of an error of y[t, o]: |x[t]| * (|w[o]| + |alpha[o]| * sqrt(d_in)) + |bias[o]|,
// Euclidean norms. A float32 sum of n terms in a tree of lanes errs by about sqrt(n) * epsilon of
// it at most.
double ErrorScale(const Problem& p, const LinearArgs& args, int64_t t, int64_t o) {
  double x_square = 0, w_square = 0;
  const int32_t variant = args.variant_of_row.empty() ? -1 : args.variant_of_row[t];
  const WeightMatrix w = variant == 2 ? p.dense_view : args.base;
  for (int64_t i = 0; i < args.base.cols; ++i) {
    x_square += std::pow(args.x.row(t)[i], 2);
    w_square += std::pow(w.at(o, i), 2);
  }
  const double alpha = variant == 0   ? p.deltas[0].alpha[o]
                       : variant == 1 ? p.deltas[1].alpha[o]
                       : variant == 3 ? p.deltas[2].alpha[0]
                                      : 0;
  return std::sqrt(x_square) * (std::sqrt(w_square) + alpha * std::sqrt(args.base.cols)) + 0.5;
}

void ExpectNearReference(Problem& p, const std::string& what) {
  const LinearArgs args = p.args();
  OwnedFloats expected(args.x.rows, args.base.rows);
  LinearArgs reference = args;
  reference.y = expected.view();
  ASSERT_TRUE(BitDeltaLinearReference(reference).ok());
  const double epsilon = std::ldexp(1.0, -23);
  for (int64_t t = 0; t < args.x.rows; ++t) {
    for (int64_t o = 0; o < args.base.rows; ++o) {
      const double want = expected.view().row(t)[o];
      const double tolerance =
          std::min(1e-5, 4 * epsilon * std::sqrt(args.base.cols + 4.0)) * ErrorScale(p, args, t, o);
      ASSERT_NEAR(args.y.row(t)[o], want, tolerance) << what << " row " << t << " output " << o;
    }
  }
}

// A way to compute bitdelta_linear.
struct Backend {
  std::string name;
  std::function<Status(const LinearArgs&)> run;
};

void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }

std::vector<Backend> Backends() {
  std::vector<Backend> backends;
  for (const SimdTarget& target : SimdTargets()) {
    backends.push_back({target.name,
                        [target](const LinearArgs& args) {
                          const ScopedSimdTarget scoped(target);
                          ThreadPool threads(2);
                          LinearScratch scratch;
                          return BitDeltaLinearCpu(args, scratch, threads);
                        }});
  }
  return backends;
}

class LinearTable : public testing::TestWithParam<Backend> {};

TEST_P(LinearTable, MatchesDoublePrecision) {
  // Around the tiles: 4 and 8 output rows, 16 and 64 of the 1-bit half, panels of 64; steps of 8,
  // 16, 32 columns, column blocks of 1024; tiles of 3 and 6 tokens, and batches that count as long.
  const struct {
    std::vector<int64_t> rows, outs, ins;
  } tables[] = {
      {{0, 1, 2, 3, 5, 7}, {0, 1, 3, 4, 7, 8, 15, 16, 17, 31}, {0, 1, 4, 7, 31, 32, 33, 61}},
      {{1, 4, 6, 9}, {64, 65, 131}, {64, 97, 131}},
      {{13, 31}, {67, 130}, {95}},
      {{1, 7}, {33}, {1023, 1024, 1057, 2100}},
      {{9}, {9}, {127, 128, 129, 257}},
  };
  const DType dtypes[] = {DType::kBF16, DType::kF16, DType::kF32};
  uint64_t seed = 1;
  for (const auto& table : tables) {
    for (const int64_t d_out : table.outs) {
      for (const int64_t d_in : table.ins) {
        const int64_t rows = table.rows[seed % table.rows.size()];
        for (const DType dtype : dtypes) {
          Problem p(rows, d_out, d_in, dtype, seed++);
          ASSERT_TRUE(GetParam().run(p.args()).ok());
          ExpectNearReference(p, std::string(DTypeName(dtype)) + " " + std::to_string(rows) +
                                     " rows, " + std::to_string(d_out) + " x " +
                                     std::to_string(d_in));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(LinearTable, MatchesTorch) {
  GoldenFile golden;
  ASSERT_TRUE(golden.ok());
  int cases = 0;
  for (std::string name = golden.NextCase(); !name.empty(); name = golden.NextCase()) {
    if (name != "linear") continue;
    ++cases;
    const int64_t rows = golden.Number();
    const int64_t d_out = golden.Number();
    const int64_t d_in = golden.Number();
    const DType dtype = golden.Type();
    const std::vector<float> x = golden.Floats(rows * d_in);
    const OwnedWeight weight = golden.Weight(dtype, d_out, d_in);
    const std::vector<uint8_t> signs = golden.Bytes(SignBytes(d_out, d_in));
    const std::vector<float> alpha = golden.Floats(d_out);
    const std::vector<float> bias = golden.Floats(d_out);
    const std::vector<double> want = golden.Doubles(rows * d_out);
    const PackedSigns packed = PackedSigns::Pack(d_out, d_in, signs, alpha).value();
    const LayerDelta variant{.signs = &packed};
    const std::vector<int32_t> variant_of_row(rows, 0);
    std::vector<float> y(want.size());
    ASSERT_TRUE(GetParam()
                    .run({.x = {x.data(), rows, d_in, d_in},
                          .base = weight.view(),
                          .bias = bias.data(),
                          .variants = {&variant, 1},
                          .variant_of_row = variant_of_row,
                          .y = {y.data(), rows, d_out, d_out}})
                    .ok());
    for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], want[i], 2e-6);
  }
  EXPECT_EQ(cases, 3);
}

INSTANTIATE_TEST_SUITE_P(All, LinearTable, testing::ValuesIn(Backends()),
                         [](const auto& backend) { return backend.param.name; });

// Rows of `batch` of p, in this order, computed in one call.
OwnedFloats RunBatch(const Problem& p, const LinearArgs& all, const std::vector<int64_t>& batch,
                     ThreadPool& threads, LinearScratch& scratch) {
  const int64_t rows = static_cast<int64_t>(batch.size());
  OwnedFloats x(rows, all.base.cols, 1);
  OwnedFloats y(rows, all.base.rows, 2);
  std::vector<int32_t> variant_of_row;
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(all.x.row(batch[i]), all.base.cols, x.view().row(i));
    variant_of_row.push_back(all.variant_of_row[batch[i]]);
  }
  LinearArgs args = all;
  args.x = x.cview();
  args.variants = p.variants;
  args.variant_of_row = variant_of_row;
  args.y = y.view();
  EXPECT_TRUE(BitDeltaLinearCpu(args, scratch, threads).ok());
  return y;
}

class LinearTargets : public testing::TestWithParam<SimdTarget> {};

TEST_P(LinearTargets, RowsDoNotDependOnTheirBatch) {
  const ScopedSimdTarget target(GetParam());
  const uint64_t seed = std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  std::vector<std::unique_ptr<ThreadPool>> pools;
  for (const int count : {1, 2, 3}) pools.push_back(std::make_unique<ThreadPool>(count));
  LinearScratch scratch;
  const DType dtypes[] = {DType::kBF16, DType::kF16, DType::kF32};
  for (int round = 0; round < 24; ++round) {
    const int64_t d_out = 1 + static_cast<int64_t>(random() % 200);
    const int64_t d_in = round % 6 == 0 ? 1500 : 1 + static_cast<int64_t>(random() % 200);
    Problem p(40, d_out, d_in, dtypes[round % 3], random());
    const LinearArgs all = p.args();
    ASSERT_TRUE(BitDeltaLinearCpu(all, scratch, *pools[0]).ok());
    for (int repeat = 0; repeat < 6; ++repeat) {
      std::vector<int64_t> batch(1 + random() % (repeat % 2 == 0 ? 8 : 40));
      for (int64_t& t : batch) t = static_cast<int64_t>(random() % 40);
      OwnedFloats y = RunBatch(p, all, batch, *pools[random() % 3], scratch);
      for (size_t i = 0; i < batch.size(); ++i) {
        ASSERT_EQ(0, std::memcmp(y.view().row(static_cast<int64_t>(i)), all.y.row(batch[i]),
                                 static_cast<size_t>(d_out) * sizeof(float)))
            << d_out << " x " << d_in << ", row " << batch[i] << " in a batch of " << batch.size();
      }
    }
  }
}

TEST_P(LinearTargets, AlphaMayOverflowNothing) {
  // The reference code of BitDelta rounds S x to fp16 before alpha; ours must not.
  const ScopedSimdTarget target(GetParam());
  const int64_t d_in = 4096;
  const OwnedWeight base(DType::kBF16, 1, d_in);
  const std::vector<uint8_t> signs(static_cast<size_t>(SignBytes(1, d_in)), 0xFF);
  const std::vector<float> alpha = {1e-4f};
  const PackedSigns packed = PackedSigns::Pack(1, d_in, signs, alpha).value();
  const LayerDelta variant{.signs = &packed};
  const std::vector<float> x(static_cast<size_t>(d_in), 100.0f);
  const std::vector<int32_t> rows = {0};
  float y = 0;
  ThreadPool threads(1);
  LinearScratch scratch;
  ASSERT_TRUE(BitDeltaLinearCpu({.x = {x.data(), 1, d_in, d_in},
                                 .base = base.view(),
                                 .variants = {&variant, 1},
                                 .variant_of_row = rows,
                                 .y = {&y, 1, 1, 1}},
                                scratch, threads)
                  .ok());
  EXPECT_FLOAT_EQ(y, 40.96f);  // S x = 409600 is beyond fp16
}

INSTANTIATE_TEST_SUITE_P(Simd, LinearTargets, testing::ValuesIn(SimdTargets()),
                         [](const auto& target) { return target.param.name; });

TEST(PackedSigns, KeepsEverySign) {
  Random random(5);
  for (const int64_t d_out : {1, 15, 16, 17, 33}) {
    for (const int64_t d_in : {1, 3, 4, 5, 31, 32, 33, 70}) {
      const OwnedDelta delta(d_out, d_in, d_out, random);
      const PackedSigns::Layout& layout = delta.packed->layout();
      for (int64_t r = 0; r < d_out; ++r) {
        EXPECT_EQ(layout.alpha.data()[r], delta.alpha[r]);
        for (int64_t c = 0; c < d_in; ++c) {
          ASSERT_EQ(layout.SignAt(r, c), SignAt(delta.signs.data(), d_in, r, c)) << r << ' ' << c;
        }
      }
      EXPECT_GE(delta.packed->bytes(), SignBytes(d_out, d_in));
    }
  }
}

TEST(PackedSigns, NamesTheFieldThatDoesNotFit) {
  const std::vector<uint8_t> signs(2 * 3);
  const std::vector<float> alpha(2);
  ASSERT_TRUE(PackedSigns::Pack(2, 20, signs, alpha).ok());
  const auto reject = [&](const Result<PackedSigns>& result, const std::string& field) {
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(result.status().message().rfind(field, 0), 0u) << result.status().ToString();
  };
  reject(PackedSigns::Pack(2, 30, signs, alpha), "signs");
  reject(PackedSigns::Pack(-1, 20, signs, alpha), "signs");
  reject(PackedSigns::Pack(2, 20, signs, std::vector<float>(3)), "alpha");
}

TEST(Linear, NamesTheFieldThatDoesNotFitAndLeavesYAlone) {
  Problem p(3, 4, 10, DType::kBF16, 1);
  Problem narrow(3, 4, 9, DType::kBF16, 2);
  ThreadPool threads(1);
  LinearScratch scratch;
  const LinearArgs good = p.args();
  const auto reject = [&](const LinearArgs& args, const std::string& field) {
    for (const Status& status :
         {BitDeltaLinearReference(args), BitDeltaLinearCpu(args, scratch, threads)}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << field;
      EXPECT_EQ(status.message().rfind(field, 0), 0u) << status.ToString();
    }
    EXPECT_TRUE(std::isnan(good.y.row(0)[0]));
  };
  LinearArgs bad = good;
  bad.x = narrow.args().x;
  reject(bad, "x:");
  bad = good;
  bad.y.cols = 5;
  reject(bad, "y:");
  bad = good;
  bad.y.rows = 2;
  reject(bad, "y:");
  bad = good;
  bad.base.dtype = DType::kU8;
  reject(bad, "base:");
  bad = good;
  bad.base.stride = 3;
  reject(bad, "base:");
  bad = good;
  bad.variants = narrow.variants;
  reject(bad, "variants[0]: signs");
  bad = good;
  LayerDelta both[4] = {p.variants[0], p.variants[1], p.variants[2], p.variants[3]};
  both[1].dense = &p.dense_view;
  bad.variants = both;
  reject(bad, "variants[1]:");
  both[1].dense = nullptr;
  WeightMatrix wrong = p.dense_view;
  wrong.rows = 3;
  both[2].dense = &wrong;
  reject(bad, "variants[2]: dense:");
  bad = good;
  const int32_t outside[3] = {0, 4, 0};
  bad.variant_of_row = outside;
  reject(bad, "variant_of_row:");
  const int32_t below[3] = {0, -2, 0};
  bad.variant_of_row = below;
  reject(bad, "variant_of_row:");
  bad.variant_of_row = std::span(below).first(2);
  reject(bad, "variant_of_row:");
}

}  // namespace
}  // namespace stockpot
