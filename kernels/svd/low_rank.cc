#include "kernels/svd/low_rank.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "kernels/base/aligned_buffer.h"
#include "kernels/svd/panel_products.h"
#include "kernels/svd/sketch.h"

namespace stockpot {
namespace {

constexpr int64_t kMinOversampling = 8;
constexpr int kIterations = 2;
constexpr int64_t kTermBlock = 64;     // terms of a product whose coefficients stay in the cache
constexpr int64_t kGrain = 64;         // rows or columns of a thread's piece of work
constexpr double kNoDirection = 1e-6;  // of a column's norm: what is left of it is rounding
constexpr int kMaxSweeps = 60;

// [rows, cols] with padded rows, zero at first.
class Panel {
 public:
  Panel(int64_t rows, int64_t cols) : rows_(rows), cols_(cols), stride_(PanelStride(cols)) {
    Clear();
  }
  void Clear() { std::fill_n(buffer_.Reserve(rows_ * stride_), rows_ * stride_, 0.0f); }
  float* row(int64_t r) const { return buffer_.data() + r * stride_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t stride() const { return stride_; }

 private:
  const int64_t rows_, cols_, stride_;
  AlignedBuffer<float> buffer_;
};

// y = E x, or E^T x.
void Multiply(const FloatMatrix& e, const Panel& x, bool transposed, Panel& y,
              ThreadPool& threads) {
  y.Clear();
  const int64_t terms = x.rows();
  threads.ParallelFor(y.rows(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < terms; t += kTermBlock) {
      AddPanelProduct({.c = y.row(begin),
                       .c_stride = y.stride(),
                       .rows = end - begin,
                       .begin = 0,
                       .end = y.cols(),
                       .coefficients = transposed ? e.data + t * e.stride + begin
                                                  : e.data + begin * e.stride + t,
                       .row_step = transposed ? 1 : e.stride,
                       .term_step = transposed ? e.stride : 1,
                       .b = x.row(t),
                       .b_stride = x.stride(),
                       .terms = std::min(kTermBlock, terms - t)});
    }
  });
}

// Makes the columns orthonormal. One that depends on those before it becomes zero.
void Orthonormalise(Panel& y) {
  const int64_t rows = y.rows(), cols = y.cols();
  std::vector<std::vector<double>> columns(static_cast<size_t>(cols));
  for (int64_t c = 0; c < cols; ++c) {
    std::vector<double>& column = columns[static_cast<size_t>(c)];
    column.resize(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) column[static_cast<size_t>(r)] = y.row(r)[c];
    const double before =
        std::sqrt(std::inner_product(column.begin(), column.end(), column.begin(), 0.0));
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t other = 0; other < c; ++other) {
        const std::vector<double>& q = columns[static_cast<size_t>(other)];
        const double along = std::inner_product(q.begin(), q.end(), column.begin(), 0.0);
        for (size_t r = 0; r < column.size(); ++r) column[r] -= along * q[r];
      }
    }
    const double after =
        std::sqrt(std::inner_product(column.begin(), column.end(), column.begin(), 0.0));
    const double scale = after <= kNoDirection * before ? 0 : 1 / after;
    for (double& value : column) value *= scale;
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      y.row(r)[c] = static_cast<float>(columns[static_cast<size_t>(c)][static_cast<size_t>(r)]);
    }
  }
}

// Eigenvectors of a symmetric [n, n] as columns of the result, by falling eigenvalue: cyclic
// Jacobi.
std::vector<double> Eigenvectors(std::vector<double> g, int64_t n) {
  const auto at = [n](int64_t i, int64_t j) { return static_cast<size_t>(i * n + j); };
  std::vector<double> v(static_cast<size_t>(n * n), 0.0);
  for (int64_t i = 0; i < n; ++i) v[at(i, i)] = 1;
  double total = 0;
  for (const double x : g) total += x * x;
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    double off = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = i + 1; j < n; ++j) off += g[at(i, j)] * g[at(i, j)];
    }
    if (off <= 1e-30 * total) break;
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        if (g[at(p, q)] == 0) continue;
        const double theta = (g[at(q, q)] - g[at(p, p)]) / (2 * g[at(p, q)]);
        const double t = std::copysign(1.0, theta) / (std::fabs(theta) + std::hypot(theta, 1.0));
        const double c = 1 / std::hypot(t, 1.0), s = t * c;
        for (int64_t k = 0; k < n; ++k) {
          const double x = g[at(k, p)], y = g[at(k, q)];
          g[at(k, p)] = c * x - s * y;
          g[at(k, q)] = s * x + c * y;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double x = g[at(p, k)], y = g[at(q, k)];
          g[at(p, k)] = c * x - s * y;
          g[at(q, k)] = s * x + c * y;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double x = v[at(k, p)], y = v[at(k, q)];
          v[at(k, p)] = c * x - s * y;
          v[at(k, q)] = s * x + c * y;
        }
      }
    }
  }
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t j) { return g[at(i, i)] > g[at(j, j)]; });
  std::vector<double> sorted(v.size());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) sorted[at(i, j)] = v[at(i, order[static_cast<size_t>(j)])];
  }
  return sorted;
}

// C = Q^T E, [l, n].
Panel Project(const Panel& q, const FloatMatrix& e, ThreadPool& threads) {
  Panel c(q.cols(), e.cols);
  const int64_t pieces = PanelStride(e.cols) / kPanelAlign;
  threads.ParallelFor(pieces, kGrain / kPanelAlign, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < e.rows; t += kTermBlock) {
      AddPanelProduct({.c = c.row(0),
                       .c_stride = c.stride(),
                       .rows = c.rows(),
                       .begin = begin * kPanelAlign,
                       .end = std::min(end * kPanelAlign, e.cols),
                       .coefficients = q.row(t),
                       .row_step = 1,
                       .term_step = q.stride(),
                       .b = e.row(t),
                       .b_stride = e.stride,
                       .terms = std::min(kTermBlock, e.rows - t)});
    }
  });
  return c;
}

std::vector<double> Gram(const Panel& c) {
  const int64_t l = c.rows();
  std::vector<double> g(static_cast<size_t>(l * l));
  for (int64_t i = 0; i < l; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < c.cols(); ++k) sum += static_cast<double>(c.row(i)[k]) * c.row(j)[k];
      g[static_cast<size_t>(i * l + j)] = g[static_cast<size_t>(j * l + i)] = sum;
    }
  }
  return g;
}

// The first `rank` columns of Q V, and rows of V^T C.
LowRank Rotate(const Panel& q, const Panel& c, const std::vector<double>& v, int64_t rank,
               ThreadPool& threads) {
  const int64_t l = q.cols(), m = q.rows(), n = c.cols();
  LowRank result{.rank = rank, .b = {}, .a = {}};
  result.b.resize(static_cast<size_t>(m * rank));
  result.a.resize(static_cast<size_t>(rank * n));
  const auto vector = [&](int64_t i, int64_t k) { return v[static_cast<size_t>(i * l + k)]; };
  threads.ParallelFor(m, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t k = 0; k < rank; ++k) {
        double sum = 0;
        for (int64_t i = 0; i < l; ++i) sum += q.row(r)[i] * vector(i, k);
        result.b[static_cast<size_t>(r * rank + k)] = static_cast<float>(sum);
      }
    }
  });
  threads.ParallelFor(rank, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> row(static_cast<size_t>(n));
    for (int64_t k = begin; k < end; ++k) {
      std::fill(row.begin(), row.end(), 0.0);
      for (int64_t i = 0; i < l; ++i) {
        const double factor = vector(i, k);
        for (int64_t j = 0; j < n; ++j) row[static_cast<size_t>(j)] += factor * c.row(i)[j];
      }
      for (int64_t j = 0; j < n; ++j) {
        result.a[static_cast<size_t>(k * n + j)] = static_cast<float>(row[static_cast<size_t>(j)]);
      }
    }
  });
  return result;
}

}  // namespace

LowRank BestLowRank(std::string_view name, const FloatMatrix& e, int64_t rank,
                    ThreadPool& threads) {
  const int64_t least = std::min(e.rows, e.cols);
  rank = std::min(rank, least);
  if (rank <= 0) return {};
  const int64_t l = std::min(least, rank + std::max(kMinOversampling, rank));
  Panel narrow(e.cols, l), tall(e.rows, l);
  const uint64_t key = SketchKey(0, name);
  for (int64_t i = 0; i < e.cols; ++i) {
    for (int64_t j = 0; j < l; ++j) {
      narrow.row(i)[j] = SketchGaussian(key, static_cast<uint64_t>(j * e.cols + i));
    }
  }
  Multiply(e, narrow, /*transposed=*/false, tall, threads);
  Orthonormalise(tall);
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    Multiply(e, tall, /*transposed=*/true, narrow, threads);
    Orthonormalise(narrow);
    Multiply(e, narrow, /*transposed=*/false, tall, threads);
    Orthonormalise(tall);
  }
  const Panel c = Project(tall, e, threads);
  return Rotate(tall, c, Eigenvectors(Gram(c), l), rank, threads);
}

}  // namespace stockpot
