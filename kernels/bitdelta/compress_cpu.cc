// bitdelta_compress on the CPU.
//
//   delta = fine_tuned - base;  bit = delta >= 0;  alpha = mean |delta|        (compress.h)
//
// One pass, 32 columns at a time: they fill one 32-bit word of signs and one step of the 32 float64
// partial sums that fix the result (compress_row.h). A thread takes a block of rows; the rows' sums
// meet in FinishCompress, in the order of rows.
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/bitdelta/compress.h"
#include "kernels/bitdelta/compress_row.h"
#include "kernels/bitdelta/signs.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bitdelta/compress_cpu.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/bitdelta/weight_load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The sums of one row, kept in registers over its chunks.
class RowSums {
 public:
  static constexpr int kChunk = kCompressLanes;  // columns a step

  RowSums() : max_(hn::Zero(kF)) {
#pragma GCC unroll 16
    for (int i = 0; i < kDoubles; ++i) abs_[i] = square_[i] = hn::Zero(kD);
  }

  // Takes 32 columns and returns their sign bits.
  template <class BaseT, class TunedT>
  uint32_t Add(const BaseT* HWY_RESTRICT base, const TunedT* HWY_RESTRICT tuned) {
    uint32_t word = 0;
    uint32_t same = 0;
    const auto limit = hn::Set(kF, std::numeric_limits<float>::max());
#pragma GCC unroll 8
    for (int i = 0; i < kFloats; ++i) {
      const auto fine = LoadAsFloat(kF, tuned + i * kLanes);
      const auto delta = hn::Sub(fine, LoadAsFloat(kF, base + i * kLanes));
      auto size = hn::Abs(delta);
      word |= Bits(hn::Ge(delta, hn::Zero(kF))) << (i * kLanes);
      same |= Bits(hn::Eq(delta, hn::Zero(kF))) << (i * kLanes);  // NaN is not
      const auto finite = hn::Le(size, limit);
      if (HWY_UNLIKELY(!hn::AllTrue(kF, finite))) {
        non_finite_ += kLanes - hn::CountTrue(kF, hn::Le(hn::Abs(fine), limit));
        size = hn::IfThenElseZero(finite, size);
      }
      max_ = hn::Max(max_, size);
      AddWide(2 * i, hn::PromoteTo(kD, hn::LowerHalf(kHalf, size)));
      AddWide(2 * i + 1, hn::PromoteTo(kD, hn::UpperHalf(kHalf, size)));
    }
    changed_ += kChunk - static_cast<int64_t>(hwy::PopCount(same));
    return word;
  }

  CompressedRow Finish() const {
    alignas(64) double lanes[kCompressLanes];
    CompressedRow row;
    for (int i = 0; i < kDoubles; ++i) hn::Store(abs_[i], kD, lanes + i * kLanes / 2);
    row.sum_abs = SumLanes(lanes);
    for (int i = 0; i < kDoubles; ++i) hn::Store(square_[i], kD, lanes + i * kLanes / 2);
    row.sum_square = SumLanes(lanes);
    row.max_abs = hn::GetLane(hn::MaxOfLanes(kF, max_));
    row.changed = changed_;
    row.non_finite = non_finite_;
    return row;
  }

 private:
  static constexpr hn::ScalableTag<float> kF{};
  static constexpr hn::ScalableTag<double> kD{};
  static constexpr hn::Half<hn::ScalableTag<float>> kHalf{};
  static constexpr int kLanes = hn::MaxLanes(kF);
  static constexpr int kFloats = kChunk / kLanes;
  static constexpr int kDoubles = 2 * kFloats;

  template <class Mask>
  static uint32_t Bits(Mask mask) {
    uint8_t bytes[8] = {};
    hn::StoreMaskBits(kF, mask, bytes);
    uint32_t bits;
    std::memcpy(&bits, bytes, sizeof bits);
    return bits;
  }

  template <class V>
  HWY_INLINE void AddWide(int i, V size) {
    abs_[i] = hn::Add(abs_[i], size);
    square_[i] = hn::MulAdd(size, size, square_[i]);
  }

  hn::Vec<hn::ScalableTag<double>> abs_[kDoubles];
  hn::Vec<hn::ScalableTag<double>> square_[kDoubles];
  hn::Vec<hn::ScalableTag<float>> max_;
  int64_t changed_ = 0;
  int64_t non_finite_ = 0;
};

template <class BaseT, class TunedT>
CompressedRow CompressRow(const BaseT* base, const TunedT* tuned, int64_t d_in, uint8_t* signs) {
  constexpr int kChunk = RowSums::kChunk;
  RowSums sums;
  int64_t c = 0;
  for (; c + kChunk <= d_in; c += kChunk) {
    const uint32_t word = sums.Add(base + c, tuned + c);
    std::memcpy(signs + c / 8, &word, sizeof word);
  }
  if (c < d_in) {  // pad with equal elements: they add nothing, and their bits are cut off
    const int64_t rest = d_in - c;
    BaseT base_tail[kChunk] = {};
    TunedT tuned_tail[kChunk] = {};
    std::memcpy(base_tail, base + c, rest * sizeof(BaseT));
    std::memcpy(tuned_tail, tuned + c, rest * sizeof(TunedT));
    const uint32_t word = sums.Add(base_tail, tuned_tail) & ((uint32_t{1} << rest) - 1);
    std::memcpy(signs + c / 8, &word, SignRowBytes(d_in) - c / 8);
  }
  return sums.Finish();
}

void CompressRows(const CompressArgs& args, int64_t begin, int64_t end, CompressedRow* rows) {
  const int64_t d_in = args.base.cols;
  WithWeightType(args.base.dtype, [&](auto base_type) {
    WithWeightType(args.fine_tuned.dtype, [&](auto tuned_type) {
      using BaseT = decltype(base_type);
      using TunedT = decltype(tuned_type);
      for (int64_t r = begin; r < end; ++r) {
        rows[r] = CompressRow(static_cast<const BaseT*>(args.base.row(r)),
                              static_cast<const TunedT*>(args.fine_tuned.row(r)), d_in,
                              args.signs.data() + r * SignRowBytes(d_in));
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
