#include "serve/model/config.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "kernels/transformer/ops.h"

namespace stockpot {
namespace {

using Json = nlohmann::json;

Result<Json> ParseObject(std::string_view text, std::string_view file) {
  if (static_cast<int64_t>(text.size()) > kMaxConfigJsonBytes) {
    return InvalidArgument(std::string(file) + " is larger than 1 MiB");
  }
  Json json = Json::parse(text, /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return InvalidArgument(std::string(file) + " is not a JSON object");
  return json;
}

// Typed access to the fields of one JSON object; a field that is null counts as absent.
class Fields {
 public:
  Fields(const Json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  const Json* Find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  Status Wrong(const char* key, const std::string& why) const {
    return InvalidArgument(prefix_ + key + " " + why);
  }

  // An integer in [1, max]; `fallback` where the field is absent (0: it must be there).
  Result<int64_t> Size(const char* key, int64_t max, int64_t fallback = 0) const {
    const Json* value = Find(key);
    if (value == nullptr) {
      if (fallback > 0) return fallback;
      return Wrong(key, "is missing");
    }
    if (!value->is_number_integer()) return Wrong(key, "is not an integer");
    const bool huge = value->is_number_unsigned() &&
                      value->get<uint64_t>() > static_cast<uint64_t>(kMaxConfigInteger);
    const int64_t n = huge ? kMaxConfigInteger : value->get<int64_t>();
    if (n < 1 || n > max) {
      return Wrong(key, "is " + value->dump() + ", not in 1.." + std::to_string(max));
    }
    return n;
  }

  // A finite number greater than zero.
  Result<double> Positive(const char* key, std::optional<double> fallback) const {
    const Json* value = Find(key);
    if (value == nullptr) {
      if (fallback) return *fallback;
      return Wrong(key, "is missing");
    }
    if (!value->is_number()) return Wrong(key, "is not a number");
    const double number = value->get<double>();
    if (!std::isfinite(number) || number <= 0) return Wrong(key, "is not a positive number");
    return number;
  }

  Result<bool> Flag(const char* key, bool fallback) const {
    const Json* value = Find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) return Wrong(key, "is not true or false");
    return value->get<bool>();
  }

  Result<std::string> Text(const char* key, std::string fallback) const {
    const Json* value = Find(key);
    if (value == nullptr) return fallback;
    if (!value->is_string()) return Wrong(key, "is not a string");
    return value->get<std::string>();
  }

  // One token id or a list of them; absent: none.
  Result<std::vector<int32_t>> Tokens(const char* key, int64_t vocab_size) const {
    std::vector<int32_t> tokens;
    const Json* value = Find(key);
    if (value == nullptr) return tokens;
    const Json list = value->is_array() ? *value : Json::array({*value});
    for (const Json& item : list) {
      // Unsigned covers every non-negative literal.
      if (!item.is_number_unsigned() || item.get<uint64_t>() >= static_cast<uint64_t>(vocab_size)) {
        return Wrong(key, "holds " + item.dump() + ", not a token id below vocab_size");
      }
      tokens.push_back(item.get<int32_t>());
    }
    return tokens;
  }

 private:
  static constexpr int64_t kMaxConfigInteger = INT64_MAX;
  const Json& object_;
  std::string prefix_;
};

// What would change the arithmetic and is not implemented: refused, never ignored.
Status CheckArchitecture(const Fields& fields, ModelConfig& config) {
  const Json* list = fields.Find("architectures");
  if (list == nullptr || !list->is_array() || list->size() != 1 || !(*list)[0].is_string()) {
    return fields.Wrong("architectures", "must be a list of one name");
  }
  config.architecture = (*list)[0].get<std::string>();
  if (config.architecture != "LlamaForCausalLM") {
    return InvalidArgument("architecture '" + config.architecture +
                           "' is not supported (LlamaForCausalLM is)");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::string type, fields.Text("model_type", "llama"));
  if (type != "llama") return fields.Wrong("model_type", "is '" + type + "', not 'llama'");
  STOCKPOT_ASSIGN_OR_RETURN(const std::string activation, fields.Text("hidden_act", "silu"));
  if (activation != "silu") {
    return InvalidArgument("activation '" + activation +
                           "' (hidden_act) is not supported (silu is)");
  }
  if (fields.Find("quantization_config") != nullptr) {
    return fields.Wrong("quantization_config", "is present: quantised weights are not supported");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const double partial, fields.Positive("partial_rotary_factor", 1.0));
  if (partial != 1.0) return fields.Wrong("partial_rotary_factor", "other than 1 is not supported");
  return OkStatus();
}

Status ParseSizes(const Fields& fields, ModelConfig& config) {
  STOCKPOT_ASSIGN_OR_RETURN(config.vocab_size, fields.Size("vocab_size", kMaxVocabulary));
  STOCKPOT_ASSIGN_OR_RETURN(config.hidden_size, fields.Size("hidden_size", kMaxHiddenSize));
  STOCKPOT_ASSIGN_OR_RETURN(config.layers, fields.Size("num_hidden_layers", kMaxLayers));
  STOCKPOT_ASSIGN_OR_RETURN(config.heads, fields.Size("num_attention_heads", kMaxHeads));
  STOCKPOT_ASSIGN_OR_RETURN(config.kv_heads,
                            fields.Size("num_key_value_heads", kMaxHeads, config.heads));
  STOCKPOT_ASSIGN_OR_RETURN(config.intermediate_size,
                            fields.Size("intermediate_size", kMaxIntermediateSize));
  STOCKPOT_ASSIGN_OR_RETURN(config.max_positions,
                            fields.Size("max_position_embeddings", kMaxPositions, 2048));
  if (config.heads % config.kv_heads != 0) {
    return fields.Wrong("num_key_value_heads", "does not divide num_attention_heads");
  }
  if (fields.Find("head_dim") == nullptr && config.hidden_size % config.heads != 0) {
    return fields.Wrong("num_attention_heads",
                        "does not divide hidden_size, and there is no head_dim");
  }
  STOCKPOT_ASSIGN_OR_RETURN(config.head_dim,
                            fields.Size("head_dim", kMaxHeadDim,
                                        std::max<int64_t>(1, config.hidden_size / config.heads)));
  if (config.head_dim > kMaxHeadDim) {
    return fields.Wrong("head_dim", "is larger than " + std::to_string(kMaxHeadDim));
  }
  if (config.head_dim % 2 != 0) return fields.Wrong("head_dim", "is odd");
  return OkStatus();
}

Status ParseLlama3Scaling(const Fields& fields, ModelConfig& config) {
  Llama3RopeScaling scaling;
  STOCKPOT_ASSIGN_OR_RETURN(scaling.factor, fields.Positive("factor", {}));
  STOCKPOT_ASSIGN_OR_RETURN(scaling.low_freq_factor, fields.Positive("low_freq_factor", {}));
  STOCKPOT_ASSIGN_OR_RETURN(scaling.high_freq_factor, fields.Positive("high_freq_factor", {}));
  STOCKPOT_ASSIGN_OR_RETURN(scaling.original_max_positions,
                            fields.Size("original_max_position_embeddings", kMaxPositions));
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    return fields.Wrong("high_freq_factor", "is not above low_freq_factor");
  }
  config.rope_scaling = scaling;
  return OkStatus();
}

// transformers 4.x: rope_theta and rope_scaling {"rope_type" or "type", ...}; 5.x: rope_parameters
// {"rope_theta", "rope_type", ...}. Both at once would leave open which one counts.
Status ParseRope(const Fields& fields, ModelConfig& config) {
  const Json* parameters = fields.Find("rope_parameters");
  const Json* scaling = fields.Find("rope_scaling");
  if (parameters != nullptr && scaling != nullptr) {
    return fields.Wrong("rope_scaling", "stands beside rope_parameters");
  }
  STOCKPOT_ASSIGN_OR_RETURN(config.rope_theta, fields.Positive("rope_theta", 10000.0));
  const char* key = parameters != nullptr ? "rope_parameters" : "rope_scaling";
  const Json* rope = parameters != nullptr ? parameters : scaling;
  if (rope == nullptr) return OkStatus();
  if (!rope->is_object()) return fields.Wrong(key, "is not an object");
  const Fields inner(*rope, std::string("config.json: ") + key + ".");
  if (parameters != nullptr && inner.Find("rope_theta") != nullptr) {
    STOCKPOT_ASSIGN_OR_RETURN(const double theta, inner.Positive("rope_theta", {}));
    if (fields.Find("rope_theta") != nullptr && theta != config.rope_theta) {
      return fields.Wrong("rope_theta", "differs from rope_parameters.rope_theta");
    }
    config.rope_theta = theta;
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::string old_type, inner.Text("type", "default"));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string type, inner.Text("rope_type", old_type));
  STOCKPOT_ASSIGN_OR_RETURN(const double partial, inner.Positive("partial_rotary_factor", 1.0));
  if (partial != 1.0) return inner.Wrong("partial_rotary_factor", "other than 1 is not supported");
  if (type == "default") return OkStatus();
  if (type == "llama3") return ParseLlama3Scaling(inner, config);
  return InvalidArgument("rope type '" + type + "' (" + key +
                         ") is not supported (default and llama3 are)");
}

Status ParseTokens(const Fields& config_fields, const Fields* generation, ModelConfig& config) {
  STOCKPOT_ASSIGN_OR_RETURN(std::vector<int32_t> bos,
                            config_fields.Tokens("bos_token_id", config.vocab_size));
  STOCKPOT_ASSIGN_OR_RETURN(config.eos_tokens,
                            config_fields.Tokens("eos_token_id", config.vocab_size));
  if (generation != nullptr) {
    STOCKPOT_ASSIGN_OR_RETURN(const std::vector<int32_t> more,
                              generation->Tokens("eos_token_id", config.vocab_size));
    config.eos_tokens.insert(config.eos_tokens.end(), more.begin(), more.end());
    STOCKPOT_ASSIGN_OR_RETURN(const std::vector<int32_t> own,
                              generation->Tokens("bos_token_id", config.vocab_size));
    if (!own.empty()) bos = own;
  }
  if (!bos.empty()) config.bos_token = bos.front();
  std::sort(config.eos_tokens.begin(), config.eos_tokens.end());
  config.eos_tokens.erase(std::unique(config.eos_tokens.begin(), config.eos_tokens.end()),
                          config.eos_tokens.end());
  return OkStatus();
}

}  // namespace

Result<ModelConfig> ParseModelConfig(std::string_view config_json,
                                     std::string_view generation_config_json) {
  STOCKPOT_ASSIGN_OR_RETURN(const Json json, ParseObject(config_json, "config.json"));
  const Fields fields(json, "config.json: ");
  ModelConfig config;
  STOCKPOT_RETURN_IF_ERROR(CheckArchitecture(fields, config));
  STOCKPOT_RETURN_IF_ERROR(ParseSizes(fields, config));
  STOCKPOT_RETURN_IF_ERROR(ParseRope(fields, config));
  STOCKPOT_ASSIGN_OR_RETURN(const double epsilon, fields.Positive("rms_norm_eps", 1e-6));
  config.rms_epsilon = static_cast<float>(epsilon);
  STOCKPOT_ASSIGN_OR_RETURN(config.tie_embeddings, fields.Flag("tie_word_embeddings", false));
  STOCKPOT_ASSIGN_OR_RETURN(config.attention_bias, fields.Flag("attention_bias", false));
  STOCKPOT_ASSIGN_OR_RETURN(config.mlp_bias, fields.Flag("mlp_bias", false));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string old_dtype, fields.Text("torch_dtype", ""));
  STOCKPOT_ASSIGN_OR_RETURN(config.dtype, fields.Text("dtype", old_dtype));
  if (generation_config_json.empty()) {
    STOCKPOT_RETURN_IF_ERROR(ParseTokens(fields, nullptr, config));
    return config;
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Json generation,
                            ParseObject(generation_config_json, "generation_config.json"));
  const Fields generation_fields(generation, "generation_config.json: ");
  STOCKPOT_RETURN_IF_ERROR(ParseTokens(fields, &generation_fields, config));
  return config;
}

// modeling_rope_utils.py: _compute_default_rope_parameters and _compute_llama3_parameters, in
// float32 where torch computes in float32, so that angles agree to the last bit or nearly.
std::vector<float> RopeInverseFrequencies(const ModelConfig& config) {
  std::vector<float> frequencies(static_cast<size_t>(config.head_dim / 2));
  const float theta = static_cast<float>(config.rope_theta);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.head_dim);
    frequencies[i] = 1.0f / std::pow(theta, exponent);
  }
  if (!config.rope_scaling) return frequencies;

  const Llama3RopeScaling& scaling = *config.rope_scaling;
  const float factor = static_cast<float>(scaling.factor);
  const double context = static_cast<double>(scaling.original_max_positions);
  const float low_wavelength = static_cast<float>(context / scaling.low_freq_factor);
  const float high_wavelength = static_cast<float>(context / scaling.high_freq_factor);
  for (float& frequency : frequencies) {
    const float wavelength = static_cast<float>(2 * std::numbers::pi) / frequency;
    if (wavelength < high_wavelength) continue;
    if (wavelength > low_wavelength) {
      frequency /= factor;
      continue;
    }
    const float smooth =
        (static_cast<float>(context) / wavelength - static_cast<float>(scaling.low_freq_factor)) /
        static_cast<float>(scaling.high_freq_factor - scaling.low_freq_factor);
    frequency = (1.0f - smooth) * frequency / factor + smooth * frequency;
  }
  return frequencies;
}

}  // namespace stockpot
