// POST /v1/completions, the shape of its answers.
#include <nlohmann/json.hpp>
#include <utility>

#include "serve/http/logprobs.h"
#include "serve/http/reply.h"
#include "serve/http/reply_json.h"

namespace stockpot {
namespace {

using Json = nlohmann::ordered_json;

class CompletionFormat final : public ReplyFormat {
 public:
  CompletionFormat(const Tokenizer& tokenizer, bool logprobs)
      : tokenizer_(tokenizer), logprobs_(logprobs) {}

  std::string Whole(const ReplyHead& head, std::span<const ChoicePart> choices,
                    const Usage& usage) const override {
    Json body = HeadJson(head, "text_completion");
    for (const ChoicePart& part : choices) body["choices"].push_back(Choice(part));
    body["usage"] = UsageJson(usage);
    return Dump(body);
  }

  std::string Chunk(const ReplyHead& head, const ChoicePart& part,
                    bool with_usage_field) const override {
    Json body = HeadJson(head, "text_completion");
    body["choices"].push_back(Choice(part));
    if (with_usage_field) body["usage"] = nullptr;
    return Dump(body);
  }

  std::string UsageChunk(const ReplyHead& head, const Usage& usage) const override {
    Json body = HeadJson(head, "text_completion");
    body["usage"] = UsageJson(usage);
    return Dump(body);
  }

 private:
  Json Choice(const ChoicePart& part) const {
    return {{"index", part.index},
            {"text", part.text},
            {"logprobs", logprobs_ ? CompletionLogprobs(tokenizer_, part.tokens) : Json(nullptr)},
            {"finish_reason", FinishJson(part.finish)}};
  }

  const Tokenizer& tokenizer_;
  const bool logprobs_;
};

}  // namespace

std::unique_ptr<ReplyFormat> MakeCompletionFormat(const Tokenizer& tokenizer, bool logprobs) {
  return std::make_unique<CompletionFormat>(tokenizer, logprobs);
}

}  // namespace stockpot
