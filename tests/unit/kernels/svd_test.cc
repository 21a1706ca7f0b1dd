// The pure parts of the SVD and its reference; nothing here needs LibTorch. The oracle outside our
// code is in svd_cpu_test.cc.
#include "kernels/svd/svd.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "kernels/svd/sketch.h"
#include "kernels/svd/solver.h"
#include "kernels/svd/svd_cuda.h"
#include "tests/unit/kernels/matrices.h"

namespace stockpot {
namespace {

using enum SvdSolver;

TEST(RankForEnergy, IsTheSmallestThatKeepsTheFloor) {
  const std::vector<float> s = {4, 2, 2, 1};  // squares 16, 4, 4, 1 of 25
  EXPECT_EQ(RankForEnergy(s, 0.01).value(), 1);
  EXPECT_EQ(RankForEnergy(s, 16.0 / 25).value(), 1);
  EXPECT_EQ(RankForEnergy(s, 0.65).value(), 2);
  EXPECT_EQ(RankForEnergy(s, 0.80).value(), 2);
  EXPECT_EQ(RankForEnergy(s, 0.96).value(), 3);
  EXPECT_EQ(RankForEnergy(s, 1).value(), 4);
  EXPECT_EQ(RankForEnergy(std::vector<float>{3, 0, 0}, 1).value(), 1);
  EXPECT_EQ(RankForEnergy(std::vector<float>{0, 0}, 0.5).value(), 0);
  EXPECT_EQ(RankForEnergy({}, 0.5).value(), 0);
}

TEST(RankForEnergy, RefusesWhatIsNoSpectrumOrNoFloor) {
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  for (const std::vector<float>& s :
       {std::vector<float>{1, 2}, {1, -1}, {nan}, {1, nan}, {infinity, 1}}) {
    EXPECT_EQ(RankForEnergy(s, 0.5).status().code(), StatusCode::kInvalidArgument);
  }
  for (const double floor : {0.0, -1.0, 1.01, std::nan("")}) {
    const Status status = RankForEnergy(std::vector<float>{1}, floor).status();
    EXPECT_EQ(status.message().rfind("floor", 0), 0u) << status.ToString();
  }
}

TEST(SvdSolverChain, FollowsSizeAndRank) {
  const auto cuda = [](int64_t rows, int64_t cols, int64_t rank, int64_t oversampling) {
    return SvdSolverChain({rows, cols, rank, oversampling}, SvdDevice::kCuda);
  };
  using Chain = std::vector<SvdSolver>;
  EXPECT_EQ(cuda(2048, 2048, 64, 8), (Chain{kGesvdr, kXgesvdp, kGesvd}));
  EXPECT_EQ(cuda(2048, 2048, 504, 8), (Chain{kGesvdr, kXgesvdp, kGesvd}));
  EXPECT_EQ(cuda(2048, 2048, 505, 8), (Chain{kXgesvdp, kGesvd}));
  EXPECT_EQ(cuda(4096, 4096, 4096, 0), (Chain{kXgesvdp, kGesvd}));
  EXPECT_EQ(cuda(72, 72, 72, 0), (Chain{kGesvdj, kXgesvdp, kGesvd}));
  EXPECT_EQ(cuda(512, 512, 512, 0), (Chain{kGesvdj, kXgesvdp, kGesvd}));
  EXPECT_EQ(cuda(513, 8, 8, 0), (Chain{kXgesvdp, kGesvd}));
  EXPECT_EQ(cuda(256, 256, 16, 8), (Chain{kGesvdr, kXgesvdp, kGesvd}));
  EXPECT_EQ(SvdSolverChain({2048, 2048, 64, 8}, SvdDevice::kCpu),
            (Chain{kGesddF32, kGesddF64, kSyevd}));
}

TEST(SvdSolverChain, TriesTheNextWhereOneDoesNotConverge) {
  const SvdSolver chain[] = {kGesvdr, kXgesvdp, kGesvd};
  std::vector<SvdSolver> tried;
  const auto converges_with = [&](SvdSolver good) {
    tried.clear();
    return [&tried, good](SvdSolver solver) -> Result<bool> {
      tried.push_back(solver);
      return solver == good;
    };
  };
  EXPECT_EQ(RunSvdSolvers(chain, converges_with(kGesvdr)).value(), kGesvdr);
  EXPECT_EQ(tried.size(), 1u);
  EXPECT_EQ(RunSvdSolvers(chain, converges_with(kGesvd)).value(), kGesvd);
  EXPECT_EQ(tried.size(), 3u);
  const Status none = RunSvdSolvers(chain, converges_with(kSyevd)).status();
  EXPECT_EQ(none.code(), StatusCode::kInternal);
  EXPECT_NE(none.message().find("gesvdr, Xgesvdp, gesvd"), std::string::npos);
  // An error ends the chain: the next solver would meet it too.
  tried.clear();
  const Status memory = RunSvdSolvers(chain, [&](SvdSolver solver) -> Result<bool> {
                          tried.push_back(solver);
                          return ResourceExhausted("cudaMalloc");
                        }).status();
  EXPECT_EQ(memory.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(tried.size(), 1u);
}

TEST(Sketch, IsGaussianAndDependsOnSeedAndName) {
  const uint64_t key = SketchKey(1, "model.layers.0.mlp.up_proj.weight");
  constexpr int kCount = 200000;
  double sum = 0, square = 0, fourth = 0, neighbours = 0, last = 0;
  for (int i = 0; i < kCount; ++i) {
    const double x = SketchGaussian(key, i);
    sum += x;
    square += x * x;
    fourth += x * x * x * x;
    neighbours += x * last;
    last = x;
  }
  // Five standard deviations of each moment: 1, sqrt(2), sqrt(96), 1 over sqrt(kCount).
  const double sigma = 5 / std::sqrt(kCount);
  EXPECT_NEAR(sum / kCount, 0, sigma);
  EXPECT_NEAR(square / kCount, 1, sigma * std::sqrt(2.0));
  EXPECT_NEAR(fourth / kCount, 3, sigma * std::sqrt(96.0));
  EXPECT_NEAR(neighbours / kCount, 0, sigma);
  std::set<uint64_t> keys;
  for (const uint64_t seed : {0, 1, 2}) {
    for (const char* name : {"", "a", "b", "ab", "ba"}) keys.insert(SketchKey(seed, name));
  }
  EXPECT_EQ(keys.size(), 15u);
}

// A [m, n] = U diag(s) V^T as the arguments of a product, from float64 sums.
double At(const Svd& svd, int64_t i, int64_t j) {
  double sum = 0;
  for (int64_t k = 0; k < svd.rank; ++k) {
    sum += static_cast<double>(svd.u[i * svd.rank + k]) * svd.s[k] * svd.v[j * svd.rank + k];
  }
  return sum;
}

void ExpectOrthonormal(const std::vector<float>& columns, int64_t rows, int64_t rank) {
  for (int64_t a = 0; a < rank; ++a) {
    for (int64_t b = 0; b <= a; ++b) {
      double dot = 0;
      for (int64_t i = 0; i < rows; ++i) {
        dot += static_cast<double>(columns[i * rank + a]) * columns[i * rank + b];
      }
      EXPECT_NEAR(dot, a == b, 1e-6) << a << " " << b;
    }
  }
}

TEST(SvdReference, RebuildsTheDelta) {
  Random random(5);
  for (const auto& [m, n] : {std::pair{1, 1}, {1, 9}, {9, 1}, {7, 13}, {13, 7}, {16, 16}}) {
    const OwnedWeight base = OwnedWeight::Gaussian(DType::kBF16, m, n, 1, random, 3);
    const OwnedWeight tuned = OwnedWeight::Gaussian(DType::kF16, m, n, 1, random, 1);
    const WeightMatrix base_view = base.view();
    const Svd svd =
        FullSvdReference({.name = "w", .fine_tuned = tuned.view(), .base = &base_view}).value();
    EXPECT_EQ(svd.rank, std::min(m, n));
    double energy = 0;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const double delta = static_cast<double>(tuned.view().at(i, j)) - base.view().at(i, j);
        energy += delta * delta;
        EXPECT_NEAR(At(svd, i, j), delta, 1e-5);
      }
    }
    EXPECT_NEAR(svd.energy, energy, 1e-6 * energy);
    EXPECT_NEAR(svd.captured, 1, 1e-6);
    EXPECT_LT(svd.relative_error, 1e-6);
    EXPECT_TRUE(std::is_sorted(svd.s.rbegin(), svd.s.rend()));
    ExpectOrthonormal(svd.u, m, svd.rank);
    ExpectOrthonormal(svd.v, n, svd.rank);
  }
}

TEST(SvdReference, ZeroAndRankDeficientHaveOrthonormalVectors) {
  OwnedWeight w(DType::kF32, 6, 4);
  for (const bool zero : {true, false}) {
    for (int64_t i = 0; i < 6 && !zero; ++i) {
      for (int64_t j = 0; j < 4; ++j) w.Set(i, j, static_cast<float>((i + 1) * (j - 2)));
    }
    const Svd svd = FullSvdReference({.name = "w", .fine_tuned = w.view()}).value();
    EXPECT_EQ(svd.s[1], 0);
    EXPECT_NEAR(svd.captured, 1, 1e-6);
    EXPECT_LT(svd.relative_error, 1e-6);
    ExpectOrthonormal(svd.u, 6, 4);
    ExpectOrthonormal(svd.v, 4, 4);
  }
}

TEST(SvdReference, SignsAreFixedByTheLargestEntry) {
  Random random(6);
  const OwnedWeight w = OwnedWeight::Gaussian(DType::kF32, 8, 5, 1, random);
  const Svd svd = FullSvdReference({.name = "w", .fine_tuned = w.view()}).value();
  for (int64_t k = 0; k < svd.rank; ++k) {
    float largest = 0;
    for (int64_t i = 0; i < 8; ++i) {
      if (std::fabs(svd.u[i * 5 + k]) > std::fabs(largest)) largest = svd.u[i * 5 + k];
    }
    EXPECT_GT(largest, 0);
  }
}

// The GPU backend refuses bad arguments too, and says that it is missing where it is.
TEST(SvdCuda, ChecksBeforeItAsksForADevice) {
  const OwnedWeight w(DType::kF32, 6, 4);
  const SvdArgs args{.name = "w", .fine_tuned = w.view()};
  EXPECT_EQ(TruncatedSvdCuda(args, {.rank = 5}).status().code(), StatusCode::kInvalidArgument);
  const StatusCode code = FullSvdCuda(args).status().code();
  EXPECT_TRUE(code == StatusCode::kOk || code == StatusCode::kUnavailable) << StatusCodeName(code);
}

}  // namespace
}  // namespace stockpot
