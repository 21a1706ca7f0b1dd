// Text <-> token ids, as Hugging Face `tokenizers` does it.
//
// A Tokenizer is read from the text of a tokenizer.json and gives the ids that `tokenizers`
// (checked against 0.22) gives for the same file. Supported, and nothing else:
//
//   model          BPE: byte-level (GPT-2, SmolLM2, Llama 3, Qwen) and SentencePiece style with
//                  byte_fallback (Llama 2, Mistral, Gemma); merges as "a b" or ["a", "b"];
//                  ignore_merges, unk_token, fuse_unk, prefix and suffix; dropout is refused
//   normalizer     Sequence, Prepend, Replace, NFC, NFD, NFKC, NFKD, Strip
//   pre_tokenizer  Sequence, Split (Regex or String, every behaviour), ByteLevel, Digits,
//                  Whitespace, WhitespaceSplit, Punctuation, CharDelimiterSplit, Metaspace
//   post_processor ByteLevel (moves offsets only, so nothing here), TemplateProcessing, Sequence
//   decoder        Sequence, ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace
//   added_tokens   all flags: special, normalized, lstrip, rstrip, single_word
//
// Any other component is refused by name: a wrong id is worse than no answer. `truncation` and
// `padding` are ignored, as transformers ignores them unless a caller asks for them.
//
// The JSON is untrusted (it comes with a pushed checkpoint): every fault is an InvalidArgument that
// names the place. The text is untrusted too: invalid UTF-8 counts as U+FFFD, one for each maximal
// broken part (what Python's bytes.decode("utf-8", "replace") does), so that every byte string has
// ids; a regex that runs away ends in ResourceExhausted.
//
// Thread promise: a Tokenizer is immutable; any number of threads may use one at once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"

namespace stockpot {

class DecodePipeline;  // serve/text/decode_pipeline.h

// Limits of one tokenizer and of one call.
struct TokenizerLimits {
  static constexpr size_t kMaxJsonBytes = size_t{128} << 20;  // Gemma's tokenizer.json has 33 MB
  static constexpr int32_t kMaxTokenId = (1 << 21) - 1;       // the largest known vocabulary: 262k
  static constexpr size_t kMaxTokenBytes = 16 << 10;          // one token of the vocabulary
  static constexpr size_t kMaxTextBytes = size_t{16} << 20;   // one Encode
};

class Tokenizer {
 public:
  // Reads the text of a tokenizer.json. InvalidArgument names what is wrong or not supported.
  static Result<std::unique_ptr<const Tokenizer>> FromJson(std::string_view tokenizer_json);

  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // The ids of `text`. Added tokens inside the text (special ones too) become their ids. With
  // `add_special_tokens` the post-processor's template (BOS and so on) is put around them.
  // ResourceExhausted when the text is over kMaxTextBytes or the pre-tokenizer's regex ran too
  // long.
  Result<std::vector<int32_t>> Encode(std::string_view text, bool add_special_tokens) const;

  // The text of `ids`, valid UTF-8 always. With `skip_special` special tokens leave no trace. Ids
  // that name no token are skipped. For text that arrives token by token see stream_decoder.h.
  std::string Decode(std::span<const int32_t> ids, bool skip_special) const;

  // One more than the largest id; some ids below may name no token. The model's embedding table may
  // be larger (padding) or smaller (a broken checkpoint: check it when loading).
  int32_t vocab_size() const;

  // The token as tokenizer.json writes it ("Ġhello", "<0x0A>", "▁the"), or nothing.
  std::optional<std::string_view> IdToToken(int32_t id) const;
  std::optional<int32_t> TokenToId(std::string_view token) const;

  // True for added tokens marked special. Decode(skip_special) leaves these out.
  bool IsSpecial(int32_t id) const;
  std::span<const int32_t> special_ids() const;  // ascending

  // The bytes the token stands for by itself (" hello", "\n"), perhaps half a character; as
  // OpenAI's logprobs "bytes" want them. Empty for an id that names no token.
  std::string TokenBytes(int32_t id) const;

  // The decoder part, for StreamDecoder. Lives as long as the tokenizer.
  const DecodePipeline& decode_pipeline() const;

 private:
  struct Parts;
  explicit Tokenizer(std::unique_ptr<Parts> parts);
  std::unique_ptr<const Parts> parts_;
};

}  // namespace stockpot
