// bitdelta_compress by its definition, one element after another. The order of the float64 sums is
// the contract's (compress_row.h); every other backend must give the same bits.
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/bitdelta/compress.h"
#include "kernels/bitdelta/compress_row.h"
#include "kernels/bitdelta/signs.h"

namespace stockpot {

Result<DeltaStats> BitDeltaCompressReference(const CompressArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckCompressArgs(args));
  const int64_t d_out = args.base.rows;
  const int64_t d_in = args.base.cols;
  if (!args.signs.empty()) std::memset(args.signs.data(), 0, args.signs.size());
  std::vector<CompressedRow> rows(d_out);
  for (int64_t r = 0; r < d_out; ++r) {
    CompressedRow& row = rows[r];
    double abs_lanes[kCompressLanes] = {};
    double square_lanes[kCompressLanes] = {};
    for (int64_t c = 0; c < d_in; ++c) {
      const float delta = args.fine_tuned.at(r, c) - args.base.at(r, c);
      if (delta >= 0) args.signs[r * SignRowBytes(d_in) + c / 8] |= 1u << (c % 8);
      row.changed += delta != 0;
      if (!std::isfinite(delta)) {
        ++row.non_finite;
        continue;
      }
      abs_lanes[c % kCompressLanes] += std::fabs(delta);
      square_lanes[c % kCompressLanes] += static_cast<double>(delta) * delta;
      row.max_abs = std::max(row.max_abs, std::fabs(delta));
    }
    row.sum_abs = SumLanes(abs_lanes);
    row.sum_square = SumLanes(square_lanes);
  }
  return FinishCompress(rows, d_in, args.alpha);
}

}  // namespace stockpot
