// Folded rows of bitdelta_linear on the CPU, whose signs are summed in one of several ways
// (linear.h DeltaSum, linear_columns_cpu.cc): how exact, whatever alpha and x are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/packed_signs.h"
#include "kernels/bitdelta/signs.h"
#include "tests/unit/kernels/backends.h"
#include "tests/unit/kernels/delta_batches.h"
#include "tests/unit/kernels/matrices.h"

namespace stockpot {
namespace {

// Rows of one folded variant through one bf16 weight; alpha of a plane is 1/3 of the one before.
struct Folded {
  Folded(DType x_dtype, int64_t rows, int64_t d_out, int64_t d_in, int64_t planes, Random& random)
      : weight(OwnedWeight::Gaussian(DType::kBF16, d_out, d_in, 0.02f, random)),
        x(OwnedWeight::Gaussian(x_dtype, rows, d_in, 1.0f, random)),
        y(rows, d_out, 1, std::nanf("")),
        signs(static_cast<size_t>(planes * SignBytes(d_out, d_in))),
        alpha(static_cast<size_t>(planes * d_out)) {
    for (int64_t r = 0; r < planes * d_out; ++r) {
      for (int64_t c = 0; c < d_in; ++c) {
        signs[static_cast<size_t>(r * SignRowBytes(d_in) + c / 8)] |= (random() & 1) << (c % 8);
      }
    }
    SetAlpha([](int64_t) { return 1e-3f; });
  }

  template <typename Alpha>
  void SetAlpha(const Alpha& of_output) {
    const auto d_out = static_cast<size_t>(y.view().cols);
    for (size_t i = 0; i < alpha.size(); ++i) {
      alpha[i] = of_output(static_cast<int64_t>(i % d_out)) / std::pow(3.0f, i / d_out);
    }
  }

  Status Run(Status (*linear)(const LinearArgs&), OwnedFloats& out) {
    const WeightMatrix w = weight.view(), in = x.view();
    const int64_t planes = static_cast<int64_t>(alpha.size()) / w.rows;
    packed.emplace(PackedSigns::Pack(w.rows, w.cols, signs, alpha, planes).value());
    const LayerDelta variant{.signs = &*packed};
    const LinearOutput output{.base = w, .variants = {&variant, 1}, .y = out.view()};
    const std::vector<int32_t> variant_of_row(static_cast<size_t>(in.rows), 0);
    const std::vector<DeltaSum> sum_of_row(static_cast<size_t>(in.rows), DeltaSum::kFolded);
    return linear({.x = {in.data, in.dtype, in.rows, in.cols, in.stride},
                   .outputs = {&output, 1},
                   .variant_of_row = variant_of_row,
                   .sum_of_row = sum_of_row});
  }
  void Run() {
    ASSERT_TRUE(Run(
                    [](const LinearArgs& args) {
                      ThreadPool threads(2);
                      LinearScratch scratch;
                      return BitDeltaLinearCpu(args, scratch, threads);
                    },
                    y)
                    .ok());
  }

  // sum_i S_p[o, i] x[t, i] of the first plane, in double precision.
  double SignSum(int64_t t, int64_t o) const {
    double sum = 0;
    for (int64_t i = 0; i < x.view().cols; ++i) {
      const uint8_t byte = signs[static_cast<size_t>(o * SignRowBytes(x.view().cols) + i / 8)];
      sum += (byte >> (i % 8) & 1 ? 1.0 : -1.0) * x.view().at(t, i);
    }
    return sum;
  }

  void ExpectNearReference(const std::string& what) {
    OwnedFloats want(y.view().rows, y.view().cols);
    ASSERT_TRUE(Run(BitDeltaLinearReference, want).ok());
    const WeightMatrix w = weight.view(), in = x.view();
    for (int64_t t = 0; t < in.rows; ++t) {
      double x_square = 0;
      for (int64_t i = 0; i < in.cols; ++i) x_square += std::pow(in.at(t, i), 2);
      for (int64_t o = 0; o < w.rows; ++o) {
        double w_square = 0, scale = 0;
        for (int64_t i = 0; i < w.cols; ++i) w_square += std::pow(w.at(o, i), 2);
        for (size_t i = static_cast<size_t>(o); i < alpha.size();
             i += static_cast<size_t>(w.rows)) {
          scale += std::fabs(alpha[i]);
        }
        const double norms =
            std::sqrt(x_square) * (std::sqrt(w_square) + scale * std::sqrt(w.cols));
        ASSERT_NEAR(y.view().row(t)[o], want.view().row(t)[o],
                    RelativeTolerance(w.cols) * norms + 1e-30)
            << what << " row " << t << " output " << o;
      }
    }
  }

  OwnedWeight weight, x;
  OwnedFloats y;
  std::vector<uint8_t> signs;
  std::vector<float> alpha;  // [planes, d_out]
  std::optional<PackedSigns> packed;
};

class LinearFolded : public testing::TestWithParam<SimdTarget> {
 protected:
  // Whether the target sums in 16 bits where alpha is small.
  bool SumsShorts() const {
#if defined(__x86_64__)
    return GetParam().name.rfind("AVX3", 0) == 0 && __builtin_cpu_supports("avx512bf16") != 0;
#else
    return false;
#endif
  }

 private:
  ScopedSimdTarget target_{GetParam()};
};

TEST_P(LinearFolded, IsAsExactForEveryAlpha) {
  Random random(1);
  int64_t i = 0;
  for (const int64_t d_in : {5, 64, 127, 128, 129, 511, 512, 513, 640, 1100, 2100}) {
    for (const float ratio :
         {1e-4f, 1e-3f, 0.01f, 0.02f, 0.04f, 0.06f, 0.08f, 0.1f, 0.15f, 0.2f, 0.5f, 1.0f, 30.0f}) {
      const int64_t rows = 1 + i++ * 7 % 40;
      Folded p(DType::kBF16, rows, 21, d_in, 1 + i % 2, random);
      p.SetAlpha([&](int64_t) { return ratio * 0.02f; });
      p.Run();
      p.ExpectNearReference(std::to_string(d_in) + " columns, alpha " + std::to_string(ratio));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(LinearFolded, OutputsDifferInAlphaAndInTheirWeights) {
  Random random(2);
  for (int round = 0; round < 12; ++round) {
    const int64_t d_out = 1 + static_cast<int64_t>(random() % 70), d_in = 1300;
    Folded p(DType::kBF16, 35, d_out, d_in, 1 + round % 2, random);
    p.SetAlpha([&](int64_t) { return 0.02f * std::pow(10.0f, 2 * Gaussian(random) - 2); });
    for (int64_t o = 0; o < d_out; o += 3) {  // some begin or end with zeros, or are nothing else
      const int64_t begin = static_cast<int64_t>(random() % d_in), middle = d_in / 2;
      for (int64_t c = std::min(begin, middle); c < std::max(begin, middle); ++c) {
        p.weight.Set(o, c, 0);
      }
      if (o % 9 == 0) {
        for (int64_t c = 0; c < d_in; ++c) p.weight.Set(o, c, 0);
      }
    }
    p.Run();
    p.ExpectNearReference("round " + std::to_string(round));
    if (HasFatalFailure()) return;
  }
}

TEST_P(LinearFolded, KeepsSmallDeltas) {
  // In bf16, W + alpha would lose an alpha of 2^-12 |W| entirely; it must not, whatever x is.
  Random random(3);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t d_in : {64, 2048}) {
      Folded p(dtype, 1, 1, d_in, 1, random);
      p.SetAlpha([](int64_t) { return std::ldexp(1.0f, -12); });
      for (int64_t i = 0; i < d_in; ++i) {
        p.weight.Set(0, i, i % 2 == 0 ? 1.0f : -1.0f);
        p.x.Set(0, i, 1.0f);
      }
      std::fill(p.signs.begin(), p.signs.end(), 0xFF);
      p.Run();
      const float want = std::ldexp(static_cast<float>(d_in), -12);
      EXPECT_NEAR(p.y.view().row(0)[0], want, 1e-3f * want) << DTypeName(dtype) << ' ' << d_in;
    }
  }
}

// W x is 0 here, beside a weight that is large: what is left is the error of the signs' sum.
TEST_P(LinearFolded, SignsErrAsDocumented) {
  Random random(4);
  const int64_t rows = 64, d_out = 32, d_in = 2048, zeros = 512;
  for (const bool flat : {false, true}) {  // the worst x has one |x| everywhere
    Folded p(DType::kBF16, rows, d_out, d_in, 1, random);
    for (int64_t i = 0; i < d_in; ++i) {
      for (int64_t o = 0; o < d_out; ++o) p.weight.Set(o, i, i < zeros ? 1.0f : 0.0f);
      for (int64_t t = 0; t < rows; ++t) {
        const float value = Gaussian(random);
        p.x.Set(t, i, i < zeros ? 0 : flat ? std::copysign(1.0f, value) : value);
      }
    }
    p.Run();
    double square = 0;
    for (int64_t t = 0; t < rows; ++t) {
      double x_square = 0;
      for (int64_t i = 0; i < d_in; ++i) x_square += std::pow(p.x.view().at(t, i), 2);
      for (int64_t o = 0; o < d_out; ++o) {
        const double error =
            p.y.view().row(t)[o] / static_cast<double>(p.alpha[0]) - p.SignSum(t, o);
        square += error * error / x_square;
      }
    }
    const double deviation = std::sqrt(square / (rows * d_out));
    RecordProperty(flat ? "flat" : "gaussian", std::to_string(deviation));
    EXPECT_LT(deviation, SumsShorts() ? 8e-4 : 1e-6) << flat;
    // Otherwise this test would not see what it is for.
    if (SumsShorts() && !flat) EXPECT_GT(deviation, 1e-5);
  }
}

// What is alike rounds alike: such errors must not add up over a long row. Signs that are all 1 or
// follow x; x that is constant, or has a period, or differs in one column of a block by any step.
TEST_P(LinearFolded, RegularActivationsErrNoMoreThanOthers) {
  Random random(8);
  const int64_t d_out = 8;
  for (const int64_t d_in : {512, 4096, 11008}) {
    for (const bool follow : {false, true}) {
      Folded p(DType::kBF16, 128, d_out, d_in, 1, random);
      std::fill(p.signs.begin(), p.signs.end(), 0xFF);
      p.SetAlpha([&](int64_t o) { return o < 4 ? 0.0011f : 0.0025f; });
      for (int64_t t = 0; t < 128; ++t) {
        const int64_t period = t % 4 == 0 ? 128 : t % 4 == 1 ? 2 : t % 4 == 2 ? 12 : 1 + t;
        for (int64_t i = 0; i < d_in; ++i) {
          const float value = i % period == 0 ? 1 + static_cast<float>(t) / 128 : 1.0f;
          const bool minus = follow && random() % 2 == 0 && t == 0;
          if (minus) {
            for (int64_t o = 0; o < d_out; ++o) {
              p.signs[static_cast<size_t>(o * SignRowBytes(d_in) + i / 8)] &= ~(1u << (i % 8));
            }
          }
          const uint8_t byte = p.signs[static_cast<size_t>(i / 8)];
          p.x.Set(t, i, byte >> (i % 8) & 1 ? value : -value);
        }
      }
      p.Run();
      p.ExpectNearReference(std::to_string(d_in) + (follow ? " columns, signs of x" : " columns"));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(LinearFolded, TakesTheSmallestAndTheLargestActivations) {
  Random random(5);
  const int64_t rows = 40, d_in = 1024;
  const float sizes[] = {1e-30f, 1e-20f, 1.0f, 1e20f, 1e36f};
  Folded p(DType::kBF16, rows, 19, d_in, 1, random);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < d_in; ++i) {
      p.x.Set(t, i, sizes[t % 5] * p.x.view().at(t, i));
      if (t % 7 == 0) p.x.Set(t, i, 0);
    }
  }
  p.Run();
  p.ExpectNearReference("sizes");
}

TEST_P(LinearFolded, TinyActivationsMeetLargeWeights) {
  Random random(9);
  const int64_t rows = 20, d_in = 1024;
  for (const float size : {1e-35f, 5e-37f, 2e-38f}) {
    Folded p(DType::kBF16, rows, 9, d_in, 1, random);
    for (int64_t i = 0; i < d_in; ++i) {
      for (int64_t t = 0; t < rows; ++t) {  // normal numbers: smaller ones count as 0
        p.x.Set(t, i, size * std::copysign(1 + std::fabs(Gaussian(random)), Gaussian(random)));
      }
      for (int64_t o = 0; o < 9; ++o) p.weight.Set(o, i, 1e13f * Gaussian(random));
    }
    p.SetAlpha([](int64_t) { return 3e11f; });
    p.Run();
    p.ExpectNearReference(std::to_string(std::log10(size)));
    if (HasFatalFailure()) return;
  }
}

TEST_P(LinearFolded, TakesWeightsWhoseSquaresOverflow) {
  Random random(7);
  const int64_t d_in = 700;
  Folded p(DType::kBF16, 20, 9, d_in, 1, random);
  for (int64_t o = 0; o < 9; ++o) {
    for (int64_t i = 0; i < d_in; ++i) p.weight.Set(o, i, 1e20f * Gaussian(random));
  }
  p.SetAlpha([](int64_t o) { return std::pow(10.0f, 16.0f + static_cast<float>(o % 5)); });
  p.Run();
  p.ExpectNearReference("1e20");
}

TEST_P(LinearFolded, WhatIsNotFiniteStaysInItsRow) {
  Random random(6);
  const int64_t rows = 40, d_in = 1024;
  Folded p(DType::kBF16, rows, 19, d_in, 1, random);
  p.Run();
  const OwnedFloats clean = Copy(p.y.cview());
  p.x.Set(3, 700, std::numeric_limits<float>::infinity());
  p.x.Set(17, 0, std::nanf(""));
  p.Run();
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t o = 0; o < 19; ++o) {
      if (t == 3 || t == 17) {
        EXPECT_FALSE(std::isfinite(p.y.view().row(t)[o])) << t << ' ' << o;
      } else {
        EXPECT_EQ(p.y.view().row(t)[o], clean.view().row(t)[o]) << t << ' ' << o;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, LinearFolded, testing::ValuesIn(SimdTargets()),
                         [](const auto& target) { return target.param.name; });

}  // namespace
}  // namespace stockpot
