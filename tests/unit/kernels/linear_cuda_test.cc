// bitdelta_linear's device code under the host emulation: against double precision over shapes,
// dtypes, planes and batches; that rows do not depend on their batch; that variants stay apart.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/unit/kernels/cuda_emulation/cuda_emulation.h"
#include "tests/unit/kernels/golden_file.h"
#include "tests/unit/kernels/linear_cuda_emulated.h"
#include "tests/unit/kernels/linear_cuda_problem.h"
// After the emulation, which stands in for the platform.
#include "kernels/bitdelta/linear_cuda_fragments.cuh"

namespace stockpot {
namespace {

using emulation::ThreadOrder;

std::string Describe(const CudaProblemShape& s) {
  return std::string(DTypeName(s.dtype)) + ' ' + std::to_string(s.rows) + " rows, " +
         std::to_string(s.d_out) + " x " + std::to_string(s.d_in) + ", " +
         std::to_string(s.planes) + " planes, seed " + std::to_string(s.seed);
}

void ExpectNearDouble(CudaProblem& p, bool folded = false) {
  SCOPED_TRACE(Describe(p.shape));
  for (int64_t t = 0; t < p.shape.rows; ++t) {
    for (int64_t o = 0; o < p.shape.d_out; ++o) {
      ASSERT_NEAR(p.Y(t, o), p.Expected(t, o, folded), p.Tolerance() * p.Scale(t, o))
          << "row " << t << " output " << o << " variant "
          << p.variant_of_row[static_cast<size_t>(t)];
    }
  }
}

struct Backend {
  std::string name;
  CudaLinearPath path;
  ThreadOrder order;
};
void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }

class LinearCudaTable : public testing::TestWithParam<Backend> {
 protected:
  void Run(const CudaProblemShape& shape) {
    CudaProblem p(shape);
    const Status status = EmulateLinear(p.args(), {GetParam().order, 5}, GetParam().path);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ExpectNearDouble(p, GetParam().path == CudaLinearPath::kPrefillFolded);
  }
};

// Around the tiles: 8 rows of an n-tile, 16 outputs of an m-tile, 32 and 64 of a block; 8 columns a
// lane, 32 of a half, 64 of a tile, 256 of a tile a quarter.
TEST_P(LinearCudaTable, MatchesDoublePrecision) {
  const bool tensor = GetParam().path != CudaLinearPath::kCudaCores;
  const std::vector<DType> dtypes =
      tensor ? std::vector{DType::kBF16} : std::vector{DType::kBF16, DType::kF16, DType::kF32};
  uint64_t seed = 1;
  for (const DType dtype : dtypes) {
    for (const int64_t d_in : {0, 1, 7, 8, 9, 31, 33, 61, 64, 65, 129, 257}) {
      CudaProblemShape shape{.dtype = dtype, .seed = ++seed};
      shape.rows = std::vector<int64_t>{1, 2, 7, 8, 9, 0}[seed % 6];
      shape.d_out = std::vector<int64_t>{1, 15, 16, 17, 31, 33, 0}[seed % 7];
      shape.d_in = d_in;
      shape.planes = 1 + static_cast<int64_t>(seed % 3);
      shape.aligned = seed % 2 == 0;
      shape.bf16_x = seed % 5 < 3;
      shape.other_dense = seed % 4 == 0;
      Run(shape);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(LinearCudaTable, ManyRowsAndVariants) {
  // Around 16 and 64 rows of a decode block, 64 of a prefill tile, 64 outputs of its block.
  for (const CudaProblemShape& shape :
       {CudaProblemShape{.rows = 17, .d_out = 18, .d_in = 70, .bf16_x = true},
        CudaProblemShape{.rows = 67, .d_out = 3, .d_in = 40, .bf16_x = true, .variants_used = 2},
        CudaProblemShape{.rows = 19, .d_out = 67, .d_in = 66, .planes = 4, .bf16_x = true}}) {
    Run(shape);
    if (HasFatalFailure()) return;
  }
}

TEST_P(LinearCudaTable, MorePlanesThanTensorCoresTake) {
  Run({.rows = 9, .d_out = 5, .d_in = 65, .planes = 6, .bf16_x = true});
}

TEST_P(LinearCudaTable, MatchesTorch) {
  if (GetParam().path == CudaLinearPath::kPrefillFolded) {
    GTEST_SKIP() << "rounds each weight to bf16";
  }
  GoldenFile golden;
  ASSERT_TRUE(golden.ok());
  int cases = 0;
  for (std::string name = golden.NextCase(); !name.empty(); name = golden.NextCase()) {
    if (name != "linear") continue;
    ++cases;
    const int64_t rows = golden.Number();
    const int64_t d_out = golden.Number();
    const int64_t d_in = golden.Number();
    const DType dtype = golden.Type();
    const std::vector<float> x = golden.Floats(rows * d_in);
    const OwnedWeight weight = golden.Weight(dtype, d_out, d_in);
    const std::vector<uint8_t> signs = golden.Bytes(SignBytes(d_out, d_in));
    const std::vector<float> alpha = golden.Floats(d_out);
    const std::vector<float> bias = golden.Floats(d_out);
    const std::vector<double> want = golden.Doubles(rows * d_out);
    std::vector<uint32_t> tiles(static_cast<size_t>(SignTileWords(d_out, d_in)));
    ASSERT_TRUE(PackSignTiles(1, d_out, d_in, signs, tiles).ok());
    const CudaLayerDelta variant{.signs = tiles.data(), .alpha = alpha.data()};
    const std::vector<int32_t> variant_of_row(static_cast<size_t>(rows), 0);
    const CudaRowPlan plan = PlanCudaRows(rows, variant_of_row);
    std::vector<float> y(want.size());
    const CudaLinearPath path =
        dtype == DType::kBF16 ? GetParam().path : CudaLinearPath::kCudaCores;
    ASSERT_TRUE(EmulateLinear({.x = {x.data(), rows, d_in, d_in},
                               .base = weight.view(),
                               .bias = bias.data(),
                               .variants = &variant,
                               .variant_count = 1,
                               .variant_of_row = variant_of_row.data(),
                               .order = plan.order.data(),
                               .tiles = plan.tiles.data(),
                               .tile_count = static_cast<int64_t>(plan.tiles.size()),
                               .y = {y.data(), rows, d_out, d_out}},
                              {GetParam().order, 5}, path)
                    .ok());
    for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], want[i], 2e-6);
  }
  EXPECT_EQ(cases, 3);
}

INSTANTIATE_TEST_SUITE_P(
    All, LinearCudaTable,
    testing::Values(
        Backend{"CudaCores", CudaLinearPath::kCudaCores, ThreadOrder::kShuffled},
        Backend{"DecodeForward", CudaLinearPath::kDecode, ThreadOrder::kForward},
        Backend{"DecodeReverse", CudaLinearPath::kDecode, ThreadOrder::kReverse},
        Backend{"DecodeShuffled", CudaLinearPath::kDecode, ThreadOrder::kShuffled},
        Backend{"PrefillExactForward", CudaLinearPath::kPrefillExact, ThreadOrder::kForward},
        Backend{"PrefillExactShuffled", CudaLinearPath::kPrefillExact, ThreadOrder::kShuffled},
        Backend{"PrefillFoldedReverse", CudaLinearPath::kPrefillFolded, ThreadOrder::kReverse},
        Backend{"PrefillFoldedShuffled", CudaLinearPath::kPrefillFolded, ThreadOrder::kShuffled}),
    [](const auto& backend) { return backend.param.name; });

TEST(LinearCuda, LongRowsStayWithinTheBound) {
  CudaProblem p({.rows = 2, .d_out = 3, .d_in = 2100, .planes = 2, .variants_used = 2});
  ASSERT_TRUE(EmulateLinear(p.args()).ok());
  ExpectNearDouble(p);
}

TEST(LinearCuda, BitsDoNotDependOnTheBatchOrTheExactPath) {
  for (const int64_t planes : {1, 3}) {
    CudaProblem p({.rows = 20, .d_out = 19, .d_in = 330, .planes = planes, .seed = 7});
    const AlignedWeight dense(p.dense[0].view());
    p.table[2].dense = dense.view;
    ASSERT_TRUE(EmulateLinear(p.args(), {}, CudaLinearPath::kDecode).ok());
    std::vector<uint32_t> decoded;
    for (int64_t i = 0; i < 20 * 19; ++i) {
      decoded.push_back(std::bit_cast<uint32_t>(p.Y(i / 19, i % 19)));
    }
    const auto expect_same = [&](int64_t t, const float* y, const char* how) {
      for (int64_t o = 0; o < 19; ++o) {
        ASSERT_EQ(std::bit_cast<uint32_t>(y[o]), decoded[static_cast<size_t>(t * 19 + o)])
            << how << ' ' << t << ' ' << o;
      }
    };
    ASSERT_TRUE(EmulateLinear(p.args(), {}, CudaLinearPath::kPrefillExact).ok());
    for (int64_t t = 0; t < 20; ++t) expect_same(t, p.y.view().row(t), "prefill");
    CudaLinearArgs unsorted = p.args();
    unsorted.order = nullptr;
    unsorted.tiles = nullptr;
    unsorted.base = p.base.view();  // and not aligned
    ASSERT_TRUE(EmulateLinear(unsorted, {ThreadOrder::kShuffled, 3}).ok());
    for (int64_t t = 0; t < 20; ++t) expect_same(t, p.y.view().row(t), "unsorted");
    for (int64_t t = 0; t < 20; t += 5) {  // alone
      std::vector<float> y(19);
      CudaLinearArgs one = unsorted;
      one.x = {p.x.cview().row(t), 1, 330, p.x.cview().stride};
      one.variant_of_row += t;
      one.y = {y.data(), 1, 19, 19};
      ASSERT_TRUE(EmulateLinear(one).ok());
      expect_same(t, y.data(), "alone");
    }
  }
}

TEST(LinearCuda, NothingOfAVariantReachesAnothersRows) {
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  for (const CudaLinearPath path :
       {CudaLinearPath::kCudaCores, CudaLinearPath::kDecode, CudaLinearPath::kPrefillExact}) {
    CudaProblem p({.rows = 12, .d_out = 5, .d_in = 40});
    for (int64_t t = 0; t < 12; ++t) p.variant_of_row[static_cast<size_t>(t)] = t % 4 - 1;
    p.plan = PlanCudaRows(12, p.variant_of_row);
    p.dense[0].Set(0, 3, nan);  // of variant 2
    p.dense[0].Set(1, 4, infinity);
    p.deltas[0]->alpha[2] = infinity;  // of variant 0
    p.x.view().row(4)[7] = nan;        // of base only
    ASSERT_TRUE(EmulateLinear(p.args(), {}, path).ok());
    for (int64_t t = 0; t < 12; ++t) {
      for (int64_t o = 0; o < 5; ++o) {
        const int32_t variant = p.variant_of_row[static_cast<size_t>(t)];
        const bool own = (variant == 2 && o < 2) || (variant == 0 && o == 2) || t == 4;
        EXPECT_EQ(std::isfinite(p.Y(t, o)), !own) << CudaLinearPathName(path) << t << ' ' << o;
      }
    }
  }
}

TEST(LinearCuda, PlanesBeyondTheClaimShowAsNaN) {
  for (const CudaLinearPath path :
       {CudaLinearPath::kCudaCores, CudaLinearPath::kDecode, CudaLinearPath::kPrefillExact}) {
    CudaProblem p({.rows = 6, .d_out = 3, .d_in = 10, .planes = 3});
    for (int64_t t = 0; t < 6; ++t) p.variant_of_row[static_cast<size_t>(t)] = t % 2;
    p.plan = PlanCudaRows(6, p.variant_of_row);
    CudaLinearArgs args = p.args();
    args.max_planes = 1;
    ASSERT_TRUE(EmulateLinear(args, {}, path).ok());
    for (int64_t t = 0; t < 6; ++t) EXPECT_EQ(std::isnan(p.Y(t, 0)), t % 2 == 1) << t;
  }
}

TEST(LinearCuda, FoldedIsWithinBf16OfTheExactSum) {
  CudaProblem p({.rows = 9, .d_out = 20, .d_in = 130, .planes = 2, .variants_used = 2});
  ASSERT_TRUE(EmulateLinear(p.args(), {}, CudaLinearPath::kPrefillFolded).ok());
  double largest = 0;
  for (int64_t t = 0; t < 9; ++t) {
    for (int64_t o = 0; o < 20; ++o) {
      const double error = std::fabs(p.Y(t, o) - p.Expected(t, o)) / p.Scale(t, o);
      EXPECT_LE(error, std::ldexp(1.0, -9) + p.Tolerance());  // half a unit of each weight
      largest = std::fmax(largest, error);
    }
  }
  EXPECT_GT(largest, 1e-5);  // it is another number, which is why it must be asked for
}

TEST(LinearCuda, ChoosesTheKernelsItself) {
  CudaProblem p({.rows = 80,
                 .d_out = 9,
                 .d_in = 33,
                 .bf16_x = true,
                 .other_dense = true,
                 .variants_used = 3});
  ASSERT_EQ(ChooseCudaLinearPath(p.args()), CudaLinearPath::kPrefillExact);
  ASSERT_TRUE(EmulateLinear(p.args()).ok());
  ExpectNearDouble(p);
}

void SplitKernel(const float* x, float* terms, int* split) {
  float values[kLaneColumns];
  for (int i = 0; i < kLaneColumns; ++i) values[i] = x[threadIdx.x * kLaneColumns + i];
  const Activations out = SplitActivations(values);
  for (int i = 0; i < kLaneColumns; ++i) {
    for (int k = 0; k < 3; ++k) {
      const uint32_t word = out.term[k][i / 2];
      terms[(threadIdx.x * kLaneColumns + i) * 3 + k] =
          __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
  }
  split[threadIdx.x] = out.split;
}

TEST(LinearCuda, TermsOfXAddUpToX) {
  Random random(9);
  for (int round = 0; round < 20; ++round) {
    std::vector<float> x(32 * kLaneColumns), terms(x.size() * 3);
    std::vector<int> split(32);
    for (float& value : x) {  // any sign and mantissa, exponents of all but the least numbers
      const uint32_t exponent = 30 + static_cast<uint32_t>(random() % 225);
      value =
          std::bit_cast<float>((static_cast<uint32_t>(random()) & 0x807fffffu) | exponent << 23);
      if (round == 0)
        value = FloatFromBF16(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
    }
    if (round == 1) x[5] = std::numeric_limits<float>::infinity();
    EmulateLaunch({}, {1}, {32}, SplitKernel, x.data(), terms.data(), split.data());
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(terms[3 * i] + (terms[3 * i + 1] + terms[3 * i + 2]), x[i]) << x[i];
    }
    EXPECT_EQ(split[0], round != 0);
  }
}

}  // namespace
}  // namespace stockpot
