// One accumulator an element (AddPanelProduct) or two vectors a row (PanelMatVec), which walk the
// terms in order; a tile is 6 rows x 2 vectors, or 1 x 8: as many chains hide the latency of the
// FMA in 16 registers too. PanelSymmetricMatVec takes a few rows at a time: what it loads of A it
// uses twice, for the sums of these rows and for what their columns add to all that come after.
#include "kernels/svd/panel_products.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/svd/panel_products.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using PanelTag = hn::CappedTag<float, kPanelAlign>;
using PanelVec = hn::Vec<PanelTag>;
inline constexpr int kTileRows = 6;
inline constexpr int kTileVectors = 2;
inline constexpr int kSingleRowVectors = 8;
inline constexpr int kSymmetricRows = HWY_MAX_BYTES >= 64 || HWY_ARCH_ARM_A64 ? 8 : 4;

HWY_INLINE int64_t Down(int64_t column) { return column / kPanelAlign * kPanelAlign; }

template <int kRows>
HWY_INLINE void MatVecRows(const float* a, int64_t stride, int64_t begin, int64_t end,
                           const float* v, float* y) {
  const PanelTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  PanelVec sums[kRows][2];
  for (auto& row : sums) row[0] = row[1] = hn::Zero(d);
  int64_t c = begin;
  for (; c + 2 * lanes <= end; c += 2 * lanes) {
    const PanelVec v0 = hn::Load(d, v + c), v1 = hn::Load(d, v + c + lanes);
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = hn::MulAdd(hn::Load(d, a + r * stride + c), v0, sums[r][0]);
      sums[r][1] = hn::MulAdd(hn::Load(d, a + r * stride + c + lanes), v1, sums[r][1]);
    }
  }
  if (c < end) {
    const PanelVec v0 = hn::Load(d, v + c);
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = hn::MulAdd(hn::Load(d, a + r * stride + c), v0, sums[r][0]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    y[r] = hn::GetLane(hn::SumOfLanes(d, hn::Add(sums[r][0], sums[r][1])));
  }
}

void MatVec(const float* a, int64_t stride, int64_t rows, int64_t begin, int64_t end,
            const float* v, float* y) {
  begin = Down(begin);
  end = PanelStride(end);
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) MatVecRows<4>(a + i * stride, stride, begin, end, v, y + i);
  for (; i < rows; ++i) MatVecRows<1>(a + i * stride, stride, begin, end, v, y + i);
}

// Rows [row, row + kRows) of the part of A that is read.
template <int kRows>
HWY_INLINE void SymmetricRows(const float* a, int64_t stride, int64_t row, int64_t end,
                              const float* v, float* y) {
  const PanelTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  a += row * stride;
  PanelVec sums[kRows], factors[kRows];
  for (int r = 0; r < kRows; ++r) {
    sums[r] = hn::Zero(d);
    factors[r] = hn::Set(d, v[row + r]);
  }
  int64_t c = Down(row);
  for (const int64_t diagonal = c + kPanelAlign; c < diagonal; c += lanes) {
    const PanelVec of_v = hn::Load(d, v + c);
    for (int r = 0; r < kRows; ++r) {
      sums[r] = hn::MulAdd(hn::Load(d, a + r * stride + c), of_v, sums[r]);
    }
  }
  for (; c < end; c += lanes) {
    const PanelVec of_v = hn::Load(d, v + c);
    PanelVec even = hn::Load(d, y + c), odd = hn::Zero(d);
    for (int r = 0; r < kRows; ++r) {
      const PanelVec of_a = hn::Load(d, a + r * stride + c);
      sums[r] = hn::MulAdd(of_a, of_v, sums[r]);
      PanelVec& sum = r % 2 == 0 ? even : odd;
      sum = hn::MulAdd(of_a, factors[r], sum);
    }
    hn::Store(hn::Add(even, odd), d, y + c);
  }
  for (int r = 0; r < kRows; ++r) y[row + r] += hn::GetLane(hn::SumOfLanes(d, sums[r]));
}

void SymmetricMatVec(const float* a, int64_t stride, int64_t begin, int64_t n, const float* v,
                     float* y) {
  const int64_t end = PanelStride(n);
  int64_t row = Down(begin);
  std::fill(y + row, y + end, 0.0f);
  for (; row + kSymmetricRows <= n; row += kSymmetricRows) {
    SymmetricRows<kSymmetricRows>(a, stride, row, end, v, y);
  }
  for (; row < n; ++row) SymmetricRows<1>(a, stride, row, end, v, y);
}

template <int kRows, int kVectors>
HWY_INLINE void AddTile(const PanelProduct& p, int64_t row, int64_t column) {
  const PanelTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  PanelVec sums[kRows][kVectors];
  for (auto& sum_row : sums) {
    for (PanelVec& sum : sum_row) sum = hn::Zero(d);
  }
  const float* coefficients = p.coefficients + row * p.row_step;
  const float* b = p.b + column;
  for (int64_t t = 0; t < p.terms; ++t, coefficients += p.term_step, b += p.b_stride) {
    PanelVec values[kVectors];
    for (int v = 0; v < kVectors; ++v) values[v] = hn::Load(d, b + v * lanes);
    for (int r = 0; r < kRows; ++r) {
      const PanelVec factor = hn::Set(d, coefficients[r * p.row_step]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(factor, values[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* c = p.c + (row + r) * p.c_stride + column;
    for (int v = 0; v < kVectors; ++v) {
      const PanelVec old = hn::Load(d, c + v * lanes);
      const PanelVec sum = sums[r][v];
      hn::Store(p.subtract ? hn::Sub(old, sum) : hn::Add(old, sum), d, c + v * lanes);
    }
  }
}

template <int kVectors>
HWY_INLINE void AddColumns(const PanelProduct& p, int64_t column) {
  int64_t row = 0;
  for (; row + kTileRows <= p.rows; row += kTileRows) AddTile<kTileRows, kVectors>(p, row, column);
  for (; row < p.rows; ++row) AddTile<1, kVectors>(p, row, column);
}

void AddProduct(const PanelProduct& p) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(PanelTag()));
  const int64_t end = PanelStride(p.end);
  int64_t column = Down(p.begin);
  if (p.rows == 1) {
    for (; column + kSingleRowVectors * lanes <= end; column += kSingleRowVectors * lanes) {
      AddTile<1, kSingleRowVectors>(p, 0, column);
    }
  }
  for (; column + kTileVectors * lanes <= end; column += kTileVectors * lanes) {
    AddColumns<kTileVectors>(p, column);
  }
  for (; column < end; column += lanes) AddColumns<1>(p, column);
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {
namespace {
HWY_EXPORT(MatVec);
HWY_EXPORT(SymmetricMatVec);
HWY_EXPORT(AddProduct);
}  // namespace

void PanelMatVec(const float* a, int64_t a_stride, int64_t rows, int64_t begin, int64_t end,
                 const float* v, float* y) {
  HWY_DYNAMIC_DISPATCH(MatVec)(a, a_stride, rows, begin, end, v, y);
}

void PanelSymmetricMatVec(const float* a, int64_t a_stride, int64_t begin, int64_t n,
                          const float* v, float* y) {
  HWY_DYNAMIC_DISPATCH(SymmetricMatVec)(a, a_stride, begin, n, v, y);
}

void AddPanelProduct(const PanelProduct& product) { HWY_DYNAMIC_DISPATCH(AddProduct)(product); }

}  // namespace stockpot
#endif
