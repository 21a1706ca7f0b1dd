// bitdelta_linear on a GPU: y = x W^T + bias + alpha * (x S^T) in one kernel, base read once for up
// to kCudaTokens rows of the batch. The contract of linear.h, batch invariance included; the bits
// of y may differ from the CPU's, whose sums run in another order.
#pragma once

#include <cstdint>

#include "kernels/base/status.h"
#include "kernels/base/view.h"

namespace stockpot {

inline constexpr int kCudaTokens = 8;  // rows of the batch that share one read of the base

// One entry of the variants' pointer table; all pointers are device memory, null where absent.
struct CudaLayerDelta {
  const uint8_t* signs = nullptr;  // canonical (signs.h), [d_out, d_in]
  const float* alpha = nullptr;    // [d_out]
  WeightMatrix dense;              // [d_out, d_in]; data null: reads the base
  const float* bias = nullptr;     // [d_out], replaces the base's
};

// All pointers are device memory, the table too.
struct CudaLinearArgs {
  ConstFloatMatrix x;                        // [rows, d_in]
  WeightMatrix base;                         // [d_out, d_in]
  const float* bias = nullptr;               // [d_out] or null
  const CudaLayerDelta* variants = nullptr;  // [variant_count]
  int64_t variant_count = 0;
  const int32_t* variant_of_row = nullptr;  // [rows]: index, or -1 = base only; null: all base only
  FloatMatrix y;                            // out: [rows, d_out]
};

// Enqueues the kernel on `stream` (a cudaStream_t) and returns. Indices live on the device and
// cannot be checked here: one outside [-1, variant_count) counts as -1. Unavailable without a CUDA
// backend.
Status LaunchBitDeltaLinearCuda(const CudaLinearArgs& args, void* stream);

}  // namespace stockpot
