// One batch of every codec: rows of the base alone, of 1-bit, sparse, low-rank and dense variants,
// and of 1-bit variants with a low-rank residual, through bitdelta_linear and the two operations
// that add to its y. Equals the sum of the references, and no row notices the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/signs.h"
#include "kernels/lora/lora_layout.h"
#include "kernels/lora/lora_linear.h"
#include "kernels/sparse/sparse_delta.h"
#include "tests/unit/kernels/backends.h"
#include "tests/unit/kernels/delta_batches.h"
#include "tests/unit/kernels/matrices.h"

namespace stockpot {
namespace {

// Indices into the tables of Deltas, -1 = nothing.
struct Row {
  int32_t variant = -1;  // 1-bit or dense
  int32_t sparse = -1;
  int32_t lora = -1;
};

// The deltas of one weight: two of each codec.
struct Deltas {
  Deltas(int64_t d_out, int64_t d_in, Random& random)
      : base(OwnedWeight::Gaussian(DType::kBF16, d_out, d_in, 0.02f, random)) {
    alpha.assign(static_cast<size_t>(d_out), 0.003f);
    for (int v = 0; v < 2; ++v) {
      std::vector<uint8_t> bits(static_cast<size_t>(SignBytes(d_out, d_in)));
      for (int64_t o = 0; o < d_out; ++o) {
        for (int64_t i = 0; i < d_in; ++i) {
          if (random() & 1) bits[o * SignRowBytes(d_in) + i / 8] |= 1u << (i % 8);
        }
      }
      signs.push_back(PackedSigns::Pack(d_out, d_in, bits, alpha).value());
      dense.push_back(OwnedWeight::Gaussian(DType::kF32, d_out, d_in, 0.02f, random));
      OwnedWeight tuned(DType::kBF16, d_out, d_in);
      for (int64_t o = 0; o < d_out; ++o) {
        for (int64_t i = 0; i < d_in; ++i) {
          tuned.Set(o, i, base.view().at(o, i) + (random() % 9 == 0 ? 0.01f : 0.0f));
        }
      }
      sparse.push_back(SparseDelta::FromWeights(base.view(), tuned.view()).value());
      const int64_t rank = v == 0 ? 3 : 16;
      const OwnedWeight a = OwnedWeight::Gaussian(DType::kBF16, rank, d_in, 0.05f, random);
      const OwnedWeight b = OwnedWeight::Gaussian(DType::kF16, d_out, rank, 0.05f, random);
      lora.push_back(LoraDelta::Pack(a.view(), b.view(), 2.0f).value());
    }
    dense_views = {dense[0].view(), dense[1].view()};
    variants = {{.signs = &signs[0]},
                {.signs = &signs[1]},
                {.dense = &dense_views[0]},
                {.dense = &dense_views[1]}};
    sparse_table = {&sparse[0], &sparse[1]};
    lora_table = {&lora[0], &lora[1]};
  }

  // The norm of W_eff[o] is at most this.
  double NormBound(const Row& row, int64_t o) const {
    const WeightMatrix w = row.variant >= 2 ? dense_views[row.variant - 2] : base.view();
    double square = 0;
    for (int64_t i = 0; i < w.cols; ++i) square += std::pow(w.at(o, i), 2);
    double norm = std::sqrt(square);
    if (row.variant == 0 || row.variant == 1) norm += alpha[o] * std::sqrt(w.cols);
    if (row.sparse >= 0) norm += 0.02 * std::sqrt(w.cols);
    if (row.lora < 0) return norm;
    const LoraDelta::Layout& factors = lora[row.lora].layout();
    for (int64_t k = 0; k < factors.rank; ++k) {
      double a = 0;
      for (int64_t i = 0; i < w.cols; ++i) a += std::pow(factors.A(k, i), 2);
      norm += std::fabs(factors.B(o, k)) * std::sqrt(a);
    }
    return norm;
  }

  OwnedWeight base;
  std::vector<float> alpha;
  std::vector<PackedSigns> signs;
  std::vector<OwnedWeight> dense;
  std::vector<WeightMatrix> dense_views;
  std::vector<SparseDelta> sparse;
  std::vector<LoraDelta> lora;
  std::vector<LayerDelta> variants;
  std::vector<const SparseDelta*> sparse_table;
  std::vector<const LoraDelta*> lora_table;
};

// Each of the kinds that the file's comment names, in turn.
Row RowOfKind(uint64_t kind, Random& random) {
  const int32_t which = static_cast<int32_t>(random() % 2);
  switch (kind % 6) {
    case 0:
      return {};
    case 1:
      return {.variant = which};
    case 2:
      return {.sparse = which};
    case 3:
      return {.lora = which};
    case 4:
      return {.variant = which, .lora = 1 - which};
    default:
      return {.variant = 2 + which};
  }
}

struct Scratch {
  LinearScratch linear;
  SparseScratch sparse;
  LoraScratch lora;
};

// y of the rows, by the references where there is no pool.
OwnedFloats RunBatch(const Deltas& deltas, const std::vector<Row>& rows, const ConstFloatMatrix& x,
                     ThreadPool* threads, Scratch& scratch) {
  OwnedFloats y(x.rows, deltas.base.view().rows, 3, std::nanf(""));
  std::vector<int32_t> variant, sparse, lora;
  for (const Row& row : rows) {
    variant.push_back(row.variant);
    sparse.push_back(row.sparse);
    lora.push_back(row.lora);
  }
  const LinearOutput output{.base = deltas.base.view(), .variants = deltas.variants, .y = y.view()};
  const LinearArgs linear_args{.x = x, .outputs = {&output, 1}, .variant_of_row = variant};
  const SparseDeltaArgs sparse_args{
      .x = x, .deltas = deltas.sparse_table, .delta_of_row = sparse, .y = y.view()};
  const LoraLinearArgs lora_args{
      .x = x, .deltas = deltas.lora_table, .delta_of_row = lora, .y = y.view()};
  if (threads == nullptr) {
    EXPECT_TRUE(BitDeltaLinearReference(linear_args).ok());
    EXPECT_TRUE(SparseDeltaLinearReference(sparse_args).ok());
    EXPECT_TRUE(LoraLinearReference(lora_args).ok());
  } else {
    EXPECT_TRUE(BitDeltaLinearCpu(linear_args, scratch.linear, *threads).ok());
    EXPECT_TRUE(SparseDeltaLinearCpu(sparse_args, scratch.sparse, *threads).ok());
    EXPECT_TRUE(LoraLinearCpu(lora_args, scratch.lora, *threads).ok());
  }
  return y;
}

class MixedTargets : public testing::TestWithParam<SimdTarget> {};

TEST_P(MixedTargets, EqualsTheReferencesAndRowsAreIndependent) {
  const ScopedSimdTarget target(GetParam());
  const uint64_t seed = std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  std::vector<std::unique_ptr<ThreadPool>> pools;
  for (const int count : {1, 2, 3}) pools.push_back(std::make_unique<ThreadPool>(count));
  Scratch scratch;
  for (int round = 0; round < 6; ++round) {
    const int64_t d_out = 1 + static_cast<int64_t>(random() % 150);
    const int64_t d_in = 1 + static_cast<int64_t>(random() % 300);
    constexpr int64_t kRows = 42;
    const Deltas deltas(d_out, d_in, random);
    const OwnedFloats x = OwnedFloats::Gaussian(kRows, d_in, random, 1);
    std::vector<Row> rows;
    for (uint64_t t = 0; t < kRows; ++t) rows.push_back(RowOfKind(t, random));
    std::shuffle(rows.begin(), rows.end(), random);
    OwnedFloats want = RunBatch(deltas, rows, x.cview(), nullptr, scratch);
    OwnedFloats got = RunBatch(deltas, rows, x.cview(), pools[1].get(), scratch);
    for (int64_t t = 0; t < kRows; ++t) {
      const double x_norm = Norm(x.cview().row(t), d_in);
      for (int64_t o = 0; o < d_out; ++o) {
        const double tolerance = RelativeTolerance(d_in) * x_norm * deltas.NormBound(rows[t], o);
        ASSERT_NEAR(got.view().row(t)[o], want.view().row(t)[o], tolerance)
            << d_out << " x " << d_in << ", row " << t << " output " << o;
      }
    }
    for (int repeat = 0; repeat < 6; ++repeat) {
      std::vector<int64_t> sources(1 + random() % (repeat % 2 == 0 ? 8 : kRows));
      OwnedFloats batch_x(static_cast<int64_t>(sources.size()), d_in, 2);
      std::vector<Row> batch;
      for (size_t i = 0; i < sources.size(); ++i) {
        sources[i] = static_cast<int64_t>(random() % kRows);
        batch.push_back(rows[sources[i]]);
        std::copy_n(x.cview().row(sources[i]), d_in, batch_x.view().row(static_cast<int64_t>(i)));
      }
      OwnedFloats y = RunBatch(deltas, batch, batch_x.cview(), pools[random() % 3].get(), scratch);
      for (size_t i = 0; i < sources.size(); ++i) {
        ASSERT_EQ(0, std::memcmp(y.view().row(static_cast<int64_t>(i)), got.view().row(sources[i]),
                                 static_cast<size_t>(d_out) * sizeof(float)))
            << d_out << " x " << d_in << ", row " << sources[i] << " in a batch of "
            << sources.size();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, MixedTargets, testing::ValuesIn(SimdTargets()),
                         [](const auto& target) { return target.param.name; });

}  // namespace
}  // namespace stockpot
