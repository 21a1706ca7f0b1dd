// A tokenizer.json small enough to read: letters a, b, c, the merge "ab", a space, two added
// tokens.
#pragma once

#include <nlohmann/json.hpp>

namespace stockpot {

inline nlohmann::json TinyTokenizer() {
  return nlohmann::json::parse(R"json({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [
      {"id": 6, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
       "normalized": false, "special": true},
      {"id": 7, "content": "<x>", "single_word": false, "lstrip": true, "rstrip": true,
       "normalized": true, "special": false}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
    "post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                 {"Sequence": {"id": "A", "type_id": 0}}],
      "pair": [],
      "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}}},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
      "byte_fallback": false,
      "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "Ġ": 4, "Ċ": 5},
      "merges": ["a b"]}
  })json");
}

}  // namespace stockpot
