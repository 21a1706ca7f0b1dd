// Eigenvalues and vectors of PartialEigen, held against their definition in double precision and
// against the one-sided Jacobi of svd.h (the eigenvalues of a positive matrix are its singular
// values).
#include "kernels/svd/partial_eigen.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/svd/panel_products.h"
#include "kernels/svd/svd.h"

namespace stockpot {
namespace {

using Matrix = std::vector<double>;  // [n, n]
constexpr double kEpsilon = 0x1p-24;

Matrix Symmetric(int64_t n, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  Matrix a(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) a[i * n + j] = a[j * n + i] = normal(random);
  }
  return a;
}

// D^T D of a [rows, n] D, whose columns shrink by `fall` from one to the next.
Matrix Gram(int64_t n, int64_t rows, double fall, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  std::vector<double> d(static_cast<size_t>(rows * n));
  for (int64_t i = 0; i < rows * n; ++i) d[i] = normal(random) * std::pow(fall, i % n);
  Matrix a(static_cast<size_t>(n * n));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) a[i * n + j] += d[r * n + i] * d[r * n + j];
    }
  }
  return a;
}

Matrix Diagonal(int64_t n, const std::function<double(int64_t)>& value) {
  Matrix a(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) a[i * n + i] = value(i);
  return a;
}

double Norm(const Matrix& a) {
  return std::sqrt(std::inner_product(a.begin(), a.end(), a.begin(), 0.0));
}

void Fill(PartialEigen& eigen, const Matrix& a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const bool is_read = j >= i / kPanelAlign * kPanelAlign;
      eigen.matrix()[i * eigen.stride() + j] = is_read ? static_cast<float>(a[i * n + j]) : 1e6f;
    }
  }
}

bool Decompose(PartialEigen& eigen, const Matrix& a, int64_t n) {
  Fill(eigen, a, n);
  return eigen.Decompose();
}

// ||A x - value x|| and |x_i . x_j - (i == j)|, at most.
void ExpectVectors(const Matrix& a, int64_t n, PartialEigen& eigen, int64_t first, int64_t count,
                   const std::string& what) {
  PartialEigen::Columns x;
  ASSERT_TRUE(eigen.Vectors(first, count, &x)) << what;
  double residual = 0, angle = 0;
  for (int64_t c = 0; c < count; ++c) {
    double energy = 0;
    for (int64_t i = 0; i < n; ++i) {
      double sum = -eigen.values()[first + c] * x.data[i * x.stride + c];
      for (int64_t j = 0; j < n; ++j) sum += a[i * n + j] * x.data[j * x.stride + c];
      energy += sum * sum;
    }
    residual = std::max(residual, std::sqrt(energy));
    for (int64_t d = 0; d <= c; ++d) {
      double dot = c == d ? -1 : 0;
      for (int64_t i = 0; i < n; ++i) {
        dot += static_cast<double>(x.data[i * x.stride + c]) * x.data[i * x.stride + d];
      }
      angle = std::max(angle, std::fabs(dot));
    }
  }
  const double steps = 4 + std::sqrt(static_cast<double>(n));
  EXPECT_LE(residual, 2 * steps * kEpsilon * Norm(a)) << what;
  EXPECT_LE(angle, 2e-6 + 2 * steps * kEpsilon) << what;
}

TEST(PartialEigenTest, ValuesAndVectorsOfEverySize) {
  std::mt19937_64 random(7);
  for (const int64_t n :
       {1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 66, 97, 130, 200}) {
    for (const auto& [name, a] :
         {std::pair("symmetric", Symmetric(n, random)), std::pair("gram", Gram(n, n, 1, random)),
          std::pair("tall", Gram(n, 3 * n, 1, random)),
          std::pair("falling", Gram(n, n, 0.9, random))}) {
      const std::string what = std::string(name) + " " + std::to_string(n);
      PartialEigen eigen(n);
      ASSERT_TRUE(Decompose(eigen, a, n)) << what;
      const auto values = eigen.values();
      ASSERT_TRUE(std::is_sorted(values.begin(), values.end()));
      double trace = 0, squares = 0, sum = 0;
      for (int64_t i = 0; i < n; ++i) {
        trace += a[i * n + i];
        sum += values[i];
        squares += values[i] * values[i];
      }
      EXPECT_NEAR(sum, trace, 8 * kEpsilon * Norm(a) * std::sqrt(n)) << what;
      EXPECT_NEAR(std::sqrt(squares), Norm(a), 8 * kEpsilon * Norm(a)) << what;
      if (what.starts_with("falling") && n > 40) continue;  // vectors of what float32 calls zero
      ExpectVectors(a, n, eigen, 0, n, what);
      ExpectVectors(a, n, eigen, 0, (n + 1) / 3, what);
      ExpectVectors(a, n, eigen, n - (n + 1) / 3, (n + 1) / 3, what);
    }
  }
}

TEST(PartialEigenTest, AgreesWithJacobi) {
  std::mt19937_64 random(8);
  for (const int64_t n : {5, 40, 75}) {
    const Matrix a = Gram(n, 2 * n, 0.97, random);
    std::vector<float> narrow(a.begin(), a.end());
    const auto reference = FullSvdReference(
        {.name = "a",
         .fine_tuned = {
             .data = narrow.data(), .dtype = DType::kF32, .rows = n, .cols = n, .stride = n}});
    ASSERT_TRUE(reference.ok()) << reference.status().ToString();
    PartialEigen eigen(n);
    ASSERT_TRUE(Decompose(eigen, a, n));
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_NEAR(eigen.values()[n - 1 - i], reference->s[i], 8 * kEpsilon * Norm(a)) << n;
    }
  }
}

// Matrices that split, and equal eigenvalues: exact values; vectors, or the word that there are
// none.
TEST(PartialEigenTest, Degenerate) {
  const int64_t n = 70;
  PartialEigen eigen(n);
  PartialEigen::Columns x;
  ASSERT_TRUE(Decompose(eigen, Matrix(n * n), n));
  for (const double value : eigen.values()) EXPECT_EQ(value, 0);
  EXPECT_FALSE(eigen.Vectors(0, 2, &x));
  ASSERT_TRUE(Decompose(eigen, Diagonal(n, [](int64_t) { return 3; }), n));
  for (const double value : eigen.values()) EXPECT_EQ(value, 3);
  EXPECT_FALSE(eigen.Vectors(0, 2, &x));
  const Matrix graded = Diagonal(n, [](int64_t i) { return (i * 37) % 70 + 1.0; });
  ASSERT_TRUE(Decompose(eigen, graded, n));
  for (int64_t i = 0; i < n; ++i) EXPECT_EQ(eigen.values()[i], static_cast<double>(i + 1));
  ExpectVectors(graded, n, eigen, 0, n, "graded");
  // Two blocks with the same spectrum: each value twice.
  std::mt19937_64 random(9);
  const Matrix block = Symmetric(n / 2, random);
  Matrix twice(n * n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      if (i / 35 == j / 35) twice[i * n + j] = block[i % 35 * 35 + j % 35];
    }
  }
  ASSERT_TRUE(Decompose(eigen, twice, n));
  for (int64_t i = 0; i < n; i += 2) {
    EXPECT_NEAR(eigen.values()[i], eigen.values()[i + 1], 16 * kEpsilon * Norm(twice));
  }
}

TEST(PartialEigenTest, IsRepeatableAndReusable) {
  std::mt19937_64 random(10);
  const int64_t n = 150;
  const Matrix a = Gram(n, n, 1, random), b = Symmetric(n, random);
  PartialEigen used(n), fresh(n);
  PartialEigen::Columns x, y;
  used.Resize(40);
  ASSERT_TRUE(Decompose(used, Gram(40, 50, 1, random), 40) && used.Vectors(2, 9, &x));
  used.Resize(n);
  ASSERT_TRUE(Decompose(used, b, n) && used.Vectors(3, 77, &x));
  ASSERT_TRUE(Decompose(used, a, n) && used.Vectors(0, 40, &x));
  ASSERT_TRUE(Decompose(fresh, a, n) && fresh.Vectors(0, 40, &y));
  EXPECT_LE(used.bytes(), 5 * n * n * static_cast<int64_t>(sizeof(float)));
  EXPECT_TRUE(std::ranges::equal(used.values(), fresh.values()));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < 40; ++c) {
      ASSERT_EQ(x.data[i * x.stride + c], y.data[i * y.stride + c]);
    }
  }
}

// Also where one splits, has equal eigenvalues or another size than the other.
TEST(PartialEigenTest, BothIsAsEach) {
  std::mt19937_64 random(13);
  const std::vector<std::pair<int64_t, Matrix>> cases = {
      {1, Symmetric(1, random)},      {2, Symmetric(2, random)},
      {90, Gram(90, 120, 1, random)}, {90, Gram(90, 90, 0.9, random)},
      {90, Matrix(90 * 90)},          {90, Diagonal(90, [](int64_t i) { return i % 7; })},
      {131, Symmetric(131, random)}};
  for (const auto& [n, a] : cases) {
    for (const auto& [m, b] : cases) {
      PartialEigen of_a(n), of_b(m), first(n), second(m);
      ASSERT_TRUE(Decompose(of_a, a, n));
      ASSERT_TRUE(Decompose(of_b, b, m));
      Fill(first, a, n);
      Fill(second, b, m);
      ASSERT_EQ(PartialEigen::DecomposeBoth(first, second), std::pair(true, true));
      EXPECT_TRUE(std::ranges::equal(of_a.values(), first.values())) << n << " beside " << m;
      EXPECT_TRUE(std::ranges::equal(of_b.values(), second.values())) << m << " beside " << n;
    }
  }
}

// Both loops against plain ones: sizes around the tile and the vector.
TEST(PanelProductsTest, AgreeWithLoops) {
  std::mt19937_64 random(11);
  std::normal_distribution<float> normal;
  const auto filled = [&](int64_t n) {
    AlignedBuffer<float> buffer;
    float* data = buffer.Reserve(n);
    for (int64_t i = 0; i < n; ++i) data[i] = normal(random);
    return buffer;
  };
  for (const int64_t rows : {1, 2, 5, 6, 7, 13}) {
    for (const auto& [begin, end] : {std::pair(0, 1), std::pair(3, 40), std::pair(16, 32),
                                     std::pair(20, 71), std::pair(0, 64)}) {
      for (const int64_t terms : {0, 1, 3, 32}) {
        const int64_t stride = PanelStride(end);
        const auto before = filled(rows * stride), coefficients = filled(rows * terms),
                   b = filled(std::max<int64_t>(terms, 1) * stride);
        auto c = filled(rows * stride);
        std::copy_n(before.data(), rows * stride, c.data());
        AddPanelProduct({.c = c.data(),
                         .c_stride = stride,
                         .rows = rows,
                         .begin = begin,
                         .end = end,
                         .coefficients = coefficients.data(),
                         .row_step = terms,
                         .term_step = 1,
                         .b = b.data(),
                         .b_stride = stride,
                         .terms = terms,
                         .subtract = rows % 2 == 0});
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t k = begin; k < end; ++k) {
            double want = 0, size = 1;
            for (int64_t t = 0; t < terms; ++t) {
              const double term = static_cast<double>(coefficients.data()[i * terms + t]) *
                                  b.data()[t * stride + k];
              want += term;
              size += std::fabs(term);
            }
            want = before.data()[i * stride + k] + (rows % 2 == 0 ? -want : want);
            EXPECT_NEAR(c.data()[i * stride + k], want, (terms + 4) * kEpsilon * (size + 8));
          }
        }
      }
      auto v = filled(PanelStride(end));
      const int64_t stride = PanelStride(end);
      std::fill_n(v.data(), begin, 0.0f);
      std::fill(v.data() + end, v.data() + stride, 0.0f);
      const auto a = filled(rows * stride);
      std::vector<float> y(static_cast<size_t>(rows));
      PanelMatVec(a.data(), stride, rows, begin, end, v.data(), y.data());
      for (int64_t i = 0; i < rows; ++i) {
        double want = 0, size = 1;
        for (int64_t k = begin; k < end; ++k) {
          const double term = static_cast<double>(a.data()[i * stride + k]) * v.data()[k];
          want += term;
          size += std::fabs(term);
        }
        EXPECT_NEAR(y[i], want, (end - begin + 4) * kEpsilon * size);
      }
    }
  }
}

// Sizes around the rows that are taken together and around a block. What is left of the blocks must
// not count, so it is large.
TEST(PanelProductsTest, SymmetricMatVecReadsOneSide) {
  std::mt19937_64 random(12);
  std::normal_distribution<float> normal;
  for (const int64_t n : {1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48, 61, 130}) {
    for (const int64_t begin : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{16}, n / 2, n - 1}) {
      if (begin >= n) continue;
      const int64_t stride = PanelStride(n);
      AlignedBuffer<float> matrix, vector, product;
      float* a = matrix.Reserve(n * stride);
      float* v = vector.Reserve(stride);
      float* y = product.Reserve(stride);
      std::fill_n(a, n * stride, 0.0f);
      std::fill_n(v, stride, 0.0f);
      for (int64_t i = begin; i < n; ++i) v[i] = normal(random);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < n; ++c) {
          const bool is_read = c >= i / kPanelAlign * kPanelAlign;
          a[i * stride + c] = !is_read ? 1e6f : c < i ? a[c * stride + i] : normal(random);
        }
      }
      PanelSymmetricMatVec(a, stride, begin, n, v, y);
      for (int64_t i = begin; i < n; ++i) {
        double want = 0, size = 1;
        for (int64_t c = begin; c < n; ++c) {
          const double term =
              static_cast<double>(a[std::min(i, c) * stride + std::max(i, c)]) * v[c];
          want += term;
          size += std::fabs(term);
        }
        EXPECT_NEAR(y[i], want, static_cast<double>(n + 4) * kEpsilon * size) << n << " " << begin;
      }
    }
  }
}

}  // namespace
}  // namespace stockpot
