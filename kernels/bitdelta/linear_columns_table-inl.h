// Sums of +-x over 8 columns for every pattern of signs, for a block of 128 columns and up to 32
// tokens: a part of linear_columns_cpu.cc. Included once per SIMD target.
//
//   table[group][pattern][vector][token] = sum over the group's 8 columns of +x where the pattern's
//                                          bit is 1, -x where it is 0; patterns as PackedSigns has
//                                          them
//
// FloatSums keeps them in float32. ShortSums counts in steps of sum |x| / 32700, a step for each
// token and block, so that the sum of all entries fits into 16 bits: half the bytes, twice the
// tokens an addition. An entry is two rounded sums of four columns and errs by sqrt(1 / 6) of a
// step (standard deviation), 16 of them by sqrt(16 / 6). A step is at most sqrt(128) / 32700 of |x|
// over the block (Cauchy-Schwarz), so the sum over any number of columns errs by at most
//
//   kShortError = 5.7e-4 of |x|, Euclidean norm, standard deviation;
//
// 4.5e-4 for Gaussian x. That bf16 has rounded x is twice as much.
#include <cstdint>

#include "kernels/bitdelta/linear_columns.h"

#if defined(STOCKPOT_LINEAR_COLUMNS_TABLE_TOGGLE) == defined(HWY_TARGET_TOGGLE)
#ifdef STOCKPOT_LINEAR_COLUMNS_TABLE_TOGGLE
#undef STOCKPOT_LINEAR_COLUMNS_TABLE_TOGGLE
#else
#define STOCKPOT_LINEAR_COLUMNS_TABLE_TOGGLE
#endif

#include <hwy/highway.h>

#include "kernels/bitdelta/linear_base-inl.h"

#if STOCKPOT_LINEAR_PAIRS

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int64_t kColumnLanes = kRunTokens;
inline constexpr int64_t kColumnPairs = kRunColumns / 2;
inline constexpr int64_t kVectorPairs = kColumnPairs * kColumnLanes;  // of a vector of tokens
inline constexpr int64_t kColumnGroups = kRunColumns / 8;             // table lookups of a row
inline constexpr int64_t kColumnEntries = 256;
inline constexpr int kColumnVectors = 2;  // of a table at most

// The two columns of a pair as float32.
HWY_INLINE FloatVec EvenColumn(FloatVec pair) {
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::BitCast(hn::ScalableTag<uint32_t>(), pair)));
}
HWY_INLINE FloatVec OddColumn(FloatVec pair) {
  return hn::And(pair, hn::BitCast(FloatTag(), hn::Set(hn::ScalableTag<uint32_t>(), 0xffff0000u)));
}

// Where PackedSigns keeps a pattern of four columns (FoldSignGroups).
constexpr int FoldedPattern(int four) { return four < 8 ? four : four ^ 7; }

// Each of both: an entry is kRegisters vectors `Vec`; Build fills a table from x, [vector][pair]
// [token], and `steps`, [vector][token], if it counts in steps; AddTo is alpha times the sum of
// entries, of vector v, added to `sum`.
template <int kVectors>
struct FloatSums {
  using Tag = FloatTag;
  using Vec = FloatVec;
  using Entry = float;
  static constexpr int kRegisters = kVectors;
  static constexpr int64_t kEntryLanes = kRegisters * kColumnLanes;

  static HWY_NOINLINE void Build(const float* HWY_RESTRICT x, float* HWY_RESTRICT table,
                                 float* HWY_RESTRICT /*steps*/) {
    const FloatTag f;
    HWY_ALIGN float column[8][kVectors][kColumnLanes];
    HWY_ALIGN float low[8][kVectors][kColumnLanes];  // sums of the first three columns
    for (int64_t g = 0; g < kColumnGroups; ++g, table += kColumnEntries * kEntryLanes) {
      for (int v = 0; v < kVectors; ++v) {
        for (int p = 0; p < 4; ++p) {
          const FloatVec pair = hn::Load(f, x + v * kVectorPairs + (4 * g + p) * kColumnLanes);
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
        float* entry = table + (FoldedPattern(high >> 1) * 16 + 8 * fourth) * kEntryLanes;
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

  static HWY_INLINE FloatVec AddTo(FloatVec sum, FloatVec alpha, const Vec (&signs)[kRegisters],
                                   int v, const float* /*steps*/) {
    return hn::MulAdd(alpha, signs[v], sum);
  }
};

inline constexpr double kShortError = 5.66e-4;
inline constexpr float kShortRange = 32700.0f;  // in steps; 16 entries that are off by 1 fit beside

using ShortTag = hn::ScalableTag<int16_t>;
using ShortVec = hn::Vec<ShortTag>;
inline constexpr int64_t kShortLanes = 2 * kColumnLanes;  // two vectors of tokens, interleaved

// What the x of 16 tokens is counted in over a block, and its inverse; 0 where sum |x| is below
// 1.3e-34 and cannot be inverted.
struct ColumnStep {
  FloatVec step;
  FloatVec inverse;
};

inline ColumnStep StepOf(const float* x) {
  constexpr float kScale = 1.0f / 128, kLeast = 1e-36f;  // the sum of 128 finite numbers is finite
  const FloatTag f;
  const FloatVec scale = hn::Set(f, kScale);
  FloatVec sum = hn::Zero(f);
  for (int64_t p = 0; p < kColumnPairs; ++p) {
    const FloatVec pair = hn::Load(f, x + p * kColumnLanes);
    sum = hn::MulAdd(scale, hn::Abs(EvenColumn(pair)), sum);
    sum = hn::MulAdd(scale, hn::Abs(OddColumn(pair)), sum);
  }
  const FloatVec inverse = hn::Div(hn::Set(f, kShortRange * kScale), sum);
  return {.step = hn::Mul(sum, hn::Set(f, 1.0f / (kShortRange * kScale))),
          .inverse = hn::IfThenElseZero(hn::Gt(sum, hn::Set(f, kLeast)), inverse)};
}

// Sums of +-x over 4 columns for all 16 patterns, as PackedSigns has them: those with the last
// column are the others' negatives. In steps, of one vector of tokens or of two. x: the first pair
// of the first vector.
template <int kCount>
HWY_INLINE void SumsOfFour(const float* x, const FloatVec (&inverse)[2], int16_t* sums) {
  const FloatTag f;
  const ShortTag s;
  FloatVec first[2][4];  // of two columns
  FloatVec last[2][2];
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const float* pairs = x + v * kVectorPairs;
    const FloatVec pair0 = v < kCount ? hn::Load(f, pairs) : hn::Zero(f);
    const FloatVec pair1 = v < kCount ? hn::Load(f, pairs + kColumnLanes) : hn::Zero(f);
    const FloatVec a = hn::Mul(inverse[v], EvenColumn(pair0));
    const FloatVec b = hn::Mul(inverse[v], OddColumn(pair0));
    const FloatVec c = hn::Mul(inverse[v], EvenColumn(pair1));
    const FloatVec d = hn::Mul(inverse[v], OddColumn(pair1));
    first[v][3] = hn::Add(a, b);
    first[v][1] = hn::Sub(a, b);
    first[v][0] = hn::Neg(first[v][3]);
    first[v][2] = hn::Neg(first[v][1]);
    last[v][1] = hn::Sub(c, d);
    last[v][0] = hn::Neg(hn::Add(c, d));
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const ShortVec sum =
        hn::ReorderDemote2To(s, hn::NearestInt(hn::Add(first[0][i & 3], last[0][i >> 2])),
                             hn::NearestInt(hn::Add(first[1][i & 3], last[1][i >> 2])));
    hn::Store(sum, s, sums + i * kShortLanes);
    hn::Store(hn::Neg(sum), s, sums + (i + 8) * kShortLanes);
  }
}

template <int kVectors>
struct ShortSums {
  using Tag = ShortTag;
  using Vec = ShortVec;
  using Entry = int16_t;
  static constexpr int kRegisters = (kVectors + 1) / 2;
  static constexpr int64_t kEntryLanes = kRegisters * kShortLanes;

  static HWY_NOINLINE void Build(const float* HWY_RESTRICT x, int16_t* HWY_RESTRICT table,
                                 float* HWY_RESTRICT steps) {
    BuildVectors<0>(x, table, steps);
    if constexpr (kRegisters > 1) BuildVectors<1>(x, table, steps);
  }

  // Vector 0 or 1 of the two that ReorderDemote2To has interleaved.
  static HWY_INLINE FloatVec Widen(ShortVec both, int vector) {
    const hn::ScalableTag<int32_t> d32;
    const ShortVec twice = vector == 0 ? hn::InterleaveLower(ShortTag(), both, both)
                                       : hn::InterleaveUpper(ShortTag(), both, both);
    return hn::ConvertTo(FloatTag(), hn::ShiftRight<16>(hn::BitCast(d32, twice)));
  }

  static HWY_INLINE FloatVec AddTo(FloatVec sum, FloatVec alpha, const Vec (&signs)[kRegisters],
                                   int v, const float* steps) {
    const FloatVec scale = hn::Mul(alpha, hn::Load(FloatTag(), steps + v * kColumnLanes));
    return hn::MulAdd(scale, Widen(signs[v / 2], v % 2), sum);
  }

 private:
  // Entries of a register: vectors 2 r and, if there is one, 2 r + 1.
  template <int r>
  static HWY_INLINE void BuildVectors(const float* HWY_RESTRICT x, int16_t* HWY_RESTRICT table,
                                      float* HWY_RESTRICT steps) {
    constexpr int kCount = kVectors - 2 * r > 1 ? 2 : 1;
    const FloatTag f;
    const ShortTag s;
    HWY_ALIGN int16_t low[16 * kShortLanes];
    HWY_ALIGN int16_t high[16 * kShortLanes];
    x += 2 * r * kVectorPairs;
    FloatVec inverse[2] = {hn::Zero(f), hn::Zero(f)};
    for (int i = 0; i < kCount; ++i) {
      const ColumnStep step = StepOf(x + i * kVectorPairs);
      hn::Store(step.step, f, steps + (2 * r + i) * kColumnLanes);
      inverse[i] = step.inverse;
    }
    for (int64_t g = 0; g < kColumnGroups; ++g, x += 4 * kColumnLanes) {
      SumsOfFour<kCount>(x, inverse, low);
      SumsOfFour<kCount>(x + 2 * kColumnLanes, inverse, high);
      int16_t* entries = table + g * kColumnEntries * kEntryLanes + r * kShortLanes;
      for (int h = 0; h < 16; ++h) {
        const ShortVec sum = hn::Load(s, high + h * kShortLanes);
#pragma GCC unroll 16
        for (int l = 0; l < 16; ++l, entries += kEntryLanes) {
          hn::Store(hn::Add(sum, hn::Load(s, low + l * kShortLanes)), s, entries);
        }
      }
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#endif  // STOCKPOT_LINEAR_PAIRS
#endif  // STOCKPOT_LINEAR_COLUMNS_TABLE_TOGGLE
