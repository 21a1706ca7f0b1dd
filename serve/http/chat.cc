// POST /v1/chat/completions, the shape of its answers.
#include <nlohmann/json.hpp>
#include <utility>

#include "serve/http/logprobs.h"
#include "serve/http/reply.h"
#include "serve/http/reply_json.h"

namespace stockpot {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kChunkObject = "chat.completion.chunk";

class ChatFormat final : public ReplyFormat {
 public:
  ChatFormat(const Tokenizer& tokenizer, bool logprobs)
      : tokenizer_(tokenizer), logprobs_(logprobs) {}

  std::string Whole(const ReplyHead& head, std::span<const ChoicePart> choices,
                    const Usage& usage) const override {
    Json body = HeadJson(head, "chat.completion");
    for (const ChoicePart& part : choices) {
      body["choices"].push_back({{"index", part.index},
                                 {"message", {{"role", "assistant"}, {"content", part.text}}},
                                 {"logprobs", Logprobs(part)},
                                 {"finish_reason", FinishJson(part.finish)}});
    }
    body["usage"] = UsageJson(usage);
    return Dump(body);
  }

  // The first chunk of a choice names the role; it comes with the first token, so that what clients
  // measure as time to first token is that.
  std::string Chunk(const ReplyHead& head, const ChoicePart& part,
                    bool with_usage_field) const override {
    Json body = HeadJson(head, kChunkObject);
    Json delta = Json::object();
    if (part.first) delta["role"] = "assistant";
    if (part.first || !part.finish || !part.text.empty()) delta["content"] = part.text;
    body["choices"].push_back({{"index", part.index},
                               {"delta", std::move(delta)},
                               {"logprobs", Logprobs(part)},
                               {"finish_reason", FinishJson(part.finish)}});
    if (with_usage_field) body["usage"] = nullptr;
    return Dump(body);
  }

  std::string UsageChunk(const ReplyHead& head, const Usage& usage) const override {
    Json body = HeadJson(head, kChunkObject);
    body["usage"] = UsageJson(usage);
    return Dump(body);
  }

 private:
  Json Logprobs(const ChoicePart& part) const {
    return logprobs_ ? ChatLogprobs(tokenizer_, part.tokens) : Json(nullptr);
  }

  const Tokenizer& tokenizer_;
  const bool logprobs_;
};

}  // namespace

std::unique_ptr<ReplyFormat> MakeChatFormat(const Tokenizer& tokenizer, bool logprobs) {
  return std::make_unique<ChatFormat>(tokenizer, logprobs);
}

}  // namespace stockpot
