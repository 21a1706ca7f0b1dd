// Scales from row sums against the same sums written out, and against every other choice.
#include "serve/calibrate/row_statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace stockpot {
namespace {

constexpr int64_t kTokens = 64;

// a [tokens, rows] and k matrices b likewise.
struct Problem {
  Problem(int64_t rows, int64_t planes, std::mt19937_64& random) : rows(rows) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < planes; ++i) {
      auto& plane = b.emplace_back();
      for (int64_t j = 0; j < kTokens * rows; ++j) plane.push_back(normal(random));
    }
    for (int64_t j = 0; j < kTokens * rows; ++j) {
      float value = 0.3f * normal(random);
      for (int64_t p = 0; p < planes; ++p) {
        value +=
            0.5f / static_cast<float>(1 + p) * b[static_cast<size_t>(p)][static_cast<size_t>(j)];
      }
      a.push_back(value);
    }
  }
  ConstFloatMatrix View(const std::vector<float>& values, int64_t first, int64_t count) const {
    return {.data = values.data() + first * rows, .rows = count, .cols = rows, .stride = rows};
  }
  RowStatistics Statistics() const {
    RowStatistics statistics(rows, static_cast<int64_t>(b.size()));
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>(0, 5), {5, kTokens - 5}}) {
      std::vector<ConstFloatMatrix> views;
      for (const auto& plane : b) views.push_back(View(plane, first, count));
      statistics.Add(0, View(a, first, count), views);
    }
    return statistics;
  }
  double Error(int64_t row, const std::vector<std::vector<float>>& alpha) const {
    double error = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto j = static_cast<size_t>(t * rows + row);
      double left = a[j];
      for (size_t p = 0; p < b.size(); ++p) {
        left -= static_cast<double>(alpha[p][static_cast<size_t>(row)]) * b[p][j];
      }
      error += left * left;
    }
    return error;
  }
  double Square(int64_t row) const {
    double square = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      square += std::pow(a[static_cast<size_t>(t * rows + row)], 2);
    }
    return square;
  }

  int64_t rows;
  std::vector<float> a;
  std::vector<std::vector<float>> b;
};

std::vector<std::vector<float>> Draft(int64_t rows, size_t planes) {
  std::vector<std::vector<float>> draft;
  for (size_t p = 0; p < planes; ++p) {
    draft.emplace_back(static_cast<size_t>(rows), 0.4f / static_cast<float>(1 + p));
  }
  return draft;
}

TEST(RowStatisticsTest, OfOnePlaneItIsTheQuotient) {
  std::mt19937_64 random(1);
  const Problem problem(7, 1, random);
  const CalibratedTensor found = problem.Statistics().Solve(Draft(7, 1));
  EXPECT_EQ(found.rows_kept, 0);
  double before = 0, after = 0, all = 0;
  for (int64_t row = 0; row < 7; ++row) {
    double ab = 0, bb = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto j = static_cast<size_t>(t * 7 + row);
      ab += static_cast<double>(problem.a[j]) * problem.b[0][j];
      bb += static_cast<double>(problem.b[0][j]) * problem.b[0][j];
    }
    EXPECT_NEAR(found.alpha[0][static_cast<size_t>(row)], ab / bb, 1e-7) << row;
    before += problem.Error(row, Draft(7, 1));
    after += problem.Error(row, found.alpha);
    all += problem.Square(row);
  }
  EXPECT_NEAR(found.error_before, before / all, 1e-9);
  EXPECT_NEAR(found.error, after / all, 1e-9);
  EXPECT_LT(found.error, 0.99 * found.error_before);
}

// The gradient of the error vanishes there, and no step away from it helps.
TEST(RowStatisticsTest, OfSeveralPlanesNothingIsBetter) {
  std::mt19937_64 random(2);
  for (const size_t planes : {2u, 3u, 8u}) {
    const Problem problem(5, static_cast<int64_t>(planes), random);
    const CalibratedTensor found = problem.Statistics().Solve(Draft(5, planes));
    EXPECT_EQ(found.rows_kept, 0);
    for (int64_t row = 0; row < 5; ++row) {
      const double best = problem.Error(row, found.alpha);
      for (int trial = 0; trial < 50; ++trial) {
        auto other = found.alpha;
        for (auto& plane : other) {
          plane[static_cast<size_t>(row)] += std::normal_distribution<float>(0, 0.01f)(random);
        }
        EXPECT_GT(problem.Error(row, other), best);
      }
    }
  }
}

// No input, signs against the delta, planes that say the same, what is not finite.
TEST(RowStatisticsTest, KeepsTheDraftWhereThereIsNoBetterScale) {
  std::mt19937_64 random(3);
  const auto draft = Draft(3, 2);
  const auto kept = [&](const Problem& problem) {
    const CalibratedTensor found = problem.Statistics().Solve(draft);
    EXPECT_EQ(found.alpha, draft);
    EXPECT_LE(found.error, found.error_before);
    return found.rows_kept;
  };
  Problem nothing(3, 2, random);
  for (auto& plane : nothing.b) plane.assign(plane.size(), 0);
  nothing.a.assign(nothing.a.size(), 0);
  EXPECT_EQ(kept(nothing), 3);
  EXPECT_EQ(nothing.Statistics().Solve(draft).error_before, 0);

  Problem against(3, 2, random);
  for (float& value : against.a) value = -value;
  EXPECT_EQ(kept(against), 3);

  Problem twice(3, 2, random);
  twice.b[1] = twice.b[0];
  EXPECT_EQ(kept(twice), 3);

  Problem wild(3, 2, random);
  wild.a[0] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(wild.Statistics().Solve(draft).alpha[0][0], draft[0][0]);
}

TEST(RowStatisticsTest, IsNeverWorseThanTheDraftInAnyRow) {
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 200; ++trial) {
    const size_t planes = 1 + random() % 3;
    Problem problem(4, static_cast<int64_t>(planes), random);
    const float scale = std::exp(std::normal_distribution<float>(0, 8)(random));
    for (float& value : problem.a) value = value * scale + (random() % 7 == 0 ? scale : 0);
    const auto draft = Draft(4, planes);
    const CalibratedTensor found = problem.Statistics().Solve(draft);
    for (int64_t row = 0; row < 4; ++row) {
      const double before = problem.Error(row, draft);
      EXPECT_LE(problem.Error(row, found.alpha), before * (1 + 1e-9)) << trial << " " << row;
    }
  }
}

}  // namespace
}  // namespace stockpot
