// Our logits and greedy tokens against transformers': the base, a one-bit variant and a dense
// variant, the latter two stored, published and loaded as in the daemon. The environment variable
// STOCKPOT_MODEL_GOLDENS names the folder that model_oracle.py wrote: tiny random Llamas of several
// shapes and dtypes, or a real model.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "serve/model/transformer.h"
#include "tests/unit/model/golden.h"
#include "tests/unit/model/run_model.h"
#include "tests/unit/model/world.h"

namespace stockpot {
namespace {

using test::Expected;
using test::GoldenCase;
using test::World;

constexpr int64_t kKvBytes = int64_t{256} << 20;
constexpr int64_t kGreedyTokens = 64;
constexpr int64_t kPromptChunk = 32;

// Largest difference to the float64 logits.
double WorstError64(const Expected& expected, const std::vector<float>& logits) {
  double worst = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    worst = std::max(worst, std::abs(logits[i] - expected.logits64[i]));
  }
  return worst;
}

class ModelForward : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(ModelForward, EqualsTransformers) {
  const GoldenCase& golden = GetParam();
  World world(*golden.Base());
  const auto tuned = golden.Tuned();
  const auto one_bit = world.Load(world.Publish(*tuned, PublishCodec::kBitDelta));
  const auto dense = world.Load(world.Publish(*tuned, PublishCodec::kDense));
  ASSERT_NE(one_bit, nullptr);
  ASSERT_NE(dense, nullptr);
  EXPECT_LT(one_bit->resident_bytes(), dense->resident_bytes());

  ThreadPool threads(2);
  Transformer transformer(world.base, threads);
  const ModelConfig& config = world.base->config();
  KvPool pool(config, kKvBytes);
  const std::pair<const char*, const VariantModel*> models[] = {
      {"base", nullptr}, {"onebit", one_bit.get()}, {"dense", dense.get()}};
  for (const auto& [name, variant] : models) {
    SCOPED_TRACE(name);
    const Expected expected = golden.Read(name);
    const std::vector<float> logits = test::PromptLogits(transformer, pool, variant, golden.prompt);
    const double share = test::WorstShare(config, expected, logits);
    printf("%-18s %-7s error / bound %.3f\n", golden.name.c_str(), name, share);
    EXPECT_LE(share, 1.0);
    ASSERT_EQ(static_cast<int64_t>(expected.greedy.size()), kGreedyTokens);
    EXPECT_EQ(test::Greedy(transformer, pool, variant, golden.prompt, kPromptChunk, kGreedyTokens),
              expected.greedy);
    if (expected.logits64.empty()) continue;
    // The bound is no excuse: we are as exact as float32 arithmetic in another order is.
    const double ours = WorstError64(expected, logits);
    const double theirs = WorstError64(expected, expected.logits);
    printf("%-18s %-7s against float64: ours %.2e, transformers' float32 %.2e\n",
           golden.name.c_str(), name, ours, theirs);
    EXPECT_LE(ours, 4 * theirs);
  }
}

// What the goldens distinguish: a variant that fell back to the base would be far off the bound.
TEST_P(ModelForward, VariantsDifferFromTheBaseByMoreThanTheBound) {
  const GoldenCase& golden = GetParam();
  const auto source = golden.Base();
  const Result<ModelConfig> config = ParseModelConfig(source->ReadFile("config.json").value(), "");
  ASSERT_OK(config);
  const Expected base = golden.Read("base");
  const Expected one_bit = golden.Read("onebit");
  const Expected dense = golden.Read("dense");
  EXPECT_GT(test::WorstShare(*config, one_bit, base.logits), 10);
  EXPECT_GT(test::WorstShare(*config, dense, base.logits), 10);
  EXPECT_GT(test::WorstShare(*config, dense, one_bit.logits), 10);
}

INSTANTIATE_TEST_SUITE_P(Cases, ModelForward,
                         ::testing::ValuesIn(test::ReadCases("STOCKPOT_MODEL_GOLDENS")),
                         [](const auto& test) { return test.param.name; });

TEST(ModelForwardGoldens, ArePresent) {
  EXPECT_FALSE(test::ReadCases("STOCKPOT_MODEL_GOLDENS").empty());
}

}  // namespace
}  // namespace stockpot
