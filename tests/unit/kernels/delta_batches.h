// What the tests of the operations that add a delta to y share (sparse_delta_linear, lora_linear):
// their backends, and the promise that a row's bits do not depend on its batch. Args is
// SparseDeltaArgs or LoraLinearArgs, which name their fields alike.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/base/threads.h"
#include "tests/unit/kernels/backends.h"
#include "tests/unit/kernels/cuda_emulation/block.h"
#include "tests/unit/kernels/matrices.h"

namespace stockpot {

// A way to compute the operation.
template <typename Args>
struct DeltaBackend {
  std::string name;
  std::function<Status(const Args&, ThreadPool&)> run;
  int64_t most_weights = 0;  // d_out x d_in in the tables: a fiber switch costs some 200 ns
};

template <typename Args>
void PrintTo(const DeltaBackend<Args>& backend, std::ostream* out) {
  *out << backend.name;
}

// The reference, every SIMD target with a scratch of its own that lives as long as the backend, and
// the emulated device in three orders of threads.
template <typename Args, typename Scratch>
std::vector<DeltaBackend<Args>> DeltaBackends(Status (*reference)(const Args&),
                                              Status (*cpu)(const Args&, Scratch&, ThreadPool&),
                                              Status (*emulated)(const Args&,
                                                                 const emulation::Schedule&)) {
  std::vector<DeltaBackend<Args>> backends;
  backends.push_back(
      {"Reference", [=](const Args& args, ThreadPool&) { return reference(args); }, 1 << 20});
  for (const SimdTarget& target : SimdTargets()) {
    const auto scratch = std::make_shared<Scratch>();
    backends.push_back({target.name,
                        [=](const Args& args, ThreadPool& threads) {
                          const ScopedSimdTarget scoped(target);
                          return cpu(args, *scratch, threads);
                        },
                        1 << 20});
  }
  for (const auto& [name, order] : {std::pair{"Forward", emulation::ThreadOrder::kForward},
                                    {"Reverse", emulation::ThreadOrder::kReverse},
                                    {"Shuffled", emulation::ThreadOrder::kShuffled}}) {
    backends.push_back({std::string("CudaEmulated") + name,
                        [=, order = order](const Args& args, ThreadPool&) {
                          return emulated(args, {order, 5});
                        },
                        9 * 257});
  }
  return backends;
}

// What a float32 sum of n terms in a tree of lanes may err by, as a share of the norms of its
// terms.
inline double RelativeTolerance(int64_t n) {
  return std::min(1e-5, 4 * std::ldexp(1.0, -23) * std::sqrt(static_cast<double>(n) + 4));
}

inline double Norm(const float* values, int64_t count) {
  double square = 0;
  for (int64_t i = 0; i < count; ++i) square += static_cast<double>(values[i]) * values[i];
  return std::sqrt(square);
}

inline OwnedFloats Copy(const ConstFloatMatrix& m, int64_t padding = 0) {
  OwnedFloats copy(m.rows, m.cols, padding);
  for (int64_t r = 0; r < m.rows; ++r) std::copy_n(m.row(r), m.cols, copy.view().row(r));
  return copy;
}

// Computes random batches of rows of `all`, with repetitions, and expects each row's bits to be
// those that it has when all rows are computed at once.
template <typename Args>
void ExpectRowsIndependent(const DeltaBackend<Args>& backend, const Args& all, int batches,
                           Random& random) {
  static const std::unique_ptr<ThreadPool> pools[] = {std::make_unique<ThreadPool>(1),
                                                      std::make_unique<ThreadPool>(2),
                                                      std::make_unique<ThreadPool>(3)};
  const ConstFloatMatrix before{all.y.data, all.y.rows, all.y.cols, all.y.stride};
  OwnedFloats want = Copy(before);
  Args whole = all;
  whole.y = want.view();
  ASSERT_TRUE(backend.run(whole, *pools[0]).ok());
  for (int b = 0; b < batches; ++b) {
    const int64_t rows =
        1 + static_cast<int64_t>(random() % (b % 2 == 0 ? 6 : static_cast<uint64_t>(all.x.rows)));
    OwnedFloats x(rows, all.x.cols, 1), y(rows, all.y.cols, 2);
    std::vector<int64_t> sources;
    std::vector<int32_t> delta_of_row;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t t = static_cast<int64_t>(random() % static_cast<uint64_t>(all.x.rows));
      sources.push_back(t);
      delta_of_row.push_back(all.delta_of_row[t]);
      std::copy_n(all.x.row(t), all.x.cols, x.view().row(i));
      std::copy_n(before.row(t), before.cols, y.view().row(i));
    }
    Args args = all;
    args.x = x.cview();
    args.delta_of_row = delta_of_row;
    args.y = y.view();
    ASSERT_TRUE(backend.run(args, *pools[random() % 3]).ok());
    for (int64_t i = 0; i < rows; ++i) {
      ASSERT_EQ(0, std::memcmp(y.view().row(i), want.view().row(sources[i]),
                               static_cast<size_t>(all.y.cols) * sizeof(float)))
          << all.y.cols << " x " << all.x.cols << ", row " << sources[i] << " in a batch of "
          << rows;
    }
  }
}

}  // namespace stockpot
