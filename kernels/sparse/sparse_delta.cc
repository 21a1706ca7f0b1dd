// Finding, checking and packing changed elements; nothing here is on the path of a request.
#include "kernels/sparse/sparse_delta.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "kernels/base/row_groups.h"
#include "kernels/sparse/sparse_layout.h"

namespace stockpot {
namespace {

Status CheckShape(int64_t d_out, int64_t d_in) {
  if (d_out < 0 || d_in < 0 || d_out > kMaxSparseDimension || d_in > kMaxSparseDimension) {
    return InvalidArgument("shape " + ShapeName(d_out, d_in) + ", each at most " +
                           std::to_string(kMaxSparseDimension));
  }
  return OkStatus();
}

Status CheckWeight(const WeightMatrix& w) {
  if (!IsWeightDType(w.dtype)) {
    return InvalidArgument("dtype " + std::string(DTypeName(w.dtype)) + " is not F32, F16 or BF16");
  }
  STOCKPOT_RETURN_IF_ERROR(CheckShape(w.rows, w.cols));
  if (w.rows > 1 && w.stride < w.cols) {
    return InvalidArgument("row stride " + std::to_string(w.stride) + " for " +
                           std::to_string(w.cols) + " columns");
  }
  if (w.data == nullptr && w.rows > 0 && w.cols > 0) return InvalidArgument("no data");
  return OkStatus();
}

std::string Place(int64_t row, int64_t column) { return ShapeName(row, column); }

Status CheckOffsets(int64_t d_out, std::span<const int64_t> offsets, int64_t changed) {
  if (static_cast<int64_t>(offsets.size()) != d_out + 1) {
    return InvalidArgument("row_offsets: " + std::to_string(offsets.size()) + " entries, need " +
                           std::to_string(d_out + 1));
  }
  if (offsets[0] != 0) {
    return InvalidArgument("row_offsets: starts with " + std::to_string(offsets[0]) + ", not 0");
  }
  for (int64_t o = 0; o < d_out; ++o) {
    if (offsets[o + 1] < offsets[o]) {
      return InvalidArgument("row_offsets: row " + std::to_string(o) + " ends at " +
                             std::to_string(offsets[o + 1]) + ", before its start " +
                             std::to_string(offsets[o]));
    }
  }
  if (offsets[d_out] != changed) {
    return InvalidArgument("row_offsets: ends with " + std::to_string(offsets[d_out]) + " for " +
                           std::to_string(changed) + " elements");
  }
  return OkStatus();
}

// Elements [begin, end) of row o.
Status CheckRow(int64_t o, int64_t d_in, std::span<const uint32_t> columns,
                std::span<const float> values, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    if (columns[k] >= d_in) {
      return InvalidArgument("columns: row " + std::to_string(o) + " has column " +
                             std::to_string(columns[k]) + " of " + std::to_string(d_in));
    }
    if (k > begin && columns[k] <= columns[k - 1]) {
      return InvalidArgument("columns: row " + std::to_string(o) + " has column " +
                             std::to_string(columns[k]) + " after " +
                             std::to_string(columns[k - 1]));
    }
    if (!std::isfinite(values[k])) {
      return InvalidArgument("values: not finite at " + Place(o, columns[k]));
    }
    if (values[k] == 0) {
      return InvalidArgument("values: 0 at " + Place(o, columns[k]) + " is not a change");
    }
  }
  return OkStatus();
}

Status CheckElements(int64_t d_out, int64_t d_in, std::span<const int64_t> row_offsets,
                     std::span<const uint32_t> columns, std::span<const float> values) {
  const Status shape = CheckShape(d_out, d_in);
  if (!shape.ok()) return shape.WithContext("sparse delta");
  const int64_t changed = static_cast<int64_t>(columns.size());
  if (changed > kMaxSparseChanges) {
    return InvalidArgument("columns: " + std::to_string(changed) + " elements, at most " +
                           std::to_string(kMaxSparseChanges));
  }
  if (values.size() != columns.size()) {
    return InvalidArgument("values: " + std::to_string(values.size()) + " for " +
                           std::to_string(changed) + " columns");
  }
  STOCKPOT_RETURN_IF_ERROR(CheckOffsets(d_out, row_offsets, changed));
  for (int64_t o = 0; o < d_out; ++o) {
    STOCKPOT_RETURN_IF_ERROR(
        CheckRow(o, d_in, columns, values, row_offsets[o], row_offsets[o + 1]));
  }
  return OkStatus();
}

// The rows that have elements, cut into chunks, sorted by length within each.
std::vector<uint32_t> PlanStoredRows(std::span<const int64_t> offsets,
                                     std::vector<uint32_t>& chunks) {
  std::vector<uint32_t> rows;
  int64_t elements = 0;
  const auto length = [&](uint32_t o) { return offsets[o + 1] - offsets[o]; };
  const auto close = [&] {
    std::stable_sort(rows.begin() + chunks.back(), rows.end(),
                     [&](uint32_t a, uint32_t b) { return length(a) < length(b); });
    chunks.push_back(static_cast<uint32_t>(rows.size()));
    elements = 0;
  };
  for (size_t o = 0; o + 1 < offsets.size(); ++o) {
    if (offsets[o + 1] == offsets[o]) continue;
    rows.push_back(static_cast<uint32_t>(o));
    elements += length(rows.back());
    if (elements >= kSparseChunkElements) close();
  }
  if (elements > 0) close();
  return rows;
}

}  // namespace

Result<SparseElements> FindChangedElements(const WeightMatrix& base,
                                           const WeightMatrix& fine_tuned) {
  const Status base_status = CheckWeight(base);
  if (!base_status.ok()) return base_status.WithContext("base");
  const Status tuned_status = CheckWeight(fine_tuned);
  if (!tuned_status.ok()) return tuned_status.WithContext("fine_tuned");
  if (fine_tuned.rows != base.rows || fine_tuned.cols != base.cols) {
    return InvalidArgument("fine_tuned: shape " + ShapeName(fine_tuned.rows, fine_tuned.cols) +
                           ", the base is " + ShapeName(base.rows, base.cols));
  }
  SparseElements found;
  found.row_offsets.push_back(0);
  for (int64_t o = 0; o < base.rows; ++o) {
    for (int64_t i = 0; i < base.cols; ++i) {
      const float from = base.at(o, i);
      const float to = fine_tuned.at(o, i);
      if (!std::isfinite(from)) return InvalidArgument("base: not finite at " + Place(o, i));
      if (!std::isfinite(to)) return InvalidArgument("fine_tuned: not finite at " + Place(o, i));
      if (from == to) continue;
      if (!std::isfinite(to - from)) {
        return InvalidArgument("fine_tuned: too far from the base at " + Place(o, i));
      }
      found.columns.push_back(static_cast<uint32_t>(i));
      found.values.push_back(to - from);
    }
    if (static_cast<int64_t>(found.columns.size()) > kMaxSparseChanges) {
      return ResourceExhausted("fine_tuned: more than " + std::to_string(kMaxSparseChanges) +
                               " elements changed; store it dense");
    }
    found.row_offsets.push_back(static_cast<int64_t>(found.columns.size()));
  }
  return Result<SparseElements>(std::move(found));
}

SparseDelta::SparseDelta(std::unique_ptr<Layout> layout) : layout_(std::move(layout)) {}
SparseDelta::SparseDelta(SparseDelta&&) noexcept = default;
SparseDelta& SparseDelta::operator=(SparseDelta&&) noexcept = default;
SparseDelta::~SparseDelta() = default;

int64_t SparseDelta::d_out() const { return layout_->d_out; }
int64_t SparseDelta::d_in() const { return layout_->d_in; }
int64_t SparseDelta::changed() const { return layout_->changed; }

int64_t SparseDelta::bytes() const {
  const int64_t words = layout_->outputs.capacity() + layout_->starts.capacity() +
                        layout_->wide_columns.capacity() + layout_->values.capacity() +
                        static_cast<int64_t>(layout_->chunks.capacity());
  return words * static_cast<int64_t>(sizeof(uint32_t)) +
         layout_->narrow_columns.capacity() * static_cast<int64_t>(sizeof(uint16_t));
}

SparseElements SparseDelta::Elements() const {
  const uint32_t* starts = layout_->starts.data();
  std::vector<int64_t> stored(static_cast<size_t>(layout_->stored_rows()));
  std::iota(stored.begin(), stored.end(), 0);
  std::sort(stored.begin(), stored.end(), [&](int64_t a, int64_t b) {
    return layout_->outputs.data()[a] < layout_->outputs.data()[b];
  });
  SparseElements elements;
  for (const int64_t i : stored) {
    elements.row_offsets.resize(layout_->outputs.data()[i] + size_t{1},
                                static_cast<int64_t>(elements.columns.size()));
    for (int64_t k = starts[i]; k < starts[i + 1]; ++k) {
      elements.columns.push_back(static_cast<uint32_t>(layout_->column(k)));
      elements.values.push_back(layout_->values.data()[k]);
    }
  }
  elements.row_offsets.resize(static_cast<size_t>(layout_->d_out) + 1,
                              static_cast<int64_t>(elements.columns.size()));
  return elements;
}

Result<SparseDelta> SparseDelta::FromElements(int64_t d_out, int64_t d_in,
                                              std::span<const int64_t> row_offsets,
                                              std::span<const uint32_t> columns,
                                              std::span<const float> values) {
  STOCKPOT_RETURN_IF_ERROR(CheckElements(d_out, d_in, row_offsets, columns, values));
  auto layout = std::make_unique<Layout>();
  layout->d_out = d_out;
  layout->d_in = d_in;
  layout->changed = static_cast<int64_t>(columns.size());
  const std::vector<uint32_t> rows = PlanStoredRows(row_offsets, layout->chunks);
  layout->chunks.shrink_to_fit();
  const int64_t stored_rows = static_cast<int64_t>(rows.size());
  uint32_t* outputs = layout->outputs.Reserve(stored_rows);
  uint32_t* starts = layout->starts.Reserve(stored_rows + 1);
  float* packed_values = layout->values.Reserve(layout->changed);
  uint16_t* narrow = layout->narrow() ? layout->narrow_columns.Reserve(layout->changed) : nullptr;
  uint32_t* wide = layout->narrow() ? nullptr : layout->wide_columns.Reserve(layout->changed);
  uint32_t to = 0;
  for (int64_t i = 0; i < stored_rows; ++i) {
    outputs[i] = rows[i];
    starts[i] = to;
    for (int64_t k = row_offsets[rows[i]]; k < row_offsets[rows[i] + int64_t{1}]; ++k, ++to) {
      packed_values[to] = values[k];
      if (narrow != nullptr) {
        narrow[to] = static_cast<uint16_t>(columns[k]);
      } else {
        wide[to] = columns[k];
      }
    }
  }
  starts[stored_rows] = to;
  return SparseDelta(std::move(layout));
}

Result<SparseDelta> SparseDelta::FromWeights(const WeightMatrix& base,
                                             const WeightMatrix& fine_tuned) {
  STOCKPOT_ASSIGN_OR_RETURN(const SparseElements found, FindChangedElements(base, fine_tuned));
  return FromElements(base.rows, base.cols, found);
}

Status CheckSparseArgs(const SparseDeltaArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckDeltaBatch({.x = args.x,
                                            .delta_of_row = args.delta_of_row,
                                            .delta_count = static_cast<int64_t>(args.deltas.size()),
                                            .y = args.y}));
  for (size_t v = 0; v < args.deltas.size(); ++v) {
    const SparseDelta* delta = args.deltas[v];
    if (delta == nullptr) continue;
    if (delta->d_out() != args.y.cols || delta->d_in() != args.x.cols) {
      return InvalidArgument("deltas[" + std::to_string(v) + "]: shape " +
                             ShapeName(delta->d_out(), delta->d_in()) + ", x and y need " +
                             ShapeName(args.y.cols, args.x.cols));
    }
  }
  return OkStatus();
}

}  // namespace stockpot
