// The 1-bit half of bitdelta_linear: y[t, o] += alpha[o] * sum_i S[o, i] x[t, i]. Included once per
// SIMD target.
//
// A table of a token holds, for each group of 4 columns, the sums of +-x over all sign patterns; a
// lookup in a register then serves 4 weights of as many output rows as there are lanes
// (packed_signs.h). Work a group and register: shift, lookup, add. Tables are exact in the sense of
// float32: 3 additions in a fixed order.
//
// A sum of one (t, o) runs over its groups with two accumulators, even and odd groups, added at the
// end: always the same order, whatever the tile. Tiles: up to 4 blocks of rows for one token (8
// chains hide the latency of the addition), 2 blocks x 4 tokens where neighbours share a variant
// (the shift is shared too).
#include <cstdint>
#include <cstring>

#include "kernels/bitdelta/linear_plan.h"
#include "kernels/bitdelta/packed_signs.h"

#if defined(STOCKPOT_LINEAR_DELTA_TOGGLE) == defined(HWY_TARGET_TOGGLE)
#ifdef STOCKPOT_LINEAR_DELTA_TOGGLE
#undef STOCKPOT_LINEAR_DELTA_TOGGLE
#else
#define STOCKPOT_LINEAR_DELTA_TOGGLE
#endif

#include <hwy/highway.h>

#include "kernels/bitdelta/linear_base-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using WordVec = hn::Vec<hn::ScalableTag<uint32_t>>;
inline constexpr int kTableEntries = kFloatLanes == 8 ? 8 : 16;  // stored for a group
inline constexpr int kGroupsPerWord = kSignWordColumns / kSignGroupColumns;
inline constexpr int kVectorsPerBlock = kSignBlockRows / kFloatLanes;

// Sign of column i of a group in the folded pattern j: bit i, and for the last column bit 3, which
// also flips the others (packed_signs.h).
constexpr float PatternSign(int column, int pattern) {
  const float last = pattern & 8 ? 1.0f : -1.0f;
  if (column == 3) return last;
  return ((pattern >> column) & 1 ? 1.0f : -1.0f) * -last;
}

struct Patterns {
  alignas(64) float sign[kSignGroupColumns][16];
  constexpr Patterns() : sign() {
    for (int column = 0; column < kSignGroupColumns; ++column) {
      for (int j = 0; j < 16; ++j) sign[column][j] = PatternSign(column, j);
    }
  }
};
inline constexpr Patterns kPatterns;

// entries[j] = sum of +-group[i] over the signs of pattern j. Products with +-1 are exact.
HWY_INLINE void BuildGroup(const float* group, float* entries) {
  const FloatTag f;
  for (int j = 0; j < kTableEntries; j += kFloatLanes) {
    FloatVec sum = hn::Mul(hn::Set(f, group[0]), hn::Load(f, kPatterns.sign[0] + j));
#pragma GCC unroll 3
    for (int i = 1; i < kSignGroupColumns; ++i) {
      sum = hn::MulAdd(hn::Set(f, group[i]), hn::Load(f, kPatterns.sign[i] + j), sum);
    }
    hn::Store(sum, f, entries + j);
  }
}

// table[group][entry]; columns past the end count as 0.
inline void BuildTable(const float* x, int64_t columns, int64_t column_words, float* table) {
  const int64_t groups = column_words * kGroupsPerWord;
  const int64_t whole = columns / kSignGroupColumns;
  for (int64_t g = 0; g < whole; ++g) {
    BuildGroup(x + g * kSignGroupColumns, table + g * kTableEntries);
  }
  for (int64_t g = whole; g < groups; ++g) {
    float group[kSignGroupColumns] = {};
    const int64_t first = g * kSignGroupColumns;
    for (int64_t i = first; i < columns; ++i) group[i - first] = x[i];
    BuildGroup(group, table + g * kTableEntries);
  }
}

// The table entries that the lowest (after the shift) four bits of every lane name.
template <int kShift>
struct GroupIndex {
#if HWY_MAX_BYTES >= 64
  explicit HWY_INLINE GroupIndex(WordVec words) : index_(hn::ShiftRight<kShift>(words)) {}

  HWY_INLINE FloatVec Lookup(const float* entries) const {
    const FloatTag f;
    return hn::TableLookupLanes(hn::Load(f, entries), LowBits(index_, 15));
  }
#elif HWY_MAX_BYTES == 32
  explicit HWY_INLINE GroupIndex(WordVec words)
      : index_(hn::ShiftRight<kShift>(words)),
        flip_(hn::And(hn::ShiftLeft<28 - kShift>(words),
                      hn::Set(hn::ScalableTag<uint32_t>(), 0x80000000u))) {}

  HWY_INLINE FloatVec Lookup(const float* entries) const {
    const FloatTag f;
    const FloatVec sum = hn::TableLookupLanes(hn::Load(f, entries), LowBits(index_, 7));
    return hn::Xor(sum, hn::BitCast(f, flip_));
  }
#else
  explicit HWY_INLINE GroupIndex(WordVec words) : index_(hn::ShiftRight<kShift>(words)) {}

  // Registers too small for a table: it is read in memory.
  HWY_INLINE FloatVec Lookup(const float* entries) const {
    const FloatTag f;
    const hn::ScalableTag<uint32_t> d32;
    HWY_ALIGN uint32_t index[kFloatLanes];
    HWY_ALIGN float sums[kFloatLanes];
    hn::Store(hn::And(index_, hn::Set(d32, 15)), d32, index);
    for (int i = 0; i < kFloatLanes; ++i) sums[i] = entries[index[i]];
    return hn::Load(f, sums);
  }
#endif

 private:
  // The lookup itself ignores higher bits; Highway's debug build insists.
  static HWY_INLINE auto LowBits(WordVec index, [[maybe_unused]] uint32_t mask) {
#if HWY_IS_DEBUG_BUILD
    index = hn::And(index, hn::Set(hn::ScalableTag<uint32_t>(), mask));
#endif
    return hn::IndicesFromVec(FloatTag(), index);
  }

  WordVec index_;
#if HWY_MAX_BYTES == 32
  WordVec flip_;
#endif
};

// Sums of kVectors registers of output rows x kTokens tokens of one variant.
template <int kVectors, int kTokens>
struct DeltaTile {
  FloatVec sums[kVectors][kTokens][2];

  HWY_INLINE void Clear() {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        sums[v][t][0] = hn::Zero(FloatTag());
        sums[v][t][1] = hn::Zero(FloatTag());
      }
    }
  }

  template <int kGroup>
  HWY_INLINE void Add(const WordVec (&words)[kVectors], const float* const (&tables)[kTokens],
                      int64_t entry) {
    if constexpr (kGroup < kGroupsPerWord) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const GroupIndex<kGroup * kSignGroupColumns> index(words[v]);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          FloatVec& sum = sums[v][t][kGroup % 2];
          sum = hn::Add(sum, index.Lookup(tables[t] + entry + kGroup * kTableEntries));
        }
      }
      Add<kGroup + 1>(words, tables, entry);
    }
  }
};

// y = y + alpha * sum for the lanes of one register of output rows that exist.
HWY_INLINE void AddScaled(FloatVec sum, const float* alpha, float* y, int64_t left) {
  const FloatTag f;
  const FloatVec scale = hn::Load(f, alpha);
  if (left >= kFloatLanes) {
    hn::StoreU(hn::MulAdd(scale, sum, hn::LoadU(f, y)), f, y);
    return;
  }
  if (left <= 0) return;
  HWY_ALIGN float tail[kFloatLanes] = {};
  std::memcpy(tail, y, left * sizeof(float));
  hn::Store(hn::MulAdd(scale, sum, hn::Load(f, tail)), f, tail);
  std::memcpy(y, tail, left * sizeof(float));
}

// Row blocks [block, block + kBlocks) for kTokens rows of the batch that share a variant. `next`:
// the words that will be read after these, to prefetch; there must be as many. Of `ahead`, a line
// is fetched with every word: the lookups take longer than the words' memory.
template <int kBlocks, int kTokens>
HWY_NOINLINE void DeltaBlocks(const PlannedRow* rows, int64_t plane, int64_t block,
                              const uint32_t* next, WeightAhead& ahead) {
  constexpr int kVectors = kBlocks * kVectorsPerBlock;
  const PackedSigns::Layout& signs = *rows[0].signs;
  const hn::ScalableTag<uint32_t> d32;
  const uint32_t* words[kVectors];
  const float* tables[kTokens];
  for (int v = 0; v < kVectors; ++v) {
    words[v] =
        signs.block(plane, block + v / kVectorsPerBlock) + v % kVectorsPerBlock * kFloatLanes;
  }
  for (int t = 0; t < kTokens; ++t) tables[t] = rows[t].table;
  DeltaTile<kVectors, kTokens> tile;
  tile.Clear();
  for (int64_t w = 0; w < signs.column_words; ++w) {
    WordVec loaded[kVectors];
    ahead.Fetch(1);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      __builtin_prefetch(next + (w * kBlocks + b) * kSignBlockRows, 0, 2);  // into L2
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) loaded[v] = hn::Load(d32, words[v] + w * kSignBlockRows);
    tile.template Add<0>(loaded, tables, w * kGroupsPerWord * kTableEntries);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const int64_t o = block * kSignBlockRows + v * kFloatLanes;
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      AddScaled(hn::Add(tile.sums[v][t][0], tile.sums[v][t][1]), signs.scales(plane) + o,
                rows[t].y + o, signs.d_out - o);
    }
  }
}

inline constexpr int kDeltaBlocks = HWY_MAX_BYTES >= 64 ? 4 : 2;   // for one token
inline constexpr int kSharedTokens = HWY_MAX_BYTES >= 64 ? 4 : 2;  // of one variant
inline constexpr int kSharedBlocks = HWY_MAX_BYTES >= 64 ? 2 : 1;

// Row blocks [begin, end) of a plane, kTokens rows of one variant, kBlocks blocks at a time.
// `then`: the words whose turn is next.
template <int kBlocks, int kTokens>
void DeltaRange(const PlannedRow* rows, int64_t plane, int64_t begin, int64_t end,
                const uint32_t* then, WeightAhead& ahead) {
  const PackedSigns::Layout& signs = *rows[0].signs;
  int64_t b = begin;
  for (; b + kBlocks <= end; b += kBlocks) {
    const bool more = b + 2 * kBlocks <= end;
    DeltaBlocks<kBlocks, kTokens>(rows, plane, b, more ? signs.block(plane, b + kBlocks) : then,
                                  ahead);
  }
  for (; b < end; ++b) DeltaBlocks<1, kTokens>(rows, plane, b, then, ahead);
}

// Row blocks [begin, end) of a plane for `count` rows of the batch, all of one variant.
inline void DeltaRows(const PlannedRow* rows, int64_t count, int64_t plane, int64_t begin,
                      int64_t end, const uint32_t* then, WeightAhead& ahead) {
  for (; count >= kSharedTokens; rows += kSharedTokens, count -= kSharedTokens) {
    DeltaRange<kSharedBlocks, kSharedTokens>(rows, plane, begin, end, then, ahead);
  }
  for (; count > 0; ++rows, --count) {
    DeltaRange<kDeltaBlocks, 1>(rows, plane, begin, end, then, ahead);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#endif  // per target
