// The dense half of bitdelta_linear: y[t, o] = sum_i W[o, i] x[t, i]. Included once per SIMD
// target.
//
// Each (t, o) has ONE vector accumulator that walks the columns in a fixed order and is folded in a
// fixed tree at the end; a tile of kRows x kTokens such accumulators stays in registers. So a sum
// does not depend on the tile it was computed in: batch invariance costs nothing.
//
// Tile: at most 4 rows of W x 6 tokens with 32 registers (24 accumulators, 4 weights, 1 x), 4 x 3
// with 16; a single token takes 8 rows, enough independent chains to hide the latency of the FMA.
//
// bf16 is widened two elements at a time: a 32-bit lane holds an even and an odd column, and x is
// copied once a call into the same order (OrderX). That is one shift or one mask a vector, half of
// what a widening load costs.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/bitdelta/linear_plan.h"

#if defined(STOCKPOT_LINEAR_BASE_TOGGLE) == defined(HWY_TARGET_TOGGLE)
#ifdef STOCKPOT_LINEAR_BASE_TOGGLE
#undef STOCKPOT_LINEAR_BASE_TOGGLE
#else
#define STOCKPOT_LINEAR_BASE_TOGGLE
#endif

#include <hwy/highway.h>

#include "kernels/bitdelta/weight_load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;
inline constexpr int kFloatLanes = hn::MaxLanes(FloatTag());
inline constexpr int kStep = 2 * kFloatLanes;  // columns of one step: two vectors of x
inline constexpr int kMaxTokens = HWY_MAX_BYTES >= 64 ? 6 : 3;

// The two vectors of weights that meet the two ordered vectors of x.
template <class T>
HWY_INLINE FloatVec WeightHalf(const T* p, int half) {
  return LoadAsFloat(FloatTag(), p + half * kFloatLanes);
}

HWY_INLINE FloatVec WeightHalf(const BF16* p, int half) {
  const hn::ScalableTag<uint16_t> d16;
  const hn::ScalableTag<uint32_t> d32;
  const auto pairs = hn::BitCast(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  const auto bits =
      half == 0 ? hn::ShiftLeft<16>(pairs) : hn::And(pairs, hn::Set(d32, 0xffff0000u));
  return hn::BitCast(FloatTag(), bits);
}

// Copies x [columns] into the order of WeightHalf, zero-padded to a whole step.
inline void OrderX(const float* x, int64_t columns, bool pairs, float* ordered) {
  const int64_t padded = (columns + kStep - 1) / kStep * kStep;
  if (!pairs) {
    std::memcpy(ordered, x, columns * sizeof(float));
    std::fill(ordered + columns, ordered + padded, 0.0f);
    return;
  }
  for (int64_t c = 0; c < padded; c += kStep) {
    for (int64_t i = 0; i < kFloatLanes; ++i) {
      const int64_t even = c + 2 * i;
      ordered[c + i] = even < columns ? x[even] : 0.0f;
      ordered[c + kFloatLanes + i] = even + 1 < columns ? x[even + 1] : 0.0f;
    }
  }
}

// Adds the 128-bit blocks of v up.
template <class D>
HWY_INLINE auto FoldBlocks(D, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return FoldBlocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// The sums of four accumulators, in four lanes. Every sum is folded in the same tree.
HWY_INLINE auto FoldFour(FloatVec a, FloatVec b, FloatVec c, FloatVec d) {
  const FloatTag f;
  const hn::RepartitionToWide<FloatTag> wide;
  const auto ab =
      hn::BitCast(wide, hn::Add(hn::InterleaveLower(f, a, b), hn::InterleaveUpper(f, a, b)));
  const auto cd =
      hn::BitCast(wide, hn::Add(hn::InterleaveLower(f, c, d), hn::InterleaveUpper(f, c, d)));
  const auto low = hn::BitCast(f, hn::InterleaveLower(wide, ab, cd));
  const auto high = hn::BitCast(f, hn::InterleaveUpper(wide, ab, cd));
  return FoldBlocks(f, hn::Add(low, high));
}

template <class T, int kRows, int kTokens>
struct Tile {
  FloatVec sums[kRows][kTokens];

  HWY_INLINE void Clear() {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) sums[r][t] = hn::Zero(FloatTag());
    }
  }

  // One step of columns: w[r * w_stride] meets x[t][0 .. kStep).
  HWY_INLINE void Step(const T* const (&w)[kRows], const float* const (&x)[kTokens], int64_t c) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      FloatVec weights[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) weights[r] = WeightHalf(w[r] + c, half);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const FloatVec xs = hn::Load(FloatTag(), x[t] + c + half * kFloatLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r][t] = hn::MulAdd(weights[r], xs, sums[r][t]);
      }
    }
  }
};

// y[t, o .. o + kRows) for kTokens rows of the batch.
template <class T, int kRows, int kTokens>
HWY_NOINLINE void DotTile(const T* weight, int64_t stride, int64_t columns, const PlannedRow* rows,
                          int64_t o) {
  const T* w[kRows];
  const float* x[kTokens];
  for (int r = 0; r < kRows; ++r) w[r] = weight + (o + r) * stride;
  for (int t = 0; t < kTokens; ++t) x[t] = rows[t].x;
  Tile<T, kRows, kTokens> tile;
  tile.Clear();
  int64_t c = 0;
  for (; c + kStep <= columns; c += kStep) tile.Step(w, x, c);
  if (c < columns) {  // a weight row must not be read past its end
    T tail[kRows][kStep] = {};
    const T* tail_rows[kRows];
    const float* tail_x[kTokens];
    for (int r = 0; r < kRows; ++r) {
      std::memcpy(tail[r], w[r] + c, (columns - c) * sizeof(T));
      tail_rows[r] = tail[r];
    }
    for (int t = 0; t < kTokens; ++t) tail_x[t] = x[t] + c;
    tile.Step(tail_rows, tail_x, 0);
  }
  const hn::FixedTag<float, 4> four;
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    if constexpr (kRows == 1) {
      const FloatVec sum = tile.sums[0][t];
      rows[t].y[o] = hn::GetLane(FoldFour(sum, sum, sum, sum));
    } else {
#pragma GCC unroll 2
      for (int r = 0; r < kRows; r += 4) {
        hn::StoreU(FoldFour(tile.sums[r][t], tile.sums[r + 1][t], tile.sums[r + 2][t],
                            tile.sums[r + 3][t]),
                   four, rows[t].y + o + r);
      }
    }
  }
}

// All outputs [begin, end) of kTokens rows.
template <class T, int kTokens>
void DotTokens(const T* weight, int64_t stride, int64_t columns, const PlannedRow* rows,
               int64_t begin, int64_t end) {
  int64_t o = begin;
  if constexpr (kTokens == 1) {
    for (; o + 8 <= end; o += 8) DotTile<T, 8, 1>(weight, stride, columns, rows, o);
  }
  for (; o + 4 <= end; o += 4) DotTile<T, 4, kTokens>(weight, stride, columns, rows, o);
  for (; o < end; ++o) DotTile<T, 1, kTokens>(weight, stride, columns, rows, o);
}

// Outputs [begin, end) of `rows`, which all read `weight`. Overwrites y.
template <class T>
void DotRows(const WeightMatrix& weight, const PlannedRow* rows, int64_t count, int64_t begin,
             int64_t end) {
  const T* w = static_cast<const T*>(weight.data);
  while (count > 0) {
    // Tiles of nearly equal height: 14 tokens are 5 + 5 + 4, not 6 + 6 + 2.
    const int64_t tiles = (count + kMaxTokens - 1) / kMaxTokens;
    const int64_t tokens = (count + tiles - 1) / tiles;
    switch (tokens) {
      case 1:
        DotTokens<T, 1>(w, weight.stride, weight.cols, rows, begin, end);
        break;
      case 2:
        DotTokens<T, 2>(w, weight.stride, weight.cols, rows, begin, end);
        break;
      case 3:
        DotTokens<T, 3>(w, weight.stride, weight.cols, rows, begin, end);
        break;
#if HWY_MAX_BYTES >= 64
      case 4:
        DotTokens<T, 4>(w, weight.stride, weight.cols, rows, begin, end);
        break;
      case 5:
        DotTokens<T, 5>(w, weight.stride, weight.cols, rows, begin, end);
        break;
      default:
        DotTokens<T, 6>(w, weight.stride, weight.cols, rows, begin, end);
        break;
#endif
    }
    rows += tokens;
    count -= tokens;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#endif  // per target
