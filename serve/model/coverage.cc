#include <algorithm>
#include <unordered_map>

#include "serve/model/weights_internal.h"

namespace stockpot {
namespace {

constexpr std::array<std::string_view, kProjections> kProjectionModules = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

std::string LayerPrefix(int64_t layer) { return "model.layers." + std::to_string(layer) + "."; }

// Computed from the config, never trained: safe to leave out.
bool IsRotaryTable(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

}  // namespace

std::string InputNormName(int64_t layer) { return LayerPrefix(layer) + "input_layernorm.weight"; }

std::string PostNormName(int64_t layer) {
  return LayerPrefix(layer) + "post_attention_layernorm.weight";
}

std::string ProjectionName(int64_t layer, Projection projection, std::string_view suffix) {
  std::string name = LayerPrefix(layer);
  name += kProjectionModules[static_cast<size_t>(projection)];
  name += '.';
  name += suffix;
  return name;
}

ProjectionShape ShapeOf(const ModelConfig& config, Projection projection) {
  const int64_t q = config.heads * config.head_dim;
  const int64_t kv = config.kv_heads * config.head_dim;
  const int64_t hidden = config.hidden_size;
  const int64_t inner = config.intermediate_size;
  switch (projection) {
    case Projection::kQuery:
      return {q, hidden, config.attention_bias};
    case Projection::kKey:
    case Projection::kValue:
      return {kv, hidden, config.attention_bias};
    case Projection::kOutput:
      return {hidden, q, config.attention_bias};
    case Projection::kGate:
    case Projection::kUp:
      return {inner, hidden, config.mlp_bias};
    case Projection::kDown:
      return {hidden, inner, config.mlp_bias};
  }
  return {};
}

std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config) {
  std::vector<ExpectedTensor> expected;
  const std::vector<int64_t> vocabulary = {config.vocab_size, config.hidden_size};
  expected.push_back({std::string(kEmbeddingName), vocabulary, false});
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    expected.push_back({InputNormName(layer), {config.hidden_size}, false});
    expected.push_back({PostNormName(layer), {config.hidden_size}, false});
    for (int p = 0; p < kProjections; ++p) {
      const auto projection = static_cast<Projection>(p);
      const ProjectionShape shape = ShapeOf(config, projection);
      expected.push_back(
          {ProjectionName(layer, projection, "weight"), {shape.d_out, shape.d_in}, false});
      if (shape.has_bias) {
        expected.push_back({ProjectionName(layer, projection, "bias"), {shape.d_out}, false});
      }
    }
  }
  expected.push_back({std::string(kFinalNormName), {config.hidden_size}, false});
  expected.push_back({std::string(kHeadName), vocabulary, config.tie_embeddings});
  return expected;
}

Status CheckCoverage(const ModelConfig& config, const std::vector<TensorInfo>& tensors) {
  std::unordered_map<std::string_view, const TensorInfo*> present;
  for (const TensorInfo& tensor : tensors) present.emplace(tensor.name, &tensor);
  size_t matched = 0;
  const std::vector<ExpectedTensor> expected = ExpectedTensors(config);
  for (const ExpectedTensor& want : expected) {
    const auto it = present.find(want.name);
    if (it == present.end()) {
      if (want.optional) continue;
      return InvalidArgument("tensor '" + want.name + "' is missing");
    }
    const TensorInfo& have = *it->second;
    if (have.shape != want.shape) {
      return InvalidArgument("tensor '" + want.name + "' has shape " + ShapeText(have.shape) +
                             ", config.json makes it " + ShapeText(want.shape));
    }
    if (!IsWeightDType(have.dtype)) {
      return InvalidArgument("tensor '" + want.name + "' has dtype " +
                             std::string(DTypeName(have.dtype)) + ", not F32, F16 or BF16");
    }
    present.erase(it);
    ++matched;
  }
  if (matched == tensors.size()) return OkStatus();
  for (const TensorInfo& tensor : tensors) {  // in their order, so that the message is stable
    if (present.contains(tensor.name) && !IsRotaryTable(tensor.name)) {
      return InvalidArgument("tensor '" + tensor.name + "' is not part of a " +
                             config.architecture + " with " + std::to_string(config.layers) +
                             " layers" +
                             (tensor.name.ends_with(".bias") ? " and no bias of this kind" : ""));
    }
  }
  return OkStatus();
}

}  // namespace stockpot
