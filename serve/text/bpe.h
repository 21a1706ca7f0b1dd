// Byte pair encoding: one piece of text -> ids, by merging the pair of lowest rank first.
//
// The time is O(n log n) for a piece of n characters (a heap of candidate pairs over a linked
// list), because SentencePiece-style tokenizers hand over the whole text as one piece. Thread
// promise: immutable.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/json_node.h"

namespace stockpot {

// std::string keys that can be looked up by string_view.
struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
using TokenMap = std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>>;

class BpeModel {
 public:
  // Reads the "model" object. InvalidArgument names what is wrong or not supported.
  static Result<BpeModel> FromJson(const JsonNode& node);

  const TokenMap& vocabulary() const { return vocabulary_; }

  // Appends the ids of one piece. Characters that have no token become the unknown token, or
  // nothing where there is none. REQUIRES: valid UTF-8, not empty.
  void Encode(std::string_view piece, std::vector<int32_t>* ids) const;

 private:
  struct Merge {
    uint32_t rank;
    int32_t merged;
  };
  struct Symbol {
    int32_t id;
    int32_t previous, next;  // index, -1 at the ends
    bool alive;
  };
  struct PairHash {
    size_t operator()(uint64_t pair) const {
      pair *= 0x9E3779B97F4A7C15u;
      return static_cast<size_t>(pair ^ (pair >> 32));
    }
  };

  static uint64_t Pair(int32_t left, int32_t right) {
    return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) |
           static_cast<uint32_t>(right);
  }
  const Merge* FindMerge(int32_t left, int32_t right) const {
    const auto found = merges_.find(Pair(left, right));
    return found == merges_.end() ? nullptr : &found->second;
  }

  Status ReadOptions(const JsonNode& node);
  Status ReadVocabulary(const JsonNode& node);
  Status ReadMerges(const JsonNode& node);
  Status AddMerge(const std::string& left, const std::string& right, uint32_t rank);
  std::vector<int32_t> Characters(std::string_view piece) const;
  std::optional<int32_t> Find(std::string_view token) const;

  TokenMap vocabulary_;
  std::unordered_map<uint64_t, Merge, PairHash> merges_;
  std::vector<int32_t> byte_tokens_;  // 256 ids of <0x00>..<0xFF> (-1: absent), or empty
  std::optional<int32_t> unknown_;
  std::string prefix_, suffix_;  // continuing_subword_prefix, end_of_word_suffix
  bool fuse_unknown_ = false;
  bool ignore_merges_ = false;
};

}  // namespace stockpot
