// Added tokens: strings that are found in the text before the model sees it.
// Thread promise: immutable.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/bpe.h"
#include "serve/text/json_node.h"
#include "serve/text/normalizer.h"
#include "serve/text/pre_tokenizer.h"

namespace stockpot {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool single_word = false;  // only where no word character stands beside it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space after it along
  bool normalized = false;   // is looked for in the normalized text, by its normalized content
  bool special = false;      // Decode(skip_special) leaves it out
  bool operator==(const AddedToken&) const = default;
};

class AddedTokens {
 public:
  AddedTokens() = default;
  // Reads the array "added_tokens" (absent: none). The ids must be those that Hugging Face would
  // give: the vocabulary's where the content is in it, else one after the other behind it.
  static Result<AddedTokens> FromJson(const JsonNode& root, const TokenMap& vocabulary,
                                      const Normalizer& normalizer);

  const std::vector<AddedToken>& tokens() const { return tokens_; }

  // Valid text -> pieces: added tokens as ids, the rest normalized.
  Result<std::vector<Piece>> Split(std::string_view text, const Normalizer& normalizer,
                                   RegexScratch* scratch) const;

 private:
  // The longest of a set of strings at a place.
  class Trie {
   public:
    void Insert(std::string_view content, int32_t token);
    // Index of the token whose content is the longest at text[from...], or -1.
    int32_t Longest(std::string_view text, size_t from, size_t* length) const;

   private:
    std::array<bool, 256> first_{};                    // bytes some content begins with
    std::unordered_map<uint64_t, uint32_t> children_;  // node << 8 | byte -> node
    std::unordered_map<uint32_t, int32_t> ends_;       // node -> index of the token
    uint32_t nodes_ = 1;
  };

  static Result<AddedToken> ReadToken(const JsonNode& node);
  void Cut(const Trie& trie, std::string_view text, bool at_start, std::vector<Piece>* out) const;

  std::vector<AddedToken> tokens_;
  Trie raw_, normalized_;
};

}  // namespace stockpot
