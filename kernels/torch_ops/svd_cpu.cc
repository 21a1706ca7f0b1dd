// The CPU backend of kernels/svd/svd.h: raw views in, LibTorch's BLAS and LAPACK inside.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <mutex>

#include "kernels/svd/svd.h"
#include "kernels/svd/svd_checks.h"
#include "kernels/torch_ops/svd_tensor.h"

namespace stockpot {
namespace {

constexpr int64_t kLiftGrain = 16;  // rows

// The delta as a tensor and its energy; the first row that is not finite names itself.
Result<at::Tensor> Lift(const SvdArgs& args, double* energy) {
  const int64_t m = args.fine_tuned.rows, n = args.fine_tuned.cols;
  at::Tensor delta = at::empty({m, n}, at::kFloat);
  float* data = delta.mutable_data_ptr<float>();
  std::vector<double> energies(static_cast<size_t>(m));
  std::vector<Status> errors(static_cast<size_t>((m + kLiftGrain - 1) / kLiftGrain));
  at::parallel_for(0, static_cast<int64_t>(errors.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      Status& error = errors[static_cast<size_t>(block)];
      const int64_t end = std::min(m, (block + 1) * kLiftGrain);
      for (int64_t r = block * kLiftGrain; r < end && error.ok(); ++r) {
        error = LiftSvdRow(args, r, data + r * n, &energies[static_cast<size_t>(r)]);
      }
    }
  });
  for (const Status& error : errors) STOCKPOT_RETURN_IF_ERROR(error);
  *energy = 0;
  for (const double e : energies) *energy += e;
  return delta;
}

std::vector<float> Take(at::Tensor& t) {
  const float* data = t.const_data_ptr<float>();
  std::vector<float> values(data, data + t.numel());
  t.reset();
  return values;
}

using Decomposition = std::function<Result<TensorSvd>(at::Tensor, double energy)>;

// What the three have in common. REQUIRES: the arguments have been checked.
Result<Svd> Run(const SvdArgs& args, const Decomposition& decompose) {
  const int64_t m = args.fine_tuned.rows, n = args.fine_tuned.cols;
  Svd svd{.rows = m, .cols = n, .solver = "none"};
  if (m == 0 || n == 0) return svd;
  try {
    const at::NoGradGuard no_grad;
    STOCKPOT_ASSIGN_OR_RETURN(at::Tensor delta, Lift(args, &svd.energy));
    STOCKPOT_RETURN_IF_ERROR(CheckSvdEnergy(args, svd.energy));
    auto found = decompose(std::move(delta), svd.energy);
    if (!found.ok()) {
      return NameTensor(args, found.status());
    }
    svd.rank = found->s.size(0);
    svd.u = Take(found->u);
    svd.s = Take(found->s);
    svd.v = Take(found->v);
    svd.relative_error = found->relative_error;
    svd.solver = found->solver;
  } catch (const std::exception& e) {  // c10::Error, std::bad_alloc
    return NameTensor(args, Internal("LibTorch: " + std::string(e.what())));
  }
  FinishSvd(svd);
  return svd;
}

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kDouble = sizeof(double);

}  // namespace

// The delta, then the sketch's two sides twice (what a QR reads and what it makes), the core.
int64_t TruncatedSvdBytes(int64_t rows, int64_t cols, const TruncatedSvdOptions& options) {
  const int64_t columns = SketchColumns(rows, cols, options);
  return kFloat * rows * cols + kFloat * columns * (rows + cols) * 7 / 2 +
         12 * kDouble * columns * columns;
}

// The delta, the copy that LAPACK overwrites, its workspace, and both sides' vectors twice.
int64_t FullSvdBytes(int64_t rows, int64_t cols) {
  const int64_t side = std::min(rows, cols);
  return kFloat * (2 * rows * cols + 3 * side * (rows + cols) + 4 * side * side);
}

// The delta in float32 and float64; the Gram matrix, its vectors and LAPACK's workspace; what is
// kept of both sides' vectors in float64 and float32.
int64_t EnergySvdBytes(int64_t rows, int64_t cols) {
  const int64_t side = std::min(rows, cols);
  return (kFloat + kDouble) * rows * cols + kDouble * 3 * side * side +
         (kFloat + kDouble) * side * (rows + cols);
}

Result<Svd> TruncatedSvdCpu(const SvdArgs& args, const TruncatedSvdOptions& options) {
  STOCKPOT_RETURN_IF_ERROR(CheckTruncatedSvd(args, options));
  const int64_t m = args.fine_tuned.rows, n = args.fine_tuned.cols;
  STOCKPOT_RETURN_IF_ERROR(CheckSvdBytes(args, TruncatedSvdBytes(m, n, options)));
  STOCKPOT_ASSIGN_OR_RETURN(Svd svd, Run(args, [&](at::Tensor delta, double energy) {
                              return SubspaceSvd(std::move(delta), energy, args.name, options);
                            }));
  svd.asked = options;
  return svd;
}

Result<Svd> FullSvdCpu(const SvdArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckSvdArgs(args));
  STOCKPOT_RETURN_IF_ERROR(
      CheckSvdBytes(args, FullSvdBytes(args.fine_tuned.rows, args.fine_tuned.cols)));
  STOCKPOT_ASSIGN_OR_RETURN(Svd svd, Run(args, FullSvd));
  svd.asked.rank = svd.rank;
  return svd;
}

Result<Svd> EnergySvdCpu(const SvdArgs& args, double floor) {
  STOCKPOT_RETURN_IF_ERROR(CheckSvdArgs(args));
  if (!(floor > 0 && floor <= 1)) {
    return SvdError(args, "floor " + std::to_string(floor) + " is not in (0, 1]");
  }
  STOCKPOT_RETURN_IF_ERROR(
      CheckSvdBytes(args, EnergySvdBytes(args.fine_tuned.rows, args.fine_tuned.cols)));
  STOCKPOT_ASSIGN_OR_RETURN(Svd svd, Run(args, [&](at::Tensor delta, double energy) {
                              return EnergySvd(std::move(delta), energy, floor);
                            }));
  svd.asked.rank = svd.rank;
  return svd;
}

}  // namespace stockpot
