// lora_linear on a GPU: shrink and expand, two kernels on one stream. The contract of
// lora_linear.h, batch invariance included; the bits of y may differ from the CPU's, whose sums run
// in another order.
#pragma once

#include <cstdint>

#include "kernels/base/status.h"
#include "kernels/base/view.h"

namespace stockpot {

// One adapter; all pointers are device memory.
struct CudaLoraDelta {
  WeightMatrix a;  // [rank, d_in]
  WeightMatrix b;  // [rank, d_out]: B transposed, its scale folded in, so that neighbouring threads
                   // read neighbouring outputs; rank 0: nothing
};

// All pointers are device memory, the table too.
struct CudaLoraArgs {
  ConstFloatMatrix x;                     // [rows, d_in]
  const CudaLoraDelta* deltas = nullptr;  // [delta_count]
  int64_t delta_count = 0;
  const int32_t* delta_of_row = nullptr;  // [rows]: index, or -1 = none; null: none at all.
                                          // Equal neighbours share the reading of their adapter.
  FloatMatrix hidden;                     // scratch: [rows, largest rank of the table]
  FloatMatrix y;                          // in/out: [rows, d_out]
};

// Enqueues both kernels on `stream` (a cudaStream_t) and returns. Indices and ranks live on the
// device and cannot be checked here: an index outside [-1, delta_count), or one whose rank is
// larger than hidden.cols, counts as -1. InvalidArgument: shapes. Unavailable without a CUDA
// backend.
Status LaunchLoraLinearCuda(const CudaLoraArgs& args, void* stream);

}  // namespace stockpot
