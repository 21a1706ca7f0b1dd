#include "store/weight_values.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

namespace stockpot {
namespace {

constexpr int64_t kNormElements = 1 << 16;  // of a thread's piece of work

}  // namespace

bool SameValues(const WeightMatrix& a, const WeightMatrix& b) {
  for (int64_t i = 0; i < a.rows * a.cols; ++i) {
    if (std::bit_cast<uint32_t>(LoadWeight(a.data, a.dtype, i)) !=
        std::bit_cast<uint32_t>(LoadWeight(b.data, b.dtype, i))) {
      return false;
    }
  }
  return true;
}

bool AllFinite(const WeightMatrix& w) {
  bool finite = true;
  for (int64_t i = 0; i < w.rows * w.cols; ++i) {
    finite &= std::isfinite(LoadWeight(w.data, w.dtype, i));
  }
  return finite;
}

double SquaredNorm(const WeightMatrix& w, ThreadPool& threads) {
  std::vector<double> rows(static_cast<size_t>(w.rows));
  const int64_t grain = std::max<int64_t>(1, kNormElements / std::max<int64_t>(1, w.cols));
  threads.ParallelFor(w.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::array<double, 8> sums{};
      const void* row = w.row(r);
      for (int64_t c = 0; c < w.cols; ++c) {
        const double value = LoadWeight(row, w.dtype, c);
        sums[static_cast<size_t>(c % 8)] += value * value;
      }
      rows[static_cast<size_t>(r)] = std::accumulate(sums.begin(), sums.end(), 0.0);
    }
  });
  return std::accumulate(rows.begin(), rows.end(), 0.0);
}

}  // namespace stockpot
