#include "store/merge_matrix.h"

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
#include <numeric>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

namespace stockpot {
namespace {

// From this smaller side on the cut is made in float32, and checked; smaller ones take no time
// anyway.
constexpr int64_t kLeastFloat32Side = 128;
// How near to the floor a float32 cut may be: what it keeps is measured to a few 1e-7.
constexpr double kFloorMargin = 1e-6;
// The gap at the cut, in shares of the largest eigenvalue, that float32's vectors need.
constexpr double kLeastGap = 2e-5;
// Of a product that several threads share, one part's; a multiple of kProductBlock.
constexpr int64_t kProductRows = 192;
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

// Of a product, in parts that have the same bits: one for all threads where LibTorch's are free.
void MakeProduct(const ProductArgs& args, std::vector<ProductScratch>& scratch) {
  const auto threads = static_cast<size_t>(at::in_parallel_region() ? 1 : at::get_num_threads());
  if (scratch.size() < threads) scratch.resize(threads);
  if (threads == 1) return DenseProduct(args, scratch[0]);
  at::parallel_for(0, (args.rows + kProductRows - 1) / kProductRows, 1,
                   [&](int64_t begin, int64_t end) {
                     const int64_t row = begin * kProductRows;
                     const int64_t column = args.upper ? row : 0;
                     ProductArgs part = args;
                     part.rows = std::min(end * kProductRows, args.rows) - row;
                     part.cols -= column;
                     part.a += row * args.a_row;
                     part.b += column * args.b_column;
                     part.c += row * args.c_stride + column;
                     DenseProduct(part, scratch[static_cast<size_t>(at::get_thread_num())]);
                   });
}

// A delta as the matrix whose columns are the side that is decomposed, the smaller one.
struct Tall {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_step = 0;  // element [r, c] at data[r * row_step + c * column_step]
  int64_t column_step = 0;
};

// The Gram matrix into `eigen`: what it reads of it.
void FillGram(const Tall& tall, PartialEigen& eigen, MatrixWorkspace& workspace) {
  eigen.Resize(tall.cols);
  MakeProduct({.a = tall.data,
               .a_row = tall.column_step,
               .a_term = tall.row_step,
               .b = tall.data,
               .b_term = tall.row_step,
               .b_column = tall.column_step,
               .c = eigen.matrix(),
               .c_stride = eigen.stride(),
               .rows = tall.cols,
               .cols = tall.cols,
               .terms = tall.rows,
               .upper = true},
              workspace.products);
}

// D Q of the orthonormal columns Q [cols, count], kept as its transpose where D is: `part`.
void Project(const Tall& tall, const PartialEigen::Columns& q, int64_t count,
             MatrixWorkspace& workspace) {
  float* part = workspace.part.Reserve(tall.rows * count);
  if (tall.column_step == 1) {
    return MakeProduct({.a = tall.data,
                        .a_row = tall.row_step,
                        .a_term = 1,
                        .b = q.data,
                        .b_term = q.stride,
                        .b_column = 1,
                        .c = part,
                        .c_stride = count,
                        .rows = tall.rows,
                        .cols = count,
                        .terms = tall.cols},
                       workspace.products);
  }
  MakeProduct({.a = q.data,
               .a_row = 1,
               .a_term = q.stride,
               .b = tall.data,
               .b_term = tall.column_step,
               .b_column = 1,
               .c = part,
               .c_stride = tall.rows,
               .rows = count,
               .cols = tall.rows,
               .terms = tall.cols},
              workspace.products);
}

// D = (D Q) Q^T, or D less that.
void Return(const Tall& tall, const PartialEigen::Columns& q, int64_t count, ProductMode mode,
            MatrixWorkspace& workspace) {
  const float* part = workspace.part.data();
  if (tall.column_step == 1) {
    return MakeProduct({.a = part,
                        .a_row = count,
                        .a_term = 1,
                        .b = q.data,
                        .b_term = 1,
                        .b_column = q.stride,
                        .c = tall.data,
                        .c_stride = tall.row_step,
                        .rows = tall.rows,
                        .cols = tall.cols,
                        .terms = count,
                        .mode = mode},
                       workspace.products);
  }
  MakeProduct({.a = q.data,
               .a_row = q.stride,
               .a_term = 1,
               .b = part,
               .b_term = tall.rows,
               .b_column = 1,
               .c = tall.data,
               .c_stride = tall.column_step,
               .rows = tall.cols,
               .cols = tall.rows,
               .terms = count,
               .mode = mode},
              workspace.products);
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

// The cut in float32 by the spectrum in `eigen`, or nothing where float32 cannot tell which
// directions to keep; the delta is as it was then. What is kept is measured on the delta itself:
// ||delta Q||_F^2 of orthonormal Q is exact to second order in the error of Q.
Result<std::optional<MatrixReport>> TruncateInFloat32(const Tall& tall, double energy,
                                                      const MergeOptions& options,
                                                      PartialEigen& eigen,
                                                      MatrixWorkspace& workspace) {
  const int64_t n = tall.cols;
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
  PartialEigen::Columns q;
  if (!eigen.Vectors(drop ? 0 : n - count, count, &q)) return std::optional<MatrixReport>();
  Project(tall, q, count, workspace);
  STOCKPOT_ASSIGN_OR_RETURN(const double part_energy,
                            SquaredNorm(workspace.part.data(), tall.rows * count));
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
  Return(tall, q, count, drop ? ProductMode::kSubtract : ProductMode::kSet, workspace);
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

bool FitsFloat32(int64_t rows, int64_t cols, double energy) {
  int exponent = 0;
  std::frexp(std::sqrt(energy / static_cast<double>(rows * cols)), &exponent);
  return std::abs(exponent) <= kMostExponent && std::min(rows, cols) >= kLeastFloat32Side;
}

// One of the deltas that are cut together.
struct Cut {
  Tall tall;
  double energy = 0;
  bool in_float32 = false;  // may be
  PartialEigen* eigen = nullptr;
};

// Gram matrices and spectra of two at most: `in_float32` of those that have one.
void Decompose(std::span<Cut> cuts, MatrixWorkspace& workspace) {
  std::vector<Cut*> wanted;
  for (Cut& cut : cuts) {
    if (!cut.in_float32) continue;
    cut.eigen = &workspace.eigens[wanted.size()];
    FillGram(cut.tall, *cut.eigen, workspace);
    wanted.push_back(&cut);
  }
  if (wanted.size() == 1) wanted[0]->in_float32 = wanted[0]->eigen->Decompose();
  if (wanted.size() < 2) return;
  std::tie(wanted[0]->in_float32, wanted[1]->in_float32) =
      PartialEigen::DecomposeBoth(*wanted[0]->eigen, *wanted[1]->eigen);
}

Result<std::vector<MatrixReport>> Truncate(int64_t rows, int64_t cols, std::span<Cut> cuts,
                                           const MergeOptions& options,
                                           MatrixWorkspace& workspace) {
  std::vector<MatrixReport> reports;
  for (size_t i = 0; i < cuts.size(); ++i) {
    if (i % workspace.eigens.size() == 0) {
      Decompose(cuts.subspan(i, std::min(workspace.eigens.size(), cuts.size() - i)), workspace);
    }
    const Cut& cut = cuts[i];
    MatrixReport& report = reports.emplace_back();
    if (cut.energy == 0) continue;
    const int64_t full = std::min(rows, cols);
    if (options.rank >= full || (options.rank == 0 && options.energy >= 1)) {
      report.rank = full;
      continue;
    }
    std::optional<MatrixReport> in_float32;
    if (cut.in_float32) {
      STOCKPOT_ASSIGN_OR_RETURN(
          in_float32, TruncateInFloat32(cut.tall, cut.energy, options, *cut.eigen, workspace));
    }
    if (in_float32) {
      report = *in_float32;
    } else {
      STOCKPOT_ASSIGN_OR_RETURN(report, TruncateExactly(View(rows, cols, cut.tall.data), options));
    }
  }
  return reports;
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
auto Guarded(Body body) -> decltype(body()) {
  try {
    const at::NoGradGuard no_grad;
    return body();
  } catch (const std::exception& e) {  // c10::Error, std::bad_alloc
    return Internal(std::string("LibTorch: ") + e.what());
  }
}

}  // namespace

int64_t MatrixWorkspace::bytes() const {
  int64_t floats = part.capacity();
  for (const ProductScratch& scratch : products) {
    floats += scratch.a.capacity() + scratch.b.capacity();
  }
  return eigens[0].bytes() + eigens[1].bytes() + floats * static_cast<int64_t>(sizeof(float));
}

Result<std::vector<MatrixReport>> TruncateDeltas(int64_t rows, int64_t cols,
                                                 const MergeOptions& options,
                                                 std::span<float* const> deltas,
                                                 MatrixWorkspace& workspace) {
  const int64_t full = std::min(rows, cols);
  const bool keeps_all = options.rank >= full || (options.rank == 0 && options.energy >= 1);
  std::vector<Cut> cuts;
  for (float* delta : deltas) {
    Cut& cut = cuts.emplace_back();
    cut.tall = cols <= rows ? Tall{delta, rows, cols, cols, 1} : Tall{delta, cols, rows, 1, cols};
    STOCKPOT_ASSIGN_OR_RETURN(cut.energy, SquaredNorm(delta, rows * cols));
    cut.in_float32 = !keeps_all && cut.energy > 0 && FitsFloat32(rows, cols, cut.energy);
  }
  return Guarded([&] { return Truncate(rows, cols, cuts, options, workspace); });
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
