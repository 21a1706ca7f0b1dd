// The CUDA launchers on a real device. Skips, with the reason, where none answers; the same kernels
// run everywhere under the host emulation (compress_test.cc, linear_test.cc).
#include <gtest/gtest.h>

#include <vector>

#include "kernels/base/cuda_memory.h"
#include "kernels/base/device.h"
#include "kernels/bitdelta/compress_cuda.h"
#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/linear_cuda.h"
#include "kernels/bitdelta/signs.h"
#include "tests/unit/kernels/matrices.h"

namespace stockpot {
namespace {

class CudaGpu : public testing::Test {
 protected:
  void SetUp() override {
    const DeviceReport report = ProbeDevices();
    if (report.cuda.empty()) GTEST_SKIP() << "no CUDA device: " << report.cuda_reason;
  }
};

template <typename T>
DeviceBuffer ToDevice(const T* host, int64_t count) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  DeviceBuffer buffer = DeviceBuffer::Make(bytes + 1).value();
  EXPECT_EQ(cudaMemcpy(buffer.data(), host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice),
            cudaSuccess);
  return buffer;
}

TEST_F(CudaGpu, CompressEqualsTheCpuBitForBit) {
  Random random(1);
  ThreadPool threads(2);
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const int64_t d_in : {1, 31, 64, 1025, 4096}) {
      const int64_t d_out = 37;
      const OwnedWeight base = OwnedWeight::Gaussian(dtype, d_out, d_in, 0.02f, random, 3);
      const OwnedWeight tuned = OwnedWeight::Gaussian(dtype, d_out, d_in, 0.02f, random);
      std::vector<uint8_t> signs[2];
      std::vector<float> alpha[2];
      for (int i = 0; i < 2; ++i) {
        signs[i].resize(static_cast<size_t>(SignBytes(d_out, d_in)));
        alpha[i].resize(static_cast<size_t>(d_out));
      }
      const DeltaStats cpu =
          BitDeltaCompressCpu({base.view(), tuned.view(), signs[0], alpha[0]}, threads).value();
      const DeltaStats gpu =
          BitDeltaCompressCuda({base.view(), tuned.view(), signs[1], alpha[1]}).value();
      EXPECT_EQ(signs[0], signs[1]);
      EXPECT_EQ(alpha[0], alpha[1]);
      EXPECT_EQ(cpu.sum_abs, gpu.sum_abs);
      EXPECT_EQ(cpu.sum_square, gpu.sum_square);
      EXPECT_EQ(cpu.changed, gpu.changed);
      EXPECT_EQ(cpu.max_abs, gpu.max_abs);
    }
  }
}

TEST_F(CudaGpu, LinearMatchesDoublePrecision) {
  Random random(2);
  const int64_t rows = 11, d_out = 75, d_in = 333;
  const OwnedFloats x = OwnedFloats::Gaussian(rows, d_in, random);
  const OwnedWeight base = OwnedWeight::Gaussian(DType::kF32, d_out, d_in, 0.02f, random);
  std::vector<uint8_t> signs(static_cast<size_t>(SignBytes(d_out, d_in)));
  for (uint8_t& byte : signs) byte = static_cast<uint8_t>(random());
  const std::vector<float> alpha(static_cast<size_t>(d_out), 0.01f);
  std::vector<int32_t> variant_of_row;
  for (int64_t t = 0; t < rows; ++t) variant_of_row.push_back(t % 2 == 0 ? 0 : -1);

  const DeviceBuffer device_x = ToDevice(x.view().data, rows * d_in);
  const DeviceBuffer device_base =
      ToDevice(static_cast<const float*>(base.view().data), d_out * d_in);
  const DeviceBuffer device_signs = ToDevice(signs.data(), static_cast<int64_t>(signs.size()));
  const DeviceBuffer device_alpha = ToDevice(alpha.data(), d_out);
  const DeviceBuffer device_rows = ToDevice(variant_of_row.data(), rows);
  const CudaLayerDelta variant{.signs = device_signs.as<uint8_t>(),
                               .alpha = device_alpha.as<float>()};
  const DeviceBuffer device_variants = ToDevice(&variant, 1);
  const DeviceBuffer device_y = DeviceBuffer::Make(rows * d_out * 4).value();
  ASSERT_TRUE(
      LaunchBitDeltaLinearCuda({.x = {device_x.as<float>(), rows, d_in, d_in},
                                .base = {device_base.data(), DType::kF32, d_out, d_in, d_in},
                                .variants = device_variants.as<CudaLayerDelta>(),
                                .variant_count = 1,
                                .variant_of_row = device_rows.as<int32_t>(),
                                .y = {device_y.as<float>(), rows, d_out, d_out}},
                               nullptr)
          .ok());
  std::vector<float> got(static_cast<size_t>(rows * d_out));
  ASSERT_EQ(cudaMemcpy(got.data(), device_y.data(), got.size() * 4, cudaMemcpyDeviceToHost),
            cudaSuccess);

  const PackedSigns packed = PackedSigns::Pack(d_out, d_in, signs, alpha).value();
  const LayerDelta reference{.signs = &packed};
  OwnedFloats want(rows, d_out);
  const LinearOutput output{.base = base.view(), .variants = {&reference, 1}, .y = want.view()};
  ASSERT_TRUE(
      BitDeltaLinearReference(
          {.x = x.view(), .outputs = {&output, 1}, .variant_of_row = variant_of_row})
          .ok());
  for (int64_t i = 0; i < rows * d_out; ++i) EXPECT_NEAR(got[i], want.view().data[i], 1e-5);
}

}  // namespace
}  // namespace stockpot
