// What one call of the CPU kernel works on: made by linear_cpu.cc, read by the per-target code.
#pragma once

#include <cstdint>

#include "kernels/base/view.h"
#include "kernels/bitdelta/linear.h"

namespace stockpot {

// One row of the batch, in the order in which the kernel walks them: rows that read one weight
// stand together, and among them rows of one variant.
struct PlannedRow {
  const float* x = nullptr;              // ordered copy (linear_base-inl.h), zero-padded
  const float* table = nullptr;          // sums of groups of four (linear_delta-inl.h), or null
  float* y = nullptr;                    // [d_out]
  const float* bias = nullptr;           // [d_out] or null
  const WeightMatrix* weight = nullptr;  // the base, or the variant's dense weight
  const PackedSigns::Layout* signs = nullptr;
  int64_t source = 0;  // row of args.x
};

// Consecutive rows [begin, end) of the plan.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
};

}  // namespace stockpot
