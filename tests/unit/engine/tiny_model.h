// A tiny random Llama with a byte-level tokenizer and a chat template, in memory: everything the
// endpoint needs, small enough for thousands of requests in a test.
#pragma once

#include <cstdint>
#include <string>

#include "tests/unit/pipeline/test_model.h"

namespace stockpot::test {

// Ids of the tokenizer: three special tokens, the 256 bytes, merges, one added token, and above
// them ids of the embedding table that no token has.
inline constexpr int32_t kEndOfText = 0, kImStart = 1, kImEnd = 2, kFirstByte = 3;
inline constexpr int32_t kMergedSpaceT = 259;  // " t", by a merge
inline constexpr int32_t kAddedSpaceT = 263;   // " t" too, an added token: the two read the same
inline constexpr int32_t kUnknownToken = 270;
inline constexpr int64_t kTinyVocab = 272;
inline constexpr int64_t kTinyContext = 512;

inline int32_t ByteToken(unsigned char byte) { return kFirstByte + byte; }

std::string TinyTokenizerJson();
inline constexpr const char* kTinyChatTemplate =
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

// EOS is kImEnd.
TestModel TinyChatModel(uint64_t seed, int64_t hidden = 32, int64_t layers = 2);

}  // namespace stockpot::test
