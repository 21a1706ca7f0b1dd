// The host's share of bitdelta_linear on a GPU: sign tiles, the plan of rows, the path, the checks.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/unit/kernels/cuda_emulation/cuda_emulation.h"
#include "tests/unit/kernels/linear_cuda_emulated.h"
#include "tests/unit/kernels/linear_cuda_problem.h"
// After the emulation, which stands in for the platform.
#include "kernels/bitdelta/sign_tiles_cuda.cuh"

namespace stockpot {
namespace {

TEST(SignTiles, HoldEverySignWhereTheHeaderSays) {
  Random random(5);
  for (const int64_t planes : {1, 3}) {
    for (const int64_t d_out : {1, 8, 15, 16, 17, 33}) {
      for (const int64_t d_in : {1, 7, 8, 63, 64, 65, 130}) {
        CudaDelta delta(planes, d_out, d_in, random);
        const std::span<const uint32_t> words = delta.tile_words();
        std::vector<uint32_t> rest(words.begin(), words.end());
        for (int64_t p = 0; p < planes; ++p) {
          for (int64_t o = 0; o < d_out; ++o) {
            for (int64_t i = 0; i < d_in; ++i) {
              // The formula of sign_tiles_cuda.h, from the fragment's side.
              const int64_t g = o % 8, c = i % 64 / 32, t = i % 32 / 8, s = i % 8 / 4;
              const int64_t reg = i % 4 / 2 * 2 + o % 16 / 8, j = (2 * c + s) * 4 + reg;
              const int64_t tile = o / 16 * ((d_in + 63) / 64) + i / 64;
              const size_t word =
                  static_cast<size_t>(p * SignTileWords(d_out, d_in) + tile * 32 + 4 * g + t);
              const uint32_t bit = uint32_t{1} << ((i % 2 == 0 ? 15 : 31) - j);
              const bool minus = (words[word] & bit) != 0;
              const float want =
                  SignAt(delta.signs.data() + p * SignBytes(d_out, d_in), d_in, o, i);
              ASSERT_EQ(minus ? -1.0f : 1.0f, want) << p << ' ' << o << ' ' << i;
              rest[word] &= ~bit;
            }
          }
        }
        EXPECT_TRUE(std::all_of(rest.begin(), rest.end(), [](uint32_t w) { return w == 0; }));
      }
    }
  }
}

TEST(SignTiles, DeviceCodePacksLikeTheHost) {
  Random random(6);
  for (const int64_t d_in : {1, 8, 61, 64, 200}) {
    const int64_t planes = 1 + d_in % 3, d_out = 1 + d_in % 37;
    CudaDelta delta(planes, d_out, d_in, random);
    for (size_t i = 7; i < delta.signs.size(); i += 11) delta.signs[i] |= 0x80;  // padding bits too
    std::vector<uint32_t> want(delta.tile_words().size()), got(want.size(), 7);
    ASSERT_TRUE(PackSignTiles(planes, d_out, d_in, delta.signs, want).ok());
    const CudaSignTilesArgs args{planes, d_out, d_in, delta.signs.data(), got.data()};
    ASSERT_TRUE(CheckCudaSignTilesArgs(args).ok());
    EmulateLaunch({emulation::ThreadOrder::kShuffled, 2},
                  {static_cast<unsigned>(SignTilesBlocks(args))}, {kSignTilesThreads},
                  PackSignTilesKernel, args);
    EXPECT_EQ(got, want) << d_in;
  }
}

TEST(SignTiles, NamesTheFieldThatDoesNotFit) {
  const std::vector<uint8_t> signs(2 * 3);
  std::vector<uint32_t> words(32, 7);
  const auto reject = [&](const Status& status, const std::string& field) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message().rfind(field + ":", 0), 0u) << status.ToString();
    EXPECT_EQ(words[0], 7u);
  };
  reject(PackSignTiles(0, 2, 20, signs, words), "planes");
  reject(PackSignTiles(9, 2, 20, signs, words), "planes");
  reject(PackSignTiles(1, -1, 20, signs, words), "signs");
  reject(PackSignTiles(1, 2, 30, signs, words), "signs");
  reject(PackSignTiles(1, 2, 20, signs, std::span(words).first(31)), "words");
  reject(CheckCudaSignTilesArgs({1, 2, 20, nullptr, words.data()}), "signs");
  reject(CheckCudaSignTilesArgs({1, 2, 20, signs.data(), nullptr}), "words");
  reject(CheckCudaSignTilesArgs({1, int64_t{1} << 31, int64_t{1} << 31, nullptr, nullptr}),
         "signs");
  EXPECT_TRUE(PackSignTiles(1, 2, 20, signs, words).ok());
}

TEST(CudaRowPlan, SortsStablyAndCoversEveryRow) {
  Random random(3);
  for (const int64_t rows : {0, 1, 63, 64, 65, 130, 400}) {
    for (const uint64_t variants : {1, 2, 5, 300}) {
      std::vector<int32_t> of_row;
      for (int64_t t = 0; t < rows; ++t) {
        of_row.push_back(static_cast<int32_t>(random() % variants) - 1);
      }
      const CudaRowPlan plan = PlanCudaRows(rows, of_row);
      ASSERT_EQ(static_cast<int64_t>(plan.order.size()), rows);
      int32_t next = 0;
      for (const CudaRowTile& tile : plan.tiles) {
        ASSERT_EQ(tile.first, next);
        ASSERT_TRUE(tile.count >= 1 && tile.count <= kCudaPrefillRows);
        for (int32_t i = 0; i < tile.count; ++i, ++next) {
          ASSERT_EQ(of_row[static_cast<size_t>(plan.order[static_cast<size_t>(next)])],
                    tile.variant);
          if (i > 0) {
            ASSERT_GT(plan.order[static_cast<size_t>(next)],
                      plan.order[static_cast<size_t>(next) - 1]);
          }
        }
      }
      EXPECT_EQ(next, rows);
      std::vector<int32_t> distinct = of_row;
      std::sort(distinct.begin(), distinct.end());
      distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
      EXPECT_EQ(plan.segments, static_cast<int64_t>(distinct.size()));
    }
  }
  const CudaRowPlan plan = PlanCudaRows(70, {});
  ASSERT_EQ(plan.tiles.size(), 2u);
  EXPECT_EQ(plan.tiles[1].variant, -1);
  EXPECT_EQ(plan.tiles[1].count, 6);
}

TEST(CudaLinearPath, IsChosenBySizeAndDType) {
  const CudaRowTile tile;
  const auto choose = [&](int64_t rows, int64_t segments, DType dtype, bool tiles, bool folded) {
    CudaLinearArgs args;
    args.x.rows = rows;
    args.segments = segments;
    args.base.dtype = dtype;
    args.tiles = tiles ? &tile : nullptr;
    args.allow_folded = folded;
    return ChooseCudaLinearPath(args);
  };
  const DType bf16 = DType::kBF16;
  EXPECT_EQ(choose(1, 1, DType::kF32, true, true), CudaLinearPath::kCudaCores);
  EXPECT_EQ(choose(4096, 1, DType::kF16, true, true), CudaLinearPath::kCudaCores);
  EXPECT_EQ(choose(1, 1, bf16, true, true), CudaLinearPath::kDecode);
  EXPECT_EQ(choose(64, 1, bf16, true, true), CudaLinearPath::kDecode);
  EXPECT_EQ(choose(65, 1, bf16, true, true), CudaLinearPath::kPrefillExact);
  EXPECT_EQ(choose(65, 1, bf16, false, true), CudaLinearPath::kDecode);
  EXPECT_EQ(choose(206, 1, bf16, true, true), CudaLinearPath::kPrefillExact);
  EXPECT_EQ(choose(207, 1, bf16, true, true), CudaLinearPath::kPrefillFolded);
  EXPECT_EQ(choose(207, 1, bf16, true, false), CudaLinearPath::kPrefillExact);
  EXPECT_EQ(choose(320, 20, bf16, true, false), CudaLinearPath::kPrefillExact);
  EXPECT_EQ(choose(319, 20, bf16, true, true), CudaLinearPath::kDecode);
  EXPECT_EQ(CudaLinearPathName(CudaLinearPath::kDecode), "decode");
  EXPECT_EQ(CudaLinearPathName(CudaLinearPath::kPrefillFolded), "prefill, folded");
}

TEST(CudaLinearArgs, NamesTheFieldThatDoesNotFitAndLeavesYAlone) {
  CudaProblem p({.rows = 3, .d_out = 4, .d_in = 10});
  const auto reject = [&](auto change, const std::string& field) {
    CudaLinearArgs bad = p.args();
    change(bad);
    for (const Status& status : {CheckCudaLinearArgs(bad), EmulateLinear(bad)}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << field;
      EXPECT_EQ(status.message().rfind(field + ":", 0), 0u) << status.ToString();
    }
    EXPECT_TRUE(std::isnan(p.Y(0, 0)));
  };
  reject([](CudaLinearArgs& a) { a.base.dtype = DType::kU8; }, "base");
  reject([](CudaLinearArgs& a) { a.base.stride = 9; }, "base");
  reject([](CudaLinearArgs& a) { a.base.data = nullptr; }, "base");
  reject([](CudaLinearArgs& a) { a.base.rows = -1; }, "base");
  reject([](CudaLinearArgs& a) { a.x.cols = 9; }, "x");
  reject([](CudaLinearArgs& a) { a.x.stride = 9; }, "x");
  reject([](CudaLinearArgs& a) { a.x.data = nullptr; }, "x");
  reject([](CudaLinearArgs& a) { a.y.cols = 5; }, "y");
  reject([](CudaLinearArgs& a) { a.y.rows = 2; }, "y");
  reject([](CudaLinearArgs& a) { a.y.data = nullptr; }, "y");
  reject([](CudaLinearArgs& a) { a.variants = nullptr; }, "variants");
  reject([](CudaLinearArgs& a) { a.max_planes = 0; }, "max_planes");
  reject([](CudaLinearArgs& a) { a.max_planes = 9; }, "max_planes");
  reject([](CudaLinearArgs& a) { a.tile_count = 4; }, "tiles");
  reject([](CudaLinearArgs& a) { a.tile_count = 0; }, "tiles");
  reject([](CudaLinearArgs& a) { a.order = nullptr; }, "tiles");
  EXPECT_TRUE(CheckCudaLinearArgs(p.args()).ok());
}

}  // namespace
}  // namespace stockpot
