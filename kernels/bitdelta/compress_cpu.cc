// bitdelta_compress on the CPU.
//
//   delta = fine_tuned - base;  bit = delta >= 0;  alpha = mean |delta|        (compress.h)
//
// One pass, 32 columns at a time: they fill one 32-bit word of signs and one step of the 32 float64
// partial sums that fix the result (compress_row.h). A thread takes a block of rows; the rows' sums
// meet in FinishCompress, in the order of rows.
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/bitdelta/compress.h"
#include "kernels/bitdelta/compress_row.h"
#include "kernels/bitdelta/signs.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bitdelta/compress_cpu.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/bitdelta/weight_load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kChunk = kCompressLanes;  // columns a step

// 2 * Lanes(kF) consecutive columns as float32, in an order that is cheap to make. The order moves
// partial sums between registers and changes none of them; RowSums knows it.
template <class V>
struct FloatPair {
  V first, second;
};

// Both sides bf16: even columns, odd columns. A bf16 is the upper half of its float32, so a vector
// of 32-bit words becomes two of floats by one shift and one mask.
template <class D>
HWY_INLINE FloatPair<hn::Vec<D>> LoadEvenOdd(D d, const BF16* p) {
  const hn::RebindToUnsigned<D> d32;
  const hn::Repartition<uint16_t, D> d16;
  const auto words = hn::BitCast(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  return {hn::BitCast(d, hn::ShiftLeft<16>(words)),
          hn::BitCast(d, hn::And(words, hn::Set(d32, 0xFFFF0000u)))};
}

// Else: the first half, the second half.
template <class D, class T>
HWY_INLINE FloatPair<hn::Vec<D>> LoadHalves(D d, const T* p) {
  return {LoadAsFloat(d, p), LoadAsFloat(d, p + hn::MaxLanes(d))};
}

// The lowest MaxLanes(d) bits: one a lane.
template <class D, class Mask>
HWY_INLINE uint32_t MaskBits(D d, Mask mask) {
  constexpr int kBits = hn::MaxLanes(d);
  using Word = std::conditional_t<(kBits > 16), uint32_t,
                                  std::conditional_t<(kBits > 8), uint16_t, uint8_t>>;
  uint8_t bytes[8];
  hn::StoreMaskBits(d, mask, bytes);
  Word word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// The sums of one row, kept in registers over its chunks. A row is taken as if all of it were
// finite, which costs no test a chunk; if Finish says that it is not, it is taken again with
// kCareful.
template <class BaseT, class TunedT, bool kCareful>
class RowSums {
 public:
  // A lane counts in 32 bits: Flush() at least every so many columns.
  static constexpr int64_t kFlushColumns = int64_t{1} << 30;

  RowSums() : max_bits_(hn::Zero(kI)), equal_(hn::Zero(kI)) {
#pragma GCC unroll 16
    for (int i = 0; i < kDoubles; ++i) abs_[i] = square_[i] = hn::Zero(kD);
  }

  // Takes 32 columns and returns their sign bits.
  HWY_INLINE uint32_t Add(const BaseT* HWY_RESTRICT base, const TunedT* HWY_RESTRICT tuned) {
    uint32_t word = 0;
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      const auto fine = Load(tuned + i * kPairColumns);
      const auto origin = Load(base + i * kPairColumns);
      const auto first = hn::Sub(fine.first, origin.first);
      const auto second = hn::Sub(fine.second, origin.second);
      AddVector(4 * i, first);
      AddVector(4 * i + 2, second);
      word |= SignBits(first, second) << (i * kPairColumns % kChunk);
    }
    return word;
  }

  // Moves the counts of equal elements out of their 32-bit lanes.
  void Flush() {
    alignas(64) int32_t lanes[kLanes];
    hn::Store(equal_, kI, lanes);
    for (const int32_t count : lanes) equal_count_ += count;
    equal_ = hn::Zero(kI);
  }

  // False, and `row` unspecified, if a delta was not finite and this is not the careful one.
  // `columns` counts what was added, padding included.
  bool Finish(int64_t columns, CompressedRow& row) {
    constexpr int32_t kInfinity = 0x7F800000;
    const int32_t max_bits = hn::GetLane(hn::MaxOfLanes(kI, max_bits_));
    if (!kCareful && max_bits >= kInfinity) return false;
    Flush();
    row.max_abs = hn::GetLane(hn::BitCast(kF, hn::Set(kI, max_bits)));
    row.changed = columns - equal_count_;
    row.non_finite = non_finite_;
    row.sum_abs = SumInOrder(abs_);
    row.sum_square = SumInOrder(square_);
    return true;
  }

 private:
  static constexpr hn::ScalableTag<float> kF{};
  static constexpr hn::ScalableTag<int32_t> kI{};
  static constexpr hn::ScalableTag<int16_t> kI16{};
  static constexpr hn::ScalableTag<double> kD{};
  static constexpr hn::Half<hn::ScalableTag<float>> kHalf{};
  static constexpr int kLanes = hn::MaxLanes(kF);
  static constexpr int kPairColumns = 2 * kLanes;
  static constexpr int kPairs = kChunk / kPairColumns;
  static constexpr int kDoubles = 4 * kPairs;  // of a pair: lower and upper half of each vector
  static constexpr bool kEvenOdd = std::is_same_v<BaseT, BF16> && std::is_same_v<TunedT, BF16>;
  using Floats = hn::Vec<hn::ScalableTag<float>>;
  using Integers = hn::Vec<hn::ScalableTag<int32_t>>;
  using Doubles = hn::Vec<hn::ScalableTag<double>>;

  template <class T>
  static HWY_INLINE FloatPair<Floats> Load(const T* p) {
    if constexpr (kEvenOdd) {
      return LoadEvenOdd(kF, p);
    } else {
      return LoadHalves(kF, p);
    }
  }

  // Bit c: column c of the pair has delta >= 0.
  static HWY_INLINE uint32_t SignBits(Floats first, Floats second) {
    const auto a = hn::Ge(first, hn::Zero(kF));
    const auto b = hn::Ge(second, hn::Zero(kF));
    if constexpr (kEvenOdd) {  // a mask fills its 32 bits: one of 16 bits a column, in order
      const auto columns = hn::OddEven(hn::BitCast(kI16, hn::VecFromMask(kF, b)),
                                       hn::BitCast(kI16, hn::VecFromMask(kF, a)));
      return MaskBits(kI16, hn::MaskFromVec(columns));
    } else {
      return MaskBits(kF, a) | MaskBits(kF, b) << kLanes;
    }
  }

  HWY_INLINE void AddVector(int i, Floats delta) {
    auto size = hn::Abs(delta);
    equal_ = hn::Sub(equal_, hn::BitCast(kI, hn::VecFromMask(kF, hn::Eq(delta, hn::Zero(kF)))));
    if constexpr (kCareful) {
      const auto limit = hn::Set(kF, std::numeric_limits<float>::max());
      const auto finite = hn::Le(size, limit);
      non_finite_ += kLanes - static_cast<int64_t>(hn::CountTrue(kF, finite));
      size = hn::IfThenElseZero(finite, size);
    }
    // Without their sign, floats are ordered as integers are, and NaN is above infinity.
    max_bits_ = hn::Max(max_bits_, hn::BitCast(kI, size));
    AddDoubles(i, hn::PromoteTo(kD, hn::LowerHalf(kHalf, size)));
    AddDoubles(i + 1, hn::PromoteTo(kD, hn::UpperHalf(kHalf, size)));
  }

  HWY_INLINE void AddDoubles(int i, Doubles size) {
    abs_[i] = hn::Add(abs_[i], size);
    square_[i] = hn::MulAdd(size, size, square_[i]);
  }

  // Brings the partial sums into the order of columns and folds them.
  static double SumInOrder(const Doubles* sums) {
    alignas(64) double lanes[kCompressLanes];
    for (int i = 0; i < kPairs; ++i) {
      const Doubles* s = sums + 4 * i;  // first: lower, upper; second: lower, upper
      double* out = lanes + i * kPairColumns;
      if constexpr (kEvenOdd) {
        hn::StoreInterleaved2(s[0], s[2], kD, out);
        hn::StoreInterleaved2(s[1], s[3], kD, out + kLanes);
      } else {
        for (int j = 0; j < 4; ++j) hn::Store(s[j], kD, out + j * kLanes / 2);
      }
    }
    return SumLanes(lanes);
  }

  Doubles abs_[kDoubles];
  Doubles square_[kDoubles];
  Integers max_bits_;
  Integers equal_;
  int64_t equal_count_ = 0;
  int64_t non_finite_ = 0;
};

// The loads run ahead of the arithmetic: the processor's own prefetch stops at the end of a page.
template <class T>
HWY_INLINE void PrefetchAhead(const T* p) {
  constexpr int64_t kAheadBytes = 2048;
  const char* ahead = reinterpret_cast<const char*>(p) + kAheadBytes;
  for (size_t line = 0; line < kChunk * sizeof(T); line += 64) hwy::Prefetch(ahead + line);
}

template <bool kCareful, class BaseT, class TunedT>
bool TryCompressRow(const BaseT* base, const TunedT* tuned, int64_t d_in, uint8_t* signs,
                    CompressedRow& row) {
  RowSums<BaseT, TunedT, kCareful> sums;
  const int64_t whole = d_in / kChunk * kChunk;
  int64_t c = 0;
  while (c < whole) {
    const int64_t end = std::min(whole, c + sums.kFlushColumns);
    for (; c < end; c += kChunk) {
      PrefetchAhead(base + c);
      PrefetchAhead(tuned + c);
      const uint32_t word = sums.Add(base + c, tuned + c);
      std::memcpy(signs + c / 8, &word, sizeof word);
    }
    sums.Flush();
  }
  if (c < d_in) {  // pad with equal elements: they add nothing, and their bits are cut off
    const int64_t rest = d_in - c;
    BaseT base_tail[kChunk] = {};
    TunedT tuned_tail[kChunk] = {};
    std::memcpy(base_tail, base + c, rest * sizeof(BaseT));
    std::memcpy(tuned_tail, tuned + c, rest * sizeof(TunedT));
    const uint32_t word = sums.Add(base_tail, tuned_tail) & ((uint32_t{1} << rest) - 1);
    std::memcpy(signs + c / 8, &word, SignRowBytes(d_in) - c / 8);
    c += kChunk;
  }
  return sums.Finish(c, row);
}

template <class BaseT, class TunedT>
void CompressRow(const BaseT* base, const TunedT* tuned, int64_t d_in, uint8_t* signs,
                 CompressedRow& row) {
  if (TryCompressRow<false>(base, tuned, d_in, signs, row)) return;
  TryCompressRow<true>(base, tuned, d_in, signs, row);
}

void CompressRows(const CompressArgs& args, int64_t begin, int64_t end, CompressedRow* rows) {
  const int64_t d_in = args.base.cols;
  WithWeightType(args.base.dtype, [&](auto base_type) {
    WithWeightType(args.fine_tuned.dtype, [&](auto tuned_type) {
      using BaseT = decltype(base_type);
      using TunedT = decltype(tuned_type);
      for (int64_t r = begin; r < end; ++r) {
        CompressRow(static_cast<const BaseT*>(args.base.row(r)),
                    static_cast<const TunedT*>(args.fine_tuned.row(r)), d_in,
                    args.signs.data() + r * SignRowBytes(d_in), rows[r]);
      }
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {
namespace {

HWY_EXPORT(CompressRows);

constexpr int64_t kRangeElements = 64 * 1024;  // of work handed to a thread at a time

}  // namespace

Result<DeltaStats> BitDeltaCompressCpu(const CompressArgs& args, ThreadPool& threads) {
  STOCKPOT_RETURN_IF_ERROR(CheckCompressArgs(args));
  const int64_t d_out = args.base.rows;
  const int64_t d_in = args.base.cols;
  std::vector<CompressedRow> rows(d_out);
  const int64_t grain = std::max<int64_t>(1, kRangeElements / std::max<int64_t>(1, d_in));
  threads.ParallelFor(d_out, grain, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(CompressRows)(args, begin, end, rows.data());
  });
  return FinishCompress(rows, d_in, args.alpha);
}

}  // namespace stockpot
#endif  // HWY_ONCE
