#include "serve/text/tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "serve/text/added_tokens.h"
#include "serve/text/bpe.h"
#include "serve/text/decode_pipeline.h"
#include "serve/text/json_node.h"
#include "serve/text/normalizer.h"
#include "serve/text/post_processor.h"
#include "serve/text/pre_tokenizer.h"
#include "serve/text/utf8.h"

namespace stockpot {

struct Tokenizer::Parts {
  BpeModel model;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  AddedTokens added;
  PostProcessor post_processor;
  DecodePipeline decoder;

  std::vector<std::optional<std::string>> tokens;  // by id
  TokenMap added_ids;                              // content -> id of the added tokens
  std::vector<int32_t> special_ids;                // ascending

  Status Read(const JsonNode& root);
  Status IndexTokens(const JsonNode& root);
};

Status Tokenizer::Parts::Read(const JsonNode& root) {
  if (!root.value().is_object()) return InvalidArgument("not a JSON object");
  STOCKPOT_ASSIGN_OR_RETURN(const JsonNode model_node, root.Get("model"));
  STOCKPOT_ASSIGN_OR_RETURN(model, BpeModel::FromJson(model_node));
  if (const auto node = root.Find("normalizer")) {
    STOCKPOT_ASSIGN_OR_RETURN(normalizer, Normalizer::FromJson(*node));
  }
  if (const auto node = root.Find("pre_tokenizer")) {
    STOCKPOT_ASSIGN_OR_RETURN(pre_tokenizer, PreTokenizer::FromJson(*node));
  }
  if (const auto node = root.Find("decoder")) {
    STOCKPOT_ASSIGN_OR_RETURN(decoder, DecodePipeline::FromJson(*node));
  }
  STOCKPOT_ASSIGN_OR_RETURN(added, AddedTokens::FromJson(root, model.vocabulary(), normalizer));
  STOCKPOT_RETURN_IF_ERROR(IndexTokens(root));
  if (const auto node = root.Find("post_processor")) {
    STOCKPOT_ASSIGN_OR_RETURN(post_processor,
                              PostProcessor::FromJson(*node, static_cast<int32_t>(tokens.size())));
  }
  return OkStatus();
}

Status Tokenizer::Parts::IndexTokens(const JsonNode& root) {
  const auto put = [&](int32_t id, const std::string& content) -> Status {
    if (static_cast<size_t>(id) >= tokens.size()) tokens.resize(size_t{1} + id);
    if (tokens[id] && *tokens[id] != content) {
      return root.Error("id " + std::to_string(id) + " stands for '" + *tokens[id] + "' and '" +
                        content + "'");
    }
    tokens[id] = content;
    return OkStatus();
  };
  for (const auto& [content, id] : model.vocabulary()) STOCKPOT_RETURN_IF_ERROR(put(id, content));
  for (const AddedToken& token : added.tokens()) {
    STOCKPOT_RETURN_IF_ERROR(put(token.id, token.content));
    added_ids.emplace(token.content, token.id);
    if (token.special) special_ids.push_back(token.id);
  }
  std::sort(special_ids.begin(), special_ids.end());
  return OkStatus();
}

Result<std::unique_ptr<const Tokenizer>> Tokenizer::FromJson(std::string_view tokenizer_json) {
  if (tokenizer_json.size() > TokenizerLimits::kMaxJsonBytes) {
    return InvalidArgument("tokenizer.json has " + std::to_string(tokenizer_json.size()) +
                           " bytes, over the limit of " +
                           std::to_string(TokenizerLimits::kMaxJsonBytes));
  }
  nlohmann::json document;
  try {
    document = nlohmann::json::parse(tokenizer_json);
  } catch (const nlohmann::json::exception& error) {
    return InvalidArgument(std::string("tokenizer.json: ") + error.what());
  }
  auto parts = std::make_unique<Parts>();
  const Status status = parts->Read(JsonNode(document, ""));
  if (!status.ok()) return status.WithContext("tokenizer.json");
  return std::unique_ptr<const Tokenizer>(new Tokenizer(std::move(parts)));
}

Tokenizer::Tokenizer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Tokenizer::~Tokenizer() = default;

Result<std::vector<int32_t>> Tokenizer::Encode(std::string_view text,
                                               bool add_special_tokens) const {
  if (text.size() > TokenizerLimits::kMaxTextBytes) {
    return ResourceExhausted("text has " + std::to_string(text.size()) +
                             " bytes, over the limit of " +
                             std::to_string(TokenizerLimits::kMaxTextBytes));
  }
  std::string repaired;
  if (!IsValidUtf8(text)) text = repaired = ToValidUtf8(text);
  RegexScratch scratch;
  STOCKPOT_ASSIGN_OR_RETURN(std::vector<Piece> pieces,
                            parts_->added.Split(text, parts_->normalizer, &scratch));
  STOCKPOT_RETURN_IF_ERROR(parts_->pre_tokenizer.Apply(&pieces, &scratch));
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 8);
  const PostProcessor& post = parts_->post_processor;
  if (add_special_tokens) ids = post.before;
  for (const Piece& piece : pieces) {
    if (piece.token >= 0) {
      ids.push_back(piece.token);
    } else {
      parts_->model.Encode(piece.text, &ids);
    }
  }
  if (add_special_tokens) ids.insert(ids.end(), post.after.begin(), post.after.end());
  return ids;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string out;
  DecodeState state;
  for (const int32_t id : ids) {
    const auto token = IdToToken(id);
    if (!token || (skip_special && IsSpecial(id))) continue;
    parts_->decoder.Push(*token, &state, &out);
  }
  parts_->decoder.Finish(&state, &out);
  return out;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(parts_->tokens.size()); }

std::optional<std::string_view> Tokenizer::IdToToken(int32_t id) const {
  if (id < 0 || id >= vocab_size() || !parts_->tokens[id]) return std::nullopt;
  return *parts_->tokens[id];
}

std::optional<int32_t> Tokenizer::TokenToId(std::string_view token) const {
  for (const TokenMap* map : {&parts_->added_ids, &parts_->model.vocabulary()}) {
    if (const auto found = map->find(token); found != map->end()) return found->second;
  }
  return std::nullopt;
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return std::binary_search(parts_->special_ids.begin(), parts_->special_ids.end(), id);
}

std::span<const int32_t> Tokenizer::special_ids() const { return parts_->special_ids; }

std::string Tokenizer::TokenBytes(int32_t id) const {
  const auto token = IdToToken(id);
  return token ? parts_->decoder.TokenBytes(*token) : std::string();
}

const DecodePipeline& Tokenizer::decode_pipeline() const { return parts_->decoder; }

}  // namespace stockpot
