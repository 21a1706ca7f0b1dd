// Device code of bitdelta_linear for prefill: tiles of up to 64 rows of one variant, bf16 weights.
//
//   exact:   y = W x + sum_p alpha_p (S_p x)            1 + planes products, each x fragment shared
//   folded:  y = bf16(W + sum_p alpha_p S_p) x          one product, the sum made in registers
//
// A block computes 64 outputs x 64 rows. Its four warps stand 2 x 2, each with 32 outputs (two
// m-tiles) x 32 rows (four n-tiles); W, S and x of 64 columns are copied asynchronously to the next
// of two stages while the tensor cores work on this one, in the order in which fragments are read.
// Sums of a quarter of the columns are moved to totals that the lane keeps in shared memory: the
// order of linear_cuda_fragments.cuh, so the exact kernel's bits are the decode kernel's.
//
// Include after kernels/base/cuda_platform.cuh and cuda_mma.cuh, or the emulation.
#pragma once

#include <cstdint>

#include "kernels/bitdelta/linear_cuda_fragments.cuh"

namespace stockpot {

inline constexpr int kPrefillOutputTiles = 4;  // m-tiles of a block
inline constexpr int kPrefillOutputs = kPrefillOutputTiles * kSignTileRows;
inline constexpr int kPrefillTokenTiles = kCudaPrefillRows / 8;
inline constexpr int kPrefillWarps = 4;
inline constexpr int kPrefillThreads = kPrefillWarps * kLinearLanes;
inline constexpr int kPrefillStages = 2;
inline constexpr int kWarpOutputTiles = 2;
inline constexpr int kWarpTokenTiles = 4;

// 64 columns of everything.
template <int kPlanes>
struct PrefillStage {
  Bytes16 weights[kPrefillOutputTiles][2][2][kLinearLanes];  // [m-tile][output + 8][half][lane]
  Bytes16 x[kPrefillTokenTiles][2][2][kLinearLanes];  // [n-tile][half][columns + 4][lane], float32
  uint32_t signs[kPlanes][kPrefillOutputTiles][kLinearLanes];
};

// What a block works on.
struct PrefillTile {
  CudaRowTile rows;
  int index;  // of the variant; -1: none
  int planes;
  const uint32_t* signs;
  const float* alpha;
  WeightRows weights;
  bool x_aligned;
  int64_t first_output;
};

template <int kPlanes>
__device__ inline PrefillTile DescribeTile(const CudaLinearArgs& args, const BlockPlace& place) {
  PrefillTile tile;
  tile.rows = args.tiles[place.row_tile];
  tile.index = tile.rows.variant >= args.variant_count ? -1 : max(tile.rows.variant, -1);
  tile.first_output = place.output_block * kPrefillOutputs;
  const CudaLayerDelta* variant = tile.index >= 0 ? args.variants + tile.index : nullptr;
  const bool has_signs = variant != nullptr && variant->signs != nullptr;
  tile.planes = has_signs ? min(variant->planes, kPlanes) : 0;
  tile.signs = has_signs ? variant->signs : nullptr;
  tile.alpha = has_signs ? variant->alpha : nullptr;
  const bool dense = variant != nullptr && variant->dense.data != nullptr;
  tile.weights = RowsOf(dense ? variant->dense : args.base);
  tile.x_aligned = reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0 && args.x.stride % 4 == 0;
  return tile;
}

// The batch row of place n of the tile, or -1.
__device__ inline int RowOfTile(const CudaLinearArgs& args, const PrefillTile& tile, int n) {
  return n < tile.rows.count ? args.order[tile.rows.first + n] : -1;
}

// Begins copying four columns of x, zeros where there are none.
__device__ inline void CopyX(Bytes16* to, const CudaLinearArgs& args, bool aligned, int row,
                             int64_t column) {
  const int count = row < 0 ? 0 : ColumnsLeft(args.base.cols, column, 4);
  const float* from = args.x.data + (count > 0 ? row * args.x.stride + column : 0);
  if (aligned) {
    CopyAsync16(to, from, count * 4);
    return;
  }
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) words[i] = __float_as_uint(from[i]);
  }
  *to = {{words[0], words[1], words[2], words[3]}};
}

template <int kPlanes>
__device__ inline void BeginPrefillStage(const CudaLinearArgs& args, const PrefillTile& tile,
                                         int64_t column_tile, PrefillStage<kPlanes>& stage) {
  const int lane = threadIdx.x % kLinearLanes;
  const int warp = threadIdx.x / kLinearLanes;
  const int64_t d_out = args.base.rows;
  const int64_t d_in = args.base.cols;
  const int64_t first_column = column_tile * kSignTileColumns + lane % 4 * kLaneColumns;
  for (int i = warp; i < kPrefillOutputTiles * 4; i += kPrefillWarps) {
    const int m = i / 4, lower = i / 2 % 2, half = i % 2;
    const int64_t o = tile.first_output + m * kSignTileRows + lower * 8 + lane / 4;
    CopyWeights(&stage.weights[m][lower][half][lane], tile.weights, o, o < d_out,
                first_column + half * kHalfColumns, d_in);
  }
  for (int i = warp; i < kPrefillTokenTiles * 4; i += kPrefillWarps) {
    const int n = i / 4, half = i / 2 % 2, upper = i % 2;
    CopyX(&stage.x[n][half][upper][lane], args, tile.x_aligned,
          RowOfTile(args, tile, n * 8 + lane / 4), first_column + half * kHalfColumns + upper * 4);
  }
  for (int i = warp; i < tile.planes * kPrefillOutputTiles; i += kPrefillWarps) {
    const int p = i / kPrefillOutputTiles, m = i % kPrefillOutputTiles;
    const int64_t row_tile = tile.first_output / kSignTileRows + m;
    if (row_tile >= SignTileRowCount(d_out)) continue;
    const int64_t word = p * SignTileWords(d_out, d_in) +
                         (row_tile * SignTileColumnCount(d_in) + column_tile) * kSignTileWords;
    CopyAsync4(&stage.signs[p][m][lane], tile.signs + word + lane);
  }
}

// w + alpha * sign for the two bf16 of a register, rounded to bf16. `word << shift` has the sign of
// the upper one at bit 31, of the lower one at bit 15.
template <int kPlanes>
__device__ inline uint32_t FoldPair(uint32_t pair, const uint32_t (&words)[kPlanes], int shift,
                                    const float (&alpha)[kPlanes]) {
  float low = __uint_as_float(pair << 16);
  float high = __uint_as_float(pair & 0xffff0000u);
#pragma unroll
  for (int p = 0; p < kPlanes; ++p) {
    const uint32_t bits = words[p] << shift;
    low += __uint_as_float(__float_as_uint(alpha[p]) ^ ((bits << 16) & 0x80000000u));
    high += __uint_as_float(__float_as_uint(alpha[p]) ^ (bits & 0x80000000u));
  }
  return PackBF16(low, high);
}

// The scales that a lane folds in: of its outputs g and g + 8 of each m-tile; 0 where there is
// none.
template <int kPlanes>
struct FoldScales {
  float alpha[kWarpOutputTiles][2][kPlanes];
};

template <int kPlanes>
__device__ inline FoldScales<kPlanes> LoadFoldScales(const CudaLinearArgs& args,
                                                     const PrefillTile& tile, int first_m) {
  FoldScales<kPlanes> scales;
  const int g = threadIdx.x % kLinearLanes / 4;
#pragma unroll
  for (int i = 0; i < kWarpOutputTiles * 2 * kPlanes; ++i) {
    const int m = i / (2 * kPlanes), lower = i / kPlanes % 2, p = i % kPlanes;
    const int64_t o = tile.first_output + (first_m + m) * kSignTileRows + lower * 8 + g;
    const bool exists = p < tile.planes && o < args.base.rows;
    scales.alpha[m][lower][p] = exists ? tile.alpha[p * args.base.rows + o] : 0.0f;
  }
  return scales;
}

// Adds sum_p alpha_p S_p to the fragments of a half of W.
template <int kPlanes>
__device__ inline void FoldFragments(const PrefillStage<kPlanes>& stage, const PrefillTile& tile,
                                     int m, int half, const float (&alpha)[2][kPlanes],
                                     uint32_t (&a)[2][4]) {
  uint32_t words[kPlanes];
#pragma unroll
  for (int p = 0; p < kPlanes; ++p) {
    words[p] = p < tile.planes ? stage.signs[p][m][threadIdx.x % kLinearLanes] : 0;
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[s][i] = FoldPair(a[s][i], words, (half * 2 + s) * 4 + i, alpha[i % 2]);
    }
  }
}

// Sums of a warp: [base, then planes where they are apart][m-tile][n-tile].
template <int kSets>
using PrefillSums = float[kSets][kWarpOutputTiles][kWarpTokenTiles][4];

template <int kPlanes, bool kFolded>
__device__ inline void ComputePrefillStage(const PrefillStage<kPlanes>& stage,
                                           const PrefillTile& tile,
                                           const FoldScales<kPlanes>& scales, int first_m,
                                           int first_n,
                                           PrefillSums<kFolded ? 1 : 1 + kPlanes>& sums) {
  const int lane = threadIdx.x % kLinearLanes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t weights[kWarpOutputTiles][2][4];
#pragma unroll
    for (int m = 0; m < kWarpOutputTiles; ++m) {
      WeightFragments(stage.weights[first_m + m][0][half][lane],
                      stage.weights[first_m + m][1][half][lane], weights[m]);
      if (kFolded && tile.planes > 0) {
        FoldFragments(stage, tile, first_m + m, half, scales.alpha[m], weights[m]);
      }
    }
#pragma unroll
    for (int n = 0; n < kWarpTokenTiles; ++n) {
      float values[kLaneColumns];
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        values[i] = __uint_as_float(stage.x[first_n + n][half][i / 4][lane].words[i % 4]);
      }
      const Activations x = SplitActivations(values);
#pragma unroll
      for (int m = 0; m < kWarpOutputTiles; ++m) {
        MultiplyHalf(sums[0][m][n], weights[m], x);
        if constexpr (!kFolded) {
#pragma unroll
          for (int p = 0; p < kPlanes; ++p) {
            if (p >= tile.planes) continue;
            uint32_t signs[2][4];
            SignFragments(stage.signs[p][first_m + m][lane], half, signs);
            MultiplyHalf(sums[1 + p][m][n], signs, x);
          }
        }
      }
    }
  }
}

// totals += sums; sums = 0. `totals`: [value][thread]; a thread meets only its own.
template <int kSets>
__device__ inline void MoveToTotals(PrefillSums<kSets>& sums, float* totals, bool first) {
#pragma unroll
  for (int i = 0; i < kSets * kWarpOutputTiles * kWarpTokenTiles * 4; ++i) {
    float& sum = sums[i / 32][i / 16 % 2][i / 4 % 4][i % 4];
    float& total = totals[i * kPrefillThreads + threadIdx.x];
    total = first ? sum : total + sum;
    sum = 0;
  }
}
static_assert(kWarpOutputTiles == 2 && kWarpTokenTiles == 4);

template <int kPlanes, bool kFolded>
__device__ inline void FinishPrefill(const CudaLinearArgs& args, const PrefillTile& tile,
                                     int first_m, int first_n, const float* totals) {
  const int lane = threadIdx.x % kLinearLanes;
  constexpr int kSetValues = kWarpOutputTiles * kWarpTokenTiles * 4;
  for (int i = 0; i < kSetValues; ++i) {
    const int m = i / 16, n = i / 4 % 4, value = i % 4;
    const int row = RowOfTile(args, tile, (first_n + n) * 8 + lane % 4 * 2 + value % 2);
    const int64_t o = tile.first_output + (first_m + m) * kSignTileRows + value / 2 * 8 + lane / 4;
    if (row < 0 || o >= args.base.rows) continue;
    const float* own = totals + threadIdx.x;
    float delta[kPlanes];
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      delta[p] = kFolded ? 0.0f : own[(i + (1 + p) * kSetValues) * kPrefillThreads];
    }
    FinishOutput(args, row, tile.index, o, own[i * kPrefillThreads], delta);
  }
}

template <int kPlanes, bool kFolded>
constexpr int64_t PrefillSharedBytes() {
  const int64_t sets = kFolded ? 1 : 1 + kPlanes;
  return kPrefillStages * static_cast<int64_t>(sizeof(PrefillStage<kPlanes>)) +
         sets * kWarpOutputTiles * kWarpTokenTiles * 4 * kPrefillThreads * 4;
}

// Dynamic shared memory: PrefillSharedBytes.
template <int kPlanes, bool kFolded>
__global__ void __launch_bounds__(kPrefillThreads) LinearPrefillKernel(CudaLinearArgs args) {
  using Stage = PrefillStage<kPlanes>;
  STOCKPOT_DYNAMIC_SHARED(Stage, stages);
  float* totals = reinterpret_cast<float*>(stages + kPrefillStages);
  const PrefillTile tile = DescribeTile<kPlanes>(args, PlaceOfBlock(args.tile_count));
  if (!TensorCoresTake(args, tile.index)) return;  // the whole block
  const int warp = threadIdx.x / kLinearLanes;
  const int first_m = warp % 2 * kWarpOutputTiles;
  const int first_n = warp / 2 * kWarpTokenTiles;
  const int64_t column_tiles = SignTileColumnCount(args.base.cols);
  FoldScales<kPlanes> scales = {};
  if constexpr (kFolded) scales = LoadFoldScales<kPlanes>(args, tile, first_m);
  PrefillSums<kFolded ? 1 : 1 + kPlanes> sums = {};

  if (column_tiles > 0) BeginPrefillStage(args, tile, 0, stages[0]);
  CommitCopies();
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
    const int64_t end = QuarterBegin(column_tiles, quarter + 1);
    for (int64_t i = QuarterBegin(column_tiles, quarter); i < end; ++i) {
      if (i + 1 < column_tiles) {
        BeginPrefillStage(args, tile, i + 1, stages[(i + 1) % kPrefillStages]);
      }
      CommitCopies();
      WaitForCopies<1>();
      __syncthreads();  // the copies of all threads are there
      ComputePrefillStage<kPlanes, kFolded>(stages[i % kPrefillStages], tile, scales, first_m,
                                            first_n, sums);
      __syncthreads();  // and read: the next copies may overwrite them
    }
    MoveToTotals<kFolded ? 1 : 1 + kPlanes>(sums, totals, quarter == 0);
  }
  WaitForCopies<0>();
  FinishPrefill<kPlanes, kFolded>(args, tile, first_m, first_n, totals);
}

}  // namespace stockpot
