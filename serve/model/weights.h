// The one resident base and the variants over it. Both are immutable once loaded, so any number of
// threads may read them; nothing is ever written in place.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
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

class BaseModel {
 public:
  // Reads every tensor of the architecture in its own dtype (BF16, F16 or F32, kept as it is).
  // InvalidArgument names a missing, extra or mis-shaped tensor or one with NaN/Inf.
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
  // Loads an artifact of kind variant over `base`, reading only what differs. InvalidArgument if it was
  // made against another base, misses a tensor or has another shape: never served from the base by
  // accident. `read_bytes`: incremented by what came from the store.
  static Result<std::shared_ptr<const VariantModel>> Load(std::shared_ptr<const BaseModel> base,
                                                          const CheckpointStore& store,
                                                          const Digest& variant);
  ~VariantModel();

  const Digest& digest() const;
  const BaseModel& base() const;
  int64_t resident_bytes() const;  // beyond the base

  struct Tensors;
  const Tensors& tensors() const { return *tensors_; }

 private:
  VariantModel();
  std::unique_ptr<Tensors> tensors_;
};

}  // namespace stockpot
