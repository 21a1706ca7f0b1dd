// A store with one base in it, loaded, and variants of it that were published for real.
#pragma once

#include <memory>
#include <string>

#include "serve/model/weights.h"
#include "store/checkpoint_store.h"
#include "store/tensor_source.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot::test {

struct World {
  explicit World(const TensorSource& base_model);

  // Stores `tuned` as a checkpoint of the base, publishes it and returns the variant's digest.
  Digest Publish(const TensorSource& tuned, PublishCodec codec = PublishCodec::kBitDelta,
                 const PublishOptions& options = {});
  // Commits a manifest as it is and returns its digest.
  Digest Add(Manifest manifest);
  // The manifest of a stored artifact, to be changed and added again.
  Manifest ManifestOf(const Digest& digest) const;
  std::shared_ptr<const VariantModel> Load(const Digest& variant) const;  // fails the test, null
  // Moves a route (a zero digest removes it) with its event; returns the event's sequence.
  int64_t Route(const std::string& name, const Digest& variant);

  TemporaryFolder folder;
  std::unique_ptr<CheckpointStore> store;
  Digest base_digest;
  std::shared_ptr<const BaseModel> base;
  int64_t checkpoints = 0;
};

// A Llama in memory with two layers, and the same with every weight moved.
TestModel RandomBase(uint64_t seed, const TinyLlamaShape& shape = {});
TestModel TunedFrom(const TestModel& base, uint64_t seed);

}  // namespace stockpot::test
