// The dense half of bitdelta_linear for many tokens, and for rows whose delta is folded into the
// weight: 16 rows of W (a panel) are widened to float32 once, in the cache, and meet all tokens.
// Included once per SIMD target.
//
//   panel = W[o .. o + 16) + sum_p alpha_p * S_p[o .. o + 16)
//   y[t, o] = sum_i panel[o, i] x[t, i]
//
// The sum of a (t, o) is the one of linear_base-inl.h: one vector accumulator that walks the
// columns in the same order and is folded in the same tree. So a base-only row has the same bits
// here and there, and which of the two runs is a matter of speed alone.
//
// Blocking, for an L1 of 32 KiB and an L2 of 512 KiB:
//   slab     4096 columns of the 16 rows: 256 KiB of float32 in L2, as [4 tiles][vector][4 rows],
//            so that a tile reads one stream;
//   tokens   kBlockTiles tiles over kPanelColumns columns of x, 12 to 24 KiB in L1, while the rows
//            of the panel pass. The stride of x is odd in half pages: its rows share the sets;
//   tile     4 rows x 3 tokens (6 with 32 registers) of accumulators in registers.
// Accumulators wait in memory between two column blocks: in L1 within a slab, for all tokens
// between slabs. Meanwhile the next panel comes from memory into L2 (WeightAhead).
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/bitdelta/linear_plan.h"
#include "kernels/bitdelta/packed_signs.h"

#if defined(STOCKPOT_LINEAR_PANEL_TOGGLE) == defined(HWY_TARGET_TOGGLE)
#ifdef STOCKPOT_LINEAR_PANEL_TOGGLE
#undef STOCKPOT_LINEAR_PANEL_TOGGLE
#else
#define STOCKPOT_LINEAR_PANEL_TOGGLE
#endif

#include <hwy/highway.h>

#include "kernels/bitdelta/linear_base-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int64_t kTileRows = 4;
inline constexpr int64_t kPanelRows = kSignBlockRows;
inline constexpr int64_t kPanelTiles = kPanelRows / kTileRows;
inline constexpr int64_t kSlabColumns = 4096;
inline constexpr int64_t kPanelColumns = 512;  // of a column block; divides kSlabColumns
inline constexpr int64_t kBlockTiles = 2;
inline constexpr int64_t kTileFloats = kTileRows * kMaxTokens * kFloatLanes;  // accumulators

inline int64_t RoundUpTo(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Floats of working memory for weights of d_in columns and at most `tokens` rows of the batch.
inline int64_t PanelFloats(int64_t d_in) {
  return kPanelRows * std::min(RoundUpTo(d_in, kStep), kSlabColumns);
}
inline int64_t PartialFloats(int64_t d_in, int64_t tokens) {
  const int64_t tiles = d_in <= kSlabColumns ? kBlockTiles : (tokens + kMaxTokens - 1) / kMaxTokens;
  return (tiles + kBlockTiles) * kPanelTiles * kTileFloats;
}

// Where column c0 + lane of a step's half lies in a word of 32 columns: the shift that brings its
// bit to the sign position. bf16 is widened in pairs (OrderX).
template <class T>
HWY_INLINE hn::Vec<hn::ScalableTag<uint32_t>> SignShifts(int64_t vector_of_word) {
  const hn::ScalableTag<uint32_t> d32;
  const auto lane = hn::Iota(d32, 0);
  const int64_t step = vector_of_word / 2 * kStep;
  const int64_t half = vector_of_word % 2;
  const bool pairs = sizeof(T) == sizeof(BF16) && std::is_same_v<T, BF16>;
  const auto column = pairs ? hn::Add(hn::Add(lane, lane), hn::Set(d32, step + half))
                            : hn::Add(lane, hn::Set(d32, step + half * kFloatLanes));
  return hn::Sub(hn::Set(d32, 31), column);
}

// tile[.][r] += alpha * sign for one row of a plane; `words` every 16th, for `columns` columns.
template <class T>
void FoldRow(const uint32_t* words, float alpha, int64_t columns, float* tile) {
  const FloatTag f;
  const hn::ScalableTag<uint32_t> d32;
  constexpr int kVectors = kSignWordColumns / kFloatLanes;  // of a word
  hn::Vec<hn::ScalableTag<uint32_t>> shifts[kVectors];
  for (int v = 0; v < kVectors; ++v) shifts[v] = SignShifts<T>(v);
  const auto scale = hn::Set(f, alpha);
  const auto sign = hn::Set(d32, 0x80000000u);
  for (int64_t c = 0; c < columns; c += kSignWordColumns) {
    const auto minus = hn::Set(d32, ~FoldSignGroups(words[c / kSignWordColumns * kSignBlockRows]));
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if (c + v / 2 * kStep >= columns) break;  // the slab ends within the word
      float* p = tile + (c / kFloatLanes + v) * kTileRows * kFloatLanes;
      const auto flip = hn::BitCast(f, hn::And(hn::Shl(minus, shifts[v]), sign));
      hn::Store(hn::Add(hn::Load(f, p), hn::Xor(scale, flip)), f, p);
    }
  }
}

// Columns [c0, c0 + columns) of one row of W to tile[vector][r = 0]; zeros past the end.
template <class T>
void WidenRow(const T* w, int64_t columns, float* tile) {
  const FloatTag f;
  int64_t c = 0;
  for (; c + kStep <= columns; c += kStep) {
    float* p = tile + c * kTileRows;
    hn::Store(WeightHalf(w + c, 0), f, p);
    hn::Store(WeightHalf(w + c, 1), f, p + kTileRows * kFloatLanes);
  }
  if (c == columns) return;
  T tail[kStep] = {};
  std::memcpy(tail, w + c, (columns - c) * sizeof(T));
  WidenRow(tail, kStep, tile + c * kTileRows);
}

// Rows [o, o + 16) of W, columns [c0, c0 + columns), with the signs folded in where there are some.
template <class T>
void PackPanel(const WeightMatrix& weight, const PackedSigns::Layout* signs, int64_t o, int64_t c0,
               int64_t columns, float* panel) {
  const int64_t padded = RoundUpTo(columns, kStep);
  for (int64_t r = 0; r < kPanelRows; ++r) {
    float* tile = panel + r / kTileRows * kTileRows * padded + r % kTileRows * kFloatLanes;
    if (o + r >= weight.rows) {
      for (int64_t c = 0; c < padded; c += kFloatLanes) {
        hn::Store(hn::Zero(FloatTag()), FloatTag(), tile + c * kTileRows);
      }
      continue;
    }
    WidenRow(static_cast<const T*>(weight.data) + (o + r) * weight.stride + c0, columns, tile);
    for (int64_t p = 0; signs != nullptr && p < signs->planes; ++p) {
      const uint32_t* block = signs->block(p, o / kSignBlockRows);
      FoldRow<T>(block + c0 / kSignWordColumns * kSignBlockRows + r, signs->scales(p)[o + r],
                 padded, tile);
    }
  }
}

// 4 rows x kTokens tokens over `vectors` vectors of columns.
template <int kTokens>
HWY_NOINLINE void PanelTile(const float* HWY_RESTRICT w, const float* const* rows_x,
                            int64_t vectors, float* HWY_RESTRICT partial, bool first) {
  const FloatTag f;
  const float* HWY_RESTRICT x[kTokens];
  for (int t = 0; t < kTokens; ++t) x[t] = rows_x[t];
  FloatVec sums[kTileRows][kTokens];
#pragma GCC unroll 4
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      sums[r][t] = first ? hn::Zero(f) : hn::Load(f, partial + (r * kTokens + t) * kFloatLanes);
    }
  }
  for (int64_t v = 0; v < vectors; ++v) {
    FloatVec xs[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) xs[t] = hn::Load(f, x[t] + v * kFloatLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r) {
      const FloatVec weights = hn::Load(f, w + (v * kTileRows + r) * kFloatLanes);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) sums[r][t] = hn::MulAdd(weights, xs[t], sums[r][t]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      hn::Store(sums[r][t], f, partial + (r * kTokens + t) * kFloatLanes);
    }
  }
}

// Folds the accumulators of a tile into y[t, o + r], r < height.
inline void FinishTile(const float* partial, int tokens, const PlannedRow* rows, int64_t o,
                       int64_t height) {
  const FloatTag f;
  const hn::FixedTag<float, 4> four;
  const auto sum = [&](int r, int t) {
    return hn::Load(f, partial + (r * tokens + t) * kFloatLanes);
  };
  for (int t = 0; t < tokens; ++t) {
    HWY_ALIGN float outputs[kTileRows];
    hn::Store(FoldFour(sum(0, t), sum(1, t), sum(2, t), sum(3, t)), four, outputs);
    std::memcpy(rows[t].y + o, outputs, static_cast<size_t>(height) * sizeof(float));
  }
}

HWY_INLINE void AnyPanelTile(int tokens, const float* w, const float* const* x, int64_t vectors,
                             float* partial, bool first) {
  switch (tokens) {
    case 1:
      return PanelTile<1>(w, x, vectors, partial, first);
    case 2:
      return PanelTile<2>(w, x, vectors, partial, first);
    case 3:
      return PanelTile<3>(w, x, vectors, partial, first);
#if HWY_MAX_BYTES >= 64
    case 4:
      return PanelTile<4>(w, x, vectors, partial, first);
    case 5:
      return PanelTile<5>(w, x, vectors, partial, first);
    default:
      return PanelTile<6>(w, x, vectors, partial, first);
#endif
  }
}

// A packed slab of a panel.
struct Slab {
  const float* panel = nullptr;
  int64_t o = 0;       // the panel's first output
  int64_t height = 0;  // outputs that exist, 1 .. 16
  int64_t c0 = 0;      // the slab's first column
  int64_t padded = 0;  // columns, whole steps
  bool first = true;   // of the row's slabs
  bool last = true;
};

// Tiles [tile, tile_end) of the tokens over one slab. `partials`: of the first of them.
inline void SlabBlock(const Slab& slab, const PlannedRow* rows, int64_t count, int64_t tiles,
                      int64_t tile, int64_t tile_end, float* partials, WeightAhead& ahead,
                      int64_t lines) {
  const auto begin_of = [&](int64_t i) { return i * count / tiles; };  // nearly equal tiles
  for (int64_t c = 0; c < slab.padded; c += kPanelColumns) {
    const int64_t columns = std::min(kPanelColumns, slab.padded - c);
    const bool last = slab.last && c + columns == slab.padded;
    for (int64_t r = 0; r * kTileRows < slab.height; ++r) {
      const float* w = slab.panel + (r * slab.padded + c) * kTileRows;
      float* partial = partials + r * kTileFloats;
      for (int64_t i = tile; i < tile_end; ++i, partial += kPanelTiles * kTileFloats) {
        const int64_t begin = begin_of(i);
        const int tokens = static_cast<int>(begin_of(i + 1) - begin);
        const float* x[kMaxTokens];
        for (int t = 0; t < tokens; ++t) x[t] = rows[begin + t].x + slab.c0 + c;
        ahead.Fetch(lines);
        AnyPanelTile(tokens, w, x, columns / kFloatLanes, partial, slab.first && c == 0);
        if (!last) continue;
        FinishTile(partial, tokens, rows + begin, slab.o + r * kTileRows,
                   std::min(kTileRows, slab.height - r * kTileRows));
      }
    }
  }
}

// Outputs [begin, end) of `rows`, which all read `weight` with the same signs folded in (or none).
// `begin` is a multiple of 16. Overwrites y. `range_end` as in DotRows.
template <class T>
void PanelRows(const WeightMatrix& weight, const PackedSigns::Layout* signs, const PlannedRow* rows,
               int64_t count, int64_t begin, int64_t end, int64_t range_end,
               const PanelMemory& memory) {
  const int64_t tiles = (count + kMaxTokens - 1) / kMaxTokens;
  const bool one_slab = weight.cols <= kSlabColumns;
  const int64_t calls = tiles * kPanelTiles * ((weight.cols + kPanelColumns - 1) / kPanelColumns);
  for (int64_t o = begin; o < end; o += kPanelRows) {
    const int64_t next = o + kPanelRows;
    WeightAhead ahead;  // the next panel
    if (next < range_end) {
      ahead = WeightAhead(weight, next, std::min(next + kPanelRows, range_end));
    }
    const int64_t lines = (ahead.lines() + calls - 1) / calls;
    int64_t c0 = 0;
    do {
      const int64_t columns = std::min(kSlabColumns, weight.cols - c0);
      PackPanel<T>(weight, signs, o, c0, columns, memory.panel);
      const Slab slab{.panel = memory.panel,
                      .o = o,
                      .height = std::min(kPanelRows, end - o),
                      .c0 = c0,
                      .padded = RoundUpTo(columns, kStep),
                      .first = c0 == 0,
                      .last = c0 + columns == weight.cols};
      for (int64_t tile = 0; tile < tiles; tile += kBlockTiles) {
        float* partials = memory.partials + (one_slab ? 0 : tile * kPanelTiles * kTileFloats);
        SlabBlock(slab, rows, count, tiles, tile, std::min(tile + kBlockTiles, tiles), partials,
                  ahead, lines);
      }
      c0 += columns;
    } while (c0 < weight.cols);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#endif  // per target
