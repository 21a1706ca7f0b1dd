// What a tensor is to its model, told from config.json and from shapes and names together. Decides
// what publish may compress and what a merge may decompose; the answer is by structure, never by a
// substring such as "proj", which misses fused QKV, fc1/fc2 and experts.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "store/tensor_source.h"

namespace stockpot {

// The facts of config.json that say something about tensors. Absent: the file does not say. (Not
// called ModelConfig: that is serve/model/config.h's, in the same namespace.)
struct StructureConfig {
  std::string model_type;
  std::optional<int64_t> vocab_size;    // top level, else of text_config
  std::optional<bool> ties_embeddings;  // tie_word_embeddings
  std::set<int64_t> expert_counts;      // num_experts, num_local_experts, n_routed_experts
};

// `json` may be empty: nothing is known. InvalidArgument: not a JSON object, or nested too deeply.
Result<StructureConfig> ParseStructureConfig(std::string_view json);

enum class TensorRole : uint8_t {
  kBlockLinear,  // the weight of a linear layer of a repeated block, [d_out, d_in]
  kTable,  // an embedding or a head: a row for every token of the vocabulary, or a lookup table
  kTransposed,     // a 2-D weight stored [d_in, d_out] (GPT-2's Conv1D)
  kRouter,         // the gate of a mixture of experts
  kOutsideBlocks,  // a 2-D weight that belongs to no repeated block
  kNotMatrix,      // norms, biases, experts stored as 3-D parameters, ...
};
std::string_view TensorRoleName(TensorRole role);  // "block_linear", "table", ...

// Immutable. Thread promise: any thread.
class ModelStructure {
 public:
  // `tensors`: of the base, any order.
  ModelStructure(StructureConfig config, const std::vector<TensorInfo>& tensors);

  TensorRole RoleOf(std::string_view name, const std::vector<int64_t>& shape) const;
  // Name of the input embedding / of the head; empty if none was recognised. A head may be known by
  // name alone (IsHeadName) where the base ties it by leaving it out.
  const std::string& embedding() const { return embedding_; }
  static bool IsHeadName(std::string_view name);
  const StructureConfig& config() const { return config_; }

 private:
  StructureConfig config_;
  std::string embedding_;
  bool transposed_ = false;  // 2-D weights are [d_in, d_out]
};

}  // namespace stockpot
