#include "kernels/svd/svd.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "kernels/svd/svd_checks.h"

namespace stockpot {
namespace {

template <DType kType>
void Lift(const void* row, int64_t n, float* out) {
  for (int64_t c = 0; c < n; ++c) out[c] = LoadWeight(row, kType, c);
}

void Lift(const WeightMatrix& m, int64_t r, float* out) {
  const void* row = m.row(r);
  if (m.dtype == DType::kF32) return Lift<DType::kF32>(row, m.cols, out);
  if (m.dtype == DType::kBF16) return Lift<DType::kBF16>(row, m.cols, out);
  Lift<DType::kF16>(row, m.cols, out);
}

double SumOfSquares(const float* values, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += static_cast<double>(values[c]) * values[c];
  return sum;
}

Status CheckMatrix(const SvdArgs& args, const WeightMatrix& m, const char* field) {
  const auto bad = [&](const std::string& what) {
    return SvdError(args, std::string(field) + " " + what);
  };
  if (!IsWeightDType(m.dtype)) {
    return bad("has dtype " + std::string(DTypeName(m.dtype)) + ", an SVD takes F32, F16 or BF16");
  }
  if (m.rows < 0 || m.cols < 0) {
    return bad("has shape [" + std::to_string(m.rows) + ", " + std::to_string(m.cols) + "]");
  }
  if (m.stride < m.cols) {
    return bad("has a stride of " + std::to_string(m.stride) + ", less than its " +
               std::to_string(m.cols) + " columns");
  }
  if (m.data == nullptr && m.rows > 0 && m.cols > 0) return bad("has no data");
  return OkStatus();
}

// InvalidArgument for the first value of `m`'s row that is not finite; OK if there is none.
Status NameNonFinite(const SvdArgs& args, const WeightMatrix& m, int64_t r, const char* field) {
  for (int64_t c = 0; c < m.cols; ++c) {
    const float value = m.at(r, c);
    if (std::isfinite(value)) continue;
    return SvdError(args, std::string(field) + "[" + std::to_string(r) + ", " + std::to_string(c) +
                              "] is " + (std::isnan(value) ? "NaN" : "infinite"));
  }
  return OkStatus();
}

}  // namespace

Status NameTensor(const SvdArgs& args, const Status& status) {
  return args.name.empty() ? status : status.WithContext("tensor '" + std::string(args.name) + "'");
}

Status SvdError(const SvdArgs& args, const std::string& what) {
  return NameTensor(args, InvalidArgument(what));
}

Status CheckSvdEnergy(const SvdArgs& args, double energy) {
  if (energy <= kMaxSvdNorm * kMaxSvdNorm) return OkStatus();
  char text[96];
  std::snprintf(text, sizeof text, "values are too large for float32: the norm is %.3g, at most %g",
                std::sqrt(energy), kMaxSvdNorm);
  return SvdError(args, text);
}

Status CheckSvdArgs(const SvdArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckMatrix(args, args.fine_tuned, "fine_tuned"));
  if (args.base == nullptr) return OkStatus();
  STOCKPOT_RETURN_IF_ERROR(CheckMatrix(args, *args.base, "base"));
  if (args.base->rows != args.fine_tuned.rows || args.base->cols != args.fine_tuned.cols) {
    return SvdError(args, "base is [" + std::to_string(args.base->rows) + ", " +
                              std::to_string(args.base->cols) + "], fine_tuned [" +
                              std::to_string(args.fine_tuned.rows) + ", " +
                              std::to_string(args.fine_tuned.cols) + "]");
  }
  return OkStatus();
}

Status CheckTruncatedSvd(const SvdArgs& args, const TruncatedSvdOptions& options) {
  STOCKPOT_RETURN_IF_ERROR(CheckSvdArgs(args));
  const int64_t most = std::min(args.fine_tuned.rows, args.fine_tuned.cols);
  if (options.rank < 0 || options.rank > most) {
    return SvdError(args, "rank " + std::to_string(options.rank) + " is not in [0, " +
                              std::to_string(most) + "], the matrix is [" +
                              std::to_string(args.fine_tuned.rows) + ", " +
                              std::to_string(args.fine_tuned.cols) + "]");
  }
  if (options.oversampling < 0) {
    return SvdError(args, "oversampling " + std::to_string(options.oversampling) + " is negative");
  }
  if (options.iterations < 1 || options.iterations > kMaxSvdIterations) {
    return SvdError(args, "iterations " + std::to_string(options.iterations) + " is not in [1, " +
                              std::to_string(kMaxSvdIterations) +
                              "]: without one the error is up to 1.6 times the optimum");
  }
  return OkStatus();
}

Status CheckSvdBytes(const SvdArgs& args, int64_t bytes) {
  if (args.max_bytes <= 0 || bytes <= args.max_bytes) return OkStatus();
  return NameTensor(args,
                    ResourceExhausted("the SVD of [" + std::to_string(args.fine_tuned.rows) + ", " +
                                      std::to_string(args.fine_tuned.cols) + "] takes up to " +
                                      std::to_string(bytes) + " bytes, max_bytes is " +
                                      std::to_string(args.max_bytes)));
}

Status LiftSvdRow(const SvdArgs& args, int64_t r, float* out, double* energy) {
  const int64_t n = args.fine_tuned.cols;
  Lift(args.fine_tuned, r, out);
  if (args.base != nullptr) {
    const WeightMatrix& base = *args.base;
    for (int64_t c = 0; c < n; ++c) out[c] -= base.at(r, c);
  }
  *energy = SumOfSquares(out, n);
  if (std::isfinite(*energy)) return OkStatus();  // float32 squares do not overflow a double
  STOCKPOT_RETURN_IF_ERROR(NameNonFinite(args, args.fine_tuned, r, "fine_tuned"));
  if (args.base != nullptr) {
    STOCKPOT_RETURN_IF_ERROR(NameNonFinite(args, *args.base, r, "base"));
  }
  return SvdError(args, "fine_tuned - base overflows float32 in row " + std::to_string(r));
}

int64_t SketchColumns(int64_t rows, int64_t cols, const TruncatedSvdOptions& options) {
  const int64_t most = std::min(rows, cols);
  return options.oversampling >= most - options.rank ? most : options.rank + options.oversampling;
}

void FinishSvd(Svd& svd) {
  double kept = 0;
  for (int64_t j = 0; j < svd.rank; ++j) {
    kept += static_cast<double>(svd.s[j]) * svd.s[j];
    float largest = 0;
    for (int64_t i = 0; i < svd.rows; ++i) {
      const float value = svd.u[i * svd.rank + j];
      if (std::fabs(value) > std::fabs(largest)) largest = value;
    }
    if (largest >= 0) continue;
    for (int64_t i = 0; i < svd.rows; ++i) svd.u[i * svd.rank + j] *= -1;
    for (int64_t i = 0; i < svd.cols; ++i) svd.v[i * svd.rank + j] *= -1;
  }
  svd.captured = svd.energy > 0 ? std::min(1.0, kept / svd.energy) : 1;
}

Result<int64_t> RankForEnergy(std::span<const float> s, double floor) {
  if (!(floor > 0 && floor <= 1)) {
    return InvalidArgument("floor " + std::to_string(floor) + " is not in (0, 1]");
  }
  double total = 0;
  for (size_t i = 0; i < s.size(); ++i) {
    if (!(s[i] >= 0) || std::isinf(s[i]) || (i > 0 && s[i] > s[i - 1])) {
      return InvalidArgument("s[" + std::to_string(i) + "] = " + std::to_string(s[i]) +
                             ": a spectrum is finite, not negative and descending");
    }
    total += static_cast<double>(s[i]) * s[i];
  }
  int64_t rank = 0;
  double kept = 0;
  while (rank < static_cast<int64_t>(s.size()) && kept < floor * total) {
    kept += static_cast<double>(s[rank]) * s[rank];
    ++rank;
  }
  return rank;
}

}  // namespace stockpot
