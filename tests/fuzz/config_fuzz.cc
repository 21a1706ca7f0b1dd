// config.json and generation_config.json as they come with an artifact: the two texts, with a zero
// byte between them.
#include <cmath>
#include <cstring>

#include "kernels/base/check.h"
#include "serve/model/config.h"
#include "store/model_structure.h"
#include "tests/fuzz/json_mutator.h"
#include "tests/fuzz/target.h"

namespace stockpot::fuzz {
namespace {

// Names of every kind that RoleOf tells apart.
std::vector<TensorInfo> Tensors(int64_t vocabulary) {
  return {{"model.embed_tokens.weight", DType::kBF16, {vocabulary, 8}, {}},
          {"model.layers.0.self_attn.q_proj.weight", DType::kBF16, {8, 8}, {}},
          {"model.layers.0.mlp.c_fc.weight", DType::kBF16, {8, 16}, {}},
          {"model.layers.0.mlp.c_fc.bias", DType::kBF16, {16}, {}},
          {"model.layers.0.mlp.gate.weight", DType::kBF16, {4, 8}, {}},
          {"model.norm.weight", DType::kBF16, {8}, {}},
          {"lm_head.weight", DType::kBF16, {vocabulary, 8}, {}}};
}

void CheckStructure(std::string_view text) {
  Result<StructureConfig> config = ParseStructureConfig(text);
  if (!config.ok()) {
    STOCKPOT_CHECK(config.status().code() == StatusCode::kInvalidArgument);
    return;
  }
  const std::vector<TensorInfo> tensors = Tensors(config->vocab_size.value_or(32));
  const ModelStructure structure(*std::move(config), tensors);
  for (const TensorInfo& tensor : tensors) {
    const TensorRole role = structure.RoleOf(tensor.name, tensor.shape);
    STOCKPOT_CHECK(TensorRoleName(role) != "unknown");
    if (tensor.shape.size() != 2) STOCKPOT_CHECK(role == TensorRole::kNotMatrix, tensor.name);
  }
}

// What is accepted stays within the limits that stand before memory is taken.
void CheckModelConfig(std::string_view text, std::string_view generation) {
  const Result<ModelConfig> config = ParseModelConfig(text, generation);
  if (!config.ok()) {
    STOCKPOT_CHECK(config.status().code() == StatusCode::kInvalidArgument,
                   config.status().ToString());
    return;
  }
  STOCKPOT_CHECK(config->vocab_size > 0 && config->vocab_size <= kMaxVocabulary);
  STOCKPOT_CHECK(config->hidden_size > 0 && config->hidden_size <= kMaxHiddenSize);
  STOCKPOT_CHECK(config->intermediate_size > 0 &&
                 config->intermediate_size <= kMaxIntermediateSize);
  STOCKPOT_CHECK(config->layers > 0 && config->layers <= kMaxLayers);
  STOCKPOT_CHECK(config->heads > 0 && config->heads <= kMaxHeads);
  STOCKPOT_CHECK(config->kv_heads > 0 && config->heads % config->kv_heads == 0);
  STOCKPOT_CHECK(config->head_dim > 0 && config->head_dim % 2 == 0);
  STOCKPOT_CHECK(config->max_positions > 0 && config->max_positions <= kMaxPositions);
  const std::vector<float> frequencies = RopeInverseFrequencies(*config);
  STOCKPOT_CHECK(static_cast<int64_t>(frequencies.size()) == config->head_dim / 2);
  for (const float f : frequencies) STOCKPOT_CHECK(std::isfinite(f) && f >= 0, f);
}

}  // namespace
}  // namespace stockpot::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stockpot::fuzz;
  const std::string_view text = AsText(data, size);
  const size_t split = text.find('\0');
  const std::string_view config = text.substr(0, split);
  CheckStructure(config);
  CheckModelConfig(config, split == text.npos ? "" : text.substr(split + 1));
  return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  using namespace stockpot::fuzz;
  // The first text alone, or the second alone where there is one.
  const auto* zero = static_cast<uint8_t*>(std::memchr(data, 0, size));
  const size_t first = zero == nullptr ? size : static_cast<size_t>(zero - data);
  if (zero == nullptr) return MutateJson(data, size, max_size, seed);
  if (seed % 2 == 0) {
    return first + 1 + MutateJson(data + first + 1, size - first - 1, max_size - first - 1, seed);
  }
  const std::string rest(AsText(data + first, size - first));
  const size_t changed = MutateJson(data, first, max_size - rest.size(), seed);
  std::memcpy(data + changed, rest.data(), rest.size());
  return changed + rest.size();
}
