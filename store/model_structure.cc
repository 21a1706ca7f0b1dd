#include "store/model_structure.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>

namespace stockpot {
namespace {

constexpr int kMaxConfigDepth = 64;

// Last two components of the usual input embeddings and heads.
constexpr std::array<std::string_view, 8> kEmbeddingNames = {
    "embed_tokens.weight",   "wte.weight",    "embed_in.weight",        "word_embeddings.weight",
    "tok_embeddings.weight", "shared.weight", "token_embedding.weight", "tokens_embed.weight"};
constexpr std::array<std::string_view, 3> kHeadNames = {"lm_head.weight", "embed_out.weight",
                                                        "output.weight"};
// Model types whose linear layers are Conv1D: also where a square weight would not show it.
constexpr std::array<std::string_view, 4> kConv1dModels = {"gpt2", "openai-gpt", "imagegpt",
                                                           "decision_transformer"};

// "a.b.weight" ends with the components "b.weight": true; "ab.weight": false.
bool EndsWithComponents(std::string_view name, std::string_view end) {
  return name.ends_with(end) &&
         (name.size() == end.size() || name[name.size() - end.size() - 1] == '.');
}

// "model.layers.3.mlp": a component that is a number is the index of a repeated block.
bool IsInBlock(std::string_view name) {
  size_t begin = 0;
  while (begin <= name.size()) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (!part.empty() &&
        std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; })) {
      return true;
    }
    begin = end + 1;
  }
  return false;
}

// The module that holds the parameter: "model.embed_tokens.weight" -> "embed_tokens".
std::string_view ModuleName(std::string_view name) {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {};
  const std::string_view path = name.substr(0, dot);
  const size_t before = path.rfind('.');
  return before == std::string_view::npos ? path : path.substr(before + 1);
}

// torch.nn.Embedding by the names it goes by inside blocks (T5's relative_attention_bias is one):
// such a table is looked up, not multiplied. Only ever keeps a tensor exact.
bool IsEmbeddingModule(std::string_view module) {
  return module.find("embed") != std::string_view::npos || module == "relative_attention_bias";
}

// A bias as long as the weight's columns, and not as its rows, shows [d_in, d_out].
bool ShowsTransposedWeights(const std::vector<TensorInfo>& tensors) {
  std::map<std::string_view, int64_t> bias_length;
  for (const TensorInfo& tensor : tensors) {
    const std::string_view name = tensor.name;
    if (tensor.shape.size() == 1 && name.ends_with(".bias")) {
      bias_length[name.substr(0, name.size() - 5)] = tensor.shape[0];
    }
  }
  for (const TensorInfo& tensor : tensors) {
    const std::string_view name = tensor.name;
    if (tensor.shape.size() != 2 || !name.ends_with(".weight") || !IsInBlock(name)) continue;
    const auto bias = bias_length.find(name.substr(0, name.size() - 7));
    if (bias != bias_length.end() && bias->second == tensor.shape[1] &&
        bias->second != tensor.shape[0]) {
      return true;
    }
  }
  return false;
}

std::optional<int64_t> IntegerAt(const nlohmann::json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number_integer()) return std::nullopt;
  return it->get<int64_t>();
}

// Fills what `object` says; what is known already stays.
void Collect(const nlohmann::json& object, StructureConfig& config) {
  if (!config.vocab_size) config.vocab_size = IntegerAt(object, "vocab_size");
  const auto tie = object.find("tie_word_embeddings");
  if (!config.ties_embeddings && tie != object.end() && tie->is_boolean()) {
    config.ties_embeddings = tie->get<bool>();
  }
  const auto type = object.find("model_type");
  if (config.model_type.empty() && type != object.end() && type->is_string()) {
    config.model_type = type->get<std::string>();
  }
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (const std::optional<int64_t> n = IntegerAt(object, key)) config.expert_counts.insert(*n);
  }
}

}  // namespace

Result<StructureConfig> ParseStructureConfig(std::string_view json) {
  StructureConfig config;
  if (json.empty()) return config;
  bool too_deep = false;
  const auto limit_depth = [&too_deep](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    too_deep |= depth > kMaxConfigDepth;
    return depth <= kMaxConfigDepth;  // false: not kept, so depth costs no memory
  };
  const nlohmann::json object =
      nlohmann::json::parse(json.begin(), json.end(), limit_depth, /*allow_exceptions=*/false);
  if (too_deep) return InvalidArgument("config.json is nested too deeply");
  if (!object.is_object()) return InvalidArgument("config.json is not a JSON object");
  Collect(object, config);
  const auto text = object.find("text_config");
  if (text != object.end() && text->is_object()) Collect(*text, config);
  return config;
}

std::string_view TensorRoleName(TensorRole role) {
  switch (role) {
    case TensorRole::kBlockLinear:
      return "block_linear";
    case TensorRole::kTable:
      return "table";
    case TensorRole::kTransposed:
      return "transposed";
    case TensorRole::kRouter:
      return "router";
    case TensorRole::kOutsideBlocks:
      return "outside_blocks";
    case TensorRole::kNotMatrix:
      return "not_matrix";
  }
  return "unknown";
}

ModelStructure::ModelStructure(StructureConfig config, const std::vector<TensorInfo>& tensors)
    : config_(std::move(config)) {
  for (const TensorInfo& tensor : tensors) {
    if (tensor.shape.size() != 2 || IsInBlock(tensor.name)) continue;
    const bool known =
        std::any_of(kEmbeddingNames.begin(), kEmbeddingNames.end(),
                    [&](std::string_view end) { return EndsWithComponents(tensor.name, end); });
    if (known && (!config_.vocab_size || tensor.shape[0] >= *config_.vocab_size)) {
      embedding_ = tensor.name;
      break;
    }
  }
  transposed_ = std::find(kConv1dModels.begin(), kConv1dModels.end(), config_.model_type) !=
                    kConv1dModels.end() ||
                ShowsTransposedWeights(tensors);
}

bool ModelStructure::IsHeadName(std::string_view name) {
  return !IsInBlock(name) &&
         std::any_of(kHeadNames.begin(), kHeadNames.end(),
                     [&](std::string_view end) { return EndsWithComponents(name, end); });
}

TensorRole ModelStructure::RoleOf(std::string_view name, const std::vector<int64_t>& shape) const {
  if (shape.size() != 2 || !name.ends_with(".weight")) return TensorRole::kNotMatrix;
  if (IsEmbeddingModule(ModuleName(name)) || name == embedding_ || IsHeadName(name)) {
    return TensorRole::kTable;
  }
  const bool vocabulary_rows = config_.vocab_size && shape[0] == *config_.vocab_size;
  if (!IsInBlock(name)) {
    return vocabulary_rows ? TensorRole::kTable : TensorRole::kOutsideBlocks;
  }
  // As many rows as the vocabulary: a head of its own (one for each block), unless the embedding is
  // known by name, and this is a layer that happens to be as wide.
  if (vocabulary_rows && embedding_.empty()) return TensorRole::kTable;
  // One row for each expert, or one for the shared expert.
  if (config_.expert_counts.contains(shape[0]) ||
      (!config_.expert_counts.empty() && shape[0] == 1)) {
    return TensorRole::kRouter;
  }
  return transposed_ ? TensorRole::kTransposed : TensorRole::kBlockLinear;
}

}  // namespace stockpot
