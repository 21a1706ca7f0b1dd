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
// Blocking, for an L1 of 32 KiB (48 with 32 registers) and an L2 of 512 KiB:
//   slab     4096 columns of the 16 rows: 256 KiB of float32 in L2, as [4 tiles][vector][4 rows];
//   tokens   two tiles over 256 columns of x, 6 to 12 KiB in L1, while the rows of the panel pass,
//            as [tile][vector][token];
//   tile     4 rows x 3 tokens (6 with 32 registers) of accumulators in registers. It reads two
//            streams from L1 and fetches there, from L2, what the next tiles read.
// Where bf16 meets bf16 a vector holds a step of columns in place of half of one: 8192 columns.
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

// Making a panel costs about what 20 and 6 tokens take.
inline constexpr int64_t kLeastPanelTokens = HWY_MAX_BYTES >= 64 ? 36 : 12;
inline constexpr int64_t kTileRows = 4;
inline constexpr int64_t kPanelRows = kSignBlockRows;
inline constexpr int64_t kPanelTiles = kPanelRows / kTileRows;
inline constexpr int64_t kSlabVectors = 4096 / kFloatLanes;
inline constexpr int kTilesTogether = 2;
inline constexpr int64_t kBlockVectors = 256 / kFloatLanes;  // of a column block; divides the slab
// Columns of a vector.
template <class T>
inline constexpr int64_t kVectorColumns = kIsPair<T> ? kStep : kFloatLanes;
inline constexpr int64_t kTileFloats = kTileRows * kMaxTokens * kFloatLanes;  // accumulators
inline constexpr int64_t kPanelFloats = kPanelTiles * kTileFloats;

// Vectors of a row of a slab of `columns` columns: whole steps.
template <class T>
int64_t SlabVectorsOf(int64_t columns) {
  return RoundUp(columns, kStep) / kVectorColumns<T>;
}

// Floats of working memory for weights of d_in columns and at most `tokens` rows of the batch.
inline int64_t PanelFloats(int64_t d_in) {
  return kPanelRows * std::min(RoundUp(d_in, kStep), kSlabVectors * kFloatLanes);
}
inline int64_t PartialFloats(int64_t d_in, int64_t tokens) {
  const bool one_slab = d_in <= kSlabVectors * kFloatLanes;
  const int64_t tiles = one_slab ? kTilesTogether : (tokens + kMaxTokens - 1) / kMaxTokens + 1;
  return tiles * kPanelFloats;
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

// Columns [c0, c0 + columns) of one row of W to tile[vector][r = 0]; zeros past the end.
template <class T>
void WidenRow(const T* w, int64_t columns, float* tile) {
  const FloatTag f;
  int64_t c = 0;
  for (; c + kStep <= columns; c += kStep) {
    float* p = tile + c / kVectorColumns<T> * kTileRows * kFloatLanes;
    if constexpr (kIsPair<T>) {
      hn::Store(LoadPairs(w + c), f, p);
    } else {
      hn::Store(WeightHalf(w + c, 0), f, p);
      hn::Store(WeightHalf(w + c, 1), f, p + kTileRows * kFloatLanes);
    }
  }
  if (c == columns) return;
  T tail[kStep] = {};
  std::memcpy(tail, w + c, (columns - c) * sizeof(T));
  WidenRow(tail, kStep, tile + c / kVectorColumns<T> * kTileRows * kFloatLanes);
}

// A row of a plane: its words, every 16th, and its scale.
struct SignRow {
  const uint32_t* words = nullptr;
  float alpha = 0;
};

// For every vector of columns [begin, end) of a row, whole steps of a slab: its float of tile, its
// place in the row, +-alpha. `begin` is a multiple of a word.
template <class T, class Add>
HWY_INLINE void ForSigns(const SignRow& row, int64_t begin, int64_t end, float* tile,
                         const Add& add) {
  const FloatTag f;
  const hn::ScalableTag<uint32_t> d32;
  constexpr int kVectors = kSignWordColumns / kFloatLanes;  // of a word
  hn::Vec<hn::ScalableTag<uint32_t>> shifts[kVectors];
  for (int v = 0; v < kVectors; ++v) shifts[v] = SignShifts<T>(v);
  const auto scale = hn::Set(f, row.alpha);
  const auto sign = hn::Set(d32, 0x80000000u);
  for (int64_t c = begin; c < end; c += kSignWordColumns) {
    const auto minus =
        hn::Set(d32, ~FoldSignGroups(row.words[c / kSignWordColumns * kSignBlockRows]));
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if (c + v / 2 * kStep >= end) break;  // the slab ends within the word
      const auto flip = hn::BitCast(f, hn::And(hn::Shl(minus, shifts[v]), sign));
      add(tile + (c / kFloatLanes + v) * kTileRows * kFloatLanes, c + v / 2 * kStep, v % 2,
          hn::Xor(scale, flip));
    }
  }
}

// tile[.][r] += alpha * sign.
template <class T>
void FoldRow(const SignRow& row, int64_t begin, int64_t end, float* tile) {
  ForSigns<T>(row, begin, end, tile, [](float* p, int64_t, int, FloatVec delta) {
    hn::Store(hn::Add(hn::Load(FloatTag(), p), delta), FloatTag(), p);
  });
}

// WidenRow, then FoldRow of the first plane, in one pass over what both have whole.
template <class T>
void WidenAndFoldRow(const T* w, int64_t columns, const SignRow& row, float* tile) {
  const int64_t whole = columns / kSignWordColumns * kSignWordColumns;
  ForSigns<T>(row, 0, whole, tile, [w](float* p, int64_t c, int half, FloatVec delta) {
    hn::Store(hn::Add(WeightHalf(w + c, half), delta), FloatTag(), p);
  });
  if (whole == columns) return;
  WidenRow(w + whole, columns - whole, tile + whole / kFloatLanes * kTileRows * kFloatLanes);
  FoldRow<T>(row, whole, RoundUp(columns, kStep), tile);
}

// Rows [o, o + 16) of W, columns [c0, c0 + columns), with the signs folded in where there are some.
template <class T>
void PackPanel(const WeightMatrix& weight, const PackedSigns::Layout* signs, int64_t o, int64_t c0,
               int64_t columns, float* panel) {
  const int64_t vectors = SlabVectorsOf<T>(columns);
  for (int64_t r = 0; r < kPanelRows; ++r) {
    float* tile = panel + (r / kTileRows * kTileRows * vectors + r % kTileRows) * kFloatLanes;
    if (o + r >= weight.rows) {
      for (int64_t v = 0; v < vectors; ++v) {
        hn::Store(hn::Zero(FloatTag()), FloatTag(), tile + v * kTileRows * kFloatLanes);
      }
      continue;
    }
    const T* w = static_cast<const T*>(weight.data) + (o + r) * weight.stride + c0;
    if constexpr (!kIsPair<T>) {  // a folded weight is float32
      if (signs != nullptr) {
        const auto plane = [&](int64_t p) {
          return SignRow{.words = signs->block(p, o / kSignBlockRows) +
                                  c0 / kSignWordColumns * kSignBlockRows + r,
                         .alpha = signs->scales(p)[o + r]};
        };
        WidenAndFoldRow(w, columns, plane(0), tile);
        for (int64_t p = 1; p < signs->planes; ++p) {
          FoldRow<T>(plane(p), 0, RoundUp(columns, kStep), tile);
        }
        continue;
      }
    }
    WidenRow(w, columns, tile);
  }
}

// The rows that meet a panel, cut into tiles where tile_rows of the pass begin.
struct TokenTiles {
  const PlannedRow* rows = nullptr;
  int64_t count = 0;
  int64_t lane = 0;  // of the first row in its tile

  int64_t tiles() const { return (lane + count + kMaxTokens - 1) / kMaxTokens; }
  int64_t begin(int64_t tile) const { return std::max<int64_t>(0, tile * kMaxTokens - lane); }
  int64_t end(int64_t tile) const { return std::min(count, (tile + 1) * kMaxTokens - lane); }
  // Tiles that are taken at once from `tile` on: full ones only.
  int64_t together(int64_t tile) const {
    const int64_t last = tile + kTilesTogether - 1;
    const bool full = last < tiles() && end(last) - begin(tile) == kTilesTogether * kMaxTokens;
    return full ? kTilesTogether : 1;
  }
};

// A packed slab of a panel.
struct Slab {
  const float* panel = nullptr;  // [row tile][vector][4]
  int64_t o = 0;                 // the panel's first output
  int64_t height = 0;            // outputs that exist, 1 .. 16
  int64_t v0 = 0;                // the slab's first vector of columns
  int64_t vectors = 0;
  bool first = true;  // of the row's slabs
  bool last = true;
};

// What a row tile fetches into L1 with every vector: the next row tile's share of the panel, and a
// part of the tokens' next column block. Fetching past the end harms nothing.
template <int kTiles>
struct TileAhead {
  static constexpr int64_t kLineFloats = 16;
  static constexpr int64_t Lines(int64_t floats) {
    return (floats + kLineFloats - 1) / kLineFloats;
  }

  HWY_INLINE void Fetch() {
    constexpr int64_t kPanelLines = Lines(kTileRows * kFloatLanes / kTiles);
    constexpr int64_t kXLines = Lines(kMaxTokens * kFloatLanes / kXParts);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kPanelLines; ++i) __builtin_prefetch(w + i * kLineFloats, 0, 3);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kXLines; ++i) __builtin_prefetch(x + i * kLineFloats, 0, 3);
    w += kPanelLines * kLineFloats;
    x += kXLines * kLineFloats;
  }

  // The i-th tile's share of what w and x name.
  HWY_INLINE TileAhead Share(int64_t i, int64_t r, int64_t vectors) const {
    return {w + i * vectors * Lines(kTileRows * kFloatLanes / kTiles) * kLineFloats,
            x + r % kXParts * vectors * Lines(kMaxTokens * kFloatLanes / kXParts) * kLineFloats};
  }

  static constexpr int64_t kXParts = kPanelTiles - 1;
  const float* w = nullptr;
  const float* x = nullptr;
};

// 4 rows x kTokens tokens over `vectors` vectors of columns: w[vector][4], x[vector][kMaxTokens].
template <class T, int kTokens, int kTiles>
HWY_NOINLINE void PanelTile(const float* HWY_RESTRICT w, const float* HWY_RESTRICT x,
                            int64_t vectors, float* HWY_RESTRICT partial, bool first,
                            TileAhead<kTiles> ahead) {
  const FloatTag f;
  FloatVec sums[kTileRows][kTokens];
#pragma GCC unroll 4
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      sums[r][t] = first ? hn::Zero(f) : hn::Load(f, partial + (r * kTokens + t) * kFloatLanes);
    }
  }
  for (int64_t v = 0; v < vectors; ++v) {
    ahead.Fetch();
    FloatVec weights[kTileRows];
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r) {
      weights[r] = hn::Load(f, w + (v * kTileRows + r) * kFloatLanes);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const FloatVec xs = hn::Load(f, x + (v * kMaxTokens + t) * kFloatLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kTileRows; ++r) sums[r][t] = Accumulate<T>(weights[r], xs, sums[r][t]);
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
template <int kTokens>
void FinishTile(const float* partial, const PlannedRow* rows, int64_t o, int64_t height) {
  const FloatTag f;
  const hn::FixedTag<float, 4> four;
  const auto sum = [&](int r, int t) {
    return hn::Load(f, partial + (r * kTokens + t) * kFloatLanes);
  };
  for (int t = 0; t < kTokens; ++t) {
    const auto outputs = FoldFour(sum(0, t), sum(1, t), sum(2, t), sum(3, t));
    float* y = rows[t].y + o;
    if (height >= kTileRows) {
      hn::StoreU(outputs, four, y);
    } else {
      HWY_ALIGN float lanes[kTileRows];
      hn::Store(outputs, four, lanes);
      std::memcpy(y, lanes, static_cast<size_t>(height) * sizeof(float));
    }
  }
}

// What one or some tiles of tokens do with a slab.
struct TilesWork {
  const PlannedRow* rows = nullptr;  // of the first tile
  const float* next_x = nullptr;     // where the tokens that follow begin
  float* partials = nullptr;
  int64_t lines = 0;  // of the weight ahead, for every column block
};

// kTiles tiles of kTokens tokens each over a slab.
template <class T, int kTokens, int kTiles = 1>
void SlabTiles(const Slab& slab, const TilesWork& work, WeightAhead& ahead) {
  constexpr int64_t kWeightFloats = kTileRows * kFloatLanes;  // of a vector
  constexpr int64_t kXFloats = kMaxTokens * kFloatLanes;
  const int64_t row_tiles = (slab.height + kTileRows - 1) / kTileRows;
  const float* x[kTiles];
  for (int i = 0; i < kTiles; ++i) {
    x[i] = static_cast<const float*>(work.rows[i * kTokens].x) + slab.v0 * kXFloats;
  }
  for (int64_t v = 0; v < slab.vectors; v += kBlockVectors) {
    const int64_t vectors = std::min(kBlockVectors, slab.vectors - v);
    const bool whole = v + vectors == slab.vectors;
    const float* w = slab.panel + v * kWeightFloats;
    ahead.Fetch(work.lines);
    for (int64_t r = 0; r < row_tiles; ++r, w += slab.vectors * kWeightFloats) {
      const bool next_block = r + 1 == row_tiles;
      const float* next_w = next_block ? slab.panel + (whole ? 0 : v + vectors) * kWeightFloats
                                       : w + slab.vectors * kWeightFloats;
      float* partial = work.partials + r * kTiles * kTileFloats;
#pragma GCC unroll 4
      for (int i = 0; i < kTiles; ++i, partial += kTileFloats) {
        const TileAhead<kTiles> all{
            .w = next_w,
            .x = whole ? work.next_x + i * slab.vectors * kXFloats : x[i] + vectors * kXFloats};
        PanelTile<T, kTokens, kTiles>(w, x[i], vectors, partial, slab.first && v == 0,
                                      all.Share(i, r, vectors));
        if (slab.last && whole) {
          FinishTile<kTokens>(partial, work.rows + i * kTokens, slab.o + r * kTileRows,
                              slab.height - r * kTileRows);
        }
      }
    }
    for (int i = 0; i < kTiles; ++i) x[i] += vectors * kXFloats;
  }
}

template <class T>
void AnySlabTile(int64_t tokens, const Slab& slab, const TilesWork& work, WeightAhead& ahead) {
  switch (tokens) {
    case 1:
      return SlabTiles<T, 1>(slab, work, ahead);
    case 2:
      return SlabTiles<T, 2>(slab, work, ahead);
    case 3:
      return SlabTiles<T, 3>(slab, work, ahead);
#if HWY_MAX_BYTES >= 64
    case 4:
      return SlabTiles<T, 4>(slab, work, ahead);
    case 5:
      return SlabTiles<T, 5>(slab, work, ahead);
    default:
      return SlabTiles<T, 6>(slab, work, ahead);
#endif
  }
}

// Outputs [begin, end) of `rows`, which all read `weight` with the same signs folded in (or none)
// and whose x lies in tiles. `begin` is a multiple of 16. Overwrites y.
template <class T>
void PanelRows(const WeightMatrix& weight, const PackedSigns::Layout* signs, const PlannedRow* rows,
               int64_t count, int64_t begin, int64_t end, const OutputPath& path,
               const PanelMemory& memory) {
  constexpr int64_t kSlabColumns = kSlabVectors * kVectorColumns<T>;
  constexpr int64_t kBlockColumns = kBlockVectors * kVectorColumns<T>;
  const TokenTiles tokens{.rows = rows, .count = count, .lane = rows->place % kMaxTokens};
  const int64_t tiles = tokens.tiles();
  const bool one_slab = weight.cols <= kSlabColumns;
  const int64_t calls = tiles * ((weight.cols + kBlockColumns - 1) / kBlockColumns);
  for (int64_t o = begin; o < end; o += kPanelRows) {
    const int64_t next = path.After(o, kPanelRows, 1);
    WeightAhead ahead;  // the next panel
    if (next >= 0) ahead = WeightAhead(weight, next, std::min(next + kPanelRows, weight.rows));
    const int64_t lines = (ahead.lines() + calls - 1) / calls;
    int64_t c0 = 0;
    do {
      const int64_t columns = std::min(kSlabColumns, weight.cols - c0);
      PackPanel<T>(weight, signs, o, c0, columns, memory.panel);
      const Slab slab{.panel = memory.panel,
                      .o = o,
                      .height = std::min(kPanelRows, end - o),
                      .v0 = c0 / kVectorColumns<T>,
                      .vectors = SlabVectorsOf<T>(columns),
                      .first = c0 == 0,
                      .last = c0 + columns == weight.cols};
      for (int64_t tile = 0; tile < tiles;) {
        const int64_t together = tokens.together(tile);
        const PlannedRow* then = rows + tokens.begin((tile + together) % tiles);
        const TilesWork work{.rows = rows + tokens.begin(tile),
                             .next_x = static_cast<const float*>(then->x),
                             .partials = memory.partials + (one_slab ? 0 : tile * kPanelFloats),
                             .lines = lines};
        if (together > 1) {
          SlabTiles<T, kMaxTokens, kTilesTogether>(slab, work, ahead);
        } else {
          AnySlabTile<T>(tokens.end(tile) - tokens.begin(tile), slab, work, ahead);
        }
        tile += together;
      }
      c0 += columns;
    } while (c0 < weight.cols);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#endif  // per target
