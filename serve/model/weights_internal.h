// How loaded weights lie in memory: for the loaders and the transformer only.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/view.h"
#include "kernels/bitdelta/linear.h"
#include "kernels/lora/lora_linear.h"
#include "kernels/sparse/sparse_delta.h"
#include "serve/model/weights.h"

namespace stockpot {

// Checkpoint names of the Llama architecture.
inline constexpr std::string_view kEmbeddingName = "model.embed_tokens.weight";
inline constexpr std::string_view kHeadName = "lm_head.weight";
inline constexpr std::string_view kFinalNormName = "model.norm.weight";
std::string InputNormName(int64_t layer);
std::string PostNormName(int64_t layer);
std::string ProjectionName(int64_t layer, Projection projection, std::string_view suffix);

struct ProjectionShape {
  int64_t d_out = 0;
  int64_t d_in = 0;
  bool has_bias = false;
};
ProjectionShape ShapeOf(const ModelConfig& config, Projection projection);

// Owns weights; what it hands out lives as long as it does and does not move.
class WeightStorage {
 public:
  // Reads bytes [offset, offset + out.size()) of one tensor.
  using Reader = std::function<Status(int64_t offset, std::span<std::byte> out)>;

  // A matrix in its own dtype, every row on a cache line. InvalidArgument for NaN and Inf.
  Result<WeightMatrix> ReadMatrix(DType dtype, int64_t rows, int64_t cols, const Reader& read);
  // A vector as float32 (exact for the 16-bit types). InvalidArgument for NaN and Inf.
  Result<const float*> ReadVector(DType dtype, int64_t size, const Reader& read);
  // Sign bits and scales of one or more planes, packed for the kernel.
  struct SignPlane {
    Reader signs;
    Reader alpha;
  };
  Result<const PackedSigns*> ReadSigns(int64_t d_out, int64_t d_in,
                                       std::span<const SignPlane> planes);
  const WeightMatrix* Keep(const WeightMatrix& view);  // a view with a stable address
  const LoraDelta* Keep(LoraDelta delta);
  const SparseDelta* Keep(SparseDelta delta);

  int64_t bytes() const { return bytes_; }

 private:
  Result<std::byte*> Allocate(int64_t bytes);

  std::vector<std::unique_ptr<std::byte, void (*)(std::byte*)>> blocks_;
  std::deque<PackedSigns> signs_;
  std::deque<LoraDelta> loras_;
  std::deque<SparseDelta> sparse_;
  std::deque<WeightMatrix> views_;
  int64_t bytes_ = 0;
};

// What one linear layer of a variant is beside the base's.
struct LinearView {
  LayerDelta delta;                     // 1-bit planes, or a weight of its own
  const SparseDelta* sparse = nullptr;  // changed elements; null: none
  const LoraDelta* lora = nullptr;      // an adapter's factors, or a residual's; null: none
};

// What a row of the batch reads beside the base's matrices: the base's own norms with no deltas, or
// a variant's.
struct DecoderLayerView {
  std::array<LinearView, kProjections> linear{};
  const float* input_norm = nullptr;  // [hidden]
  const float* post_norm = nullptr;   // [hidden]
};

struct DecoderView {
  WeightMatrix embeddings;                       // [its vocab, hidden]
  const PackedSigns* embedding_signs = nullptr;  // [vocab, hidden], added to a row that is looked
                                                 // up; null: none
  std::vector<DecoderLayerView> layers;
  const float* final_norm = nullptr;  // [hidden]
  LinearView head;                    // over the base's head
  const WeightMatrix* own_head = nullptr;  // in its place, where the vocabulary has another size
  std::vector<float> inv_freq;        // [head_dim / 2]
  float rms_epsilon = 0;
  int64_t max_positions = 0;
};

struct BaseModel::Tensors {
  struct Layer {
    std::array<WeightMatrix, kProjections> weight{};
    std::array<const float*, kProjections> bias{};  // null: none
  };

  Digest digest;
  ModelConfig config;
  std::string config_json;  // for variants without files of their own
  std::string generation_config_json;
  std::vector<Layer> layers;
  WeightMatrix head;  // [vocab, hidden]; the embeddings where tied
  DecoderView view;
  WeightStorage storage;
};

struct VariantModel::Tensors {
  Digest digest;
  std::shared_ptr<const BaseModel> base;
  ModelConfig config;
  DecoderView view;
  WeightStorage storage;
  int64_t read_bytes = 0;
};

// VariantModel::Load of an adapter (serve/model/adapter_model.cc); `tensors` has its base and digest.
Status LoadAdapter(VariantModel::Tensors& tensors, const CheckpointStore& store,
                   const Manifest& manifest);

}  // namespace stockpot
