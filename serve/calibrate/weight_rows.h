// Rows of what a linear layer of a variant multiplies by, as one float32 matrix: for arithmetic
// that no fused kernel has (gradients). Never more than a few rows at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/threads.h"
#include "serve/model/weights_internal.h"

namespace stockpot {

// [planes][d_out]; empty: those of the layer itself.
using LayerScales = std::vector<std::vector<float>>;

// Rows [first, first + rows) of W + sum_p alpha_p S_p + changed elements + B A, into [rows, d_in];
// W is `base`, or the layer's own dense weight.
void FillWeightRows(const WeightMatrix& base, const LinearView& layer, const LayerScales& scales,
                    int64_t first, int64_t rows, float* out, ThreadPool& threads);

// sums[r] = sum_c S_p[first + r, c] m[r, c] of `rows` rows; m [rows, d_in].
void SignedRowSums(const PackedSigns& signs, int64_t plane, int64_t first, int64_t rows,
                   const float* m, float* sums, ThreadPool& threads);

}  // namespace stockpot
