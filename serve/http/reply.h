// Answers of the API as JSON text. A ReplyFormat knows one endpoint's shapes; generation.cc knows
// when which of them is due.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "serve/engine/engine.h"
#include "serve/text/tokenizer.h"

namespace stockpot {

// What all objects of one reply share.
struct ReplyHead {
  std::string id;
  int64_t created = 0;      // Unix seconds
  std::string model;        // as the client named it
  std::string fingerprint;  // hex digest of what answered
};

struct ReportedToken {
  TokenEvent event;
  int64_t text_offset = 0;  // in code points of the choice's text
  bool scored = true;       // false: the first token of a prompt, which nothing predicts
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
};

// A finished choice, or a piece of a streamed one.
struct ChoicePart {
  int64_t index = 0;
  std::string text;
  std::vector<ReportedToken> tokens;
  bool first = false;            // of a stream
  const char* finish = nullptr;  // "stop", "length"; null: goes on
};

// Thread promise: immutable.
class ReplyFormat {
 public:
  virtual ~ReplyFormat() = default;
  // REQUIRES: every part has its finish.
  virtual std::string Whole(const ReplyHead& head, std::span<const ChoicePart> choices,
                            const Usage& usage) const = 0;
  // One event of a stream. `with_usage_field`: the client asked for usage, so that all chunks but
  // the last carry "usage": null.
  virtual std::string Chunk(const ReplyHead& head, const ChoicePart& part,
                            bool with_usage_field) const = 0;
  virtual std::string UsageChunk(const ReplyHead& head, const Usage& usage) const = 0;
};

// `tokenizer` must outlive the format. `logprobs`: whether tokens are reported.
std::unique_ptr<ReplyFormat> MakeCompletionFormat(const Tokenizer& tokenizer, bool logprobs);
std::unique_ptr<ReplyFormat> MakeChatFormat(const Tokenizer& tokenizer, bool logprobs);

// "stop" or "length", or null for reasons that are no answer.
const char* FinishName(FinishReason reason);

}  // namespace stockpot
