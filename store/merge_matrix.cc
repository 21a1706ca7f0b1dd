#include "store/merge_matrix.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linalg_eigh.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "kernels/svd/partial_eigen.h"

namespace stockpot {
namespace {

// From this smaller side on the cut is made in float32, and checked; smaller ones take no time
// anyway.
constexpr int64_t kLeastFloat32Side = 128;
// How near to the floor a float32 cut may be: what it keeps is measured to a few 1e-7.
constexpr double kFloorMargin = 1e-6;
// The gap at the cut, in shares of the largest eigenvalue, that float32's vectors need.
constexpr double kLeastGap = 2e-5;
constexpr int64_t kGramPanel = 192;
constexpr int64_t kMirrorTile = 16;
// Squares of a delta whose values are about 2^e leave float32 from about |e| = 60 on.
constexpr int kMostExponent = 40;

// Below this share of the base's norm a delta is rounding, and its spectrum means nothing.
constexpr double kTinyDelta = 1e-6;

std::string NumberText(double value) { return nlohmann::json(value).dump(); }

// Sum of squares. InvalidArgument: a value is NaN or infinite.
Result<double> SquaredNorm(const float* values, int64_t n) {
  constexpr int64_t kSums = 16;  // side by side: no addition waits for the one before
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int64_t k = 0; k < kSums; ++k) {
      sums[k] += static_cast<double>(values[i + k]) * values[i + k];
    }
  }
  for (; i < n; ++i) sums[0] += static_cast<double>(values[i]) * values[i];
  const double sum = std::accumulate(sums, sums + kSums, 0.0);
  if (!std::isfinite(sum)) return InvalidArgument("a value is NaN or infinite");
  return sum;
}

at::Tensor View(int64_t rows, int64_t cols, float* data) {
  return at::from_blob(data, {rows, cols}, at::kFloat);
}

// D^T D or D D^T, whichever is smaller, in float64.
at::Tensor Gram(const at::Tensor& delta) {
  const at::Tensor wide = delta.to(at::kDouble);
  return delta.size(1) <= delta.size(0) ? at::mm(wide.t(), wide) : at::mm(wide, wide.t());
}

// Squared singular values, descending, none negative.
std::vector<double> Descending(const at::Tensor& ascending) {
  const at::Tensor values = ascending.contiguous();
  const double* data = values.const_data_ptr<double>();
  std::vector<double> out(data, data + values.numel());
  std::reverse(out.begin(), out.end());
  for (double& w : out) w = std::max(w, 0.0);
  return out;
}

double Sum(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum;
}

// The smallest rank that keeps `share` of the sum.
int64_t RankOfShare(std::span<const double> squares, double share) {
  const double total = Sum(squares);
  const auto n = static_cast<int64_t>(squares.size());
  int64_t rank = 0;
  for (double kept = 0; rank < n && kept < share * total; ++rank) {
    kept += squares[static_cast<size_t>(rank)];
  }
  return rank;
}

double KeptShare(std::span<const double> squares, int64_t rank) {
  return std::min(1.0, Sum(squares.first(static_cast<size_t>(rank))) / Sum(squares));
}

// ceil(exp(H)), H the entropy of the singular values as shares of their sum.
int64_t EffectiveRank(std::span<const double> squares) {
  double total = 0;
  for (const double w : squares) total += std::sqrt(w);
  double entropy = 0;
  for (const double w : squares) {
    const double p = std::sqrt(w) / total;
    if (p > 0) entropy -= p * std::log(p);
  }
  const auto most = static_cast<int64_t>(squares.size());
  return std::clamp(static_cast<int64_t>(std::ceil(std::exp(entropy))), int64_t{1}, most);
}

// delta <- high * delta_k + low * (delta - delta_k), delta_k the projection on the k largest
// directions of the side whose eigenvectors (columns, ascending) are given. Computes with the kept
// or the dropped directions, whichever are fewer.
void Reweight(at::Tensor delta, const at::Tensor& vectors, int64_t k, double high, double low) {
  const int64_t n = vectors.size(1);
  const bool drop = n - k < k;
  const at::Tensor basis = drop ? vectors.narrow(1, 0, n - k) : vectors.narrow(1, n - k, k);
  const at::Tensor wide = delta.to(at::kDouble);
  const at::Tensor part = delta.size(1) <= delta.size(0) ? at::mm(at::mm(wide, basis), basis.t())
                                                         : at::mm(basis, at::mm(basis.t(), wide));
  const double of_delta = drop ? high : low;
  const double of_part = drop ? low - high : high - low;
  delta.copy_(part.mul_(of_part).add_(wide, of_delta));
}

Status BelowFloor(int64_t rank, int64_t full, double kept, double floor) {
  return InvalidArgument("rank " + std::to_string(rank) + " of " + std::to_string(full) +
                         " keeps " + NumberText(kept) + " of the update's energy, the floor is " +
                         NumberText(floor));
}

// The Gram matrix of the smaller side into `eigen`, in float32: the lower triangle in panels, then
// its mirror image.
void FillGram(const at::Tensor& delta, PartialEigen& eigen) {
  const at::Tensor tall = delta.size(1) <= delta.size(0) ? delta : delta.t();
  const int64_t n = tall.size(1), stride = eigen.stride();
  float* g = eigen.matrix();
  const at::Tensor gram = at::from_blob(g, {n, n}, {stride, 1}, at::kFloat);
  for (int64_t begin = 0; begin < n; begin += kGramPanel) {
    const int64_t rows = std::min(kGramPanel, n - begin);
    at::Tensor panel = gram.narrow(0, begin, rows).narrow(1, 0, begin + rows);
    at::mm_out(panel, tall.narrow(1, begin, rows).t(), tall.narrow(1, 0, begin + rows));
  }
  for (int64_t i0 = 0; i0 < n; i0 += kMirrorTile) {
    for (int64_t j0 = i0; j0 < n; j0 += kMirrorTile) {
      for (int64_t i = i0; i < std::min(n, i0 + kMirrorTile); ++i) {
        for (int64_t j = std::max(j0, i + 1); j < std::min(n, j0 + kMirrorTile); ++j) {
          g[i * stride + j] = g[j * stride + i];
        }
      }
    }
  }
}

// The rank by the eigenvalues of the Gram matrix, ascending.
int64_t RankByFloor(std::span<const double> ascending, double energy, double floor) {
  double dropped = 0;
  size_t count = 0;
  while (count < ascending.size()) {
    dropped += std::max(ascending[count], 0.0);
    if (dropped > (1 - floor) * energy) break;
    ++count;
  }
  return static_cast<int64_t>(ascending.size() - count);
}

// The cut in float32, or nothing where float32 cannot tell which directions to keep; `delta` is as
// it was then. What is kept is measured on the delta itself: ||delta Q||_F^2 of orthonormal Q is
// exact to second order in the error of Q.
Result<std::optional<MatrixReport>> TruncateInFloat32(at::Tensor delta, double energy,
                                                      const MergeOptions& options) {
  const bool of_columns = delta.size(1) <= delta.size(0);
  const int64_t n = std::min(delta.size(0), delta.size(1));
  PartialEigen eigen(n);
  FillGram(delta, eigen);
  if (!eigen.Decompose()) return std::optional<MatrixReport>();
  const std::span<const double> values = eigen.values();
  const bool fixed = options.rank > 0;
  MatrixReport report{.rank = fixed ? options.rank : RankByFloor(values, energy, options.energy)};
  if (report.rank == n) {
    if (values[0] <= (1 - options.energy + kFloorMargin) * energy) {
      return std::optional<MatrixReport>();
    }
    return std::optional(MatrixReport{.rank = n});
  }
  const double gap = values[n - report.rank] - values[n - report.rank - 1];
  if (report.rank == 0 || gap < kLeastGap * values[n - 1]) return std::optional<MatrixReport>();

  const bool drop = n - report.rank < report.rank;
  const int64_t count = drop ? n - report.rank : report.rank;
  PartialEigen::Columns columns;
  if (!eigen.Vectors(drop ? 0 : n - count, count, &columns)) return std::optional<MatrixReport>();
  const at::Tensor q = at::from_blob(columns.data, {n, count}, {columns.stride, 1}, at::kFloat);
  const at::Tensor part = of_columns ? at::mm(delta, q) : at::mm(q.t(), delta);
  STOCKPOT_ASSIGN_OR_RETURN(const double part_energy,
                            SquaredNorm(part.const_data_ptr<float>(), part.numel()));
  report.kept_energy = drop ? 1 - part_energy / energy : part_energy / energy;
  const double over = report.kept_energy - options.energy;
  const double without_last = over - values[n - report.rank] / energy;
  const bool certain = fixed ? options.force || std::fabs(over) > kFloorMargin
                             : over > kFloorMargin && without_last < -kFloorMargin;
  if (!certain) return std::optional<MatrixReport>();
  if (fixed && !options.force && over < 0) {
    return BelowFloor(report.rank, n, report.kept_energy, options.energy);
  }
  report.unchanged = false;
  const at::Tensor& left = of_columns ? part : q;
  const at::Tensor right = of_columns ? q.t() : part;
  if (drop) {
    delta.addmm_(left, right, 1, -1);
  } else {
    at::mm_out(delta, left, right);
  }
  return std::optional(report);
}

// In float64.
Result<MatrixReport> TruncateExactly(at::Tensor delta, const MergeOptions& options) {
  const int64_t full = std::min(delta.size(0), delta.size(1));
  const auto [values, vectors] = at::linalg_eigh(Gram(delta));
  const std::vector<double> squares = Descending(values);
  MatrixReport report{.rank = options.rank};
  if (options.rank == 0) report.rank = RankOfShare(squares, options.energy);
  report.kept_energy = KeptShare(squares, report.rank);
  if (options.rank > 0 && !options.force && report.kept_energy < options.energy) {
    return BelowFloor(report.rank, full, report.kept_energy, options.energy);
  }
  report.unchanged = report.rank == full;
  if (!report.unchanged) Reweight(delta, vectors, report.rank, 1, 0);
  return report;
}

Result<MatrixReport> Truncate(at::Tensor delta, double energy, const MergeOptions& options) {
  int exponent = 0;
  std::frexp(std::sqrt(energy / static_cast<double>(delta.numel())), &exponent);
  const bool fits = std::abs(exponent) <= kMostExponent;
  if (fits && std::min(delta.size(0), delta.size(1)) >= kLeastFloat32Side) {
    STOCKPOT_ASSIGN_OR_RETURN(const std::optional<MatrixReport> report,
                              TruncateInFloat32(delta, energy, options));
    if (report) return *report;
  }
  return TruncateExactly(delta, options);
}

MatrixReport ReweightBySpectrum(at::Tensor delta, double spectral) {
  const auto [values, vectors] = at::linalg_eigh(Gram(delta));
  const std::vector<double> squares = Descending(values);
  const auto full = static_cast<int64_t>(squares.size());
  MatrixReport report;
  report.rank = spectral == 0 ? EffectiveRank(squares) : RankOfShare(squares, spectral);
  report.kept_energy = KeptShare(squares, report.rank);
  if (report.rank == full) return report;
  const double rho = squares[static_cast<size_t>(report.rank)] / squares[0];
  // 1 - P without cancellation.
  const auto tail = std::span(squares).subspan(static_cast<size_t>(report.rank));
  const double c = std::sqrt(Sum(tail) / Sum(squares));
  report.low = std::clamp(rho + (1 - rho) * c, 0.0, 1.0);
  report.high = std::clamp(1 - report.low, 0.0, 1.0);
  report.unchanged = false;
  Reweight(delta, vectors, report.rank, report.high, report.low);
  return report;
}

// LibTorch's exceptions end here.
template <typename Body>
Result<MatrixReport> Guarded(Body body) {
  try {
    const at::NoGradGuard no_grad;
    return body();
  } catch (const std::exception& e) {  // c10::Error, std::bad_alloc
    return Internal(std::string("LibTorch: ") + e.what());
  }
}

}  // namespace

Result<MatrixReport> TruncateDelta(int64_t rows, int64_t cols, const MergeOptions& options,
                                   float* delta) {
  STOCKPOT_ASSIGN_OR_RETURN(const double energy, SquaredNorm(delta, rows * cols));
  if (energy == 0) return MatrixReport{};
  const int64_t full = std::min(rows, cols);
  if (options.rank >= full || (options.rank == 0 && options.energy >= 1)) {
    return MatrixReport{.rank = full};
  }
  return Guarded([&] { return Truncate(View(rows, cols, delta), energy, options); });
}

Result<MatrixReport> ReweightDelta(int64_t rows, int64_t cols, double spectral, double base_norm,
                                   float* delta) {
  STOCKPOT_ASSIGN_OR_RETURN(const double energy, SquaredNorm(delta, rows * cols));
  if (energy == 0 || std::sqrt(energy) / (base_norm + 1e-12) < kTinyDelta) return MatrixReport{};
  return Guarded([&]() -> Result<MatrixReport> {
    return ReweightBySpectrum(View(rows, cols, delta), spectral);
  });
}

void RunSideBySide(size_t n, const std::function<void(size_t)>& body) {
  std::atomic<size_t> next = 0;
  const auto take = [&](int64_t, int64_t) {
    for (size_t i = next++; i < n; i = next++) body(i);
  };
  const int64_t workers = std::min<int64_t>(static_cast<int64_t>(n), at::get_num_threads());
  if (workers == 1)
    return take(0, 1);  // outside a parallel region, so that LibTorch may use its own
  at::parallel_for(0, workers, 1, take);
}

}  // namespace stockpot
