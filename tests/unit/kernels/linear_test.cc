// bitdelta_linear: every backend against double precision, over shapes, dtypes and batches; and its
// promise that a row's bits do not depend on its batch.
#include "kernels/bitdelta/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/bitdelta/signs.h"
#include "tests/unit/kernels/backends.h"
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

constexpr DType kDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

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

class LinearTable : public testing::TestWithParam<SimdTarget> {};

TEST_P(LinearTable, MatchesDoublePrecision) {
  const ScopedSimdTarget target(GetParam());
  ThreadPool threads(2);
  LinearScratch scratch;
  // Around the tiles: 4 and 8 output rows, 16 and 64 of the 1-bit half; steps of 8, 16 and 32
  // columns.
  const int64_t outs[] = {0, 1, 3, 4, 7, 8, 15, 16, 17, 31, 65, 131};
  const int64_t ins[] = {0, 1, 4, 7, 31, 32, 33, 64, 97, 131};
  uint64_t seed = 1;
  for (const DType dtype : kDTypes) {
    for (const int64_t d_out : outs) {
      for (const int64_t d_in : ins) {
        const int64_t rows = static_cast<int64_t>(seed % 9);
        Problem p(rows, d_out, d_in, dtype, seed++);
        const LinearArgs args = p.args();
        ASSERT_TRUE(BitDeltaLinearCpu(args, scratch, threads).ok());
        ExpectNearReference(p, std::string(DTypeName(dtype)) + " " + std::to_string(d_out) + " x " +
                                   std::to_string(d_in));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, LinearTable, testing::ValuesIn(SimdTargets()),
                         [](const auto& target) { return target.param.name; });

}  // namespace
}  // namespace stockpot
