// 128 columns of 8 rows of W against up to 32 tokens, with their signs: the loop of
// linear_columns_cpu.cc. Included once per SIMD target.
#include <cstdint>
#include <cstring>

#include "kernels/bitdelta/packed_signs.h"

#if defined(STOCKPOT_LINEAR_COLUMNS_TILE_TOGGLE) == defined(HWY_TARGET_TOGGLE)
#ifdef STOCKPOT_LINEAR_COLUMNS_TILE_TOGGLE
#undef STOCKPOT_LINEAR_COLUMNS_TILE_TOGGLE
#else
#define STOCKPOT_LINEAR_COLUMNS_TILE_TOGGLE
#endif

#include <hwy/highway.h>

#include "kernels/bitdelta/linear_columns_table-inl.h"

#if STOCKPOT_LINEAR_PAIRS

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int kColumnRows = 8;  // of a tile
inline constexpr int kSignRows = 4;    // of a tile, whose signs are summed at a time
inline constexpr int64_t kWordBytes = kSignWordColumns / 8;
inline constexpr int64_t kBlockBytes = kSignBlockRows * kWordBytes;  // words of 16 rows
inline constexpr int64_t kRunWords = kRunColumns / kSignWordColumns;

// What a tile reads.
struct ColumnTileRows {
  const BF16Pair* weights = nullptr;  // [8][128]
  const uint8_t* signs = nullptr;     // a byte a group: [4 words][16 rows, of which 8][4]
  const float* alpha = nullptr;       // [8]
};

// partial[row][vector][token] += 128 columns of the pairs (where kPairs) and of a plane of signs,
// looked up in a table of Sums<kVectors>.
template <template <int> class Sums, int kVectors, bool kPairs>
HWY_NOINLINE void ColumnTile(const ColumnTileRows& rows, const float* HWY_RESTRICT x,
                             const typename Sums<kVectors>::Entry* HWY_RESTRICT table,
                             const float* HWY_RESTRICT steps, float* HWY_RESTRICT partial,
                             bool first) {
  using Table = Sums<kVectors>;
  const FloatTag f;
  const typename Table::Tag d;
  const hn::ScalableTag<uint32_t> d32;
  constexpr int64_t kRowFloats = kVectors * kColumnLanes;
  constexpr int64_t kGroupLanes = kColumnEntries * Table::kEntryLanes;
  constexpr int64_t kLanes = Table::kEntryLanes / Table::kRegisters;
  constexpr int kHalves = kColumnRows / kSignRows;
  constexpr int64_t kSteps = kColumnGroups / kHalves;  // of a half: 4 pairs, 2 groups of its rows
  constexpr int kLookups = 2 * kSignRows / 4;          // beside a pair
  FloatVec sums[kColumnRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kColumnRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* p = partial + r * kRowFloats + v * kColumnLanes;
      sums[r][v] = first ? hn::Zero(f) : hn::Load(f, p);
      __builtin_prefetch(p + kColumnRows * kRowFloats, 0, 3);  // of the next tile
    }
  }
  const BF16Pair* weights = rows.weights;
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) {
    typename Table::Vec signs[kSignRows][Table::kRegisters];
#pragma GCC unroll 4
    for (int r = 0; r < kSignRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < Table::kRegisters; ++i) signs[r][i] = hn::Zero(d);
    }
    const uint8_t* patterns = rows.signs + half * kSignRows * kWordBytes;
    const typename Table::Entry* entries = table;
#pragma GCC unroll 1
    for (int64_t step = 0; step < kSteps; ++step) {
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) {
        if constexpr (kPairs) {
          FloatVec xs[kVectors];
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            xs[v] = hn::Load(f, x + v * kVectorPairs + p * kColumnLanes);
          }
#pragma GCC unroll 8
          for (int r = 0; r < kColumnRows; ++r) {
            uint32_t pair;
            std::memcpy(&pair, weights + r * kRunColumns + 2 * p, sizeof pair);
            const FloatVec w = hn::BitCast(f, hn::Set(d32, pair));
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[r][v] = DotPairs(w, xs[v], sums[r][v]);
          }
        }
#pragma GCC unroll 4
        for (int i = p * kLookups; i < (p + 1) * kLookups; ++i) {
          const int r = i % kSignRows;
          const int group = i / kSignRows;
          const typename Table::Entry* entry =
              entries + group * kGroupLanes + patterns[r * kWordBytes + group] * Table::kEntryLanes;
#pragma GCC unroll 4
          for (int j = 0; j < Table::kRegisters; ++j) {
            signs[r][j] = hn::Add(signs[r][j], hn::Load(d, entry + j * kLanes));
          }
        }
      }
      weights += 8;
      x += 4 * kColumnLanes;
      patterns += step % 2 == 0 ? 2 : kBlockBytes - 2;  // the next word
      entries += 2 * kGroupLanes;
    }
#pragma GCC unroll 4
    for (int r = 0; r < kSignRows; ++r) {
      const FloatVec alpha = hn::Set(f, rows.alpha[half * kSignRows + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        FloatVec& sum = sums[half * kSignRows + r][v];
        sum = Table::AddTo(sum, alpha, signs[r], v, steps);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kColumnRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(sums[r][v], f, partial + r * kRowFloats + v * kColumnLanes);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#endif  // STOCKPOT_LINEAR_PAIRS
#endif  // STOCKPOT_LINEAR_COLUMNS_TILE_TOGGLE
