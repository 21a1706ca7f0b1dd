// The arithmetic of MonoSoup: spectra and projections by LibTorch.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linalg_eigh.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <nlohmann/json.hpp>

#include "store/mono_soup.h"
#include "store/mono_soup_threads.h"

namespace stockpot {
namespace {

std::string NumberText(double value) { return nlohmann::json(value).dump(); }

// Sum of squares; NaN or infinity if a value is not finite.
double SquaredNorm(const float* values, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(values[i]) * values[i];
  return sum;
}

// How many of the largest of `ascending` squared singular values are kept.
TruncationReport ChooseRank(std::span<const double> ascending, const MonoSoupOptions& options) {
  double total = 0;
  for (const double w : ascending) total += std::max(w, 0.0);
  const auto n = static_cast<int64_t>(ascending.size());
  TruncationReport report{.rank = 0, .kept_energy = 0};
  double kept = 0;
  while (report.rank < n) {
    const bool enough =
        options.rank > 0 ? report.rank == options.rank : kept >= options.energy * total;
    if (enough) break;
    kept += std::max(ascending[static_cast<size_t>(n - 1 - report.rank)], 0.0);
    ++report.rank;
  }
  report.kept_energy = std::min(1.0, kept / total);
  return report;
}

// The projection of `delta` on its `rank` largest directions of the side whose eigenvectors
// (columns, ascending) are given. Where fewer directions are dropped than kept, subtracts the
// dropped ones.
at::Tensor Project(const at::Tensor& delta, const at::Tensor& vectors, int64_t rank,
                   bool of_columns) {
  const int64_t n = vectors.size(1);
  const bool drop = n - rank < rank;
  const at::Tensor basis =
      drop ? vectors.narrow(1, 0, n - rank) : vectors.narrow(1, n - rank, rank);
  const at::Tensor part = of_columns ? at::mm(at::mm(delta, basis), basis.t())
                                     : at::mm(basis, at::mm(basis.t(), delta));
  return drop ? delta.sub(part) : part;
}

// Adds the truncated delta to `sum` (float64, [rows, cols]).
Result<TruncationReport> AddTruncated(const at::Tensor& delta_f32, const MonoSoupOptions& options,
                                      at::Tensor& sum) {
  const int64_t rows = delta_f32.size(0);
  const int64_t cols = delta_f32.size(1);
  const double norm = SquaredNorm(delta_f32.const_data_ptr<float>(), rows * cols);
  if (!std::isfinite(norm)) return InvalidArgument("a value is NaN or infinite");
  if (norm == 0) return TruncationReport{};
  const int64_t full = std::min(rows, cols);
  const at::Tensor delta = delta_f32.to(at::kDouble);
  if (options.rank >= full || (options.rank == 0 && options.energy >= 1)) {
    sum.add_(delta);
    return TruncationReport{.rank = full, .kept_energy = 1};
  }
  const bool of_columns = cols <= rows;
  const at::Tensor gram = of_columns ? at::mm(delta.t(), delta) : at::mm(delta, delta.t());
  const auto [values, vectors] = at::linalg_eigh(gram);
  const at::Tensor ascending = values.contiguous();
  const TruncationReport report = ChooseRank(
      {ascending.const_data_ptr<double>(), static_cast<size_t>(ascending.numel())}, options);
  if (report.kept_energy < options.energy && options.rank > 0 && !options.force) {
    return InvalidArgument("rank " + std::to_string(report.rank) + " of " + std::to_string(full) +
                           " keeps " + NumberText(report.kept_energy) +
                           " of the update's energy, the floor is " + NumberText(options.energy));
  }
  sum.add_(report.rank == full ? delta : Project(delta, vectors, report.rank, of_columns));
  return report;
}

Result<std::vector<TruncationReport>> MergeDeltas(int64_t rows, int64_t cols,
                                                  std::span<const float* const> deltas,
                                                  const MonoSoupOptions& options,
                                                  float* merged_delta) {
  const at::NoGradGuard no_grad;
  at::Tensor merged = at::from_blob(merged_delta, {rows, cols}, at::kFloat);
  at::Tensor sum = merged.to(at::kDouble).zero_();
  std::vector<TruncationReport> reports;
  for (const float* delta : deltas) {
    const at::Tensor view = at::from_blob(const_cast<float*>(delta), {rows, cols}, at::kFloat);
    STOCKPOT_ASSIGN_OR_RETURN(const TruncationReport report, AddTruncated(view, options, sum));
    reports.push_back(report);
  }
  merged.copy_(sum.div_(static_cast<double>(deltas.size())));
  return reports;
}

}  // namespace

Status CheckMonoSoupOptions(const MonoSoupOptions& options) {
  if (!(options.energy > 0 && options.energy <= 1)) {
    return InvalidArgument("energy " + NumberText(options.energy) + " is not in (0, 1]");
  }
  if (options.rank < 0) {
    return InvalidArgument("rank " + std::to_string(options.rank) + " is negative");
  }
  return OkStatus();
}

Result<std::vector<TruncationReport>> MonoSoupMatrix(int64_t rows, int64_t cols,
                                                     std::span<const float* const> deltas,
                                                     const MonoSoupOptions& options,
                                                     float* merged_delta) {
  STOCKPOT_RETURN_IF_ERROR(CheckMonoSoupOptions(options));
  if (rows < 1 || cols < 1 || deltas.empty()) {
    return InvalidArgument("MonoSoup needs a matrix and at least one delta");
  }
  try {
    return MergeDeltas(rows, cols, deltas, options, merged_delta);
  } catch (const std::exception& e) {  // c10::Error, std::bad_alloc
    return Internal(std::string("LibTorch: ") + e.what());
  }
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
