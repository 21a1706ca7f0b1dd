// DenseProduct on every SIMD target against its formula in double precision: sizes 0, 1, primes and
// around a strip, a tile, a block of rows, columns and terms; transposes, rows further apart than
// they are long, the three modes, the upper blocks alone. And its promise: parts have the same
// bits.
#include "kernels/dense/product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/unit/kernels/backends.h"

namespace stockpot {
namespace {

constexpr double kEpsilon = 0x1p-24;
constexpr float kUntouched = 12345;

// A matrix in memory of its own, perhaps turned, every row 3 floats further than it is long.
class Operand {
 public:
  Operand(int64_t rows, int64_t cols, bool turned, std::mt19937_64& random)
      : row_(turned ? 1 : cols + 3), col_(turned ? rows + 3 : 1), data_(rows * row_ + cols * col_) {
    std::normal_distribution<float> normal;
    for (float& value : data_) value = normal(random);
  }
  const float* data() const { return data_.data(); }
  int64_t row_step() const { return row_; }
  int64_t column_step() const { return col_; }

 private:
  int64_t row_, col_;
  std::vector<float> data_;
};

struct Shape {
  int64_t rows, cols, terms;
};

// Every size beside ordinary others, and some together.
std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  for (const int64_t rows : {0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 17, 191, 192, 193, 397}) {
    shapes.push_back({rows, 53, 37});
  }
  for (const int64_t cols :
       {0, 1, 3, 4, 5, 11, 12, 13, 23, 24, 25, 47, 48, 49, 97, 1535, 1536, 1537, 1601}) {
    shapes.push_back({19, cols, 29});
  }
  for (const int64_t terms : {0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 191, 192, 193, 384, 389}) {
    shapes.push_back({21, 55, terms});
  }
  shapes.insert(shapes.end(), {{1, 1, 1}, {0, 0, 0}, {200, 100, 200}, {193, 1540, 195}});
  return shapes;
}

class ProductTest : public testing::TestWithParam<SimdTarget> {
 protected:
  void SetUp() override { target_.emplace(GetParam()); }

 private:
  std::optional<ScopedSimdTarget> target_;
};

TEST_P(ProductTest, FollowsItsFormula) {
  std::mt19937_64 random(21);
  ProductScratch scratch;
  int round = 0;
  for (const Shape& s : Shapes()) {
    for (const bool a_turned : {false, true}) {
      for (const bool b_turned : {false, true}) {
        const ProductMode mode = static_cast<ProductMode>(round % 3);
        const bool upper = round++ % 2 == 0 && s.rows <= s.cols;
        const std::string what = std::to_string(s.rows) + " x " + std::to_string(s.cols) + " x " +
                                 std::to_string(s.terms) + (a_turned ? " a^T" : "") +
                                 (b_turned ? " b^T" : "") + (upper ? " upper" : "");
        const Operand a(s.rows, s.terms, a_turned, random), b(s.terms, s.cols, b_turned, random);
        const int64_t stride = s.cols + 2;
        std::vector<float> got((s.rows + 1) * stride, kUntouched), want, sizes(got.size(), 0);
        for (int64_t i = 0; i < s.rows; ++i) {
          for (int64_t j = 0; j < s.cols; ++j) got[i * stride + j] = static_cast<float>(i - j);
        }
        want = got;
        ProductArgs args = {.a = a.data(),
                            .a_row = a.row_step(),
                            .a_term = a.column_step(),
                            .b = b.data(),
                            .b_term = b.row_step(),
                            .b_column = b.column_step(),
                            .c = got.data(),
                            .c_stride = stride,
                            .rows = s.rows,
                            .cols = s.cols,
                            .terms = s.terms,
                            .mode = mode,
                            .upper = upper};
        DenseProduct(args, scratch);
        args.c = want.data();
        DenseProductReference(args);
        for (int64_t i = 0; i <= s.rows; ++i) {
          for (int64_t j = 0; j < stride; ++j) {
            const float value = got[i * stride + j];
            if (i == s.rows || j >= s.cols) {
              ASSERT_EQ(value, kUntouched) << what << " outside of c, at " << i << ", " << j;
              continue;
            }
            if (upper && j < i / kProductBlock * kProductBlock) continue;
            double size = std::fabs(static_cast<double>(i - j));
            for (int64_t t = 0; t < s.terms; ++t) {
              size += std::fabs(a.data()[i * a.row_step() + t * a.column_step()] *
                                b.data()[t * b.row_step() + j * b.column_step()]);
            }
            ASSERT_NEAR(value, want[i * stride + j],
                        static_cast<double>(s.terms + 4) * kEpsilon * size)
                << what << " at " << i << ", " << j;
          }
        }
      }
    }
  }
  const int64_t floats = scratch.a.capacity() + scratch.b.capacity();
  EXPECT_LE(floats * static_cast<int64_t>(sizeof(float)), kProductScratchBytes);
}

// Any rectangle of C, made alone, has the bits that it has in the whole.
TEST_P(ProductTest, PartsHaveTheSameBits) {
  std::mt19937_64 random(22);
  const int64_t rows = 203, cols = 118, terms = 401;
  const Operand a(rows, terms, false, random), b(terms, cols, true, random);
  std::vector<float> whole(rows * cols), part(rows * cols);
  ProductScratch scratch;
  ProductArgs args = {.a = a.data(),
                      .a_row = a.row_step(),
                      .a_term = a.column_step(),
                      .b = b.data(),
                      .b_term = b.row_step(),
                      .b_column = b.column_step(),
                      .c = whole.data(),
                      .c_stride = cols,
                      .rows = rows,
                      .cols = cols,
                      .terms = terms};
  DenseProduct(args, scratch);
  for (int round = 0; round < 20; ++round) {
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
    const int64_t row = below(rows), col = below(cols);
    ProductArgs of_part = args;
    of_part.rows = 1 + below(rows - row);
    of_part.cols = 1 + below(cols - col);
    of_part.a += row * args.a_row;
    of_part.b += col * args.b_column;
    of_part.c = part.data();
    ProductScratch fresh;
    DenseProduct(of_part, round % 2 == 0 ? scratch : fresh);
    for (int64_t i = 0; i < of_part.rows; ++i) {
      ASSERT_EQ(std::memcmp(part.data() + i * cols, whole.data() + (row + i) * cols + col,
                            static_cast<size_t>(of_part.cols) * sizeof(float)),
                0)
          << row << " + " << i << ", " << col;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, ProductTest, testing::ValuesIn(SimdTargets()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace stockpot
