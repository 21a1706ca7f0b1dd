// Many tokens of bf16 through a bf16 weight with its signs, where the processor multiplies pairs of
// bf16 (AVX512_BF16): both sums of a folded row in one loop (linear_columns.h).
//
//   y[t, o] = sum_i W[o, i] x[t, i] + sum_p alpha_p[o] sum_i S_p[o, i] x[t, i]
//
// W + alpha S has no place in bf16 (an alpha far below |W| would be lost) and two products cost
// twice. So the second sum is looked up, as "Four Russians" do with bits: a table holds, for 8
// columns and 16 tokens, the sums of all 256 patterns of signs in float32; the 8 bits of a row
// choose a vector of it, and one addition stands for 128 multiplications. Additions and pairs use
// different ports of the processor, so one loop over both costs little more than the pairs.
//
// A lane is a token: every (t, o) has its own accumulator, whatever the tile, so a sum depends on
// its own row of x alone. Per 64 columns: pairs in order, then alpha_p times the sum of the eight
// table entries, plane after plane.
//
// Blocking, for an L1 of 48 KiB, an L2 of 1 MiB and 32 registers:
//   chunk    up to some thousand rows of W that one thread takes, over 64 columns: they lie pages
//            apart, so 256 columns of them are copied beside each other at a time;
//   table    of up to 64 tokens and 64 columns: 512 KiB, built once for all rows of a chunk;
//   tile     4 rows x 64 tokens: 16 accumulators of the pairs and 8 of the signs, which are summed
//            for two rows at a time.
// Accumulators of a chunk wait in memory between two blocks of columns, [tile][row][token].
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "kernels/bitdelta/linear_columns.h"
#include "kernels/bitdelta/packed_signs.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bitdelta/linear_columns_cpu.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/bitdelta/linear_base-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if STOCKPOT_LINEAR_PAIRS

inline constexpr int64_t kColumnLanes = kRunTokens;
inline constexpr int64_t kColumnPairs = kRunColumns / 2;
inline constexpr int64_t kColumnGroups = kRunColumns / 8;  // table lookups of a row
inline constexpr int64_t kColumnEntries = 256;
inline constexpr int kColumnRows = 4;     // of a tile
inline constexpr int kColumnVectors = 4;  // of a tile at most
inline constexpr int kSignRows = 2;       // of a tile, whose signs are summed at a time
inline constexpr int64_t kWordBytes = kSignWordColumns / 8;
inline constexpr int64_t kBlockBytes = kSignBlockRows * kWordBytes;  // words of 16 rows

// Transposes 16 x 16 floats.
HWY_INLINE void Transpose(FloatVec (&m)[kColumnLanes]) {
  const FloatTag f;
  const hn::ScalableTag<double> d;
  FloatVec u[kColumnLanes];  // [4i + j]: rows 4i .. 4i + 3 of the columns j, 4 + j, 8 + j, 12 + j
  for (int i = 0; i < 4; ++i) {
    const FloatVec* r = m + 4 * i;
    const auto low0 = hn::BitCast(d, hn::InterleaveLower(f, r[0], r[1]));
    const auto low1 = hn::BitCast(d, hn::InterleaveLower(f, r[2], r[3]));
    const auto high0 = hn::BitCast(d, hn::InterleaveUpper(f, r[0], r[1]));
    const auto high1 = hn::BitCast(d, hn::InterleaveUpper(f, r[2], r[3]));
    u[4 * i] = hn::BitCast(f, hn::InterleaveLower(d, low0, low1));
    u[4 * i + 1] = hn::BitCast(f, hn::InterleaveUpper(d, low0, low1));
    u[4 * i + 2] = hn::BitCast(f, hn::InterleaveLower(d, high0, high1));
    u[4 * i + 3] = hn::BitCast(f, hn::InterleaveUpper(d, high0, high1));
  }
  for (int j = 0; j < 4; ++j) {
    // Blocks 0 and 2, then 1 and 3, of the first two and of the last two.
    const __m512 even0 = _mm512_shuffle_f32x4(u[j].raw, u[4 + j].raw, 0x88);
    const __m512 even1 = _mm512_shuffle_f32x4(u[8 + j].raw, u[12 + j].raw, 0x88);
    const __m512 odd0 = _mm512_shuffle_f32x4(u[j].raw, u[4 + j].raw, 0xdd);
    const __m512 odd1 = _mm512_shuffle_f32x4(u[8 + j].raw, u[12 + j].raw, 0xdd);
    m[j] = FloatVec{_mm512_shuffle_f32x4(even0, even1, 0x88)};
    m[4 + j] = FloatVec{_mm512_shuffle_f32x4(odd0, odd1, 0x88)};
    m[8 + j] = FloatVec{_mm512_shuffle_f32x4(even0, even1, 0xdd)};
    m[12 + j] = FloatVec{_mm512_shuffle_f32x4(odd0, odd1, 0xdd)};
  }
}

// Columns [c, c + 32) of a row that has `columns` of them, in pairs; zeros past its end.
HWY_INLINE FloatVec LoadColumns(const BF16Pair* row, int64_t c, int64_t columns) {
  if (c + kStep <= columns) return LoadPairs(row + c);
  BF16Pair tail[kStep] = {};
  if (c < columns) std::memcpy(tail, row + c, static_cast<size_t>(columns - c) * sizeof(BF16Pair));
  return LoadPairs(tail);
}

// Blocks [first, last) of 64 columns of x of a run: [block][vector][pair][token], zeros where there
// is no token or column.
void OrderBlocks(const ColumnRun& run, int64_t columns, int64_t first, int64_t last) {
  const FloatTag f;
  float* out = reinterpret_cast<float*>(run.x) + first * run.vectors * kColumnPairs * kColumnLanes;
  for (int64_t block = first; block < last; ++block) {
    for (int64_t v = 0; v < run.vectors; ++v) {
      for (int64_t c = block * kRunColumns; c < (block + 1) * kRunColumns; c += kStep) {
        FloatVec pairs[kColumnLanes];  // of a token, then of all tokens
        for (int64_t lane = 0; lane < kColumnLanes; ++lane) {
          const int64_t t = v * kColumnLanes + lane;
          pairs[lane] =
              t >= run.count
                  ? hn::Zero(f)
                  : LoadColumns(static_cast<const BF16Pair*>(run.input->row(run.order[t])), c,
                                columns);
        }
        Transpose(pairs);
        for (const FloatVec& pair : pairs) {
          hn::Store(pair, f, out);
          out += kColumnLanes;
        }
      }
    }
  }
}

// The two columns of a pair as float32.
HWY_INLINE FloatVec EvenColumn(FloatVec pair) {
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::BitCast(hn::ScalableTag<uint32_t>(), pair)));
}
HWY_INLINE FloatVec OddColumn(FloatVec pair) {
  return hn::And(pair, hn::BitCast(FloatTag(), hn::Set(hn::ScalableTag<uint32_t>(), 0xffff0000u)));
}

// Where PackedSigns keeps a pattern of four columns (FoldSignGroups).
constexpr int FoldedPattern(int four) { return four < 8 ? four : four ^ 7; }

// table[group][pattern][vector][token] = sum over the 8 columns of a group of +x where the
// pattern's bit is 1, -x where it is 0; patterns as PackedSigns has them. x: [vector][pair][token].
template <int kVectors>
HWY_NOINLINE void BuildColumnTable(const float* HWY_RESTRICT x, float* HWY_RESTRICT table) {
  const FloatTag f;
  constexpr int64_t kVectorFloats = kColumnPairs * kColumnLanes;
  constexpr int64_t kEntryFloats = kVectors * kColumnLanes;
  HWY_ALIGN float column[8][kVectors][kColumnLanes];
  HWY_ALIGN float low[8][kVectors][kColumnLanes];  // sums of the first three columns
  for (int64_t g = 0; g < kColumnGroups; ++g, table += kColumnEntries * kEntryFloats) {
    for (int v = 0; v < kVectors; ++v) {
      for (int p = 0; p < 4; ++p) {
        const FloatVec pair = hn::Load(f, x + v * kVectorFloats + (4 * g + p) * kColumnLanes);
        hn::Store(EvenColumn(pair), f, column[2 * p][v]);
        hn::Store(OddColumn(pair), f, column[2 * p + 1][v]);
      }
      for (int i = 0; i < 8; ++i) {
        FloatVec sum = hn::Zero(f);
        for (int b = 0; b < 3; ++b) {
          const FloatVec one = hn::Load(f, column[b][v]);
          sum = (i >> b & 1) != 0 ? hn::Add(sum, one) : hn::Sub(sum, one);
        }
        hn::Store(sum, f, low[i][v]);
      }
    }
    for (int high = 0; high < kColumnEntries / 8; ++high) {
      FloatVec sum[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[v] = hn::Zero(f);
#pragma GCC unroll 8
      for (int b = 3; b < 8; ++b) {
        const auto minus =
            hn::Set(hn::ScalableTag<uint32_t>(), (high >> (b - 3) & 1) != 0 ? 0u : 0x80000000u);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sum[v] = hn::Add(sum[v], hn::Xor(hn::Load(f, column[b][v]), hn::BitCast(f, minus)));
        }
      }
      // The eight patterns that share their last five bits lie together, forwards or backwards.
      const int fourth = high & 1;
      float* entry = table + (FoldedPattern(high >> 1) * 16 + 8 * fourth) * kEntryFloats;
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v, entry += kColumnLanes) {
          hn::Store(hn::Add(sum[v], hn::Load(f, low[fourth == 0 ? i : i ^ 7][v])), f, entry);
        }
      }
    }
  }
}

// What a tile of 4 rows reads.
struct ColumnTileRows {
  const BF16Pair* weights = nullptr;  // [4][64]
  const uint8_t* signs = nullptr;     // a byte a group: [2 words][16 rows, of which 4][4]
  const float* alpha = nullptr;       // [4]
};

// partial[row][vector][token] += 64 columns of the pairs (where kPairs) and of a plane of signs.
template <int kVectors, bool kPairs>
HWY_NOINLINE void ColumnTile(const ColumnTileRows& rows, const float* HWY_RESTRICT x,
                             const float* HWY_RESTRICT table, float* HWY_RESTRICT partial,
                             bool first) {
  const FloatTag f;
  const hn::ScalableTag<uint32_t> d32;
  constexpr int64_t kVectorFloats = kColumnPairs * kColumnLanes;
  constexpr int64_t kEntryFloats = kVectors * kColumnLanes;
  constexpr int64_t kGroupFloats = kColumnEntries * kEntryFloats;
  constexpr int kHalves = kColumnRows / kSignRows;
  constexpr int64_t kSteps = kColumnGroups / kHalves;  // of a half: 4 pairs, 2 groups of 2 rows
  FloatVec sums[kColumnRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kColumnRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* p = partial + r * kEntryFloats + v * kColumnLanes;
      sums[r][v] = first ? hn::Zero(f) : hn::Load(f, p);
      __builtin_prefetch(p + kColumnRows * kEntryFloats, 1, 3);  // of the next tile
    }
  }
  const BF16Pair* weights = rows.weights;
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) {
    FloatVec signs[kSignRows][kVectors];
#pragma GCC unroll 2
    for (int r = 0; r < kSignRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) signs[r][v] = hn::Zero(f);
    }
    const uint8_t* patterns = rows.signs + half * kSignRows * kWordBytes;
    const float* entries = table;
#pragma GCC unroll 1
    for (int64_t step = 0; step < kSteps; ++step) {
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) {
        if constexpr (kPairs) {
          FloatVec xs[kVectors];
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            xs[v] = hn::Load(f, x + v * kVectorFloats + p * kColumnLanes);
          }
#pragma GCC unroll 4
          for (int r = 0; r < kColumnRows; ++r) {
            uint32_t pair;
            std::memcpy(&pair, weights + r * kRunColumns + 2 * p, sizeof pair);
            const FloatVec w = hn::BitCast(f, hn::Set(d32, pair));
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[r][v] = DotPairs(w, xs[v], sums[r][v]);
          }
        }
        const int r = p % kSignRows;
        const int group = p / kSignRows;
        const float* entry =
            entries + group * kGroupFloats + patterns[r * kWordBytes + group] * kEntryFloats;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          signs[r][v] = hn::Add(signs[r][v], hn::Load(f, entry + v * kColumnLanes));
        }
      }
      weights += 8;
      x += 4 * kColumnLanes;
      patterns += step % 2 == 0 ? 2 : kBlockBytes - 2;  // the next word
      entries += 2 * kGroupFloats;
    }
#pragma GCC unroll 2
    for (int r = 0; r < kSignRows; ++r) {
      const FloatVec alpha = hn::Set(f, rows.alpha[half * kSignRows + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        FloatVec& sum = sums[half * kSignRows + r][v];
        sum = hn::MulAdd(alpha, signs[r][v], sum);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kColumnRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(sums[r][v], f, partial + r * kEntryFloats + v * kColumnLanes);
    }
  }
}

// Blocks of a chunk's columns that are copied at a time: rows of W are pages apart.
inline constexpr int64_t kPanelsTogether = 4;

// Columns [c0, c0 + 256) of the chunk, those that exist, to [block][row][64]; zeros up to a whole
// tile.
inline void PackPanels(const ColumnChunk& chunk, int64_t c0, BF16Pair* panels) {
  static_assert(kRunColumns == 2 * kStep);
  const WeightMatrix& weight = *chunk.rows->weight;
  const int64_t height = RoundUp(chunk.end - chunk.begin, kColumnRows);
  const int64_t end = std::min(weight.cols, c0 + kPanelsTogether * kRunColumns);
  constexpr int64_t kAhead = 16;  // rows whose lines are on their way
  const FloatTag f;
  for (int64_t r = 0; r < height; ++r) {
    const bool exists = chunk.begin + r < chunk.end;
    const auto* row = exists ? static_cast<const BF16Pair*>(weight.row(chunk.begin + r)) : nullptr;
    if (chunk.begin + r + kAhead < chunk.end) {
      const BF16Pair* ahead = row + kAhead * weight.stride;
      for (int64_t c = c0; c < end; c += kStep) __builtin_prefetch(ahead + c, 0, 3);
    }
    float* out = reinterpret_cast<float*>(panels + r * kRunColumns);
    for (int64_t c = c0; c < end; c += kRunColumns, out += height * kColumnPairs) {
      for (int64_t half = 0; half < 2; ++half) {
        hn::Store(exists ? LoadColumns(row, c + half * kStep, end) : hn::Zero(f), f,
                  out + half * kFloatLanes);
      }
    }
  }
}

// The sign words of 16 rows over 64 columns; `edge` where they end after 32.
inline const uint8_t* SignBytesAt(const PackedSigns::Layout& signs, int64_t plane, int64_t o,
                                  int64_t c0, std::span<uint8_t, 2 * kBlockBytes> edge) {
  const int64_t word = c0 / kSignWordColumns;
  const auto* words = reinterpret_cast<const uint8_t*>(signs.block(plane, o / kSignBlockRows) +
                                                       word * kSignBlockRows);
  if (word + 1 < signs.column_words) return words;
  std::memcpy(edge.data(), words, kBlockBytes);
  return edge.data();
}

// One block of 64 columns of a chunk against kVectors vectors of tokens. weights: [row][64]; x:
// [vector][pair][token].
template <int kVectors>
void MultiplyColumnBlock(const ColumnChunk& chunk, int64_t c0, const BF16Pair* weights,
                         const float* x, float* table, float* partial) {
  const PackedSigns::Layout& signs = *chunk.rows->signs;
  const int64_t height = chunk.end - chunk.begin;
  uint8_t edge[2 * kBlockBytes] = {};
  BuildColumnTable<kVectors>(x, table);
  for (int64_t p = 0; p < signs.planes; ++p) {
    for (int64_t r = 0; r < height; r += kColumnRows) {
      const int64_t o = chunk.begin + r;
      const ColumnTileRows tile{
          .weights = weights + r * kRunColumns,
          .signs = SignBytesAt(signs, p, o, c0, edge) + o % kSignBlockRows * kWordBytes,
          .alpha = signs.scales(p) + o};
      float* sums = partial + r * kVectors * kColumnLanes;
      if (p == 0) {
        ColumnTile<kVectors, true>(tile, x, table, sums, c0 == 0);
      } else {
        ColumnTile<kVectors, false>(tile, x, table, sums, false);
      }
    }
  }
}

// y[t, o] of a vector of tokens; rows of `partial` are `stride` floats apart.
inline void StoreColumns(const ColumnChunk& chunk, const PlannedRow* rows, int64_t tokens,
                         int64_t stride, const float* partial) {
  const FloatTag f;
  const int64_t height = chunk.end - chunk.begin;
  for (int64_t r = 0; r < height; r += kColumnLanes) {
    const int64_t outputs = std::min(kColumnLanes, height - r);
    const auto exists = hn::FirstN(f, static_cast<size_t>(outputs));
    FloatVec m[kColumnLanes];
    for (int64_t i = 0; i < kColumnLanes; ++i) {
      m[i] = i < outputs ? hn::Load(f, partial + (r + i) * stride) : hn::Zero(f);
    }
    Transpose(m);
    for (int64_t t = 0; t < tokens; ++t) {
      hn::BlendedStore(m[t], exists, f, rows[t].y + chunk.begin + r);
    }
  }
}

inline constexpr int64_t kColumnTableFloats =
    kColumnGroups * kColumnEntries * kColumnVectors * kColumnLanes;

// A table, the panels, the accumulators.
inline int64_t PanelFloats(int64_t rows) { return kPanelsTogether * rows * kColumnPairs; }
int64_t MemoryFloats(int64_t vectors, int64_t rows) {
  const int64_t height = RoundUp(rows, kColumnRows);
  return kColumnTableFloats + PanelFloats(height) + vectors * kColumnLanes * height;
}

template <class Run>
void WithVectors(int64_t vectors, const Run& run) {
  switch (vectors) {
    case 1:
      return run(std::integral_constant<int, 1>{});
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 3:
      return run(std::integral_constant<int, 3>{});
    default:
      return run(std::integral_constant<int, kColumnVectors>{});
  }
}

// `memory`: MemoryFloats.
void MultiplyChunk(const ColumnChunk& chunk, float* memory) {
  const int64_t height = RoundUp(chunk.end - chunk.begin, kColumnRows);
  const int64_t vectors = chunk.run->vectors;
  auto* panels = reinterpret_cast<BF16Pair*>(memory + kColumnTableFloats);
  float* partials = memory + kColumnTableFloats + PanelFloats(height);
  for (int64_t c = 0; c < chunk.rows->weight->cols; c += kRunColumns) {
    const int64_t block = c / kRunColumns;
    if (block % kPanelsTogether == 0) PackPanels(chunk, c, panels);
    const BF16Pair* weights = panels + block % kPanelsTogether * height * kRunColumns;
    for (int64_t v = 0; v < vectors; v += kColumnVectors) {
      const float* x = reinterpret_cast<const float*>(chunk.run->x) +
                       (block * vectors + v) * kColumnPairs * kColumnLanes;
      WithVectors(vectors - v, [&](auto count) {
        MultiplyColumnBlock<count()>(chunk, c, weights, x, memory,
                                     partials + v * kColumnLanes * height);
      });
    }
  }
  for (int64_t v = 0; v < vectors; ++v) {
    const int64_t tile = v / kColumnVectors * kColumnVectors;
    const int64_t stride = std::min<int64_t>(kColumnVectors, vectors - tile) * kColumnLanes;
    const int64_t t = v * kColumnLanes;
    StoreColumns(chunk, chunk.rows + t, std::min(chunk.run->count - t, kColumnLanes), stride,
                 partials + tile * kColumnLanes * height + (v - tile) * kColumnLanes);
  }
}

#else

void OrderBlocks(const ColumnRun&, int64_t, int64_t, int64_t) {}
int64_t MemoryFloats(int64_t, int64_t) { return 0; }
void MultiplyChunk(const ColumnChunk&, float*) {}

#endif  // STOCKPOT_LINEAR_PAIRS

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {
namespace {

HWY_EXPORT(OrderBlocks);
HWY_EXPORT(MemoryFloats);
HWY_EXPORT(MultiplyChunk);

}  // namespace

void OrderColumns(const ColumnRun& run, int64_t columns, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(OrderBlocks)(run, columns, begin, end);
}

int64_t ColumnFloats(int64_t vectors, int64_t rows) {
  return HWY_DYNAMIC_DISPATCH(MemoryFloats)(vectors, rows);
}

void MultiplyColumns(const ColumnChunk& chunk, float* memory) {
  HWY_DYNAMIC_DISPATCH(MultiplyChunk)(chunk, memory);
}

}  // namespace stockpot
#endif  // HWY_ONCE
