// The signs of packed planes as a weight, a few rows at a time: for what multiplies by the signs
// alone, as calibration does.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/threads.h"
#include "kernels/base/view.h"
#include "kernels/bitdelta/linear.h"

namespace stockpot {

// Rows [first, first + rows) of one plane as +1 and -1 in BF16, exactly; [rows, d_in] in `memory`.
// REQUIRES: plane and rows are within `signs`.
WeightMatrix UnpackSigns(const PackedSigns& signs, int64_t plane, int64_t first, int64_t rows,
                         AlignedBuffer<uint16_t>& memory, ThreadPool& threads);

// [d_out]: the scales of one plane. REQUIRES: likewise.
std::vector<float> ScalesOf(const PackedSigns& signs, int64_t plane);

}  // namespace stockpot
