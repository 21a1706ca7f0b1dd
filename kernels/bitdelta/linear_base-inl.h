// The dense half of bitdelta_linear: y[t, o] = sum_i W[o, i] x[t, i]. Included once per SIMD
// target.
//
// Each (t, o) has ONE vector accumulator that walks the columns in a fixed order and is folded in a
// fixed tree at the end; a tile of kRows x kTokens such accumulators stays in registers. So a sum
// does not depend on the tile it was computed in: batch invariance costs nothing.
//
// Tile: at most 4 rows of W x 6 tokens with 32 registers (24 accumulators, 4 weights, 1 x), 4 x 3
// with 16; a single token takes 8 rows, enough independent chains to hide the latency of the FMA.
// Where bf16 meets bf16 two rows meet up to 14 tokens: what there is to read counts, not to
// multiply.
//
// Blocks: tokens of a tile over kColumnBlock columns stay in the L1 cache (6 x 1024 floats = 24
// KiB) while the rows of a panel pass; the panel stays in L2 while the tiles of the batch pass.
// Between two column blocks the accumulators wait in memory, whole, so the order of a sum is still
// the same. What the next panel needs is prefetched during this one: memory must not idle while a
// batch computes.
//
// bf16 is widened two elements at a time: a 32-bit lane holds an even and an odd column, and x is
// copied once a call into the same order (OrderX). That is one shift or one mask a vector, half of
// what a widening load costs.
//
// Where x is bf16 as well and the processor has AVX512_BF16, one instruction multiplies two columns
// of each lane: T is BF16Pair then, W and x are read as they lie, the rest is the same.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

inline constexpr int kWideTokens = 14;  // of a tile of two rows, where bf16 meets bf16

// A bf16 weight that meets bf16 x: columns 2i and 2i + 1 of a step share lane i.
struct BF16Pair {
  uint16_t bits;
};
template <class T>
inline constexpr bool kIsPair = std::is_same_v<T, BF16Pair>;
// What x is read as beside a weight of T.
template <class T>
using XOf = std::conditional_t<kIsPair<T>, BF16Pair, float>;

#undef STOCKPOT_LINEAR_PAIRS
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#define STOCKPOT_LINEAR_PAIRS 1
// The SIMD target does not promise AVX512_BF16.
inline bool MultipliesPairs() { return __builtin_cpu_supports("avx512bf16") != 0; }

// sum[i] + w[2i + 1] x[2i + 1] + w[2i] x[2i]. Highway has no name for the instruction yet.
// REQUIRES: MultipliesPairs().
HWY_INLINE FloatVec DotPairs(FloatVec w, FloatVec x, FloatVec sum) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(w.raw), "v"(x.raw));
  return sum;
}
#else
#define STOCKPOT_LINEAR_PAIRS 0
inline bool MultipliesPairs() { return false; }
#endif

// One step of bf16, as bits.
HWY_INLINE FloatVec LoadPairs(const BF16Pair* p) {
  const hn::ScalableTag<uint16_t> d16;
  return hn::BitCast(FloatTag(), hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
}

// Copies x [columns] into the order of WeightHalf, zero-padded to a whole step; its vectors lie
// `step` floats apart.
inline void OrderX(const float* x, int64_t columns, bool split, int64_t step, float* ordered) {
  const FloatTag f;
  int64_t c = 0;
  for (; c + kStep <= columns; c += kStep, ordered += 2 * step) {
    const FloatVec low = hn::LoadU(f, x + c);
    const FloatVec high = hn::LoadU(f, x + c + kFloatLanes);
    hn::Store(split ? hn::ConcatEven(f, high, low) : low, f, ordered);
    hn::Store(split ? hn::ConcatOdd(f, high, low) : high, f, ordered + step);
  }
  if (c == columns) return;
  float tail[kStep] = {};
  std::memcpy(tail, x + c, (columns - c) * sizeof(float));
  OrderX(tail, kStep, split, step, ordered);
}

// The same for bf16 x that meets bf16 weights: two columns a lane.
inline void OrderPairs(const BF16Pair* x, int64_t columns, int64_t step, float* ordered) {
  int64_t c = 0;
  for (; c + kStep <= columns; c += kStep, ordered += step) {
    hn::Store(LoadPairs(x + c), FloatTag(), ordered);
  }
  if (c == columns) return;
  BF16Pair tail[kStep] = {};
  std::memcpy(tail, x + c, (columns - c) * sizeof(BF16Pair));
  OrderPairs(tail, kStep, step, ordered);
}

// sum + w x, lane by lane, for a vector of either kind.
template <class T>
HWY_INLINE FloatVec Accumulate(FloatVec w, FloatVec x, FloatVec sum) {
#if STOCKPOT_LINEAR_PAIRS
  if constexpr (kIsPair<T>) return DotPairs(w, x, sum);
#endif
  return hn::MulAdd(w, x, sum);
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

// What one tile works on.
template <class T>
struct TileArgs {
  const T* weight = nullptr;  // row o of W
  int64_t stride = 0;         // of W
  int64_t begin = 0;          // columns [begin, end)
  int64_t end = 0;
  int64_t ahead = 0;  // elements from a weight to the one to prefetch with it; 0: none
  const PlannedRow* rows = nullptr;
  int64_t o = 0;             // the first output
  int64_t height = 0;        // outputs that exist, 1 .. kRows
  float* partial = nullptr;  // the accumulators between column blocks
  bool first = true;         // column block
  bool last = true;
};

template <class T, int kRows, int kTokens>
struct Tile {
  FloatVec sums[kRows][kTokens];

  // One step of columns: w[r][c ...] meets x[t][c ...].
  HWY_INLINE void Step(const T* const (&w)[kRows], const XOf<T>* const (&x)[kTokens], int64_t c,
                       int64_t ahead) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(w[r] + c + ahead, 0, 2);  // into L2
    if constexpr (kIsPair<T>) {
      MultiplyPairs(w, x, c);
    } else {
      Multiply(w, x, c);
    }
  }

  HWY_INLINE void MultiplyPairs(const BF16Pair* const (&w)[kRows],
                                const BF16Pair* const (&x)[kTokens], int64_t c) {
    FloatVec weights[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) weights[r] = LoadPairs(w[r] + c);
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const FloatVec xs = LoadPairs(x[t] + c);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sums[r][t] = Accumulate<T>(weights[r], xs, sums[r][t]);
    }
  }

  HWY_INLINE void Multiply(const T* const (&w)[kRows], const float* const (&x)[kTokens],
                           int64_t c) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      FloatVec weights[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) weights[r] = WeightHalf(w[r] + c, half);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) {
        const FloatVec xs = hn::Load(FloatTag(), x[t] + c + half * kFloatLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) sums[r][t] = hn::MulAdd(weights[r], xs, sums[r][t]);
      }
    }
  }

  HWY_INLINE void Clear() {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) sums[r][t] = hn::Zero(FloatTag());
    }
  }

  HWY_INLINE void Load(const float* partial) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) {
        sums[r][t] = hn::Load(FloatTag(), partial + (r * kTokens + t) * kFloatLanes);
      }
    }
  }

  HWY_INLINE void Save(float* partial) const {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) {
        hn::Store(sums[r][t], FloatTag(), partial + (r * kTokens + t) * kFloatLanes);
      }
    }
  }

  // Folds every accumulator into its y[t, o + r], r < height.
  HWY_INLINE void Finish(const TileArgs<T>& args) const {
    const hn::FixedTag<float, 4> four;
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      HWY_ALIGN float outputs[kRows < 4 ? 4 : kRows];
      if constexpr (kRows == 2) {
        const FloatVec none = hn::Zero(FloatTag());
        hn::Store(FoldFour(sums[0][t], sums[1][t], none, none), four, outputs);
      } else {
#pragma GCC unroll 2
        for (int r = 0; r < kRows; r += 4) {
          hn::Store(FoldFour(sums[r][t], sums[r + 1][t], sums[r + 2][t], sums[r + 3][t]), four,
                    outputs + r);
        }
      }
      float* y = args.rows[t].y + args.o;
      if (args.height == kRows) {
        std::memcpy(y, outputs, kRows * sizeof(float));
      } else {
        std::memcpy(y, outputs, static_cast<size_t>(args.height) * sizeof(float));
      }
    }
  }
};

// y[t, o .. o + height) for kTokens rows of the batch, or a column block's share of it. Rows past
// the height repeat the last one and are dropped.
template <class T, int kRows, int kTokens>
HWY_NOINLINE void DotTile(const TileArgs<T>& args) {
  const T* w[kRows];
  const XOf<T>* x[kTokens];
  for (int r = 0; r < kRows; ++r) {
    w[r] = args.weight + std::min<int64_t>(r, args.height - 1) * args.stride;
  }
  for (int t = 0; t < kTokens; ++t) x[t] = static_cast<const XOf<T>*>(args.rows[t].x);
  Tile<T, kRows, kTokens> tile;
  if (args.first) {
    tile.Clear();
  } else {
    tile.Load(args.partial);
  }
  const int64_t ahead = args.ahead;
  int64_t c = args.begin;
  for (; c + kStep <= args.end; c += kStep) tile.Step(w, x, c, ahead);
  if (c < args.end) {  // a weight row must not be read past its end
    T tail[kRows][kStep] = {};
    const T* tail_rows[kRows];
    const XOf<T>* tail_x[kTokens];
    for (int r = 0; r < kRows; ++r) {
      std::memcpy(tail[r], w[r] + c, (args.end - c) * sizeof(T));
      tail_rows[r] = tail[r];
    }
    for (int t = 0; t < kTokens; ++t) tail_x[t] = x[t] + c;
    tile.Step(tail_rows, tail_x, 0, 0);
  }
  if (args.last) {
    tile.Finish(args);
  } else {
    tile.Save(args.partial);
  }
}

template <class T>
inline constexpr int64_t kColumnBlock = kIsPair<T> ? 2048 : 1024;  // a multiple of every kStep
inline constexpr int64_t kWideBlock = 512;    // the same for a tile of kWideTokens
inline constexpr int64_t kMaxPanelRows = 64;  // rows of W
inline constexpr int64_t kDecodePanelRows = 16;

// A panel: rows [begin, end) of W, at most kMaxPanelRows.
struct Panel {
  int64_t begin = 0;
  int64_t end = 0;
  OutputPath path;
  int64_t pass = 0;  // this tile of tokens is the pass-th of `passes` over the panel
  int64_t passes = 1;
};

// The tile of `kTokens` rows over a panel.
template <class T, int kTokens>
void DotPanel(const WeightMatrix& weight, const PlannedRow* rows, const Panel& panel) {
  HWY_ALIGN float partial[(kMaxPanelRows + 3) * kTokens * kFloatLanes];  // whole tiles
  const T* w = static_cast<const T*>(weight.data);
  const int64_t panel_rows = panel.end - panel.begin;
  int64_t begin = 0;
  do {
    constexpr bool kWide = kTokens > kMaxTokens;
    constexpr int64_t kBlock = kWide ? kWideBlock : kColumnBlock<T>;
    const int64_t end = kTokens == 1 ? weight.cols : std::min(begin + kBlock, weight.cols);
    TileArgs<T> args{.stride = weight.stride,
                     .begin = begin,
                     .end = end,
                     .rows = rows,
                     .first = begin == 0,
                     .last = end == weight.cols};
    for (int64_t o = panel.begin; o < panel.end; o += args.height) {
      const bool tall = kTokens == 1 && o + 8 <= panel.end;
      constexpr int kRows = kWide ? 2 : 4;
      args.height = tall ? 8 : std::min<int64_t>(kRows, panel.end - o);
      args.weight = w + o * weight.stride;
      args.o = o;
      args.partial = partial + (o - panel.begin) * kTokens * kFloatLanes;
      // The passes share the prefetch of the next panel; a single pass looks one tile ahead.
      const int64_t look = panel.passes > 1 || kWide ? panel_rows : args.height;
      const bool mine = (o / args.height) % panel.passes == panel.pass;
      const int64_t then = mine ? panel.path.After(o, look, args.height) : -1;
      args.ahead = then < 0 ? 0 : (then - o) * weight.stride;
      if (tall) {
        DotTile<T, kTokens == 1 ? 8 : kRows, kTokens>(args);
      } else {
        DotTile<T, kRows, kTokens>(args);
      }
    }
    begin = end;
  } while (begin < weight.cols);
}

// DotPanel for a number of tokens known when it runs, at most kMost.
template <class T, int kMost = kIsPair<T> ? kWideTokens : kMaxTokens>
void AnyDotPanel(int64_t tokens, const WeightMatrix& weight, const PlannedRow* rows,
                 const Panel& panel) {
  if constexpr (kMost > 1) {
    if (tokens < kMost) return AnyDotPanel<T, kMost - 1>(tokens, weight, rows, panel);
  }
  DotPanel<T, kMost>(weight, rows, panel);
}

// Outputs [begin, end) of `rows`, which all read `weight`. Overwrites y.
template <class T>
void DotRows(const WeightMatrix& weight, const PlannedRow* rows, int64_t count, int64_t begin,
             int64_t end, const OutputPath& path) {
  // Tiles of nearly equal height: 14 tokens are 5 + 5 + 4, not 6 + 6 + 2.
  const int64_t most = kIsPair<T> && count > kMaxTokens ? kWideTokens : kMaxTokens;
  const int64_t tiles = (count + most - 1) / most;
  const int64_t panel_rows = tiles > 4 ? kMaxPanelRows : kDecodePanelRows;
  for (int64_t o = begin; o < end; o += panel_rows) {
    Panel panel{.begin = o, .end = std::min(o + panel_rows, end), .path = path, .passes = tiles};
    for (int64_t t = 0; t < count; ++panel.pass) {
      const int64_t tokens = (count - t + tiles - panel.pass - 1) / (tiles - panel.pass);
      AnyDotPanel<T>(tokens, weight, rows + t, panel);
      t += tokens;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#endif  // per target
