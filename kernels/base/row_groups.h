// Rows of a batch sorted by the delta that they use, so that rows of one delta share its bytes: the
// batch contract of every operation that adds a delta to y (sparse/sparse_delta.h,
// lora/lora_linear.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/base/view.h"

namespace stockpot {

// What every such operation takes beside its deltas.
struct DeltaBatch {
  ConstFloatMatrix x;                     // [rows, d_in]
  std::span<const int32_t> delta_of_row;  // [rows]: index, or -1 = none; empty: none at all
  int64_t delta_count = 0;
  FloatMatrix y;  // [rows, d_out]
};

// InvalidArgument names the field ("x: ...", "y: ...", "delta_of_row: ..."). Allocates only then.
Status CheckDeltaBatch(const DeltaBatch& batch);

// "[rows, cols]"
std::string ShapeName(int64_t rows, int64_t cols);

// Rows order()[begin, end) use the delta.
struct RowGroup {
  int32_t delta = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Keeps its memory between plans: one that fits allocates nothing. Thread promise: none.
class RowGroups {
 public:
  // REQUIRES: CheckDeltaBatch is OK. Rows of -1 belong to no group; within a group rows ascend.
  void Plan(std::span<const int32_t> delta_of_row);

  std::span<const int64_t> order() const { return order_; }
  std::span<const RowGroup> groups() const { return groups_; }

 private:
  std::vector<int64_t> order_;
  std::vector<RowGroup> groups_;
};

}  // namespace stockpot
