#include "serve/engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "serve/engine/engine.h"

namespace stockpot {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
// Below this a division by the temperature overflows before it changes any choice.
constexpr float kGreedyTemperature = 1e-5f;

// Finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

int32_t ArgMax(std::span<const float> logits) {
  int32_t best = -1;
  float best_logit = kNothing;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > best_logit) {  // false for NaN
      best_logit = logits[i];
      best = static_cast<int32_t>(i);
    }
  }
  return best;
}

}  // namespace

bool UsesPenalties(const SamplingParams& params) {
  return params.repetition_penalty != 1.0f || params.frequency_penalty != 0.0f ||
         params.presence_penalty != 0.0f;
}

double CounterRandom(uint64_t seed, uint64_t counter) {
  return static_cast<double>(Mix(Mix(seed) ^ Mix(~counter)) >> 11) * 0x1.0p-53;
}

std::span<const float> Sampler::Adjust(std::span<const float> logits, const SamplingParams& params,
                                       const TokenCounts& counts, std::span<const int32_t> masked) {
  if (params.logit_bias.empty() && masked.empty() && !UsesPenalties(params)) return logits;
  adjusted_.assign(logits.begin(), logits.end());
  const auto in_range = [&](int32_t id) {
    return id >= 0 && static_cast<size_t>(id) < adjusted_.size();
  };
  for (const auto& [id, bias] : params.logit_bias) {
    if (in_range(id)) adjusted_[id] += bias;
  }
  for (int32_t id : masked) {
    if (in_range(id)) adjusted_[id] = kNothing;
  }
  if (params.repetition_penalty != 1.0f) {  // Keskar et al., arXiv 1909.05858
    const auto repeat = [&](int32_t id) {
      float& logit = adjusted_[id];
      logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    };
    for (int32_t id : counts.prompt) repeat(id);
    for (const auto& [id, count] : counts.generated) {
      if (!counts.prompt.contains(id)) repeat(id);
    }
  }
  for (const auto& [id, count] : counts.generated) {
    adjusted_[id] -= params.frequency_penalty * static_cast<float>(count) + params.presence_penalty;
  }
  return adjusted_;
}

int32_t Sampler::Sample(std::span<const float> logits, const SamplingParams& params,
                        const TokenCounts& counts, std::span<const int32_t> masked,
                        uint64_t position) {
  const std::span<const float> row = Adjust(logits, params, counts, masked);
  const int32_t best = ArgMax(row);
  if (best < 0 || params.temperature < kGreedyTemperature || params.top_k == 1 ||
      std::isinf(row[best])) {
    return best;
  }
  return Draw(row, params, row[best], position);
}

int32_t Sampler::Draw(std::span<const float> logits, const SamplingParams& params, float max_logit,
                      uint64_t position) {
  // Weights are exp((logit - max) / temperature), in (0, 1].
  const double scale = 1.0 / params.temperature;
  const auto weight = [&](float logit) { return std::exp((logit - max_logit) * scale); };
  // min_p: weight >= min_p, because the largest weight is 1.
  const float floor =
      params.min_p > 0 ? max_logit + static_cast<float>(std::log(params.min_p) * params.temperature)
                       : std::numeric_limits<float>::lowest();
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] >= floor) candidates_.push_back({logits[i], static_cast<int32_t>(i)});
  }
  const auto better = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  };
  if (params.top_k > 0 && static_cast<size_t>(params.top_k) < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + params.top_k - 1, candidates_.end(),
                     better);
    candidates_.resize(params.top_k);
    // nth_element leaves an order of its own; the draw below must not depend on it.
    std::sort(candidates_.begin(), candidates_.end(), better);
  }
  double total = 0;
  for (const Candidate& c : candidates_) total += weight(c.logit);
  size_t kept = candidates_.size();
  if (params.top_p < 1.0f) {
    // The smallest set of best tokens whose share reaches top_p; popped from a heap, because it is
    // usually a few out of many thousand. The kept ones end up at the back, best last.
    const auto worse = [&](const Candidate& a, const Candidate& b) { return better(b, a); };
    std::make_heap(candidates_.begin(), candidates_.end(), worse);
    const double wanted = params.top_p * total;
    double share = 0;
    kept = 0;
    while (kept < candidates_.size() && (kept == 0 || share < wanted)) {
      std::pop_heap(candidates_.begin(), candidates_.end() - kept, worse);
      ++kept;
      share += weight(candidates_[candidates_.size() - kept].logit);
    }
    total = share;
  }
  double left = CounterRandom(params.seed, position) * total;
  const std::span<const Candidate> pool(candidates_.data() + candidates_.size() - kept, kept);
  for (const Candidate& c : pool) {
    left -= weight(c.logit);
    if (left < 0) return c.token;
  }
  return pool.back().token;  // rounding left a sliver
}

}  // namespace stockpot
