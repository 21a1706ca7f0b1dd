// The retention half of CheckpointStore: what may go, and leases on what is being read.
#include <utility>

#include "store/checkpoint_store_impl.h"

namespace stockpot {

Result<ManifestFacts> CheckpointStore::Impl::FactsOfArtifact(const Digest& artifact) const {
  {
    const std::lock_guard guard(facts_mutex);
    if (const auto it = facts.find(artifact); it != facts.end()) return it->second;
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(artifact));
  ManifestFacts read{.run = manifest.run, .step = manifest.step, .group = manifest.group};
  if (manifest.base) read.needs.push_back(*manifest.base);
  const std::lock_guard guard(facts_mutex);
  facts[artifact] = read;
  return read;
}

Result<RetentionView> CheckpointStore::Impl::ReadRetentionView() const {
  std::vector<Digest> leased;
  for (const auto& [digest, count] : leases->counts) leased.push_back(digest);
  RetentionView view;
  STOCKPOT_ASSIGN_OR_RETURN(
      view.inputs, ReadRetention(
                       *catalog, [this](const Digest& d) { return FactsOfArtifact(d); }, leased));
  view.fates = DecideRetention(view.inputs);
  return view;
}

Result<RetentionView> CheckpointStore::Retention() const {
  const std::lock_guard lock(impl_->leases->mutex);
  return impl_->ReadRetentionView();
}

Result<ArtifactLease> CheckpointStore::Lease(const Digest& artifact) const {
  const std::lock_guard lock(impl_->leases->mutex);
  if (!HasArtifact(artifact)) return NotFound("artifact " + artifact.Hex());
  ++impl_->leases->counts[artifact];
  // The deleter is the end of the lease; what it holds may outlive the store.
  return ArtifactLease(std::shared_ptr<void>(nullptr, [leases = impl_->leases, artifact](void*) {
    const std::lock_guard held(leases->mutex);
    if (--leases->counts[artifact] == 0) leases->counts.erase(artifact);
  }));
}

ChunkGuard CheckpointStore::GuardChunks() const { return ChunkGuard(impl_->guards->Open()); }

}  // namespace stockpot
