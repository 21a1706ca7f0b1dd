// Rows of bf16 whose delta is folded, through a bf16 weight, where the processor multiplies pairs
// of bf16: a part of bitdelta_linear on the CPU (linear_cpu.cc).
//
//   y[t, o] = sum_i W[o, i] x[t, i] + sum_p alpha_p[o] sum_i S_p[o, i] x[t, i]
//
// The weight is multiplied in pairs, the signs are looked up; sums of float32, or of 16 bits where
// that is as exact. How, and why not one product of W + alpha S: linear_columns_cpu.cc.
#pragma once

#include <cstdint>

#include "kernels/bitdelta/linear_plan.h"

namespace stockpot {

inline constexpr int64_t kRunColumns = 128;  // columns of W that meet x at a time, of kColumns
inline constexpr int64_t kRunTokens = 16;    // of a vector

// Rows of the batch that one variant takes by columns: rows [begin, begin + count) of the pass.
struct ColumnRun {
  const LinearInput* input = nullptr;
  const int64_t* order = nullptr;  // [count]: rows of the input
  int64_t begin = 0;
  int64_t count = 0;
  int64_t vectors = 0;    // of 16 tokens
  uint32_t* x = nullptr;  // [blocks of columns, vectors, 64, 16]: two bf16 in one
};

// Outputs [begin, end) of one weight for a run; begin is a multiple of 16.
struct ColumnChunk {
  const ColumnRun* run = nullptr;
  const PlannedRow* rows = nullptr;  // of the run
  int64_t begin = 0;
  int64_t end = 0;
};

// Columns [128 begin, 128 end) of x of a run, to run.x. All blocks before the first product.
void OrderColumns(const ColumnRun& run, int64_t columns, int64_t begin, int64_t end);

// Working memory of a thread for chunks of at most `rows` outputs, in floats; cache-line aligned.
int64_t ColumnFloats(int64_t vectors, int64_t rows);

// Overwrites y of the chunk's outputs, without bias. y of a row depends on its own x alone.
// REQUIRES: the weight is bf16, rows have signs, the processor has AVX512_BF16.
void MultiplyColumns(const ColumnChunk& chunk, float* memory);

}  // namespace stockpot
