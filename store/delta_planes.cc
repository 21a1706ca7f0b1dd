#include "store/delta_planes.h"

#include <algorithm>
#include <numeric>

#include "kernels/base/aligned_buffer.h"
#include "kernels/bitdelta/signs.h"
#include "kernels/svd/low_rank.h"
#include "kernels/svd/panel_products.h"

namespace stockpot {
namespace {

constexpr int64_t kBlockElements = int64_t{4} << 20;  // of the delta, at a time
constexpr int64_t kGrainElements = int64_t{1} << 16;

int64_t Grain(int64_t cols) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, cols));
}

WeightMatrix RowsOf(const WeightMatrix& w, int64_t begin, int64_t end) {
  return {.data = w.row(begin),
          .dtype = w.dtype,
          .rows = end - begin,
          .cols = w.cols,
          .stride = w.stride};
}

// What alpha = mean |d| of each row leaves of `sum_square`, the squared norm of d.
double LeftOf(double sum_square, std::span<const float> alpha, int64_t cols) {
  double kept = 0;
  for (const float a : alpha) kept += static_cast<double>(a) * a * static_cast<double>(cols);
  return std::max(0.0, sum_square - kept);
}

// sum[r, c] += alpha[r] * sign[r, c] of rows of one plane.
void AddPlane(const SignPlane& plane, int64_t first_row, FloatMatrix sum, ThreadPool& threads) {
  const int64_t row_bytes = SignRowBytes(sum.cols);
  threads.ParallelFor(sum.rows, Grain(sum.cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float alpha = plane.alpha[static_cast<size_t>(first_row + r)];
      const uint8_t* const bits = plane.signs.data() + (first_row + r) * row_bytes;
      float* const out = sum.row(r);
      for (int64_t c = 0; c < sum.cols; ++c)
        out[c] += (bits[c / 8] >> (c % 8)) & 1 ? alpha : -alpha;
    }
  });
}

// delta[r, c] = tuned - base in float32.
void Subtract(const WeightMatrix& base, const WeightMatrix& tuned, FloatMatrix delta,
              ThreadPool& threads) {
  threads.ParallelFor(delta.rows, Grain(delta.cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const out = delta.row(r);
      const void* const from = base.row(r);
      const void* const to = tuned.row(r);
      for (int64_t c = 0; c < delta.cols; ++c) {
        out[c] = LoadWeight(to, tuned.dtype, c) - LoadWeight(from, base.dtype, c);
      }
    }
  });
}

WeightMatrix AsWeight(const FloatMatrix& m) {
  return {.data = m.data, .dtype = DType::kF32, .rows = m.rows, .cols = m.cols, .stride = m.stride};
}

}  // namespace

Result<DeltaPlanes> MakePlanes(const WeightMatrix& base, const WeightMatrix& tuned, int64_t planes,
                               ThreadPool& threads) {
  const int64_t rows = base.rows, cols = base.cols, row_bytes = SignRowBytes(cols);
  DeltaPlanes result;
  result.planes.resize(static_cast<size_t>(planes));
  for (SignPlane& plane : result.planes) {
    plane.signs.resize(static_cast<size_t>(SignBytes(rows, cols)));
    plane.alpha.resize(static_cast<size_t>(rows));
  }
  SignPlane& first = result.planes[0];
  STOCKPOT_ASSIGN_OR_RETURN(
      result.stats,
      BitDeltaCompressCpu(
          {.base = base, .fine_tuned = tuned, .signs = first.signs, .alpha = first.alpha},
          threads));
  first.left = LeftOf(result.stats.sum_square, first.alpha, cols);
  if (planes == 1) return result;
  const int64_t block = std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, cols));
  std::vector<float> delta(static_cast<size_t>(std::min(rows, block) * cols));
  std::vector<float> sum(delta.size());
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t count = std::min(block, rows - begin);
    const FloatMatrix d{.data = delta.data(), .rows = count, .cols = cols, .stride = cols};
    const FloatMatrix s{.data = sum.data(), .rows = count, .cols = cols, .stride = cols};
    Subtract(RowsOf(base, begin, begin + count), RowsOf(tuned, begin, begin + count), d, threads);
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (size_t p = 1; p < result.planes.size(); ++p) {
      AddPlane(result.planes[p - 1], begin, s, threads);
      SignPlane& plane = result.planes[p];
      const std::span<float> alpha =
          std::span(plane.alpha).subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
      STOCKPOT_ASSIGN_OR_RETURN(
          const DeltaStats stats,
          BitDeltaCompressCpu({.base = AsWeight(s),
                               .fine_tuned = AsWeight(d),
                               .signs = std::span(plane.signs)
                                            .subspan(static_cast<size_t>(begin * row_bytes),
                                                     static_cast<size_t>(count * row_bytes)),
                               .alpha = alpha},
                              threads));
      plane.left += LeftOf(stats.sum_square, alpha, cols);
    }
  }
  return result;
}

std::vector<uint16_t> DeltaResidual::FirstColumns(const std::vector<uint16_t>& b, int64_t full,
                                                  int64_t rank) {
  const int64_t rows = static_cast<int64_t>(b.size()) / full;
  std::vector<uint16_t> first;
  first.reserve(static_cast<size_t>(rows * rank));
  for (int64_t r = 0; r < rows; ++r) {
    first.insert(first.end(), b.begin() + r * full, b.begin() + r * full + rank);
  }
  return first;
}

DeltaResidual MakeResidual(const WeightMatrix& base, const WeightMatrix& tuned,
                           std::span<const SignPlane> planes, std::span<const int64_t> ranks,
                           std::string_view name, ThreadPool& threads) {
  const int64_t rows = base.rows, cols = base.cols, stride = PanelStride(cols);
  AlignedBuffer<float> memory, sums;
  FloatMatrix rest{
      .data = memory.Reserve(rows * stride), .rows = rows, .cols = cols, .stride = stride};
  FloatMatrix sum{
      .data = sums.Reserve(rows * stride), .rows = rows, .cols = cols, .stride = stride};
  std::fill_n(rest.data, rows * stride, 0.0f);
  std::fill_n(sum.data, rows * stride, 0.0f);
  Subtract(base, tuned, rest, threads);
  for (const SignPlane& plane : planes) AddPlane(plane, 0, sum, threads);
  for (int64_t i = 0; i < rows * stride; ++i) rest.data[i] -= sum.data[i];
  const int64_t full = ranks.back();
  const LowRank low = BestLowRank(name, rest, full, threads);
  DeltaResidual result;
  std::transform(low.a.begin(), low.a.end(), std::back_inserter(result.a), BF16FromFloat);
  std::transform(low.b.begin(), low.b.end(), std::back_inserter(result.b), BF16FromFloat);
  // Takes the ranks off one after another: each row leaves what it leaves.
  std::vector<double> left(static_cast<size_t>(rows) * ranks.size());
  threads.ParallelFor(rows, Grain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const row = rest.row(r);
      int64_t k = 0;
      for (size_t i = 0; i < ranks.size(); ++i) {
        for (; k < ranks[i]; ++k) {
          const float factor = FloatFromBF16(result.b[static_cast<size_t>(r * full + k)]);
          const uint16_t* const a = result.a.data() + k * cols;
          for (int64_t c = 0; c < cols; ++c) row[c] -= factor * FloatFromBF16(a[c]);
        }
        double square = 0;
        for (int64_t c = 0; c < cols; ++c) square += static_cast<double>(row[c]) * row[c];
        left[static_cast<size_t>(r) * ranks.size() + i] = square;
      }
    }
  });
  result.left.assign(ranks.size(), 0.0);
  for (size_t i = 0; i < left.size(); ++i) result.left[i % ranks.size()] += left[i];
  return result;
}

}  // namespace stockpot
