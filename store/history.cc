#include "store/history.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "store/catalog_keys.h"
#include "store/checkpoint_store_impl.h"

namespace stockpot {
namespace {

// --- limits ---
constexpr int64_t kBatchBytes = int64_t{64} << 20;  // of chunks between two flips of the index
constexpr int64_t kThrottleSliceMs = 100;           // of sleep that does not look at Shutdown

// Why an artifact stays whole. What only keeps it (rules, jobs, readers) does not matter here.
bool KeepsWhole(KeepReason reason) {
  return reason == KeepReason::kBase || reason == KeepReason::kPinned ||
         reason == KeepReason::kAlias || reason == KeepReason::kRoute ||
         reason == KeepReason::kBest || reason == KeepReason::kLastGood;
}

// The chunk at the same place in another manifest; zero: there is none that compares. One that was
// cut in other pieces may be a bad parent, never a wrong one.
Digest ChunkAt(const std::optional<Manifest>& manifest, const TensorEntry& tensor,
               const std::string& role, size_t index) {
  const TensorEntry* other = manifest ? manifest->Find(tensor.name) : nullptr;
  if (other == nullptr || other->dtype != tensor.dtype || other->shape != tensor.shape) return {};
  const auto part = other->parts.find(role);
  if (other->codec != Codec::kRaw || part == other->parts.end()) return {};
  return index < part->second.chunks.size() ? part->second.chunks[index] : Digest{};
}

// Which chunk is a difference to which.
class DeltaForest {
 public:
  Status Read(const Catalog& catalog) {
    parents_.clear();
    children_.clear();
    return catalog.Scan(Column::kChunks, "", "", [&](std::string_view key, std::string_view raw) {
      const Result<Digest> chunk = Digest::FromRaw(key);
      const Result<ChunkLocation> location = ChunkLocation::Decode(raw);
      if (chunk.ok() && location.ok()) Set(*chunk, *location);
      return true;
    });
  }

  void Set(const Digest& chunk, const ChunkLocation& location) {
    if (const auto it = parents_.find(chunk); it != parents_.end()) {
      std::erase(children_[it->second], chunk);
      parents_.erase(it);
    }
    if (location.form != ChunkForm::kDelta) return;
    parents_[chunk] = location.parent;
    children_[location.parent].push_back(chunk);
  }

  // Whether `chunk` may become a difference to `parent`: no circle, no chain over the limit.
  bool Allows(const Digest& chunk, const Digest& parent) const {
    int links = 1;
    for (Digest at = parent;; ++links) {
      if (at == chunk) return false;
      const auto it = parents_.find(at);
      if (it == parents_.end()) break;
      if (links > kMaxHistoryDepth) return false;
      at = it->second;
    }
    return links + Height(chunk, 0) <= kMaxHistoryDepth;
  }

 private:
  // The longest chain of differences that leads to the chunk.
  int Height(const Digest& chunk, int below) const {
    const auto it = children_.find(chunk);
    if (it == children_.end() || below > kMaxHistoryDepth) return 0;
    int height = 0;
    for (const Digest& child : it->second) {
      height = std::max(height, 1 + Height(child, below + 1));
    }
    return height;
  }

  std::unordered_map<Digest, Digest, DigestHash> parents_;
  std::unordered_map<Digest, std::vector<Digest>, DigestHash> children_;
};

}  // namespace

// One pass over a run.
class HistoryCompressor {
 public:
  HistoryCompressor(CheckpointStore& store, CheckpointStore::Impl& impl,
                    const HistoryOptions& options)
      : store_(store), impl_(impl), options_(options) {}

  Result<HistoryReport> Compress() {
    STOCKPOT_RETURN_IF_ERROR(At("history.begin"));
    STOCKPOT_RETURN_IF_ERROR(Decide());
    STOCKPOT_RETURN_IF_ERROR(At("history.decided"));
    Status status;
    for (size_t i = 0; i < targets_.size() && status.ok(); ++i) {
      if (targets_[i].skipped) continue;
      status = targets_[i].whole ? MakeWhole(targets_[i]) : CompressOne(targets_[i]);
    }
    // What was appended counts, also of work that was stopped.
    const Status flipped = EndBatch();
    STOCKPOT_RETURN_IF_ERROR(status);
    STOCKPOT_RETURN_IF_ERROR(flipped);
    return report_;
  }

 private:
  struct Target {
    Digest artifact;
    ArtifactKind kind = ArtifactKind::kCheckpoint;
    std::string group;
    int64_t step = -1;
    bool whole = false;
    bool skipped = false;  // nothing to do but to be a parent
    Digest before;         // the one before in its lineage; zero: none
    int64_t bytes = 0;
  };

  Status At(std::string_view name) const {
    if (impl_.IsShutDown()) return Unavailable("the store is shutting down");
    return ReachFailpoint(impl_.options.failpoints, name);
  }

  // --- deciding ---

  Status Decide() {
    STOCKPOT_ASSIGN_OR_RETURN(const RetentionView view, store_.Retention());
    std::map<Digest, const Fate*> fates;
    bool found = false;
    for (const Fate& fate : view.fates) fates[fate.artifact] = &fate;
    for (size_t i = 0; i < view.fates.size(); ++i) {
      const RetentionArtifact& artifact = view.inputs.artifacts[i];
      if (artifact.tombstone) continue;  // undeleted or purged: either way not now
      const std::string why = WholeBecause(artifact, fates);
      if (!why.empty()) KeepChunksWhole(artifact.digest);
      const bool asked = options_.artifact && *options_.artifact == artifact.digest;
      if (asked && !why.empty()) {
        return InvalidArgument("artifact " + artifact.digest.ShortHex() + " stays whole: " + why);
      }
      if (artifact.run != options_.run && artifact.kind != ArtifactKind::kBase) continue;
      found = found || asked;
      targets_.push_back({.artifact = artifact.digest,
                          .kind = artifact.kind,
                          .group = artifact.group,
                          .step = artifact.step,
                          .whole = !why.empty(),
                          .skipped = options_.artifact && !asked});
    }
    if (options_.artifact && !found) {
      return InvalidArgument("artifact " + options_.artifact->ShortHex() + " is deleted");
    }
    OrderTargets();
    return OkStatus();
  }

  // Empty: it may be compressed.
  static std::string WholeBecause(const RetentionArtifact& artifact,
                                  const std::map<Digest, const Fate*>& fates) {
    const bool is_state = artifact.kind == ArtifactKind::kState;
    if (artifact.kind != ArtifactKind::kCheckpoint && !is_state) {
      return "it is a " + std::string(ArtifactKindName(artifact.kind));
    }
    for (const Keep& keep : fates.at(artifact.digest)->keeps) {
      if (KeepsWhole(keep.reason)) return KeepText(keep);
    }
    for (const Digest& source : artifact.sources) {
      const auto it = fates.find(source);
      if (!is_state || it == fates.end()) continue;
      for (const Keep& keep : it->second->keeps) {
        if (keep.reason == KeepReason::kLastGood) return "state of the " + KeepText(keep);
      }
    }
    return "";
  }

  void KeepChunksWhole(const Digest& artifact) {
    const Result<Manifest> manifest = store_.GetManifest(artifact);
    if (!manifest.ok()) return;  // damaged or purged since
    for (const TensorEntry& tensor : manifest->tensors) {
      for (const auto& [role, part] : tensor.parts) {
        whole_.insert(part.chunks.begin(), part.chunks.end());
      }
    }
  }

  // Parents before their children. Checkpoints and each group of states are a lineage each.
  void OrderTargets() {
    std::sort(targets_.begin(), targets_.end(), [](const Target& a, const Target& b) {
      return std::tie(a.kind, a.group, a.step, a.artifact) <
             std::tie(b.kind, b.group, b.step, b.artifact);
    });
    for (size_t i = 0; i < targets_.size(); ++i) {
      Target& target = targets_[i];
      const bool follows = i > 0 && targets_[i - 1].kind == target.kind &&
                           targets_[i - 1].group == target.group;
      if (follows) target.before = targets_[i - 1].artifact;
      const bool done = impl_.catalog->Has(Column::kRecords,
                                           catalog_keys::HistoryOf(target.artifact));
      target.skipped = target.skipped || (!target.whole && done);
      if (target.whole || target.skipped) continue;
      const Result<Manifest> manifest = store_.GetManifest(target.artifact);
      if (manifest.ok()) target.bytes = manifest->stored_bytes();
      total_bytes_ += target.bytes;
    }
  }

  // --- one artifact ---

  Status CompressOne(const Target& target) {
    const Result<Manifest> manifest = store_.GetManifest(target.artifact);
    if (!manifest.ok()) {
      return store_.HasArtifact(target.artifact) ? manifest.status() : OkStatus();
    }
    const std::optional<Manifest> before = Load(target.before);
    const std::optional<Manifest> base = Load(manifest->base.value_or(Digest{}));
    for (const TensorEntry& tensor : manifest->tensors) {
      if (tensor.codec != Codec::kRaw) continue;
      for (const auto& [role, part] : tensor.parts) {
        const Status status = CompressPart(tensor, role, part, before, base);
        if (!status.ok()) {
          return status.WithContext("artifact " + target.artifact.ShortHex() + " tensor '" +
                                    tensor.name + "'");
        }
      }
    }
    STOCKPOT_RETURN_IF_ERROR(EndBatch());
    ++report_.artifacts;
    return Note(target.artifact, true);
  }

  Status CompressPart(const TensorEntry& tensor, const std::string& role, const Part& part,
                      const std::optional<Manifest>& before, const std::optional<Manifest>& base) {
    for (size_t i = 0; i < part.chunks.size(); ++i) {
      STOCKPOT_RETURN_IF_ERROR(CompressChunk(part.chunks[i], ChunkAt(before, tensor, role, i),
                                             ChunkAt(base, tensor, role, i),
                                             static_cast<int>(DTypeSize(tensor.dtype))));
    }
    return OkStatus();
  }

  std::optional<Manifest> Load(const Digest& artifact) const {
    if (artifact.IsZero()) return std::nullopt;
    Result<Manifest> manifest = store_.GetManifest(artifact);
    if (!manifest.ok()) return std::nullopt;
    return *std::move(manifest);
  }

  Status CompressChunk(const Digest& chunk, const Digest& before, const Digest& base,
                       int element_bytes) {
    if (whole_.contains(chunk) || !seen_.insert(chunk).second) return OkStatus();
    STOCKPOT_RETURN_IF_ERROR(BeginBatch());
    STOCKPOT_ASSIGN_OR_RETURN(const auto location, impl_.FindChunk(chunk));
    if (!location || location->is_inline() || !location->is_whole()) return OkStatus();
    Digest parent;
    for (const Digest& candidate : {before, base}) {
      const bool fits = !candidate.IsZero() && forest_.Allows(chunk, candidate);
      if (parent.IsZero() && fits) parent = candidate;
    }
    STOCKPOT_RETURN_IF_ERROR(At("history.chunk"));
    STOCKPOT_ASSIGN_OR_RETURN(const ChunkLocation form,
                              impl_.AppendHistory(chunk, *location, parent, element_bytes));
    forest_.Set(chunk, form);
    if (form.is_whole()) {
      ++report_.kept_chunks;
    } else {
      ++report_.chunks;
      report_.chunk_bytes += form.length;
      report_.stored_bytes += form.stored_length();
    }
    return Account(form.length);
  }

  Status MakeWhole(const Target& target) {
    const Result<Manifest> manifest = store_.GetManifest(target.artifact);
    if (!manifest.ok()) return OkStatus();  // scrub names it
    for (const TensorEntry& tensor : manifest->tensors) {
      for (const auto& [role, part] : tensor.parts) {
        for (const Digest& chunk : part.chunks) STOCKPOT_RETURN_IF_ERROR(MakeChunkWhole(chunk));
      }
    }
    STOCKPOT_RETURN_IF_ERROR(EndBatch());
    if (!impl_.catalog->Has(Column::kRecords, catalog_keys::HistoryOf(target.artifact))) {
      return OkStatus();
    }
    return Note(target.artifact, false);
  }

  Status MakeChunkWhole(const Digest& chunk) {
    if (!seen_.insert(chunk).second) return OkStatus();
    STOCKPOT_ASSIGN_OR_RETURN(const auto before, impl_.FindChunk(chunk));
    if (!before || before->is_whole()) return OkStatus();
    STOCKPOT_RETURN_IF_ERROR(BeginBatch());
    STOCKPOT_ASSIGN_OR_RETURN(const auto location, impl_.FindChunk(chunk));
    if (!location || location->is_whole()) return OkStatus();
    STOCKPOT_RETURN_IF_ERROR(impl_.AppendWhole(chunk, *location));
    forest_.Set(chunk, {.length = location->length});
    ++report_.whole_chunks;
    return Account(location->length);
  }

  // Whether the artifact need not be looked at again. Lost by a crash, it is looked at again.
  Status Note(const Digest& artifact, bool compressed) {
    const std::string key = catalog_keys::HistoryOf(artifact);
    const Status status = impl_.Lead([&]() -> Status {
      CatalogBatch batch(*impl_.catalog);
      // Purged meanwhile: nothing would take the note away again.
      const bool there = store_.HasArtifact(artifact);
      if (compressed && there) {
        batch.Put(Column::kRecords, key, std::to_string(impl_.options.clock()));
      } else {
        batch.Delete(Column::kRecords, key);
      }
      return impl_.catalog->Write(batch, /*synced=*/false);
    });
    STOCKPOT_RETURN_IF_ERROR(status);
    return At("history.noted");
  }

  // --- batches: the forms change with the next commit, and no collection runs meanwhile ---

  Status BeginBatch() {
    if (batch_.owns_lock()) return OkStatus();
    batch_ = std::unique_lock(impl_.history_mutex);
    if (generation_ == impl_.history_generation) return OkStatus();
    generation_ = impl_.history_generation;
    return forest_.Read(*impl_.catalog);
  }

  Status EndBatch() {
    if (!batch_.owns_lock()) return OkStatus();
    Status status = batch_bytes_ == 0 ? OkStatus() : At("history.before_flip");
    if (status.ok() && batch_bytes_ > 0) status = store_.Apply({}).status();
    batch_.unlock();
    if (!status.ok()) return status;
    STOCKPOT_RETURN_IF_ERROR(batch_bytes_ == 0 ? OkStatus() : At("history.flipped"));
    return Throttle(std::exchange(batch_bytes_, 0));
  }

  Status Account(int64_t bytes) {
    batch_bytes_ += bytes;
    done_bytes_ += bytes;
    const int64_t most = options_.bytes_per_second > 0
                             ? std::min(kBatchBytes, options_.bytes_per_second)
                             : kBatchBytes;
    if (batch_bytes_ >= most) STOCKPOT_RETURN_IF_ERROR(EndBatch());
    if (!options_.progress) return OkStatus();
    const double share = static_cast<double>(done_bytes_) /
                         static_cast<double>(std::max<int64_t>(total_bytes_, done_bytes_));
    return options_.progress(share);
  }

  Status Throttle(int64_t bytes) {
    if (options_.bytes_per_second <= 0) return OkStatus();
    const auto now = std::chrono::steady_clock::now();
    allowed_at_ = std::max(allowed_at_, now) +  // no credit for idling
                  std::chrono::microseconds(bytes * 1'000'000 / options_.bytes_per_second);
    while (std::chrono::steady_clock::now() < allowed_at_) {
      if (impl_.IsShutDown()) return Unavailable("the store is shutting down");
      std::this_thread::sleep_for(std::min<std::chrono::steady_clock::duration>(
          allowed_at_ - std::chrono::steady_clock::now(),
          std::chrono::milliseconds(kThrottleSliceMs)));
    }
    return OkStatus();
  }

  CheckpointStore& store_;
  CheckpointStore::Impl& impl_;
  const HistoryOptions& options_;
  HistoryReport report_;
  std::vector<Target> targets_;
  std::unordered_set<Digest, DigestHash> whole_;  // chunks that stay whole
  std::unordered_set<Digest, DigestHash> seen_;
  DeltaForest forest_;
  int64_t generation_ = -1;  // that forest_ was read at
  std::unique_lock<std::mutex> batch_;
  int64_t batch_bytes_ = 0;
  int64_t done_bytes_ = 0;
  int64_t total_bytes_ = 0;
  std::chrono::steady_clock::time_point allowed_at_ = std::chrono::steady_clock::now();
};

Result<HistoryReport> CheckpointStore::CompressHistory(const HistoryOptions& options) {
  STOCKPOT_RETURN_IF_ERROR(GetRun(options.run).status());
  if (options.bytes_per_second < 0) {
    return InvalidArgument("bytes_per_second is negative: 0 does not throttle");
  }
  if (options.artifact) {
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, GetManifest(*options.artifact));
    if (manifest.run != options.run) {
      return InvalidArgument("artifact " + options.artifact->ShortHex() + " is not of run '" +
                             options.run + "'");
    }
  }
  const std::unique_lock one(impl_->compress_mutex, std::try_to_lock);
  if (!one.owns_lock()) {
    return Unavailable("history is being compressed already: try again after it");
  }
  return HistoryCompressor(*this, *impl_, options).Compress();
}

bool CheckpointStore::IsCompressed(const Digest& artifact) const {
  return impl_->catalog->Has(Column::kRecords, catalog_keys::HistoryOf(artifact));
}

}  // namespace stockpot
