#include "serve/text/added_tokens.h"

#include <algorithm>

#include "serve/text/tokenizer.h"
#include "serve/text/unicode.h"
#include "serve/text/utf8.h"

namespace stockpot {
namespace {

constexpr size_t kMaxTokens = 100'000;
constexpr size_t kMaxContentBytes = 512;  // bounds the search: text bytes x this

bool WordBefore(std::string_view text, size_t end) {
  return end > 0 && IsWordCharacter(NextCodePoint(text, PreviousCodePoint(text, end)).code_point);
}

bool WordAfter(std::string_view text, size_t begin) {
  return begin < text.size() && IsWordCharacter(NextCodePoint(text, begin).code_point);
}

size_t SkipSpaceLeft(std::string_view text, size_t end) {
  while (end > 0) {
    const size_t last = PreviousCodePoint(text, end);
    if (!IsWhitespace(NextCodePoint(text, last).code_point)) break;
    end = last;
  }
  return end;
}

size_t SkipSpaceRight(std::string_view text, size_t begin) {
  while (begin < text.size()) {
    const Utf8Step step = NextCodePoint(text, begin);
    if (!IsWhitespace(step.code_point)) break;
    begin += step.bytes;
  }
  return begin;
}

}  // namespace

void AddedTokens::Trie::Insert(std::string_view content, int32_t token) {
  first_[static_cast<uint8_t>(content[0])] = true;
  uint32_t node = 0;
  for (const char c : content) {
    const auto [child, added] =
        children_.try_emplace((uint64_t{node} << 8) | static_cast<uint8_t>(c), nodes_);
    if (added) ++nodes_;
    node = child->second;
  }
  ends_.try_emplace(node, token);  // of two that normalize alike the first wins
}

int32_t AddedTokens::Trie::Longest(std::string_view text, size_t from, size_t* length) const {
  int32_t best = -1;
  if (!first_[static_cast<uint8_t>(text[from])]) return best;
  uint32_t node = 0;
  for (size_t i = from; i < text.size(); ++i) {
    const auto child = children_.find((uint64_t{node} << 8) | static_cast<uint8_t>(text[i]));
    if (child == children_.end()) break;
    node = child->second;
    if (const auto end = ends_.find(node); end != ends_.end()) {
      best = end->second;
      *length = i + 1 - from;
    }
  }
  return best;
}

Result<AddedToken> AddedTokens::ReadToken(const JsonNode& node) {
  AddedToken token;
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t id, node.Integer("id", 0, TokenizerLimits::kMaxTokenId));
  token.id = static_cast<int32_t>(id);
  STOCKPOT_ASSIGN_OR_RETURN(token.content, node.String("content"));
  STOCKPOT_ASSIGN_OR_RETURN(token.single_word, node.Bool("single_word"));
  STOCKPOT_ASSIGN_OR_RETURN(token.lstrip, node.Bool("lstrip"));
  STOCKPOT_ASSIGN_OR_RETURN(token.rstrip, node.Bool("rstrip"));
  STOCKPOT_ASSIGN_OR_RETURN(token.normalized, node.Bool("normalized"));
  STOCKPOT_ASSIGN_OR_RETURN(token.special, node.Bool("special"));
  if (token.content.empty() || token.content.size() > kMaxContentBytes) {
    return node.Error("content must have 1 to " + std::to_string(kMaxContentBytes) + " bytes");
  }
  return token;
}

Result<AddedTokens> AddedTokens::FromJson(const JsonNode& root, const TokenMap& vocabulary,
                                          const Normalizer& normalizer) {
  AddedTokens added;
  if (!root.Find("added_tokens")) return added;
  STOCKPOT_ASSIGN_OR_RETURN(const auto nodes, root.Array("added_tokens"));
  if (nodes.size() > kMaxTokens) return root.Error("too many added tokens");
  std::unordered_map<std::string, size_t> seen;
  auto next_id = static_cast<int64_t>(vocabulary.size());
  for (const JsonNode& node : nodes) {
    STOCKPOT_ASSIGN_OR_RETURN(AddedToken token, ReadToken(node));
    if (const auto before = seen.find(token.content); before != seen.end()) {
      if (added.tokens_[before->second] == token) continue;
      return node.Error("'" + token.content + "' is given twice, differently");
    }
    const auto in_vocabulary = vocabulary.find(token.content);
    const int64_t expected = in_vocabulary != vocabulary.end() ? in_vocabulary->second : next_id;
    if (token.id != expected) {
      return node.Error("'" + token.content + "' has id " + std::to_string(token.id) +
                        ", but its place gives " + std::to_string(expected));
    }
    next_id = std::max<int64_t>(next_id, token.id + int64_t{1});
    seen.emplace(token.content, added.tokens_.size());
    added.tokens_.push_back(std::move(token));
  }
  // Special tokens are looked for first: the order decides between two that normalize alike.
  RegexScratch scratch;
  for (const bool special : {true, false}) {
    for (size_t i = 0; i < added.tokens_.size(); ++i) {
      const AddedToken& token = added.tokens_[i];
      if (token.special != special) continue;
      std::string content = token.content;
      if (token.normalized) {
        STOCKPOT_ASSIGN_OR_RETURN(content, normalizer.Apply(std::move(content), &scratch));
      }
      if (content.empty() || content.size() > 4 * kMaxContentBytes) {
        return nodes[i].Error("'" + token.content + "' normalizes to nothing, or to too much");
      }
      (token.normalized ? added.normalized_ : added.raw_).Insert(content, static_cast<int32_t>(i));
    }
  }
  return added;
}

// The steps and their order are those of Hugging Face's find_matches, overlaps of rstrip included.
void AddedTokens::Cut(const Trie& trie, std::string_view text, bool at_start,
                      std::vector<Piece>* out) const {
  size_t covered = 0;
  for (size_t i = 0; i < text.size();) {
    size_t length = 0;
    const int32_t index = trie.Longest(text, i, &length);
    if (index < 0) {
      ++i;
      continue;
    }
    size_t begin = i, end = i + length;
    i = end;
    const AddedToken& token = tokens_[index];
    if (token.single_word && (WordBefore(text, begin) || WordAfter(text, end))) continue;
    if (token.lstrip) begin = std::max(SkipSpaceLeft(text, begin), covered);
    if (token.rstrip) end = SkipSpaceRight(text, end);
    if (covered < begin) {
      out->push_back(
          {std::string(text.substr(covered, begin - covered)), at_start && covered == 0});
    }
    out->push_back({.text = {}, .at_start = false, .token = token.id});
    covered = end;
  }
  if (covered < text.size()) {
    out->push_back({std::string(text.substr(covered)), at_start && covered == 0});
  }
}

Result<std::vector<Piece>> AddedTokens::Split(std::string_view text, const Normalizer& normalizer,
                                              RegexScratch* scratch) const {
  std::vector<Piece> raw, out;
  Cut(raw_, text, /*at_start=*/true, &raw);
  for (Piece& piece : raw) {
    if (piece.token >= 0) {
      out.push_back(std::move(piece));
      continue;
    }
    STOCKPOT_ASSIGN_OR_RETURN(piece.text, normalizer.Apply(std::move(piece.text), scratch));
    Cut(normalized_, piece.text, piece.at_start, &out);
  }
  return out;
}

}  // namespace stockpot
