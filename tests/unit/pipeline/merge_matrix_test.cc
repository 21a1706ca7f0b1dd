// What a merge does to one matrix: against NumPy in float64, and what must hold exactly.
#include "store/merge_matrix.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using Matrix = std::vector<float>;

Matrix Noise(std::mt19937_64& random, int64_t n, double sigma) {
  std::normal_distribution<double> normal(0, sigma);
  Matrix values(static_cast<size_t>(n));
  for (float& value : values) value = static_cast<float>(normal(random));
  return values;
}

// Rank-1 terms of falling size, and noise.
Matrix LowRank(std::mt19937_64& random, int64_t rows, int64_t cols, int terms, double noise) {
  Matrix matrix = Noise(random, rows * cols, noise);
  for (int t = 0; t < terms; ++t) {
    const Matrix u = Noise(random, rows, 1), v = Noise(random, cols, 1e-2 / (1 + t));
    for (int64_t i = 0; i < rows * cols; ++i) {
      matrix[static_cast<size_t>(i)] +=
          u[static_cast<size_t>(i / cols)] * v[static_cast<size_t>(i % cols)];
    }
  }
  return matrix;
}

// Rows that are orthogonal and equally long: all singular values are one.
Matrix Flat(int64_t n) {
  Matrix matrix(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) matrix[static_cast<size_t>(i * n + (i * 5 + 3) % n)] = 0.5f;
  return matrix;
}

void WriteFloats(const std::filesystem::path& path, const Matrix& values) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(4 * values.size()));
}

struct Case {
  int64_t rows, cols;
  Matrix delta;
  MergeOptions options;
  double base_norm = 1;
};

constexpr auto kSpectral = MergeMethod::kMonoSoupSpectral;

std::vector<Case> Cases(std::mt19937_64& random) {
  std::vector<Case> cases = {
      {48, 48, LowRank(random, 48, 48, 5, 1e-4), {.energy = 0.95}},
      {48, 31, Noise(random, 48 * 31, 1e-3), {.energy = 0.95}},
      {31, 48, LowRank(random, 31, 48, 5, 1e-3), {.energy = 0.8}},
      {96, 24, Noise(random, 96 * 24, 1e-3), {.energy = 0.3}},
      {24, 96, LowRank(random, 24, 96, 5, 1e-4), {.energy = 0.999}},
      {48, 48, Noise(random, 48 * 48, 1e-3), {.energy = 0.95, .rank = 3, .force = true}},
      {40, 56, LowRank(random, 40, 56, 5, 1e-4), {.energy = 0.1, .rank = 30}},
      {40, 56, Noise(random, 40 * 56, 1e-3), {.energy = 0.95, .rank = 40}},  // rank = full
      {1, 17, Noise(random, 17, 1e-3), {.energy = 0.9}},
      {17, 1, Noise(random, 17, 1e-3), {.energy = 0.9}},
      {1, 1, Noise(random, 1, 1e-3), {.energy = 0.9}},
      {32, 48, Noise(random, 32 * 48, 1e-3), {.energy = 1.0}},
      {12, 7, Matrix(12 * 7), {.energy = 0.95}},
      // Sizes of a real layer: where a faster method would begin to differ.
      {576, 576, Noise(random, 576 * 576, 1e-3), {.energy = 0.95}},
      {192, 576, Noise(random, 192 * 576, 1e-3), {.energy = 0.95}},
      {700, 576, LowRank(random, 700, 576, 40, 1e-3), {.energy = 0.95}},
      {576, 700, LowRank(random, 576, 700, 300, 1e-4), {.energy = 0.99}},
      {576, 576, LowRank(random, 576, 576, 8, 1e-6), {.energy = 0.95}},
      {576, 576, Noise(random, 576 * 576, 1e-3), {.energy = 0.3}},
      {600, 576, Noise(random, 600 * 576, 1e-3), {.energy = 0.1, .rank = 100}},
      // Scales at which squares leave float32.
      {300, 300, Noise(random, 300 * 300, 1e-22), {.energy = 0.9}},
      {300, 300, Noise(random, 300 * 300, 1e21), {.energy = 0.9}},
  };
  for (const double spectral : {0.0, 0.8, 0.3, 1.0}) {
    const MergeOptions options{.method = kSpectral, .spectral = spectral};
    cases.push_back({48, 48, LowRank(random, 48, 48, 5, 1e-4), options});
    cases.push_back({48, 31, Noise(random, 48 * 31, 1e-3), options});
    cases.push_back({31, 48, LowRank(random, 31, 48, 3, 1e-3), options});
    cases.push_back({1, 17, Noise(random, 17, 1e-3), options});
    cases.push_back({17, 1, Noise(random, 17, 1e-3), options});
    cases.push_back({12, 7, Matrix(12 * 7), options});                  // zero
    cases.push_back({20, 20, Noise(random, 400, 1e-3), options, 1e5});  // tiny
    cases.push_back({20, 20, Noise(random, 400, 1e-3), options, 1e4});  // just not
    cases.push_back({200, 130, LowRank(random, 200, 130, 20, 1e-3), options});
  }
  return cases;
}

// On memory that is used again and again: what it was used for before must not matter.
Result<MatrixReport> Truncate(int64_t rows, int64_t cols, const MergeOptions& options,
                              float* delta) {
  static thread_local MatrixWorkspace workspace;
  float* const one[] = {delta};
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<MatrixReport> reports,
                            TruncateDeltas(rows, cols, options, one, workspace));
  return reports.at(0);
}

// Of two and three, one of which may be zero, too small for float32, or not cut at all.
TEST(MergeMatrixTest, TogetherIsAsAlone) {
  std::mt19937_64 random(TestSeed());
  const int64_t rows = 160, cols = 140, n = rows * cols;
  const std::vector<Matrix> kinds = {Noise(random, n, 1e-3), LowRank(random, rows, cols, 9, 1e-3),
                                     Matrix(n), Noise(random, n, 1e-25)};
  for (size_t first = 0; first < kinds.size(); ++first) {
    for (size_t second = 0; second < kinds.size(); ++second) {
      std::vector<Matrix> alone = {kinds[first], kinds[second], kinds[0]}, together = alone;
      std::vector<float*> deltas;
      for (Matrix& delta : together) deltas.push_back(delta.data());
      MatrixWorkspace workspace;
      const auto reports = TruncateDeltas(rows, cols, {.energy = 0.9}, deltas, workspace);
      ASSERT_OK(reports);
      ASSERT_EQ(reports->size(), alone.size());
      EXPECT_GT(workspace.bytes(), 0);
      for (size_t i = 0; i < alone.size(); ++i) {
        const auto report = Truncate(rows, cols, {.energy = 0.9}, alone[i].data());
        ASSERT_OK(report);
        EXPECT_EQ(report->rank, (*reports)[i].rank);
        EXPECT_EQ(report->kept_energy, (*reports)[i].kept_energy);
        EXPECT_EQ(alone[i], together[i]) << first << ", " << second << ": " << i;
      }
    }
  }
}

TEST(MergeMatrixTest, AgreesWithNumpy) {
  TemporaryFolder folder;
  std::mt19937_64 random(TestSeed());
  const std::vector<Case> cases = Cases(random);
  std::vector<Matrix> results(cases.size());
  std::vector<Result<MatrixReport>> reports(cases.size(), MatrixReport{});
  RunSideBySide(cases.size(), [&](size_t i) {
    const Case& c = cases[i];
    results[i] = c.delta;
    float* delta = results[i].data();
    reports[i] = c.options.method == kSpectral
                     ? ReweightDelta(c.rows, c.cols, c.options.spectral, c.base_norm, delta)
                     : Truncate(c.rows, c.cols, c.options, delta);
  });
  nlohmann::json index = nlohmann::json::array();
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const Matrix& merged = results[i];
    const Result<MatrixReport>& report = reports[i];
    const std::string name = std::to_string(i);
    ASSERT_OK(report);
    EXPECT_EQ(report->unchanged, merged == c.delta) << name;
    index.push_back({{"method", MergeMethodName(c.options.method)},
                     {"rows", c.rows},
                     {"cols", c.cols},
                     {"energy", c.options.energy},
                     {"rank", c.options.rank},
                     {"spectral", c.options.spectral},
                     {"base_norm", c.base_norm},
                     {"got_rank", report->rank},
                     {"kept", report->kept_energy},
                     {"low", report->low},
                     {"high", report->high}});
    WriteFloats(folder.path() / (name + ".delta"), c.delta);
    WriteFloats(folder.path() / (name + ".merged"), merged);
  }
  std::ofstream(folder.path() / "index.json") << index.dump();
  EXPECT_TRUE(RunPython("merge_oracle.py", {"matrices", folder.path().string()}));
}

TEST(MergeMatrixTest, ZeroDeltasAndFullRankAreExact) {
  std::mt19937_64 random(TestSeed());
  const Matrix zero(12 * 7), noise = Noise(random, 12 * 7, 1);
  Matrix delta = zero;
  auto report = Truncate(12, 7, {}, delta.data());
  ASSERT_OK(report);
  EXPECT_EQ(report->rank, 0);
  EXPECT_EQ(report->kept_energy, 1);
  EXPECT_EQ(delta, zero);
  for (const MergeOptions& options :
       {MergeOptions{.energy = 1}, MergeOptions{.energy = 0.5, .rank = 7},
        MergeOptions{.energy = 0.95, .rank = 1000}}) {
    delta = noise;
    report = Truncate(12, 7, options, delta.data());
    ASSERT_OK(report);
    EXPECT_EQ(report->rank, 7);
    EXPECT_TRUE(report->unchanged);
    EXPECT_EQ(delta, noise);
  }
}

// k = min(rows, cols): rho is 0 by definition and nothing is left over, so W is the fine-tuned one.
TEST(MergeMatrixTest, FullEffectiveRankLeavesTheDeltaAlone) {
  const Matrix flat = Flat(16);
  Matrix delta = flat;
  const auto report = ReweightDelta(16, 16, 0, 1, delta.data());
  ASSERT_OK(report);
  EXPECT_EQ(report->rank, 16);
  EXPECT_EQ(report->low, 0);
  EXPECT_EQ(report->high, 1);
  EXPECT_EQ(delta, flat);
}

// What full-weight training does to a matrix looks like noise: a small fixed rank would delete it.
TEST(MergeMatrixTest, ASmallFixedRankOfNoiseIsRefused) {
  constexpr int64_t kSide = 4096;
  std::mt19937_64 random(TestSeed());
  Matrix delta(kSide * kSide);
  // Signs have the spectrum of normal numbers, and are made faster.
  for (float& value : delta) value = random() & (uint64_t{1} << 40) ? 1e-3f : -1e-3f;
  const auto report = Truncate(kSide, kSide, {.energy = 0.95, .rank = 64}, delta.data());
  ASSERT_EQ(report.status().code(), StatusCode::kInvalidArgument);
  const std::string message = report.status().message();
  double kept = 0;
  ASSERT_EQ(std::sscanf(message.c_str(), "rank 64 of 4096 keeps %lf", &kept), 1) << message;
  EXPECT_NEAR(kept, 0.058, 0.004) << message;
}

TEST(MergeMatrixTest, Refuses) {
  std::mt19937_64 random(TestSeed());
  const Matrix noise = Noise(random, 64 * 64, 1);
  const auto code = [&](Matrix delta, const MergeOptions& options) {
    return Truncate(64, 64, options, delta.data()).status().code();
  };
  EXPECT_EQ(code(noise, {.energy = 0.95, .rank = 4}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(noise, {.energy = 0.95, .rank = 30}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(noise, {.energy = 0.95, .rank = 4, .force = true}), StatusCode::kOk);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Matrix broken = noise;
    broken[77] = bad;
    EXPECT_EQ(code(broken, {}), StatusCode::kInvalidArgument);
    EXPECT_EQ(ReweightDelta(64, 64, 0, 1, broken.data()).status().code(),
              StatusCode::kInvalidArgument);
  }
}

TEST(MergeMatrixTest, SideBySideRunsEverythingOnce) {
  for (const size_t n : {0, 1, 2, 37}) {
    std::vector<std::atomic<int>> runs(n);
    RunSideBySide(n, [&](size_t i) { ++runs[i]; });
    for (const auto& count : runs) EXPECT_EQ(count, 1);
  }
}

}  // namespace
}  // namespace stockpot
