// Scrub: every stored byte is read and verified, and every damage is traced to the tensors and
// artifacts that need it.
#include <algorithm>
#include <map>
#include <set>

#include "store/catalog_keys.h"
#include "store/checkpoint_store_impl.h"

namespace stockpot {
namespace {

using DamageByChunk = std::map<Digest, ScrubReport::Damage>;

void AddDamage(DamageByChunk& damaged, const Digest& chunk, const Status& status) {
  ScrubReport::Damage& damage = damaged[chunk];
  damage.chunk = chunk;
  damage.error += (damage.error.empty() ? "" : "; ") + status.message();
}

// Names everybody in `manifest` who needs a damaged chunk, or one that `indexed` does not hold.
void TraceDamage(const Digest& artifact, const Manifest& manifest, const std::set<Digest>& indexed,
                 DamageByChunk& damaged) {
  const auto trace = [&](const Part& part, const std::string& who) {
    for (const Digest& chunk : part.chunks) {
      if (!indexed.contains(chunk) && !damaged.contains(chunk)) {
        AddDamage(damaged, chunk, Corruption("the index has no entry of the chunk"));
      }
      const auto it = damaged.find(chunk);
      if (it == damaged.end()) continue;
      std::vector<std::string>& needed_by = it->second.needed_by;
      const std::string name = "artifact " + artifact.Hex() + " " + who;
      if (needed_by.empty() || needed_by.back() != name) needed_by.push_back(name);
    }
  };
  for (const TensorEntry& tensor : manifest.tensors) {
    for (const auto& [role, part] : tensor.parts) trace(part, "tensor " + tensor.name);
  }
  for (const auto& [name, part] : manifest.files) trace(part, "file " + name);
}

// All index entries in the order of the packs, so that the disk is read front to back. An entry
// that does not decode is damage at once.
Status ListChunks(const Catalog& catalog, std::vector<IndexedChunk>& chunks,
                  DamageByChunk& damaged) {
  STOCKPOT_RETURN_IF_ERROR(
      catalog.Scan(Column::kChunks, "", "", [&](std::string_view key, std::string_view value) {
        const Result<Digest> digest = Digest::FromRaw(key);
        if (!digest.ok()) return true;  // names nothing
        const Result<ChunkLocation> location = ChunkLocation::Decode(value);
        if (location.ok()) {
          chunks.push_back({*digest, *location});
        } else {
          AddDamage(damaged, *digest, location.status());
        }
        return true;
      }));
  std::sort(chunks.begin(), chunks.end(), [](const IndexedChunk& a, const IndexedChunk& b) {
    return std::tie(a.location.pack, a.location.offset) <
           std::tie(b.location.pack, b.location.offset);
  });
  return OkStatus();
}

}  // namespace

Result<ScrubReport> CheckpointStore::Scrub(
    const std::function<void(int64_t done, int64_t total)>& progress) const {
  const std::shared_lock maintenance(impl_->maintenance_mutex, std::try_to_lock);
  if (!maintenance.owns_lock()) {
    return Unavailable("a garbage collection is running: try again after it");
  }
  return impl_->ScrubAll(*this, progress);
}

Result<ScrubReport> CheckpointStore::Impl::ScrubAll(
    const CheckpointStore& store, const std::function<void(int64_t, int64_t)>& progress) const {
  ScrubReport report;
  DamageByChunk damage;
  std::vector<IndexedChunk> chunks;
  // The artifacts first: whatever they name was indexed before, so the listing of chunks that
  // follows holds it, however many commits go on beside.
  STOCKPOT_RETURN_IF_ERROR(catalog->Verify());
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<Digest> artifacts, ReadArtifacts());
  STOCKPOT_RETURN_IF_ERROR(ListChunks(*catalog, chunks, damage));
  for (const IndexedChunk& chunk : chunks) report.bytes += chunk.location.length;
  report.chunks = static_cast<int64_t>(chunks.size());

  int64_t done = 0;
  uint32_t pack = 0;
  Status pack_status;
  std::set<Digest> indexed;
  std::vector<std::byte> buffer(static_cast<size_t>(kChunkBytes));
  for (const IndexedChunk& chunk : chunks) {
    if (IsShutDown()) return Unavailable("the store is shutting down");
    indexed.insert(chunk.digest);
    if (chunk.location.pack != pack) {
      pack = chunk.location.pack;
      pack_status = reader->CheckPack(pack);
    }
    const Status status = ReadChunkInto(chunk.digest, chunk.location,
                                        std::span(buffer).first(chunk.location.length), true);
    if (!status.ok()) AddDamage(damage, chunk.digest, status);
    if (!pack_status.ok()) AddDamage(damage, chunk.digest, pack_status);
    done += chunk.location.length;
    if (progress) progress(done, report.bytes);
  }
  for (const Digest& artifact : artifacts) {
    const Result<Manifest> manifest = store.GetManifest(artifact);
    if (manifest.ok()) {
      TraceDamage(artifact, *manifest, indexed, damage);
    } else if (store.HasArtifact(artifact)) {
      AddDamage(damage, artifact, manifest.status());
      damage[artifact].needed_by.push_back("artifact " + artifact.Hex());
    }
  }
  STOCKPOT_RETURN_IF_ERROR(
      catalog->Scan(Column::kManifests, "", "", [&](std::string_view key, std::string_view) {
        const Result<Digest> artifact = Digest::FromRaw(key);
        if (!artifact.ok() || store.HasArtifact(*artifact)) return true;
        AddDamage(damage, *artifact, Corruption("no record of artifact " + artifact->Hex()));
        damage[*artifact].needed_by.push_back("artifact " + artifact->Hex());
        return true;
      }));
  const std::lock_guard guard(damaged_mutex);
  damaged.clear();
  for (auto& [digest, found] : damage) {
    damaged.insert(digest);
    report.damaged.push_back(std::move(found));
  }
  return report;
}

}  // namespace stockpot
