// The loops that a blocked Householder reduction spends its time in. Rows are kPanelAlign
// floats apart or a multiple of it, begin on a cache line, and are padded: whole vectors are read
// and written. Thread promise: pure functions.
#pragma once

#include <cstdint>

namespace stockpot {

inline constexpr int64_t kPanelAlign = 16;  // floats

constexpr int64_t PanelStride(int64_t columns) {
  return (columns + kPanelAlign - 1) / kPanelAlign * kPanelAlign;
}

// y[i] = sum_c a[i, c] * v[c] for rows i and columns [begin, end), widened to multiples of
// kPanelAlign: there v must be zero.
void PanelMatVec(const float* a, int64_t a_stride, int64_t rows, int64_t begin, int64_t end,
                 const float* v, float* y);

// y = A v of a symmetric A of which only the blocks of kPanelAlign x kPanelAlign on the diagonal
// and right of it are read, so half of the memory: y[i] = sum_c a[i, c] * v[c] for i and c in
// [begin, n), begin widened as above: there v must be zero, and what A holds finite. Writes y up to
// PanelStride(n).
void PanelSymmetricMatVec(const float* a, int64_t a_stride, int64_t begin, int64_t n,
                          const float* v, float* y);

// C [rows, columns] and what it adds: sign * sum_t coefficient(i, t) * b[t, c] with coefficient(i,
// t) at coefficients[i * row_step + t * term_step]. Columns [begin, end), widened likewise.
struct PanelProduct {
  float* c = nullptr;  // [rows, *]
  int64_t c_stride = 0;
  int64_t rows = 0;
  int64_t begin = 0;  // columns
  int64_t end = 0;
  const float* coefficients = nullptr;
  int64_t row_step = 0;
  int64_t term_step = 0;
  const float* b = nullptr;  // [terms, *]
  int64_t b_stride = 0;
  int64_t terms = 0;
  bool subtract = false;
};
void AddPanelProduct(const PanelProduct& product);

}  // namespace stockpot
