// One-sided Jacobi (Hestenes 1958; Golub and Van Loan, 8.6.3), in double precision.
//
// Columns of A are rotated in pairs until all are orthogonal: A V = U diag(s). V collects the
// rotations, the lengths of the columns are the singular values.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/svd/svd.h"
#include "kernels/svd/svd_checks.h"

namespace stockpot {
namespace {

constexpr int kMostSweeps = 60;  // about ten are usual
constexpr double kEpsilon = std::numeric_limits<double>::epsilon();

using Column = std::vector<double>;

double Dot(const Column& a, const Column& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void Rotate(Column& a, Column& b, double cosine, double sine) {
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = a[i], y = b[i];
    a[i] = cosine * x - sine * y;
    b[i] = sine * x + cosine * y;
  }
}

// Makes columns p and q orthogonal; false if they were. A column that rounding alone made has no
// direction to be made orthogonal: lengths under `negligible` count as zero.
bool Orthogonalise(std::vector<Column>& a, std::vector<Column>& v, size_t p, size_t q,
                   double negligible) {
  const double pp = Dot(a[p], a[p]), qq = Dot(a[q], a[q]), pq = Dot(a[p], a[q]);
  if (std::min(pp, qq) <= negligible * negligible) return false;
  if (std::fabs(pq) <= 4 * kEpsilon * std::sqrt(pp) * std::sqrt(qq)) return false;
  const double zeta = (qq - pp) / (2 * pq);
  const double tangent = std::copysign(1.0, zeta) / (std::fabs(zeta) + std::hypot(1.0, zeta));
  const double cosine = 1 / std::hypot(1.0, tangent);
  Rotate(a[p], a[q], cosine, cosine * tangent);
  Rotate(v[p], v[q], cosine, cosine * tangent);
  return true;
}

// A unit vector orthogonal to all of `others`: a basis vector less its projections.
Column Complement(const std::vector<Column>& others, size_t size) {
  for (size_t axis = 0; axis < size; ++axis) {
    Column u(size, 0.0);
    u[axis] = 1;
    for (int twice = 0; twice < 2; ++twice) {
      for (const Column& other : others) {
        const double part = Dot(u, other);
        for (size_t i = 0; i < size; ++i) u[i] -= part * other[i];
      }
    }
    const double length = std::sqrt(Dot(u, u));
    if (length < 0.5 / std::sqrt(static_cast<double>(size))) continue;
    for (double& x : u) x /= length;
    return u;
  }
  return Column(size, 0.0);  // not reached: fewer than `size` vectors leave some axis far enough
}

struct Decomposed {
  std::vector<Column> left, right;  // by descending singular value
  std::vector<double> s;
};

// REQUIRES: a.size() <= the length of each column.
Result<Decomposed> Jacobi(std::vector<Column> a, size_t length) {
  const size_t n = a.size();
  std::vector<Column> v(n, Column(n, 0.0));
  for (size_t i = 0; i < n; ++i) v[i][i] = 1;
  double energy = 0;
  for (const Column& column : a) energy += Dot(column, column);
  const double negligible = std::sqrt(energy) * kEpsilon;
  bool rotated = true;
  for (int sweep = 0; rotated; ++sweep) {
    if (sweep == kMostSweeps) return Internal("Jacobi did not converge");
    rotated = false;
    for (size_t p = 0; p + 1 < n; ++p) {
      for (size_t q = p + 1; q < n; ++q) rotated |= Orthogonalise(a, v, p, q, negligible);
    }
  }
  std::vector<double> lengths;
  for (const Column& column : a) lengths.push_back(std::sqrt(Dot(column, column)));
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t x, size_t y) { return lengths[x] > lengths[y]; });
  Decomposed out;
  for (const size_t i : order) {
    const bool zero = lengths[i] <= negligible * static_cast<double>(length);
    out.s.push_back(zero ? 0 : lengths[i]);
    out.right.push_back(v[i]);
    Column u = zero ? Complement(out.left, length) : a[i];
    if (!zero) {
      for (double& x : u) x /= lengths[i];
    }
    out.left.push_back(std::move(u));
  }
  return out;
}

double RelativeError(const std::vector<Column>& columns, const Svd& svd, bool transposed) {
  if (svd.energy == 0) return 0;
  double sum = 0;
  for (int64_t i = 0; i < svd.rows; ++i) {
    for (int64_t j = 0; j < svd.cols; ++j) {
      double rest = transposed ? columns[i][j] : columns[j][i];
      for (int64_t k = 0; k < svd.rank; ++k) {
        rest -= static_cast<double>(svd.u[i * svd.rank + k]) * svd.s[k] * svd.v[j * svd.rank + k];
      }
      sum += rest * rest;
    }
  }
  return std::sqrt(sum / svd.energy);
}

Result<Svd> Decompose(const SvdArgs& args, int64_t rank) {
  const int64_t m = args.fine_tuned.rows, n = args.fine_tuned.cols;
  const bool transposed = m < n;  // Jacobi takes tall matrices: the rows become the columns
  Svd svd{.rows = m, .cols = n, .rank = rank, .solver = "Jacobi"};
  std::vector<Column> columns(std::min(m, n), Column(std::max(m, n)));
  std::vector<float> row(n);
  for (int64_t i = 0; i < m; ++i) {
    double energy = 0;
    STOCKPOT_RETURN_IF_ERROR(LiftSvdRow(args, i, row.data(), &energy));
    svd.energy += energy;
    for (int64_t j = 0; j < n; ++j) (transposed ? columns[i][j] : columns[j][i]) = row[j];
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Decomposed d, Jacobi(columns, std::max(m, n)));
  const std::vector<Column>& left = transposed ? d.right : d.left;
  const std::vector<Column>& right = transposed ? d.left : d.right;
  svd.s.assign(d.s.begin(), d.s.begin() + rank);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t k = 0; k < rank; ++k) svd.u.push_back(static_cast<float>(left[k][i]));
  }
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t k = 0; k < rank; ++k) svd.v.push_back(static_cast<float>(right[k][j]));
  }
  FinishSvd(svd);
  svd.relative_error = RelativeError(columns, svd, transposed);
  return svd;
}

}  // namespace

Result<Svd> TruncatedSvdReference(const SvdArgs& args, const TruncatedSvdOptions& options) {
  STOCKPOT_RETURN_IF_ERROR(CheckTruncatedSvd(args, options));
  STOCKPOT_ASSIGN_OR_RETURN(Svd svd, Decompose(args, options.rank));
  svd.asked = options;
  return svd;
}

Result<Svd> FullSvdReference(const SvdArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckSvdArgs(args));
  const int64_t rank = std::min(args.fine_tuned.rows, args.fine_tuned.cols);
  STOCKPOT_ASSIGN_OR_RETURN(Svd svd, Decompose(args, rank));
  svd.asked.rank = rank;
  return svd;
}

}  // namespace stockpot
