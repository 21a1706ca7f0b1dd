#include "kernels/base/row_groups.h"

#include <algorithm>
#include <string>

namespace stockpot {
namespace {

template <typename Matrix>
bool IsMatrix(const Matrix& m) {
  return m.rows >= 0 && m.cols >= 0 && (m.rows <= 1 || m.stride >= m.cols) &&
         (m.data != nullptr || m.rows * m.cols == 0);
}

template <typename Matrix>
std::string Describe(const Matrix& m) {
  return "shape " + ShapeName(m.rows, m.cols) + " with row stride " + std::to_string(m.stride) +
         (m.data == nullptr ? " and no data" : "");
}

}  // namespace

std::string ShapeName(int64_t rows, int64_t cols) {
  return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

Status CheckDeltaBatch(const DeltaBatch& batch) {
  if (!IsMatrix(batch.x)) return InvalidArgument("x: " + Describe(batch.x));
  if (!IsMatrix(batch.y)) return InvalidArgument("y: " + Describe(batch.y));
  if (batch.y.rows != batch.x.rows) {
    return InvalidArgument("y: " + std::to_string(batch.y.rows) + " rows, x has " +
                           std::to_string(batch.x.rows));
  }
  if (batch.delta_of_row.empty()) return OkStatus();
  if (static_cast<int64_t>(batch.delta_of_row.size()) != batch.x.rows) {
    return InvalidArgument("delta_of_row: " + std::to_string(batch.delta_of_row.size()) +
                           " entries for " + std::to_string(batch.x.rows) + " rows");
  }
  for (const int32_t index : batch.delta_of_row) {
    if (index < -1 || index >= batch.delta_count) {
      return InvalidArgument("delta_of_row: index " + std::to_string(index) + " of " +
                             std::to_string(batch.delta_count) + " deltas");
    }
  }
  return OkStatus();
}

void RowGroups::Plan(std::span<const int32_t> delta_of_row) {
  const int64_t rows = static_cast<int64_t>(delta_of_row.size());
  order_.clear();
  groups_.clear();
  order_.reserve(delta_of_row.size());
  groups_.reserve(delta_of_row.size());
  for (int64_t t = 0; t < rows; ++t) {
    if (delta_of_row[t] >= 0) order_.push_back(t);
  }
  std::sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
    return delta_of_row[a] != delta_of_row[b] ? delta_of_row[a] < delta_of_row[b] : a < b;
  });
  for (int64_t i = 0; i < static_cast<int64_t>(order_.size()); ++i) {
    const int32_t delta = delta_of_row[order_[i]];
    if (groups_.empty() || groups_.back().delta != delta) groups_.push_back({delta, i, i});
    groups_.back().end = i + 1;
  }
}

}  // namespace stockpot
