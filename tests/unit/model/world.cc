#include "tests/unit/model/world.h"

#include "store/artifact_source.h"
#include "store/bitdelta_codec.h"

namespace stockpot::test {

World::World(const TensorSource& base_model) : store(OpenStore(folder.path() / "store")) {
  base_digest = StoreModel(*store, base_model, ArtifactKind::kBase);
  const auto source = OpenArtifact(*store, base_digest);
  EXPECT_OK(source);
  const auto loaded = BaseModel::Load(base_digest, **source);
  EXPECT_OK(loaded);
  base = *loaded;
}

Digest World::Publish(const TensorSource& tuned, PublishCodec codec,
                      const PublishOptions& options) {
  const Digest checkpoint =
      StoreModel(*store, tuned, ArtifactKind::kCheckpoint, base_digest, "run", ++checkpoints);
  ThreadPool threads(2);
  Result<Manifest> variant = BuildVariant(*store, checkpoint, codec, threads, nullptr, options);
  EXPECT_OK(variant);
  return Add(*std::move(variant));
}

Digest World::Add(Manifest manifest) {
  const Digest digest = manifest.digest();
  Commit commit;
  commit.artifacts.push_back(std::move(manifest));
  EXPECT_OK(store->Apply(std::move(commit)));
  return digest;
}

Manifest World::ManifestOf(const Digest& digest) const {
  return store->GetManifest(digest).value();
}

std::shared_ptr<const VariantModel> World::Load(const Digest& variant) const {
  const auto loaded = VariantModel::Load(base, *store, variant);
  EXPECT_OK(loaded);
  return loaded.ok() ? *loaded : nullptr;
}

int64_t World::Route(const std::string& name, const Digest& variant) {
  Commit commit;
  commit.routes.push_back({.name = name, .to = variant, .by = "test"});
  commit.events.push_back({.type = "route", .subject = name});
  const Result<int64_t> sequence = store->Apply(std::move(commit));
  EXPECT_OK(sequence);
  return sequence.ok() ? *sequence : 0;
}

TestModel RandomBase(uint64_t seed, const TinyLlamaShape& shape) {
  std::mt19937_64 random(seed);
  return TinyLlama(random, shape);
}

TestModel TunedFrom(const TestModel& base, uint64_t seed) {
  std::mt19937_64 random(seed);
  TestModel tuned = base;
  tuned.PerturbAll(random, 0.02);
  return tuned;
}

}  // namespace stockpot::test
