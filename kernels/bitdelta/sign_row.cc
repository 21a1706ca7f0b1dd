#include "kernels/bitdelta/sign_row.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/bitdelta/packed_signs.h"

namespace stockpot {

void AddSignRow(const PackedSigns& signs, int64_t row, std::span<float> out) {
  const PackedSigns::Layout& layout = signs.layout();
  STOCKPOT_CHECK(row >= 0 && row < layout.d_out, row, layout.d_out);
  STOCKPOT_CHECK(static_cast<int64_t>(out.size()) == layout.d_in, layout.d_in);
  for (int64_t plane = 0; plane < layout.planes; ++plane) {
    const float alpha = layout.scales(plane)[row];
    const uint32_t* words = layout.block(plane, row / kSignBlockRows) + row % kSignBlockRows;
    for (int64_t begin = 0; begin < layout.d_in; begin += kSignWordColumns) {
      const uint32_t word = FoldSignGroups(words[begin / kSignWordColumns * kSignBlockRows]);
      const int64_t columns = std::min(kSignWordColumns, layout.d_in - begin);
      for (int64_t i = 0; i < columns; ++i) {
        out[static_cast<size_t>(begin + i)] += (word >> i) & 1 ? alpha : -alpha;
      }
    }
  }
}

}  // namespace stockpot
