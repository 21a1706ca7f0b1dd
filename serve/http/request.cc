#include "serve/http/request.h"

#include <array>
#include <charconv>
#include <utility>

#include "serve/http/json_fields.h"
#include "serve/http/limits.h"

namespace stockpot {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();

// Bounds depth and number of values and keys by counting brackets, commas and colons outside
// strings, before the parser allocates anything. Text that is not JSON may get past it and fails in
// the parser.
ApiStatus CheckJsonSize(std::string_view text) {
  int depth = 0;
  int64_t values = 1, keys = 0;
  std::array<int64_t, kMaxJsonDepth + 1> keys_at = {};
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
      continue;
    }
    if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxJsonDepth) {
        return InvalidArgument("the JSON is nested deeper than " + std::to_string(kMaxJsonDepth));
      }
      keys_at[depth] = 0;
      ++values;
    } else if (c == ']' || c == '}') {
      if (--depth < 0) break;  // not JSON
    } else if (c == ',') {
      ++values;
    } else if (c == ':') {
      if (++keys > kMaxJsonKeys || ++keys_at[depth] > kMaxJsonKeysPerObject) {
        return InvalidArgument("the JSON has too many keys: at most " +
                               std::to_string(kMaxJsonKeysPerObject) + " in an object and " +
                               std::to_string(kMaxJsonKeys) + " in all");
      }
    }
    if (values > kMaxJsonValues) {
      return InvalidArgument("the JSON has more than " + std::to_string(kMaxJsonValues) +
                             " values");
    }
  }
  return std::nullopt;
}

void ReadStop(JsonFields& fields, std::vector<std::string>* stop) {
  const Json* json = fields.Find("stop");
  if (!json) return;
  const auto add = [&](const Json& entry) {
    if (!entry.is_string()) return fields.Fail("stop", "must be a string or an array of strings");
    const std::string& text = entry.get_ref<const std::string&>();
    if (text.size() > kMaxStopBytes) {
      return fields.Fail("stop", "has a string over " + std::to_string(kMaxStopBytes) + " bytes");
    }
    if (!text.empty()) stop->push_back(text);
  };
  if (!json->is_array()) return add(*json);
  if (json->size() > kMaxStopStrings) {
    return fields.Fail("stop", "has more than " + std::to_string(kMaxStopStrings) + " strings");
  }
  for (const Json& entry : *json) add(entry);
}

// {"50256": -100}: keys are token ids in decimal.
void ReadLogitBias(JsonFields& fields, std::map<int32_t, float>* bias) {
  const Json* json = fields.Find("logit_bias");
  if (!json) return;
  constexpr const char* kShape = "must be an object of token id to a number between -100 and 100";
  if (!json->is_object()) return fields.Fail("logit_bias", kShape);
  if (json->size() > kMaxLogitBias) {
    return fields.Fail("logit_bias", "has more than " + std::to_string(kMaxLogitBias) + " entries");
  }
  for (const auto& [key, value] : json->items()) {
    int32_t id = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    const bool is_id = error == std::errc() && end == key.data() + key.size() && id >= 0;
    if (!is_id || !value.is_number()) return fields.Fail("logit_bias", kShape);
    const double number = value.get<double>();
    if (!(number >= -100 && number <= 100)) return fields.Fail("logit_bias", kShape);
    (*bias)[id] = static_cast<float>(number);
  }
}

void ReadSampling(JsonFields& fields, SamplingFields* sampling) {
  fields.Read("temperature", &sampling->temperature, 0, 100);
  fields.Read("top_p", &sampling->top_p, 0, 1);
  if (sampling->top_p == 0.0) fields.Fail("top_p", "must be above 0");
  fields.Read("top_k", &sampling->top_k, -1, kMaxCount);
  fields.Read("min_p", &sampling->min_p, 0, 1);
  fields.Read("repetition_penalty", &sampling->repetition_penalty, 0, 100);
  if (sampling->repetition_penalty == 0.0) fields.Fail("repetition_penalty", "must be above 0");
  fields.Read("frequency_penalty", &sampling->frequency_penalty, -2, 2);
  fields.Read("presence_penalty", &sampling->presence_penalty, -2, 2);
  std::optional<int64_t> seed;
  fields.Read("seed", &seed, std::numeric_limits<int64_t>::min(),
              std::numeric_limits<int64_t>::max());
  if (seed) sampling->seed = static_cast<uint64_t>(*seed);
  ReadLogitBias(fields, &sampling->logit_bias);
}

void ReadModel(JsonFields& fields, bool required, std::string* model) {
  fields.Read("model", model);
  if (model->size() > kMaxModelNameBytes) {
    fields.Fail("model", "is longer than " + std::to_string(kMaxModelNameBytes) + " bytes");
  }
  if (required && model->empty()) fields.Fail("model", "is required");
}

void ReadGeneration(JsonFields& fields, GenerationFields* out) {
  ReadModel(fields, /*required=*/true, &out->model);
  ReadSampling(fields, &out->sampling);
  fields.Read("n", &out->n, 1, kMaxChoices);
  int64_t best_of = out->n;
  fields.Read("best_of", &best_of, 1, kMaxChoices);
  if (best_of != 1 && best_of != out->n) {
    fields.Fail("best_of", "must be 1 or equal to n: no more answers are made than returned");
  }
  fields.Read("max_tokens", &out->max_tokens, 0, kMaxCount);
  fields.Read("min_tokens", &out->min_tokens, 0, kMaxCount);
  fields.Read("ignore_eos", &out->ignore_eos);
  ReadStop(fields, &out->stop);
  fields.Read("stop_token_ids", &out->stop_token_ids, kMaxStopTokens);
  fields.Read("stream", &out->stream);
  if (const Json* options = fields.Find("stream_options")) {
    if (!options->is_object()) return fields.Fail("stream_options", "must be an object");
    JsonFields inner(*options);
    inner.Read("include_usage", &out->include_usage);
    if (inner.error()) fields.Fail("stream_options", "include_usage must be true or false");
  }
}

// prompt: str | [str] | [int] | [[int]]
void ReadPrompts(JsonFields& fields, std::vector<PromptInput>* prompts) {
  constexpr const char* kShape =
      "must be a string, an array of strings, an array of token ids or an array of such arrays";
  const auto ids_of = [&](const Json& array) {
    std::vector<int32_t> ids;
    ids.reserve(array.size());
    for (const Json& entry : array) {
      const std::optional<int64_t> id = AsInteger(entry);
      if (!id || *id < 0 || *id > kMaxCount) {
        fields.Fail("prompt", kShape);
        return ids;
      }
      ids.push_back(static_cast<int32_t>(*id));
    }
    return ids;
  };
  const Json* json = fields.Find("prompt");
  if (!json) return fields.Fail("prompt", "is required");
  if (json->is_string()) {
    prompts->emplace_back(json->get<std::string>());
    return;
  }
  if (!json->is_array()) return fields.Fail("prompt", kShape);
  if (json->empty()) return fields.Fail("prompt", "is empty");
  if (json->front().is_number()) {
    prompts->emplace_back(ids_of(*json));
    return;
  }
  if (static_cast<int64_t>(json->size()) > kMaxSequencesPerRequest) {
    return fields.Fail("prompt",
                       "has more than " + std::to_string(kMaxSequencesPerRequest) + " entries");
  }
  const Json::value_t type = json->front().type();
  for (const Json& entry : *json) {
    if (entry.type() != type) return fields.Fail("prompt", kShape);
    if (entry.is_string()) {
      prompts->emplace_back(entry.get<std::string>());
    } else if (entry.is_array()) {
      prompts->emplace_back(ids_of(entry));
    } else {
      return fields.Fail("prompt", kShape);
    }
  }
}

// A content of text parts becomes one string, joined as vLLM does it; other parts are refused.
ApiStatus FlattenContent(Json* message, const std::string& where) {
  const auto content = message->find("content");
  if (content == message->end() || content->is_null() || content->is_string()) return std::nullopt;
  if (!content->is_array()) {
    return ApiError(InvalidArgument(where + ".content must be a string or an array of text parts"),
                    "messages");
  }
  std::string text;
  for (const Json& part : *content) {
    if (!part.is_object() || !part.contains("type") || part["type"] != "text" ||
        !part.contains("text") || !part["text"].is_string()) {
      return ApiError(InvalidArgument(where + ".content has a part that is not text; this model "
                                              "reads text only"),
                      "messages");
    }
    if (!text.empty()) text += '\n';
    text += part["text"].get_ref<const std::string&>();
  }
  *content = text;
  return std::nullopt;
}

ApiResult<Json> ReadMessages(const Json& messages) {
  if (!messages.is_array() || messages.empty()) {
    return ApiError(InvalidArgument("messages must be an array that is not empty"), "messages");
  }
  if (messages.size() > kMaxMessages) {
    return ApiError(
        InvalidArgument("messages has more than " + std::to_string(kMaxMessages) + " entries"),
        "messages");
  }
  Json result = messages;
  for (size_t i = 0; i < result.size(); ++i) {
    const std::string where = "messages[" + std::to_string(i) + "]";
    Json& message = result[i];
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string()) {
      return ApiError(InvalidArgument(where + " must be an object with a role"), "messages");
    }
    if (ApiStatus error = FlattenContent(&message, where)) return *error;
  }
  return result;
}

// What the template sees beside the messages.
void ReadTemplateVariables(JsonFields& fields, Json* extra, bool* add_generation_prompt) {
  *extra = Json::object();
  for (const char* name : {"tools", "documents"}) {
    if (const Json* json = fields.Find(name)) (*extra)[name] = *json;
  }
  if (const Json* json = fields.Find("chat_template_kwargs")) {
    if (!json->is_object()) return fields.Fail("chat_template_kwargs", "must be an object");
    for (const auto& [key, value] : json->items()) {
      if (key != "messages" && key != "add_generation_prompt") (*extra)[key] = value;
    }
  }
  fields.Read("add_generation_prompt", add_generation_prompt);
}

ApiStatus CheckSequenceCount(int64_t prompts, int64_t n) {
  if (prompts * n <= kMaxSequencesPerRequest) return std::nullopt;
  return ApiError(InvalidArgument("n times the number of prompts is over " +
                                  std::to_string(kMaxSequencesPerRequest)),
                  "n");
}

}  // namespace

ApiResult<Json> ParseJsonObject(std::string_view body) {
  if (ApiStatus error = CheckJsonSize(body)) return *error;
  try {
    Json json = Json::parse(body);
    if (!json.is_object()) return InvalidArgument("the body must be a JSON object");
    return json;
  } catch (const Json::exception& e) {
    return InvalidArgument(std::string("the body is not valid JSON: ") + e.what());
  }
}

ApiResult<CompletionRequest> ParseCompletionRequest(std::string_view body) {
  ApiResult<Json> json = ParseJsonObject(body);
  if (!json.ok()) return json.error();
  CompletionRequest request;
  JsonFields fields(*json);
  ReadGeneration(fields, &request.generation);
  ReadPrompts(fields, &request.prompts);
  fields.Read("echo", &request.echo);
  std::optional<int64_t> logprobs;
  fields.Read("logprobs", &logprobs, 0, kMaxLogprobs);
  if (logprobs) request.logprobs = static_cast<int32_t>(*logprobs);
  fields.Read("add_special_tokens", &request.add_special_tokens);
  if (request.generation.max_tokens == 0 && !request.echo) {
    fields.Fail("max_tokens", "must be at least 1, or 0 together with echo");
  }
  if (fields.error()) return *fields.error();
  const int64_t prompts = static_cast<int64_t>(request.prompts.size());
  if (ApiStatus error = CheckSequenceCount(prompts, request.generation.n)) return *error;
  return request;
}

ApiResult<ChatRequest> ParseChatRequest(std::string_view body) {
  ApiResult<Json> json = ParseJsonObject(body);
  if (!json.ok()) return json.error();
  ChatRequest request;
  JsonFields fields(*json);
  ReadGeneration(fields, &request.generation);
  fields.Read("max_completion_tokens", &request.generation.max_tokens, 1, kMaxCount);
  if (request.generation.max_tokens == 0) fields.Fail("max_tokens", "must be at least 1");
  fields.Read("logprobs", &request.logprobs);
  int64_t top_logprobs = 0;
  fields.Read("top_logprobs", &top_logprobs, 0, kMaxLogprobs);
  request.top_logprobs = static_cast<int32_t>(top_logprobs);
  if (top_logprobs > 0 && !request.logprobs) fields.Fail("top_logprobs", "needs logprobs: true");
  ReadTemplateVariables(fields, &request.extra, &request.add_generation_prompt);
  const Json* messages = fields.Find("messages");
  if (!messages) fields.Fail("messages", "is required");
  if (fields.error()) return *fields.error();
  ApiResult<Json> checked = ReadMessages(*messages);
  if (!checked.ok()) return checked.error();
  request.messages = std::move(*checked);
  return request;
}

ApiResult<TokenizeRequest> ParseTokenizeRequest(std::string_view body) {
  ApiResult<Json> json = ParseJsonObject(body);
  if (!json.ok()) return json.error();
  TokenizeRequest request;
  JsonFields fields(*json);
  ReadModel(fields, /*required=*/false, &request.model);
  fields.Read("prompt", &request.prompt);
  fields.Read("add_special_tokens", &request.add_special_tokens);
  ReadTemplateVariables(fields, &request.extra, &request.add_generation_prompt);
  const Json* messages = fields.Find("messages");
  if (!messages && !fields.Find("prompt")) fields.Fail("prompt", "is required");
  if (fields.error()) return *fields.error();
  if (messages) {
    ApiResult<Json> checked = ReadMessages(*messages);
    if (!checked.ok()) return checked.error();
    request.messages = std::move(*checked);
  }
  return request;
}

ApiResult<DetokenizeRequest> ParseDetokenizeRequest(std::string_view body) {
  ApiResult<Json> json = ParseJsonObject(body);
  if (!json.ok()) return json.error();
  DetokenizeRequest request;
  JsonFields fields(*json);
  ReadModel(fields, /*required=*/false, &request.model);
  fields.Read("tokens", &request.tokens, kMaxJsonValues);
  if (!fields.Find("tokens")) fields.Fail("tokens", "is required");
  if (fields.error()) return *fields.error();
  return request;
}

}  // namespace stockpot
