// The pre_tokenizer of a tokenizer.json: cuts text into the pieces that the model sees one by one.
// Thread promise: immutable; one RegexScratch a thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/json_node.h"
#include "serve/text/normalizer.h"

namespace stockpot {

// The byte-level alphabet of GPT-2: every byte as a printable character, two bytes of UTF-8 at
// most.
struct ByteAlphabet {
  // The character of each byte, as UTF-8.
  static const std::string& CharacterOf(uint8_t byte);
  // The byte of a character, or -1.
  static int ByteOf(char32_t character);
};

// A part of the text on its way to the model.
struct Piece {
  std::string text;
  bool at_start = false;  // begins where the caller's text begins (Metaspace "first")
  int32_t token = -1;     // an added token: already an id, never cut again
};

class PreTokenizer {
 public:
  // The empty pre-tokenizer cuts nothing.
  PreTokenizer() = default;
  static Result<PreTokenizer> FromJson(const JsonNode& node);

  // Cuts every piece that is no token; empty pieces vanish.
  Status Apply(std::vector<Piece>* pieces, RegexScratch* scratch) const;

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  enum class PrependScheme { kAlways, kFirst, kNever };

  struct Split {
    Pattern pattern;
    Behavior behavior;
    bool invert;
  };
  struct ByteLevel {
    bool add_prefix_space;
  };
  struct MapBytes {};  // the second half of ByteLevel: bytes become characters of the alphabet
  struct Metaspace {
    std::string replacement;
    PrependScheme scheme;
  };
  using Step = std::variant<Split, ByteLevel, MapBytes, Metaspace>;

  struct Span {
    ByteRange range;
    bool is_match;
  };

  static std::vector<ByteRange> Combine(const std::vector<Span>& spans, Behavior behavior);
  static Result<std::vector<ByteRange>> Cut(std::string_view text, const Split& split,
                                            RegexScratch* scratch);
  static Result<Behavior> ParseBehavior(const JsonNode& node, const std::string& name);
  static Result<PrependScheme> ParseScheme(const JsonNode& node);

  Status Add(const JsonNode& node, int depth);
  Status AddNamed(const JsonNode& node, const std::string& type);
  Status AddByteLevel(const JsonNode& node);
  Status AddMetaspace(const JsonNode& node);
  Status AddRegexSplit(std::string_view pattern, Behavior behavior, bool invert = false);
  Status ApplySplit(const Split& split, std::vector<Piece>* pieces, RegexScratch* scratch) const;

  std::vector<Step> steps_;
};

}  // namespace stockpot
