// What one call of the CPU kernel works on: made by linear_cpu.cc, read by the per-target code.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/base/view.h"
#include "kernels/bitdelta/linear.h"

namespace stockpot {

inline int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// How a row of x lies in memory for a weight. Split: for a bf16 weight, even and odd columns apart
// (WeightHalf). Pair: bf16 as it is. Tiles: the rows of a tile beside each other, vector by vector,
// for panels (linear_panel-inl.h). Columns: bf16, the rows of a variant beside each other, pair by
// pair (linear_columns.h).
enum class XOrder : uint8_t {
  kRows,
  kSplitRows,
  kPairRows,
  kTiles,
  kSplitTiles,
  kPairTiles,
  kColumns,  // not a copy of one row, as the others are
};
inline constexpr int kXOrders = 6;  // without kColumns
constexpr bool IsTiles(XOrder order) {
  return order >= XOrder::kTiles && order <= XOrder::kPairTiles;
}
constexpr bool IsSplit(XOrder order) {
  return order == XOrder::kSplitRows || order == XOrder::kSplitTiles;
}
constexpr bool IsPair(XOrder order) {
  return order == XOrder::kPairRows || order == XOrder::kPairTiles;
}

// The SIMD target's share of it.
struct XLayout {
  int64_t tile_rows = 0;
  int64_t vector_floats = 0;
  int64_t panel_tokens = 0;  // from here on panels are faster
};

// One row of the batch for one weight, in the order in which the kernel walks them: rows that read
// one weight stand together, and among them rows of one variant.
struct PlannedRow {
  const void* x = nullptr;  // copy in `order`, zero-padded
  XOrder order = XOrder::kRows;
  int64_t place = 0;                     // in the pass; tiles begin at multiples of tile_rows
  const float* table = nullptr;          // sums of groups of four (linear_delta-inl.h), or null
  float* y = nullptr;                    // [d_out]
  const float* bias = nullptr;           // [d_out] or null
  const WeightMatrix* weight = nullptr;  // the base, or the variant's dense weight
  const PackedSigns::Layout* signs = nullptr;
  bool folded = false;  // the signs are folded into the weight (DeltaSum)

  const PackedSigns::Layout* folded_signs() const { return folded ? signs : nullptr; }
  const PackedSigns::Layout* apart_signs() const { return folded ? nullptr : signs; }
};

// Whether two rows meet the same matrix in the dense half.
inline bool SameProduct(const PlannedRow& a, const PlannedRow& b) {
  return a.weight == b.weight && a.folded_signs() == b.folded_signs();
}

// Consecutive rows [begin, end) of the plan.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// Where a thread goes in a weight: through the outputs up to `end`, then on from `next`. What lies
// there is fetched in time.
struct OutputPath {
  int64_t end = 0;
  int64_t next = -1;  // -1: nowhere that is known
  int64_t d_out = 0;

  // The output that comes `steps` after o, if `count` outputs from it on exist; else -1.
  int64_t After(int64_t o, int64_t steps, int64_t count) const {
    int64_t then = o + steps;
    if (then >= end) then = next < 0 ? d_out : next + (then - end);
    return then + count <= d_out ? then : -1;
  }
};

// Lines of a weight that will be read soon: what computes fetches them into the L2 cache meanwhile,
// so that memory does not idle. An empty one fetches nothing.
class WeightAhead {
 public:
  WeightAhead() = default;
  // Rows [begin, end) of `weight`.
  WeightAhead(const WeightMatrix& weight, int64_t begin, int64_t end)
      : row_(static_cast<const char*>(weight.row(begin))),
        stride_(weight.stride * DTypeSize(weight.dtype)),
        row_bytes_(weight.cols * DTypeSize(weight.dtype)),
        rows_(end - begin) {}

  int64_t lines() const { return rows_ <= 0 ? 0 : rows_ * (row_bytes_ / kLineBytes + 1); }

  // The next `lines` lines, fewer where they end.
  void Fetch(int64_t lines) {
    for (; lines > 0 && rows_ > 0; --lines) {
      __builtin_prefetch(row_ + offset_, 0, 2);
      offset_ += kLineBytes;
      if (offset_ < row_bytes_) continue;
      offset_ = 0;
      row_ += stride_;
      --rows_;
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  const char* row_ = nullptr;
  int64_t stride_ = 0;
  int64_t row_bytes_ = 0;
  int64_t rows_ = 0;
  int64_t offset_ = 0;
};

// Working memory of one thread for panels (linear_panel-inl.h).
struct PanelMemory {
  float* panel = nullptr;     // PanelFloats(d_in)
  float* partials = nullptr;  // PartialFloats(d_in, tokens)
};

// What a thread does at a time: row blocks [begin, end) of one weight.
struct OutputRange {
  std::span<const PlannedRow> rows;   // of the pass
  std::span<const PlannedRow> apart;  // those whose signs are added now, sorted by variant
  bool dense_half = true;             // false: it is done, another group of tokens follows
  bool with_bias = true;              // after the last group
  int64_t d_out = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t next = -1;  // row block where this thread goes on in the same weight; -1: unknown
  PanelMemory memory;
};

}  // namespace stockpot
