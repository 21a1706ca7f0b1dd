// One request inside the engine, from submission to on_done. Engine thread only, once submitted.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "serve/engine/engine.h"
#include "serve/engine/sampler.h"
#include "serve/model/kv_cache.h"

namespace stockpot {

struct Sequence {
  uint64_t id = 0;  // ascending in order of arrival
  EngineRequest request;
  EngineCallbacks callbacks;

  std::vector<int32_t> tokens;  // the prompt, then what was generated; kv holds the first of them
  KvSequence kv;
  std::vector<int32_t> ends;              // EOS and stop tokens that end it
  std::vector<int32_t> masked;            // before min_tokens
  TokenCounts counts;                     // filled only if a penalty is used
  std::vector<TokenEvent> prompt_events;  // collected so far; [0] is the first token, unscored
  bool prompt_delivered = false;

  // Of the waiting queue.
  int64_t overtaken = 0;  // later arrivals admitted before this one

  // Of the step in progress.
  int64_t chunk = 0;  // rows of this step
  bool finished = false;
  FinishReason reason = FinishReason::kStop;
  Status status;

  const VariantModel* variant() const { return request.variant.get(); }
  int64_t prompt_length() const { return static_cast<int64_t>(request.prompt.size()); }
  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  int64_t generated() const { return length() - prompt_length(); }
  bool scores_only() const { return request.max_tokens == 0; }
  // Tokens the model has to see before the next one can be sampled. The last token of a prompt that
  // is only scored predicts nothing that anybody asked for.
  int64_t target() const {
    if (!scores_only()) return length();
    return request.prompt_logprobs ? length() - 1 : 0;
  }
  // Pages it must find to be admitted: its tokens and, if it generates, the next one.
  int64_t pages_to_start() const {
    return KvPool::PagesFor(scores_only() ? length() : length() + 1);
  }
  int64_t pending() const { return target() - kv.length(); }
  bool decoding() const { return generated() > 0 && pending() == 1; }
};

}  // namespace stockpot
