#include "serve/calibrate/row_statistics.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/bitdelta/linear.h"

namespace stockpot {
namespace {

// A pivot of the normal equations under this share of its diagonal: the planes say the same.
constexpr double kSingular = 1e-10;

using Planes = std::array<double, static_cast<size_t>(kMaxSignPlanes)>;

}  // namespace

RowStatistics::RowStatistics(int64_t rows, int64_t planes)
    : rows_(rows),
      planes_(planes),
      stride_(1 + planes + planes * (planes + 1) / 2),
      sums_(static_cast<size_t>(rows * stride_)) {
  STOCKPOT_CHECK(planes >= 1 && planes <= kMaxSignPlanes, planes);
}

int64_t RowStatistics::GramIndex(int64_t p, int64_t q) const {
  const int64_t high = std::max(p, q);
  return 1 + planes_ + high * (high + 1) / 2 + std::min(p, q);
}

void RowStatistics::Add(int64_t first, ConstFloatMatrix a, std::span<const ConstFloatMatrix> b) {
  STOCKPOT_CHECK(static_cast<int64_t>(b.size()) == planes_ && first + a.cols <= rows_, b.size(),
                 first, a.cols);
  for (int64_t t = 0; t < a.rows; ++t) {
    const float* const a_row = a.row(t);
    for (int64_t i = 0; i < a.cols; ++i) {
      double* const sums = sums_.data() + (first + i) * stride_;
      const double value = a_row[i];
      sums[0] += value * value;
      int64_t gram = 1 + planes_;
      for (int64_t p = 0; p < planes_; ++p) {
        const double plane = b[static_cast<size_t>(p)].row(t)[i];
        sums[1 + p] += value * plane;
        for (int64_t q = 0; q <= p; ++q) {
          sums[gram++] += plane * b[static_cast<size_t>(q)].row(t)[i];
        }
      }
    }
  }
}

double RowStatistics::Error(const double* sums, std::span<const double> alpha) const {
  double error = sums[0];
  for (int64_t p = 0; p < planes_; ++p) {
    error -= 2 * alpha[static_cast<size_t>(p)] * sums[1 + p];
    for (int64_t q = 0; q < planes_; ++q) {
      error +=
          alpha[static_cast<size_t>(p)] * alpha[static_cast<size_t>(q)] * sums[GramIndex(p, q)];
    }
  }
  return std::max(0.0, error);
}

// Cholesky: the matrix is symmetric and, unless two planes say the same, positive definite.
bool RowStatistics::SolveRow(const double* sums, std::span<double> alpha) const {
  std::array<Planes, static_cast<size_t>(kMaxSignPlanes)> factor{};
  Planes forward{};
  const auto n = static_cast<size_t>(planes_);
  for (size_t p = 0; p < n; ++p) {
    for (size_t q = 0; q <= p; ++q) {
      double sum = sums[GramIndex(static_cast<int64_t>(p), static_cast<int64_t>(q))];
      for (size_t k = 0; k < q; ++k) sum -= factor[p][k] * factor[q][k];
      if (q < p) {
        factor[p][q] = sum / factor[q][q];
        continue;
      }
      const double diagonal = sums[GramIndex(static_cast<int64_t>(p), static_cast<int64_t>(p))];
      if (!(sum > kSingular * diagonal) || !std::isfinite(sum)) return false;
      factor[p][p] = std::sqrt(sum);
    }
    double right = sums[1 + p];
    for (size_t k = 0; k < p; ++k) right -= factor[p][k] * forward[k];
    forward[p] = right / factor[p][p];
  }
  for (size_t p = n; p-- > 0;) {
    double sum = forward[p];
    for (size_t k = p + 1; k < n; ++k) sum -= factor[k][p] * alpha[k];
    alpha[p] = static_cast<float>(sum / factor[p][p]);  // as it is stored
    if (!(alpha[p] > 0) || !std::isfinite(alpha[p])) return false;
  }
  return true;
}

CalibratedTensor RowStatistics::Solve(const std::vector<std::vector<float>>& draft) const {
  CalibratedTensor found{.alpha = draft};
  double all = 0;
  Planes before{};
  Planes after{};
  const auto n = static_cast<size_t>(planes_);
  for (int64_t row = 0; row < rows_; ++row) {
    const double* const sums = sums_.data() + row * stride_;
    const auto r = static_cast<size_t>(row);
    for (size_t p = 0; p < n; ++p) before[p] = draft[p][r];
    const double error_before = Error(sums, before);
    all += sums[0];
    found.error_before += error_before;
    if (!SolveRow(sums, after) || !(Error(sums, after) <= error_before)) {
      ++found.rows_kept;
      found.error += error_before;
      continue;
    }
    found.error += Error(sums, after);
    for (size_t p = 0; p < n; ++p) found.alpha[p][r] = static_cast<float>(after[p]);
  }
  if (all > 0) {
    found.error_before /= all;
    found.error /= all;
  }
  return found;
}

}  // namespace stockpot
