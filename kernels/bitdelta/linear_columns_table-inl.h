// Sums of +-x over 8 columns for every pattern of signs, for a block of 128 columns and up to 32
// tokens: a part of linear_columns_cpu.cc. Included once per SIMD target.
//
//   table[group][pattern][vector][token] = sum over the group's 8 columns of +x where the pattern's
//                                          bit is 1, -x where it is 0; patterns as PackedSigns has
//                                          them
//
// FloatSums keeps them in float32. ShortSums counts in steps of sum |x| / 32700, a step for each
// token and block, so that the sum of all entries fits into 16 bits: half the bytes, twice the
// tokens an addition. An entry is two rounded sums of four columns. Rounded to the nearest, they
// would err alike where x is constant and the signs agree, and the errors of a long row add up; so
// each four columns add a fraction of a step of their own before they are rounded (non-subtractive
// dither; Gray and Stockham, 1993): whatever x is, errors have the mean 0, and the variance 1/6 of
// a squared step over all fractions (1/12 without dither, 1/4 at most). A step is at most sqrt(128)
// / 32700 of |x| over the block (Cauchy-Schwarz), there are 32 rounded sums, so the sum over any
// number of columns errs by at most
//
//   kShortError = 8e-4 of |x|, Euclidean norm, standard deviation;
//
// 6.4e-4 for Gaussian x. bf16 has rounded x itself by 1.1e-3.
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
// [token], of a block that begins at column c0, and `steps`, [vector][token], if it counts in
// steps; AddTo is alpha times the sum of entries, of vector v, added to `sum`.
template <int kVectors>
struct FloatSums {
  using Tag = FloatTag;
  using Vec = FloatVec;
  using Entry = float;
  static constexpr int kRegisters = kVectors;
  static constexpr int64_t kEntryLanes = kRegisters * kColumnLanes;

  static HWY_NOINLINE void Build(const float* HWY_RESTRICT x, int64_t /*c0*/,
                                 float* HWY_RESTRICT table, float* HWY_RESTRICT /*steps*/) {
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

inline constexpr double kShortError = 8e-4;
inline constexpr float kShortRange = 32700.0f;  // in steps; 32 sums that are off by 1 fit beside

using ShortTag = hn::ScalableTag<int16_t>;
using ShortVec = hn::Vec<ShortTag>;
inline constexpr int64_t kShortLanes = 2 * kColumnLanes;  // two vectors of tokens, interleaved

// What the x of 16 tokens is counted in over a block. x is multiplied by `scale`, a power of 2, and
// by `inverse`: 1 / step alone would overflow where x is tiny.
struct ColumnStep {
  FloatVec step;
  FloatVec scale;
  FloatVec inverse;
};

inline ColumnStep StepOf(const float* x) {
  constexpr float kDown = 0x1p-7f, kUp = 0x1p64f;  // the sum of 128 finite numbers is finite
  const FloatTag f;
  const FloatVec down = hn::Set(f, kDown);
  FloatVec sum = hn::Zero(f);
  for (int64_t p = 0; p < kColumnPairs; ++p) {
    const FloatVec pair = hn::Load(f, x + p * kColumnLanes);
    sum = hn::MulAdd(down, hn::Abs(EvenColumn(pair)), sum);
    sum = hn::MulAdd(down, hn::Abs(OddColumn(pair)), sum);
  }
  const FloatVec scale =
      hn::IfThenElse(hn::Lt(sum, hn::Set(f, 0x1p-40f)), hn::Set(f, kUp), hn::Set(f, 1.0f));
  const FloatVec inverse = hn::Div(hn::Set(f, kShortRange * kDown), hn::Mul(scale, sum));
  return {.step = hn::Mul(sum, hn::Set(f, 1.0f / (kShortRange * kDown))),
          .scale = scale,
          .inverse = hn::IfThenElseZero(hn::Gt(sum, hn::Zero(f)), inverse)};
}

// The part of a step that the four columns from c on add before they are rounded, in [-1/2, 1/2):
// multiples of the golden ratio, which no period of x resonates with.
inline float Dither(int64_t c) {
  const auto turn = static_cast<int32_t>(static_cast<uint32_t>(c / 4) * 0x9E3779B9u);
  return static_cast<float>(turn) * 0x1p-32f;
}

// Sums of +-x over 4 columns for all 16 patterns, as PackedSigns has them: those with the last
// column are the others' negatives. In steps, of one vector of tokens or of two. x: the first pair
// of the first vector.
template <int kCount>
HWY_INLINE void SumsOfFour(const float* x, const ColumnStep (&steps)[2], float dither,
                           int16_t* sums) {
  const FloatTag f;
  const ShortTag s;
  FloatVec first[2][4];  // of two columns
  FloatVec last[2][2];
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const float* pairs = x + v * kVectorPairs;
    const FloatVec pair0 = v < kCount ? hn::Load(f, pairs) : hn::Zero(f);
    const FloatVec pair1 = v < kCount ? hn::Load(f, pairs + kColumnLanes) : hn::Zero(f);
    const auto count = [&](FloatVec x_of_column) HWY_ATTR {
      return hn::Mul(steps[v].inverse, hn::Mul(steps[v].scale, x_of_column));
    };
    const FloatVec a = count(EvenColumn(pair0));
    const FloatVec b = count(OddColumn(pair0));
    const FloatVec c = count(EvenColumn(pair1));
    const FloatVec d = count(OddColumn(pair1));
    first[v][3] = hn::Add(a, b);
    first[v][1] = hn::Sub(a, b);
    first[v][0] = hn::Neg(first[v][3]);
    first[v][2] = hn::Neg(first[v][1]);
    const FloatVec rounding = hn::Set(f, dither);
    last[v][1] = hn::Add(rounding, hn::Sub(c, d));
    last[v][0] = hn::Sub(rounding, hn::Add(c, d));
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
  static_assert(kVectors <= 2);
  using Tag = ShortTag;
  using Vec = ShortVec;
  using Entry = int16_t;
  static constexpr int kRegisters = 1;
  static constexpr int64_t kEntryLanes = kShortLanes;

  static HWY_NOINLINE void Build(const float* HWY_RESTRICT x, int64_t c0,
                                 int16_t* HWY_RESTRICT table, float* HWY_RESTRICT steps) {
    const FloatTag f;
    const ShortTag s;
    HWY_ALIGN int16_t low[16 * kShortLanes];
    HWY_ALIGN int16_t high[16 * kShortLanes];
    ColumnStep of_vector[2] = {{hn::Zero(f), hn::Zero(f), hn::Zero(f)},
                               {hn::Zero(f), hn::Zero(f), hn::Zero(f)}};
    for (int v = 0; v < kVectors; ++v) {
      of_vector[v] = StepOf(x + v * kVectorPairs);
      hn::Store(of_vector[v].step, f, steps + v * kColumnLanes);
    }
    for (int64_t g = 0; g < kColumnGroups; ++g, x += 4 * kColumnLanes) {
      const int64_t c = c0 + 8 * g;
      SumsOfFour<kVectors>(x, of_vector, Dither(c), low);
      SumsOfFour<kVectors>(x + 2 * kColumnLanes, of_vector, Dither(c + 4), high);
      for (int h = 0; h < 16; ++h) {
        const ShortVec sum = hn::Load(s, high + h * kShortLanes);
#pragma GCC unroll 16
        for (int l = 0; l < 16; ++l, table += kShortLanes) {
          hn::Store(hn::Add(sum, hn::Load(s, low + l * kShortLanes)), s, table);
        }
      }
    }
  }

  static HWY_INLINE FloatVec AddTo(FloatVec sum, FloatVec alpha, const Vec (&signs)[kRegisters],
                                   int v, const float* steps) {
    const FloatVec scale = hn::Mul(alpha, hn::Load(FloatTag(), steps + v * kColumnLanes));
    return hn::MulAdd(scale, Widen(signs[0], v), sum);
  }

 private:
  // Vector 0 or 1 of the two that ReorderDemote2To has interleaved.
  static HWY_INLINE FloatVec Widen(ShortVec both, int vector) {
    const hn::ScalableTag<int32_t> d32;
    const ShortVec twice = vector == 0 ? hn::InterleaveLower(ShortTag(), both, both)
                                       : hn::InterleaveUpper(ShortTag(), both, both);
    return hn::ConvertTo(FloatTag(), hn::ShiftRight<16>(hn::BitCast(d32, twice)));
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#endif  // STOCKPOT_LINEAR_PAIRS
#endif  // STOCKPOT_LINEAR_COLUMNS_TABLE_TOGGLE
