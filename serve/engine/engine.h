// Continuous batching on one thread that owns all inference state. HTTP threads submit requests and
// receive events; nothing else crosses.
//
// Each step: take in what was submitted and cancelled, admit waiting requests (admission.h: caps on
// running sequences, KV pages, distinct variants), take one token of every decoding sequence and
// prompt chunks up to the step's row budget, sort rows by variant, one Forward, sample. A request
// that waits for its variant's load is not in the queue yet: its lease comes with it.
//
// KV policy: a sequence is admitted when pages for the tokens it has fit (its prompt), not for the
// longest answer it may give. When a running sequence needs a page and there is none, the youngest
// sequence gives its pages back and waits at the front of the queue to be computed again. Because
// the transformer is batch-invariant and the sampler counts its random numbers by position, what it
// says afterwards is what it would have said: nothing is emitted twice or differently. The oldest
// sequence always advances, so every request ends.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/transformer/ops.h"
#include "serve/model/transformer.h"
#include "serve/variants/variant_cache.h"

namespace stockpot {

struct SamplingParams {
  float temperature = 1.0f;         // >= 0; 0: greedy (lowest id wins ties)
  float top_p = 1.0f;               // (0, 1]
  int32_t top_k = 0;                // 0: all
  float min_p = 0.0f;               // [0, 1]
  float repetition_penalty = 1.0f;  // > 0
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  uint64_t seed = 0;  // same seed, same request: same tokens
  std::map<int32_t, float> logit_bias;
};

struct EngineRequest {
  VariantLease variant;         // null: the base
  std::vector<int32_t> prompt;  // >= 1 token
  SamplingParams sampling;
  int64_t max_tokens = 16;  // generated; 0: score the prompt only
  int64_t min_tokens = 0;   // EOS and stop tokens are masked before
  bool ignore_eos = false;
  std::optional<std::vector<int32_t>>
      eos_tokens;                    // of a variant that has its own; else the model's
  std::vector<int32_t> stop_tokens;  // beside EOS; they hold also with ignore_eos
  bool prompt_logprobs = false;      // of every prompt token but the first
  int32_t logprobs = -1;             // >= 0: alternatives to report for each token; -1: none
};

// A token with what the endpoint reports about it. Log-probabilities are those of the model's own
// distribution (before temperature and filters), as vLLM and lm-evaluation-harness expect. Where
// the token stands in `top`, both values have the same bits.
struct TokenEvent {
  int32_t token = -1;
  float logprob = 0;              // meaningful if logprobs were asked for
  std::vector<TokenLogprob> top;  // best first
  bool ends = false;              // EOS or a stop token: counted and scored, not part of the text
};

enum class FinishReason : uint8_t { kStop, kLength, kCancelled, kError };
inline constexpr int kFinishReasons = 4;

// Called from the engine thread; must be quick and must not call back into the engine.
struct EngineCallbacks {
  // Once, when the prompt is done, if prompt_logprobs: entry i belongs to prompt token i; entry 0
  // has no logprob.
  std::function<void(std::vector<TokenEvent> prompt)> on_prompt;
  // Return false to stop the sequence here (a stop string matched): finishes with kStop.
  std::function<bool(const TokenEvent& token)> on_token;
  std::function<void(FinishReason reason, const Status& status)> on_done;  // last, exactly once
};

struct EngineLimits {
  int64_t running_sequences = 64;     // at most step_rows
  int64_t waiting_requests = 1024;    // over it: ResourceExhausted
  int64_t step_rows = 512;            // tokens of one Forward
  int64_t decode_prefill_rows = 128;  // prompt tokens of a step in which somebody decodes: bounds
                                      // how long a long prompt delays the next token of others
  int64_t distinct_variants = 32;     // of one Forward, the base counted as one
  int64_t kv_bytes = int64_t{1} << 30;
  int32_t logprobs = 64;  // alternatives a request may ask for
};

struct EngineStats {
  int64_t running = 0;
  int64_t waiting = 0;
  int64_t prompt_tokens_total = 0;
  int64_t generation_tokens_total = 0;
  int64_t steps_total = 0;
  int64_t preemptions_total = 0;
  int64_t kv_pages_used = 0;
  int64_t kv_pages_total = 0;
};

// Thread promise: every method may be called from any thread, but not from a callback.
class Engine {
 public:
  Engine(std::shared_ptr<const BaseModel> base, EngineLimits limits, int threads);
  ~Engine();  // cancels what runs and waits
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // InvalidArgument (empty prompt, too long for the model or the KV pool, bad parameters),
  // ResourceExhausted (queue full), Unavailable (draining). On error no callback is called. On
  // success callbacks may come before this returns.
  Result<uint64_t> Submit(EngineRequest request, EngineCallbacks callbacks);

  struct Submission {
    EngineRequest request;
    EngineCallbacks callbacks;
  };
  // All of them or, on error, none. The ids stand in the same order.
  Result<std::vector<uint64_t>> SubmitAll(std::vector<Submission> submissions);

  // Frees the sequence's slot before the next step. Unknown ids are ignored.
  void Cancel(uint64_t id);
  // Stops admitting new requests for good; true once nothing runs or waits, false at the timeout.
  bool Drain(int64_t timeout_ms);
  EngineStats stats() const;

  // Prompt and answer together can not be longer than this (the model's positions, the KV pool).
  int64_t max_context() const;
  const EngineLimits& limits() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
