#include "kernels/torch_ops/svd_tensor.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linalg_eigh.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/svd/sketch.h"
#include "kernels/svd/solver.h"
#include "kernels/svd/svd_checks.h"

// MKL's (mkl_service.h; LibTorch's wheels for x86-64 contain it, and LibTorch has no header for
// it). Null where LibTorch uses another BLAS: there the bits may depend on the number of threads.
extern "C" int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));

namespace stockpot {
namespace {

// While it lives, LibTorch's BLAS and LAPACK use the calling thread alone. Being inside a parallel
// region is not enough: MKL then cuts its sums for the threads that it would like to have, and the
// bits depend on their number.
class OneBlasThread {
 public:
  OneBlasThread() : before_(MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0) {}
  ~OneBlasThread() {
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before_);
  }
  OneBlasThread(const OneBlasThread&) = delete;
  OneBlasThread& operator=(const OneBlasThread&) = delete;

 private:
  int before_;
};

// body(begin, end) over panels of [0, n), side by side, each on one thread.
void ForPanels(int64_t n, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t panels = (n + kSvdPanel - 1) / kSvdPanel;
  at::parallel_for(0, panels, 1, [&](int64_t first, int64_t last) {
    const OneBlasThread one;
    for (int64_t p = first; p < last; ++p) {
      body(p * kSvdPanel, std::min(n, (p + 1) * kSvdPanel));
    }
  });
}

// body(), which factors `a`; on the CPU on one thread. Small factorisations are faster so: their
// barriers cost more than their arithmetic.
void RunFactorisation(const at::Tensor& a, const std::function<void()>& body) {
  if (!a.is_cpu()) return body();
  const OneBlasThread one;
  body();
}

// a [m, n] times b [n, l].
at::Tensor Times(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cpu()) return at::mm(a, b);
  at::Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  ForPanels(a.size(0), [&](int64_t begin, int64_t end) {
    at::Tensor part = out.narrow(0, begin, end - begin);
    at::mm_out(part, a.narrow(0, begin, end - begin), b);
  });
  return out;
}

// The transpose of a [m, n] times b [m, l].
at::Tensor TransposedTimes(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cpu()) return at::mm(a.t(), b);
  at::Tensor out = at::empty({a.size(1), b.size(1)}, a.options());
  ForPanels(a.size(1), [&](int64_t begin, int64_t end) {
    at::Tensor part = out.narrow(0, begin, end - begin);
    at::mm_out(part, a.narrow(1, begin, end - begin).t(), b);
  });
  return out;
}

// The orthonormal factor of y [m, l], and the triangular one if asked for.
at::Tensor Orthonormal(const at::Tensor& y, at::Tensor* r = nullptr) {
  at::Tensor q, triangle;
  const auto factor = [&] { std::tie(q, triangle) = at::linalg_qr(y); };
  RunFactorisation(y, factor);
  if (r != nullptr) *r = triangle;
  return q;
}

at::Tensor Sketch(int64_t rows, int64_t columns, std::string_view name, uint64_t seed) {
  at::Tensor omega = at::empty({rows, columns}, at::kFloat);
  float* data = omega.mutable_data_ptr<float>();
  const uint64_t key = SketchKey(seed, name);
  ForPanels(rows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        data[i * columns + j] = SketchGaussian(key, static_cast<uint64_t>(j * rows + i));
      }
    }
  });
  return omega;
}

// ||a - u diag(s) v^T||_F^2; a becomes the difference.
double TakeResidual(at::Tensor& a, const at::Tensor& u, const at::Tensor& s, const at::Tensor& v) {
  const at::Tensor scaled = u.mul(s);
  if (!a.is_cpu()) {
    a.addmm_(scaled, v.t(), 1, -1);
    return a.square().sum(at::kDouble).item<double>();
  }
  std::vector<double> sums(static_cast<size_t>(a.size(0)));
  ForPanels(a.size(0), [&](int64_t begin, int64_t end) {
    at::Tensor rows = a.narrow(0, begin, end - begin);
    rows.addmm_(scaled.narrow(0, begin, end - begin), v.t(), 1, -1);
    const float* data = rows.const_data_ptr<float>();
    for (int64_t i = begin; i < end; ++i, data += a.size(1)) {
      double sum = 0;
      for (int64_t j = 0; j < a.size(1); ++j) sum += static_cast<double>(data[j]) * data[j];
      sums[static_cast<size_t>(i)] = sum;
    }
  });
  double sum = 0;
  for (const double x : sums) sum += x;
  return sum;
}

void Measure(at::Tensor& a, double energy, TensorSvd& svd) {
  svd.relative_error = energy > 0 ? std::sqrt(TakeResidual(a, svd.u, svd.s, svd.v) / energy) : 0;
}

// Eigenvalues (ascending) and vectors of the Gram matrix of the smaller side, in float64.
std::tuple<at::Tensor, at::Tensor> GramEigen(const at::Tensor& a64) {
  const at::Tensor gram =
      a64.size(1) <= a64.size(0) ? TransposedTimes(a64, a64) : Times(a64, a64.t());
  at::Tensor values, vectors;
  const auto solve = [&] { std::tie(values, vectors) = at::linalg_eigh(gram); };
  RunFactorisation(gram, solve);
  return {values, vectors};
}

// Singular values out of ascending eigenvalues: descending; what rounding alone made is zero.
at::Tensor SingularValues(const at::Tensor& eigenvalues) {
  const at::Tensor w = eigenvalues.flip(0).clamp_min(0);
  if (w.numel() == 0) return w;
  const double least =
      w[0].item<double>() * static_cast<double>(w.numel()) * std::numeric_limits<double>::epsilon();
  return w.mul(w.gt(least)).sqrt();
}

// The factors of the r largest from the eigenvectors (ascending) of the smaller side.
SvdFactors FromEigenvectors(const at::Tensor& a64, const at::Tensor& s, const at::Tensor& vectors,
                            int64_t rank) {
  const bool of_columns = a64.size(1) <= a64.size(0);
  const at::Tensor known = vectors.narrow(1, vectors.size(1) - rank, rank).flip(1);
  const at::Tensor kept = s.narrow(0, 0, rank);
  at::Tensor other = of_columns ? Times(a64, known) : TransposedTimes(a64, known);
  other.div_(kept);
  return of_columns ? SvdFactors{other, kept, known} : SvdFactors{known, kept, other};
}

// Reads what a solver left as float32, rows together.
at::Tensor AsRows(const at::Tensor& t) { return t.to(at::kFloat).contiguous(); }

}  // namespace

Result<bool> SolveSvd(const at::Tensor& a, SvdSolver solver, SvdFactors& out) {
  try {
    if (solver == SvdSolver::kSyevd) {
      // By QR of the vectors that A maps to zero too: they must be orthonormal all the same.
      const at::Tensor a64 = a.to(at::kDouble);
      const auto [values, vectors] = GramEigen(a64);
      const at::Tensor s = SingularValues(values);
      const double least = s[0].item<double>() * std::numeric_limits<double>::epsilon() +
                           std::numeric_limits<double>::min();
      out = FromEigenvectors(a64, s.clamp_min(least), vectors, s.size(0));
      out.s = s;
      at::Tensor& computed = a.size(1) <= a.size(0) ? out.u : out.v;
      at::Tensor triangle;
      const at::Tensor q = Orthonormal(computed, &triangle);
      computed = q.mul(triangle.diagonal().sign().add(0.5).sign());  // QR's signs undone
      return true;
    }
    at::Tensor right;
    const at::Tensor input = solver == SvdSolver::kGesddF64 ? a.to(at::kDouble) : a;
    const auto solve = [&] { std::tie(out.u, out.s, right) = at::linalg_svd(input, false); };
    RunFactorisation(a, solve);
    out.v = right.t();
    return true;
  } catch (const c10::LinAlgError&) {  // "failed to converge"; the input was finite
    return false;
  }
}

Result<TensorSvd> SubspaceSvd(at::Tensor a, double energy, std::string_view name,
                              const TruncatedSvdOptions& options) {
  const int64_t n = a.size(1);
  const int64_t columns = SketchColumns(a.size(0), n, options);
  at::Tensor q = Orthonormal(Times(a, Sketch(n, columns, name, options.seed).to(a.device())));
  for (int i = 0; i < options.iterations; ++i) {
    q = Orthonormal(TransposedTimes(a, q));
    q = Orthonormal(Times(a, q));
  }
  // A^T Q = P R, so Q Q^T A = Q R^T P^T; the core R^T [l, l] is decomposed in float64.
  at::Tensor triangle;
  const at::Tensor p = Orthonormal(TransposedTimes(a, q), &triangle);
  const SvdSolver chain[] = {SvdSolver::kGesddF64, SvdSolver::kSyevd};
  SvdFactors core;
  const at::Tensor input = triangle.t().to(at::kDouble);
  STOCKPOT_ASSIGN_OR_RETURN(const SvdSolver solver, RunSvdSolvers(chain, [&](SvdSolver s) {
                              return SolveSvd(input, s, core);
                            }));
  const int64_t r = options.rank;
  TensorSvd svd{.u = Times(q, AsRows(core.u.narrow(1, 0, r))),
                .s = AsRows(core.s.narrow(0, 0, r)),
                .v = Times(p, AsRows(core.v.narrow(1, 0, r))),
                .solver = "subspace+" + std::string(SvdSolverName(solver))};
  q.reset();
  Measure(a, energy, svd);
  return svd;
}

Result<TensorSvd> FullSvd(at::Tensor a, double energy) {
  const std::vector<SvdSolver> chain =
      SvdSolverChain({a.size(0), a.size(1), std::min(a.size(0), a.size(1))}, SvdDevice::kCpu);
  SvdFactors factors;
  STOCKPOT_ASSIGN_OR_RETURN(const SvdSolver solver, RunSvdSolvers(chain, [&](SvdSolver s) {
                              return SolveSvd(a, s, factors);
                            }));
  TensorSvd svd{.u = AsRows(factors.u),
                .s = AsRows(factors.s),
                .v = AsRows(factors.v),
                .solver = std::string(SvdSolverName(solver))};
  factors = {};
  Measure(a, energy, svd);
  return svd;
}

Result<TensorSvd> EnergySvd(at::Tensor a, double energy, double floor) {
  TensorSvd svd{.solver = "syevd"};
  {
    const at::Tensor a64 = a.to(at::kDouble);
    const auto [values, vectors] = GramEigen(a64);
    const at::Tensor s = SingularValues(values);
    const at::Tensor spectrum = AsRows(s).cpu();
    STOCKPOT_ASSIGN_OR_RETURN(
        const int64_t rank,
        RankForEnergy({spectrum.const_data_ptr<float>(), static_cast<size_t>(spectrum.numel())},
                      floor));
    const SvdFactors factors = FromEigenvectors(a64, s, vectors, rank);
    svd.u = AsRows(factors.u);
    svd.s = AsRows(factors.s);
    svd.v = AsRows(factors.v);
  }
  Measure(a, energy, svd);
  return svd;
}

}  // namespace stockpot
