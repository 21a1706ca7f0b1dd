// How a thread walks through its range of outputs: some row blocks of W for all rows of the batch,
// then the 1-bit half of the same blocks. Included once per SIMD target.
#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/bitdelta/linear_plan.h"
#include "kernels/bitdelta/packed_signs.h"

#if defined(STOCKPOT_LINEAR_WALK_TOGGLE) == defined(HWY_TARGET_TOGGLE)
#ifdef STOCKPOT_LINEAR_WALK_TOGGLE
#undef STOCKPOT_LINEAR_WALK_TOGGLE
#else
#define STOCKPOT_LINEAR_WALK_TOGGLE
#endif

#include <hwy/highway.h>

#include "kernels/bitdelta/linear_base-inl.h"
#include "kernels/bitdelta/linear_delta-inl.h"
#include "kernels/bitdelta/linear_panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {

// Row blocks walked at a time: the 1-bit half follows the dense half while both are in the cache.
inline constexpr int64_t kWalkBlocks = 4;

inline OutputPath PathOf(const OutputRange& range) {
  return {.end = range.end * kSignBlockRows,
          .next = range.next < 0 ? -1 : range.next * kSignBlockRows,
          .d_out = range.d_out};
}

// The dense half of row blocks [begin, end) for all rows of the range.
inline void DotBlocks(const OutputRange& range, int64_t begin, int64_t end) {
  const int64_t first = begin * kSignBlockRows;
  const int64_t last = std::min(range.d_out, end * kSignBlockRows);
  const OutputPath path = PathOf(range);
  const std::span<const PlannedRow> rows = range.rows;
  for (size_t i = 0; i < rows.size();) {
    const WeightMatrix& weight = *rows[i].weight;
    size_t j = i;
    while (j < rows.size() && SameProduct(rows[i], rows[j])) ++j;
    const int64_t count = static_cast<int64_t>(j - i);
    if (rows[i].order == XOrder::kColumns) {  // multiplied before the walk
      i = j;
      continue;
    }
    const auto multiply = [&](auto type) {
      using T = decltype(type);
      if (IsTiles(rows[i].order)) {
        PanelRows<T>(weight, rows[i].folded_signs(), &rows[i], count, first, last, path,
                     range.memory);
      } else {
        DotRows<T>(weight, &rows[i], count, first, last, path);
      }
    };
#if STOCKPOT_LINEAR_PAIRS
    if (IsPair(rows[i].order)) {
      multiply(BF16Pair{});
    } else {
      WithWeightType(weight.dtype, multiply);
    }
#else
    WithWeightType(weight.dtype, multiply);
#endif
    i = j;
  }
}

// The words of a plane of `signs` that are read after plane p of row blocks [begin, end).
inline const uint32_t* WordsAfter(const OutputRange& range, size_t next_row,
                                  const PackedSigns::Layout& signs, int64_t p, int64_t begin,
                                  int64_t end) {
  if (p + 1 < signs.planes) return signs.block(p + 1, begin);
  const std::span<const PlannedRow> rows = range.apart;
  if (next_row < rows.size() && rows[next_row].apart_signs() != nullptr) {
    return rows[next_row].apart_signs()->block(0, begin);
  }
  const PackedSigns::Layout* first = rows[0].apart_signs();  // of the next row blocks
  const int64_t then = end < range.end ? end : range.next;
  if (first != nullptr && then >= 0 && then + kWalkBlocks <= first->row_blocks) {
    return first->block(0, then);
  }
  return signs.block(p, begin);
}

// What the 1-bit half of row blocks [begin, end) fetches of the weight: the rows after those that
// the dense half has fetched.
inline WeightAhead AheadOfSigns(const OutputRange& range, int64_t begin, int64_t end) {
  constexpr int64_t kRows = 8;
  if (!range.dense_half) return {};
  const int64_t fetched = range.rows.size() == 1 ? kRows : kDecodePanelRows;
  const int64_t steps = (end - begin) * kSignBlockRows + fetched;
  const int64_t then = PathOf(range).After(begin * kSignBlockRows, steps, kRows);
  if (then < 0) return {};
  return WeightAhead(*range.rows[0].weight, then, then + kRows);
}

// The 1-bit half of row blocks [begin, end).
inline void SignBlocks(const OutputRange& range, int64_t begin, int64_t end) {
  const std::span<const PlannedRow> rows = range.apart;
  WeightAhead ahead = AheadOfSigns(range, begin, end);
  for (size_t i = 0; i < rows.size();) {
    const PackedSigns::Layout* signs = rows[i].apart_signs();
    size_t j = i;
    while (j < rows.size() && rows[j].apart_signs() == signs) ++j;
    for (int64_t p = 0; signs != nullptr && p < signs->planes; ++p) {
      const uint32_t* then = WordsAfter(range, j, *signs, p, begin, end);
      DeltaRows(&rows[i], static_cast<int64_t>(j - i), p, begin, end, then, ahead);
    }
    i = j;
  }
}

inline void AddBias(const OutputRange& range) {
  const int64_t last = std::min(range.d_out, range.end * kSignBlockRows);
  for (const PlannedRow& row : range.rows) {
    if (row.bias == nullptr) continue;
    for (int64_t o = range.begin * kSignBlockRows; o < last; ++o) row.y[o] += row.bias[o];
  }
}

inline void WalkRange(const OutputRange& range) {
  for (int64_t b = range.begin; b < range.end; b += kWalkBlocks) {
    const int64_t end = std::min(b + kWalkBlocks, range.end);
    if (range.dense_half) DotBlocks(range, b, end);
    SignBlocks(range, b, end);
  }
  if (range.with_bias) AddBias(range);
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#endif  // per target
