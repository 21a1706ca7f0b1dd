// Device code of bitdelta_linear, without tensor cores.
//
//   y[t, o] = sum_i W[o, i] x[t, i] + bias[o] + alpha[o] * sum_i S[o, i] x[t, i]       (linear.h)
//
// A warp takes an output row o and kCudaTokens rows of the batch; its lanes stride over the
// columns, so W is read once and coalesced. The eight warps of a block share their x in shared
// memory, kTileColumns columns at a time. Base and delta sums run apart in float32; a lane adds its
// columns in order and the warp is folded in halves, whatever the other rows are: batch invariance.
//
// Include kernels/base/cuda_platform.cuh, or the tests' emulation of it, before this file.
#pragma once

#include <cstdint>

#include "kernels/base/cuda_weight.cuh"
#include "kernels/bitdelta/linear_cuda.h"

namespace stockpot {

inline constexpr int kLinearWarps = 8;  // output rows of a block
inline constexpr int kLinearLanes = 32;
inline constexpr int kTileColumns = 128;  // of x in shared memory: 4 KiB for 8 tokens

// The variant of batch row t, or null.
__device__ inline const CudaLayerDelta* DeviceVariant(const CudaLinearArgs& args, int64_t t) {
  if (t >= args.x.rows || args.variant_of_row == nullptr) return nullptr;
  const int32_t index = args.variant_of_row[t];
  return index < 0 || index >= args.variant_count ? nullptr : args.variants + index;
}

__device__ inline float DeviceSign(const uint8_t* signs, int64_t row_bytes, int64_t o, int64_t c) {
  return (signs[o * row_bytes + c / 8] >> (c % 8)) & 1 ? 1.0f : -1.0f;
}

// y[t, o] of lane 0.
__device__ inline void StoreOutput(const CudaLinearArgs& args, int64_t t, int64_t o, float base,
                                   float delta) {
  const CudaLayerDelta* variant = DeviceVariant(args, t);
  float y = base;
  if (variant != nullptr && variant->signs != nullptr) y = fmaf(variant->alpha[o], delta, y);
  const float* bias = variant != nullptr && variant->bias != nullptr ? variant->bias : args.bias;
  if (bias != nullptr) y += bias[o];
  args.y.data[t * args.y.stride + o] = y;
}

__global__ void LinearKernel(CudaLinearArgs args) {
  STOCKPOT_SHARED(float, x_tile, [kCudaTokens][kTileColumns]);
  const int lane = threadIdx.x % kLinearLanes;
  const int64_t o = static_cast<int64_t>(blockIdx.x) * kLinearWarps + threadIdx.x / kLinearLanes;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kCudaTokens;
  const int64_t d_in = args.base.cols;
  const int64_t row_bytes = (d_in + 7) / 8;
  const bool has_output = o < args.base.rows;  // all threads meet at the barriers

  const CudaLayerDelta* variants[kCudaTokens];
  float base[kCudaTokens];
  float delta[kCudaTokens];
#pragma unroll
  for (int t = 0; t < kCudaTokens; ++t) {
    variants[t] = DeviceVariant(args, first_row + t);
    base[t] = 0;
    delta[t] = 0;
  }

  for (int64_t begin = 0; begin < d_in; begin += kTileColumns) {
    __syncthreads();  // the previous tile is read
    for (int i = threadIdx.x; i < kCudaTokens * kTileColumns; i += kLinearWarps * kLinearLanes) {
      const int64_t t = first_row + i / kTileColumns;
      const int64_t c = begin + i % kTileColumns;
      x_tile[i / kTileColumns][i % kTileColumns] =
          t < args.x.rows && c < d_in ? args.x.data[t * args.x.stride + c] : 0.0f;
    }
    __syncthreads();
    if (!has_output) continue;
    for (int i = lane; i < kTileColumns; i += kLinearLanes) {
      const int64_t c = begin + i;
      if (c >= d_in) break;
      const float weight =
          LoadDeviceWeight(args.base.data, args.base.dtype, o * args.base.stride + c);
#pragma unroll
      for (int t = 0; t < kCudaTokens; ++t) {
        float own = weight;
        if (variants[t] != nullptr && variants[t]->dense.data != nullptr) {
          const WeightMatrix& dense = variants[t]->dense;
          own = LoadDeviceWeight(dense.data, dense.dtype, o * dense.stride + c);
        }
        const float x = x_tile[t][i];
        base[t] = fmaf(own, x, base[t]);
        if (variants[t] != nullptr && variants[t]->signs != nullptr) {
          delta[t] = fmaf(DeviceSign(variants[t]->signs, row_bytes, o, c), x, delta[t]);
        }
      }
    }
  }
  if (!has_output) return;
#pragma unroll
  for (int t = 0; t < kCudaTokens; ++t) {
    const float base_sum = FoldWarp(base[t]);
    const float delta_sum = FoldWarp(delta[t]);
    if (lane == 0 && first_row + t < args.x.rows) {
      StoreOutput(args, first_row + t, o, base_sum, delta_sum);
    }
  }
}

struct LinearGrid {
  unsigned x, y;  // blocks over output rows, over rows of the batch
};

inline LinearGrid GridOfLinear(int64_t rows, int64_t d_out) {
  return {static_cast<unsigned>((d_out + kLinearWarps - 1) / kLinearWarps),
          static_cast<unsigned>((rows + kCudaTokens - 1) / kCudaTokens)};
}

}  // namespace stockpot
