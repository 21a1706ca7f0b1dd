// The SVD by cuSOLVER on a real device; skips, with the reason, where none answers.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/base/device.h"
#include "kernels/svd/svd_cuda.h"
#include "tests/unit/kernels/matrices.h"

namespace stockpot {
namespace {

class SvdGpu : public testing::Test {
 protected:
  void SetUp() override {
    const DeviceReport report = ProbeDevices();
    if (report.cuda.empty()) GTEST_SKIP() << "no CUDA device: " << report.cuda_reason;
  }
};

void ExpectAgrees(const Svd& got, const Svd& want, double tolerance) {
  ASSERT_EQ(got.rank, want.rank);
  EXPECT_NEAR(got.energy, want.energy, 1e-6 * want.energy);
  EXPECT_NEAR(got.captured, want.captured, tolerance);
  EXPECT_NEAR(got.relative_error, want.relative_error, tolerance);
  for (int64_t k = 0; k < want.rank; ++k) {
    EXPECT_NEAR(got.s[k], want.s[k], tolerance * want.s[0]) << got.solver;
  }
}

TEST_F(SvdGpu, FullMatchesTheReference) {
  Random random(1);
  // gesvdj, then Xgesvdp (a side over 512).
  for (const auto& [m, n] : {std::pair{30, 20}, {20, 30}, {1, 9}, {9, 1}, {600, 40}, {40, 600}}) {
    const OwnedWeight w = OwnedWeight::Gaussian(DType::kBF16, m, n, 1, random, 2);
    const SvdArgs args{.name = "w", .fine_tuned = w.view()};
    ExpectAgrees(FullSvdCuda(args).value(), FullSvdReference(args).value(), 1e-5);
  }
}

TEST_F(SvdGpu, TruncatedComesNearTheOptimum) {
  Random random(2);
  const OwnedWeight w = OwnedWeight::Gaussian(DType::kF32, 200, 160, 1, random);
  const SvdArgs args{.name = "w", .fine_tuned = w.view()};
  const TruncatedSvdOptions options{.rank = 16, .oversampling = 16, .iterations = 4};
  const Svd got = TruncatedSvdCuda(args, options).value();
  const Svd want = TruncatedSvdReference(args, options).value();
  EXPECT_EQ(got.solver, "gesvdr");
  EXPECT_LE(got.relative_error, 1.01 * want.relative_error);
  EXPECT_GE(got.captured, 0.9 * want.captured);
  const OwnedWeight zero(DType::kF32, 20, 10);
  EXPECT_EQ(TruncatedSvdCuda({.name = "zero", .fine_tuned = zero.view()}, {.rank = 4})->captured,
            1);
}

}  // namespace
}  // namespace stockpot
