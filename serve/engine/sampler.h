// Next token from one row of logits.
//
// Order, as in vLLM: logit_bias and masked tokens; repetition, frequency and presence penalties;
// temperature; min_p; top_k; top_p; one draw. Ties everywhere go to the lower id. NaN counts as
// minus infinity.
//
// The random number of a draw is a function of (seed, position) alone: the same request gives the
// same tokens whatever else is in the batch, and also after a preemption.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace stockpot {

struct SamplingParams;

// How often tokens occurred, for the penalties.
struct TokenCounts {
  std::unordered_set<int32_t> prompt;
  std::unordered_map<int32_t, int32_t> generated;
};

bool UsesPenalties(const SamplingParams& params);

// Uniform in [0, 1), 53 bits.
double CounterRandom(uint64_t seed, uint64_t counter);

// Thread promise: one thread at a time. Allocates nothing once it has seen a vocabulary.
class Sampler {
 public:
  // The token, or -1 if no logit is above minus infinity (a broken model, or everything is masked).
  // `position`: how many tokens were generated before. `masked`: ids that must not be chosen.
  int32_t Sample(std::span<const float> logits, const SamplingParams& params,
                 const TokenCounts& counts, std::span<const int32_t> masked, uint64_t position);

 private:
  struct Candidate {
    float logit;
    int32_t token;
  };
  std::span<const float> Adjust(std::span<const float> logits, const SamplingParams& params,
                                const TokenCounts& counts, std::span<const int32_t> masked);
  int32_t Draw(std::span<const float> logits, const SamplingParams& params, float max_logit,
               uint64_t position);

  std::vector<float> adjusted_;
  std::vector<Candidate> candidates_;
};

}  // namespace stockpot
