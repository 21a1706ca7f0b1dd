// A LoRA adapter on its way from the store to store/adapter_merge.h, and back.
// Thread promise: any thread. Memory: the adapter in double precision, and the one that is made.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "store/adapter_merge.h"
#include "store/checkpoint_store.h"

namespace stockpot {

struct LoadedAdapter {
  AdapterDelta delta;         // with the scales of its configuration, rsLoRA's too
  DType dtype = DType::kF32;  // of its factors; F32 where they differ
  std::string base_name;      // "base_model_name_or_path" of its configuration, or empty
};

// `base` is the manifest of the adapter's base. InvalidArgument: it is no adapter that can be
// served (store/lora_adapter.h), or a value is not finite.
Result<LoadedAdapter> LoadAdapterDelta(const CheckpointStore& store, const Manifest& adapter,
                                       const Manifest& base);

// An adapter that is not stored yet.
struct BuiltAdapter {
  Manifest manifest;
  std::map<std::string, std::vector<std::byte>> tensors;
  std::string config;
};

// As PEFT writes one, so that PEFT reads it: scale 1 in each layer (alpha = rank), values rounded
// once to `dtype`. InvalidArgument: a value does not fit it.
Result<BuiltAdapter> BuildAdapter(const AdapterDelta& delta, DType dtype, const Digest& base,
                                  const std::string& base_name,
                                  const std::map<std::string, std::string>& attributes);

// Puts its chunks: then a commit may name the manifest.
Status PutAdapter(CheckpointStore& store, const BuiltAdapter& adapter);

// The largest rank of a layer.
int64_t RankOf(const AdapterDelta& delta);

}  // namespace stockpot
