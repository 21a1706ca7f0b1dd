// Device code of lora_linear, without tensor cores.
//
//   h[t, k] = sum_i A[k, i] x[t, i];  y[t, o] += sum_k B[o, k] h[t, k]          (lora_linear.h)
//
// Shrink: a warp takes a rank k and kLoraTokens rows of the batch; its lanes stride over the
// columns and are folded in halves. Expand: a thread takes an output o and the same rows and walks
// the ranks in order. Segments of neighbours that share an adapter share its reading. No sum
// depends on what else is in the batch.
//
// Include kernels/base/cuda_platform.cuh, or the tests' emulation of it, before this file.
#pragma once

#include <cstdint>

#include "kernels/base/cuda_weight.cuh"
#include "kernels/lora/lora_linear_cuda.h"

namespace stockpot {

inline constexpr int kLoraTokens = 8;  // rows of the batch of a block
inline constexpr int kLoraWarps = 8;   // ranks of a shrink block
inline constexpr int kLoraWarpLanes = 32;
inline constexpr int kLoraExpandThreads = 128;  // outputs of an expand block

// The adapter's index of each of a block's rows, or -1.
__device__ inline void LoraIndices(const CudaLoraArgs& args, int64_t first_row,
                                   int32_t (&index)[kLoraTokens]) {
#pragma unroll
  for (int t = 0; t < kLoraTokens; ++t) {
    index[t] = -1;
    if (first_row + t >= args.x.rows || args.delta_of_row == nullptr) continue;
    const int32_t i = args.delta_of_row[first_row + t];
    if (i < 0 || i >= args.delta_count || args.deltas[i].a.rows > args.hidden.cols) continue;
    index[t] = i;
  }
}

// Marks the segment of equal neighbours that begins at `first`; false if none begins there.
__device__ inline bool LoraSegment(const int32_t (&index)[kLoraTokens], int first,
                                   bool (&mine)[kLoraTokens]) {
  if (index[first] < 0 || (first > 0 && index[first] == index[first - 1])) return false;
#pragma unroll
  for (int t = 0; t < kLoraTokens; ++t) {
    mine[t] = t == first || (t > 0 && mine[t - 1] && index[t] == index[first]);
  }
  return true;
}

__global__ void LoraShrinkKernel(CudaLoraArgs args) {
  const int lane = threadIdx.x % kLoraWarpLanes;
  const int64_t k = static_cast<int64_t>(blockIdx.x) * kLoraWarps + threadIdx.x / kLoraWarpLanes;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kLoraTokens;
  int32_t index[kLoraTokens];
  LoraIndices(args, first_row, index);
  for (int first = 0; first < kLoraTokens; ++first) {
    bool mine[kLoraTokens];
    if (!LoraSegment(index, first, mine)) continue;  // equal for all lanes of the warp
    const WeightMatrix a = args.deltas[index[first]].a;
    if (k >= a.rows) continue;
    float sums[kLoraTokens] = {};
    for (int64_t i = lane; i < args.x.cols; i += kLoraWarpLanes) {
      const float weight = LoadDeviceWeight(a.data, a.dtype, k * a.stride + i);
#pragma unroll
      for (int t = 0; t < kLoraTokens; ++t) {
        if (!mine[t]) continue;
        sums[t] = fmaf(weight, args.x.data[(first_row + t) * args.x.stride + i], sums[t]);
      }
    }
#pragma unroll
    for (int t = 0; t < kLoraTokens; ++t) {
      if (!mine[t]) continue;
      const float sum = FoldWarp(sums[t]);
      if (lane == 0) args.hidden.data[(first_row + t) * args.hidden.stride + k] = sum;
    }
  }
}

__global__ void LoraExpandKernel(CudaLoraArgs args) {
  const int64_t o = static_cast<int64_t>(blockIdx.x) * kLoraExpandThreads + threadIdx.x;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kLoraTokens;
  if (o >= args.y.cols) return;
  int32_t index[kLoraTokens];
  LoraIndices(args, first_row, index);
  for (int first = 0; first < kLoraTokens; ++first) {
    bool mine[kLoraTokens];
    if (!LoraSegment(index, first, mine)) continue;
    const WeightMatrix b = args.deltas[index[first]].b;
    if (b.rows == 0) continue;
    float sums[kLoraTokens] = {};
    for (int64_t k = 0; k < b.rows; ++k) {
      const float weight = LoadDeviceWeight(b.data, b.dtype, k * b.stride + o);
#pragma unroll
      for (int t = 0; t < kLoraTokens; ++t) {
        if (!mine[t]) continue;
        sums[t] = fmaf(weight, args.hidden.data[(first_row + t) * args.hidden.stride + k], sums[t]);
      }
    }
#pragma unroll
    for (int t = 0; t < kLoraTokens; ++t) {
      if (mine[t]) args.y.data[(first_row + t) * args.y.stride + o] += sums[t];
    }
  }
}

struct LoraGrid {
  unsigned x, y;  // blocks over ranks or outputs, over rows of the batch
};

inline LoraGrid GridOfShrink(int64_t rows, int64_t largest_rank) {
  return {static_cast<unsigned>((largest_rank + kLoraWarps - 1) / kLoraWarps),
          static_cast<unsigned>((rows + kLoraTokens - 1) / kLoraTokens)};
}

inline LoraGrid GridOfExpand(int64_t rows, int64_t d_out) {
  return {static_cast<unsigned>((d_out + kLoraExpandThreads - 1) / kLoraExpandThreads),
          static_cast<unsigned>((rows + kLoraTokens - 1) / kLoraTokens)};
}

}  // namespace stockpot
