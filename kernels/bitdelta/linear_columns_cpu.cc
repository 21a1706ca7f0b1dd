// Many tokens of bf16 through a bf16 weight with its signs, where the processor multiplies pairs of
// bf16 (AVX512_BF16): both sums of a folded row in one loop (linear_columns.h).
//
//   y[t, o] = sum_i W[o, i] x[t, i] + sum_p alpha_p[o] sum_i S_p[o, i] x[t, i]
//
// W + alpha S has no place in bf16 (an alpha far below |W| would be lost) and two products cost
// twice. So the second sum is looked up, as "Four Russians" do with bits: a table holds, for 8
// columns, the sums of all 256 patterns of signs (linear_columns_table-inl.h); the 8 bits of a row
// choose a vector of it, and one addition stands for 128 multiplications, or for 256. Additions and
// pairs use different ports of the processor, so one loop over both costs little more than the
// pairs.
//
// A lane is a token: every (t, o) has its own accumulator, whatever the tile, so a sum depends on
// its own row of x alone. Per 128 columns: pairs in order, then alpha_p times the sum of the 16
// table entries, plane after plane.
//
// Entries of 16 bits are as good as float32 where alpha is small beside the weight, as it is in a
// fine-tune: they add 8e-4 alpha |x| at most (standard deviation; the mean is 0), and y may err by
// 1e-5 |W[o]| |x|. Rows are judged eight at a time, every 512 columns, by the norm of W up to
// there: where it is below 400 sum_p |alpha_p| for one of them, the eight take float32 for these
// columns. W and alpha alone decide, so neither the batch nor the number of threads does. (An alpha
// of 0.056 of the weights' standard deviation passes at once, one of 0.16 after 4096 columns. The
// quickstart's fine-tune has 0.004, its largest row 0.037.)
//
// Blocking, for an L1 of 48 KiB, an L2 of 1 MiB and 32 registers:
//   chunk    up to some thousand rows of W that one thread takes, over 128 columns: they lie pages
//            apart, so 512 columns of them are copied beside each other at a time;
//   table    of up to 32 tokens and 128 columns: 256 KiB, built once for all rows of a chunk; twice
//            that in float32, where some row asks for it;
//   tile     8 rows x 32 tokens: 16 accumulators of the pairs and 4 or 8 of the signs, which are
//            summed for four rows at a time.
// Accumulators of a chunk wait in memory between two blocks of columns, [tile][row][token]; those
// of 32 tokens pass four blocks before the next tokens come.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "kernels/bitdelta/linear_columns.h"
#include "kernels/bitdelta/packed_signs.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bitdelta/linear_columns_cpu.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/bitdelta/linear_columns_table-inl.h"
#include "kernels/bitdelta/linear_columns_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if STOCKPOT_LINEAR_PAIRS

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

// Blocks [first, last) of 128 columns of x of a run: [block][vector][pair][token], zeros where
// there is no token or column.
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

// Blocks of a chunk's columns that are copied at a time: rows of W are pages apart.
inline constexpr int64_t kPanelsTogether = 4;
inline constexpr int64_t kPanelColumns = kPanelsTogether * kRunColumns;

// Working memory of a thread, one after another.
struct ChunkMemory {
  float* float_table = nullptr;    // [kTableLanes]
  int16_t* short_table = nullptr;  // [kTableLanes]
  BF16Pair* panels = nullptr;      // [kPanelsTogether][height][128]
  float* partials = nullptr;       // [tiles of tokens][height][tokens]
  float* squares = nullptr;        // [height]: |W[o]|^2 over the columns that were copied
  uint8_t* exact = nullptr;        // [height / 8]: these rows take float32 for these 512 columns
};

inline constexpr int64_t kTableLanes =
    kColumnGroups * kColumnEntries * kColumnVectors * kColumnLanes;

// The parts for `rows` outputs, whose number of floats is added to `floats`.
inline ChunkMemory DivideMemory(int64_t vectors, int64_t rows, float* memory, int64_t& floats) {
  const int64_t height = RoundUp(rows, kColumnRows);
  const auto take = [&](int64_t count) {
    float* part = memory == nullptr ? nullptr : memory + floats;
    floats += RoundUp(count, kFloatLanes);
    return part;
  };
  ChunkMemory parts;
  parts.float_table = take(kTableLanes);
  parts.short_table = reinterpret_cast<int16_t*>(take(kTableLanes / 2));
  parts.panels = reinterpret_cast<BF16Pair*>(take(kPanelColumns * height / 2));
  parts.partials = take(vectors * kColumnLanes * height);
  parts.squares = take(height);
  parts.exact = reinterpret_cast<uint8_t*>(take(height / kColumnRows));
  return parts;
}

int64_t MemoryFloats(int64_t vectors, int64_t rows) {
  int64_t floats = 0;
  DivideMemory(vectors, rows, nullptr, floats);
  return floats;
}

// The least |W[o]| over sum_p |alpha_p[o]| beside which 16 bits are enough for the signs, if y may
// err by 4 epsilon sqrt(columns + 4) of |W[o]| |x|, or by 1e-5: five standard deviations.
inline float LeastNormPerScale(int64_t columns) {
  constexpr double kDeviations = 5, kEpsilon = 1.2e-7;
  const double tolerance =
      std::min(1e-5, 4 * kEpsilon * std::sqrt(static_cast<double>(columns) + 4));
  return static_cast<float>(kDeviations * kShortError / tolerance);
}

inline bool ShortSumsSuffice(const PackedSigns::Layout& signs, int64_t o,
                             float least_norm_per_scale, float square) {
  float alpha = 0;
  for (int64_t p = 0; p < signs.planes; ++p) alpha += std::fabs(signs.scales(p)[o]);
  const float least = least_norm_per_scale * alpha;
  return least * least <= square && square <= std::numeric_limits<float>::max();
}

// Which tables a chunk asks for.
struct ColumnTables {
  bool floats = false;
  bool shorts = false;
};

// Columns [c0, c0 + 512) of the chunk, those that exist, to memory.panels, zeros up to a whole
// tile; and memory.squares and memory.exact.
inline ColumnTables PackPanels(const ColumnChunk& chunk, int64_t c0, const ChunkMemory& memory) {
  static_assert(kRunColumns % kStep == 0);
  const WeightMatrix& weight = *chunk.rows->weight;
  const int64_t height = RoundUp(chunk.end - chunk.begin, kColumnRows);
  const int64_t end = std::min(weight.cols, c0 + kPanelColumns);
  constexpr int64_t kAhead = 16;  // rows whose lines are on their way
  const FloatTag f;
  const float least_norm_per_scale = LeastNormPerScale(weight.cols);
  ColumnTables tables;
  bool exact = false;
  for (int64_t r = 0; r < height; ++r) {
    const bool exists = chunk.begin + r < chunk.end;
    const auto* row = exists ? static_cast<const BF16Pair*>(weight.row(chunk.begin + r)) : nullptr;
    if (chunk.begin + r + kAhead < chunk.end) {
      const BF16Pair* ahead = row + kAhead * weight.stride;
      for (int64_t c = c0; c < end; c += kStep) __builtin_prefetch(ahead + c, 0, 3);
    }
    FloatVec square = hn::Zero(f);
    float* out = reinterpret_cast<float*>(memory.panels + r * kRunColumns);
    for (int64_t c = c0; c < end; c += kRunColumns, out += height * kColumnPairs) {
      for (int64_t part = 0; part < kRunColumns / kStep; ++part) {
        const FloatVec pairs = exists ? LoadColumns(row, c + part * kStep, end) : hn::Zero(f);
        square = DotPairs(pairs, pairs, square);
        hn::Store(pairs, f, out + part * kFloatLanes);
      }
    }
    const float before = c0 == 0 ? 0 : memory.squares[r];
    memory.squares[r] = before + hn::GetLane(hn::SumOfLanes(f, square));
    exact |= exists && !ShortSumsSuffice(*chunk.rows->signs, chunk.begin + r, least_norm_per_scale,
                                         memory.squares[r]);
    if (r % kColumnRows < kColumnRows - 1) continue;
    memory.exact[r / kColumnRows] = exact;
    (exact ? tables.floats : tables.shorts) = true;
    exact = false;
  }
  return tables;
}

// The sign words of 16 rows from column c0 on.
inline const uint8_t* SignWords(const PackedSigns::Layout& signs, int64_t plane, int64_t o,
                                int64_t c0) {
  return reinterpret_cast<const uint8_t*>(signs.block(plane, o / kSignBlockRows) +
                                          c0 / kSignWordColumns * kSignBlockRows);
}

// Those of 128 columns, in `edge` where the row ends before.
inline const uint8_t* WholeSignWords(const PackedSigns::Layout& signs, int64_t plane, int64_t o,
                                     int64_t c0, std::span<uint8_t, kRunWords * kBlockBytes> edge) {
  const uint8_t* words = SignWords(signs, plane, o, c0);
  const int64_t exist = signs.column_words - c0 / kSignWordColumns;
  if (exist >= kRunWords) return words;
  std::memcpy(edge.data(), words, static_cast<size_t>(exist * kBlockBytes));
  return edge.data();
}

// One block of 128 columns of a chunk against kVectors vectors of tokens. weights: [row][128]; x:
// [vector][pair][token].
template <int kVectors>
void MultiplyColumnBlock(const ColumnChunk& chunk, int64_t c0, const ColumnTables& tables,
                         const ChunkMemory& memory, const BF16Pair* weights, const float* x,
                         float* partial) {
  const PackedSigns::Layout& signs = *chunk.rows->signs;
  const int64_t height = chunk.end - chunk.begin;
  uint8_t edge[kRunWords * kBlockBytes] = {};
  HWY_ALIGN float steps[kVectors * kColumnLanes];
  if (tables.floats) FloatSums<kVectors>::Build(x, c0, memory.float_table, steps);
  if (tables.shorts) ShortSums<kVectors>::Build(x, c0, memory.short_table, steps);
  for (int64_t p = 0; p < signs.planes; ++p) {
    for (int64_t r = 0; r < height; r += kColumnRows) {
      const int64_t o = chunk.begin + r;
      const ColumnTileRows tile{
          .weights = weights + r * kRunColumns,
          .signs = WholeSignWords(signs, p, o, c0, edge) + o % kSignBlockRows * kWordBytes,
          .alpha = signs.scales(p) + o};
      // The next sign words lie pages away: they are on their way while these rows are multiplied.
      if (o % kSignBlockRows == 0 && r + kSignBlockRows < height) {
        const uint8_t* next = SignWords(signs, p, o + kSignBlockRows, c0);
        for (int64_t w = 0; w < kRunWords; ++w) __builtin_prefetch(next + w * kBlockBytes, 0, 3);
      }
      float* sums = partial + r * kVectors * kColumnLanes;
      const bool first = p == 0 && c0 == 0;
      const auto multiply = [&]<template <int> class Sums>(const auto* table) {
        if (p == 0) {
          ColumnTile<Sums, kVectors, true>(tile, x, table, steps, sums, first);
        } else {
          ColumnTile<Sums, kVectors, false>(tile, x, table, steps, sums, first);
        }
      };
      if (memory.exact[r / kColumnRows] != 0) {
        multiply.template operator()<FloatSums>(memory.float_table);
      } else {
        multiply.template operator()<ShortSums>(memory.short_table);
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

// `memory`: MemoryFloats.
void MultiplyChunk(const ColumnChunk& chunk, float* memory) {
  const int64_t height = RoundUp(chunk.end - chunk.begin, kColumnRows);
  const int64_t vectors = chunk.run->vectors;
  int64_t floats = 0;
  const ChunkMemory parts = DivideMemory(vectors, height, memory, floats);
  const int64_t columns = chunk.rows->weight->cols;
  for (int64_t c0 = 0; c0 < columns; c0 += kPanelColumns) {
    const ColumnTables tables = PackPanels(chunk, c0, parts);
    for (int64_t v = 0; v < vectors; v += kColumnVectors) {
      const BF16Pair* weights = parts.panels;
      for (int64_t c = c0; c < std::min(columns, c0 + kPanelColumns); c += kRunColumns) {
        const float* x = reinterpret_cast<const float*>(chunk.run->x) +
                         (c / kRunColumns * vectors + v) * kVectorPairs;
        float* partial = parts.partials + v * kColumnLanes * height;
        if (vectors - v >= kColumnVectors) {
          MultiplyColumnBlock<kColumnVectors>(chunk, c, tables, parts, weights, x, partial);
        } else {
          MultiplyColumnBlock<1>(chunk, c, tables, parts, weights, x, partial);
        }
        weights += height * kRunColumns;
      }
    }
  }
  for (int64_t v = 0; v < vectors; ++v) {
    const int64_t tile = v / kColumnVectors * kColumnVectors;
    const int64_t stride = std::min<int64_t>(kColumnVectors, vectors - tile) * kColumnLanes;
    const int64_t t = v * kColumnLanes;
    StoreColumns(chunk, chunk.rows + t, std::min(chunk.run->count - t, kColumnLanes), stride,
                 parts.partials + tile * kColumnLanes * height + (v - tile) * kColumnLanes);
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
