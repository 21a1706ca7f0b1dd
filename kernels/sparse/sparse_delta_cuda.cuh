// Device code of sparse_delta_linear.
//
//   y[t, o] += sum_k values[k] * x[t, columns[k]]                             (sparse_delta.h)
//
// A warp takes an output row o and kSparseTokens rows of the batch; its lanes stride over the
// changed elements of row o, each element read once for all neighbours that share a delta. Without
// shared memory: x is gathered, and the reads of a row's x hit the L2 cache. A lane adds its
// elements in order and the warp is folded in halves, whatever the other rows are: batch
// invariance.
//
// Include kernels/base/cuda_platform.cuh, or the tests' emulation of it, before this file.
#pragma once

#include <cstdint>

#include "kernels/base/cuda_weight.cuh"
#include "kernels/sparse/sparse_delta_cuda.h"

namespace stockpot {

inline constexpr int kSparseWarps = 8;   // output rows of a block
inline constexpr int kSparseTokens = 8;  // rows of the batch of a block
inline constexpr int kSparseLanes = 32;

// The delta's index of batch row t, or -1.
__device__ inline int32_t SparseIndexOfRow(const CudaSparseArgs& args, int64_t t) {
  if (t >= args.x.rows || args.delta_of_row == nullptr) return -1;
  const int32_t index = args.delta_of_row[t];
  if (index < 0 || index >= args.delta_count) return -1;
  return args.deltas[index].row_offsets == nullptr ? -1 : index;
}

__global__ void SparseDeltaKernel(CudaSparseArgs args) {
  const int lane = threadIdx.x % kSparseLanes;
  const int64_t o = static_cast<int64_t>(blockIdx.x) * kSparseWarps + threadIdx.x / kSparseLanes;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kSparseTokens;
  if (o >= args.y.cols) return;  // a whole warp, and no barrier follows

  int32_t index[kSparseTokens];
#pragma unroll
  for (int t = 0; t < kSparseTokens; ++t) index[t] = SparseIndexOfRow(args, first_row + t);

#pragma unroll
  for (int first = 0; first < kSparseTokens; ++first) {
    // Equal for all lanes: the first row of a segment of neighbours works for all of them.
    if (index[first] < 0 || (first > 0 && index[first] == index[first - 1])) continue;
    const CudaSparseDelta delta = args.deltas[index[first]];
    const int64_t begin = delta.row_offsets[o];
    const int64_t end = delta.row_offsets[o + 1];
    if (begin == end) continue;
    bool mine[kSparseTokens];
    float sums[kSparseTokens];
#pragma unroll
    for (int t = 0; t < kSparseTokens; ++t) {
      mine[t] = t == first || (t > 0 && mine[t - 1] && index[t] == index[first]);
      sums[t] = 0;
    }
    for (int64_t k = begin + lane; k < end; k += kSparseLanes) {
      const int64_t column = delta.columns[k];
      const float value = delta.values[k];
#pragma unroll
      for (int t = 0; t < kSparseTokens; ++t) {
        if (!mine[t]) continue;
        sums[t] = fmaf(value, args.x.data[(first_row + t) * args.x.stride + column], sums[t]);
      }
    }
#pragma unroll
    for (int t = 0; t < kSparseTokens; ++t) {
      if (!mine[t]) continue;
      const float sum = FoldWarp(sums[t]);
      if (lane == 0) args.y.data[(first_row + t) * args.y.stride + o] += sum;
    }
  }
}

struct SparseGrid {
  unsigned x, y;  // blocks over output rows, over rows of the batch
};

inline SparseGrid GridOfSparse(int64_t rows, int64_t d_out) {
  return {static_cast<unsigned>((d_out + kSparseWarps - 1) / kSparseWarps),
          static_cast<unsigned>((rows + kSparseTokens - 1) / kSparseTokens)};
}

}  // namespace stockpot
