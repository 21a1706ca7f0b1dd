// bitdelta_compress's device code under the host emulation: the reference's bits, for every width
// of a row up to two words of a warp and a few beyond, strided rows, every pair of dtypes.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "kernels/bitdelta/compress_row.h"
#include "kernels/bitdelta/signs.h"
#include "tests/unit/kernels/cuda_emulation/cuda_emulation.h"
#include "tests/unit/kernels/matrices.h"
// After the emulation, which stands in for the platform.
#include "kernels/bitdelta/compress_cuda.cuh"

namespace stockpot {
namespace {

using emulation::ThreadOrder;

struct Output {
  Output(int64_t d_out, int64_t d_in)
      : signs(static_cast<size_t>(SignBytes(d_out, d_in)), 0xEE),
        alpha(static_cast<size_t>(d_out), -1.0f) {}
  std::vector<uint8_t> signs;
  std::vector<float> alpha;
  DeltaStats stats;
};

Output Emulate(const OwnedWeight& base, const OwnedWeight& tuned, ThreadOrder order) {
  const int64_t d_out = base.view().rows, d_in = base.view().cols;
  Output out(d_out, d_in);
  std::vector<CompressedRow> rows(static_cast<size_t>(d_out));
  EmulateLaunch({order, 3}, {static_cast<unsigned>(CompressBlocks(d_out))},
                {kCompressWarps * kWarpLanes}, CompressKernel,
                CudaCompressArgs{base.view(), tuned.view(), out.signs.data(), rows.data()});
  out.stats = FinishCompress(rows, d_in, out.alpha);
  return out;
}

void ExpectReference(int64_t d_out, int64_t d_in, DType base_type, DType tuned_type,
                     Random& random) {
  const int64_t base_padding = static_cast<int64_t>(random() % 9);
  const int64_t tuned_padding = static_cast<int64_t>(random() % 9);
  OwnedWeight base = OwnedWeight::Gaussian(base_type, d_out, d_in, 0.02f, random, base_padding);
  OwnedWeight tuned = OwnedWeight::Gaussian(tuned_type, d_out, d_in, 0.02f, random, tuned_padding);
  for (int64_t r = 0; r < d_out; ++r) {  // unchanged where the dtype can say so
    for (int64_t c = r; c < d_in; c += 3) tuned.Set(r, c, base.view().at(r, c));
  }
  if (d_out > 1 && d_in > 0) {  // not finite on either side, and where the dtypes can, a difference
    const auto column = [&] {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(d_in));
    };
    base.Set(1, column(), std::numeric_limits<float>::quiet_NaN());
    tuned.Set(1, column(), -std::numeric_limits<float>::infinity());
    const int64_t c = column();
    base.Set(1, c, -3e38f);
    tuned.Set(1, c, 3e38f);
  }
  Output want(d_out, d_in);
  want.stats =
      BitDeltaCompressReference({base.view(), tuned.view(), want.signs, want.alpha}).value();
  const ThreadOrder orders[] = {ThreadOrder::kForward, ThreadOrder::kReverse,
                                ThreadOrder::kShuffled};
  const Output got = Emulate(base, tuned, orders[random() % 3]);
  SCOPED_TRACE(std::to_string(d_out) + " x " + std::to_string(d_in) + ' ' +
               std::string(DTypeName(base_type)) + ' ' + std::string(DTypeName(tuned_type)));
  EXPECT_EQ(got.signs, want.signs);
  EXPECT_EQ(got.alpha, want.alpha);
  EXPECT_EQ(got.stats.changed, want.stats.changed);
  EXPECT_EQ(got.stats.non_finite, want.stats.non_finite);
  EXPECT_EQ(got.stats.sum_abs, want.stats.sum_abs);
  EXPECT_EQ(got.stats.sum_square, want.stats.sum_square);
  EXPECT_EQ(got.stats.max_abs, want.stats.max_abs);
}

TEST(CompressCuda, EqualsTheReferenceBitForBit) {
  constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};
  Random random(21);
  int64_t d_in = 0;
  for (int pair = 0; d_in <= 70; ++pair, ++d_in) {
    ExpectReference(1 + d_in % 6, d_in, kTypes[pair % 3], kTypes[pair / 3 % 3], random);
  }
  for (const int64_t wide : {1023, 1024, 1025, 1100}) {
    for (const DType type : kTypes) ExpectReference(3, wide, type, DType::kBF16, random);
  }
}

}  // namespace
}  // namespace stockpot
