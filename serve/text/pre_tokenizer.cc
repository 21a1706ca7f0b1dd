#include "serve/text/pre_tokenizer.h"

#include <algorithm>
#include <array>

#include "serve/text/utf8.h"

namespace stockpot {
namespace {

constexpr int kMaxDepth = 8;       // Sequence within Sequence
constexpr size_t kMaxSteps = 100;  // of all Sequences together

// The pattern ByteLevel brings along (GPT-2's).
constexpr std::string_view kByteLevelRegex =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct AlphabetTables {
  std::array<std::string, 256> characters;
  std::array<int16_t, 512> bytes;  // by code point

  AlphabetTables() {
    bytes.fill(-1);
    char32_t next = 256;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b != 0xAD);
      const char32_t character = printable ? static_cast<char32_t>(b) : next++;
      AppendUtf8(character, &characters[b]);
      bytes[character] = static_cast<int16_t>(b);
    }
  }
};

const AlphabetTables& Alphabet() {
  static const AlphabetTables tables;
  return tables;
}

}  // namespace

const std::string& ByteAlphabet::CharacterOf(uint8_t byte) { return Alphabet().characters[byte]; }

int ByteAlphabet::ByteOf(char32_t character) {
  return character < 512 ? Alphabet().bytes[character] : -1;
}

Result<PreTokenizer> PreTokenizer::FromJson(const JsonNode& node) {
  PreTokenizer pre_tokenizer;
  STOCKPOT_RETURN_IF_ERROR(pre_tokenizer.Add(node, 0));
  return pre_tokenizer;
}

Status PreTokenizer::Add(const JsonNode& node, int depth) {
  if (depth > kMaxDepth || steps_.size() > kMaxSteps) {
    return node.Error("too many or too deeply nested pre-tokenizers");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::string type, node.String("type"));
  if (type != "Sequence") return AddNamed(node, type);
  STOCKPOT_ASSIGN_OR_RETURN(const auto children, node.Array("pretokenizers"));
  for (const JsonNode& child : children) STOCKPOT_RETURN_IF_ERROR(Add(child, depth + 1));
  return OkStatus();
}

Status PreTokenizer::AddNamed(const JsonNode& node, const std::string& type) {
  if (type == "ByteLevel") return AddByteLevel(node);
  if (type == "Metaspace") return AddMetaspace(node);
  if (type == "Split") {
    STOCKPOT_ASSIGN_OR_RETURN(const JsonNode pattern_node, node.Get("pattern"));
    STOCKPOT_ASSIGN_OR_RETURN(Pattern pattern, Pattern::FromJson(pattern_node));
    STOCKPOT_ASSIGN_OR_RETURN(const std::string name, node.String("behavior"));
    STOCKPOT_ASSIGN_OR_RETURN(const Behavior behavior, ParseBehavior(node, name));
    STOCKPOT_ASSIGN_OR_RETURN(const bool invert, node.Bool("invert"));
    steps_.emplace_back(Split{std::move(pattern), behavior, invert});
    return OkStatus();
  }
  if (type == "Digits") {
    STOCKPOT_ASSIGN_OR_RETURN(const bool individual, node.Bool("individual_digits", false));
    return AddRegexSplit(R"(\p{N})", individual ? Behavior::kIsolated : Behavior::kContiguous);
  }
  if (type == "Punctuation") {
    Behavior behavior = Behavior::kIsolated;
    if (node.Find("behavior")) {
      STOCKPOT_ASSIGN_OR_RETURN(const std::string name, node.String("behavior"));
      STOCKPOT_ASSIGN_OR_RETURN(behavior, ParseBehavior(node, name));
    }
    return AddRegexSplit(R"([\p{P}!-/:-@\[-`{-~])", behavior);
  }
  if (type == "Whitespace") {
    return AddRegexSplit(R"(\w+|[^\w\s]+)", Behavior::kRemoved, /*invert=*/true);
  }
  if (type == "WhitespaceSplit") return AddRegexSplit(R"(\s)", Behavior::kRemoved);
  if (type == "CharDelimiterSplit") {
    STOCKPOT_ASSIGN_OR_RETURN(const char32_t delimiter, node.Character("delimiter"));
    std::string literal;
    AppendUtf8(delimiter, &literal);
    steps_.emplace_back(
        Split{Pattern::FromLiteral(std::move(literal)), Behavior::kRemoved, /*invert=*/false});
    return OkStatus();
  }
  return node.Error("pre-tokenizer '" + type + "' is not supported");
}

Status PreTokenizer::AddRegexSplit(std::string_view regex, Behavior behavior, bool invert) {
  STOCKPOT_ASSIGN_OR_RETURN(Pattern pattern, Pattern::FromRegex(regex));
  steps_.emplace_back(Split{std::move(pattern), behavior, invert});
  return OkStatus();
}

Status PreTokenizer::AddByteLevel(const JsonNode& node) {
  STOCKPOT_ASSIGN_OR_RETURN(const bool add_prefix_space, node.Bool("add_prefix_space"));
  STOCKPOT_ASSIGN_OR_RETURN(const bool use_regex, node.Bool("use_regex", true));
  steps_.emplace_back(ByteLevel{add_prefix_space});
  if (use_regex) STOCKPOT_RETURN_IF_ERROR(AddRegexSplit(kByteLevelRegex, Behavior::kIsolated));
  steps_.emplace_back(MapBytes{});
  return OkStatus();
}

Status PreTokenizer::AddMetaspace(const JsonNode& node) {
  STOCKPOT_ASSIGN_OR_RETURN(const char32_t character, node.Character("replacement"));
  STOCKPOT_ASSIGN_OR_RETURN(const PrependScheme scheme, ParseScheme(node));
  STOCKPOT_ASSIGN_OR_RETURN(const bool split, node.Bool("split", true));
  std::string replacement;
  AppendUtf8(character, &replacement);
  steps_.emplace_back(Metaspace{replacement, scheme});
  if (split) {
    steps_.emplace_back(
        Split{Pattern::FromLiteral(replacement), Behavior::kMergedWithNext, /*invert=*/false});
  }
  return OkStatus();
}

Result<PreTokenizer::PrependScheme> PreTokenizer::ParseScheme(const JsonNode& node) {
  // Old files say add_prefix_space instead of prepend_scheme.
  STOCKPOT_ASSIGN_OR_RETURN(const bool add_prefix_space, node.Bool("add_prefix_space", true));
  STOCKPOT_ASSIGN_OR_RETURN(const auto name, node.OptionalString("prepend_scheme"));
  if (name && *name != "always" && *name != "first" && *name != "never") {
    return node.Error("prepend_scheme '" + *name + "' is not supported");
  }
  if (!add_prefix_space && name && *name != "never") {
    return node.Error("add_prefix_space and prepend_scheme contradict each other");
  }
  if (!add_prefix_space || name == "never") return PrependScheme::kNever;
  return name == "first" ? PrependScheme::kFirst : PrependScheme::kAlways;
}

Result<PreTokenizer::Behavior> PreTokenizer::ParseBehavior(const JsonNode& node,
                                                           const std::string& name) {
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  return node.Error("behavior '" + name + "' is not supported");
}

std::vector<ByteRange> PreTokenizer::Combine(const std::vector<Span>& spans, Behavior behavior) {
  std::vector<ByteRange> out;
  bool previous = false;
  const auto merge = [&](const Span& span, bool joins) {
    if (joins && !out.empty()) {
      out.back().begin = std::min(out.back().begin, span.range.begin);
      out.back().end = std::max(out.back().end, span.range.end);
    } else {
      out.push_back(span.range);
    }
    previous = span.is_match;
  };
  switch (behavior) {
    case Behavior::kRemoved:
      for (const Span& span : spans) {
        if (!span.is_match) out.push_back(span.range);
      }
      break;
    case Behavior::kIsolated:
      for (const Span& span : spans) out.push_back(span.range);
      break;
    case Behavior::kContiguous:
      for (const Span& span : spans) merge(span, span.is_match == previous);
      break;
    case Behavior::kMergedWithPrevious:
      for (const Span& span : spans) merge(span, span.is_match && !previous);
      break;
    case Behavior::kMergedWithNext:
      for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
        merge(*span, span->is_match && !previous);
      }
      std::reverse(out.begin(), out.end());
      break;
  }
  return out;
}

Result<std::vector<ByteRange>> PreTokenizer::Cut(std::string_view text, const Split& split,
                                                 RegexScratch* scratch) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto matches, split.pattern.FindAll(text, scratch));
  std::vector<Span> spans;
  spans.reserve(2 * matches.size() + 1);
  size_t covered = 0;
  for (const ByteRange& match : matches) {
    if (covered != match.begin) spans.push_back({{covered, match.begin}, split.invert});
    spans.push_back({match, !split.invert});
    covered = match.end;
  }
  if (covered != text.size()) spans.push_back({{covered, text.size()}, split.invert});
  return Combine(spans, split.behavior);
}

Status PreTokenizer::ApplySplit(const Split& split, std::vector<Piece>* pieces,
                                RegexScratch* scratch) const {
  std::vector<Piece> out;
  out.reserve(pieces->size());
  for (Piece& piece : *pieces) {
    if (piece.token >= 0) {
      out.push_back(std::move(piece));
      continue;
    }
    STOCKPOT_ASSIGN_OR_RETURN(const auto ranges, Cut(piece.text, split, scratch));
    for (const ByteRange& range : ranges) {
      if (range.empty()) continue;
      out.push_back({piece.text.substr(range.begin, range.end - range.begin),
                     piece.at_start && range.begin == 0});
    }
  }
  *pieces = std::move(out);
  return OkStatus();
}

Status PreTokenizer::Apply(std::vector<Piece>* pieces, RegexScratch* scratch) const {
  for (const Step& step : steps_) {
    if (const auto* split = std::get_if<Split>(&step)) {
      STOCKPOT_RETURN_IF_ERROR(ApplySplit(*split, pieces, scratch));
      continue;
    }
    for (Piece& piece : *pieces) {
      if (piece.token >= 0) continue;
      if (const auto* byte_level = std::get_if<ByteLevel>(&step)) {
        if (byte_level->add_prefix_space && !piece.text.starts_with(' ')) piece.text.insert(0, " ");
      } else if (std::holds_alternative<MapBytes>(step)) {
        std::string mapped;
        mapped.reserve(piece.text.size() + piece.text.size() / 4);
        for (const char c : piece.text) {
          mapped += ByteAlphabet::CharacterOf(static_cast<uint8_t>(c));
        }
        piece.text = std::move(mapped);
      } else if (const auto* metaspace = std::get_if<Metaspace>(&step)) {
        STOCKPOT_ASSIGN_OR_RETURN(
            piece.text, ReplaceAll(piece.text, Pattern::FromLiteral(" "), metaspace->replacement,
                                   std::string::npos, scratch));
        const bool prepend = metaspace->scheme == PrependScheme::kAlways ||
                             (metaspace->scheme == PrependScheme::kFirst && piece.at_start);
        if (prepend && !piece.text.starts_with(metaspace->replacement)) {
          piece.text.insert(0, metaspace->replacement);
        }
      }
    }
  }
  return OkStatus();
}

}  // namespace stockpot
