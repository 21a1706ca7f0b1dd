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

// 1-bit planes in canonical form and packed. `scales`: d_out or 1 a plane.
struct OwnedDelta {
  OwnedDelta(int64_t d_out, int64_t d_in, int64_t scales, int64_t planes, Random& random)
      : signs(planes * SignBytes(d_out, d_in)), alpha(planes * scales) {
    for (int64_t row = 0; row < planes * d_out; ++row) {
      for (int64_t c = 0; c < d_in; ++c) {
        if (random() & 1) signs[row * SignRowBytes(d_in) + c / 8] |= 1u << (c % 8);
      }
    }
    const size_t large = random() % 2;
    // Every 16 rows another size: small ones are summed in another way (linear_columns_cpu.cc).
    for (size_t i = 0; i < alpha.size(); ++i) {
      alpha[i] = ((i / 16 + large) % 2 == 0 ? 3e-4f : 0.01f) * std::fabs(Gaussian(random));
    }
    packed.emplace(PackedSigns::Pack(d_out, d_in, signs, alpha, planes).value());
  }

  std::vector<uint8_t> signs;
  std::vector<float> alpha;
  std::optional<PackedSigns> packed;
};

// One weight and its variants. 0: one plane; 1: three planes; 2: dense; 3: one scale for the matrix
// and a bias; 4: two planes with a scale each for the matrix.
struct Layer {
  static constexpr int kVariants = 5;

  Layer(int64_t rows, int64_t d_out, int64_t d_in, DType dtype, Random& random)
      : y(rows, d_out, 5, std::nanf("")),
        base(OwnedWeight::Gaussian(dtype, d_out, d_in, 0.02f, random, 7)),
        dense(OwnedWeight::Gaussian(DType::kF32, d_out, d_in, 0.02f, random, 1)),
        dense_view(dense.view()),
        bias(d_out),
        variant_bias(d_out) {
    deltas.emplace_back(d_out, d_in, d_out, 1, random);
    deltas.emplace_back(d_out, d_in, d_out, 3, random);
    deltas.emplace_back(d_out, d_in, 1, 1, random);
    deltas.emplace_back(d_out, d_in, 1, 2, random);
    for (float& b : bias) b = 0.1f * Gaussian(random);
    for (float& b : variant_bias) b = 0.1f * Gaussian(random);
    variants.push_back({.signs = &*deltas[0].packed});
    variants.push_back({.signs = &*deltas[1].packed});
    variants.push_back({.dense = &dense_view});
    variants.push_back({.signs = &*deltas[2].packed, .bias = variant_bias.data()});
    variants.push_back({.signs = &*deltas[3].packed});
  }

  LinearOutput output() {
    return {.base = base.view(), .bias = bias.data(), .variants = variants, .y = y.view()};
  }

  OwnedFloats y;
  OwnedWeight base, dense;
  WeightMatrix dense_view;
  std::vector<OwnedDelta> deltas;
  std::vector<float> bias, variant_bias;
  std::vector<LayerDelta> variants;
};

// Everything a call over several weights [outs[i], d_in] needs. Variants and sums are drawn per
// row.
struct Problem {
  Problem(int64_t rows, const std::vector<int64_t>& outs, int64_t d_in, DType dtype, uint64_t seed,
          DType x_dtype = DType::kF32)
      : random(seed), x(OwnedWeight::Gaussian(x_dtype, rows, d_in, 1.0f, random, 3)) {
    for (const int64_t d_out : outs) {
      layers.push_back(std::make_unique<Layer>(rows, d_out, d_in, dtype, random));
      // One variant is dense in this weight and 1-bit in the next.
      std::vector<LayerDelta>& table = layers.back()->variants;
      std::rotate(table.begin(), table.begin() + outputs.size() % 2, table.end());
      outputs.push_back(layers.back()->output());
    }
    for (int64_t t = 0; t < rows; ++t) {
      variant_of_row.push_back(static_cast<int32_t>(random() % (Layer::kVariants + 1)) - 1);
      sum_of_row.push_back(random() % 2 == 0 ? DeltaSum::kApart : DeltaSum::kFolded);
    }
  }

  LinearArgs args() const {
    return {
        .x = X(), .outputs = outputs, .variant_of_row = variant_of_row, .sum_of_row = sum_of_row};
  }
  LinearInput X() const {
    const WeightMatrix view = x.view();
    return {view.data, view.dtype, view.rows, view.cols, view.stride};
  }

  Random random;
  OwnedWeight x;
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<LinearOutput> outputs;
  std::vector<int32_t> variant_of_row;
  std::vector<DeltaSum> sum_of_row;
};

// The scale of an error of y[t, o]: |x[t]| * (|w[o]| + sum_p alpha_p[o] * sqrt(d_in)) + |bias[o]|,
// Euclidean norms. A float32 sum of n terms in a tree of lanes errs by about sqrt(n) * epsilon of
// it at most; a folded weight's rounding is within the first factor.
double ErrorScale(const LinearArgs& args, const LinearOutput& output, int64_t t, int64_t o) {
  double x_square = 0, w_square = 0, alpha = 0;
  const LayerDelta* variant = VariantOfRow(args, output, t);
  const bool dense = variant != nullptr && variant->dense != nullptr;
  const WeightMatrix& w = dense ? *variant->dense : output.base;
  for (int64_t i = 0; i < w.cols; ++i) {
    x_square += std::pow(args.x.at(t, i), 2);
    w_square += std::pow(w.at(o, i), 2);
  }
  if (variant != nullptr && variant->signs != nullptr) {
    const PackedSigns::Layout& signs = variant->signs->layout();
    for (int64_t p = 0; p < signs.planes; ++p) alpha += signs.scales(p)[o];
  }
  const float* bias = BiasOfRow(args, output, t);
  return std::sqrt(x_square) * (std::sqrt(w_square) + alpha * std::sqrt(w.cols)) +
         (bias == nullptr ? 0.0 : std::fabs(bias[o]));
}

void ExpectNearReference(const Problem& p, const std::string& what) {
  const LinearArgs args = p.args();
  std::vector<OwnedFloats> expected;
  std::vector<LinearOutput> outputs = p.outputs;
  expected.reserve(outputs.size());
  for (LinearOutput& output : outputs) {
    expected.emplace_back(args.x.rows, output.base.rows);
    output.y = expected.back().view();
  }
  LinearArgs reference = args;
  reference.outputs = outputs;
  ASSERT_TRUE(BitDeltaLinearReference(reference).ok());
  const double epsilon = std::ldexp(1.0, -23);
  const double factor = std::min(1e-5, 4 * epsilon * std::sqrt(args.x.cols + 4.0));
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (int64_t t = 0; t < args.x.rows; ++t) {
      for (int64_t o = 0; o < outputs[i].base.rows; ++o) {
        ASSERT_NEAR(p.outputs[i].y.row(t)[o], outputs[i].y.row(t)[o],
                    factor * ErrorScale(args, p.outputs[i], t, o) + 1e-30)
            << what << " weight " << i << " row " << t << " output " << o << " variant "
            << args.variant_of_row[t];
      }
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
    backends.push_back({target.name, [target](const LinearArgs& args) {
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
  // Around the tiles: 4 and 8 output rows, 16 of a panel and of the 1-bit half, 64; steps of 8, 16,
  // 32 columns, column blocks of 256, 512, 1024 and 2048, slabs of 4096; tiles of 3 and 6
  // tokens, one or two, batches that count as long, passes of 512 rows. Every other problem has
  // several weights.
  const struct {
    std::vector<int64_t> rows, outs, ins;
  } tables[] = {
      {{0, 1, 2, 3, 5, 7}, {0, 1, 3, 4, 7, 8, 15, 16, 17, 31}, {0, 1, 4, 7, 31, 32, 33, 61}},
      {{1, 4, 6, 9}, {64, 65, 131}, {64, 97, 131}},
      {{13, 31}, {67, 130}, {95}},
      {{1, 7, 80}, {33}, {255, 256, 257, 1023, 1024, 1057, 2100}},
      {{9}, {9}, {127, 128, 129, 257}},
      {{7, 80}, {5}, {4095, 4096, 4097}},
      {{511, 513}, {18}, {37}},
  };
  const DType dtypes[] = {DType::kBF16, DType::kF16, DType::kF32};
  uint64_t seed = 1;
  for (const auto& table : tables) {
    for (const int64_t d_out : table.outs) {
      for (const int64_t d_in : table.ins) {
        const int64_t rows = table.rows[seed % table.rows.size()];
        for (const DType dtype : dtypes) {
          std::vector<int64_t> outs = {d_out};
          if (seed % 2 == 0) outs.insert(outs.end(), {1, 20});
          for (const DType x_dtype : {DType::kF32, DType::kBF16}) {
            const Problem p(rows, outs, d_in, dtype, seed, x_dtype);
            ASSERT_TRUE(GetParam().run(p.args()).ok());
            ExpectNearReference(p, std::string(DTypeName(dtype)) + ", x " +
                                       std::string(DTypeName(x_dtype)) + ", " +
                                       std::to_string(rows) + " rows, " + std::to_string(d_out) +
                                       " x " + std::to_string(d_in));
            if (HasFatalFailure()) return;
          }
          ++seed;
        }
      }
    }
  }
}

TEST_P(LinearTable, TakesLongRowsOfBFloat16) {
  for (const int64_t d_in : {8191, 8192, 8230}) {  // slabs of pairs have 8192 columns
    Problem p(40, {6}, d_in, DType::kBF16, 6, DType::kBF16);
    std::fill(p.variant_of_row.begin(), p.variant_of_row.end(), -1);
    ASSERT_TRUE(GetParam().run(p.args()).ok());
    ExpectNearReference(p, std::to_string(d_in));
  }
}

TEST_P(LinearTable, FoldsRunsOfEveryLength) {
  // Rows of one variant, bf16 through bf16: vectors of 16 tokens, four of them a tile; tiles of 4
  // rows; blocks of 64 columns, four of them packed at a time, words of 32; chunks of 3072 outputs
  // a thread.
  struct Shape {
    int64_t rows, d_out, d_in;
  };
  std::vector<Shape> shapes = {{3, 6200, 40}, {65, 6145, 33}, {512, 20, 70}, {513, 5, 129}};
  const int64_t outs[] = {1, 3, 4, 5, 15, 16, 17, 37};
  const int64_t ins[] = {1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 128, 255, 256, 257, 321};
  size_t i = 0;
  for (const int64_t rows : {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 129}) {
    for (int repeat = 0; repeat < 4; ++repeat, ++i) {
      shapes.push_back({rows, outs[i % std::size(outs)], ins[i * 7 % std::size(ins)]});
    }
  }
  for (const Shape& shape : shapes) {
    Problem p(shape.rows, {shape.d_out}, shape.d_in, DType::kBF16, i++, DType::kBF16);
    std::fill(p.sum_of_row.begin(), p.sum_of_row.end(), DeltaSum::kFolded);
    for (const int32_t variant : {0, 1, 4}) {
      std::fill(p.variant_of_row.begin(), p.variant_of_row.end(), variant);
      ASSERT_TRUE(GetParam().run(p.args()).ok());
      ExpectNearReference(p, std::to_string(shape.rows) + " rows, " + std::to_string(shape.d_out) +
                                 " x " + std::to_string(shape.d_in));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(LinearTable, TakesBasesOfSeveralTypesInOneCall) {
  Problem p(21, {18}, 100, DType::kBF16, 8);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    p.layers.push_back(std::make_unique<Layer>(21, 33, 100, dtype, p.random));
    p.outputs.push_back(p.layers.back()->output());
  }
  ASSERT_TRUE(GetParam().run(p.args()).ok());
  ExpectNearReference(p, "mixed");
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
    const LinearOutput output{.base = weight.view(),
                              .bias = bias.data(),
                              .variants = {&variant, 1},
                              .y = {y.data(), rows, d_out, d_out}};
    for (const DeltaSum sum : {DeltaSum::kApart, DeltaSum::kFolded}) {
      const std::vector<DeltaSum> sum_of_row(rows, sum);
      ASSERT_TRUE(GetParam()
                      .run({.x = {x.data(), rows, d_in, d_in},
                            .outputs = {&output, 1},
                            .variant_of_row = variant_of_row,
                            .sum_of_row = sum_of_row})
                      .ok());
      for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], want[i], 2e-6);
    }
  }
  EXPECT_EQ(cases, 3);
}

INSTANTIATE_TEST_SUITE_P(All, LinearTable, testing::ValuesIn(Backends()),
                         [](const auto& backend) { return backend.param.name; });

// Rows of `batch` of p, in this order, through weight `i` of p alone.
OwnedFloats RunBatch(const Problem& p, size_t i, const std::vector<int64_t>& batch,
                     ThreadPool& threads, LinearScratch& scratch) {
  const int64_t rows = static_cast<int64_t>(batch.size());
  LinearOutput output = p.outputs[i];
  const LinearInput all = p.X();
  OwnedWeight x(all.dtype, rows, all.cols, 1);
  OwnedFloats y(rows, output.base.rows, 2);
  std::vector<int32_t> variant_of_row;
  std::vector<DeltaSum> sum_of_row;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < all.cols; ++c) x.Set(r, c, all.at(batch[r], c));
    variant_of_row.push_back(p.variant_of_row[batch[r]]);
    sum_of_row.push_back(p.sum_of_row[batch[r]]);
  }
  output.y = y.view();
  EXPECT_TRUE(BitDeltaLinearCpu({.x = {x.view().data, all.dtype, rows, all.cols, x.view().stride},
                                 .outputs = {&output, 1},
                                 .variant_of_row = variant_of_row,
                                 .sum_of_row = sum_of_row},
                                scratch, threads)
                  .ok());
  return y;
}

class LinearTargets : public testing::TestWithParam<SimdTarget> {};

// Whether the target's kernels multiply pairs of bf16 on this processor.
bool MultipliesPairs(const SimdTarget& target) {
#if defined(__x86_64__)
  return target.name.rfind("AVX3", 0) == 0 && __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

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
  constexpr int64_t kRows = 120;  // the base's share of them counts as long
  for (int round = 0; round < 24; ++round) {
    const int64_t d_out = 1 + static_cast<int64_t>(random() % 200);
    const int64_t d_in = round == 7 || round == 9 ? 4500
                         : round % 6 == 0         ? 1500
                                                  : 1 + random() % 200;
    const Problem p(kRows, {d_out, 1 + static_cast<int64_t>(random() % 50)}, d_in,
                    dtypes[round % 3], random(), round / 6 % 2 == 0 ? DType::kF32 : DType::kBF16);
    ASSERT_TRUE(BitDeltaLinearCpu(p.args(), scratch, *pools[0]).ok());
    for (int repeat = 0; repeat < 6; ++repeat) {
      const size_t weight = random() % 2;
      const LinearOutput& all = p.outputs[weight];
      std::vector<int64_t> batch(1 + random() % (repeat % 2 == 0 ? 8 : kRows));
      for (int64_t& t : batch) t = static_cast<int64_t>(random() % kRows);
      OwnedFloats y = RunBatch(p, weight, batch, *pools[random() % 3], scratch);
      for (size_t i = 0; i < batch.size(); ++i) {
        ASSERT_EQ(0, std::memcmp(y.view().row(static_cast<int64_t>(i)), all.y.row(batch[i]),
                                 static_cast<size_t>(all.base.rows) * sizeof(float)))
            << all.base.rows << " x " << d_in << ", row " << batch[i] << " in a batch of "
            << batch.size();
      }
    }
  }
}

TEST_P(LinearTargets, BFloat16CountsAsTheFloat32ItStandsFor) {
  const ScopedSimdTarget target(GetParam());
  ThreadPool threads(2);
  LinearScratch scratch;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (dtype == DType::kBF16 && MultipliesPairs(GetParam())) continue;
    Problem p(30, {33}, 1100, dtype, 3, DType::kBF16);
    ASSERT_TRUE(BitDeltaLinearCpu(p.args(), scratch, threads).ok());
    OwnedFloats x(30, 1100), y(30, 33);
    for (int64_t t = 0; t < 30; ++t) {
      for (int64_t c = 0; c < 1100; ++c) x.view().row(t)[c] = p.x.view().at(t, c);
    }
    LinearOutput output = p.outputs[0];
    output.y = y.view();
    LinearArgs args = p.args();
    args.x = x.cview();
    args.outputs = {&output, 1};
    ASSERT_TRUE(BitDeltaLinearCpu(args, scratch, threads).ok());
    for (int64_t t = 0; t < 30; ++t) {
      ASSERT_EQ(0, std::memcmp(y.view().row(t), p.outputs[0].y.row(t), 33 * sizeof(float)))
          << DTypeName(dtype) << " row " << t;
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
  const LinearOutput output{.base = base.view(), .variants = {&variant, 1}, .y = {&y, 1, 1, 1}};
  ASSERT_TRUE(BitDeltaLinearCpu(
                  {.x = {x.data(), 1, d_in, d_in}, .outputs = {&output, 1}, .variant_of_row = rows},
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
      const int64_t planes = 1 + d_in % 3;
      const OwnedDelta delta(d_out, d_in, d_out, planes, random);
      const PackedSigns::Layout& layout = delta.packed->layout();
      for (int64_t p = 0; p < planes; ++p) {
        const uint8_t* plane = delta.signs.data() + p * SignBytes(d_out, d_in);
        for (int64_t r = 0; r < d_out; ++r) {
          EXPECT_EQ(layout.scales(p)[r], delta.alpha[p * d_out + r]);
          for (int64_t c = 0; c < d_in; ++c) {
            ASSERT_EQ(layout.SignAt(p, r, c), SignAt(plane, d_in, r, c)) << r << ' ' << c;
          }
        }
      }
      EXPECT_EQ(delta.packed->planes(), planes);
      EXPECT_GE(delta.packed->bytes(), planes * SignBytes(d_out, d_in));
    }
  }
}

TEST(PackedSigns, ThreadsChangeNothing) {
  Random random(6);
  ThreadPool threads(3);
  for (const int64_t d_out : {0, 1, 2000, 5000}) {
    const int64_t d_in = 70, planes = 2;
    const OwnedDelta delta(d_out, d_in, d_out, planes, random);
    const PackedSigns packed =
        PackedSigns::Pack(d_out, d_in, delta.signs, delta.alpha, planes, &threads).value();
    ASSERT_EQ(packed.bytes(), delta.packed->bytes());
    const int64_t words = planes * packed.layout().row_blocks * packed.layout().column_words;
    if (words == 0) continue;
    ASSERT_EQ(0, std::memcmp(packed.layout().words.data(), delta.packed->layout().words.data(),
                             static_cast<size_t>(words * kSignBlockRows) * sizeof(uint32_t)));
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
  reject(PackedSigns::Pack(2, 20, signs, alpha, 2), "signs");
  reject(PackedSigns::Pack(2, 20, signs, alpha, 0), "planes");
  reject(PackedSigns::Pack(2, 20, signs, alpha, kMaxSignPlanes + 1), "planes");
}

TEST(Linear, NamesTheFieldThatDoesNotFitAndLeavesYAlone) {
  Problem p(3, {4}, 10, DType::kBF16, 1);
  const Problem narrow(3, {4}, 9, DType::kBF16, 2);
  ThreadPool threads(1);
  LinearScratch scratch;
  LinearOutput output = p.outputs[0];
  const auto reject = [&](const LinearArgs& args, const std::string& field) {
    for (const Status& status :
         {BitDeltaLinearReference(args), BitDeltaLinearCpu(args, scratch, threads)}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << field;
      EXPECT_EQ(status.message().rfind(field, 0), 0u) << status.ToString();
    }
    EXPECT_TRUE(std::isnan(p.outputs[0].y.row(0)[0]));
  };
  const auto reject_output = [&](const LinearOutput& bad, const std::string& field) {
    LinearArgs args = p.args();
    args.outputs = {&bad, 1};
    reject(args, field);
    const LinearOutput second[2] = {p.outputs[0], bad};  // nothing is written for the first
    args.outputs = second;
    reject(args, "outputs[1]: " + field);
  };
  output.y.cols = 5;
  reject_output(output, "y:");
  output = p.outputs[0];
  output.y.rows = 2;
  reject_output(output, "y:");
  output = p.outputs[0];
  output.base.dtype = DType::kU8;
  reject_output(output, "base:");
  output = p.outputs[0];
  output.base.stride = 3;
  reject_output(output, "base:");
  output = p.outputs[0];
  output.variants = narrow.outputs[0].variants;
  reject_output(output, "variants[0]: signs");
  std::vector<LayerDelta> both = p.layers[0]->variants;
  both[1].dense = &p.layers[0]->dense_view;
  output.variants = both;
  reject_output(output, "variants[1]:");
  both[1].dense = nullptr;
  WeightMatrix wrong = p.layers[0]->dense_view;
  wrong.rows = 3;
  both[2].dense = &wrong;
  reject_output(output, "variants[2]: dense:");

  LinearArgs bad = p.args();
  bad.x = narrow.args().x;
  reject(bad, "x:");
  bad = p.args();
  bad.x.dtype = DType::kF16;
  reject(bad, "x: dtype");
  bad = p.args();
  bad.outputs = {};
  reject(bad, "outputs:");
  bad = p.args();
  const int32_t outside[3] = {0, Layer::kVariants, 0};
  bad.variant_of_row = outside;
  reject(bad, "variant_of_row:");
  const int32_t below[3] = {0, -2, 0};
  bad.variant_of_row = below;
  reject(bad, "variant_of_row:");
  bad.variant_of_row = std::span(below).first(2);
  reject(bad, "variant_of_row:");
  bad = p.args();
  bad.sum_of_row = bad.sum_of_row.first(2);
  reject(bad, "sum_of_row:");
}

}  // namespace
}  // namespace stockpot
