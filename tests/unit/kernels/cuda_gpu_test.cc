// The CUDA launchers on a real device. Skips, with the reason, where none answers; the same kernels
// run everywhere under the host emulation (compress_cuda_test.cc, linear_cuda_test.cc).
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/base/cuda_memory.h"
#include "kernels/base/device.h"
#include "kernels/bitdelta/compress_cuda.h"
#include "kernels/bitdelta/linear_cuda.h"
#include "kernels/bitdelta/sign_tiles_cuda.h"
#include "kernels/bitdelta/signs.h"
#include "tests/unit/kernels/linear_cuda_problem.h"
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

// `count` elements at `host` on the device, as far from a 16-byte boundary as they are on the host.
template <typename T>
const T* Place(const T* host, int64_t count, std::vector<DeviceBuffer>& buffers) {
  const int64_t bytes = std::max<int64_t>(count, 0) * static_cast<int64_t>(sizeof(T));
  const size_t offset = reinterpret_cast<uintptr_t>(host) % 16;
  buffers.push_back(DeviceBuffer::Make(bytes + 32).value());
  char* to = buffers.back().as<char>() + offset;
  EXPECT_EQ(cudaMemcpy(to, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice), cudaSuccess);
  return reinterpret_cast<const T*>(to);
}

WeightMatrix Place(WeightMatrix w, std::vector<DeviceBuffer>& buffers) {
  if (w.data == nullptr) return w;
  const int64_t elements = w.rows == 0 ? 0 : (w.rows - 1) * w.stride + w.cols;
  w.data = Place(static_cast<const char*>(w.data), elements * DTypeSize(w.dtype), buffers);
  return w;
}

// A problem on the device.
class DeviceProblem {
 public:
  explicit DeviceProblem(CudaProblem& problem) : problem_(problem), args_(problem.args()) {
    const int64_t rows = args_.x.rows, d_out = args_.base.rows, d_in = args_.base.cols;
    std::vector<CudaLayerDelta> table = problem.table;
    for (CudaLayerDelta& entry : table) {
      entry.dense = Place(entry.dense, buffers_);
      if (entry.bias != nullptr) entry.bias = Place(entry.bias, d_out, buffers_);
      if (entry.signs == nullptr) continue;
      entry.signs = Place(entry.signs, entry.planes * SignTileWords(d_out, d_in), buffers_);
      entry.alpha = Place(entry.alpha, entry.planes * d_out, buffers_);
    }
    args_.base = Place(args_.base, buffers_);
    args_.x.data =
        Place(args_.x.data, rows == 0 ? 0 : (rows - 1) * args_.x.stride + d_in, buffers_);
    args_.bias = Place(args_.bias, d_out, buffers_);
    args_.variants = Place(table.data(), args_.variant_count, buffers_);
    args_.variant_of_row = Place(args_.variant_of_row, rows, buffers_);
    args_.order = Place(args_.order, rows, buffers_);
    args_.tiles = Place(args_.tiles, args_.tile_count, buffers_);
    buffers_.push_back(DeviceBuffer::Make(rows * args_.y.stride * 4 + 4).value());
    args_.y.data = buffers_.back().as<float>();
  }

  CudaLinearArgs& args() { return args_; }

  // On a stream of its own; the result goes to the problem's y.
  void Run() {
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    const Status status = LaunchBitDeltaLinearCuda(args_, stream);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const FloatMatrix y = problem_.y.view();
    EXPECT_EQ(cudaMemcpy2DAsync(y.data, static_cast<size_t>(y.stride) * 4, args_.y.data,
                                static_cast<size_t>(y.stride) * 4, static_cast<size_t>(y.cols) * 4,
                                static_cast<size_t>(y.rows), cudaMemcpyDeviceToHost, stream),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }

 private:
  CudaProblem& problem_;
  std::vector<DeviceBuffer> buffers_;
  CudaLinearArgs args_;
};

CudaProblemShape RandomShape(Random& random) {
  const DType dtypes[] = {DType::kBF16, DType::kBF16, DType::kBF16, DType::kF16, DType::kF32};
  const auto below = [&](uint64_t limit) { return static_cast<int64_t>(random() % limit); };
  CudaProblemShape shape{.dtype = dtypes[below(5)], .seed = random()};
  shape.rows = 1 + below(below(3) == 0 ? 400 : 64);
  shape.d_out = 1 + below(150);
  shape.d_in = 1 + below(600);
  shape.planes = 1 + below(4);
  shape.aligned = below(2) == 0;
  shape.bf16_x = below(2) == 0;
  shape.other_dense = below(3) == 0;
  shape.variants_used = 1 + below(5);
  return shape;
}

TEST_F(CudaGpu, LinearMatchesDoublePrecisionOnRandomShapes) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  std::set<CudaLinearPath> paths;
  for (int round = 0; round < 60; ++round) {
    CudaProblem p(RandomShape(random));
    DeviceProblem device(p);
    paths.insert(ChooseCudaLinearPath(device.args()));
    device.Run();
    for (int64_t t = 0; t < p.shape.rows; t += 1 + p.shape.rows / 8) {
      for (int64_t o = 0; o < p.shape.d_out; ++o) {
        ASSERT_NEAR(p.Y(t, o), p.Expected(t, o), p.Tolerance() * p.Scale(t, o))
            << "round " << round << " row " << t << " output " << o << " path "
            << CudaLinearPathName(ChooseCudaLinearPath(device.args()));
      }
    }
  }
  EXPECT_EQ(paths.size(), 3u);
}

TEST_F(CudaGpu, DecodeAndPrefillGiveTheSameBits) {
  for (const int64_t planes : {1, 3}) {
    CudaProblem p({.rows = 200, .d_out = 130, .d_in = 1000, .planes = planes, .variants_used = 3});
    DeviceProblem device(p);
    ASSERT_EQ(ChooseCudaLinearPath(device.args()), CudaLinearPath::kPrefillExact);
    device.Run();
    std::vector<float> prefill;
    for (int64_t i = 0; i < 200 * 130; ++i) prefill.push_back(p.Y(i / 130, i % 130));
    device.args().tiles = nullptr;
    ASSERT_EQ(ChooseCudaLinearPath(device.args()), CudaLinearPath::kDecode);
    device.Run();
    for (int64_t i = 0; i < 200 * 130; ++i) ASSERT_EQ(prefill[i], p.Y(i / 130, i % 130)) << i;
  }
}

TEST_F(CudaGpu, FoldedPrefillMatchesItsRoundedWeights) {
  CudaProblem p({.rows = 300, .d_out = 70, .d_in = 500, .planes = 2, .variants_used = 2});
  DeviceProblem device(p);
  device.args().allow_folded = true;
  ASSERT_EQ(ChooseCudaLinearPath(device.args()), CudaLinearPath::kPrefillFolded);
  device.Run();
  for (int64_t t = 0; t < 300; t += 23) {
    for (int64_t o = 0; o < 70; ++o) {
      ASSERT_NEAR(p.Y(t, o), p.Expected(t, o, true), p.Tolerance() * p.Scale(t, o));
    }
  }
}

TEST_F(CudaGpu, SignTilesEqualTheHosts) {
  Random random(4);
  const int64_t planes = 2, d_out = 37, d_in = 333;
  CudaDelta delta(planes, d_out, d_in, random);
  std::vector<DeviceBuffer> buffers;
  const int64_t words = planes * SignTileWords(d_out, d_in);
  const DeviceBuffer tiles = DeviceBuffer::Make(words * 4).value();
  const uint8_t* signs =
      Place(delta.signs.data(), static_cast<int64_t>(delta.signs.size()), buffers);
  ASSERT_TRUE(
      LaunchPackSignTilesCuda({planes, d_out, d_in, signs, tiles.as<uint32_t>()}, nullptr).ok());
  std::vector<uint32_t> got(static_cast<size_t>(words));
  ASSERT_EQ(cudaMemcpy(got.data(), tiles.data(), got.size() * 4, cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_TRUE(std::ranges::equal(got, delta.tile_words()));
}

}  // namespace
}  // namespace stockpot
