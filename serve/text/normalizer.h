// The normalizer of a tokenizer.json: text -> text, before anything else looks at it.
// Thread promise: immutable; one RegexScratch a thread.
#pragma once

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/json_node.h"
#include "serve/text/regex.h"
#include "serve/text/unicode.h"

namespace stockpot {

// A literal or a regex, as tokenizer.json writes {"String": "..."} or {"Regex": "..."}.
class Pattern {
 public:
  static Result<Pattern> FromJson(const JsonNode& node);
  static Result<Pattern> FromRegex(std::string_view oniguruma_pattern);
  static Pattern FromLiteral(std::string literal);

  // All matches, left to right, not overlapping. An empty literal matches nowhere.
  Result<std::vector<ByteRange>> FindAll(std::string_view text, RegexScratch* scratch) const;

  bool is_literal() const { return regex_ == nullptr; }
  const std::string& literal() const { return literal_; }

 private:
  std::string literal_;
  std::shared_ptr<const Regex> regex_;
};

// `text` with every match of `pattern` replaced. ResourceExhausted over `max_bytes`.
Result<std::string> ReplaceAll(std::string_view text, const Pattern& pattern,
                               std::string_view content, size_t max_bytes, RegexScratch* scratch);

class Normalizer {
 public:
  // The empty normalizer changes nothing.
  Normalizer() = default;
  static Result<Normalizer> FromJson(const JsonNode& node);

  bool empty() const { return steps_.empty(); }
  Result<std::string> Apply(std::string text, RegexScratch* scratch) const;

 private:
  struct Prepend {
    std::string text;
  };
  struct Replace {
    Pattern pattern;
    std::string content;
  };
  struct Strip {
    bool left, right;
  };
  using Step = std::variant<Prepend, Replace, NormalForm, Strip>;

  Status Add(const JsonNode& node, int depth);
  Status AddNamed(const JsonNode& node, const std::string& type);

  std::vector<Step> steps_;
};

}  // namespace stockpot
