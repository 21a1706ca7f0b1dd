// The one resident base and the variants over it. Both are immutable once loaded, so any number of
// threads may read them; nothing is ever written in place.
//
// Nothing is assumed that a checkpoint does not say: a tensor that is missing, extra, of another
// shape, of a dtype without arithmetic or with a NaN or an infinity refuses the whole model, by
// name.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/bitdelta/linear.h"
#include "serve/model/config.h"
#include "store/checkpoint_store.h"
#include "store/tensor_source.h"

namespace stockpot {

// The linear layers of a decoder block, by position; names as in HF Llama checkpoints.
enum class Projection : uint8_t { kQuery, kKey, kValue, kOutput, kGate, kUp, kDown };
inline constexpr int kProjections = 7;

// Tensors of the architecture, by their checkpoint name: the coverage list that loading checks.
struct ExpectedTensor {
  std::string name;
  std::vector<int64_t> shape;
  bool optional = false;  // lm_head.weight where embeddings are tied
};
std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config);

// Every expected tensor is there with its shape and a weight dtype, and nothing else is, but for
// the rotary tables (`*.rotary_emb.inv_freq`) that old checkpoints carry. InvalidArgument names the
// tensor.
Status CheckCoverage(const ModelConfig& config, const std::vector<TensorInfo>& tensors);

class BaseModel {
 public:
  // Reads every tensor of the architecture in its own dtype (BF16, F16 or F32, kept as it is).
  // InvalidArgument names a missing, extra or mis-shaped tensor, one with NaN or Inf, or an lm_head
  // that differs from the embeddings though config.json ties them. ResourceExhausted: memory.
  static Result<std::shared_ptr<const BaseModel>> Load(const Digest& digest,
                                                       const TensorSource& source);
  ~BaseModel();

  const Digest& digest() const;
  const ModelConfig& config() const;
  int64_t resident_bytes() const;

  struct Tensors;  // for the transformer and the variant loader (serve/model/weights_internal.h)
  const Tensors& tensors() const { return *tensors_; }

 private:
  BaseModel();
  std::unique_ptr<Tensors> tensors_;
};

class VariantModel {
 public:
  // Loads an artifact of kind variant or adapter over `base`, reading only what differs. A LoRA
  // adapter (store/lora_adapter.h) has the base's configuration, embeddings and norms, and factors
  // for the linear layers of blocks and for the head. InvalidArgument if the artifact
  // was made against another base, misses a tensor, or has another shape or architecture than the
  // base: never served from the base by accident. Corruption names the tensor whose stored bytes
  // are damaged.
  //
  // Where its config.json differs: rope_theta, rope scaling, rms_norm_eps, max_position_embeddings,
  // tie_word_embeddings, vocab_size and the special tokens are the variant's own; the other sizes
  // and biases must be the base's.
  static Result<std::shared_ptr<const VariantModel>> Load(std::shared_ptr<const BaseModel> base,
                                                          const CheckpointStore& store,
                                                          const Digest& variant);
  // One that is not committed; its chunks are put and guarded.
  static Result<std::shared_ptr<const VariantModel>> Load(std::shared_ptr<const BaseModel> base,
                                                          const CheckpointStore& store,
                                                          Manifest manifest);
  ~VariantModel();

  const Digest& digest() const;
  const BaseModel& base() const;
  const ModelConfig& config() const;  // the variant's own
  int64_t resident_bytes() const;     // beyond the base
  int64_t read_bytes() const;         // of tensors, read from the store by Load

  struct Tensors;
  const Tensors& tensors() const { return *tensors_; }

 private:
  VariantModel();
  std::unique_ptr<Tensors> tensors_;
};

}  // namespace stockpot
