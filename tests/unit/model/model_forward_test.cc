// Our logits and greedy tokens against transformers', on tiny random Llamas of several shapes and
// dtypes. The environment variable STOCKPOT_MODEL_GOLDENS names the folder that model_oracle.py
// wrote.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "serve/model/transformer.h"
#include "tests/unit/model/golden.h"
#include "tests/unit/model/run_model.h"

namespace stockpot {
namespace {

using test::Expected;
using test::GoldenCase;

constexpr int64_t kKvBytes = int64_t{64} << 20;

std::shared_ptr<const BaseModel> LoadBase(const GoldenCase& golden) {
  Result<std::shared_ptr<const BaseModel>> base = BaseModel::Load(Digest{}, *golden.Base());
  EXPECT_TRUE(base.ok()) << base.status().ToString();
  return base.ok() ? *base : nullptr;
}

// Largest difference to the float64 logits.
double WorstError64(const Expected& expected, const std::vector<float>& logits) {
  double worst = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    worst = std::max(worst, std::abs(logits[i] - expected.logits64[i]));
  }
  return worst;
}

TEST(ModelForward, BaseLogitsEqualTransformers) {
  for (const GoldenCase& golden : test::ReadCases("STOCKPOT_MODEL_GOLDENS")) {
    SCOPED_TRACE(golden.name);
    const auto base = LoadBase(golden);
    ASSERT_NE(base, nullptr);
    const Expected expected = golden.Read("base");
    ThreadPool threads(2);
    Transformer transformer(base, threads);
    KvPool pool(base->config(), kKvBytes);
    const std::vector<float> logits = test::PromptLogits(transformer, pool, nullptr, golden.prompt);
    const double share = test::WorstShare(base->config(), expected, logits);
    const double ours = WorstError64(expected, logits);
    const double theirs = WorstError64(expected, expected.logits);
    printf("%-18s error / bound %.3f; against float64: ours %.2e, transformers %.2e\n",
           golden.name.c_str(), share, ours, theirs);
    EXPECT_LE(share, 1.0);
    // The bound is no excuse: we are as exact as float32 arithmetic in another order is.
    EXPECT_LE(ours, 4 * theirs);
  }
}

TEST(ModelForward, BaseGreedyTokensEqualTransformers) {
  for (const GoldenCase& golden : test::ReadCases("STOCKPOT_MODEL_GOLDENS")) {
    SCOPED_TRACE(golden.name);
    const auto base = LoadBase(golden);
    ASSERT_NE(base, nullptr);
    const Expected expected = golden.Read("base");
    ASSERT_EQ(expected.greedy.size(), 64u);
    ThreadPool threads(2);
    Transformer transformer(base, threads);
    KvPool pool(base->config(), kKvBytes);
    EXPECT_EQ(test::Greedy(transformer, pool, nullptr, golden.prompt, 32, 64), expected.greedy);
  }
}

}  // namespace
}  // namespace stockpot
