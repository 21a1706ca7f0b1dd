#include "serve/text/normalizer.h"

#include "serve/text/tokenizer.h"
#include "serve/text/utf8.h"

namespace stockpot {
namespace {

constexpr int kMaxDepth = 8;        // Sequence within Sequence
constexpr size_t kMaxSteps = 1000;  // of all Sequences together
constexpr size_t kMaxNormalizedBytes = 4 * TokenizerLimits::kMaxTextBytes;

std::string StripWhitespace(std::string_view text, bool left, bool right) {
  while (left && !text.empty()) {
    const Utf8Step step = NextCodePoint(text, 0);
    if (!IsWhitespace(step.code_point)) break;
    text.remove_prefix(step.bytes);
  }
  while (right && !text.empty()) {
    const size_t last = PreviousCodePoint(text, text.size());
    if (!IsWhitespace(NextCodePoint(text, last).code_point)) break;
    text.remove_suffix(text.size() - last);
  }
  return std::string(text);
}

}  // namespace

Pattern Pattern::FromLiteral(std::string literal) {
  Pattern pattern;
  pattern.literal_ = std::move(literal);
  return pattern;
}

Result<Pattern> Pattern::FromRegex(std::string_view oniguruma_pattern) {
  STOCKPOT_ASSIGN_OR_RETURN(Regex regex, Regex::Compile(oniguruma_pattern));
  Pattern pattern;
  pattern.regex_ = std::make_shared<const Regex>(std::move(regex));
  return pattern;
}

Result<Pattern> Pattern::FromJson(const JsonNode& node) {
  if (node.Find("String")) {
    STOCKPOT_ASSIGN_OR_RETURN(std::string literal, node.String("String"));
    return FromLiteral(std::move(literal));
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, node.String("Regex"));
  Result<Pattern> pattern = FromRegex(text);
  if (!pattern.ok()) return pattern.status().WithContext(node.place() + ".Regex");
  return pattern;
}

Result<std::vector<ByteRange>> Pattern::FindAll(std::string_view text,
                                                RegexScratch* scratch) const {
  if (regex_) return regex_->FindAll(text, scratch);
  std::vector<ByteRange> found;
  if (literal_.empty()) return found;
  for (size_t at = text.find(literal_); at != text.npos; at = text.find(literal_, at)) {
    found.push_back({at, at + literal_.size()});
    at += literal_.size();
  }
  return found;
}

Result<std::string> ReplaceAll(std::string_view text, const Pattern& pattern,
                               std::string_view content, size_t max_bytes, RegexScratch* scratch) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<ByteRange> matches, pattern.FindAll(text, scratch));
  std::string out;
  size_t copied = 0;
  for (const ByteRange& match : matches) {
    out += text.substr(copied, match.begin - copied);
    out += content;
    copied = match.end;
    if (out.size() > max_bytes) {
      return ResourceExhausted("normalized text is over " + std::to_string(max_bytes) + " bytes");
    }
  }
  out += text.substr(copied);
  return out;
}

Result<Normalizer> Normalizer::FromJson(const JsonNode& node) {
  Normalizer normalizer;
  STOCKPOT_RETURN_IF_ERROR(normalizer.Add(node, 0));
  return normalizer;
}

Status Normalizer::Add(const JsonNode& node, int depth) {
  if (depth > kMaxDepth || steps_.size() > kMaxSteps) {
    return node.Error("too many or too deeply nested normalizers");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::string type, node.String("type"));
  if (type != "Sequence") return AddNamed(node, type);
  STOCKPOT_ASSIGN_OR_RETURN(const auto children, node.Array("normalizers"));
  for (const JsonNode& child : children) STOCKPOT_RETURN_IF_ERROR(Add(child, depth + 1));
  return OkStatus();
}

Status Normalizer::AddNamed(const JsonNode& node, const std::string& type) {
  if (type == "Prepend") {
    STOCKPOT_ASSIGN_OR_RETURN(std::string text, node.String("prepend"));
    steps_.emplace_back(Prepend{std::move(text)});
  } else if (type == "Replace") {
    STOCKPOT_ASSIGN_OR_RETURN(const JsonNode pattern_node, node.Get("pattern"));
    STOCKPOT_ASSIGN_OR_RETURN(Pattern pattern, Pattern::FromJson(pattern_node));
    STOCKPOT_ASSIGN_OR_RETURN(std::string content, node.String("content"));
    steps_.emplace_back(Replace{std::move(pattern), std::move(content)});
  } else if (type == "Strip") {
    STOCKPOT_ASSIGN_OR_RETURN(const bool left, node.Bool("strip_left"));
    STOCKPOT_ASSIGN_OR_RETURN(const bool right, node.Bool("strip_right"));
    steps_.emplace_back(Strip{left, right});
  } else if (type == "NFC") {
    steps_.emplace_back(NormalForm::kNfc);
  } else if (type == "NFD") {
    steps_.emplace_back(NormalForm::kNfd);
  } else if (type == "NFKC") {
    steps_.emplace_back(NormalForm::kNfkc);
  } else if (type == "NFKD") {
    steps_.emplace_back(NormalForm::kNfkd);
  } else {
    return node.Error("normalizer '" + type + "' is not supported");
  }
  return OkStatus();
}

Result<std::string> Normalizer::Apply(std::string text, RegexScratch* scratch) const {
  for (const Step& step : steps_) {
    if (const auto* prepend = std::get_if<Prepend>(&step)) {
      if (!text.empty()) text.insert(0, prepend->text);
    } else if (const auto* replace = std::get_if<Replace>(&step)) {
      STOCKPOT_ASSIGN_OR_RETURN(
          text, ReplaceAll(text, replace->pattern, replace->content, kMaxNormalizedBytes, scratch));
    } else if (const auto* form = std::get_if<NormalForm>(&step)) {
      STOCKPOT_ASSIGN_OR_RETURN(text, Normalize(*form, text));
    } else if (const auto* strip = std::get_if<Strip>(&step)) {
      text = StripWhitespace(text, strip->left, strip->right);
    }
    if (text.size() > kMaxNormalizedBytes) {
      return ResourceExhausted("normalized text is over " + std::to_string(kMaxNormalizedBytes) +
                               " bytes");
    }
  }
  return text;
}

}  // namespace stockpot
