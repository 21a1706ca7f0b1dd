// Continuous batching on one thread that owns all inference state. HTTP threads submit requests and
// receive events; nothing else crosses.
//
// Each step: admit waiting requests (caps on running sequences, KV pages, distinct variants), take one
// token of every decoding sequence and prompt chunks up to the step's row budget, sort rows by variant,
// one Forward, sample. A request that waits for its variant's load is not in the queue yet: its lease
// comes with it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/transformer/ops.h"
#include "serve/model/transformer.h"
#include "serve/variants/variant_cache.h"

namespace stockpot {

struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy (lowest id wins ties)
  float top_p = 1.0f;
  int32_t top_k = 0;         // 0: all
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  uint64_t seed = 0;         // same seed, same request: same tokens
  std::map<int32_t, float> logit_bias;
};

struct EngineRequest {
  VariantLease variant;             // null: the base
  std::vector<int32_t> prompt;      // >= 1 token
  SamplingParams sampling;
  int64_t max_tokens = 16;          // generated; 0: score the prompt only
  int64_t min_tokens = 0;           // EOS is masked before
  bool ignore_eos = false;
  std::vector<int32_t> stop_tokens; // beside the model's EOS
  bool prompt_logprobs = false;     // of every prompt token but the first
  int32_t logprobs = -1;            // >= 0: alternatives to report for each token; -1: none
};

// A token with what the endpoint reports about it. Log-probabilities are those of the model's own
// distribution (before temperature and filters), as vLLM and lm-evaluation-harness expect.
struct TokenEvent {
  int32_t token = -1;
  float logprob = 0;                    // meaningful if logprobs were asked for
  std::vector<TokenLogprob> top;        // best first
};

enum class FinishReason : uint8_t { kStop, kLength, kCancelled, kError };

// Called from the engine thread; must be quick and must not call back into the engine.
struct EngineCallbacks {
  // Once, when the prompt is done, if prompt_logprobs: entry i belongs to prompt token i; entry 0 has no
  // logprob.
  std::function<void(std::vector<TokenEvent> prompt)> on_prompt;
  // Return false to stop the sequence here (a stop string matched): finishes with kStop.
  std::function<bool(const TokenEvent& token)> on_token;
  std::function<void(FinishReason reason, const Status& status)> on_done;  // last, exactly once
};

struct EngineLimits {
  int64_t running_sequences = 64;
  int64_t waiting_requests = 1024;   // over it: ResourceExhausted
  int64_t step_rows = 512;           // tokens of one Forward
  int64_t distinct_variants = 32;    // of one Forward
  int64_t kv_bytes = int64_t{1} << 30;
};

struct EngineStats {
  int64_t running = 0;
  int64_t waiting = 0;
  int64_t prompt_tokens_total = 0;
  int64_t generation_tokens_total = 0;
  int64_t steps_total = 0;
  int64_t kv_pages_used = 0;
  int64_t kv_pages_total = 0;
};

class Engine {
 public:
  Engine(std::shared_ptr<const BaseModel> base, EngineLimits limits, int threads);
  ~Engine();  // cancels what runs

  // Any thread. InvalidArgument (empty prompt, too long for the model or the KV pool, bad parameters),
  // ResourceExhausted (queue full). On error no callback is called.
  Result<uint64_t> Submit(EngineRequest request, EngineCallbacks callbacks);
  // Frees the sequence's slot before the next step. Unknown ids are ignored.
  void Cancel(uint64_t id);
  // Stops admitting; true once nothing runs or waits, false at the timeout.
  bool Drain(int64_t timeout_ms);
  EngineStats stats() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
