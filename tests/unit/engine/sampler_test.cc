// The sampler against its definition: order of filters, ties, seeds, broken logits.
#include "serve/engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "serve/engine/engine.h"

namespace stockpot {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

int32_t SampleOne(std::vector<float> logits, const SamplingParams& params, uint64_t position = 0,
                  const TokenCounts& counts = {}, std::vector<int32_t> masked = {}) {
  Sampler sampler;
  return sampler.Sample(logits, params, counts, masked, position);
}

// How often each token comes out of `draws` positions.
std::map<int32_t, double> Shares(const std::vector<float>& logits, const SamplingParams& params,
                                 int draws) {
  std::map<int32_t, double> shares;
  Sampler sampler;
  for (int i = 0; i < draws; ++i) {
    shares[sampler.Sample(logits, params, {}, {}, static_cast<uint64_t>(i))] += 1.0 / draws;
  }
  return shares;
}

// 99.99 % of the draws' shares lie within 4 standard deviations.
double Slack(double p, int draws) { return 4 * std::sqrt(p * (1 - p) / draws) + 1e-9; }

TEST(Sampler, GreedyTakesTheLowestOfTheBest) {
  EXPECT_EQ(SampleOne({1, 3, 3, 2}, {.temperature = 0}), 1);
  EXPECT_EQ(SampleOne({-1, -1}, {.temperature = 0}), 0);
  EXPECT_EQ(SampleOne({0, 5, 1}, {.temperature = 1, .top_k = 1}), 1);
}

TEST(Sampler, BrokenLogits) {
  EXPECT_EQ(SampleOne({kNan, 1, kNan, 2}, {.temperature = 0}), 3);
  EXPECT_EQ(SampleOne({kNan, -kInf}, {.temperature = 0}), -1);
  EXPECT_EQ(SampleOne({kNan, kNan}, {.temperature = 1}), -1);
  EXPECT_EQ(SampleOne({}, {.temperature = 1}), -1);
  EXPECT_EQ(SampleOne({0, kInf, kInf}, {.temperature = 1}), 1);
  for (uint64_t i = 0; i < 200; ++i) {
    EXPECT_EQ(SampleOne({kNan, 0, -kInf}, {.temperature = 1, .top_p = 0.9f, .seed = i}), 1);
  }
}

TEST(Sampler, MaskedTokensNeverComeOut) {
  EXPECT_EQ(SampleOne({1, 9, 3}, {.temperature = 0}, 0, {}, {1}), 2);
  EXPECT_EQ(SampleOne({1, 9, 3}, {.temperature = 0}, 0, {}, {0, 1, 2}), -1);
  EXPECT_EQ(SampleOne({1, 9, 3}, {.temperature = 0}, 0, {}, {1, 77, -3}), 2);  // ids out of range
}

TEST(Sampler, LogitBias) {
  EXPECT_EQ(SampleOne({1, 2, 3}, {.temperature = 0, .logit_bias = {{0, 10.0f}}}), 0);
  EXPECT_EQ(SampleOne({1, 2, 3}, {.temperature = 0, .logit_bias = {{2, -100.0f}}}), 1);
}

TEST(Sampler, Penalties) {
  TokenCounts counts;
  counts.prompt = {2};
  counts.generated = {{1, 3}};
  // Repetition divides positive logits and multiplies negative ones, once for each token seen.
  EXPECT_EQ(SampleOne({2, 3, 3.5f}, {.temperature = 0, .repetition_penalty = 2}, 0, counts), 0);
  EXPECT_EQ(SampleOne({-1.1f, -1, -1}, {.temperature = 0, .repetition_penalty = 2}, 0, counts), 0);
  // Frequency counts what was generated, not the prompt: 4 - 3 * 1 against 1.5.
  EXPECT_EQ(SampleOne({1.5f, 4, 0}, {.temperature = 0, .frequency_penalty = 1}, 0, counts), 0);
  EXPECT_EQ(SampleOne({0, 0, 5}, {.temperature = 0, .frequency_penalty = 2}, 0, counts), 2);
  // Presence counts once: 4 - 1 against 1.5.
  EXPECT_EQ(SampleOne({1.5f, 4, 0}, {.temperature = 0, .presence_penalty = 1}, 0, counts), 1);
}

TEST(Sampler, SharesFollowTheSoftmax) {
  const std::vector<float> logits = {0, 1, 2, -1};
  constexpr int kDraws = 40'000;
  for (const float temperature : {0.5f, 1.0f, 2.0f}) {
    double total = 0;
    for (const float logit : logits) total += std::exp(logit / temperature);
    const auto shares = Shares(logits, {.temperature = temperature, .seed = 7}, kDraws);
    for (size_t i = 0; i < logits.size(); ++i) {
      const double p = std::exp(logits[i] / temperature) / total;
      const auto it = shares.find(static_cast<int32_t>(i));
      EXPECT_NEAR(it == shares.end() ? 0 : it->second, p, Slack(p, kDraws)) << i << temperature;
    }
  }
}

TEST(Sampler, FiltersKeepWhatTheyShould) {
  // Probabilities 0.5, 0.25, 0.125, 0.125.
  const std::vector<float> logits = {std::log(4.0f), std::log(2.0f), 0, 0};
  const auto kept = [&](const SamplingParams& params) {
    std::vector<int32_t> ids;
    for (const auto& [id, share] : Shares(logits, params, 4'000)) ids.push_back(id);
    return ids;
  };
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(kept({.top_k = 2}), (Ids{0, 1}));
  EXPECT_EQ(kept({.top_k = 3}), (Ids{0, 1, 2}));  // the tie goes to the lower id
  EXPECT_EQ(kept({.top_k = 99}), (Ids{0, 1, 2, 3}));
  EXPECT_EQ(kept({.top_p = 0.5f}), (Ids{0}));
  EXPECT_EQ(kept({.top_p = 0.51f}), (Ids{0, 1}));
  EXPECT_EQ(kept({.top_p = 0.8f}), (Ids{0, 1, 2}));
  EXPECT_EQ(kept({.top_p = 1e-6f}), (Ids{0}));
  EXPECT_EQ(kept({.min_p = 0.3f}), (Ids{0, 1}));
  EXPECT_EQ(kept({.min_p = 1.0f}), (Ids{0}));
  // top_p looks at what top_k left: 2/3 and 1/3.
  EXPECT_EQ(kept({.top_p = 0.6f, .top_k = 2}), (Ids{0}));
  const auto shares = Shares(logits, {.top_k = 2, .seed = 3}, 20'000);
  EXPECT_NEAR(shares.at(0), 2.0 / 3, Slack(2.0 / 3, 20'000));
}

TEST(Sampler, SeedAndPositionDecideAlone) {
  std::mt19937_64 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> logits(1000);
  for (float& logit : logits) logit = normal(random);
  const SamplingParams params{.temperature = 0.9f, .top_p = 0.95f, .seed = 5};
  Sampler one, other;
  std::vector<int32_t> first;
  for (uint64_t i = 0; i < 50; ++i) first.push_back(one.Sample(logits, params, {}, {}, i));
  // Another sampler, another order, other requests between.
  for (uint64_t i = 50; i-- > 0;) {
    (void)other.Sample(logits, {.seed = i}, {}, {}, 3);
    EXPECT_EQ(other.Sample(logits, params, {}, {}, i), first[i]);
  }
  SamplingParams reseeded = params;
  reseeded.seed = 6;
  int same = 0;
  for (uint64_t i = 0; i < 50; ++i) same += one.Sample(logits, reseeded, {}, {}, i) == first[i];
  EXPECT_LT(same, 10);
}

TEST(Sampler, RandomNumbersAreUniform) {
  double sum = 0, low = 1, high = 0;
  constexpr int kCount = 100'000;
  for (int i = 0; i < kCount; ++i) {
    const double u = CounterRandom(static_cast<uint64_t>(i % 10), static_cast<uint64_t>(i / 10));
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    sum += u;
    low = std::min(low, u);
    high = std::max(high, u);
  }
  EXPECT_NEAR(sum / kCount, 0.5, 4 * std::sqrt(1.0 / 12 / kCount));
  EXPECT_LT(low, 0.001);
  EXPECT_GT(high, 0.999);
}

}  // namespace
}  // namespace stockpot
