// sparse_delta_linear: every backend against double precision on the dense difference, over shapes,
// dtypes and shares of changed elements; its promise of batch invariance; what it rejects.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/sparse/sparse_delta.h"
#include "kernels/sparse/sparse_layout.h"
#include "tests/unit/kernels/cuda_emulation/cuda_emulation.h"
#include "tests/unit/kernels/delta_batches.h"
#include "tests/unit/kernels/golden_file.h"
// After the emulation, which stands in for the platform.
#include "kernels/sparse/sparse_delta_cuda.cuh"

namespace stockpot {
namespace {

using Backend = DeltaBackend<SparseDeltaArgs>;

// A fine-tuned copy of `base` where about `share` of the elements changed.
OwnedWeight FineTuned(const WeightMatrix& base, DType dtype, double share, Random& random) {
  OwnedWeight tuned(dtype, base.rows, base.cols, 2);
  std::bernoulli_distribution changed(share);
  for (int64_t o = 0; o < base.rows; ++o) {
    for (int64_t i = 0; i < base.cols; ++i) {
      tuned.Set(o, i, base.at(o, i) + (changed(random) ? 0.01f * Gaussian(random) : 0.0f));
    }
  }
  return tuned;
}

// Everything a call needs: deltas of several shares, among them none and all, and an absent one.
struct Problem {
  Problem(int64_t rows, int64_t d_out, int64_t d_in, DType dtype, uint64_t seed)
      : random(seed),
        x(OwnedFloats::Gaussian(rows, d_in, random, 3)),
        y(OwnedFloats::Gaussian(rows, d_out, random, 5)),
        base(OwnedWeight::Gaussian(dtype, d_out, d_in, 0.02f, random, 7)) {
    for (const double share : {0.0, 0.01, 0.05, 0.3, 1.0}) {
      tuned.push_back(FineTuned(base.view(), dtype, share, random));
      deltas.push_back(SparseDelta::FromWeights(base.view(), tuned.back().view()).value());
    }
    for (const SparseDelta& delta : deltas) table.push_back(&delta);
    table.push_back(nullptr);
    for (int64_t t = 0; t < rows; ++t) {
      delta_of_row.push_back(static_cast<int32_t>(random() % 7) - 1);
    }
  }

  SparseDeltaArgs args() {
    return {.x = x.cview(), .deltas = table, .delta_of_row = delta_of_row, .y = y.view()};
  }

  // The change of element [o, i] for batch row t, from the weights themselves.
  double Change(int64_t t, int64_t o, int64_t i) const {
    const int32_t index = delta_of_row[t];
    if (index < 0 || index >= static_cast<int32_t>(tuned.size())) return 0;
    return static_cast<double>(tuned[index].view().at(o, i)) - base.view().at(o, i);
  }

  Random random;
  OwnedFloats x, y;
  OwnedWeight base;
  std::vector<OwnedWeight> tuned;
  std::vector<SparseDelta> deltas;
  std::vector<const SparseDelta*> table;
  std::vector<int32_t> delta_of_row;
};

// Runs a copy of p's y and expects y + D x; the scale of an error is |D[o]| |x[t]| + |y[t, o]|.
void ExpectExact(const Backend& backend, Problem& p, ThreadPool& threads) {
  SparseDeltaArgs args = p.args();
  const ConstFloatMatrix before = p.y.cview();
  OwnedFloats got = Copy(before, 1);
  args.y = got.view();
  ASSERT_TRUE(backend.run(args, threads).ok());
  for (int64_t t = 0; t < args.x.rows; ++t) {
    const double x_norm = Norm(args.x.row(t), args.x.cols);
    for (int64_t o = 0; o < args.y.cols; ++o) {
      double want = before.row(t)[o], square = 0;
      int64_t changed = 0;
      for (int64_t i = 0; i < args.x.cols; ++i) {
        const double change = p.Change(t, o, i);
        want += change * args.x.row(t)[i];
        square += change * change;
        changed += change != 0;
      }
      const float y = got.view().row(t)[o];
      if (changed == 0) {
        ASSERT_EQ(0, std::memcmp(&y, &before.row(t)[o], sizeof y))
            << "row " << t << " output " << o;
      }
      const double scale = std::sqrt(square) * x_norm + std::fabs(before.row(t)[o]);
      ASSERT_NEAR(y, want, RelativeTolerance(changed) * scale) << "row " << t << " output " << o;
    }
  }
}

// The host stands in for the device: the same arrays, in canonical order.
Status RunEmulated(const SparseDeltaArgs& args, const emulation::Schedule& schedule) {
  STOCKPOT_RETURN_IF_ERROR(CheckSparseArgs(args));
  std::vector<SparseElements> elements(args.deltas.size());
  std::vector<CudaSparseDelta> deltas(args.deltas.size());
  for (size_t v = 0; v < deltas.size(); ++v) {
    if (args.deltas[v] == nullptr) continue;
    elements[v] = args.deltas[v]->Elements();
    deltas[v] = {elements[v].row_offsets.data(), elements[v].columns.data(),
                 elements[v].values.data()};
  }
  const CudaSparseArgs cuda{
      .x = args.x,
      .deltas = deltas.data(),
      .delta_count = static_cast<int64_t>(deltas.size()),
      .delta_of_row = args.delta_of_row.empty() ? nullptr : args.delta_of_row.data(),
      .y = args.y};
  const SparseGrid grid = GridOfSparse(args.x.rows, args.y.cols);
  EmulateLaunch(schedule, {grid.x, grid.y}, {kSparseWarps * kSparseLanes}, SparseDeltaKernel, cuda);
  return OkStatus();
}

class SparseTable : public testing::TestWithParam<Backend> {
 protected:
  ThreadPool threads_{2};
};

TEST_P(SparseTable, MatchesDoublePrecision) {
  // Around the tiles: 1, 4, 8, 16 rows of one delta; chains of 4 elements; warps of 32; 8 outputs
  // of a block; a chunk of 16384 elements; rows of more columns than a delta has elements.
  const struct {
    std::vector<int64_t> rows, outs, ins;
  } tables[] = {
      {{0, 1, 2, 5, 13, 40}, {0, 1, 2, 7, 8, 9}, {0, 1, 3, 4, 5, 31, 32, 33, 61}},
      {{1, 19, 35, 67, 131}, {16, 17, 31}, {64, 127}},
      {{3, 23, 70}, {127, 131}, {128, 257, 523}},
      {{1, 37}, {9}, {255, 256, 257}},
  };
  uint64_t seed = 1;
  for (const auto& table : tables) {
    for (const int64_t d_out : table.outs) {
      for (const int64_t d_in : table.ins) {
        if (d_out * d_in > GetParam().most_weights) continue;
        for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
          const int64_t rows = table.rows[seed % table.rows.size()];
          SCOPED_TRACE(std::string(DTypeName(dtype)) + " " + std::to_string(rows) + " rows, " +
                       std::to_string(d_out) + " x " + std::to_string(d_in));
          Problem p(rows, d_out, d_in, dtype, seed++);
          ExpectExact(GetParam(), p, threads_);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(SparseTable, TakesMoreColumnsThan16Bits) {
  const int64_t d_in = kSparseNarrowColumns + 2;
  const std::vector<int64_t> offsets = {0, 3, 3, 4};
  const std::vector<uint32_t> columns = {0, 65535, 65536, 65537};
  const std::vector<float> values = {1, 2, 4, 8};
  const SparseDelta delta = SparseDelta::FromElements(3, d_in, offsets, columns, values).value();
  const SparseDelta* table[] = {&delta};
  OwnedFloats x(2, d_in), y(2, 3, 0, 0.5f);
  for (int64_t t = 0; t < 2; ++t) {
    for (int64_t i = 0; i < 4; ++i) x.view().row(t)[columns[i]] = static_cast<float>(i + 1 + t);
  }
  const std::vector<int32_t> rows = {0, 0};
  ASSERT_TRUE(
      GetParam()
          .run({.x = x.cview(), .deltas = table, .delta_of_row = rows, .y = y.view()}, threads_)
          .ok());
  const float want[2][3] = {{17.5f, 0.5f, 32.5f}, {24.5f, 0.5f, 40.5f}};
  for (int64_t t = 0; t < 2; ++t) {
    for (int64_t o = 0; o < 3; ++o) EXPECT_EQ(y.view().row(t)[o], want[t][o]);
  }
}

TEST_P(SparseTable, NoIndicesMeanNothing) {
  Problem p(3, 5, 7, DType::kBF16, 9);
  SparseDeltaArgs args = p.args();
  args.delta_of_row = {};
  const OwnedFloats before = Copy(p.y.cview());
  ASSERT_TRUE(GetParam().run(args, threads_).ok());
  for (int64_t t = 0; t < 3; ++t) {
    EXPECT_EQ(0, std::memcmp(args.y.row(t), before.cview().row(t), 5 * sizeof(float)));
  }
}

TEST_P(SparseTable, MatchesTorch) {
  GoldenFile golden("deltas.golden");
  ASSERT_TRUE(golden.ok());
  int cases = 0;
  for (std::string name = golden.NextCase(); !name.empty(); name = golden.NextCase()) {
    if (name != "sparse") continue;
    ++cases;
    const int64_t rows = golden.Number(), d_out = golden.Number(), d_in = golden.Number();
    const DType base_type = golden.Type(), tuned_type = golden.Type();
    const std::vector<float> x = golden.Floats(rows * d_in);
    const OwnedWeight base = golden.Weight(base_type, d_out, d_in);
    const OwnedWeight tuned = golden.Weight(tuned_type, d_out, d_in);
    std::vector<float> y = golden.Floats(rows * d_out);
    const std::vector<double> want = golden.Doubles(rows * d_out);
    const SparseDelta delta = SparseDelta::FromWeights(base.view(), tuned.view()).value();
    const SparseDelta* table[] = {&delta};
    const std::vector<int32_t> delta_of_row(static_cast<size_t>(rows), 0);
    ASSERT_TRUE(GetParam()
                    .run({.x = {x.data(), rows, d_in, d_in},
                          .deltas = table,
                          .delta_of_row = delta_of_row,
                          .y = {y.data(), rows, d_out, d_out}},
                         threads_)
                    .ok());
    for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], want[i], 1e-6);
  }
  EXPECT_EQ(cases, 3);
}

TEST_P(SparseTable, RandomBatchesAreExactAndRowsIndependent) {
  const uint64_t seed = std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  const bool small = GetParam().most_weights < (1 << 20);
  const DType dtypes[] = {DType::kBF16, DType::kF16, DType::kF32};
  for (int round = 0; round < (small ? 3 : 12); ++round) {
    const int64_t d_out = 1 + static_cast<int64_t>(random() % (small ? 20 : 150));
    const int64_t d_in = 1 + static_cast<int64_t>(random() % (small ? 70 : 400));
    Problem p(60, d_out, d_in, dtypes[round % 3], random());
    ExpectExact(GetParam(), p, threads_);
    if (HasFatalFailure()) return;
    ExpectRowsIndependent(GetParam(), p.args(), small ? 2 : 8, random);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, SparseTable,
                         testing::ValuesIn(DeltaBackends(&SparseDeltaLinearReference,
                                                         &SparseDeltaLinearCpu, &RunEmulated)),
                         [](const auto& backend) { return backend.param.name; });

TEST(SparseDelta, KeepsEveryElementOfManyChunks) {
  Random random(3);
  for (const int64_t d_out : {1, 5, 300}) {
    for (const int64_t d_in : {1, 33, 500}) {
      for (const double share : {0.0, 0.02, 0.6, 1.0}) {
        const OwnedWeight base = OwnedWeight::Gaussian(DType::kF32, d_out, d_in, 0.02f, random);
        const OwnedWeight tuned = FineTuned(base.view(), DType::kBF16, share, random);
        const SparseElements found = FindChangedElements(base.view(), tuned.view()).value();
        const SparseDelta delta = SparseDelta::FromElements(d_out, d_in, found).value();
        ASSERT_EQ(delta.changed(), static_cast<int64_t>(found.values.size()));
        const SparseElements back = delta.Elements();
        EXPECT_EQ(back.row_offsets, found.row_offsets);
        EXPECT_EQ(back.columns, found.columns);
        EXPECT_EQ(back.values, found.values);
        // 6 bytes an element and 8 a row; 4 a chunk.
        EXPECT_GE(delta.bytes(), 6 * delta.changed());
        EXPECT_LE(delta.bytes(), 6 * delta.changed() + 8 * d_out +
                                     4 * (delta.changed() / kSparseChunkElements + 4));
        int64_t next = 0;
        for (int64_t o = 0; o < d_out; ++o) {
          for (int64_t i = 0; i < d_in; ++i) {
            const float change = tuned.view().at(o, i) - base.view().at(o, i);
            if (change == 0) continue;
            ASSERT_EQ(found.columns[next], static_cast<uint32_t>(i));
            ASSERT_EQ(found.values[next++], change);
          }
          ASSERT_EQ(found.row_offsets[o + 1], next);
        }
      }
    }
  }
}

TEST(SparseDelta, MinusZeroIsNoChange) {
  OwnedWeight base(DType::kBF16, 1, 2), tuned(DType::kBF16, 1, 2);
  tuned.Set(0, 0, -0.0f);
  tuned.Set(0, 1, 1.0f);
  EXPECT_EQ(SparseDelta::FromWeights(base.view(), tuned.view()).value().changed(), 1);
}

TEST(SparseDelta, NamesTheArrayThatIsWrong) {
  const float inf = std::numeric_limits<float>::infinity();
  const struct {
    const char* starts;
    int64_t d_out, d_in;
    std::vector<int64_t> offsets;
    std::vector<uint32_t> columns;
    std::vector<float> values;
  } rows[] = {
      {"", 2, 5, {0, 2, 3}, {0, 4, 1}, {1, 2, 3}},
      {"", 0, 5, {0}, {}, {}},
      {"", 2, 0, {0, 0, 0}, {}, {}},
      {"sparse delta: shape [-1, 5]", -1, 5, {0}, {}, {}},
      {"sparse delta: shape [2, -5]", 2, -5, {0, 0, 0}, {}, {}},
      {"sparse delta: shape", int64_t{1} << 40, 5, {0}, {}, {}},
      {"sparse delta: shape", std::numeric_limits<int64_t>::max(), 5, {}, {}, {}},
      {"row_offsets: 2 entries, need 3", 2, 5, {0, 2}, {0, 4}, {1, 2}},
      {"row_offsets: 0 entries, need 1", 0, 5, {}, {}, {}},
      {"row_offsets: starts with 1", 2, 5, {1, 2, 3}, {0, 4, 1}, {1, 2, 3}},
      {"row_offsets: starts with -1", 2, 5, {-1, 2, 3}, {0, 4, 1}, {1, 2, 3}},
      {"row_offsets: row 1 ends at 1", 2, 5, {0, 2, 1}, {0}, {1}},
      {"row_offsets: row 1 ends at 3", 2, 5, {0, int64_t{1} << 62, 3}, {0, 4, 1}, {1, 2, 3}},
      {"row_offsets: ends with 3 for 2", 2, 5, {0, 2, 3}, {0, 4}, {1, 2}},
      {"row_offsets: ends with 2 for 3", 2, 5, {0, 2, 2}, {0, 4, 1}, {1, 2, 3}},
      {"columns: row 0 has column 5 of 5", 2, 5, {0, 2, 3}, {0, 5, 1}, {1, 2, 3}},
      {"columns: row 1 has column 4294967295", 2, 5, {0, 2, 3}, {0, 4, ~0u}, {1, 2, 3}},
      {"columns: row 0 has column 4 after 4", 2, 5, {0, 2, 3}, {4, 4, 1}, {1, 2, 3}},
      {"columns: row 0 has column 0 after 4", 2, 5, {0, 2, 3}, {4, 0, 1}, {1, 2, 3}},
      {"columns: row 0 has column 0 of 0", 1, 0, {0, 1}, {0}, {1}},
      {"values: 2 for 3 columns", 2, 5, {0, 2, 3}, {0, 4, 1}, {1, 2}},
      {"values: not finite at [1, 1]", 2, 5, {0, 2, 3}, {0, 4, 1}, {1, 2, inf}},
      {"values: not finite at [0, 4]", 2, 5, {0, 2, 3}, {0, 4, 1}, {1, std::nanf(""), 3}},
      {"values: 0 at [0, 0]", 2, 5, {0, 2, 3}, {0, 4, 1}, {-0.0f, 2, 3}},
  };
  for (const auto& row : rows) {
    const Status status =
        SparseDelta::FromElements(row.d_out, row.d_in, row.offsets, row.columns, row.values)
            .status();
    if (*row.starts == '\0') {
      EXPECT_TRUE(status.ok()) << status.ToString();
      continue;
    }
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << row.starts;
    EXPECT_EQ(status.message().rfind(row.starts, 0), 0u)
        << row.starts << " but " << status.message();
  }
}

TEST(SparseDelta, NamesTheWeightThatIsWrong) {
  const float inf = std::numeric_limits<float>::infinity();
  OwnedWeight base(DType::kF32, 2, 3), tuned(DType::kF32, 2, 3);
  const auto expect = [&](const WeightMatrix& b, const WeightMatrix& t, const std::string& starts) {
    const Status status = SparseDelta::FromWeights(b, t).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << starts;
    EXPECT_EQ(status.message().rfind(starts, 0), 0u) << status.message();
  };
  WeightMatrix bad = base.view();
  bad.dtype = DType::kI32;
  expect(bad, tuned.view(), "base: dtype I32");
  expect(base.view(), bad, "fine_tuned: dtype I32");
  bad = tuned.view();
  bad.stride = 2;
  expect(base.view(), bad, "fine_tuned: row stride 2");
  bad = tuned.view();
  bad.data = nullptr;
  expect(base.view(), bad, "fine_tuned: no data");
  bad = tuned.view();
  bad.rows = 1;
  expect(base.view(), bad, "fine_tuned: shape [1, 3], the base is [2, 3]");
  tuned.Set(1, 2, inf);
  expect(base.view(), tuned.view(), "fine_tuned: not finite at [1, 2]");
  expect(tuned.view(), base.view(), "base: not finite at [1, 2]");
  tuned.Set(1, 2, 3e38f);
  base.Set(1, 2, -3e38f);
  expect(base.view(), tuned.view(), "fine_tuned: too far from the base at [1, 2]");
}

TEST(SparseLinear, NamesTheFieldThatDoesNotFitAndLeavesYAlone) {
  Problem p(3, 4, 10, DType::kBF16, 1);
  Problem narrow(3, 4, 9, DType::kBF16, 2);
  ThreadPool threads(1);
  SparseScratch scratch;
  const SparseDeltaArgs good = p.args();
  const OwnedFloats before = Copy(p.y.cview());
  const auto reject = [&](const SparseDeltaArgs& args, const std::string& starts) {
    for (const Status& status :
         {SparseDeltaLinearReference(args), SparseDeltaLinearCpu(args, scratch, threads)}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << starts;
      EXPECT_EQ(status.message().rfind(starts, 0), 0u) << status.ToString();
    }
    for (int64_t t = 0; t < 3; ++t) {
      EXPECT_EQ(0, std::memcmp(good.y.row(t), before.cview().row(t), 4 * sizeof(float)));
    }
  };
  SparseDeltaArgs bad = good;
  bad.x.stride = 3;
  reject(bad, "x: shape [3, 10] with row stride 3");
  bad = good;
  bad.x.data = nullptr;
  reject(bad, "x: shape [3, 10] with row stride 13 and no data");
  bad = good;
  bad.x = narrow.args().x;
  reject(bad, "deltas[0]: shape [4, 10], x and y need [4, 9]");
  bad = good;
  bad.y.rows = 2;
  reject(bad, "y: 2 rows");
  bad = good;
  bad.y.stride = 3;
  reject(bad, "y: shape");
  bad = good;
  bad.y.cols = 3;
  reject(bad, "deltas[0]: shape");
  bad = good;
  const int32_t outside[3] = {0, 6, 0};
  bad.delta_of_row = outside;
  reject(bad, "delta_of_row: index 6 of 6");
  const int32_t below[3] = {0, -2, 0};
  bad.delta_of_row = below;
  reject(bad, "delta_of_row: index -2");
  bad.delta_of_row = std::span(below).first(2);
  reject(bad, "delta_of_row: 2 entries for 3 rows");
}

}  // namespace
}  // namespace stockpot
