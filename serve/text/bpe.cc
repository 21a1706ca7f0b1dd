#include "serve/text/bpe.h"

#include <cstdio>
#include <queue>

#include "serve/text/tokenizer.h"
#include "serve/text/utf8.h"

namespace stockpot {

Result<BpeModel> BpeModel::FromJson(const JsonNode& node) {
  BpeModel model;
  STOCKPOT_ASSIGN_OR_RETURN(const auto type, node.OptionalString("type"));
  if (type.value_or("BPE") != "BPE") return node.Error("model '" + *type + "' is not supported");
  STOCKPOT_RETURN_IF_ERROR(model.ReadVocabulary(node));
  STOCKPOT_RETURN_IF_ERROR(model.ReadOptions(node));
  STOCKPOT_RETURN_IF_ERROR(model.ReadMerges(node));
  return model;
}

Status BpeModel::ReadVocabulary(const JsonNode& node) {
  STOCKPOT_ASSIGN_OR_RETURN(const JsonNode vocab, node.Get("vocab"));
  if (!vocab.value().is_object()) return vocab.Error("expected an object");
  vocabulary_.reserve(vocab.value().size());
  std::vector<bool> taken;
  for (const auto& [token, id] : vocab.value().items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > TokenizerLimits::kMaxTokenId) {
      return vocab.Error("the id of '" + token + "' is no integer from 0 to " +
                         std::to_string(TokenizerLimits::kMaxTokenId));
    }
    if (token.size() > TokenizerLimits::kMaxTokenBytes) {
      return vocab.Error("a token has " + std::to_string(token.size()) +
                         " bytes, over the limit of " +
                         std::to_string(TokenizerLimits::kMaxTokenBytes));
    }
    const auto index = id.get<size_t>();
    if (index >= taken.size()) taken.resize(index + 1);
    if (taken[index]) return vocab.Error("id " + std::to_string(index) + " is given twice");
    taken[index] = true;
    vocabulary_.emplace(token, static_cast<int32_t>(index));
  }
  return OkStatus();
}

Status BpeModel::ReadOptions(const JsonNode& node) {
  if (const auto dropout = node.Find("dropout"); dropout && dropout->value() != 0.0) {
    return dropout->Error("dropout is not supported");
  }
  STOCKPOT_ASSIGN_OR_RETURN(fuse_unknown_, node.Bool("fuse_unk", false));
  STOCKPOT_ASSIGN_OR_RETURN(ignore_merges_, node.Bool("ignore_merges", false));
  STOCKPOT_ASSIGN_OR_RETURN(const auto prefix, node.OptionalString("continuing_subword_prefix"));
  STOCKPOT_ASSIGN_OR_RETURN(const auto suffix, node.OptionalString("end_of_word_suffix"));
  prefix_ = prefix.value_or("");
  suffix_ = suffix.value_or("");
  STOCKPOT_ASSIGN_OR_RETURN(const auto unknown, node.OptionalString("unk_token"));
  if (unknown) {
    unknown_ = Find(*unknown);
    if (!unknown_) return node.Error("unk_token '" + *unknown + "' is not in the vocabulary");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const bool byte_fallback, node.Bool("byte_fallback", false));
  if (byte_fallback) {
    for (int byte = 0; byte < 256; ++byte) {
      char name[8];
      std::snprintf(name, sizeof(name), "<0x%02X>", byte);
      byte_tokens_.push_back(Find(name).value_or(-1));
    }
  }
  return OkStatus();
}

Status BpeModel::ReadMerges(const JsonNode& node) {
  STOCKPOT_ASSIGN_OR_RETURN(const JsonNode list, node.Get("merges"));
  if (!list.value().is_array()) return list.Error("expected an array");
  merges_.reserve(list.value().size());
  uint32_t rank = 0;
  size_t index = 0;
  for (const nlohmann::json& merge : list.value()) {
    const auto wrong = [&](std::string_view what) {
      return list.Error("[" + std::to_string(index) + "] " + std::string(what));
    };
    Status status;
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (text.starts_with("#version")) {
        ++index;
        continue;
      }
      if (space == text.npos || text.find(' ', space + 1) != text.npos) {
        return wrong("is not two tokens with one space between");
      }
      status = AddMerge(text.substr(0, space), text.substr(space + 1), rank);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      status = AddMerge(merge[0].get_ref<const std::string&>(),
                        merge[1].get_ref<const std::string&>(), rank);
    } else {
      return wrong("is neither a string nor a pair of strings");
    }
    if (!status.ok()) return wrong(status.message());
    ++rank;
    ++index;
  }
  return OkStatus();
}

Status BpeModel::AddMerge(const std::string& left, const std::string& right, uint32_t rank) {
  const auto a = Find(left), b = Find(right);
  if (!a || !b) {
    return InvalidArgument("merges '" + (a ? right : left) + "', which is not in the vocabulary");
  }
  if (!right.starts_with(prefix_)) {
    return InvalidArgument("right side '" + right + "' lacks the prefix '" + prefix_ + "'");
  }
  const std::string joined = left + right.substr(prefix_.size());
  const auto merged = Find(joined);
  if (!merged) return InvalidArgument("gives '" + joined + "', which is not in the vocabulary");
  merges_[Pair(*a, *b)] = {rank, *merged};
  return OkStatus();
}

std::optional<int32_t> BpeModel::Find(std::string_view token) const {
  const auto found = vocabulary_.find(token);
  return found == vocabulary_.end() ? std::nullopt : std::optional(found->second);
}

// The ids of single characters: the start of merging.
std::vector<int32_t> BpeModel::Characters(std::string_view piece) const {
  std::vector<int32_t> ids;
  ids.reserve(piece.size());
  std::string decorated;
  bool pending_unknown = false;
  for (size_t i = 0; i < piece.size();) {
    const int length = NextCodePoint(piece, i).bytes;
    std::string_view character = piece.substr(i, length);
    if (!prefix_.empty() || !suffix_.empty()) {
      decorated.assign(i > 0 ? prefix_ : std::string());
      decorated += character;
      if (i + length == piece.size()) decorated += suffix_;
      character = decorated;
    }
    i += length;
    if (const auto id = Find(character)) {
      if (pending_unknown) ids.push_back(*unknown_);
      pending_unknown = false;
      ids.push_back(*id);
      continue;
    }
    if (!byte_tokens_.empty()) {
      const size_t before = ids.size();
      for (const char c : character) {
        const int32_t id = byte_tokens_[static_cast<uint8_t>(c)];
        if (id < 0) break;
        ids.push_back(id);
      }
      // An unknown that still waits stays behind these bytes: so does Hugging Face's.
      if (ids.size() == before + character.size()) continue;
      ids.resize(before);
    }
    if (!unknown_) continue;
    if (pending_unknown && !fuse_unknown_) ids.push_back(*unknown_);
    pending_unknown = true;
  }
  if (pending_unknown) ids.push_back(*unknown_);
  return ids;
}

void BpeModel::Encode(std::string_view piece, std::vector<int32_t>* ids) const {
  if (ignore_merges_) {
    if (const auto whole = Find(piece)) {
      ids->push_back(*whole);
      return;
    }
  }
  const std::vector<int32_t> characters = Characters(piece);
  const auto count = static_cast<int32_t>(characters.size());
  std::vector<Symbol> symbols(count);
  struct Candidate {
    uint32_t rank;
    int32_t position, merged;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  std::vector<Candidate> initial;
  for (int32_t i = 0; i < count; ++i) {
    symbols[i] = {characters[i], i - 1, i + 1 < count ? i + 1 : -1, true};
    if (i == 0) continue;
    if (const Merge* merge = FindMerge(characters[i - 1], characters[i])) {
      initial.push_back({merge->rank, i - 1, merge->merged});
    }
  }
  std::priority_queue queue(std::greater<Candidate>(), std::move(initial));
  const auto consider = [&](int32_t left, int32_t right) {
    if (left < 0 || right < 0) return;
    if (const Merge* merge = FindMerge(symbols[left].id, symbols[right].id)) {
      queue.push({merge->rank, left, merge->merged});
    }
  };
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[top.position];
    if (!left.alive || left.next < 0) continue;
    Symbol& right = symbols[left.next];
    const Merge* merge = FindMerge(left.id, right.id);
    if (merge == nullptr || merge->merged != top.merged) continue;  // the pair has changed since
    left.id = top.merged;
    left.next = right.next;
    right.alive = false;
    if (left.next >= 0) symbols[left.next].previous = top.position;
    consider(left.previous, top.position);
    consider(top.position, left.next);
  }
  for (const Symbol& symbol : symbols) {
    if (symbol.alive) ids->push_back(symbol.id);
  }
}

}  // namespace stockpot
