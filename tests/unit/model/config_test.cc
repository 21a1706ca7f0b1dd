#include "serve/model/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using Json = nlohmann::json;

Json Minimal() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"vocab_size", 100},
          {"hidden_size", 64},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"intermediate_size", 96}};
}

Json With(const Json& patch) {
  Json json = Minimal();
  json.merge_patch(patch);  // null removes
  return json;
}

TEST(ModelConfig, TransformersDefaults) {
  const Result<ModelConfig> config = ParseModelConfig(Minimal().dump(), "");
  ASSERT_OK(config);
  EXPECT_EQ(config->architecture, "LlamaForCausalLM");
  EXPECT_EQ(config->kv_heads, 4);
  EXPECT_EQ(config->head_dim, 16);
  EXPECT_EQ(config->max_positions, 2048);
  EXPECT_EQ(config->rms_epsilon, 1e-6f);
  EXPECT_EQ(config->rope_theta, 10000.0);
  EXPECT_FALSE(config->rope_scaling.has_value());
  EXPECT_FALSE(config->tie_embeddings);
  EXPECT_FALSE(config->attention_bias);
  EXPECT_FALSE(config->mlp_bias);
  EXPECT_FALSE(config->bos_token.has_value());
  EXPECT_TRUE(config->eos_tokens.empty());
}

// transformers 4.57 and 5.x write the same model differently.
TEST(ModelConfig, OldAndNewKeys) {
  const Json scaling = {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 4096}};
  Json parameters = scaling;
  parameters["rope_theta"] = 500000.0;
  const Json variants[] = {
      With({{"rope_theta", 500000.0}, {"rope_scaling", scaling}, {"torch_dtype", "bfloat16"}}),
      With({{"rope_parameters", parameters}, {"dtype", "bfloat16"}}),
      With({{"rope_parameters", parameters}, {"rope_scaling", nullptr}, {"dtype", "bfloat16"}}),
  };
  for (const Json& json : variants) {
    const Result<ModelConfig> config = ParseModelConfig(json.dump(), "");
    ASSERT_OK(config);
    EXPECT_EQ(config->rope_theta, 500000.0);
    EXPECT_EQ(config->dtype, "bfloat16");
    ASSERT_TRUE(config->rope_scaling.has_value());
    EXPECT_EQ(*config->rope_scaling, (Llama3RopeScaling{8.0, 1.0, 4.0, 4096}));
  }
  const Json old_type = With({{"rope_scaling", {{"type", "default"}}}});
  EXPECT_OK(ParseModelConfig(old_type.dump(), ""));
}

TEST(ModelConfig, EndTokensOfBothFiles) {
  const std::string json = With({{"bos_token_id", 1}, {"eos_token_id", 7}}).dump();
  const Result<ModelConfig> config =
      ParseModelConfig(json, R"({"bos_token_id": 3, "eos_token_id": [9, 2, 7]})");
  ASSERT_OK(config);
  EXPECT_EQ(config->eos_tokens, (std::vector<int32_t>{2, 7, 9}));
  EXPECT_EQ(config->bos_token, 3);
}

struct Refused {
  Json patch;
  std::string names;  // must be in the message
};

TEST(ModelConfig, RefusesByName) {
  const Refused cases[] = {
      {{{"architectures", {"MambaForCausalLM"}}}, "MambaForCausalLM"},
      {{{"architectures", nullptr}}, "architectures"},
      {{{"architectures", "LlamaForCausalLM"}}, "architectures"},
      {{{"architectures", Json::array()}}, "architectures"},
      {{{"model_type", "gemma"}}, "gemma"},
      {{{"hidden_act", "gelu"}}, "gelu"},
      {{{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}}}, "yarn"},
      {{{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}}, "linear"},
      {{{"rope_parameters", {{"rope_type", "longrope"}}}}, "longrope"},
      {{{"rope_scaling", {{"rope_type", "llama3"}}}}, "factor"},
      {{{"rope_scaling", "llama3"}}, "rope_scaling"},
      {{{"rope_scaling", {{"type", "default"}}}, {"rope_parameters", {{"rope_theta", 1e4}}}},
       "rope_parameters"},
      {{{"rope_theta", 1e4}, {"rope_parameters", {{"rope_theta", 2e4}}}}, "rope_theta"},
      {{{"rope_theta", 0}}, "rope_theta"},
      {{{"rope_theta", "big"}}, "rope_theta"},
      {{{"partial_rotary_factor", 0.5}}, "partial_rotary_factor"},
      {{{"rope_parameters", {{"partial_rotary_factor", 0.5}}}}, "partial_rotary_factor"},
      {{{"quantization_config", {{"bits", 4}}}}, "quantization_config"},
      {{{"vocab_size", nullptr}}, "vocab_size is missing"},
      {{{"vocab_size", 0}}, "vocab_size"},
      {{{"vocab_size", -5}}, "vocab_size"},
      {{{"vocab_size", 1e3}}, "vocab_size"},
      {{{"vocab_size", uint64_t{1} << 63}}, "vocab_size"},
      {{{"hidden_size", int64_t{1} << 40}}, "hidden_size"},
      {{{"hidden_size", "64"}}, "hidden_size"},
      {{{"num_hidden_layers", 100000}}, "num_hidden_layers"},
      {{{"num_attention_heads", 3}}, "num_attention_heads"},
      {{{"num_key_value_heads", 3}}, "num_key_value_heads"},
      {{{"head_dim", 15}}, "head_dim"},
      {{{"head_dim", 512}}, "head_dim"},
      {{{"intermediate_size", true}}, "intermediate_size"},
      {{{"max_position_embeddings", -1}}, "max_position_embeddings"},
      {{{"rms_norm_eps", -1e-6}}, "rms_norm_eps"},
      {{{"tie_word_embeddings", 1}}, "tie_word_embeddings"},
      {{{"attention_bias", "no"}}, "attention_bias"},
      {{{"eos_token_id", 100}}, "eos_token_id"},
      {{{"eos_token_id", -1}}, "eos_token_id"},
      {{{"bos_token_id", "one"}}, "bos_token_id"},
  };
  for (const Refused& refused : cases) {
    const Result<ModelConfig> config = ParseModelConfig(With(refused.patch).dump(), "");
    ASSERT_FALSE(config.ok()) << refused.patch;
    EXPECT_EQ(config.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(config.status().message().find(refused.names), std::string::npos)
        << refused.patch << ": " << config.status().ToString();
  }
}

TEST(ModelConfig, RefusesWhatIsNoJsonObject) {
  for (const std::string text :
       {"", "{", "[]", "null", "3", "\xff\xfe", "{\"vocab_size\": NaN}", "{} trailing"}) {
    EXPECT_EQ(ParseModelConfig(text, "").status().code(), StatusCode::kInvalidArgument) << text;
    if (!text.empty()) {
      EXPECT_EQ(ParseModelConfig(Minimal().dump(), text).status().code(),
                StatusCode::kInvalidArgument)
          << text;
    }
  }
  const std::string deep(500'000, '[');
  EXPECT_EQ(ParseModelConfig(deep, "").status().code(), StatusCode::kInvalidArgument);
  const std::string huge = Minimal().dump() + std::string(kMaxConfigJsonBytes, ' ');
  EXPECT_EQ(ParseModelConfig(huge, "").status().code(), StatusCode::kInvalidArgument);
}

// HF's formulas by hand: theta 10000, head_dim 4 -> 1, 1/100; scaled by llama3 with a context of 8.
TEST(RopeInverseFrequencies, PlainAndLlama3) {
  ModelConfig config;
  config.head_dim = 4;
  config.rope_theta = 10000;
  EXPECT_EQ(RopeInverseFrequencies(config), (std::vector<float>{1.0f, 0.01f}));
  // Wavelengths 2 pi and 200 pi; low 8 / 1, high 8 / 4 = 2: the first is between, the second
  // beyond.
  config.rope_scaling = Llama3RopeScaling{8.0, 1.0, 4.0, 8};
  const std::vector<float> scaled = RopeInverseFrequencies(config);
  const double smooth = (8 / (2 * 3.14159265358979) - 1) / 3;
  EXPECT_NEAR(scaled[0], (1 - smooth) / 8 + smooth, 1e-6);
  EXPECT_FLOAT_EQ(scaled[1], 0.01f / 8);
}

}  // namespace
}  // namespace stockpot
