// A LoRA adapter as PEFT writes it: adapter_config.json and, for each adapted linear layer, the
// factors "base_model.model.<layer>.lora_A.weight" [r, d_in] and "...lora_B.weight" [d_out, r], so
// that y = W x + scale * B (A x).
//
// Only what is understood is accepted: a field of the configuration that changes the arithmetic in
// another way (DoRA, trained biases, replicated layers, an initialisation that changes the base),
// or that this version does not know and that says more than null, false or nothing, refuses the
// adapter by name. Fields about training alone are passed over.
//
// Source: Hu et al., LoRA (arXiv 2106.09685); Kalajdzievski, rsLoRA (arXiv 2312.03732); PEFT's
// LoraConfig.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "store/manifest.h"
#include "store/tensor_source.h"

namespace stockpot {

inline constexpr std::string_view kAdapterConfigFile = "adapter_config.json";

struct LoraModule {
  std::string weight;  // the base's: "model.layers.0.self_attn.q_proj.weight"
  std::string a;       // names of the adapter's tensors
  std::string b;
  int64_t rank = 0;
  float scale = 0;  // alpha / r; rsLoRA: alpha / sqrt(r)
};

struct LoraAdapter {
  std::vector<LoraModule> modules;  // by weight
};

// `tensors` of the adapter; `base`: the manifest of the model it was trained over. InvalidArgument
// names the field or the tensor: no LoRA, a factor without its partner, a layer that the base does
// not have or has in another shape, a rank that is not the configuration's, a tensor that is no
// factor.
Result<LoraAdapter> ParseLoraAdapter(std::string_view config_json,
                                     const std::vector<TensorInfo>& tensors, const Manifest& base);

}  // namespace stockpot
