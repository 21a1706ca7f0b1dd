// DenseProduct, blocked as in Goto and van de Geijn, "Anatomy of high-performance matrix
// multiplication" (2008):
//
//   terms    kProductTerms = 192 at a time,
//   columns  kColumnBlock at a time: their part of B is copied into panels of one tile's columns,
//            [term][kTileVectors vectors] each: 36 KiB with AVX-512, which stays in an L1 of 48 KiB
//            (18 KiB with AVX2) while the tiles of a row block pass,
//   rows     kRowBlock at a time: their part of A is copied into strips of 4 rows, [term][4] each:
//            144 KiB together, which stays in L2,
//   tile     8 rows x 3 vectors of sums in registers (24 of 32: a term takes 3 loads of B and 8
//            broadcasts of A for 24 fused multiply-adds), 4 x 3 with 16 registers.
//
// Strips and panels are filled up with zeros, so that there are whole tiles only; one that leaves C
// is made in a buffer.
#include <algorithm>

#include "kernels/dense/product.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dense/product_cpu.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using ProductTag = hn::CappedTag<float, 16>;
using ProductVec = hn::Vec<ProductTag>;
using FourTag = hn::CappedTag<float, 4>;
inline constexpr int64_t kStrip = 4;  // rows
inline constexpr bool kManyRegisters = HWY_MAX_BYTES >= 64 || HWY_ARCH_ARM_A64;
inline constexpr int kTileStrips = kManyRegisters ? 2 : 1;
inline constexpr int kTileVectors = 3;
inline constexpr int64_t kMostTileFloats = 2 * kStrip * kTileVectors * 16;
inline constexpr int64_t kRowBlock = 192;
inline constexpr int64_t kColumnBlock = 1536;
static_assert((kRowBlock + kColumnBlock + 64) * kProductTerms * sizeof(float) <=
              kProductScratchBytes);

HWY_INLINE int64_t TileColumns() {
  return kTileVectors * static_cast<int64_t>(hn::Lanes(ProductTag()));
}

HWY_INLINE int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Rows [row, row + 4) as [term][4]; those from args.rows on are zero.
void PackStrip(const ProductArgs& args, int64_t row, int64_t first, int64_t terms, float* out) {
  const float* a = args.a + row * args.a_row + first * args.a_term;
  const int64_t rows = std::min(kStrip, args.rows - row);
  int64_t t = 0;
  if (rows == kStrip && args.a_term == 1) {
    const ProductTag d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (; t + lanes <= terms; t += lanes) {
      hn::StoreInterleaved4(hn::LoadU(d, a + t), hn::LoadU(d, a + args.a_row + t),
                            hn::LoadU(d, a + 2 * args.a_row + t),
                            hn::LoadU(d, a + 3 * args.a_row + t), d, out + t * kStrip);
    }
  } else if (rows == kStrip && args.a_row == 1) {
    const FourTag d;
    for (; t < terms; ++t) hn::Store(hn::LoadU(d, a + t * args.a_term), d, out + t * kStrip);
  }
  for (; t < terms; ++t) {
    for (int64_t r = 0; r < kStrip; ++r) {
      out[t * kStrip + r] = r < rows ? a[r * args.a_row + t * args.a_term] : 0;
    }
  }
}

// Columns [column, column + TileColumns()) as [term][column]; those from args.cols on are zero.
void PackPanel(const ProductArgs& args, int64_t column, int64_t first, int64_t terms, float* out) {
  const int64_t width = TileColumns(), cols = std::min(width, args.cols - column);
  const float* b = args.b + first * args.b_term + column * args.b_column;
  int64_t c = 0;  // columns that are done
  if (args.b_column == 1 && cols == width) {
    const ProductTag d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (int64_t t = 0; t < terms; ++t) {
      for (int64_t v = 0; v < width; v += lanes) {
        hn::Store(hn::LoadU(d, b + t * args.b_term + v), d, out + t * width + v);
      }
    }
    c = cols;
  } else if (args.b_term == 1) {
    const FourTag d;
    const int64_t columns_apart = args.b_column;
    HWY_ALIGN float turned[16];
    for (; c + 4 <= cols; c += 4) {
      const float* in = b + c * columns_apart;
      int64_t t = 0;
      for (; t + 4 <= terms; t += 4, in += 4) {
        hn::StoreInterleaved4(hn::LoadU(d, in), hn::LoadU(d, in + columns_apart),
                              hn::LoadU(d, in + 2 * columns_apart),
                              hn::LoadU(d, in + 3 * columns_apart), d, turned);
        for (int64_t i = 0; i < 4; ++i) {
          hn::Store(hn::Load(d, turned + 4 * i), d, out + (t + i) * width + c);
        }
      }
      for (; t < terms; ++t, ++in) {
        for (int64_t i = 0; i < 4; ++i) out[t * width + c + i] = in[i * columns_apart];
      }
    }
  }
  for (int64_t t = 0; t < terms; ++t) {
    for (int64_t i = c; i < width; ++i) {
      out[t * width + i] = i < cols ? b[t * args.b_term + i * args.b_column] : 0;
    }
  }
}

// One tile: kStrips strips of A, each `strip_floats` behind the one before, against a panel of B.
template <int kStrips>
HWY_INLINE void MakeTile(const float* a, int64_t strip_floats, const float* b, int64_t terms,
                         ProductMode mode, float* c, int64_t c_stride) {
  const ProductTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int kRows = kStrips * static_cast<int>(kStrip);
  ProductVec sums[kRows][kTileVectors];
  for (auto& row : sums) {
    for (ProductVec& sum : row) sum = hn::Zero(d);
  }
  for (int64_t t = 0; t < terms; ++t, a += kStrip, b += kTileVectors * lanes) {
    const ProductVec b0 = hn::Load(d, b), b1 = hn::Load(d, b + lanes),
                     b2 = hn::Load(d, b + 2 * lanes);
    for (int r = 0; r < kRows; ++r) {
      const ProductVec factor = hn::Set(d, a[r / kStrip * strip_floats + r % kStrip]);
      sums[r][0] = hn::MulAdd(factor, b0, sums[r][0]);
      sums[r][1] = hn::MulAdd(factor, b1, sums[r][1]);
      sums[r][2] = hn::MulAdd(factor, b2, sums[r][2]);
    }
  }
  if (mode == ProductMode::kSet) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kTileVectors; ++v) {
        hn::StoreU(sums[r][v], d, c + r * c_stride + v * lanes);
      }
    }
    return;
  }
  const ProductVec sign = hn::Set(d, mode == ProductMode::kSubtract ? -1.0f : 1.0f);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kTileVectors; ++v) {
      float* at = c + r * c_stride + v * lanes;
      hn::StoreU(hn::MulAdd(sign, sums[r][v], hn::LoadU(d, at)), d, at);
    }
  }
}

template <int kStrips>
void MakeTileOf(const ProductArgs& args, int64_t row, int64_t column, const float* a,
                const float* b, int64_t terms, ProductMode mode) {
  const int64_t width = TileColumns();
  float* c = args.c + row * args.c_stride + column;
  const int64_t rows = std::min(kStrips * kStrip, args.rows - row);
  const int64_t cols = std::min(width, args.cols - column);
  if (rows == kStrips * kStrip && cols == width) {
    return MakeTile<kStrips>(a, terms * kStrip, b, terms, mode, c, args.c_stride);
  }
  HWY_ALIGN float edge[kMostTileFloats];
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(c + r * args.c_stride, cols, edge + r * width);
    std::fill(edge + r * width + cols, edge + (r + 1) * width, 0.0f);
  }
  std::fill(edge + rows * width, edge + kStrips * kStrip * width, 0.0f);
  MakeTile<kStrips>(a, terms * kStrip, b, terms, mode, edge, width);
  for (int64_t r = 0; r < rows; ++r) std::copy_n(edge + r * width, cols, c + r * args.c_stride);
}

// A block of rows of C, whose strips lie in `a`, against one panel.
void MakeTiles(const ProductArgs& args, int64_t begin, int64_t end, int64_t column, const float* a,
               const float* b, int64_t terms, ProductMode mode) {
  const auto wanted = [&](int64_t row) {
    return !args.upper || column + TileColumns() > row / kProductBlock * kProductBlock;
  };
  int64_t row = begin;
  for (; row + (kTileStrips - 1) * kStrip < end && wanted(row); row += kTileStrips * kStrip) {
    MakeTileOf<kTileStrips>(args, row, column, a + (row - begin) * terms, b, terms, mode);
  }
  if (row < end && wanted(row)) {
    MakeTileOf<1>(args, row, column, a + (row - begin) * terms, b, terms, mode);
  }
}

// What one block of terms adds to a block of columns.
void AddTerms(const ProductArgs& args, int64_t first, int64_t terms, int64_t column,
              int64_t column_end, ProductMode mode, ProductScratch& scratch) {
  const int64_t width = TileColumns();
  float* panels = scratch.b.Reserve(RoundUp(column_end - column, width) * terms);
  for (int64_t c = column; c < column_end; c += width) {
    PackPanel(args, c, first, terms, panels + (c - column) * terms);
  }
  for (int64_t row = 0; row < args.rows; row += kRowBlock) {
    if (args.upper && column_end <= row / kProductBlock * kProductBlock) break;
    const int64_t row_end = std::min(args.rows, row + kRowBlock);
    float* strips = scratch.a.Reserve(RoundUp(row_end - row, kStrip) * terms);
    for (int64_t r = row; r < row_end; r += kStrip) {
      PackStrip(args, r, first, terms, strips + (r - row) * terms);
    }
    for (int64_t c = column; c < column_end; c += width) {
      MakeTiles(args, row, row_end, c, strips, panels + (c - column) * terms, terms, mode);
    }
  }
}

void Product(const ProductArgs& args, ProductScratch& scratch) {
  for (int64_t column = 0; column < args.cols; column += kColumnBlock) {
    const int64_t column_end = std::min(args.cols, column + kColumnBlock);
    for (int64_t first = 0; first == 0 || first < args.terms; first += kProductTerms) {
      const int64_t terms = std::min(kProductTerms, args.terms - first);
      const bool more = first > 0 && args.mode == ProductMode::kSet;
      AddTerms(args, first, terms, column, column_end, more ? ProductMode::kAdd : args.mode,
               scratch);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {
namespace {
HWY_EXPORT(Product);
}  // namespace

void DenseProduct(const ProductArgs& args, ProductScratch& scratch) {
  HWY_DYNAMIC_DISPATCH(Product)(args, scratch);
}

}  // namespace stockpot
#endif
