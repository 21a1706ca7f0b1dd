// Sign planes and residuals against the definition in double precision, and what they leave of
// deltas of known distributions.
#include "store/delta_planes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/base/aligned_buffer.h"
#include "kernels/bitdelta/signs.h"
#include "kernels/svd/low_rank.h"
#include "kernels/svd/panel_products.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

struct Matrix {
  int64_t rows, cols;
  std::vector<float> values;
  WeightMatrix view() const {
    return {
        .data = values.data(), .dtype = DType::kF32, .rows = rows, .cols = cols, .stride = cols};
  }
};

Matrix Random(int64_t rows, int64_t cols, double sigma, std::mt19937_64& random) {
  Matrix m{rows, cols, std::vector<float>(static_cast<size_t>(rows * cols))};
  std::normal_distribution<double> normal(0, sigma);
  for (float& v : m.values) v = static_cast<float>(normal(random));
  return m;
}

Matrix Sum(const Matrix& a, const Matrix& b) {
  Matrix m = a;
  for (size_t i = 0; i < m.values.size(); ++i) m.values[i] += b.values[i];
  return m;
}

double Square(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v * v;
  return sum;
}

TEST(DeltaPlanes, EqualTheRuleInDoublePrecision) {
  std::mt19937_64 random(TestSeed());
  ThreadPool threads(2);
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {37, 109}, {8, 1000}}) {
    const Matrix base = Random(rows, cols, 0.02, random);
    const Matrix tuned = Sum(base, Random(rows, cols, 1e-3, random));
    const auto made = MakePlanes(base.view(), tuned.view(), 8, threads);
    ASSERT_OK(made);
    std::vector<double> rest(base.values.size());
    for (size_t i = 0; i < rest.size(); ++i) rest[i] = tuned.values[i] - base.values[i];
    double before = Square(rest);
    EXPECT_NEAR(made->stats.sum_square, before, 1e-6 * before);
    for (const SignPlane& plane : made->planes) {
      for (int64_t r = 0; r < rows; ++r) {
        double mean = 0;
        for (int64_t c = 0; c < cols; ++c) {
          mean += std::fabs(rest[static_cast<size_t>(r * cols + c)]) / static_cast<double>(cols);
        }
        const double alpha = plane.alpha[static_cast<size_t>(r)];
        EXPECT_NEAR(alpha, mean, 1e-9 + 1e-5 * mean);
        for (int64_t c = 0; c < cols; ++c) {
          double& left = rest[static_cast<size_t>(r * cols + c)];
          const double sign = SignAt(plane.signs.data(), cols, r, c);
          // The rest is float32's there: at zero, within its rounding, the sign may be either.
          if (std::fabs(left) > 1e-8) {
            ASSERT_EQ(sign, left >= 0 ? 1.0 : -1.0);
          }
          left -= alpha * sign;
        }
      }
      const double now = Square(rest);
      EXPECT_LE(now, before * (1 + 1e-6));
      EXPECT_NEAR(plane.left, now, 1e-6 * before + 1e-12);
      before = now;
    }
    // A plane does not depend on how many follow.
    const auto one = MakePlanes(base.view(), tuned.view(), 2, threads);
    ASSERT_OK(one);
    EXPECT_EQ(one->planes[1].signs, made->planes[1].signs);
    EXPECT_EQ(one->planes[1].alpha, made->planes[1].alpha);
    EXPECT_EQ(one->planes[1].left, made->planes[1].left);
  }
}

// 1 - (E|d|)^2 / E[d^2], and again of what is left: 0.363, then, by numerical integration of the
// folded normal distribution, 0.130.
TEST(DeltaPlanes, LeaveOfAGaussianDeltaWhatTheFormulaSays) {
  std::mt19937_64 random(TestSeed());
  ThreadPool threads(2);
  const Matrix base{512, 2048, std::vector<float>(512 * 2048)};
  const Matrix tuned = Random(512, 2048, 1e-3, random);
  const auto made = MakePlanes(base.view(), tuned.view(), 3, threads);
  ASSERT_OK(made);
  const double all = made->stats.sum_square;
  EXPECT_NEAR(made->planes[0].left / all, 1 - 2 / M_PI, 0.005);
  // E of the second plane: |(|x| - m)| with m = sqrt(2 / pi), over a fine grid.
  double mean = 0, square = 0;
  const double m = std::sqrt(2 / M_PI), h = 1e-4;
  for (double x = h / 2; x < 9; x += h) {
    const double density = 2 * std::exp(-x * x / 2) / std::sqrt(2 * M_PI) * h;
    mean += std::fabs(x - m) * density;
    square += (x - m) * (x - m) * density;
  }
  EXPECT_NEAR(made->planes[1].left / all, square - mean * mean, 0.005);
  EXPECT_LT(made->planes[2].left, 0.5 * made->planes[1].left);
}

// A delta of rank 3 under noise: the planes miss much of it, the residual finds it.
TEST(DeltaPlanes, AResidualLeavesWhatItsRoundedFactorsSay) {
  std::mt19937_64 random(TestSeed());
  ThreadPool threads(2), one(1);
  const int64_t rows = 60, cols = 93;
  const Matrix base = Random(rows, cols, 0.02, random);
  const Matrix u = Random(rows, 3, 0.05, random), v = Random(3, cols, 0.05, random);
  Matrix tuned = Sum(base, Random(rows, cols, 1e-4, random));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      for (int64_t k = 0; k < 3; ++k) {
        tuned.values[static_cast<size_t>(r * cols + c)] +=
            u.values[static_cast<size_t>(r * 3 + k)] * v.values[static_cast<size_t>(k * cols + c)];
      }
    }
  }
  const auto made = MakePlanes(base.view(), tuned.view(), 1, threads);
  ASSERT_OK(made);
  const std::vector<int64_t> ranks = {1, 4, 16};
  const DeltaResidual residual =
      MakeResidual(base.view(), tuned.view(), made->planes, ranks, "w", threads);
  const DeltaResidual again =
      MakeResidual(base.view(), tuned.view(), made->planes, ranks, "w", one);
  EXPECT_EQ(residual.a, again.a);
  EXPECT_EQ(residual.b, again.b);
  EXPECT_EQ(residual.left, again.left);
  for (size_t i = 0; i < ranks.size(); ++i) {
    const std::vector<uint16_t> b = DeltaResidual::FirstColumns(residual.b, 16, ranks[i]);
    std::vector<double> rest(base.values.size());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const auto at = static_cast<size_t>(r * cols + c);
        double sum = static_cast<double>(tuned.values[at]) - base.values[at] -
                     static_cast<double>(made->planes[0].alpha[static_cast<size_t>(r)]) *
                         SignAt(made->planes[0].signs.data(), cols, r, c);
        for (int64_t k = 0; k < ranks[i]; ++k) {
          sum -= static_cast<double>(FloatFromBF16(b[static_cast<size_t>(r * ranks[i] + k)])) *
                 FloatFromBF16(residual.a[static_cast<size_t>(k * cols + c)]);
        }
        rest[at] = sum;
      }
    }
    EXPECT_NEAR(residual.left[i], Square(rest), 1e-5 * made->planes[0].left);
    EXPECT_LT(residual.left[i], i == 0 ? made->planes[0].left : residual.left[i - 1]);
  }
}

// What is left of a matrix by its best part of rank r: the singular values after the first r.
TEST(BestLowRank, LeavesLittleMoreThanTheOptimum) {
  std::mt19937_64 random(TestSeed());
  ThreadPool threads(2);
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 5}, {5, 1}, {40, 96}, {130, 70}}) {
    // Singular values 2^-i, from orthonormal vectors that a decomposition of full rank gives.
    const int64_t least = std::min(rows, cols), stride = PanelStride(cols);
    AlignedBuffer<float> memory;
    FloatMatrix e{
        .data = memory.Reserve(rows * stride), .rows = rows, .cols = cols, .stride = stride};
    std::fill_n(e.data, rows * stride, 0.0f);
    std::normal_distribution<float> normal(0, 1);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) e.row(r)[c] = normal(random);
    }
    const LowRank full = BestLowRank("vectors", e, least, threads);
    ASSERT_EQ(full.rank, least);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        double sum = 0;
        for (int64_t k = 0; k < least; ++k) {
          double norm = 0;
          for (int64_t j = 0; j < cols; ++j) {
            const double a = full.a[static_cast<size_t>(k * cols + j)];
            norm += a * a;
          }
          sum += std::ldexp(1.0, static_cast<int>(-k)) *
                 full.b[static_cast<size_t>(r * least + k)] *
                 full.a[static_cast<size_t>(k * cols + c)] / std::sqrt(norm);
        }
        e.row(r)[c] = static_cast<float>(sum);
      }
    }
    const int64_t rank = std::min<int64_t>(least, 4);
    const LowRank low = BestLowRank("w", e, rank, threads);
    double left = 0, optimum = 0;
    for (int64_t k = rank; k < least; ++k) optimum += std::ldexp(1.0, static_cast<int>(-2 * k));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        double rest = e.row(r)[c];
        for (int64_t k = 0; k < rank; ++k) {
          rest -= static_cast<double>(low.b[static_cast<size_t>(r * rank + k)]) *
                  low.a[static_cast<size_t>(k * cols + c)];
        }
        left += rest * rest;
      }
    }
    EXPECT_NEAR(left, optimum, 0.01 * optimum + 1e-9) << rows << " x " << cols;
  }
}

TEST(BestLowRank, OfNothingIsNothing) {
  ThreadPool threads(1);
  AlignedBuffer<float> memory;
  FloatMatrix e{.data = memory.Reserve(16 * 4), .rows = 4, .cols = 3, .stride = 16};
  std::fill_n(e.data, 16 * 4, 0.0f);
  EXPECT_EQ(BestLowRank("w", e, 0, threads).rank, 0);
  const LowRank zero = BestLowRank("w", e, 2, threads);
  for (const float a : zero.a) EXPECT_EQ(a, 0.0f);
}

}  // namespace
}  // namespace stockpot
