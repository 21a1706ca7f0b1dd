// Bodies of the API, checked and turned into plain values. Unknown fields are ignored; a known
// field of the wrong type or out of range is InvalidArgument with the field's name as `param`.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "serve/engine/engine.h"
#include "serve/http/api_error.h"

namespace stockpot {

// Parses a JSON object. InvalidArgument: not JSON, not an object, nested or large beyond limits.h;
// all of that is found before a large document is built.
ApiResult<nlohmann::ordered_json> ParseJsonObject(std::string_view body);

// Sampling as the client gave it: absent fields take the model's generation config, then defaults.
struct SamplingFields {
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;  // -1 and 0: all
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  double frequency_penalty = 0;
  double presence_penalty = 0;
  std::optional<uint64_t> seed;
  std::map<int32_t, float> logit_bias;
};

// What completions and chat have in common.
struct GenerationFields {
  std::string model;
  SamplingFields sampling;
  int64_t n = 1;
  std::optional<int64_t> max_tokens;
  int64_t min_tokens = 0;
  bool ignore_eos = false;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool stream = false;
  bool include_usage = false;
};

using PromptInput = std::variant<std::string, std::vector<int32_t>>;

struct CompletionRequest {
  GenerationFields generation;
  std::vector<PromptInput> prompts;  // >= 1
  bool echo = false;
  std::optional<int32_t> logprobs;  // alternatives
  bool add_special_tokens = true;   // of text prompts; token ids are used as they are
};

struct ChatRequest {
  GenerationFields generation;
  nlohmann::ordered_json messages;  // array; every content is a string or null
  nlohmann::ordered_json extra;     // template variables: tools, chat_template_kwargs
  bool add_generation_prompt = true;
  bool logprobs = false;
  int32_t top_logprobs = 0;
};

struct TokenizeRequest {
  std::string model;  // empty: the base
  std::string prompt;
  std::optional<nlohmann::ordered_json> messages;  // instead of a prompt
  nlohmann::ordered_json extra;
  bool add_generation_prompt = true;
  bool add_special_tokens = true;
};

struct DetokenizeRequest {
  std::string model;  // empty: the base
  std::vector<int32_t> tokens;
};

ApiResult<CompletionRequest> ParseCompletionRequest(std::string_view body);
ApiResult<ChatRequest> ParseChatRequest(std::string_view body);
ApiResult<TokenizeRequest> ParseTokenizeRequest(std::string_view body);
ApiResult<DetokenizeRequest> ParseDetokenizeRequest(std::string_view body);

}  // namespace stockpot
