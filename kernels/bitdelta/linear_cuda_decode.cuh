// Device code of bitdelta_linear for decoding: few rows, any variants among them, bf16 weights.
//
//   y[n, o] = base[n, o] + sum_p alpha_p[o] * delta_p[n, o]     n: up to kTokenTiles * 8 rows
//
// A block computes 32 outputs (two m-tiles) of all its rows. Its four warps take a quarter of the
// columns each and meet once, at the end: while they run, no thread waits for another. A warp walks
// its column tiles with a ring of kDecodeStages stages of asynchronous copies. A stage carries the
// tile of one weight (the base; or a dense replacement) and up to kStageSlots sign tiles. A slot is
// one plane of a run of rows of one variant in one n-tile of 8 rows; slots stand in the order of
// n-tile and plane, so that accumulators are registers known at compile time.
//
// The fragment of x serves W and S. Products with a weight or slot that is not a row's own are
// computed, as the tensor core computes 8 rows anyway, and dropped: nothing of a variant, NaN
// included, reaches another's rows. Eight rows of one variant cost its bits once.
//
// Include after kernels/base/cuda_platform.cuh and cuda_mma.cuh, or the emulation.
#pragma once

#include <cstdint>

#include "kernels/bitdelta/linear_cuda_fragments.cuh"

namespace stockpot {

inline constexpr int kDecodeOutputTiles = 2;
inline constexpr int kDecodeOutputs = kDecodeOutputTiles * kSignTileRows;
inline constexpr int kDecodeThreads = kQuarters * kLinearLanes;
inline constexpr int kDecodeStages = 3;
inline constexpr int kStageSlots = 8;

// What a warp has under way for one step.
struct DecodeStage {
  Bytes16 weights[kDecodeOutputTiles][2][2][kLinearLanes];  // [m-tile][output + 8][half][lane]
  uint32_t signs[kStageSlots][kDecodeOutputTiles][kLinearLanes];
};

// What the rows of a block are and read. One for the block.
template <int kTokenTiles, int kPlanes>
struct DecodeTables {
  static constexpr int kTokens = kTokenTiles * 8;
  int row[kTokens];          // of the batch; -1: none, or not for tensor cores
  int variant[kTokens];      // -1: none
  int planes[kTokens];       // of its variant, at most kPlanes; 0: no signs
  bool dense[kTokens];       // its variant replaces the base
  int run[kTokens];          // the first row of its run of one variant within the n-tile
  int same_weight[kTokens];  // the first row that reads the same weight
  int weight_of[kTokens];    // index in weights; -1: none
  WeightRows weights[kTokens];
  int weight_count;
  const uint32_t* slot_words[kTokens * kPlanes];  // of the plane
  int slot_run[kTokens * kPlanes];
  int slot_begin[kTokens * kPlanes / 8 + 1];  // slots of (n-tile, plane)
};

// The planes that slots begin for at row n: those of a run's first row.
template <typename Tables>
__device__ inline int PlanesBegunAt(const Tables& tables, int n) {
  return tables.run[n] == n ? tables.planes[n] : 0;
}

// The slots that stand before those of (n-tile, plane).
template <int kTokenTiles, int kPlanes>
__device__ inline int SlotsBefore(const DecodeTables<kTokenTiles, kPlanes>& tables, int tile,
                                  int plane) {
  int count = 0;
  for (int m = 0; m < tile * 8; ++m) count += PlanesBegunAt(tables, m);
  if (tile == kTokenTiles) return count;
  for (int m = tile * 8; m < tile * 8 + 8; ++m) count += min(PlanesBegunAt(tables, m), plane);
  return count;
}

// Fills the tables; every thread of the block calls it. A thread works on one row, and looks at all
// in shared memory: no thread waits for a chain of loads from global memory.
template <int kTokenTiles, int kPlanes>
__device__ inline void FillDecodeTables(const CudaLinearArgs& args, int64_t first_row,
                                        DecodeTables<kTokenTiles, kPlanes>& tables) {
  constexpr int kTokens = kTokenTiles * 8;
  const int n = threadIdx.x;
  if (n < kTokens) {
    const int64_t place = first_row + n;
    int row = -1;
    if (place < args.x.rows) row = static_cast<int>(args.order ? args.order[place] : place);
    const int index = DeviceVariantIndex(args, row);
    if (!TensorCoresTake(args, index)) row = -1;
    const CudaLayerDelta* variant = row >= 0 && index >= 0 ? args.variants + index : nullptr;
    const bool has_signs = variant != nullptr && variant->signs != nullptr;
    tables.row[n] = row;
    tables.variant[n] = row >= 0 ? index : -1;
    tables.planes[n] = has_signs ? min(variant->planes, kPlanes) : 0;
    tables.dense[n] = variant != nullptr && variant->dense.data != nullptr;
  }
  __syncthreads();
  if (n < kTokens) {
    int run = n;
    while (run % 8 != 0 && tables.row[n] >= 0 && tables.row[run - 1] >= 0 &&
           tables.variant[run - 1] == tables.variant[n]) {
      --run;
    }
    tables.run[n] = run;
    int same = n;
    for (int m = n - 1; m >= 0; --m) {
      const bool both_base = !tables.dense[m] && !tables.dense[n];
      const bool one_dense =
          tables.dense[m] && tables.dense[n] && tables.variant[m] == tables.variant[n];
      if (tables.row[m] >= 0 && (both_base || one_dense)) same = m;
    }
    tables.same_weight[n] = tables.row[n] >= 0 ? same : -1;
  }
  __syncthreads();
  if (n < kTokens) {
    const int first = tables.same_weight[n];
    int index = 0;
    for (int m = 0; m < first; ++m) index += tables.same_weight[m] == m;
    tables.weight_of[n] = first < 0 ? -1 : index;
    if (first == n) {
      tables.weights[index] =
          RowsOf(tables.dense[n] ? args.variants[tables.variant[n]].dense : args.base);
    }
    const int planes = PlanesBegunAt(tables, n);
    for (int p = 0; p < planes; ++p) {
      int slot = SlotsBefore(tables, n / 8, p);
      for (int m = n / 8 * 8; m < n; ++m) slot += PlanesBegunAt(tables, m) > p;
      tables.slot_words[slot] = args.variants[tables.variant[n]].signs +
                                p * SignTileWords(args.base.rows, args.base.cols);
      tables.slot_run[slot] = n;
    }
  }
  for (int i = n; i <= kTokenTiles * kPlanes; i += kDecodeThreads) {
    tables.slot_begin[i] = SlotsBefore(tables, i / kPlanes, i % kPlanes);
  }
  if (n == 0) {
    int count = 0;
    for (int m = 0; m < kTokens; ++m) count += tables.same_weight[m] == m;
    tables.weight_count = count;
  }
  __syncthreads();
}

// The eight values of x of batch row `row` that the calling lane feeds, from `column` on; zeros
// where the row (-1) or a column does not exist.
__device__ inline Activations LoadActivations(const CudaLinearArgs& args, int row, int64_t column) {
  float values[kLaneColumns] = {};
  const int count = row < 0 ? 0 : ColumnsLeft(args.base.cols, column, kLaneColumns);
  const float* from = args.x.data + (count > 0 ? row * args.x.stride + column : 0);
  const bool aligned = reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0 && args.x.stride % 4 == 0;
  if (aligned && count == kLaneColumns) {
    const Floats4 low = reinterpret_cast<const Floats4*>(from)[0];
    const Floats4 high = reinterpret_cast<const Floats4*>(from)[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = low.values[i];
      values[i + 4] = high.values[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      if (i < count) values[i] = from[i];
    }
  }
  return SplitActivations(values);
}

// acc += A x in the two columns (rows of the batch) that are the product's own.
__device__ inline void MultiplyOwn(float (&acc)[4], const uint32_t (&a)[2][4], const Activations& x,
                                   bool own_even, bool own_odd) {
  float sum[4] = {acc[0], acc[1], acc[2], acc[3]};
  MultiplyHalf(sum, a, x);
  if (own_even) acc[0] = sum[0];
  if (own_odd) acc[1] = sum[1];
  if (own_even) acc[2] = sum[2];
  if (own_odd) acc[3] = sum[3];
}

// Sums of a warp: [n-tile][base, then planes][m-tile].
template <int kTokenTiles, int kPlanes>
using DecodeSums = float[kTokenTiles][1 + kPlanes][kDecodeOutputTiles][4];

// One of a warp's steps: column tile and which of the tile's steps.
struct DecodeStep {
  int64_t tile;
  int index;
};

template <int kTokenTiles, int kPlanes>
__device__ inline void BeginStep(const CudaLinearArgs& args,
                                 const DecodeTables<kTokenTiles, kPlanes>& tables,
                                 const DecodeStep& step, int64_t first_output, DecodeStage& stage) {
  const int lane = threadIdx.x % kLinearLanes;
  const int64_t d_out = args.base.rows;
  const int64_t d_in = args.base.cols;
  if (step.index < tables.weight_count) {
    const WeightRows weights = tables.weights[step.index];
#pragma unroll
    for (int i = 0; i < kDecodeOutputTiles * 4; ++i) {
      const int m = i / 4, lower = i / 2 % 2, half = i % 2;
      const int64_t o = first_output + m * kSignTileRows + lower * 8 + lane / 4;
      CopyWeights(&stage.weights[m][lower][half][lane], weights, o, o < d_out,
                  step.tile * kSignTileColumns + half * kHalfColumns + lane % 4 * kLaneColumns,
                  d_in);
    }
  }
  const int slots = tables.slot_begin[kTokenTiles * kPlanes];
  for (int k = 0; k < kStageSlots && step.index * kStageSlots + k < slots; ++k) {
    const uint32_t* plane = tables.slot_words[step.index * kStageSlots + k];
#pragma unroll
    for (int m = 0; m < kDecodeOutputTiles; ++m) {
      const int64_t row_tile = first_output / kSignTileRows + m;
      if (row_tile >= SignTileRowCount(d_out)) continue;
      const int64_t word = (row_tile * SignTileColumnCount(d_in) + step.tile) * kSignTileWords;
      CopyAsync4(&stage.signs[k][m][lane], plane + word + lane);
    }
  }
}

template <int kTokenTiles, int kPlanes>
__device__ inline void ComputeStep(const CudaLinearArgs& args,
                                   const DecodeTables<kTokenTiles, kPlanes>& tables,
                                   const DecodeStep& step, const DecodeStage& stage,
                                   DecodeSums<kTokenTiles, kPlanes>& sums) {
  const int lane = threadIdx.x % kLinearLanes;
  const bool has_weight = step.index < tables.weight_count;
  const int first_slot = step.index * kStageSlots;
  const int end_slot = first_slot + kStageSlots;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t column =
        step.tile * kSignTileColumns + half * kHalfColumns + lane % 4 * kLaneColumns;
    uint32_t weights[kDecodeOutputTiles][2][4] = {};
    if (has_weight) {
#pragma unroll
      for (int m = 0; m < kDecodeOutputTiles; ++m) {
        WeightFragments(stage.weights[m][0][half][lane], stage.weights[m][1][half][lane],
                        weights[m]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int* slot_begin = tables.slot_begin + tile * kPlanes;
      if (!has_weight && (slot_begin[0] >= end_slot || slot_begin[kPlanes] <= first_slot)) continue;
      const Activations x = LoadActivations(args, tables.row[tile * 8 + lane / 4], column);
      const int even = tile * 8 + lane % 4 * 2;  // the rows of D's columns in this lane
      if (has_weight) {
#pragma unroll
        for (int m = 0; m < kDecodeOutputTiles; ++m) {
          MultiplyOwn(sums[tile][0][m], weights[m], x, tables.weight_of[even] == step.index,
                      tables.weight_of[even + 1] == step.index);
        }
      }
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        const int end = min(slot_begin[p + 1], end_slot);
        for (int slot = max(slot_begin[p], first_slot); slot < end; ++slot) {
          const int run = tables.slot_run[slot];
#pragma unroll
          for (int m = 0; m < kDecodeOutputTiles; ++m) {
            uint32_t signs[2][4];
            SignFragments(stage.signs[slot - first_slot][m][lane], half, signs);
            MultiplyOwn(sums[tile][1 + p][m], signs, x, tables.run[even] == run,
                        tables.run[even + 1] == run);
          }
        }
      }
    }
  }
}

// Sums of the four quarters to y. `shared`: [quarter][value of DecodeSums][lane].
template <int kTokenTiles, int kPlanes>
__device__ inline void FinishDecode(const CudaLinearArgs& args,
                                    const DecodeTables<kTokenTiles, kPlanes>& tables,
                                    int64_t first_output,
                                    const DecodeSums<kTokenTiles, kPlanes>& sums, float* shared) {
  constexpr int kSets = 1 + kPlanes;
  constexpr int kValues = kTokenTiles * kSets * kDecodeOutputTiles * 4;  // of a lane
  const int lane = threadIdx.x % kLinearLanes;
  float* own = shared + threadIdx.x / kLinearLanes * kValues * kLinearLanes;
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int i = 0; i < kDecodeOutputTiles * 4; ++i) {
        const int value = (tile * kSets + set) * kDecodeOutputTiles * 4 + i;
        own[value * kLinearLanes + lane] = sums[tile][set][i / 4][i % 4];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTokenTiles * 8 * kDecodeOutputs; i += kDecodeThreads) {
    const int n = i / kDecodeOutputs;
    const int local = i % kDecodeOutputs;  // neighbours write neighbours
    const int64_t o = first_output + local;
    if (tables.row[n] < 0 || o >= args.base.rows) continue;
    const int m = local / kSignTileRows;
    const int value = local % kSignTileRows / 8 * 2 + n % 2;
    const int holder = local % 8 * 4 + n % 8 / 2;
    float totals[kSets];
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int place = ((n / 8 * kSets + set) * kDecodeOutputTiles + m) * 4 + value;
      const float* at = shared + place * kLinearLanes + holder;
      constexpr int kQuarter = kValues * kLinearLanes;
      totals[set] = ((at[0] + at[kQuarter]) + at[2 * kQuarter]) + at[3 * kQuarter];
    }
    float delta[kPlanes];
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) delta[p] = totals[1 + p];
    FinishOutput(args, tables.row[n], tables.variant[n], o, totals[0], delta);
  }
}

template <int kTokenTiles, int kPlanes>
constexpr int64_t DecodeSharedBytes() {
  constexpr int64_t kRing = sizeof(DecodeStage) * kDecodeStages * kQuarters;
  constexpr int64_t kMeeting =
      int64_t{kTokenTiles} * (1 + kPlanes) * kDecodeOutputTiles * 4 * kDecodeThreads * 4;
  return kRing > kMeeting ? kRing : kMeeting;
}

// Dynamic shared memory: DecodeSharedBytes.
template <int kTokenTiles, int kPlanes>
__global__ void __launch_bounds__(kDecodeThreads) LinearDecodeKernel(CudaLinearArgs args) {
  using Tables = DecodeTables<kTokenTiles, kPlanes>;
  STOCKPOT_SHARED(Tables, tables_memory, [1]);
  STOCKPOT_DYNAMIC_SHARED(DecodeStage, ring);
  Tables& tables = tables_memory[0];
  const int warp = threadIdx.x / kLinearLanes;
  const BlockPlace place = PlaceOfBlock((args.x.rows + Tables::kTokens - 1) / Tables::kTokens);
  const int64_t first_output = place.output_block * kDecodeOutputs;
  FillDecodeTables(args, place.row_tile * Tables::kTokens, tables);
  if (tables.weight_count == 0) return;  // no row is ours: the whole block

  const int slots = tables.slot_begin[kTokenTiles * kPlanes];
  const int steps = max(tables.weight_count, (slots + kStageSlots - 1) / kStageSlots);
  const int64_t column_tiles = SignTileColumnCount(args.base.cols);
  const int64_t end = QuarterBegin(column_tiles, warp + 1);
  DecodeStage* stages = ring + warp * kDecodeStages;
  DecodeSums<kTokenTiles, kPlanes> sums = {};

  const auto advance = [&](DecodeStep& step) {
    if (++step.index == steps) step = {step.tile + 1, 0};
  };
  DecodeStep next = {QuarterBegin(column_tiles, warp), 0};  // to begin
  DecodeStep step = next;                                   // to compute
  int begun = 0;
#pragma unroll
  for (; begun < kDecodeStages - 1; ++begun) {
    if (next.tile < end) BeginStep(args, tables, next, first_output, stages[begun]);
    CommitCopies();
    advance(next);
  }
  for (int stage = 0; step.tile < end; advance(step)) {
    WaitForCopies<kDecodeStages - 2>();
    __syncwarp();  // what `begun` overwrites has been read
    if (next.tile < end) BeginStep(args, tables, next, first_output, stages[begun]);
    CommitCopies();
    advance(next);
    ComputeStep(args, tables, step, stages[stage], sums);
    begun = begun + 1 == kDecodeStages ? 0 : begun + 1;
    stage = stage + 1 == kDecodeStages ? 0 : stage + 1;
  }
  WaitForCopies<0>();
  __syncthreads();  // the ring becomes the meeting place
  FinishDecode(args, tables, first_output, sums, reinterpret_cast<float*>(ring));
}

}  // namespace stockpot
