// lora_linear: every backend against double precision on the factors as they were handed in, over
// shapes, ranks and dtypes mixed in one batch; its promise of batch invariance; what it rejects.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/lora/lora_layout.h"
#include "kernels/lora/lora_linear.h"
#include "tests/unit/kernels/cuda_emulation/cuda_emulation.h"
#include "tests/unit/kernels/delta_batches.h"
#include "tests/unit/kernels/golden_file.h"
// After the emulation, which stands in for the platform.
#include "kernels/lora/lora_linear_cuda.cuh"

namespace stockpot {
namespace {

using Backend = DeltaBackend<LoraLinearArgs>;

struct Adapter {
  Adapter(int64_t d_out, int64_t d_in, int64_t rank, DType a_dtype, DType b_dtype, float s,
          Random& random)
      : a(OwnedWeight::Gaussian(a_dtype, rank, d_in, 0.1f, random, 3)),
        b(OwnedWeight::Gaussian(b_dtype, d_out, rank, 0.1f, random, 1)),
        scale(s),
        packed(LoraDelta::Pack(a.view(), b.view(), s).value()) {}

  OwnedWeight a, b;
  float scale;
  LoraDelta packed;
};

// Everything a call needs: adapters of the given ranks, dtypes and scales in turn, and an absent
// one.
struct Problem {
  Problem(int64_t rows, int64_t d_out, int64_t d_in, const std::vector<int64_t>& ranks,
          uint64_t seed)
      : random(seed),
        x(OwnedFloats::Gaussian(rows, d_in, random, 3)),
        y(OwnedFloats::Gaussian(rows, d_out, random, 5)) {
    const DType dtypes[] = {DType::kBF16, DType::kF16, DType::kF32};
    const float scales[] = {2.0f, 16.0f / 3, 0.25f, 1.0f};
    for (const int64_t rank : ranks) {
      const DType a = dtypes[random() % 3], b = dtypes[random() % 3];
      adapters.emplace_back(d_out, d_in, rank, a, b, scales[random() % 4], random);
    }
    for (const Adapter& adapter : adapters) table.push_back(&adapter.packed);
    table.push_back(nullptr);
    for (int64_t t = 0; t < rows; ++t) {
      delta_of_row.push_back(static_cast<int32_t>(random() % (table.size() + 1)) - 1);
    }
  }

  LoraLinearArgs args() {
    return {.x = x.cview(), .deltas = table, .delta_of_row = delta_of_row, .y = y.view()};
  }

  Random random;
  OwnedFloats x, y;
  std::vector<Adapter> adapters;
  std::vector<const LoraDelta*> table;
  std::vector<int32_t> delta_of_row;
};

// Runs a copy of p's y and expects y + s B A x. The scale of an error is |x[t]| times the sum over
// the ranks of |s B[o, k]| |A[k]|, and |y[t, o]|.
void ExpectExact(const Backend& backend, Problem& p, ThreadPool& threads) {
  LoraLinearArgs args = p.args();
  const ConstFloatMatrix before = p.y.cview();
  OwnedFloats got = Copy(before, 1);
  args.y = got.view();
  ASSERT_TRUE(backend.run(args, threads).ok());
  for (int64_t t = 0; t < args.x.rows; ++t) {
    const int32_t index = p.delta_of_row[t];
    if (index < 0 || p.table[index] == nullptr || p.table[index]->rank() == 0) {
      ASSERT_TRUE(std::equal(before.row(t), before.row(t) + before.cols, got.view().row(t)));
      continue;
    }
    const Adapter& adapter = p.adapters[index];
    const WeightMatrix a = adapter.a.view(), b = adapter.b.view();
    const double x_norm = Norm(args.x.row(t), args.x.cols);
    std::vector<double> hidden(static_cast<size_t>(a.rows)), norms(hidden.size());
    for (int64_t k = 0; k < a.rows; ++k) {
      for (int64_t i = 0; i < a.cols; ++i) {
        hidden[k] += static_cast<double>(a.at(k, i)) * args.x.row(t)[i];
        norms[k] += std::pow(a.at(k, i), 2);
      }
    }
    for (int64_t o = 0; o < args.y.cols; ++o) {
      double want = before.row(t)[o], scale = std::fabs(want);
      for (int64_t k = 0; k < a.rows; ++k) {
        const double factor = static_cast<double>(adapter.scale) * b.at(o, k);
        want += factor * hidden[k];
        scale += std::fabs(factor) * std::sqrt(norms[k]) * x_norm;
      }
      ASSERT_NEAR(got.view().row(t)[o], want, RelativeTolerance(a.cols + a.rows) * scale)
          << "rank " << a.rows << " row " << t << " output " << o;
    }
  }
}

// The host stands in for the device: A as it is, B transposed.
Status RunEmulated(const LoraLinearArgs& args, const emulation::Schedule& schedule) {
  STOCKPOT_RETURN_IF_ERROR(CheckLoraArgs(args));
  std::vector<OwnedWeight> factors;
  factors.reserve(2 * args.deltas.size());
  std::vector<CudaLoraDelta> deltas(args.deltas.size());
  int64_t largest = 0;
  for (size_t v = 0; v < deltas.size(); ++v) {
    if (args.deltas[v] == nullptr) continue;
    const LoraDelta::Layout& layout = args.deltas[v]->layout();
    largest = std::max(largest, layout.rank);
    OwnedWeight& a = factors.emplace_back(layout.a_dtype, layout.rank, layout.d_in, 1);
    OwnedWeight& b = factors.emplace_back(layout.b_dtype, layout.rank, layout.d_out, 2);
    for (int64_t k = 0; k < layout.rank; ++k) {
      for (int64_t i = 0; i < layout.d_in; ++i) a.Set(k, i, layout.A(k, i));
      for (int64_t o = 0; o < layout.d_out; ++o) b.Set(k, o, layout.B(o, k));
    }
    deltas[v] = {a.view(), b.view()};
  }
  OwnedFloats hidden(args.x.rows, largest, 1, std::nanf(""));
  const CudaLoraArgs cuda{
      .x = args.x,
      .deltas = deltas.data(),
      .delta_count = static_cast<int64_t>(deltas.size()),
      .delta_of_row = args.delta_of_row.empty() ? nullptr : args.delta_of_row.data(),
      .hidden = hidden.view(),
      .y = args.y};
  const LoraGrid shrink = GridOfShrink(args.x.rows, largest);
  EmulateLaunch(schedule, {shrink.x, shrink.y}, {kLoraWarps * kLoraWarpLanes}, LoraShrinkKernel,
                cuda);
  const LoraGrid expand = GridOfExpand(args.x.rows, args.y.cols);
  EmulateLaunch(schedule, {expand.x, expand.y}, {kLoraExpandThreads}, LoraExpandKernel, cuda);
  return OkStatus();
}

class LoraTable : public testing::TestWithParam<Backend> {
 protected:
  bool small() const { return GetParam().most_weights < (1 << 20); }
  ThreadPool threads_{2};
};

TEST_P(LoraTable, MatchesDoublePrecision) {
  // Around the tiles: 1, 3 and 4 rows of one adapter, 48 of a task; 4 and 8 ranks; 16 outputs of a
  // block, 4 blocks; steps of 4, 8, 16 columns; 128 outputs of a device block.
  const struct {
    std::vector<int64_t> rows, outs, ins, ranks;
  } tables[] = {
      {{0, 1, 2, 5, 13},
       {0, 1, 15, 16, 17},
       {0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 61},
       {0, 1, 4, 5}},
      {{3, 23, 41}, {63, 64, 65, 131}, {33, 97}, {3, 7, 8, 9, 17}},
      {{9, 150}, {129}, {64, 1031}, {2, 64}},
      {{1, 7}, {35}, {70}, {1, 16, 512}},
  };
  uint64_t seed = 1;
  for (const auto& table : tables) {
    for (const int64_t d_out : table.outs) {
      for (const int64_t d_in : table.ins) {
        if (small() && (d_out * d_in > 2000 || table.ranks.back() > 17)) continue;
        for (int repeat = 0; repeat < 3; ++repeat) {  // dtypes
          const int64_t rows = table.rows[seed % table.rows.size()];
          SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(d_out) + " x " +
                       std::to_string(d_in) + ", seed " + std::to_string(seed));
          Problem p(rows, d_out, d_in, table.ranks, seed++);
          ExpectExact(GetParam(), p, threads_);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(LoraTable, TakesEveryPairOfDTypes) {
  Random random(7);
  const DType dtypes[] = {DType::kBF16, DType::kF16, DType::kF32};
  for (const DType a : dtypes) {
    for (const DType b : dtypes) {
      for (const float scale : {0.5f, 0.3f}) {
        Problem p(5, 19, 23, {}, random());
        p.adapters.emplace_back(19, 23, 6, a, b, scale, random);
        p.table = {&p.adapters[0].packed};
        p.delta_of_row = {0, -1, 0, 0, 0};
        SCOPED_TRACE(std::string(DTypeName(a)) + " " + std::string(DTypeName(b)));
        ExpectExact(GetParam(), p, threads_);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(LoraTable, NoIndicesMeanNothing) {
  Problem p(3, 5, 7, {2}, 9);
  LoraLinearArgs args = p.args();
  args.delta_of_row = {};
  const OwnedFloats before = Copy(p.y.cview());
  ASSERT_TRUE(GetParam().run(args, threads_).ok());
  for (int64_t t = 0; t < 3; ++t) {
    EXPECT_EQ(0, std::memcmp(args.y.row(t), before.cview().row(t), 5 * sizeof(float)));
  }
}

TEST_P(LoraTable, MatchesTorch) {
  GoldenFile golden("deltas.golden");
  ASSERT_TRUE(golden.ok());
  int cases = 0;
  for (std::string name = golden.NextCase(); !name.empty(); name = golden.NextCase()) {
    if (name != "lora") continue;
    ++cases;
    const int64_t rows = golden.Number(), d_out = golden.Number(), d_in = golden.Number();
    const int64_t rank = golden.Number();
    const DType a_type = golden.Type(), b_type = golden.Type();
    const float scale = golden.Floats(1)[0];
    const std::vector<float> x = golden.Floats(rows * d_in);
    const OwnedWeight a = golden.Weight(a_type, rank, d_in);
    const OwnedWeight b = golden.Weight(b_type, d_out, rank);
    std::vector<float> y = golden.Floats(rows * d_out);
    const std::vector<double> want = golden.Doubles(rows * d_out);
    const LoraDelta delta = LoraDelta::Pack(a.view(), b.view(), scale).value();
    const LoraDelta* table[] = {&delta};
    const std::vector<int32_t> delta_of_row(static_cast<size_t>(rows), 0);
    ASSERT_TRUE(GetParam()
                    .run({.x = {x.data(), rows, d_in, d_in},
                          .deltas = table,
                          .delta_of_row = delta_of_row,
                          .y = {y.data(), rows, d_out, d_out}},
                         threads_)
                    .ok());
    for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], want[i], 2e-6);
  }
  EXPECT_EQ(cases, 3);
}

TEST_P(LoraTable, RandomBatchesAreExactAndRowsIndependent) {
  const uint64_t seed = std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  for (int round = 0; round < (small() ? 3 : 12); ++round) {
    const int64_t d_out = 1 + static_cast<int64_t>(random() % (small() ? 20 : 150));
    const int64_t d_in = 1 + static_cast<int64_t>(random() % (small() ? 70 : 400));
    std::vector<int64_t> ranks;
    for (int i = 0; i < 5; ++i)
      ranks.push_back(static_cast<int64_t>(random() % (small() ? 9 : 70)));
    Problem p(small() ? 20 : 110, d_out, d_in, ranks, random());
    ExpectExact(GetParam(), p, threads_);
    if (HasFatalFailure()) return;
    ExpectRowsIndependent(GetParam(), p.args(), small() ? 2 : 8, random);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, LoraTable,
                         testing::ValuesIn(DeltaBackends(&LoraLinearReference, &LoraLinearCpu,
                                                         &RunEmulated)),
                         [](const auto& backend) { return backend.param.name; });

TEST(LoraDelta, KeepsBF16WhereNothingIsLost) {
  Random random(4);
  const struct {
    DType a, b;
    float scale;
    DType kept_a, kept_b;
  } rows[] = {
      {DType::kBF16, DType::kBF16, 2.0f, DType::kBF16, DType::kBF16},
      {DType::kBF16, DType::kBF16, 0.3f, DType::kBF16, DType::kF32},
      {DType::kBF16, DType::kBF16, 1e-38f, DType::kBF16, DType::kF32},
      {DType::kF16, DType::kF16, 2.0f, DType::kF32, DType::kF32},
      {DType::kF32, DType::kF32, 1.0f, DType::kF32, DType::kF32},
  };
  for (const auto& row : rows) {
    const Adapter adapter(37, 19, 5, row.a, row.b, row.scale, random);
    const LoraDelta::Layout& layout = adapter.packed.layout();
    EXPECT_EQ(layout.a_dtype, row.kept_a);
    EXPECT_EQ(layout.b_dtype, row.kept_b);
    for (int64_t k = 0; k < 5; ++k) {
      for (int64_t i = 0; i < 19; ++i) EXPECT_EQ(layout.A(k, i), adapter.a.view().at(k, i));
      for (int64_t o = 0; o < 37; ++o) {
        EXPECT_EQ(layout.B(o, k), row.scale * adapter.b.view().at(o, k));
      }
    }
    EXPECT_EQ(adapter.packed.rank(), 5);
    EXPECT_EQ(adapter.packed.bytes(),
              5 * 32 * DTypeSize(row.kept_a) + 48 * 5 * DTypeSize(row.kept_b));
  }
}

TEST(LoraDelta, NamesTheFactorThatIsWrong) {
  const float inf = std::numeric_limits<float>::infinity();
  OwnedWeight a(DType::kBF16, 2, 5), b(DType::kF32, 3, 2);
  b.Set(2, 1, 3e38f);
  ASSERT_TRUE(LoraDelta::Pack(a.view(), b.view(), 1).ok());
  const auto expect = [&](const WeightMatrix& left, const WeightMatrix& right, float scale,
                          const std::string& starts) {
    const Status status = LoraDelta::Pack(left, right, scale).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << starts;
    EXPECT_EQ(status.message().rfind(starts, 0), 0u) << status.message();
  };
  expect(a.view(), b.view(), inf, "scale: not finite");
  expect(a.view(), b.view(), std::nanf(""), "scale: not finite");
  expect(a.view(), b.view(), 2, "scale: scale * b overflows at [2, 1]");
  WeightMatrix bad = a.view();
  bad.dtype = DType::kU8;
  expect(bad, b.view(), 1, "a: dtype U8");
  bad = a.view();
  bad.data = nullptr;
  expect(bad, b.view(), 1, "a: no data");
  bad = a.view();
  bad.stride = 4;
  expect(bad, b.view(), 1, "a: shape [2, 5] with row stride 4");
  bad = a.view();
  bad.rows = -1;
  expect(bad, b.view(), 1, "a: shape [-1, 5]");
  bad = {nullptr, DType::kF32, kMaxLoraRank + 1, 0, 0};
  expect(bad, {nullptr, DType::kF32, 0, kMaxLoraRank + 1, 0}, 1, "a: rank 65537");
  bad = b.view();
  bad.cols = 1;
  expect(a.view(), bad, 1, "b: shape [3, 1] for rank 2");
  bad = b.view();
  bad.dtype = DType::kF64;
  expect(a.view(), bad, 1, "b: dtype F64");
  b.Set(1, 0, inf);
  expect(a.view(), b.view(), 1, "b: not finite at [1, 0]");
  a.Set(0, 4, std::nanf(""));
  expect(a.view(), b.view(), 1, "a: not finite at [0, 4]");
}

TEST(LoraLinear, NamesTheFieldThatDoesNotFitAndLeavesYAlone) {
  Problem p(3, 4, 10, {2, 0}, 1);
  Problem narrow(3, 4, 9, {2, 0}, 2);
  ThreadPool threads(1);
  LoraScratch scratch;
  const LoraLinearArgs good = p.args();
  const OwnedFloats before = Copy(p.y.cview());
  const auto reject = [&](const LoraLinearArgs& args, const std::string& starts) {
    for (const Status& status :
         {LoraLinearReference(args), LoraLinearCpu(args, scratch, threads)}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << starts;
      EXPECT_EQ(status.message().rfind(starts, 0), 0u) << status.ToString();
    }
    for (int64_t t = 0; t < 3; ++t) {
      EXPECT_EQ(0, std::memcmp(good.y.row(t), before.cview().row(t), 4 * sizeof(float)));
    }
  };
  LoraLinearArgs bad = good;
  bad.x.stride = 3;
  reject(bad, "x: shape [3, 10] with row stride 3");
  bad = good;
  bad.x = narrow.args().x;
  reject(bad, "deltas[0]: shape [4, 10], x and y need [4, 9]");
  bad = good;
  bad.y.data = nullptr;
  reject(bad, "y: shape [3, 4] with row stride 9 and no data");
  bad = good;
  bad.y.rows = 2;
  reject(bad, "y: 2 rows");
  bad = good;
  const int32_t outside[3] = {0, 3, 0};
  bad.delta_of_row = outside;
  reject(bad, "delta_of_row: index 3 of 3");
  const int32_t below[3] = {0, -2, 0};
  bad.delta_of_row = below;
  reject(bad, "delta_of_row: index -2");
  bad.delta_of_row = std::span(below).first(1);
  reject(bad, "delta_of_row: 1 entries for 3 rows");
}

}  // namespace
}  // namespace stockpot
