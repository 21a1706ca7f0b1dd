#include "kernels/bitdelta/compress.h"

#include <algorithm>
#include <string>

#include "kernels/bitdelta/compress_row.h"
#include "kernels/bitdelta/signs.h"

namespace stockpot {
namespace {

std::string ShapeText(const WeightMatrix& w) {
  return "[" + std::to_string(w.rows) + ", " + std::to_string(w.cols) + "]";
}

}  // namespace

double DeltaStats::OneBitError() const {
  if (elements == 0 || sum_square == 0) return 0;
  const double n = static_cast<double>(elements);
  const double mean_abs = sum_abs / n;
  return std::max(0.0, 1.0 - mean_abs * mean_abs / (sum_square / n));
}

Status CheckCompressArgs(const CompressArgs& args) {
  const WeightMatrix& base = args.base;
  const WeightMatrix& tuned = args.fine_tuned;
  for (const auto& [name, w] : {std::pair{"base", &base}, {"fine_tuned", &tuned}}) {
    if (!IsWeightDType(w->dtype)) {
      return InvalidArgument(std::string(name) + ": dtype " + std::string(DTypeName(w->dtype)) +
                             " is not F32, F16 or BF16");
    }
    if (w->rows < 0 || w->cols < 0 || (w->rows > 1 && w->stride < w->cols)) {
      return InvalidArgument(std::string(name) + ": shape " + ShapeText(*w) + " with row stride " +
                             std::to_string(w->stride));
    }
    if (w->data == nullptr && w->rows * w->cols > 0) {
      return InvalidArgument(std::string(name) + ": no data");
    }
  }
  if (base.rows != tuned.rows || base.cols != tuned.cols) {
    return InvalidArgument("fine_tuned: shape " + ShapeText(tuned) + ", the base has " +
                           ShapeText(base));
  }
  const int64_t bytes = SignBytes(base.rows, base.cols);
  if (static_cast<int64_t>(args.signs.size()) != bytes) {
    return InvalidArgument("signs: " + std::to_string(args.signs.size()) + " bytes, need " +
                           std::to_string(bytes));
  }
  if (static_cast<int64_t>(args.alpha.size()) != base.rows) {
    return InvalidArgument("alpha: " + std::to_string(args.alpha.size()) + " values, need " +
                           std::to_string(base.rows));
  }
  return OkStatus();
}

DeltaStats FinishCompress(std::span<const CompressedRow> rows, int64_t d_in,
                          std::span<float> alpha) {
  DeltaStats stats;
  stats.elements = static_cast<int64_t>(rows.size()) * d_in;
  for (size_t r = 0; r < rows.size(); ++r) {
    const CompressedRow& row = rows[r];
    alpha[r] = d_in == 0 ? 0.0f : static_cast<float>(row.sum_abs / static_cast<double>(d_in));
    stats.changed += row.changed;
    stats.non_finite += row.non_finite;
    stats.sum_abs += row.sum_abs;
    stats.sum_square += row.sum_square;
    stats.max_abs = std::max(stats.max_abs, row.max_abs);
  }
  return stats;
}

}  // namespace stockpot
