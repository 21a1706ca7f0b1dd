// One request of the API that generates: its sequences in the engine, and its reply.
//
//   plan -> (lease) -> Start: SubmitAll -> events from the engine thread -> reply
//
// The engine thread decodes tokens and looks for stop strings; JSON of a stream is made on the
// connection's strand, that of a whole reply on the worker pool. If the client goes away, all
// sequences are cancelled at once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "serve/http/api_error.h"
#include "serve/http/exchange.h"
#include "serve/http/metrics.h"
#include "serve/http/reply.h"
#include "serve/http/serving_model.h"
#include "serve/text/stream_decoder.h"

namespace stockpot {

// One sequence to run; `request.variant` is filled in by Start.
struct PlannedChoice {
  EngineRequest request;
  std::string echo;  // put before the generated text
  // Where the prompt's tokens stand in `echo`; null unless they are reported.
  std::shared_ptr<const std::vector<int64_t>> prompt_offsets;
};

struct GenerationPlan {
  ReplyHead head;
  std::vector<PlannedChoice> choices;
  std::vector<std::string> stop;
  int64_t prompt_tokens = 0;  // each prompt once
  bool report_tokens = false;
  bool stream = false;
  bool include_usage = false;
};

// Where slow work runs: never on an io thread.
using Executor = std::function<void(std::function<void()>)>;

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  // What the callers know of where the request came from.
  struct Context {
    std::shared_ptr<Exchange> exchange;
    std::shared_ptr<const ServingModel> model;
    std::shared_ptr<const TextAssets> text;
    std::shared_ptr<Metrics> metrics;
    Executor executor;
    std::function<void()> on_first_token;  // from the engine thread, once; may be null
  };

  Generation(Context context, GenerationPlan plan, std::unique_ptr<ReplyFormat> format);
  ~Generation();

  // Watches for the client's leaving from now on.
  void Watch();
  // Submits on `lease` (null: the base), or replies with the error. Once.
  void Start(Result<VariantLease> lease);

 private:
  struct Choice;

  void Abandon();
  void CancelAll();
  void FailWith(const Status& status);
  EngineCallbacks CallbacksFor(Choice& choice);
  bool OnToken(Choice& choice, const TokenEvent& event);
  void OnDone(Choice& choice, FinishReason reason, const Status& status);
  void Emit(ChoicePart part);
  void ObserveToken(Choice& choice);
  void Complete();
  void CompleteStream();
  void ReplyWhole();
  Usage CurrentUsage() const;

  const Context context_;
  GenerationPlan plan_;
  const std::unique_ptr<ReplyFormat> format_;
  const bool is_variant_;
  std::vector<std::unique_ptr<Choice>> choices_;  // the engine thread's, until all are done
  bool answered_ = false;                         // likewise: a first token was seen
  std::atomic<int64_t> unfinished_{0};
  bool streaming_ = false;  // the strand's: headers are sent

  std::mutex mutex_;
  std::vector<uint64_t> ids_;      // guarded; submitted
  bool abandoned_ = false;         // guarded; nobody waits for the reply
  std::optional<Status> failure_;  // guarded; the first
};

}  // namespace stockpot
