// The CPU backend of the SVD against torch.linalg.svd in float64, our reference, and spectra that
// are known by construction.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/svd/svd.h"
#include "kernels/torch_ops/svd_tensor.h"
#include "tests/unit/kernels/matrices.h"
#include "tests/unit/kernels/svd_spectra.h"

namespace stockpot {
namespace {

constexpr double kEpsilon = std::numeric_limits<float>::epsilon();

WeightMatrix View(const at::Tensor& w) {
  const DType dtype = w.scalar_type() == at::kBFloat16 ? DType::kBF16
                      : w.scalar_type() == at::kHalf   ? DType::kF16
                                                       : DType::kF32;
  return {w.data_ptr(), dtype, w.size(0), w.size(1), w.stride(0)};
}

at::Tensor Matrix(const std::vector<float>& values, int64_t rows, int64_t cols) {
  return at::from_blob(const_cast<float*>(values.data()), {rows, cols}, at::kFloat).to(at::kDouble);
}

at::Tensor Rebuilt(const Svd& svd) {
  return at::mm(Matrix(svd.u, svd.rows, svd.rank) * Matrix(svd.s, 1, svd.rank),
                Matrix(svd.v, svd.cols, svd.rank).t());
}

void ExpectOrthonormal(const std::vector<float>& columns, int64_t rows, int64_t rank) {
  const at::Tensor q = Matrix(columns, rows, rank);
  const at::Tensor off = at::mm(q.t(), q) - at::eye(rank, at::kDouble);
  const double bound = 8 * kEpsilon * std::sqrt(static_cast<double>(rows + 1)) + 4 * kEpsilon;
  EXPECT_LE(off.numel() == 0 ? 0 : off.abs().max().item<double>(), bound);
}

// What every decomposition promises, against the delta in float64.
void ExpectConsistent(const Svd& svd, const at::Tensor& delta, const std::string& what) {
  SCOPED_TRACE(what);
  const double norm = delta.norm().item<double>();
  ExpectOrthonormal(svd.u, svd.rows, svd.rank);
  ExpectOrthonormal(svd.v, svd.cols, svd.rank);
  EXPECT_TRUE(std::is_sorted(svd.s.rbegin(), svd.s.rend()));
  EXPECT_NEAR(svd.energy, norm * norm, 1e-6 * norm * norm);
  const double error = norm == 0 ? 0 : ((delta - Rebuilt(svd)).norm() / norm).item<double>();
  EXPECT_NEAR(svd.relative_error, error, 1e-5);
  // Pythagoras: what is captured and what is left add up.
  EXPECT_NEAR(svd.captured + error * error, 1, 1e-5);
  for (int64_t k = 0; k < svd.rank; ++k) {
    const at::Tensor column = Matrix(svd.u, svd.rows, svd.rank).select(1, k);
    EXPECT_GT(column[column.abs().argmax()].item<double>(), 0);
  }
}

struct Shape {
  int64_t m, n;
};
// 0, 1, primes, and around the panel of 256.
const Shape kShapes[] = {{0, 5}, {5, 0}, {0, 0},   {1, 1},    {1, 37},   {37, 1},
                         {7, 5}, {5, 7}, {61, 67}, {255, 40}, {257, 90}, {90, 513}};

TEST(SvdCpu, FullMatchesTorchForEveryShapeAndDType) {
  at::manual_seed(3);
  for (const auto& [m, n] : kShapes) {
    for (const auto& [base_type, tuned_type] : {std::pair{at::kFloat, at::kFloat},
                                                {at::kBFloat16, at::kFloat},
                                                {at::kBFloat16, at::kBFloat16},
                                                {at::kHalf, at::kBFloat16}}) {
      // Strided rows: a slice of a wider matrix.
      const at::Tensor base = at::randn({m, n + 3}).to(base_type).slice(1, 1, n + 1);
      const at::Tensor tuned = at::randn({m, n + 2}).to(tuned_type).slice(1, 0, n);
      const at::Tensor delta = tuned.to(at::kDouble) - base.to(at::kDouble);
      const WeightMatrix base_view = View(base);
      const SvdArgs args{.name = "w", .fine_tuned = View(tuned), .base = &base_view};
      const Svd svd = FullSvdCpu(args).value();
      const std::string what = std::to_string(m) + " x " + std::to_string(n);
      ASSERT_EQ(svd.rank, std::min(m, n)) << what;
      if (svd.rank == 0) continue;
      ExpectConsistent(svd, delta, what);
      const at::Tensor oracle = at::linalg_svdvals(delta);
      // LAPACK's bound: eps * s_1 times a modest function of the size.
      const double bound = 4 * kEpsilon * oracle[0].item<double>() * std::sqrt(m + n);
      EXPECT_LE((Matrix(svd.s, 1, svd.rank)[0] - oracle).abs().max().item<double>(), bound) << what;
      EXPECT_LE(svd.relative_error, 4 * kEpsilon * std::sqrt(m + n)) << what;
    }
  }
}

TEST(SvdCpu, TruncatedMatchesTheReferenceWhereTheSpectrumDecays) {
  at::manual_seed(4);
  for (const auto& [m, n] : {Shape{40, 24}, {24, 40}, {1, 30}, {30, 1}, {33, 33}}) {
    const int64_t k = std::min(m, n), r = std::max<int64_t>(1, k / 4);
    const auto [u, s, vh] = at::linalg_svd(at::randn({m, n}, at::kDouble), false);
    const at::Tensor decay = at::pow(0.5, at::arange(k, at::kDouble));
    const at::Tensor a = at::mm(u * decay, vh).to(at::kFloat).contiguous();
    const SvdArgs args{.name = "w", .fine_tuned = View(a)};
    const TruncatedSvdOptions options{.rank = r, .oversampling = r, .iterations = 4};
    const Svd got = TruncatedSvdCpu(args, options).value();
    const Svd want = TruncatedSvdReference(args, options).value();
    ExpectConsistent(got, a.to(at::kDouble), "decay");
    EXPECT_EQ(got.asked.rank, r);
    EXPECT_EQ(got.asked.iterations, 4);
    EXPECT_NEAR(got.captured, want.captured, 1e-6);
    // Signs are fixed, and the gaps are 2: the vectors themselves agree.
    const auto furthest = [](const std::vector<float>& x, const std::vector<float>& y) {
      double most = 0;
      for (size_t i = 0; i < x.size(); ++i) most = std::max(most, std::fabs(double{x[i]} - y[i]));
      return most;
    };
    EXPECT_LE(furthest(got.s, want.s), 1e-6);
    EXPECT_LE(furthest(got.u, want.u), 2e-4);
    EXPECT_LE(furthest(got.v, want.v), 2e-4);
  }
}

// n = 2048, r = 64: the error over the optimum's and the captured energy over the optimum's stay
// within the table of svd.h (rounded there to its last digit).
TEST(SvdCpu, ErrorsStayWithinTheTable) {
  struct Row {
    double error, captured, accurate_error, accurate_captured;
  };
  const Row table[] = {{1.0095, 0.855, 1.0025, 0.96},
                       {1.0065, 0.99, 1.0005, 0.9995},
                       {1.0075, 0.9995, 1.0005, 0.9995},
                       {1.0015, 0.9995, 1.0005, 0.9995},
                       {1.02, 0.998, 1.0005, 0.9995}};  // the geometric one is not in the table
  at::manual_seed(1);
  size_t i = 0;
  for (const Spectrum& spectrum : Spectra(2048)) {
    SCOPED_TRACE(spectrum.name);
    const at::Tensor a = MatrixWith(spectrum.s);
    const double best = BestCaptured(spectrum.s, 64);
    const SvdArgs args{.name = spectrum.name, .fine_tuned = View(a)};
    const Svd fast = TruncatedSvdCpu(args, {}).value();  // the defaults: r = 64, p = 8, q = 2
    EXPECT_LE(fast.relative_error / std::sqrt(1 - best), table[i].error);
    EXPECT_GE(fast.captured / best, table[i].captured);
    EXPECT_LE(fast.captured / best, 1 + 1e-5);
    const Svd accurate =
        TruncatedSvdCpu(args, {.rank = 64, .oversampling = 64, .iterations = 4}).value();
    EXPECT_LE(accurate.relative_error / std::sqrt(1 - best), table[i].accurate_error);
    EXPECT_GE(accurate.captured / best, table[i].accurate_captured);
    ++i;
  }
  EXPECT_EQ(i, 5u);
}

TEST(SvdCpu, SameBitsForEveryRunAndNumberOfThreads) {
  at::manual_seed(5);
  const int before = at::get_num_threads();
  for (const auto& [m, n] : {Shape{700, 530}, {130, 90}, {301, 1100}}) {
    const at::Tensor a = at::randn({m, n});
    const SvdArgs args{.name = "w", .fine_tuned = View(a)};
    const TruncatedSvdOptions options{.rank = 20, .seed = 9};
    at::set_num_threads(1);
    const Svd truncated = TruncatedSvdCpu(args, options).value();
    const Svd full = FullSvdCpu(args).value();
    const Svd energy = EnergySvdCpu(args, 0.5).value();
    for (const int threads : {1, 2, 3, 5}) {
      at::set_num_threads(threads);
      const auto expect_same = [&](const Svd& got, const Svd& want) {
        SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(n) + ", " +
                     std::to_string(threads) + " threads, " + got.solver);
        EXPECT_TRUE(got.u == want.u);
        EXPECT_TRUE(got.s == want.s);
        EXPECT_TRUE(got.v == want.v);
        EXPECT_EQ(got.relative_error, want.relative_error);
      };
      expect_same(TruncatedSvdCpu(args, options).value(), truncated);
      expect_same(FullSvdCpu(args).value(), full);
      expect_same(EnergySvdCpu(args, 0.5).value(), energy);
    }
    TruncatedSvdOptions other = options;
    other.seed = 10;
    EXPECT_FALSE(TruncatedSvdCpu(args, other)->u == truncated.u);
    SvdArgs renamed = args;
    renamed.name = "v";
    EXPECT_FALSE(TruncatedSvdCpu(renamed, options)->u == truncated.u);
  }
  at::set_num_threads(before);
}

TEST(SvdCpu, EnergyKeepsTheFloorWithTheSmallestRank) {
  at::manual_seed(6);
  for (const auto& [m, n] : {Shape{90, 60}, {60, 90}, {1, 20}, {20, 1}, {300, 20}}) {
    const at::Tensor a = at::randn({m, n});
    const at::Tensor s = at::linalg_svdvals(a.to(at::kDouble));
    for (const double floor : {0.1, 0.5, 0.95, 0.999, 1.0}) {
      const Svd svd = EnergySvdCpu({.name = "w", .fine_tuned = View(a)}, floor).value();
      ExpectConsistent(svd, a.to(at::kDouble), "energy");
      EXPECT_GE(BestCaptured(s, svd.rank), floor - 1e-6);
      EXPECT_LT(BestCaptured(s, svd.rank - 1), floor);
      EXPECT_NEAR(svd.captured, BestCaptured(s, svd.rank), 1e-5);
    }
  }
}

TEST(SvdCpu, ZeroAndRankDeficient) {
  at::manual_seed(7);
  const at::Tensor zero = at::zeros({50, 30});
  const at::Tensor three = at::mm(at::randn({50, 3}), at::randn({3, 30}));
  for (const at::Tensor& a : {zero, three}) {
    const SvdArgs args{.name = "w", .fine_tuned = View(a)};
    const bool is_zero = a.data_ptr() == zero.data_ptr();
    for (const Svd& svd : {TruncatedSvdCpu(args, {.rank = 8}).value(), FullSvdCpu(args).value(),
                           TruncatedSvdCpu(args, {.rank = 30, .oversampling = 100}).value()}) {
      ExpectOrthonormal(svd.u, 50, svd.rank);
      ExpectOrthonormal(svd.v, 30, svd.rank);
      EXPECT_LE(svd.relative_error, 1e-5);
      EXPECT_NEAR(svd.captured, 1, 1e-5);
      EXPECT_LE(svd.s[3], 1e-4 * (1 + svd.s[0]));
      EXPECT_EQ(svd.s[0] == 0, is_zero);
    }
    EXPECT_EQ(EnergySvdCpu(args, 1).value().rank, is_zero ? 0 : 3);
    EXPECT_EQ(TruncatedSvdCpu(args, {.rank = 0}).value().rank, 0);
    EXPECT_EQ(TruncatedSvdCpu(args, {.rank = 0})->relative_error, is_zero ? 0 : 1);
  }
}

TEST(SvdCpu, EverySolverOfTheChainDecomposes) {
  at::manual_seed(8);
  for (const at::Tensor& a : {at::randn({40, 25}), at::randn({25, 40}), at::zeros({6, 4}),
                              at::mm(at::randn({20, 3}), at::randn({3, 30}))}) {
    for (const SvdSolver solver : {SvdSolver::kGesddF32, SvdSolver::kGesddF64, SvdSolver::kSyevd}) {
      SvdFactors f;
      ASSERT_TRUE(SolveSvd(a, solver, f).value());
      const at::Tensor u = f.u.to(at::kDouble), s = f.s.to(at::kDouble), v = f.v.to(at::kDouble);
      const double scale = 1 + a.norm().item<double>();
      EXPECT_LE((at::mm(u * s, v.t()) - a).norm().item<double>(), 1e-5 * scale);
      for (const at::Tensor& q : {u, v}) {
        EXPECT_LE((at::mm(q.t(), q) - at::eye(q.size(1))).abs().max().item<double>(), 1e-5)
            << SvdSolverName(solver);
      }
    }
  }
}

TEST(SvdCpu, NamesWhatDoesNotFit) {
  at::manual_seed(9);
  const at::Tensor a = at::randn({20, 10}), other = at::randn({20, 11});
  const WeightMatrix other_view = View(other);
  const SvdArgs good{.name = "h.weight", .fine_tuned = View(a)};
  const auto reject = [](const Result<Svd>& result, const std::string& what,
                         StatusCode code = StatusCode::kInvalidArgument) {
    EXPECT_EQ(result.status().code(), code);
    EXPECT_EQ(result.status().message().rfind("tensor 'h.weight': ", 0), 0u);
    EXPECT_NE(result.status().message().find(what), std::string::npos)
        << result.status().ToString();
  };
  for (const auto& truncated : {TruncatedSvdReference, TruncatedSvdCpu}) {
    reject(truncated(good, {.rank = 11}), "rank 11");
    reject(truncated(good, {.rank = -1}), "rank -1");
    reject(truncated(good, {.rank = 4, .oversampling = -1}), "oversampling");
    reject(truncated(good, {.rank = 4, .iterations = 0}), "iterations 0");
    reject(truncated(good, {.rank = 4, .iterations = 65}), "iterations 65");
  }
  SvdArgs bad = good;
  bad.base = &other_view;
  reject(FullSvdCpu(bad), "base is [20, 11]");
  bad = good;
  bad.fine_tuned.stride = 9;
  reject(FullSvdCpu(bad), "fine_tuned has a stride");
  bad = good;
  bad.fine_tuned.dtype = DType::kI8;
  reject(FullSvdReference(bad), "fine_tuned has dtype");
  bad = good;
  bad.fine_tuned.data = nullptr;
  reject(FullSvdCpu(bad), "fine_tuned has no data");
  reject(EnergySvdCpu(good, 0), "floor");
  bad = good;
  bad.max_bytes = 20 * 10 * 4;
  reject(FullSvdCpu(bad), "max_bytes", StatusCode::kResourceExhausted);
  reject(TruncatedSvdCpu(bad, {.rank = 2}), "max_bytes", StatusCode::kResourceExhausted);
  reject(EnergySvdCpu(bad, 0.5), "max_bytes", StatusCode::kResourceExhausted);
}

TEST(SvdCpu, NamesThePlaceOfNanAndInfinity) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {std::nanf(""), infinity, -infinity}) {
    at::Tensor tuned = at::ones({40, 10}), base = at::zeros({40, 10});
    tuned[33][7] = value;
    const WeightMatrix base_view = View(base);
    const SvdArgs args{.name = "w", .fine_tuned = View(tuned), .base = &base_view};
    for (const Result<Svd>& result : {FullSvdCpu(args), TruncatedSvdCpu(args, {.rank = 2}),
                                      EnergySvdCpu(args, 0.9), FullSvdReference(args)}) {
      EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
      EXPECT_NE(result.status().message().find("fine_tuned[33, 7] is "), std::string::npos)
          << result.status().ToString();
    }
    tuned[33][7] = 1;
    base[2][0] = value;
    EXPECT_NE(FullSvdCpu(args).status().message().find("base[2, 0] is "), std::string::npos);
  }
  const at::Tensor huge = at::full({2, 2}, 3e38), minus = -huge;
  const WeightMatrix minus_view = View(minus);
  const SvdArgs args{.name = "w", .fine_tuned = View(huge), .base = &minus_view};
  EXPECT_NE(FullSvdCpu(args).status().message().find("overflows"), std::string::npos);
  const SvdArgs alone{.name = "", .fine_tuned = View(huge)};
  for (const Result<Svd>& result :
       {FullSvdCpu(alone), TruncatedSvdCpu(alone, {.rank = 2}), EnergySvdCpu(alone, 0.9)}) {
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(result.status().message().find("values are too large for float32"), 0u)
        << result.status().ToString();
  }
  const at::Tensor large = at::full({2, 2}, 4.9e36);  // of norm 9.8e36
  EXPECT_TRUE(TruncatedSvdCpu({.name = "w", .fine_tuned = View(large)}, {.rank = 2}).ok());
}

// Counts the bytes that LibTorch holds and their peak while it lives.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : real_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, 255); }
  ~CountingAllocator() override { c10::SetCPUAllocator(real_, 255); }

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{real_->allocate(bytes), bytes, this};
    live_ += bytes;
    for (size_t peak = peak_; live_ > peak && !peak_.compare_exchange_weak(peak, live_);) {
    }
    return {block->data.get(), block, &Free, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  int64_t peak() const { return static_cast<int64_t>(peak_.load()); }

 private:
  struct Block {
    c10::DataPtr data;
    size_t bytes;
    CountingAllocator* owner;
  };
  static void Free(void* p) {
    auto* block = static_cast<Block*>(p);
    block->owner->live_ -= block->bytes;
    delete block;
  }

  c10::Allocator* real_;
  std::atomic<size_t> live_{0}, peak_{0};
};

TEST(SvdCpu, HoldsNoMoreThanItsBound) {
  at::manual_seed(10);
  for (const auto& [m, n] : {Shape{600, 600}, {900, 200}, {200, 900}}) {
    const at::Tensor a = at::randn({m, n});
    const SvdArgs args{.name = "w", .fine_tuned = View(a)};
    const auto expect_within = [&](const char* what, int64_t bound,
                                   const std::function<Result<Svd>()>& call) {
      CountingAllocator counting;
      ASSERT_TRUE(call().ok());
      const double matrix = 4.0 * static_cast<double>(m * n);
      std::printf("%-9s %ld x %ld: %.2f of the matrix, bound %.2f\n", what, m, n,
                  static_cast<double>(counting.peak()) / matrix,
                  static_cast<double>(bound) / matrix);
      EXPECT_LE(counting.peak(), bound) << what;
      EXPECT_GE(counting.peak(), bound / 4) << what;  // no wild guess either
    };
    const TruncatedSvdOptions options{.rank = 32};
    expect_within("truncated", TruncatedSvdBytes(m, n, options),
                  [&] { return TruncatedSvdCpu(args, options); });
    expect_within("full", FullSvdBytes(m, n), [&] { return FullSvdCpu(args); });
    expect_within("energy", EnergySvdBytes(m, n), [&] { return EnergySvdCpu(args, 0.99); });
  }
}

}  // namespace
}  // namespace stockpot
