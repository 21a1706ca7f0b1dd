// Device code of bitdelta_linear: what its kernels share, and the one without tensor cores.
//
//   y[t, o] = sum_i W[o, i] x[t, i] + bias[o] + sum_p alpha[p, o] * sum_i S_p[o, i] x[t, i]
//
// The kernel below: a warp takes an output o and kCoreRows rows of the batch; its lanes stride over
// the columns, so W is read once and coalesced. The eight warps of a block share their x in shared
// memory, kCoreColumns columns at a time. A lane adds its columns in order and the warp is folded
// in halves, whatever the other rows are: batch invariance.
//
// Include kernels/base/cuda_platform.cuh and cuda_mma.cuh, or the tests' emulation of them, before
// this file.
#pragma once

#include <cstdint>

#include "kernels/base/cuda_weight.cuh"
#include "kernels/bitdelta/linear_cuda.h"
#include "kernels/bitdelta/sign_tiles_cuda.h"

namespace stockpot {

inline constexpr int kLinearLanes = 32;
inline constexpr int kCoreWarps = 8;      // outputs of a block
inline constexpr int kCoreRows = 8;       // rows of the batch of a block
inline constexpr int kCoreColumns = 128;  // of x in shared memory: 4 KiB

// Blocks stand in one row, those of equal outputs beside each other: they read the same W.
struct BlockPlace {
  int64_t row_tile, output_block;
};
__device__ inline BlockPlace PlaceOfBlock(int64_t row_tiles) {
  const int64_t block = blockIdx.x;
  return {block % row_tiles, block / row_tiles};
}
inline int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Index into the table of batch row t's variant, or -1.
__device__ inline int DeviceVariantIndex(const CudaLinearArgs& args, int64_t t) {
  if (t < 0 || t >= args.x.rows || args.variant_of_row == nullptr) return -1;
  const int32_t index = args.variant_of_row[t];
  return index >= args.variant_count ? -1 : max(index, -1);
}

// Whether the tensor-core kernels compute the rows of table entry `index`; the rest is kCudaCores'.
__device__ inline bool TensorCoresTake(const CudaLinearArgs& args, int index) {
  if (index < 0) return true;
  const CudaLayerDelta& variant = args.variants[index];
  if (variant.dense.data != nullptr && variant.dense.dtype != DType::kBF16) return false;
  return variant.signs == nullptr || variant.planes <= kCudaTensorPlanes;
}

__device__ inline float DeviceSign(const uint32_t* plane, int64_t d_in, int64_t o, int64_t c) {
  const SignTilePlace place = PlaceInSignTiles(d_in, o, c);
  return (plane[place.word] >> place.bit) & 1 ? -1.0f : 1.0f;
}

// Writes y[t, o] from its sums. `index`: of t's variant. Planes beyond what the caller summed are a
// contradiction of args.max_planes, and show as NaN.
template <int kPlanes>
__device__ inline void FinishOutput(const CudaLinearArgs& args, int64_t t, int index, int64_t o,
                                    float base, const float (&delta)[kPlanes]) {
  float y = base;
  const float* bias = args.bias;
  if (index >= 0) {
    const CudaLayerDelta& variant = args.variants[index];
    if (variant.bias != nullptr) bias = variant.bias;
    if (variant.signs != nullptr) {
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        if (p < variant.planes) y = fmaf(variant.alpha[p * args.base.rows + o], delta[p], y);
      }
      if (variant.planes > kPlanes) y = __uint_as_float(0x7fc00000u);
    }
  }
  if (bias != nullptr) y += bias[o];
  args.y.data[t * args.y.stride + o] = y;
}

struct CoreRow {
  const CudaLayerDelta* variant = nullptr;
  int index = -1;
  bool wanted = false;
};

// kPlanes: the most planes of a row. only_rest: leaves out the rows that TensorCoresTake.
template <int kPlanes>
__global__ void __launch_bounds__(kCoreWarps* kLinearLanes)
    LinearCoreKernel(CudaLinearArgs args, bool only_rest) {
  STOCKPOT_SHARED(float, x_tile, [kCoreRows][kCoreColumns]);
  const int lane = threadIdx.x % kLinearLanes;
  const BlockPlace place = PlaceOfBlock((args.x.rows + kCoreRows - 1) / kCoreRows);
  const int64_t o = place.output_block * kCoreWarps + threadIdx.x / kLinearLanes;
  const int64_t first_row = place.row_tile * kCoreRows;
  const int64_t d_in = args.base.cols;
  const int64_t plane_words = SignTileWords(args.base.rows, d_in);
  const bool has_output = o < args.base.rows;  // all threads meet at the barriers

  CoreRow rows[kCoreRows];
  float base[kCoreRows];
  float delta[kCoreRows][kPlanes];
  bool any = false;
#pragma unroll
  for (int t = 0; t < kCoreRows; ++t) {
    rows[t].index = DeviceVariantIndex(args, first_row + t);
    if (rows[t].index >= 0) rows[t].variant = args.variants + rows[t].index;
    rows[t].wanted =
        first_row + t < args.x.rows && !(only_rest && TensorCoresTake(args, rows[t].index));
    any = any || rows[t].wanted;
    base[t] = 0;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) delta[t][p] = 0;
  }
  if (!any) return;  // the whole block

  for (int64_t begin = 0; begin < d_in; begin += kCoreColumns) {
    __syncthreads();  // the previous tile is read
    for (int i = threadIdx.x; i < kCoreRows * kCoreColumns; i += kCoreWarps * kLinearLanes) {
      const int64_t t = first_row + i / kCoreColumns;
      const int64_t c = begin + i % kCoreColumns;
      x_tile[i / kCoreColumns][i % kCoreColumns] =
          t < args.x.rows && c < d_in ? args.x.data[t * args.x.stride + c] : 0.0f;
    }
    __syncthreads();
    if (!has_output) continue;
    for (int i = lane; i < kCoreColumns; i += kLinearLanes) {
      const int64_t c = begin + i;
      if (c >= d_in) break;
      const float weight =
          LoadDeviceWeight(args.base.data, args.base.dtype, o * args.base.stride + c);
#pragma unroll
      for (int t = 0; t < kCoreRows; ++t) {
        const CudaLayerDelta* variant = rows[t].variant;
        float own = weight;
        if (variant != nullptr && variant->dense.data != nullptr) {
          own = LoadDeviceWeight(variant->dense.data, variant->dense.dtype,
                                 o * variant->dense.stride + c);
        }
        const float x = x_tile[t][i];
        base[t] = fmaf(own, x, base[t]);
        if (variant == nullptr || variant->signs == nullptr) continue;
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) {
          if (p >= variant->planes) continue;
          delta[t][p] =
              fmaf(DeviceSign(variant->signs + p * plane_words, d_in, o, c), x, delta[t][p]);
        }
      }
    }
  }
  if (!has_output) return;
#pragma unroll
  for (int t = 0; t < kCoreRows; ++t) {
    const float base_sum = FoldWarp(base[t]);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) delta[t][p] = FoldWarp(delta[t][p]);
    if (lane == 0 && rows[t].wanted) {
      FinishOutput(args, first_row + t, rows[t].index, o, base_sum, delta[t]);
    }
  }
}

}  // namespace stockpot
