// Garbage collection: purges what was deleted long enough ago, takes chunks that nothing refers to
// out of the index, and gives their bytes back by compacting packs.
//
//   purge     one commit: the artifacts are gone, their chunks still indexed
//   mark      every chunk of every manifest and draft that is left, and what their forms need
//   sweep     index entries of the others, in synced batches, each under the lead of commits
//   compact   live records of sparse packs are appended to the open pack; a commit flips the index
//             to them; packs that no entry names are unlinked after that
//
// Killed anywhere: a purged artifact's chunks, a copy nobody indexed or a pack nobody names is
// garbage for the next time. A chunk that somebody may be about to commit is guarded
// (chunk_guards.h): what was put or was said to be there since the oldest open guard stays. The
// collection itself holds one from before the marking, opened while no commit is being written, so
// commits during it are covered too.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <unordered_set>

#include "store/catalog_keys.h"
#include "store/checkpoint_store_impl.h"
#include "store/history_codec.h"

namespace stockpot {
namespace {

// --- limits ---
constexpr size_t kPurgesAtOnce = 64;   // artifacts of one commit
constexpr size_t kSweepAtOnce = 1024;  // index entries of one batch; commits wait for it
constexpr int kPlanAttempts = 5;       // when what was decided does not hold any more
constexpr int64_t kFlipBytes = int64_t{64} << 20;  // copied between two flips of the index
constexpr int64_t kThrottleSliceMs = 100;          // of sleep that does not look at Shutdown

struct PackUse {
  int64_t live_bytes = 0;  // records of indexed chunks
  std::vector<IndexedChunk> chunks;
};

}  // namespace

// One collection. The caller holds the maintenance lock.
class GarbageCollector {
 public:
  GarbageCollector(CheckpointStore& store, CheckpointStore::Impl& impl, GarbageOptions options)
      : store_(store), impl_(impl), options_(options) {}

  Result<GarbageReport> Collect() {
    STOCKPOT_RETURN_IF_ERROR(At("gc.begin"));
    // Between two commits: one that is being written has claimed its chunks before the guard opens,
    // and may become visible after the marking.
    STOCKPOT_RETURN_IF_ERROR(impl_.Lead([&] {
      guard_ = impl_.guards->Open();
      return OkStatus();
    }));
    report_.pack_bytes_before = impl_.PackBytes();
    if (options_.purge) STOCKPOT_RETURN_IF_ERROR(Purge());
    STOCKPOT_RETURN_IF_ERROR(At("gc.purged"));
    STOCKPOT_RETURN_IF_ERROR(Mark());
    STOCKPOT_RETURN_IF_ERROR(At("gc.marked"));
    if (!options_.dry_run) {
      STOCKPOT_RETURN_IF_ERROR(Rebase());
      STOCKPOT_RETURN_IF_ERROR(KeepParents());
    }
    STOCKPOT_RETURN_IF_ERROR(ListDead());
    STOCKPOT_RETURN_IF_ERROR(At("gc.listed"));
    CountWhatGoes();
    if (!options_.dry_run) {
      STOCKPOT_RETURN_IF_ERROR(Sweep());
      STOCKPOT_RETURN_IF_ERROR(At("gc.swept"));
      STOCKPOT_RETURN_IF_ERROR(Compact());
    }
    report_.pack_bytes_after = impl_.PackBytes();
    return std::move(report_);
  }

 private:
  Status At(std::string_view name) const {
    if (impl_.IsShutDown()) return Unavailable("the store is shutting down");
    return ReachFailpoint(impl_.options.failpoints, name);
  }

  // --- purge ---

  Status Purge() {
    for (int attempt = 0; attempt < kPlanAttempts; ++attempt) {
      STOCKPOT_RETURN_IF_ERROR(ListExpired());
      STOCKPOT_RETURN_IF_ERROR(At("gc.decided"));
      const Status status = options_.dry_run ? OkStatus() : ApplyPurges();
      if (status.code() != StatusCode::kAlreadyExists) return status;
    }
    return OkStatus();  // somebody keeps coming to need them: the next time
  }

  // Null: an artifact does not go. 0: it goes now; else when the grace ends of a deletion that only
  // would be.
  std::optional<int64_t> PurgeTime(const RetentionArtifact& artifact, const Fate& fate) const {
    const int64_t now_ms = impl_.options.clock();
    if (artifact.tombstone) {
      const bool goes = artifact.tombstone->purge_ms <= now_ms && !fate.firm();
      return goes ? std::optional<int64_t>(0) : std::nullopt;
    }
    if (!options_.dry_run || !options_.retention || fate.stays()) return std::nullopt;
    const int64_t grace_ms = store_.GetRetention(artifact.run).grace_ms;
    return grace_ms <= 0 ? 0 : now_ms + grace_ms;
  }

  // Purged by an earlier attempt stays in the report.
  Status ListExpired() {
    STOCKPOT_ASSIGN_OR_RETURN(const RetentionView view, store_.Retention());
    open_.clear();
    for (size_t i = 0; i < view.fates.size(); ++i) {
      const RetentionArtifact& artifact = view.inputs.artifacts[i];
      const std::optional<int64_t> purge_ms = PurgeTime(artifact, view.fates[i]);
      if (!purge_ms) continue;
      Going going{.gone = {.artifact = artifact.digest,
                           .kind = artifact.kind,
                           .run = artifact.run,
                           .step = artifact.step,
                           .group = artifact.group,
                           .purge_ms = *purge_ms}};
      const Result<Manifest> manifest = store_.GetManifest(artifact.digest);
      if (manifest.ok())
        ForEachChunk(*manifest, [&](const Digest& d) { going.chunks.push_back(d); });
      open_.push_back(std::move(going));
    }
    if (options_.dry_run) going_ = open_;
    return OkStatus();
  }

  Status ApplyPurges() {
    for (size_t begin = 0; begin < open_.size(); begin += kPurgesAtOnce) {
      const size_t end = std::min(open_.size(), begin + kPurgesAtOnce);
      Commit commit;
      for (size_t i = begin; i < end; ++i) commit.purges.push_back(open_[i].gone.artifact);
      STOCKPOT_RETURN_IF_ERROR(At("gc.purging"));
      STOCKPOT_RETURN_IF_ERROR(store_.Apply(std::move(commit)).status());
      for (size_t i = begin; i < end; ++i) going_.push_back(open_[i]);
    }
    return OkStatus();
  }

  // --- mark ---

  template <typename Visit>
  static void ForEachChunk(const Manifest& manifest, Visit visit) {
    for (const TensorEntry& tensor : manifest.tensors) {
      for (const auto& [role, part] : tensor.parts) {
        for (const Digest& chunk : part.chunks) visit(chunk);
      }
    }
    for (const auto& [name, part] : manifest.files) {
      for (const Digest& chunk : part.chunks) visit(chunk);
    }
  }

  // Only what is proven unreferenced goes: one manifest that cannot be read stops everything.
  Status Mark() {
    std::unordered_set<Digest, DigestHash> skipped;
    if (options_.dry_run) {
      for (const Going& going : going_) skipped.insert(going.gone.artifact);
    }
    Result<std::vector<Digest>> artifacts = impl_.ReadArtifacts();
    if (!artifacts.ok()) {
      return artifacts.status().WithContext("nothing was collected: which artifacts there are is "
                                            "unknown");
    }
    for (const Digest& artifact : *artifacts) {
      if (skipped.contains(artifact)) continue;
      const Result<Manifest> manifest = store_.GetManifest(artifact);
      if (manifest.status().code() == StatusCode::kNotFound) {
        STOCKPOT_ASSIGN_OR_RETURN(
            const auto still,
            impl_.catalog->Get(Column::kRecords, catalog_keys::Artifact(artifact)));
        if (!still) continue;  // purged meanwhile
      }
      if (!manifest.ok()) {
        return manifest.status().WithContext("nothing was collected: what artifact " +
                                             artifact.ShortHex() + " needs is unknown");
      }
      ForEachChunk(*manifest, [&](const Digest& chunk) { live_.insert(chunk); });
      if (impl_.IsShutDown()) return Unavailable("the store is shutting down");
    }
    return MarkDrafts();
  }

  // What interrupted jobs will go on from. One that cannot be read is made anew.
  Status MarkDrafts() {
    return impl_.catalog->Scan(
        Column::kRecords, catalog_keys::kDrafts, "", [&](std::string_view, std::string_view json) {
          const Result<Manifest> made = Manifest::FromJson(json);
          if (made.ok()) ForEachChunk(*made, [&](const Digest& chunk) { live_.insert(chunk); });
          return true;
        });
  }

  // Differences of chunks that stay to ones that nobody else needs are encoded anew, against the
  // nearest of their chain that stays, so that the others can go. What cannot be read or written
  // now keeps its parent.
  Status Rebase() {
    std::unordered_map<Digest, Digest, DigestHash> parents;
    STOCKPOT_RETURN_IF_ERROR(ForEachDelta([&](const Digest& chunk, const Digest& parent) {
      parents[chunk] = parent;
    }));
    int64_t unflipped = 0;
    for (const auto& [chunk, parent] : parents) {
      if (!live_.contains(chunk) || live_.contains(parent)) continue;
      STOCKPOT_RETURN_IF_ERROR(At("gc.rebase"));
      Digest nearest = parent;
      for (size_t links = 0; !nearest.IsZero() && !live_.contains(nearest); ++links) {
        const auto it = parents.find(nearest);
        nearest = it == parents.end() || links > parents.size() ? Digest{} : it->second;
      }
      const Result<int64_t> bytes = RebaseChunk(chunk, nearest);
      if (!bytes.ok()) continue;
      report_.copied_bytes += *bytes;
      unflipped += *bytes;
      if (unflipped >= kFlipBytes) {
        STOCKPOT_RETURN_IF_ERROR(Flip());
        unflipped = 0;
      }
      STOCKPOT_RETURN_IF_ERROR(Throttle(*bytes));
    }
    return unflipped == 0 ? OkStatus() : Flip();
  }

  // Bytes appended.
  Result<int64_t> RebaseChunk(const Digest& chunk, const Digest& parent) {
    STOCKPOT_ASSIGN_OR_RETURN(auto location, impl_.FindChunk(chunk));
    if (!location) return NotFound("chunk " + chunk.Hex());
    std::vector<std::byte> stored;
    STOCKPOT_RETURN_IF_ERROR(impl_.ReadForm(chunk, *location, stored));
    if (location->is_whole()) return int64_t{0};
    STOCKPOT_ASSIGN_OR_RETURN(const int element_bytes, HistoryElementBytes(stored));
    STOCKPOT_ASSIGN_OR_RETURN(const ChunkLocation form,
                              impl_.AppendHistory(chunk, *location, parent, element_bytes));
    return int64_t{form.stored_length()};
  }

  // Of the index, and of what will be indexed.
  template <typename Visit>
  Status ForEachDelta(Visit visit) const {
    for (const IndexedChunk& chunk : impl_.writer->PendingDeltas()) {
      visit(chunk.digest, chunk.location.parent);
    }
    Status damage;
    STOCKPOT_RETURN_IF_ERROR(impl_.catalog->Scan(
        Column::kChunks, "", "", [&](std::string_view key, std::string_view value) {
          const Result<Digest> digest = Digest::FromRaw(key);
          const Result<ChunkLocation> location = ChunkLocation::Decode(value);
          if (digest.ok() && !location.ok()) {
            damage = location.status().WithContext("nothing was collected: what chunk " +
                                                   digest->Hex() + " needs is unknown");
          }
          if (digest.ok() && location.ok() && location->form == ChunkForm::kDelta) {
            visit(*digest, location->parent);
          }
          return damage.ok();
        }));
    return damage;
  }

  // A chunk that stays needs its chain; so does a pending one, whether anybody needs it or not: its
  // entry may come with the next commit. Both forms count of one that has two.
  Status KeepParents() {
    std::unordered_multimap<Digest, Digest, DigestHash> parents;
    STOCKPOT_RETURN_IF_ERROR(ForEachDelta(
        [&](const Digest& chunk, const Digest& parent) { parents.emplace(chunk, parent); }));
    std::vector<Digest> open(live_.begin(), live_.end());
    for (const IndexedChunk& chunk : impl_.writer->PendingDeltas()) open.push_back(chunk.digest);
    while (!open.empty()) {
      const Digest chunk = open.back();
      open.pop_back();
      for (auto [it, end] = parents.equal_range(chunk); it != end; ++it) {
        if (live_.insert(it->second).second) open.push_back(it->second);
      }
    }
    return At("gc.rebased");
  }

  Status ListDead() {
    return impl_.catalog->Scan(
        Column::kChunks, "", "", [&](std::string_view key, std::string_view value) {
          const Result<Digest> digest = Digest::FromRaw(key);
          if (!digest.ok() || live_.contains(*digest)) return true;
          const Result<ChunkLocation> location = ChunkLocation::Decode(value);
          if (location.ok()) dead_.push_back({*digest, *location});
          return true;
        });
  }

  // To each artifact the bytes that nobody listed before it has: their sum is what comes back, with
  // those that never had an owner.
  void CountWhatGoes() {
    std::unordered_map<Digest, int64_t, DigestHash> bytes;
    for (const IndexedChunk& chunk : dead_) {
      if (impl_.guards->Protects(chunk.digest)) continue;
      bytes[chunk.digest] = chunk.location.stored_length();
      ++report_.chunks;
      report_.chunk_bytes += chunk.location.stored_length();
    }
    for (Going& going : going_) {
      for (const Digest& chunk : going.chunks) {
        const auto it = bytes.find(chunk);
        if (it == bytes.end()) continue;
        going.gone.bytes += it->second;
        bytes.erase(it);
      }
      report_.artifacts.push_back(going.gone);
    }
  }

  // --- sweep ---

  Status Sweep() {
    // A difference before its parent: if somebody came to need it meanwhile, its parent stays too.
    std::unordered_map<Digest, const IndexedChunk*, DigestHash> dead;
    for (const IndexedChunk& chunk : dead_) dead[chunk.digest] = &chunk;
    std::unordered_map<Digest, size_t, DigestHash> depths;
    for (const IndexedChunk& chunk : dead_) {
      size_t depth = 0;
      for (const IndexedChunk* at = &chunk; at->location.form == ChunkForm::kDelta;) {
        const auto it = dead.find(at->location.parent);
        if (it == dead.end() || ++depth > dead_.size()) break;
        at = it->second;
      }
      depths[chunk.digest] = depth;
    }
    std::stable_sort(dead_.begin(), dead_.end(), [&](const IndexedChunk& a, const IndexedChunk& b) {
      return depths.at(a.digest) > depths.at(b.digest);
    });
    for (size_t begin = 0; begin < dead_.size(); begin += kSweepAtOnce) {
      STOCKPOT_RETURN_IF_ERROR(At("gc.sweep"));
      const size_t count = std::min(kSweepAtOnce, dead_.size() - begin);
      STOCKPOT_RETURN_IF_ERROR(
          impl_.Lead([&] { return SweepBatch(std::span(dead_).subspan(begin, count)); }));
    }
    return OkStatus();
  }

  // REQUIRES: leads the commits. Nobody is told a chunk is there between the check and the write.
  Status SweepBatch(std::span<const IndexedChunk> chunks) {
    const std::unique_lock claims(impl_.claim_mutex);
    CatalogBatch batch(*impl_.catalog);
    for (const IndexedChunk& chunk : chunks) {
      STOCKPOT_ASSIGN_OR_RETURN(const auto now, batch.Get(Column::kChunks, chunk.digest.raw()));
      if (!now) continue;
      const bool stored_anew = *now != chunk.location.Encode();
      if (impl_.guards->Protects(chunk.digest) || needed_.contains(chunk.digest) || stored_anew) {
        const Result<ChunkLocation> stays = ChunkLocation::Decode(*now);
        if (stays.ok() && stays->form == ChunkForm::kDelta) needed_.insert(stays->parent);
        continue;
      }
      batch.Delete(Column::kChunks, chunk.digest.raw());
      if (chunk.location.is_inline()) batch.Delete(Column::kInline, chunk.digest.raw());
    }
    if (batch.empty()) return OkStatus();
    STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(impl_.options.failpoints, "gc.sweep.before_write"));
    // Synced: a pack may be unlinked only after the end of its entries is on disk.
    STOCKPOT_RETURN_IF_ERROR(impl_.catalog->Write(batch, /*synced=*/true));
    return ReachFailpoint(impl_.options.failpoints, "gc.sweep.after_write");
  }

  // --- compact ---

  Status Compact() {
    STOCKPOT_ASSIGN_OR_RETURN(auto packs, UseOfPacks());
    STOCKPOT_RETURN_IF_ERROR(At("compact.roll"));
    if (const std::optional<uint32_t> current = impl_.writer->current_pack()) {
      if (IsSparse(*current, packs[*current])) {
        impl_.writer->Roll();
        STOCKPOT_RETURN_IF_ERROR(store_.Apply({}).status());  // its last chunks get their entries
        STOCKPOT_ASSIGN_OR_RETURN(packs, UseOfPacks());
      }
    }
    STOCKPOT_RETURN_IF_ERROR(At("compact.rolled"));
    for (const auto& [number, use] : packs) {
      if (use.chunks.empty() || impl_.writer->IsOpen(number) || !IsSparse(number, use)) continue;
      STOCKPOT_RETURN_IF_ERROR(CopyPack(use));
    }
    return UnlinkUnused();
  }

  // Every pack file, with what the index says is in it.
  Result<std::map<uint32_t, PackUse>> UseOfPacks() const {
    std::map<uint32_t, PackUse> packs;
    for (const uint32_t number : impl_.ListPacks()) packs[number];
    Status damage;
    STOCKPOT_RETURN_IF_ERROR(impl_.catalog->Scan(
        Column::kChunks, "", "", [&](std::string_view key, std::string_view value) {
          const Result<Digest> digest = Digest::FromRaw(key);
          const Result<ChunkLocation> location = ChunkLocation::Decode(value);
          if (digest.ok() && !location.ok()) {
            damage = location.status().WithContext("no pack was removed: where chunk " +
                                                   digest->Hex() + " lies is unknown");
          }
          if (!digest.ok() || !location.ok() || location->is_inline()) return damage.ok();
          PackUse& use = packs[location->pack];
          use.live_bytes += kRecordHeaderBytes + location->stored_length();
          use.chunks.push_back({*digest, *location});
          return true;
        }));
    STOCKPOT_RETURN_IF_ERROR(damage);
    return packs;
  }

  bool IsSparse(uint32_t number, const PackUse& use) const {
    const int64_t bytes = impl_.PackFileBytes(number) - kPackHeaderBytes;
    return static_cast<double>(use.live_bytes) < options_.live_ratio * static_cast<double>(bytes);
  }

  // A chunk that cannot be read stays where it is, and with it the pack: scrub names it.
  Status CopyPack(const PackUse& use) {
    STOCKPOT_RETURN_IF_ERROR(At("compact.pack"));
    std::vector<std::byte> buffer(static_cast<size_t>(kChunkBytes));
    int64_t unflipped = 0;
    for (const IndexedChunk& chunk : use.chunks) {
      const auto bytes = std::span(buffer).first(chunk.location.stored_length());
      STOCKPOT_RETURN_IF_ERROR(At("compact.read"));
      const Status read =
          chunk.location.is_whole()
              ? impl_.reader->ReadAndCheckRecord(chunk.digest, chunk.location, bytes)
              : impl_.reader->ReadStored(chunk.digest, chunk.location, bytes);
      if (!read.ok()) continue;
      STOCKPOT_RETURN_IF_ERROR(impl_.writer->AppendForm(chunk.digest, bytes, chunk.location));
      STOCKPOT_RETURN_IF_ERROR(At("compact.appended"));
      report_.copied_bytes += chunk.location.stored_length();
      unflipped += chunk.location.stored_length();
      if (unflipped >= kFlipBytes) {
        STOCKPOT_RETURN_IF_ERROR(Flip());
        unflipped = 0;
      }
      STOCKPOT_RETURN_IF_ERROR(Throttle(chunk.location.stored_length()));
    }
    ++report_.packs_compacted;
    return Flip();
  }

  // Every commit gives the chunks that are durable now their index entries: also the copies.
  Status Flip() {
    STOCKPOT_RETURN_IF_ERROR(At("compact.before_flip"));
    STOCKPOT_RETURN_IF_ERROR(store_.Apply({}).status());
    return At("compact.flipped");
  }

  Status Throttle(int64_t bytes) {
    if (options_.bytes_per_second <= 0) return OkStatus();
    allowed_at_ = std::max(allowed_at_, std::chrono::steady_clock::now()) +  // no credit for idling
                  std::chrono::microseconds(bytes * 1'000'000 / options_.bytes_per_second);
    while (std::chrono::steady_clock::now() < allowed_at_) {
      if (impl_.IsShutDown()) return Unavailable("the store is shutting down");
      std::this_thread::sleep_for(std::min<std::chrono::steady_clock::duration>(
          allowed_at_ - std::chrono::steady_clock::now(),
          std::chrono::milliseconds(kThrottleSliceMs)));
    }
    return OkStatus();
  }

  // Nothing names such a pack, and nothing will: packs take no chunks once they are closed. Readers
  // that found a chunk there before have its descriptor, or look the chunk up again.
  Status UnlinkUnused() {
    STOCKPOT_ASSIGN_OR_RETURN(const auto packs, UseOfPacks());
    for (const auto& [number, use] : packs) {
      if (!use.chunks.empty() || impl_.writer->IsOpen(number)) continue;
      STOCKPOT_RETURN_IF_ERROR(At("compact.before_unlink"));
      impl_.reader->Forget(number);
      ::unlink(PackPath(impl_.packs_directory, number).c_str());
      ++report_.packs_removed;
      STOCKPOT_RETURN_IF_ERROR(At("compact.unlinked"));
    }
    STOCKPOT_RETURN_IF_ERROR(At("compact.directory"));
    return report_.packs_removed == 0 ? OkStatus() : SyncDirectory(impl_.packs_directory);
  }

  struct Going {
    GarbageReport::Gone gone;
    std::vector<Digest> chunks;
  };

  CheckpointStore& store_;
  CheckpointStore::Impl& impl_;
  const GarbageOptions options_;
  std::shared_ptr<void> guard_;
  GarbageReport report_;
  std::vector<Going> open_;   // expired, not purged yet
  std::vector<Going> going_;  // purged; dry run: would be
  std::unordered_set<Digest, DigestHash> live_;
  std::vector<IndexedChunk> dead_;
  std::unordered_set<Digest, DigestHash> needed_;  // by dead chunks that turned out to stay
  std::chrono::steady_clock::time_point allowed_at_ = std::chrono::steady_clock::now();
};

Status CheckGarbageOptions(const GarbageOptions& options) {
  if (!(options.live_ratio >= 0 && options.live_ratio <= 1)) {
    return InvalidArgument("live_ratio must be in [0, 1]");
  }
  if (options.bytes_per_second == 0 || options.bytes_per_second >= kMinGarbageBytesPerSecond) {
    return OkStatus();
  }
  return InvalidArgument("bytes_per_second is " + std::to_string(options.bytes_per_second) +
                         ": it must be 0 (no throttle) or at least " +
                         std::to_string(kMinGarbageBytesPerSecond));
}

Result<GarbageReport> CheckpointStore::CollectGarbage(const GarbageOptions& options) {
  STOCKPOT_RETURN_IF_ERROR(CheckGarbageOptions(options));
  const std::unique_lock maintenance(impl_->maintenance_mutex, std::try_to_lock);
  if (!maintenance.owns_lock()) {
    return Unavailable("a scrub, backup or garbage collection is running: try again after it");
  }
  const std::lock_guard history(impl_->history_mutex);
  ++impl_->history_generation;
  STOCKPOT_ASSIGN_OR_RETURN(GarbageReport report,
                            GarbageCollector(*this, *impl_, options).Collect());
  if (options.dry_run || !options.purge || (report.chunks == 0 && report.packs_removed == 0))
    return report;
  Commit commit;
  commit.events.push_back({.type = "gc",
                           .subject = "store",
                           .fields = {{"artifacts", std::to_string(report.artifacts.size())},
                                      {"chunks", std::to_string(report.chunks)},
                                      {"chunk_bytes", std::to_string(report.chunk_bytes)},
                                      {"packs_removed", std::to_string(report.packs_removed)},
                                      {"pack_bytes", std::to_string(report.pack_bytes_after)}}});
  STOCKPOT_RETURN_IF_ERROR(Apply(std::move(commit)).status());
  return report;
}

Result<RetentionChanges> CheckpointStore::ApplyRetention(const std::string& run, bool dry_run) {
  Status status;
  for (int attempt = 0; attempt < kPlanAttempts; ++attempt) {
    STOCKPOT_ASSIGN_OR_RETURN(const RetentionView view, Retention());
    RetentionChanges changes;
    Commit commit;
    for (size_t i = 0; i < view.fates.size(); ++i) {
      const RetentionArtifact& artifact = view.inputs.artifacts[i];
      if (!run.empty() && artifact.run != run) continue;
      const bool ours = artifact.tombstone && artifact.tombstone->by == kRetentionAuthor;
      if (view.fates[i].stays() && ours) commit.undeletions.push_back(artifact.digest);
      if (view.fates[i].stays() || artifact.tombstone) continue;
      const int64_t grace_ms = GetRetention(artifact.run).grace_ms;
      commit.deletions.push_back({.artifact = artifact.digest,
                                  .purge_ms = impl_->options.clock() + grace_ms,
                                  .by = std::string(kRetentionAuthor),
                                  .why = "no rule keeps it"});
    }
    changes.undeleted = commit.undeletions;
    for (const Tombstone& tombstone : commit.deletions)
      changes.deleted.push_back(tombstone.artifact);
    if (dry_run || (changes.deleted.empty() && changes.undeleted.empty())) return changes;
    STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(impl_->options.failpoints, "retention.decided"));
    status = Apply(std::move(commit)).status();
    if (status.ok()) {
      STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(impl_->options.failpoints, "retention.applied"));
      return changes;
    }
    if (status.code() != StatusCode::kAlreadyExists) return status;
  }
  return Unavailable("retention keeps changing: " + status.message());
}

}  // namespace stockpot
