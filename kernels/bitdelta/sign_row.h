// One row of packed sign planes, as numbers: what a lookup in a table of embeddings adds to the
// base's row. Thread promise: pure functions.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/bitdelta/linear.h"

namespace stockpot {

// out[c] += alpha_p[row] * S_p[row, c], plane after plane, in float32. out: [d_in].
// REQUIRES: row in [0, d_out).
void AddSignRow(const PackedSigns& signs, int64_t row, std::span<float> out);

}  // namespace stockpot
