#include "serve/http/generation.h"

#include <utility>

#include "serve/text/utf8.h"

namespace stockpot {
namespace {

using SteadyClock = std::chrono::steady_clock;

double SecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

// Code points, counted by the bytes that start one. REQUIRES: valid UTF-8.
int64_t CodePoints(std::string_view text) {
  int64_t count = 0;
  for (const char c : text) count += (static_cast<uint8_t>(c) & 0xC0) != 0x80;
  return count;
}

// The request is fine; what is stored is not.
Status LoadFailure(const Status& status) {
  const bool ours =
      status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kNotFound;
  return ours ? Internal(status.WithContext("while loading the model").message()) : status;
}

std::string SseEvent(std::string_view json) {
  std::string event;
  event.reserve(json.size() + 8);
  event.append("data: ").append(json).append("\n\n");
  return event;
}

}  // namespace

struct Generation::Choice {
  Choice(int64_t choice_index, const Tokenizer& tokenizer, std::vector<std::string> stops)
      : index(choice_index), decoder(tokenizer, /*skip_special=*/true), stop(std::move(stops)) {}

  const int64_t index;
  std::shared_ptr<const std::vector<int64_t>> prompt_offsets;
  StreamDecoder decoder;
  StopMatcher stop;
  std::string text;                   // not yet sent; starts as the echo
  std::vector<ReportedToken> tokens;  // likewise
  int64_t decoded = 0;                // code points, the echo included
  int64_t generated = 0;
  bool first = true;
  const char* finish = nullptr;
  SteadyClock::time_point last_token;
};

Generation::Generation(Context context, GenerationPlan plan, std::unique_ptr<ReplyFormat> format)
    : context_(std::move(context)),
      plan_(std::move(plan)),
      format_(std::move(format)),
      is_variant_(plan_.head.fingerprint != context_.model->base->digest().Hex()) {
  for (size_t i = 0; i < plan_.choices.size(); ++i) {
    auto choice =
        std::make_unique<Choice>(static_cast<int64_t>(i), *context_.text->tokenizer, plan_.stop);
    choice->text = std::move(plan_.choices[i].echo);
    choice->decoded = CodePoints(choice->text);
    choice->prompt_offsets = plan_.choices[i].prompt_offsets;
    choices_.push_back(std::move(choice));
  }
}

Generation::~Generation() = default;

void Generation::Watch() {
  context_.exchange->OnDisconnect([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->Abandon();
  });
}

// The client left: free its slots. Ids that are submitted later are cancelled by Start.
void Generation::Abandon() {
  {
    std::lock_guard lock(mutex_);
    abandoned_ = true;
  }
  ++context_.metrics->disconnects_total;
  CancelAll();
}

void Generation::CancelAll() {
  std::vector<uint64_t> ids;
  {
    std::lock_guard lock(mutex_);
    ids = ids_;
  }
  for (uint64_t id : ids) context_.model->engine.Cancel(id);
}

void Generation::FailWith(const Status& status) {
  context_.exchange->Respond(ErrorResponse(status));
}

void Generation::Start(Result<VariantLease> lease) {
  if (!lease.ok()) return FailWith(LoadFailure(lease.status()));
  {
    std::lock_guard lock(mutex_);
    if (abandoned_) return;  // while the variant was loading
  }
  std::vector<Engine::Submission> submissions;
  submissions.reserve(choices_.size());
  for (size_t i = 0; i < choices_.size(); ++i) {
    plan_.choices[i].request.variant = *lease;
    submissions.push_back({std::move(plan_.choices[i].request), CallbacksFor(*choices_[i])});
  }
  plan_.choices.clear();
  unfinished_ = static_cast<int64_t>(choices_.size());
  auto ids = context_.model->engine.SubmitAll(std::move(submissions));
  if (!ids.ok()) return FailWith(ids.status());
  bool late = false;
  {
    std::lock_guard lock(mutex_);
    ids_ = *ids;
    late = abandoned_ || failure_;
  }
  if (late) {
    for (uint64_t id : *ids) context_.model->engine.Cancel(id);
  }
}

EngineCallbacks Generation::CallbacksFor(Choice& choice) {
  EngineCallbacks callbacks;
  callbacks.on_prompt = [self = shared_from_this(), &choice](std::vector<TokenEvent> prompt) {
    for (size_t i = 0; i < prompt.size(); ++i) {
      const int64_t offset = choice.prompt_offsets ? (*choice.prompt_offsets)[i] : 0;
      choice.tokens.push_back(
          {.event = std::move(prompt[i]), .text_offset = offset, .scored = i > 0});
    }
  };
  callbacks.on_token = [self = shared_from_this(), &choice](const TokenEvent& event) {
    return self->OnToken(choice, event);
  };
  callbacks.on_done = [self = shared_from_this(), &choice](FinishReason reason,
                                                           const Status& status) {
    self->OnDone(choice, reason, status);
  };
  return callbacks;
}

void Generation::ObserveToken(Choice& choice) {
  const auto now = SteadyClock::now();
  if (!std::exchange(answered_, true) && context_.on_first_token) context_.on_first_token();
  if (choice.generated == 0) {
    context_.metrics->time_to_first_token.of(is_variant_)
        .Observe(std::chrono::duration<double>(now - context_.exchange->request().arrival).count());
  } else {
    context_.metrics->inter_token_latency.of(is_variant_)
        .Observe(std::chrono::duration<double>(now - choice.last_token).count());
  }
  choice.last_token = now;
}

bool Generation::OnToken(Choice& choice, const TokenEvent& event) {
  ObserveToken(choice);
  ++choice.generated;
  if (plan_.report_tokens) {
    choice.tokens.push_back({.event = event, .text_offset = choice.decoded});
  }
  if (!event.ends) {
    const std::string decoded = choice.decoder.Push(event.token);
    choice.decoded += CodePoints(decoded);
    choice.text += choice.stop.Push(decoded);
  }
  if (plan_.stream) {
    Emit({.index = choice.index,
          .text = std::exchange(choice.text, {}),
          .tokens = std::exchange(choice.tokens, {}),
          .first = std::exchange(choice.first, false)});
  }
  return !choice.stop.stopped();
}

void Generation::OnDone(Choice& choice, FinishReason reason, const Status& status) {
  context_.metrics->CountFinish(reason);
  choice.finish = FinishName(reason);
  if (choice.finish) {
    choice.text += choice.stop.Push(choice.decoder.Finish());
    choice.text += choice.stop.Finish();
    if (choice.stop.stopped()) choice.finish = "stop";
    if (plan_.stream) {
      Emit({.index = choice.index,
            .text = std::exchange(choice.text, {}),
            .tokens = std::exchange(choice.tokens, {}),
            .first = std::exchange(choice.first, false),
            .finish = choice.finish});
    }
  } else {
    {
      std::lock_guard lock(mutex_);
      if (!failure_) {
        failure_ =
            reason == FinishReason::kCancelled ? Unavailable("the request was cancelled") : status;
      }
    }
    // The other choices are of no use any more. Not from here: this is the engine's thread.
    context_.executor([self = shared_from_this()] { self->CancelAll(); });
  }
  if (--unfinished_ == 0) Complete();
}

// Formats on the connection's strand; pieces keep their order there.
void Generation::Emit(ChoicePart part) {
  context_.exchange->Post([self = shared_from_this(), part = std::move(part)] {
    if (!std::exchange(self->streaming_, true)) {
      self->context_.exchange->BeginStream("text/event-stream", {{"cache-control", "no-cache"}});
    }
    self->context_.exchange->Write(
        SseEvent(self->format_->Chunk(self->plan_.head, part, self->plan_.include_usage)));
  });
}

Usage Generation::CurrentUsage() const {
  Usage usage{.prompt_tokens = plan_.prompt_tokens};
  for (const auto& choice : choices_) usage.completion_tokens += choice->generated;
  return usage;
}

// Engine thread, after the last on_done: from here on nobody writes to the choices.
void Generation::Complete() {
  context_.metrics->request_latency.of(is_variant_)
      .Observe(SecondsSince(context_.exchange->request().arrival));
  {
    std::lock_guard lock(mutex_);
    if (abandoned_) return;
  }
  if (plan_.stream) {
    context_.exchange->Post([self = shared_from_this()] { self->CompleteStream(); });
  } else {
    context_.executor([self = shared_from_this()] { self->ReplyWhole(); });
  }
}

void Generation::CompleteStream() {
  std::optional<Status> failure;
  {
    std::lock_guard lock(mutex_);
    failure = failure_;
  }
  Exchange& exchange = *context_.exchange;
  if (failure && !streaming_) return FailWith(*failure);
  if (failure) {
    // The status line is out: the client sees the error as an event.
    exchange.Write(SseEvent(ErrorBody(*failure)));
  } else {
    if (plan_.include_usage) {
      exchange.Write(SseEvent(format_->UsageChunk(plan_.head, CurrentUsage())));
    }
    exchange.Write(SseEvent("[DONE]"));
  }
  exchange.EndStream();
}

void Generation::ReplyWhole() {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return FailWith(*failure_);
  }
  std::vector<ChoicePart> parts;
  parts.reserve(choices_.size());
  for (auto& choice : choices_) {
    parts.push_back({.index = choice->index,
                     .text = std::move(choice->text),
                     .tokens = std::move(choice->tokens),
                     .finish = choice->finish});
  }
  context_.exchange->Respond({.body = format_->Whole(plan_.head, parts, CurrentUsage())});
}

}  // namespace stockpot
