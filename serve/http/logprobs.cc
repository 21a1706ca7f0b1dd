#include "serve/http/logprobs.h"

#include <cmath>
#include <cstdint>
#include <utility>

#include "serve/text/utf8.h"

namespace stockpot {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no infinity, and clients sum these.
constexpr double kNoProbability = -9999.0;

double Finite(float logprob) {
  return std::isfinite(logprob) ? static_cast<double>(logprob) : kNoProbability;
}

std::string TokenIdLabel(int32_t token) { return "token_id:" + std::to_string(token); }

Json Alternatives(const Tokenizer& tokenizer, const TokenEvent& event) {
  Json alternatives = Json::object();
  const auto add = [&](int32_t token, float logprob) {
    std::string label = TokenLabel(tokenizer, token);
    if (alternatives.contains(label)) label = TokenIdLabel(token);
    alternatives[label] = Finite(logprob);
  };
  bool has_actual = false;
  for (const TokenLogprob& alternative : event.top) {
    add(alternative.token, alternative.logprob);
    has_actual |= alternative.token == event.token;
  }
  if (!has_actual) add(event.token, event.logprob);
  return alternatives;
}

Json ByteArray(const std::string& bytes) {
  Json array = Json::array();
  for (const char c : bytes) array.push_back(static_cast<uint8_t>(c));
  return array;
}

Json ChatToken(const Tokenizer& tokenizer, int32_t token, float logprob) {
  return {{"token", TokenLabel(tokenizer, token)},
          {"logprob", Finite(logprob)},
          {"bytes", ByteArray(tokenizer.TokenBytes(token))}};
}

}  // namespace

std::string TokenLabel(const Tokenizer& tokenizer, int32_t token) {
  std::string text = tokenizer.TokenBytes(token);
  if (text.empty()) return TokenIdLabel(token);
  if (IsValidUtf8(text)) return text;
  static constexpr char kHex[] = "0123456789abcdef";
  std::string label = "bytes:";
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    label += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
  }
  return label;
}

Json CompletionLogprobs(const Tokenizer& tokenizer, std::span<const ReportedToken> tokens) {
  Json offsets = Json::array(), values = Json::array(), labels = Json::array(),
       tops = Json::array();
  for (const ReportedToken& token : tokens) {
    offsets.push_back(token.text_offset);
    labels.push_back(TokenLabel(tokenizer, token.event.token));
    values.push_back(token.scored ? Json(Finite(token.event.logprob)) : Json(nullptr));
    tops.push_back(token.scored ? Alternatives(tokenizer, token.event) : Json(nullptr));
  }
  return {{"text_offset", std::move(offsets)},
          {"token_logprobs", std::move(values)},
          {"tokens", std::move(labels)},
          {"top_logprobs", std::move(tops)}};
}

Json ChatLogprobs(const Tokenizer& tokenizer, std::span<const ReportedToken> tokens) {
  Json content = Json::array();
  for (const ReportedToken& token : tokens) {
    Json entry = ChatToken(tokenizer, token.event.token, token.event.logprob);
    Json top = Json::array();
    for (const TokenLogprob& alternative : token.event.top) {
      top.push_back(ChatToken(tokenizer, alternative.token, alternative.logprob));
    }
    entry["top_logprobs"] = std::move(top);
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

}  // namespace stockpot
