// The decoder of a tokenizer.json as a pipeline that takes tokens one at a time.
//
// Hugging Face's decoders map a list of strings to a list of strings. Here each one is a stage that
// passes on what it is certain of and keeps the rest in a DecodeState, so that a stream and a whole
// text go through the same code: Tokenizer::Decode pushes all tokens, StreamDecoder one by one.
// After Fuse or ByteLevel the stages see fragments of ONE string; decoders that would then need the
// whole of it (Replace, ByteFallback, ByteLevel) are refused there.
//
// Thread promise: DecodePipeline is immutable; one thread at a time uses a DecodeState.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/json_node.h"
#include "serve/text/normalizer.h"

namespace stockpot {

// What the stages hold back. Start each text with a fresh one.
class DecodeState {
 private:
  friend class DecodePipeline;
  struct Stage {
    std::string held;         // bytes not yet passed on
    int64_t tokens = 0;       // seen so far
    int64_t stripped = 0;     // Strip in fragments: characters taken from the start
    bool past_start = false;  // Strip in fragments: the start is done
  };
  std::vector<Stage> stages_;
};

class DecodePipeline {
 public:
  // No decoder: tokens joined by spaces, as Hugging Face does.
  DecodePipeline();
  static Result<DecodePipeline> FromJson(const JsonNode& node);

  // Appends to *out the text that this token makes certain.
  void Push(std::string_view token, DecodeState* state, std::string* out) const;
  // Appends what was held back.
  void Finish(DecodeState* state, std::string* out) const;

  // The bytes of one token by itself (Tokenizer::TokenBytes).
  std::string TokenBytes(std::string_view token) const;

 private:
  enum class Kind { kByteLevel, kByteFallback, kFuse, kReplace, kStrip, kMetaspace, kJoinBySpace };
  struct Stage {
    Kind kind;
    bool fragments = false;   // behind Fuse or ByteLevel
    Pattern pattern;          // Replace
    std::string content;      // Replace: the new text; Strip, Metaspace: the character
    int64_t start = 0;        // Strip: characters at most
    int64_t stop = 0;         // Strip
    bool drop_first = false;  // Metaspace: no space for the first token's replacement characters
  };

  Status Add(const JsonNode& node, int depth);
  Status AddNamed(const JsonNode& node, const std::string& type);
  Status AddStage(const JsonNode& node, Stage stage);
  // Hands a token (or a fragment) to stage `index`; behind the last one it is output.
  void Run(size_t index, std::string token, DecodeState* state, std::string* out) const;
  void FinishFrom(size_t index, DecodeState* state, std::string* out) const;
  void FlushByteRun(size_t index, DecodeState* state, std::string* out) const;
  static std::string StripToken(std::string_view token, const Stage& stage);
  static std::string StripFragment(std::string fragment, const Stage& stage,
                                   DecodeState::Stage* state);

  std::vector<Stage> stages_;
};

}  // namespace stockpot
