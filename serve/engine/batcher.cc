#include "serve/engine/batcher.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "kernels/base/check.h"

namespace stockpot {
namespace {

// A prompt gets at least this many rows of a step when several share it: fewer would spend the step
// on reading weights.
constexpr int64_t kMinChunkRows = 32;

void Finish(Sequence& sequence, FinishReason reason, Status status = {}) {
  if (sequence.finished) return;
  sequence.finished = true;
  sequence.reason = reason;
  sequence.status = std::move(status);
}

}  // namespace

Batcher::Batcher(std::shared_ptr<const BaseModel> base, const EngineLimits& limits,
                 ThreadPool& threads)
    : base_(std::move(base)),
      limits_(limits),
      pool_(base_->config(), limits.kv_bytes),
      transformer_(base_, threads),
      waiting_(limits.distinct_variants),
      sink_([this](int64_t segment, int64_t row, std::span<const float> logits) {
        OnLogits(*batch_[segment], segment_starts_[segment] + row, logits);
      }) {
  totals_.kv_pages_total = pool_.total_pages();
}

EngineStats Batcher::stats() const {
  EngineStats stats = totals_;
  stats.running = static_cast<int64_t>(running_.size());
  stats.waiting = waiting_.size();
  stats.kv_pages_used = pool_.total_pages() - pool_.free_pages();
  return stats;
}

void Batcher::Cancel(uint64_t id) {
  for (auto& sequence : running_) {
    if (sequence->id == id) Finish(*sequence, FinishReason::kCancelled);
  }
  if (std::unique_ptr<Sequence> sequence = waiting_.Remove(id)) {
    sequence->callbacks.on_done(FinishReason::kCancelled, OkStatus());
  }
  RemoveFinished();
}

void Batcher::CancelAll() {
  for (auto& sequence : running_) Finish(*sequence, FinishReason::kCancelled);
  RemoveFinished();
  const RunningVariants nobody;
  while (std::unique_ptr<Sequence> sequence = waiting_.Next(nobody, pool_.total_pages() + 1)) {
    sequence->callbacks.on_done(FinishReason::kCancelled, OkStatus());
  }
}

void Batcher::Step() {
  Admit();
  if (running_.empty()) return;
  PlanChunks();
  BuildSegments();
  Status status;
  if (!segments_.empty()) {
    status = transformer_.Forward(segments_, sink_);
    ++totals_.steps_total;
  }
  AfterForward(status);
  RemoveFinished();
}

void Batcher::Admit() {
  while (static_cast<int64_t>(running_.size()) < limits_.running_sequences) {
    // Running sequences are about to need a page each; keep them, unless nobody runs.
    const int64_t free_pages = pool_.free_pages() - static_cast<int64_t>(running_.size());
    std::unique_ptr<Sequence> sequence = waiting_.Next(variants_, free_pages);
    if (!sequence) return;
    // The step's segments borrow the tokens, so they must not move when one is added.
    sequence->tokens.reserve(sequence->request.prompt.size() + sequence->request.max_tokens);
    sequence->kv = pool_.NewSequence();
    const Status reserved = sequence->kv.Reserve(sequence->length());
    STOCKPOT_CHECK(reserved.ok(), reserved.ToString());  // Next() counted the pages
    variants_.Add(sequence->variant());
    const auto later = std::find_if(running_.begin(), running_.end(),
                                    [&](const auto& other) { return other->id > sequence->id; });
    running_.insert(later, std::move(sequence));
  }
}

// Puts the youngest running sequence back into the queue; false if that is `for_whom` itself.
bool Batcher::PreemptYoungest(const Sequence& for_whom) {
  std::unique_ptr<Sequence> youngest = std::move(running_.back());
  running_.pop_back();
  const bool itself = youngest.get() == &for_whom;
  youngest->kv = KvSequence();
  youngest->chunk = 0;
  variants_.Remove(youngest->variant());
  waiting_.PushPreempted(std::move(youngest));
  ++totals_.preemptions_total;
  return !itself;
}

// Every decoding sequence gets its row first; prompts share what is left, oldest first.
void Batcher::PlanChunks() {
  int64_t budget = limits_.step_rows;
  int64_t decoding = 0;
  // Oldest first, by index: preemption shortens running_ from its end.
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    sequence.chunk = 0;
    if (!sequence.decoding()) continue;
    bool here = true;
    while (here && !sequence.kv.Reserve(1).ok()) here = PreemptYoungest(sequence);
    if (!here) break;  // it was the last
    sequence.chunk = 1;
    ++decoding;
  }
  int64_t prompts = 0;
  for (auto& sequence : running_) prompts += sequence->chunk == 0 && sequence->pending() > 0;
  if (prompts == 0) return;
  budget -= decoding;
  if (decoding > 0) budget = std::min(budget, limits_.decode_prefill_rows);
  // Twice: an equal share for each, then the rest to the oldest that want more.
  const int64_t share = std::max(kMinChunkRows, budget / prompts);
  for (const int64_t most : {share, limits_.step_rows}) {
    for (auto& sequence : running_) {
      if (sequence->decoding()) continue;
      const int64_t rows =
          std::min({sequence->pending() - sequence->chunk, most, std::max<int64_t>(budget, 0)});
      sequence->chunk += rows;
      budget -= rows;
    }
  }
}

void Batcher::BuildSegments() {
  batch_.clear();
  segments_.clear();
  segment_starts_.clear();
  for (auto& sequence : running_) {
    if (sequence->chunk > 0) batch_.push_back(sequence.get());
  }
  // Rows of one variant stand together; the base first. Order within is that of arrival.
  std::stable_sort(batch_.begin(), batch_.end(), [](const Sequence* a, const Sequence* b) {
    return std::less<const VariantModel*>()(a->variant(), b->variant());
  });
  for (Sequence* sequence : batch_) {
    const int64_t start = sequence->kv.length();
    const int64_t end = start + sequence->chunk;
    // The first position whose logits are wanted: that which predicts the first unscored prompt
    // token, or the last one of all.
    int64_t from = end;
    if (end == sequence->target() && !sequence->scores_only()) from = end - 1;
    if (sequence->request.prompt_logprobs && !sequence->prompt_delivered) {
      const int64_t scored = static_cast<int64_t>(sequence->prompt_events.size());
      from = std::min(from, std::max(start, scored - 1));
    }
    segments_.push_back({.kv = &sequence->kv,
                         .tokens = std::span(sequence->tokens).subspan(start, sequence->chunk),
                         .variant = sequence->variant(),
                         .logits_from = from - start,
                         .prompt_rows = std::clamp<int64_t>(sequence->prompt_length() - start, 0,
                                                            sequence->chunk)});
    segment_starts_.push_back(start);
  }
}

TokenEvent Batcher::Score(const Sequence& sequence, int32_t token,
                          std::span<const float> logits) const {
  TokenEvent event{.token = token};
  if (sequence.request.logprobs < 0 && !sequence.request.prompt_logprobs) return event;
  const int64_t wanted = std::max(sequence.request.logprobs, 0);
  event.top.resize(std::min<size_t>(wanted, logits.size()));
  event.logprob = LogSoftmaxAt(logits, token, event.top);
  // Clients compare the two with ==.
  for (const TokenLogprob& alternative : event.top) {
    if (alternative.token == token) event.logprob = alternative.logprob;
  }
  return event;
}

// Logits of the token at `position` predict the one at position + 1.
void Batcher::OnLogits(Sequence& sequence, int64_t position, std::span<const float> logits) {
  if (sequence.finished) return;
  if (sequence.request.prompt_logprobs && position + 1 < sequence.prompt_length() &&
      position + 1 == static_cast<int64_t>(sequence.prompt_events.size())) {
    sequence.prompt_events.push_back(Score(sequence, sequence.tokens[position + 1], logits));
  }
  if (position + 1 == sequence.length()) {
    if (sequence.generated() == 0) totals_.prompt_tokens_total += sequence.prompt_length();
    DeliverPrompt(sequence);
    Generate(sequence, logits);
  }
}

void Batcher::DeliverPrompt(Sequence& sequence) {
  if (!sequence.request.prompt_logprobs || sequence.prompt_delivered) return;
  sequence.prompt_delivered = true;
  if (sequence.callbacks.on_prompt) {
    sequence.callbacks.on_prompt(std::move(sequence.prompt_events));
  }
  sequence.prompt_events.clear();
}

void Batcher::Generate(Sequence& sequence, std::span<const float> logits) {
  const EngineRequest& request = sequence.request;
  const bool may_end = sequence.generated() >= request.min_tokens;
  const int32_t token = sampler_.Sample(
      logits, request.sampling, sequence.counts,
      may_end ? std::span<const int32_t>() : std::span<const int32_t>(sequence.masked),
      static_cast<uint64_t>(sequence.generated()));
  if (token < 0) {
    Finish(sequence, FinishReason::kError,
           Internal("the model gave no finite logit to choose a token from"));
    return;
  }
  TokenEvent event = Score(sequence, token, logits);
  event.ends = std::find(sequence.ends.begin(), sequence.ends.end(), token) != sequence.ends.end();
  if (UsesPenalties(request.sampling)) ++sequence.counts.generated[token];
  sequence.tokens.push_back(token);
  ++totals_.generation_tokens_total;
  const bool goes_on = sequence.callbacks.on_token ? sequence.callbacks.on_token(event) : true;
  if (event.ends || !goes_on) {
    Finish(sequence, FinishReason::kStop);
  } else if (sequence.generated() >= request.max_tokens) {
    Finish(sequence, FinishReason::kLength);
  }
}

void Batcher::AfterForward(const Status& status) {
  if (!status.ok()) {
    const Status reported = status.WithContext("while computing a batch");
    for (Sequence* sequence : batch_) Finish(*sequence, FinishReason::kError, reported);
  }
  for (auto& sequence : running_) {
    if (sequence->finished || !sequence->scores_only() || sequence->pending() > 0) continue;
    totals_.prompt_tokens_total += sequence->prompt_length();
    DeliverPrompt(*sequence);
    Finish(*sequence, FinishReason::kLength);
  }
}

void Batcher::RemoveFinished() {
  size_t kept = 0;
  for (size_t i = 0; i < running_.size(); ++i) {
    std::unique_ptr<Sequence>& sequence = running_[i];
    if (!sequence->finished) {
      if (kept != i) running_[kept] = std::move(sequence);
      ++kept;
      continue;
    }
    const std::unique_ptr<Sequence> done = std::move(sequence);
    done->kv = KvSequence();
    variants_.Remove(done->variant());
    done->callbacks.on_done(done->reason, done->status);
  }
  running_.resize(kept);
}

}  // namespace stockpot
