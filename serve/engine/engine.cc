#include "serve/engine/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/threads.h"
#include "serve/engine/batcher.h"

namespace stockpot {
namespace {

EngineLimits Checked(EngineLimits limits) {
  STOCKPOT_CHECK(limits.running_sequences >= 1 && limits.waiting_requests >= 1 &&
                     limits.step_rows >= 1 && limits.decode_prefill_rows >= 1 &&
                     limits.distinct_variants >= 1 && limits.kv_bytes >= 1,
                 limits.running_sequences, limits.waiting_requests, limits.step_rows,
                 limits.decode_prefill_rows, limits.distinct_variants, limits.kv_bytes);
  limits.running_sequences = std::min(limits.running_sequences, limits.step_rows);
  return limits;
}

Status InRange(const char* name, double value, double low, double high) {
  if (value >= low && value <= high) return OkStatus();  // false for NaN
  return InvalidArgument(std::string(name) + " must be between " + std::to_string(low) + " and " +
                         std::to_string(high));
}

Status CheckTokens(const char* what, const std::vector<int32_t>& tokens, int64_t vocab_size) {
  for (int32_t token : tokens) {
    if (token >= 0 && token < vocab_size) continue;
    return InvalidArgument(std::string(what) + " " + std::to_string(token) +
                           " is outside the model's vocabulary of " + std::to_string(vocab_size));
  }
  return OkStatus();
}

Status CheckSampling(const SamplingParams& params, int64_t vocab_size) {
  STOCKPOT_RETURN_IF_ERROR(InRange("temperature", params.temperature, 0, 100));
  if (!(params.top_p > 0 && params.top_p <= 1)) {
    return InvalidArgument("top_p must be above 0 and at most 1");
  }
  if (params.top_k < 0) return InvalidArgument("top_k must not be negative");
  STOCKPOT_RETURN_IF_ERROR(InRange("min_p", params.min_p, 0, 1));
  if (!(params.repetition_penalty > 0 && std::isfinite(params.repetition_penalty))) {
    return InvalidArgument("repetition_penalty must be above 0");
  }
  STOCKPOT_RETURN_IF_ERROR(InRange("frequency_penalty", params.frequency_penalty, -100, 100));
  STOCKPOT_RETURN_IF_ERROR(InRange("presence_penalty", params.presence_penalty, -100, 100));
  for (const auto& [token, bias] : params.logit_bias) {
    STOCKPOT_RETURN_IF_ERROR(CheckTokens("logit_bias token", {token}, vocab_size));
    STOCKPOT_RETURN_IF_ERROR(InRange("logit_bias", bias, -1000, 1000));
  }
  return OkStatus();
}

}  // namespace

// Thread promise: constants, then what synchronises itself, then what mutex guards, then what only
// the engine thread touches.
struct Engine::State {
  State(std::shared_ptr<const BaseModel> base_model, EngineLimits engine_limits, int threads)
      : base(std::move(base_model)),
        limits(Checked(engine_limits)),
        pool(threads),
        batcher(base, limits, pool) {
    published = batcher.stats();
    max_context = std::min(base->config().max_positions, published.kv_pages_total * kKvPageTokens);
  }

  const std::shared_ptr<const BaseModel> base;
  const EngineLimits limits;
  int64_t max_context = 0;

  mutable std::mutex mutex;
  std::condition_variable work;   // something was submitted or cancelled, or stop
  std::condition_variable quiet;  // nothing runs or waits
  std::vector<std::unique_ptr<Sequence>> submitted;
  std::vector<uint64_t> cancelled;
  int64_t live = 0;    // submitted and not finished
  uint64_t next_id = 1;
  bool draining = false;
  bool stop = false;
  EngineStats published;  // as of the last step, and what was taken in since

  ThreadPool pool;
  Batcher batcher;
  std::thread thread;

  Status Check(const EngineRequest& request) const;
  std::unique_ptr<Sequence> MakeSequence(Engine::Submission submission);
  void Run();
  bool TakeIn();
  void Publish();
};

Status Engine::State::Check(const EngineRequest& request) const {
  const int64_t vocab =
      request.variant ? request.variant->config().vocab_size : base->config().vocab_size;
  if (request.prompt.empty()) return InvalidArgument("the prompt has no tokens");
  if (request.max_tokens < 0) return InvalidArgument("max_tokens must not be negative");
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt > max_context || request.max_tokens > max_context - prompt) {
    return InvalidArgument("the prompt has " + std::to_string(prompt) +
                           " tokens and max_tokens is " + std::to_string(request.max_tokens) +
                           ", but prompt and answer together can have at most " +
                           std::to_string(max_context) + " tokens");
  }
  if (request.min_tokens < 0 || request.min_tokens > request.max_tokens) {
    return InvalidArgument("min_tokens must be between 0 and max_tokens");
  }
  if (request.logprobs < -1 || request.logprobs > limits.logprobs) {
    return InvalidArgument("logprobs must be at most " + std::to_string(limits.logprobs));
  }
  if (request.variant && request.variant->base().digest() != base->digest()) {
    return InvalidArgument("the variant was made over another base");
  }
  STOCKPOT_RETURN_IF_ERROR(CheckTokens("prompt token", request.prompt, vocab));
  return CheckSampling(request.sampling, vocab);
}

std::unique_ptr<Sequence> Engine::State::MakeSequence(Engine::Submission submission) {
  auto sequence = std::make_unique<Sequence>();
  sequence->callbacks = std::move(submission.callbacks);
  sequence->request = std::move(submission.request);
  const EngineRequest& request = sequence->request;
  sequence->tokens = request.prompt;
  const std::vector<int32_t>& eos =
      request.eos_tokens ? *request.eos_tokens : base->config().eos_tokens;
  sequence->masked = request.stop_tokens;
  sequence->masked.insert(sequence->masked.end(), eos.begin(), eos.end());
  sequence->ends = request.ignore_eos ? request.stop_tokens : sequence->masked;
  if (UsesPenalties(request.sampling)) {
    sequence->counts.prompt.insert(request.prompt.begin(), request.prompt.end());
  }
  if (request.prompt_logprobs) {
    sequence->prompt_events.reserve(request.prompt.size());
    sequence->prompt_events.push_back({.token = request.prompt[0]});
  }
  return sequence;
}

// Moves what came in to the batcher. False: stop.
bool Engine::State::TakeIn() {
  std::vector<std::unique_ptr<Sequence>> arrivals;
  std::vector<uint64_t> leavers;
  {
    std::unique_lock lock(mutex);
    work.wait(lock,
              [&] { return stop || !submitted.empty() || !cancelled.empty() || !batcher.idle(); });
    arrivals.swap(submitted);
    published.waiting += static_cast<int64_t>(arrivals.size());
    leavers.swap(cancelled);
    if (stop) {
      lock.unlock();
      for (auto& sequence : arrivals) batcher.Add(std::move(sequence));
      return false;
    }
  }
  for (auto& sequence : arrivals) batcher.Add(std::move(sequence));
  for (uint64_t id : leavers) batcher.Cancel(id);
  return true;
}

void Engine::State::Publish() {
  const EngineStats stats = batcher.stats();
  std::lock_guard lock(mutex);
  published = stats;
  live = stats.running + stats.waiting + static_cast<int64_t>(submitted.size());
  if (live == 0) quiet.notify_all();
}

void Engine::State::Run() {
  while (TakeIn()) {
    batcher.Step();
    Publish();
  }
  batcher.CancelAll();
  Publish();
}

Engine::Engine(std::shared_ptr<const BaseModel> base, EngineLimits limits, int threads)
    : state_(std::make_unique<State>(std::move(base), limits, threads)) {
  state_->thread = std::thread([state = state_.get()] { state->Run(); });
}

Engine::~Engine() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
    state_->draining = true;
  }
  state_->work.notify_all();
  state_->thread.join();
}

Result<uint64_t> Engine::Submit(EngineRequest request, EngineCallbacks callbacks) {
  std::vector<Submission> one(1);
  one[0] = {std::move(request), std::move(callbacks)};
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<uint64_t> ids, SubmitAll(std::move(one)));
  return ids[0];
}

Result<std::vector<uint64_t>> Engine::SubmitAll(std::vector<Submission> submissions) {
  State& state = *state_;
  std::vector<std::unique_ptr<Sequence>> sequences;
  sequences.reserve(submissions.size());
  for (Submission& submission : submissions) {
    STOCKPOT_CHECK(submission.callbacks.on_done);
    STOCKPOT_RETURN_IF_ERROR(state.Check(submission.request));
    sequences.push_back(state.MakeSequence(std::move(submission)));
  }
  std::vector<uint64_t> ids;
  ids.reserve(sequences.size());
  {
    std::lock_guard lock(state.mutex);
    if (state.draining) return Unavailable("the engine is shutting down");
    const int64_t waiting = state.published.waiting + static_cast<int64_t>(state.submitted.size());
    if (waiting + static_cast<int64_t>(sequences.size()) > state.limits.waiting_requests) {
      return ResourceExhausted("the queue is full: " + std::to_string(waiting) +
                               " sequences wait, the limit is " +
                               std::to_string(state.limits.waiting_requests));
    }
    for (auto& sequence : sequences) {
      sequence->id = state.next_id++;
      ids.push_back(sequence->id);
      state.submitted.push_back(std::move(sequence));
    }
    state.live += static_cast<int64_t>(ids.size());
  }
  state.work.notify_one();
  return ids;
}

void Engine::Cancel(uint64_t id) {
  {
    std::lock_guard lock(state_->mutex);
    state_->cancelled.push_back(id);
  }
  state_->work.notify_one();
}

bool Engine::Drain(int64_t timeout_ms) {
  std::unique_lock lock(state_->mutex);
  state_->draining = true;
  return state_->quiet.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                [&] { return state_->live == 0; });
}

EngineStats Engine::stats() const {
  std::lock_guard lock(state_->mutex);
  EngineStats stats = state_->published;
  stats.waiting += static_cast<int64_t>(state_->submitted.size());
  return stats;
}

int64_t Engine::max_context() const { return state_->max_context; }
const EngineLimits& Engine::limits() const { return state_->limits; }

}  // namespace stockpot
