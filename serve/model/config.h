// What config.json and generation_config.json say about a model, checked before a byte of weights
// is read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"

namespace stockpot {

// Limits of what a config may claim; a tensor of the claimed shape must exist before memory is
// taken.
inline constexpr int64_t kMaxConfigJsonBytes = int64_t{1} << 20;
inline constexpr int64_t kMaxVocabulary = int64_t{1} << 22;  // tokens
inline constexpr int64_t kMaxHiddenSize = int64_t{1} << 16;  // elements
inline constexpr int64_t kMaxIntermediateSize = int64_t{1} << 19;
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxHeads = 1024;
inline constexpr int64_t kMaxPositions = int64_t{1} << 24;  // positions are exact in float32

// rope_type "llama3" (HF modeling_rope_utils.py); absent: plain RoPE.
struct Llama3RopeScaling {
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_positions = 8192;

  bool operator==(const Llama3RopeScaling&) const = default;
};

struct ModelConfig {
  std::string architecture;  // "LlamaForCausalLM"
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads
  int64_t head_dim = 0;  // even, at most kMaxHeadDim (kernels/transformer/ops.h)
  int64_t intermediate_size = 0;
  int64_t max_positions = 0;
  float rms_epsilon = 1e-6f;
  double rope_theta = 10000.0;
  std::optional<Llama3RopeScaling> rope_scaling;
  bool tie_embeddings = false;
  bool attention_bias = false;
  bool mlp_bias = false;
  std::optional<int32_t> bos_token;
  std::vector<int32_t> eos_tokens;  // config.json and generation_config.json together
  std::string dtype;                // torch_dtype / dtype as written, for display
};

// Reads config.json as transformers 4.x and 5.x write it (torch_dtype or dtype; rope_theta beside
// rope_scaling, or both in rope_parameters). `generation_config_json` may be empty.
// InvalidArgument names the field: an unknown architecture, activation or rope type, a quantised
// model and a partial rotary embedding are refused by name; sizes must be positive and within the
// limits.
Result<ModelConfig> ParseModelConfig(std::string_view config_json,
                                     std::string_view generation_config_json);

// Inverse frequencies [head_dim / 2] of RoPE, scaled as the config says, computed as HF does.
std::vector<float> RopeInverseFrequencies(const ModelConfig& config);

}  // namespace stockpot
