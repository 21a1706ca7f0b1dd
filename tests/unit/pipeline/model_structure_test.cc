#include "store/model_structure.h"

#include <gtest/gtest.h>

namespace stockpot {
namespace {

TensorInfo Info(const std::string& name, std::vector<int64_t> shape) {
  return {name, DType::kBF16, std::move(shape), ""};
}

ModelStructure Structure(const std::string& config, const std::vector<TensorInfo>& tensors) {
  return ModelStructure(ParseStructureConfig(config).value(), tensors);
}

TEST(ModelStructureTest, RolesOfTheUsualModels) {
  struct Row {
    const char* config;
    std::vector<TensorInfo> tensors;  // the first is asked for
    TensorRole role;
  };
  const TensorInfo embed = Info("model.embed_tokens.weight", {100, 16});
  const std::vector<Row> table = {
      {R"({"vocab_size":100})", {embed}, TensorRole::kTable},
      {R"({"vocab_size":100})", {Info("lm_head.weight", {100, 16}), embed}, TensorRole::kTable},
      {"", {Info("lm_head.weight", {100, 16}), embed}, TensorRole::kTable},
      {R"({"vocab_size":100})", {Info("decoder.out.weight", {100, 16})}, TensorRole::kTable},
      {R"({"text_config":{"vocab_size":100}})",
       {Info("x.y.weight", {100, 16})},
       TensorRole::kTable},
      {R"({"vocab_size":100})", {Info("medusa.0.1.weight", {100, 16})}, TensorRole::kTable},
      // As wide as the vocabulary by chance: the embedding is known, so this is a layer.
      {R"({"vocab_size":100})",
       {Info("model.layers.0.mlp.up_proj.weight", {100, 16}), embed},
       TensorRole::kBlockLinear},
      // Fused and oddly named layers: no name matters but ".weight" and the block's number.
      {"",
       {Info("gpt_neox.layers.3.attention.query_key_value.weight", {48, 16})},
       TensorRole::kBlockLinear},
      {"", {Info("model.decoder.layers.0.fc1.weight", {64, 16})}, TensorRole::kBlockLinear},
      {"", {Info("model.layers.11.mlp.gate_up.weight", {64, 16})}, TensorRole::kBlockLinear},
      {"", {Info("h.7.W.weight", {3, 5})}, TensorRole::kBlockLinear},
      {"",
       {Info("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", {32, 8})},
       TensorRole::kTable},
      {"", {Info("visual.merger.weight", {32, 8})}, TensorRole::kOutsideBlocks},
      {"", {Info("model.layers.0.input_layernorm.weight", {16})}, TensorRole::kNotMatrix},
      {"", {Info("model.layers.0.self_attn.q_proj.bias", {16})}, TensorRole::kNotMatrix},
      {"", {Info("model.layers.0.mlp.experts.gate_up_proj", {8, 64, 16})}, TensorRole::kNotMatrix},
      {"", {Info("model.layers.0.experts.weight", {8, 64, 16})}, TensorRole::kNotMatrix},
      {R"({"num_local_experts":8})",
       {Info("model.layers.0.block_sparse_moe.gate.weight", {8, 16})},
       TensorRole::kRouter},
      {R"({"num_experts":8})",
       {Info("model.layers.0.mlp.shared_expert_gate.weight", {1, 16})},
       TensorRole::kRouter},
      {R"({"num_experts":8})",
       {Info("model.layers.0.mlp.experts.3.w1.weight", {64, 16})},
       TensorRole::kBlockLinear},
      {R"({"model_type":"gpt2"})",
       {Info("h.0.attn.c_proj.weight", {16, 16})},
       TensorRole::kTransposed},
      // Conv1D told by shapes alone: one oblong weight whose bias has the columns' length.
      {"",
       {Info("h.0.attn.c_proj.weight", {16, 16}), Info("h.0.attn.c_attn.weight", {16, 48}),
        Info("h.0.attn.c_attn.bias", {48})},
       TensorRole::kTransposed},
      {"",
       {Info("h.0.attn.c_attn.weight", {48, 16}), Info("h.0.attn.c_attn.bias", {48})},
       TensorRole::kBlockLinear},
  };
  for (const Row& row : table) {
    const TensorInfo& asked = row.tensors.front();
    const TensorRole role = Structure(row.config, row.tensors).RoleOf(asked.name, asked.shape);
    EXPECT_EQ(role, row.role) << asked.name << ": " << TensorRoleName(role);
  }
}

TEST(ModelStructureTest, Config) {
  const auto config = ParseStructureConfig(
      R"({"model_type":"m","vocab_size":7,"tie_word_embeddings":true,"num_experts":4})");
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->model_type, "m");
  EXPECT_EQ(config->vocab_size, 7);
  EXPECT_EQ(config->ties_embeddings, true);
  EXPECT_EQ(config->expert_counts, std::set<int64_t>{4});
  EXPECT_FALSE(ParseStructureConfig("")->ties_embeddings.has_value());
  EXPECT_FALSE(ParseStructureConfig(R"({"vocab_size":"x"})")->vocab_size.has_value());
  EXPECT_FALSE(ParseStructureConfig("[]").ok());
  EXPECT_FALSE(ParseStructureConfig("{").ok());
  EXPECT_FALSE(
      ParseStructureConfig("{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}").ok());
  EXPECT_FALSE(ParseStructureConfig(std::string(1'000'000, '[')).ok());
}

}  // namespace
}  // namespace stockpot
