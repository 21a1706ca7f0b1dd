#include "kernels/bitdelta/unpack_signs.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/bitdelta/packed_signs.h"

namespace stockpot {
namespace {

constexpr uint16_t kPlusOne = 0x3F80;  // BF16
constexpr uint16_t kMinusBit = 0x8000;
constexpr int64_t kGrainRows = 16;

}  // namespace

WeightMatrix UnpackSigns(const PackedSigns& signs, int64_t plane, int64_t first, int64_t rows,
                         AlignedBuffer<uint16_t>& memory, ThreadPool& threads) {
  const PackedSigns::Layout& layout = signs.layout();
  STOCKPOT_CHECK(plane >= 0 && plane < layout.planes && first >= 0 && rows >= 0 &&
                     first + rows <= layout.d_out,
                 plane, first, rows);
  const int64_t cols = layout.d_in;
  uint16_t* const out = memory.Reserve(rows * cols);
  threads.ParallelFor(rows, kGrainRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t row = first + r;
      const uint32_t* const words =
          layout.block(plane, row / kSignBlockRows) + row % kSignBlockRows;
      for (int64_t c = 0; c < cols; c += kSignWordColumns) {
        const uint32_t bits =
            FoldSignGroups(words[c / kSignWordColumns * kSignBlockRows]);  // unfolds
        const int64_t count = std::min(kSignWordColumns, cols - c);
        for (int64_t i = 0; i < count; ++i) {
          out[r * cols + c + i] = (bits >> i) & 1 ? kPlusOne : (kPlusOne | kMinusBit);
        }
      }
    }
  });
  return {.data = out, .dtype = DType::kBF16, .rows = rows, .cols = cols, .stride = cols};
}

std::vector<float> ScalesOf(const PackedSigns& signs, int64_t plane) {
  const PackedSigns::Layout& layout = signs.layout();
  STOCKPOT_CHECK(plane >= 0 && plane < layout.planes, plane, layout.planes);
  const float* const scales = layout.scales(plane);
  return {scales, scales + layout.d_out};
}

}  // namespace stockpot
