// sparse_delta_linear on a GPU. The contract of sparse_delta.h, batch invariance included; the bits
// of y may differ from the CPU's, whose sums run in another order.
#pragma once

#include <cstdint>

#include "kernels/base/status.h"
#include "kernels/base/view.h"

namespace stockpot {

// One delta in canonical order (SparseElements); all pointers are device memory. Its arrays must
// have passed SparseDelta::FromElements: nothing is checked on the device.
struct CudaSparseDelta {
  const int64_t* row_offsets = nullptr;  // [d_out + 1]; null: nothing
  const uint32_t* columns = nullptr;     // [changed]
  const float* values = nullptr;         // [changed]
};

// All pointers are device memory, the table too.
struct CudaSparseArgs {
  ConstFloatMatrix x;                       // [rows, d_in]
  const CudaSparseDelta* deltas = nullptr;  // [delta_count]
  int64_t delta_count = 0;
  const int32_t* delta_of_row = nullptr;  // [rows]: index, or -1 = none; null: none at all.
                                          // Equal neighbours share the reading of their delta.
  FloatMatrix y;                          // in/out: [rows, d_out]
};

// Enqueues the kernel on `stream` (a cudaStream_t) and returns. Indices live on the device and
// cannot be checked here: one outside [-1, delta_count) counts as -1. InvalidArgument: shapes.
// Unavailable without a CUDA backend.
Status LaunchSparseDeltaLinearCuda(const CudaSparseArgs& args, void* stream);

}  // namespace stockpot
