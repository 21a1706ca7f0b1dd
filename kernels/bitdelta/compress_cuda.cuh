// Device code of bitdelta_compress.
//
//   delta = fine_tuned - base;  bit = delta >= 0;  sums of |delta| and delta^2       (compress.h)
//
// A warp takes a row, a lane the columns lane, lane + 32, ...: the partial sums are those of
// compress_row.h, and folding the warp in halves is their fixed tree. A ballot makes the 32 sign
// bits of a step; lane k keeps the word of step k, so that 32 steps are written at once. Four warps
// a block: a row is short work, and blocks are cheap.
//
// Include kernels/base/cuda_platform.cuh, or the tests' emulation of it, before this file.
#pragma once

#include <cstdint>

#include "kernels/base/cuda_weight.cuh"
#include "kernels/bitdelta/compress_cuda.h"
#include "kernels/bitdelta/compress_row.h"
#include "kernels/bitdelta/signs.h"

namespace stockpot {

inline constexpr int kCompressWarps = 4;  // of a block
inline constexpr int kWarpLanes = 32;
static_assert(kCompressLanes == kWarpLanes);

// Writes the words that lanes [0, words) hold: the steps `first_step` ... of a row.
__device__ inline void StoreSignWords(uint8_t* row, int64_t row_bytes, int64_t first_step,
                                      unsigned word, int lane, int words) {
  if (lane >= words) return;
  const int64_t first = (first_step + lane) * 4;
  for (int byte = 0; byte < 4; ++byte) {  // rows start at any byte, and may end within a word
    if (first + byte < row_bytes) row[first + byte] = static_cast<uint8_t>(word >> (8 * byte));
  }
}

__global__ void CompressKernel(CudaCompressArgs args) {
  const int lane = threadIdx.x % kWarpLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kCompressWarps + threadIdx.x / kWarpLanes;
  if (row >= args.base.rows) return;  // the whole warp
  const int64_t d_in = args.base.cols;
  const int64_t row_bytes = (d_in + 7) / 8;
  const int64_t steps = (d_in + kWarpLanes - 1) / kWarpLanes;
  uint8_t* signs = args.signs + row * row_bytes;
  double sum_abs = 0;
  double sum_square = 0;
  float max_abs = 0;
  int64_t changed = 0;
  int64_t non_finite = 0;
  unsigned word = 0;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t c = step * kWarpLanes + lane;
    const bool inside = c < d_in;
    float delta = 0;
    if (inside) {
      delta = LoadDeviceWeight(args.fine_tuned.data, args.fine_tuned.dtype,
                               row * args.fine_tuned.stride + c) -
              LoadDeviceWeight(args.base.data, args.base.dtype, row * args.base.stride + c);
    }
    const unsigned bits = __ballot_sync(kAllLanes, inside && delta >= 0);
    changed += __popc(__ballot_sync(kAllLanes, delta != 0));
    const float size = fabsf(delta);
    const bool finite = size <= 3.402823466e38f;
    non_finite += __popc(__ballot_sync(kAllLanes, !finite));
    if (finite) {
      sum_abs += size;
      sum_square += static_cast<double>(size) * size;
      max_abs = fmaxf(max_abs, size);
    }
    if (lane == step % kWarpLanes) word = bits;
    if (step % kWarpLanes == kWarpLanes - 1) {
      StoreSignWords(signs, row_bytes, step - (kWarpLanes - 1), word, lane, kWarpLanes);
    }
  }
  const int rest = static_cast<int>(steps % kWarpLanes);
  StoreSignWords(signs, row_bytes, steps - rest, word, lane, rest);
  sum_abs = FoldWarp(sum_abs);
  sum_square = FoldWarp(sum_square);
  for (int half = 16; half > 0; half /= 2) {
    max_abs = fmaxf(max_abs, __shfl_xor_sync(kAllLanes, max_abs, half));
  }
  if (lane == 0) {
    CompressedRow& out = args.rows[row];
    out.sum_abs = sum_abs;
    out.sum_square = sum_square;
    out.max_abs = max_abs;
    out.changed = changed;
    out.non_finite = non_finite;
  }
}

inline int64_t CompressBlocks(int64_t d_out) {
  return (d_out + kCompressWarps - 1) / kCompressWarps;
}

}  // namespace stockpot
