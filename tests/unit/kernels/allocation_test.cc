// A decode step allocates nothing once its scratch memory has grown.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/signs.h"
#include "kernels/lora/lora_linear.h"
#include "kernels/sparse/sparse_delta.h"
#include "tests/unit/kernels/count_allocations.h"
#include "tests/unit/kernels/matrices.h"

namespace stockpot {
namespace {

class DecodeAllocation : public testing::TestWithParam<DType> {};

TEST_P(DecodeAllocation, IsNothingInTheSteadyState) {
  constexpr int64_t kRows = 14, kDOut = 200, kDIn = 333;
  Random random(1);
  const OwnedWeight x = OwnedWeight::Gaussian(GetParam(), kRows, kDIn, 1.0f, random);
  OwnedFloats y(kRows, kDOut);
  const OwnedWeight base = OwnedWeight::Gaussian(DType::kBF16, kDOut, kDIn, 0.02f, random);
  const std::vector<uint8_t> signs(static_cast<size_t>(SignBytes(kDOut, kDIn)), 0x5A);
  const std::vector<float> alpha(static_cast<size_t>(kDOut), 0.01f);
  const PackedSigns packed = PackedSigns::Pack(kDOut, kDIn, signs, alpha).value();
  const WeightMatrix dense = base.view();
  const std::vector<LayerDelta> variants = {{.signs = &packed}, {.dense = &dense}};
  std::vector<int32_t> variant_of_row;
  for (int64_t t = 0; t < kRows; ++t) variant_of_row.push_back(static_cast<int32_t>(t % 3) - 1);
  std::vector<DeltaSum> sum_of_row(static_cast<size_t>(kRows), DeltaSum::kApart);
  sum_of_row[1] = DeltaSum::kFolded;
  LinearOutput output{.base = base.view(), .variants = variants, .y = y.view()};
  const LinearArgs args{.x = {x.view().data, GetParam(), kRows, kDIn, kDIn},
                        .outputs = {&output, 1},
                        .variant_of_row = variant_of_row,
                        .sum_of_row = sum_of_row};
  ThreadPool threads(2);
  LinearScratch scratch;
  ASSERT_TRUE(BitDeltaLinearCpu(args, scratch, threads).ok());
  const int64_t before = CountedAllocations();
  bool ok = true;
  for (int step = 0; step < 10; ++step) ok = ok && BitDeltaLinearCpu(args, scratch, threads).ok();
  EXPECT_EQ(CountedAllocations() - before, 0);
  EXPECT_TRUE(ok);
  LinearArgs smaller = args;  // fits into what is there
  smaller.x.rows = output.y.rows = 3;
  smaller.variant_of_row = std::span(variant_of_row).first(3);
  smaller.sum_of_row = std::span(sum_of_row).first(3);
  const int64_t again = CountedAllocations();
  ok = BitDeltaLinearCpu(smaller, scratch, threads).ok();
  EXPECT_EQ(CountedAllocations() - again, 0);
  EXPECT_TRUE(ok);
}

INSTANTIATE_TEST_SUITE_P(Activations, DecodeAllocation, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& type) { return std::string(DTypeName(type.param)); });

// Ten calls, then a smaller one, after one that grew the scratch. Args: sparse or low-rank.
template <typename Args, typename Scratch>
void ExpectNoAllocation(Status (*run)(const Args&, Scratch&, ThreadPool&), const Args& args) {
  ThreadPool threads(2);
  Scratch scratch;
  ASSERT_TRUE(run(args, scratch, threads).ok());
  Args smaller = args;
  smaller.x.rows = smaller.y.rows = 3;
  smaller.delta_of_row = args.delta_of_row.first(3);
  const int64_t before = CountedAllocations();
  bool ok = true;
  for (int step = 0; step < 10; ++step) ok = ok && run(args, scratch, threads).ok();
  ok = ok && run(smaller, scratch, threads).ok();
  EXPECT_EQ(CountedAllocations() - before, 0);
  EXPECT_TRUE(ok);
}

TEST(Allocation, SparseAndLowRankDeltasAllocateNothingInTheSteadyState) {
  constexpr int64_t kRows = 24, kDOut = 200, kDIn = 333;
  Random random(2);
  const OwnedFloats x = OwnedFloats::Gaussian(kRows, kDIn, random);
  OwnedFloats y(kRows, kDOut);
  const OwnedWeight base = OwnedWeight::Gaussian(DType::kBF16, kDOut, kDIn, 0.02f, random);
  const OwnedWeight tuned = OwnedWeight::Gaussian(DType::kBF16, kDOut, kDIn, 0.02f, random);
  const SparseDelta sparse = SparseDelta::FromWeights(base.view(), tuned.view()).value();
  const OwnedWeight a = OwnedWeight::Gaussian(DType::kBF16, 16, kDIn, 0.1f, random);
  const OwnedWeight b = OwnedWeight::Gaussian(DType::kF32, kDOut, 16, 0.1f, random);
  const LoraDelta lora = LoraDelta::Pack(a.view(), b.view(), 2).value();
  const SparseDelta* sparse_table[] = {&sparse, nullptr, &sparse};
  const LoraDelta* lora_table[] = {&lora, nullptr, &lora};
  std::vector<int32_t> delta_of_row;
  for (int64_t t = 0; t < kRows; ++t) delta_of_row.push_back(static_cast<int32_t>(t % 4) - 1);
  ExpectNoAllocation(
      &SparseDeltaLinearCpu,
      {.x = x.view(), .deltas = sparse_table, .delta_of_row = delta_of_row, .y = y.view()});
  ExpectNoAllocation(
      &LoraLinearCpu,
      {.x = x.view(), .deltas = lora_table, .delta_of_row = delta_of_row, .y = y.view()});
}

}  // namespace
}  // namespace stockpot
