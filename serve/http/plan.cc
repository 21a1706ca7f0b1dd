#include "serve/http/plan.h"

#include <algorithm>
#include <random>
#include <span>
#include <utility>

#include "serve/text/stream_decoder.h"

namespace stockpot {
namespace {

constexpr int64_t kDefaultCompletionTokens = 16;  // as OpenAI's legacy endpoint

uint64_t RandomSeed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

SamplingParams MakeSampling(const SamplingFields& fields, const GenerationDefaults& defaults) {
  const auto pick = [](const auto& field, const auto& fallback, auto last) {
    return static_cast<decltype(last)>(field ? *field : fallback ? *fallback : last);
  };
  SamplingParams params;
  params.temperature = pick(fields.temperature, defaults.temperature, 1.0f);
  params.top_p = pick(fields.top_p, defaults.top_p, 1.0f);
  params.top_k = std::max(pick(fields.top_k, defaults.top_k, int32_t{0}), int32_t{0});
  params.min_p = pick(fields.min_p, defaults.min_p, 0.0f);
  params.repetition_penalty = pick(fields.repetition_penalty, defaults.repetition_penalty, 1.0f);
  params.frequency_penalty = static_cast<float>(fields.frequency_penalty);
  params.presence_penalty = static_cast<float>(fields.presence_penalty);
  params.logit_bias = fields.logit_bias;
  params.seed = fields.seed ? *fields.seed : RandomSeed();
  return params;
}

// Where each token's text starts, in code points of the decoded text.
std::vector<int64_t> TextOffsets(const Tokenizer& tokenizer, std::span<const int32_t> tokens,
                                 bool skip_special) {
  std::vector<int64_t> offsets;
  offsets.reserve(tokens.size());
  StreamDecoder decoder(tokenizer, skip_special);
  int64_t at = 0;
  for (const int32_t token : tokens) {
    offsets.push_back(at);
    for (const char c : decoder.Push(token)) at += (static_cast<uint8_t>(c) & 0xC0) != 0x80;
  }
  return offsets;
}

ApiError TooLong(int64_t prompt, int64_t max_tokens, int64_t max_context, const char* param) {
  return ApiError(
      InvalidArgument("this model's context is " + std::to_string(max_context) +
                      " tokens, but the prompt has " + std::to_string(prompt) +
                      " and max_tokens asks for " + std::to_string(max_tokens) + " more"),
      param, "context_length_exceeded");
}

// What all choices of a request share.
struct Common {
  SamplingParams sampling;
  const GenerationFields& fields;
  const TextAssets& text;
  int64_t max_context;
};

// n sequences for one prompt; each has a seed of its own, the first the client's.
ApiStatus AddChoices(const Common& common, EngineRequest request, std::string echo,
                     std::shared_ptr<const std::vector<int64_t>> offsets, const char* param,
                     GenerationPlan* plan) {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt == 0) return ApiError(InvalidArgument("the prompt has no tokens"), param);
  if (prompt > common.max_context || request.max_tokens > common.max_context - prompt) {
    return TooLong(prompt, request.max_tokens, common.max_context, param);
  }
  if (common.fields.min_tokens > request.max_tokens) {
    return ApiError(InvalidArgument("min_tokens is larger than max_tokens"), "min_tokens");
  }
  request.min_tokens = common.fields.min_tokens;
  request.ignore_eos = common.fields.ignore_eos;
  request.stop_tokens = common.fields.stop_token_ids;
  if (!common.text.generation.eos_tokens.empty()) {
    request.eos_tokens = common.text.generation.eos_tokens;
  }
  plan->prompt_tokens += prompt;
  for (int64_t i = 0; i < common.fields.n; ++i) {
    EngineRequest copy = request;
    copy.sampling = common.sampling;
    copy.sampling.seed += static_cast<uint64_t>(i);
    plan->choices.push_back({std::move(copy), echo, offsets});
  }
  return std::nullopt;
}

GenerationPlan StartPlan(const GenerationFields& fields) {
  GenerationPlan plan;
  plan.stop = fields.stop;
  plan.stream = fields.stream;
  plan.include_usage = fields.include_usage;
  return plan;
}

}  // namespace

ApiResult<std::vector<int32_t>> EncodeText(const TextAssets& text, std::string_view input,
                                           bool add_special_tokens, const char* param) {
  Result<std::vector<int32_t>> ids = text.tokenizer->Encode(input, add_special_tokens);
  if (ids.ok()) return std::move(*ids);
  // Too large or too slow stays so: not "try again later".
  return ApiError(InvalidArgument(ids.status().message()), param);
}

ApiResult<GenerationPlan> PlanCompletion(const CompletionRequest& request, const TextAssets& text,
                                         int64_t max_context) {
  const GenerationFields& fields = request.generation;
  const Tokenizer& tokenizer = *text.tokenizer;
  GenerationPlan plan = StartPlan(fields);
  plan.report_tokens = request.logprobs.has_value();
  const Common common{MakeSampling(fields.sampling, text.generation), fields, text, max_context};
  for (const PromptInput& prompt : request.prompts) {
    EngineRequest engine;
    const bool is_text = std::holds_alternative<std::string>(prompt);
    if (is_text) {
      auto ids =
          EncodeText(text, std::get<std::string>(prompt), request.add_special_tokens, "prompt");
      if (!ids.ok()) return ids.error();
      engine.prompt = std::move(*ids);
    } else {
      engine.prompt = std::get<std::vector<int32_t>>(prompt);
    }
    engine.max_tokens = fields.max_tokens.value_or(kDefaultCompletionTokens);
    if (request.logprobs) engine.logprobs = *request.logprobs;
    std::string echo;
    std::shared_ptr<const std::vector<int64_t>> offsets;
    if (request.echo) {
      echo = is_text ? std::get<std::string>(prompt)
                     : tokenizer.Decode(engine.prompt, /*skip_special=*/false);
      engine.prompt_logprobs = request.logprobs.has_value();
      if (engine.prompt_logprobs) {
        offsets = std::make_shared<const std::vector<int64_t>>(
            TextOffsets(tokenizer, engine.prompt, /*skip_special=*/is_text));
      }
    }
    if (ApiStatus error = AddChoices(common, std::move(engine), std::move(echo), std::move(offsets),
                                     "prompt", &plan)) {
      return *error;
    }
  }
  return plan;
}

ApiResult<std::string> RenderChat(const TextAssets& text, const nlohmann::ordered_json& messages,
                                  bool add_generation_prompt, const nlohmann::ordered_json& extra) {
  if (!text.chat_template) {
    return ApiError(InvalidArgument(text.chat_template_status.message()), "messages",
                    "no_chat_template");
  }
  Result<std::string> prompt = text.chat_template->Render(messages, add_generation_prompt, extra);
  if (!prompt.ok()) {
    // Too large or too slow stays so: not "try again later".
    return ApiError(InvalidArgument(prompt.status().WithContext("chat template").message()),
                    "messages");
  }
  return std::move(*prompt);
}

ApiResult<GenerationPlan> PlanChat(const ChatRequest& request, const TextAssets& text,
                                   int64_t max_context) {
  const GenerationFields& fields = request.generation;
  ApiResult<std::string> prompt =
      RenderChat(text, request.messages, request.add_generation_prompt, request.extra);
  if (!prompt.ok()) return prompt.error();
  // Templates write BOS and the like themselves.
  auto ids = EncodeText(text, *prompt, /*add_special_tokens=*/false, "messages");
  if (!ids.ok()) return ids.error();
  GenerationPlan plan = StartPlan(fields);
  plan.report_tokens = request.logprobs;
  EngineRequest engine;
  engine.prompt = std::move(*ids);
  const auto length = static_cast<int64_t>(engine.prompt.size());
  if (length >= max_context) return TooLong(length, 1, max_context, "messages");
  engine.max_tokens = fields.max_tokens.value_or(max_context - length);
  if (request.logprobs) engine.logprobs = request.top_logprobs;
  const Common common{MakeSampling(fields.sampling, text.generation), fields, text, max_context};
  if (ApiStatus error = AddChoices(common, std::move(engine), "", nullptr, "messages", &plan)) {
    return *error;
  }
  return plan;
}

}  // namespace stockpot
