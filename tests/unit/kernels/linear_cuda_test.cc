// bitdelta_linear's device code under the host emulation, against double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels/bitdelta/signs.h"
#include "tests/unit/kernels/cuda_emulation/cuda_emulation.h"
#include "tests/unit/kernels/matrices.h"
// After the emulation, which stands in for the platform.
#include "kernels/bitdelta/linear_cuda.cuh"

namespace stockpot {
namespace {

class LinearCuda : public testing::TestWithParam<emulation::ThreadOrder> {};

TEST_P(LinearCuda, MatchesDoublePrecision) {
  Random random(3);
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const int64_t d_in : {0, 1, 7, 31, 33, 127, 128, 129, 257}) {
      const int64_t rows = d_in % 11, d_out = d_in % 19;
      const OwnedFloats x = OwnedFloats::Gaussian(rows, d_in, random, 3);
      OwnedFloats y(rows, d_out, 5, std::nanf(""));
      const OwnedWeight base = OwnedWeight::Gaussian(dtype, d_out, d_in, 0.02f, random, 7);
      const OwnedWeight dense = OwnedWeight::Gaussian(DType::kF32, d_out, d_in, 0.02f, random, 1);
      std::vector<uint8_t> signs(static_cast<size_t>(SignBytes(d_out, d_in)));
      for (uint8_t& byte : signs) byte = static_cast<uint8_t>(random());
      const std::vector<float> alpha(static_cast<size_t>(d_out), 0.01f);
      const CudaLayerDelta variants[] = {{.signs = signs.data(), .alpha = alpha.data()},
                                         {.dense = dense.view()}};
      std::vector<int32_t> variant_of_row;
      for (int64_t t = 0; t < rows; ++t) {
        variant_of_row.push_back(static_cast<int32_t>(random() % 3) - 1);
      }
      const CudaLinearArgs args{.x = x.cview(),
                                .base = base.view(),
                                .variants = variants,
                                .variant_count = 2,
                                .variant_of_row = variant_of_row.data(),
                                .y = y.view()};
      const LinearGrid grid = GridOfLinear(rows, d_out);
      EmulateLaunch({GetParam(), 5}, {grid.x, grid.y}, {kLinearWarps * kLinearLanes}, LinearKernel,
                    args);
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t o = 0; o < d_out; ++o) {
          const int32_t variant = variant_of_row[static_cast<size_t>(t)];
          const WeightMatrix w = variant == 1 ? dense.view() : base.view();
          double want = 0, scale = 0;
          for (int64_t i = 0; i < d_in; ++i) {
            double weight = w.at(o, i);
            if (variant == 0) weight += 0.01f * SignAt(signs.data(), d_in, o, i);
            want += weight * x.cview().row(t)[i];
            scale += std::fabs(weight * x.cview().row(t)[i]);
          }
          EXPECT_NEAR(y.view().row(t)[o], want, 1e-5 * (scale + 1e-3))
              << DTypeName(dtype) << ' ' << d_out << " x " << d_in;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, LinearCuda,
                         testing::Values(emulation::ThreadOrder::kForward,
                                         emulation::ThreadOrder::kReverse,
                                         emulation::ThreadOrder::kShuffled));

}  // namespace
}  // namespace stockpot
