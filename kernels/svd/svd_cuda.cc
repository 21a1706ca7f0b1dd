// The GPU backend of svd.h through cuSOLVER's 64-bit interface.
//
// cuSOLVER is column-major and its gesvd takes tall matrices only. A row-major [m, n] is a
// column-major [n, m], so what goes to the device is always tall: a wide A as it lies, which is its
// transpose, with U and V exchanged afterwards; a tall A transposed while it is lifted.
#include "kernels/svd/svd_cuda.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cusolverDn.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "kernels/base/cuda_memory.h"
#include "kernels/svd/solver.h"
#include "kernels/svd/svd_checks.h"

namespace stockpot {
namespace {

Status SolverStatus(cusolverStatus_t status, const char* what) {
  if (status == CUSOLVER_STATUS_SUCCESS) return OkStatus();
  const StatusCode code = status == CUSOLVER_STATUS_ALLOC_FAILED ? StatusCode::kResourceExhausted
                                                                 : StatusCode::kInternal;
  return {code, std::string(what) + ": cuSOLVER status " + std::to_string(status)};
}

Status BlasStatus(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return OkStatus();
  const StatusCode code =
      status == CUBLAS_STATUS_ALLOC_FAILED ? StatusCode::kResourceExhausted : StatusCode::kInternal;
  return {code, std::string(what) + ": cuBLAS status " + std::to_string(status)};
}

template <auto kDestroy>
struct Destroyer {
  template <typename T>
  void operator()(T* handle) const {
    kDestroy(handle);
  }
};
template <typename Handle, auto kDestroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<kDestroy>>;

// A stream, and the libraries' handles bound to it. Destroyed in the reverse order.
struct Handles {
  Owned<cudaStream_t, cudaStreamDestroy> stream;
  Owned<cusolverDnHandle_t, cusolverDnDestroy> solver;
  Owned<cusolverDnParams_t, cusolverDnDestroyParams> params;
  Owned<gesvdjInfo_t, cusolverDnDestroyGesvdjInfo> jacobi;
  Owned<cublasHandle_t, cublasDestroy_v2> blas;
};

Result<Handles> MakeHandles() {
  Handles h;
  cudaStream_t stream = nullptr;
  STOCKPOT_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
  h.stream.reset(stream);
  cusolverDnHandle_t solver = nullptr;
  STOCKPOT_RETURN_IF_ERROR(SolverStatus(cusolverDnCreate(&solver), "cusolverDnCreate"));
  h.solver.reset(solver);
  STOCKPOT_RETURN_IF_ERROR(SolverStatus(cusolverDnSetStream(solver, stream), "SetStream"));
  cusolverDnParams_t params = nullptr;
  STOCKPOT_RETURN_IF_ERROR(SolverStatus(cusolverDnCreateParams(&params), "CreateParams"));
  h.params.reset(params);
  gesvdjInfo_t jacobi = nullptr;
  STOCKPOT_RETURN_IF_ERROR(SolverStatus(cusolverDnCreateGesvdjInfo(&jacobi), "CreateGesvdjInfo"));
  h.jacobi.reset(jacobi);
  cublasHandle_t blas = nullptr;
  STOCKPOT_RETURN_IF_ERROR(BlasStatus(cublasCreate_v2(&blas), "cublasCreate"));
  h.blas.reset(blas);
  STOCKPOT_RETURN_IF_ERROR(BlasStatus(cublasSetStream_v2(blas, stream), "cublasSetStream"));
  return h;
}

// The problem on the device; everything column-major.
struct Problem {
  int64_t rows = 0;  // >= cols
  int64_t cols = 0;
  TruncatedSvdOptions options;  // rank == cols: full
  DeviceBuffer a;               // [rows, cols]; a solver destroys it
  DeviceBuffer u;               // [rows, width]
  DeviceBuffer s;               // [cols]
  DeviceBuffer v;               // [cols, width]; of kGesvd the transpose, [cols, cols]
  DeviceBuffer info;            // int
  bool v_transposed = false;
};

struct Workspace {
  DeviceBuffer device;
  std::vector<char> host;
};

Result<Workspace> MakeWorkspace(size_t device_bytes, size_t host_bytes) {
  Workspace work;
  STOCKPOT_ASSIGN_OR_RETURN(work.device,
                            DeviceBuffer::Make(static_cast<int64_t>(device_bytes) + 1));
  work.host.resize(host_bytes);
  return work;
}

Status RunGesvdr(const Handles& h, Problem& p) {
  const int64_t k = p.options.rank;
  const int64_t extra = SketchColumns(p.rows, p.cols, p.options) - k;
  size_t device = 0, host = 0;
  STOCKPOT_RETURN_IF_ERROR(SolverStatus(
      cusolverDnXgesvdr_bufferSize(h.solver.get(), h.params.get(), 'S', 'S', p.rows, p.cols, k,
                                   extra, p.options.iterations, CUDA_R_32F, p.a.data(), p.rows,
                                   CUDA_R_32F, p.s.data(), CUDA_R_32F, p.u.data(), p.rows,
                                   CUDA_R_32F, p.v.data(), p.cols, CUDA_R_32F, &device, &host),
      "Xgesvdr_bufferSize"));
  STOCKPOT_ASSIGN_OR_RETURN(Workspace work, MakeWorkspace(device, host));
  STOCKPOT_RETURN_IF_ERROR(
      SolverStatus(cusolverDnXgesvdr(h.solver.get(), h.params.get(), 'S', 'S', p.rows, p.cols, k,
                                     extra, p.options.iterations, CUDA_R_32F, p.a.data(), p.rows,
                                     CUDA_R_32F, p.s.data(), CUDA_R_32F, p.u.data(), p.rows,
                                     CUDA_R_32F, p.v.data(), p.cols, CUDA_R_32F, work.device.data(),
                                     device, work.host.data(), host, p.info.as<int>()),
                   "Xgesvdr"));
  return CudaStatus(cudaStreamSynchronize(h.stream.get()), "Xgesvdr");
}

Status RunGesvdj(const Handles& h, Problem& p) {
  const int m = static_cast<int>(p.rows), n = static_cast<int>(p.cols);
  int count = 0;
  STOCKPOT_RETURN_IF_ERROR(SolverStatus(
      cusolverDnSgesvdj_bufferSize(h.solver.get(), CUSOLVER_EIG_MODE_VECTOR, 1, m, n,
                                   p.a.as<float>(), m, p.s.as<float>(), p.u.as<float>(), m,
                                   p.v.as<float>(), n, &count, h.jacobi.get()),
      "Sgesvdj_bufferSize"));
  STOCKPOT_ASSIGN_OR_RETURN(Workspace work,
                            MakeWorkspace(sizeof(float) * static_cast<size_t>(count), 0));
  STOCKPOT_RETURN_IF_ERROR(SolverStatus(
      cusolverDnSgesvdj(h.solver.get(), CUSOLVER_EIG_MODE_VECTOR, 1, m, n, p.a.as<float>(), m,
                        p.s.as<float>(), p.u.as<float>(), m, p.v.as<float>(), n,
                        work.device.as<float>(), count, p.info.as<int>(), h.jacobi.get()),
      "Sgesvdj"));
  return CudaStatus(cudaStreamSynchronize(h.stream.get()), "Sgesvdj");
}

Status RunGesvdp(const Handles& h, Problem& p) {
  size_t device = 0, host = 0;
  STOCKPOT_RETURN_IF_ERROR(SolverStatus(
      cusolverDnXgesvdp_bufferSize(h.solver.get(), h.params.get(), CUSOLVER_EIG_MODE_VECTOR, 1,
                                   p.rows, p.cols, CUDA_R_32F, p.a.data(), p.rows, CUDA_R_32F,
                                   p.s.data(), CUDA_R_32F, p.u.data(), p.rows, CUDA_R_32F,
                                   p.v.data(), p.cols, CUDA_R_32F, &device, &host),
      "Xgesvdp_bufferSize"));
  STOCKPOT_ASSIGN_OR_RETURN(Workspace work, MakeWorkspace(device, host));
  double sigma_error = 0;  // how far a nearly singular A was moved; the residual below sees it
  STOCKPOT_RETURN_IF_ERROR(
      SolverStatus(cusolverDnXgesvdp(h.solver.get(), h.params.get(), CUSOLVER_EIG_MODE_VECTOR, 1,
                                     p.rows, p.cols, CUDA_R_32F, p.a.data(), p.rows, CUDA_R_32F,
                                     p.s.data(), CUDA_R_32F, p.u.data(), p.rows, CUDA_R_32F,
                                     p.v.data(), p.cols, CUDA_R_32F, work.device.data(), device,
                                     work.host.data(), host, p.info.as<int>(), &sigma_error),
                   "Xgesvdp"));
  return CudaStatus(cudaStreamSynchronize(h.stream.get()), "Xgesvdp");
}

Status RunGesvd(const Handles& h, Problem& p) {
  p.v_transposed = true;
  size_t device = 0, host = 0;
  STOCKPOT_RETURN_IF_ERROR(SolverStatus(
      cusolverDnXgesvd_bufferSize(h.solver.get(), h.params.get(), 'S', 'S', p.rows, p.cols,
                                  CUDA_R_32F, p.a.data(), p.rows, CUDA_R_32F, p.s.data(),
                                  CUDA_R_32F, p.u.data(), p.rows, CUDA_R_32F, p.v.data(), p.cols,
                                  CUDA_R_32F, &device, &host),
      "Xgesvd_bufferSize"));
  STOCKPOT_ASSIGN_OR_RETURN(Workspace work, MakeWorkspace(device, host));
  STOCKPOT_RETURN_IF_ERROR(SolverStatus(
      cusolverDnXgesvd(h.solver.get(), h.params.get(), 'S', 'S', p.rows, p.cols, CUDA_R_32F,
                       p.a.data(), p.rows, CUDA_R_32F, p.s.data(), CUDA_R_32F, p.u.data(), p.rows,
                       CUDA_R_32F, p.v.data(), p.cols, CUDA_R_32F, work.device.data(), device,
                       work.host.data(), host, p.info.as<int>()),
      "Xgesvd"));
  return CudaStatus(cudaStreamSynchronize(h.stream.get()), "Xgesvd");
}

Status CopyToHost(const DeviceBuffer& from, void* to, int64_t bytes) {
  return CudaStatus(cudaMemcpy(to, from.data(), static_cast<size_t>(bytes), cudaMemcpyDeviceToHost),
                    "copy to the host");
}

Status UploadMatrix(const std::vector<float>& a, Problem& p) {
  return CudaStatus(
      cudaMemcpy(p.a.data(), a.data(), a.size() * sizeof(float), cudaMemcpyHostToDevice),
      "copy to the device");
}

// One attempt of the chain: makes room for what the solver writes, runs it, reads its verdict.
Result<bool> Attempt(const Handles& h, const std::vector<float>& a, SvdSolver solver, Problem& p) {
  p.v_transposed = false;
  const int64_t width =
      solver == SvdSolver::kGesvdr ? SketchColumns(p.rows, p.cols, p.options) : p.cols;
  const int64_t element = sizeof(float);
  STOCKPOT_ASSIGN_OR_RETURN(p.u, DeviceBuffer::Make(element * p.rows * width));
  STOCKPOT_ASSIGN_OR_RETURN(p.v, DeviceBuffer::Make(element * p.cols * width));
  STOCKPOT_ASSIGN_OR_RETURN(p.s, DeviceBuffer::Make(element * p.cols));
  STOCKPOT_RETURN_IF_ERROR(UploadMatrix(a, p));
  switch (solver) {
    case SvdSolver::kGesvdr:
      STOCKPOT_RETURN_IF_ERROR(RunGesvdr(h, p));
      break;
    case SvdSolver::kGesvdj:
      STOCKPOT_RETURN_IF_ERROR(RunGesvdj(h, p));
      break;
    case SvdSolver::kXgesvdp:
      STOCKPOT_RETURN_IF_ERROR(RunGesvdp(h, p));
      break;
    default:
      STOCKPOT_RETURN_IF_ERROR(RunGesvd(h, p));
      break;
  }
  int info = 0;
  STOCKPOT_RETURN_IF_ERROR(CopyToHost(p.info, &info, sizeof info));
  if (info < 0) {
    return Internal(std::string(SvdSolverName(solver)) + ": argument " + std::to_string(-info));
  }
  return info == 0;
}

// ||A - U S V^T||_F; destroys what is on the device.
Result<double> Residual(const Handles& h, const std::vector<float>& a, Problem& p) {
  const int m = static_cast<int>(p.rows), n = static_cast<int>(p.cols);
  const int k = static_cast<int>(p.options.rank);
  STOCKPOT_RETURN_IF_ERROR(UploadMatrix(a, p));
  STOCKPOT_RETURN_IF_ERROR(
      BlasStatus(cublasSdgmm(h.blas.get(), CUBLAS_SIDE_RIGHT, m, k, p.u.as<float>(), m,
                             p.s.as<float>(), 1, p.u.as<float>(), m),
                 "Sdgmm"));
  const float minus = -1, one = 1;
  STOCKPOT_RETURN_IF_ERROR(BlasStatus(
      cublasSgemm_v2(h.blas.get(), CUBLAS_OP_N, p.v_transposed ? CUBLAS_OP_N : CUBLAS_OP_T, m, n, k,
                     &minus, p.u.as<float>(), m, p.v.as<float>(), n, &one, p.a.as<float>(), m),
      "Sgemm"));
  float norm = 0;
  STOCKPOT_RETURN_IF_ERROR(BlasStatus(
      cublasSnrm2_v2_64(h.blas.get(), p.rows * p.cols, p.a.as<float>(), 1, &norm), "Snrm2"));
  return static_cast<double>(norm);
}

// Column-major [rows, width] on the device -> row-major [rows, k].
Result<std::vector<float>> Columns(const DeviceBuffer& from, int64_t rows, int64_t k,
                                   bool transposed) {
  const int64_t width = transposed ? rows : k;  // what must be read of it
  std::vector<float> all(static_cast<size_t>(rows * width)), out(static_cast<size_t>(rows * k));
  STOCKPOT_RETURN_IF_ERROR(CopyToHost(from, all.data(), rows * width * int64_t{sizeof(float)}));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      out[i * k + j] = transposed ? all[i * rows + j] : all[j * rows + i];
    }
  }
  return out;
}

Result<Svd> Decompose(const SvdArgs& args, const TruncatedSvdOptions& options) {
  const int64_t m = args.fine_tuned.rows, n = args.fine_tuned.cols;
  Svd svd{.rows = m, .cols = n, .rank = options.rank, .solver = "none", .asked = options};
  std::vector<float> a(static_cast<size_t>(m * n)), row(static_cast<size_t>(n));
  const bool wide = m < n;
  for (int64_t i = 0; i < m; ++i) {
    double energy = 0;
    STOCKPOT_RETURN_IF_ERROR(LiftSvdRow(args, i, row.data(), &energy));
    svd.energy += energy;
    for (int64_t j = 0; j < n; ++j) a[wide ? i * n + j : j * m + i] = row[j];
  }
  STOCKPOT_RETURN_IF_ERROR(CheckSvdEnergy(args, svd.energy));
  if (options.rank == 0) {
    svd.relative_error = svd.energy > 0;
    FinishSvd(svd);
    return svd;
  }
  Problem p{.rows = std::max(m, n), .cols = std::min(m, n), .options = options};
  STOCKPOT_ASSIGN_OR_RETURN(const Handles handles, MakeHandles());
  STOCKPOT_ASSIGN_OR_RETURN(p.a, DeviceBuffer::Make(m * n * int64_t{sizeof(float)}));
  STOCKPOT_ASSIGN_OR_RETURN(p.info, DeviceBuffer::Make(sizeof(int)));
  const std::vector<SvdSolver> chain =
      SvdSolverChain({m, n, options.rank, options.oversampling}, SvdDevice::kCuda);
  STOCKPOT_ASSIGN_OR_RETURN(const SvdSolver solver, RunSvdSolvers(chain, [&](SvdSolver s) {
                              return Attempt(handles, a, s, p);
                            }));
  svd.solver = SvdSolverName(solver);
  svd.s.resize(static_cast<size_t>(options.rank));
  STOCKPOT_RETURN_IF_ERROR(CopyToHost(p.s, svd.s.data(), options.rank * int64_t{sizeof(float)}));
  STOCKPOT_ASSIGN_OR_RETURN(svd.u, Columns(p.u, p.rows, options.rank, false));
  STOCKPOT_ASSIGN_OR_RETURN(svd.v, Columns(p.v, p.cols, options.rank, p.v_transposed));
  if (wide) std::swap(svd.u, svd.v);
  STOCKPOT_ASSIGN_OR_RETURN(const double residual, Residual(handles, a, p));
  svd.relative_error = svd.energy > 0 ? residual / std::sqrt(svd.energy) : 0;
  FinishSvd(svd);
  return svd;
}

// gesvdj's and gemm's sizes are ints.
Status CheckSides(const SvdArgs& args) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (args.fine_tuned.rows <= kMost && args.fine_tuned.cols <= kMost) return OkStatus();
  return SvdError(args, "a side is over " + std::to_string(kMost));
}

}  // namespace

Result<Svd> TruncatedSvdCuda(const SvdArgs& args, const TruncatedSvdOptions& options) {
  STOCKPOT_RETURN_IF_ERROR(CheckTruncatedSvd(args, options));
  STOCKPOT_RETURN_IF_ERROR(CheckSides(args));
  auto svd = Decompose(args, options);
  if (svd.ok() || svd.status().code() == StatusCode::kInvalidArgument) return svd;
  return NameTensor(args, svd.status());
}

Result<Svd> FullSvdCuda(const SvdArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckSvdArgs(args));
  return TruncatedSvdCuda(
      args, {.rank = std::min(args.fine_tuned.rows, args.fine_tuned.cols), .oversampling = 0});
}

}  // namespace stockpot
