// Backup, restore and repair: chunks and records from one store to another.
//
// A backup is a store of its own, in its own folder: packs and a catalogue (store/README.md). A
// copy first brings over the chunks that are missing there, each verified as it is read, then
// replaces the records by those of ONE moment of the source, in one synced batch. Killed before
// that, the backup is what it was. Nothing is collected in the source meanwhile; commits go on.
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <shared_mutex>
#include <unordered_set>

#include "store/catalog_keys.h"
#include "store/checkpoint_store_impl.h"

namespace stockpot {
namespace {

namespace keys = catalog_keys;

// Of the store itself, not of what it holds.
bool IsOwnRecord(std::string_view key) {
  // A copy holds its chunks whole, whatever form they have here, and does not go on with our jobs'
  // work: nothing else names its chunks.
  return key == keys::kFormat || key == keys::kNextPack || key == keys::kBackupEvent ||
         key.starts_with(keys::kHistory) || key.starts_with(keys::kDrafts);
}

// Whether something lies there that is not of a store; one may have been killed while it was made.
bool HoldsOtherFiles(const std::filesystem::path& directory) {
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(directory, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name != "LOCK" && name != "packs" && name != "catalog" && name != "COMMITTED") return true;
  }
  return false;
}

template <typename Visit>
void ForEachChunk(const Manifest& manifest, Visit visit) {
  for (const TensorEntry& tensor : manifest.tensors) {
    for (const auto& [role, part] : tensor.parts) {
      for (const Digest& chunk : part.chunks) visit(chunk);
    }
  }
  for (const auto& [name, part] : manifest.files) {
    for (const Digest& chunk : part.chunks) visit(chunk);
  }
}

}  // namespace

Status CheckpointStore::Impl::EnsureIdentity() {
  STOCKPOT_ASSIGN_OR_RETURN(const auto stored, catalog->Get(Column::kRecords, keys::kStoreId));
  if (stored) return OkStatus();
  std::array<std::byte, 16> random;
  if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    return Internal("no random numbers for the identity of the store");
  }
  CatalogBatch batch(*catalog);
  batch.Put(Column::kRecords, keys::kStoreId, Sha256(random).ShortHex());
  return catalog->Write(batch, /*synced=*/true);
}

// Copies `source` as it is when Copy() begins over whatever `target` holds.
class StoreCopy {
 public:
  StoreCopy(const CheckpointStore& source, CheckpointStore& target)
      : source_(source), target_(target), from_(*source.impl_), to_(*target.impl_) {}

  Result<BackupReport> Copy(const std::function<void(int64_t, int64_t)>& progress) {
    STOCKPOT_RETURN_IF_ERROR(At("backup.begin"));
    STOCKPOT_ASSIGN_OR_RETURN(moment_, from_.catalog->Freeze());
    STOCKPOT_RETURN_IF_ERROR(ListChunks());
    STOCKPOT_RETURN_IF_ERROR(At("backup.listed"));
    STOCKPOT_RETURN_IF_ERROR(CopyChunks(progress));
    STOCKPOT_RETURN_IF_ERROR(At("backup.chunks"));
    // Durable and indexed before any record names them.
    STOCKPOT_RETURN_IF_ERROR(target_.Apply({}).status());
    STOCKPOT_RETURN_IF_ERROR(At("backup.before_records"));
    STOCKPOT_RETURN_IF_ERROR(to_.Lead([&] { return ReplaceRecords(); }));
    STOCKPOT_RETURN_IF_ERROR(At("backup.records"));
    return report_;
  }

 private:
  Status At(std::string_view name) const {
    if (from_.IsShutDown()) return Unavailable("the store is shutting down");
    return ReachFailpoint(from_.options.failpoints, name);
  }

  Status ListChunks() {
    Status damage;
    STOCKPOT_RETURN_IF_ERROR(
        moment_->Scan(Column::kManifests, "", "", [&](std::string_view key, std::string_view json) {
          const Result<Digest> digest = Digest::FromRaw(key);
          Result<Manifest> manifest =
              digest.ok() && Sha256(json) == *digest
                  ? Manifest::FromJson(json)
                  : Result<Manifest>(Corruption("a manifest is damaged: scrub names it"));
          if (!manifest.ok()) {
            damage = manifest.status();
            return false;
          }
          ++report_.artifacts;
          ForEachChunk(*manifest, [&](const Digest& chunk) {
            if (seen_.insert(chunk).second) chunks_.push_back(chunk);
          });
          return true;
        }));
    report_.total_chunks = static_cast<int64_t>(chunks_.size());
    return damage;
  }

  Status CopyChunks(const std::function<void(int64_t, int64_t)>& progress) {
    int64_t done = 0;
    for (const Digest& chunk : chunks_) {
      if (progress) progress(done++, report_.total_chunks);
      if (from_.IsShutDown()) return Unavailable("the store is shutting down");
      if (to_.ClaimChunk(chunk)) continue;
      STOCKPOT_RETURN_IF_ERROR(At("backup.chunk"));
      const Result<std::vector<std::byte>> data = source_.ReadChunk(chunk);
      if (!data.ok()) return data.status().WithContext("not copied: `stockpot scrub` names what");
      STOCKPOT_RETURN_IF_ERROR(target_.PutChunk(chunk, *data));
      ++report_.copied_chunks;
      report_.copied_bytes += static_cast<int64_t>(data->size());
    }
    return OkStatus();
  }

  // REQUIRES: leads the target's commits.
  Status ReplaceRecords() {
    CatalogBatch batch(*to_.catalog);
    for (const Column column : {Column::kRecords, Column::kManifests, Column::kEvents}) {
      STOCKPOT_RETURN_IF_ERROR(ReplaceColumn(column, batch));
    }
    STOCKPOT_ASSIGN_OR_RETURN(const auto is_backup,
                              to_.catalog->Get(Column::kRecords, keys::kBackupEvent));
    if (is_backup) {
      batch.Put(Column::kRecords, keys::kBackupEvent, std::to_string(report_.event));
    }
    STOCKPOT_RETURN_IF_ERROR(to_.catalog->Write(batch, /*synced=*/true));
    STOCKPOT_ASSIGN_OR_RETURN(const auto last_job,
                              to_.catalog->Get(Column::kRecords, keys::kLastJob));
    to_.last_job = last_job ? std::strtoll(last_job->c_str(), nullptr, 10) : 0;
    const std::lock_guard guard(to_.event_mutex);
    to_.last_event = report_.event;
    return OkStatus();
  }

  // Writes what differs, so that an unchanged store costs a comparison.
  Status ReplaceColumn(Column column, CatalogBatch& batch) {
    std::unordered_set<std::string> kept;
    Status failure;
    STOCKPOT_RETURN_IF_ERROR(
        moment_->Scan(column, "", "", [&](std::string_view key, std::string_view value) {
          if (column == Column::kRecords && IsOwnRecord(key)) return true;
          kept.emplace(key);
          if (column == Column::kEvents) report_.event = keys::ParseBigEndian(std::string(key));
          const auto now = to_.catalog->Get(column, key);
          if (!now.ok()) failure = now.status();
          if (now.ok() && (!*now || **now != value)) batch.Put(column, key, value);
          return failure.ok();
        }));
    STOCKPOT_RETURN_IF_ERROR(failure);
    return to_.catalog->Scan(column, "", "", [&](std::string_view key, std::string_view) {
      const bool own = column == Column::kRecords && IsOwnRecord(key);
      if (!own && !kept.contains(std::string(key))) batch.Delete(column, key);
      return true;
    });
  }

  const CheckpointStore& source_;
  CheckpointStore& target_;
  CheckpointStore::Impl& from_;
  CheckpointStore::Impl& to_;
  std::unique_ptr<CatalogMoment> moment_;
  std::unordered_set<Digest, DigestHash> seen_;
  std::vector<Digest> chunks_;
  BackupReport report_;
};

// That DIR is new, or a backup of this very store that nobody wrote to.
Status CheckpointStore::Impl::CheckBackupTarget(const Impl& target) const {
  const std::string where = target.options.directory.string();
  STOCKPOT_ASSIGN_OR_RETURN(const auto event,
                            target.catalog->Get(Column::kRecords, keys::kBackupEvent));
  bool empty = true;
  STOCKPOT_RETURN_IF_ERROR(
      target.catalog->Scan(Column::kManifests, "", "", [&](std::string_view, std::string_view) {
        empty = false;
        return false;
      }));
  if (!event) {
    if (empty && target.LastEvent() == 0) return OkStatus();
    return InvalidArgument(where + " holds a store, not a backup: choose another folder");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto mine, catalog->Get(Column::kRecords, keys::kStoreId));
  STOCKPOT_ASSIGN_OR_RETURN(const auto its, target.catalog->Get(Column::kRecords, keys::kStoreId));
  if (mine != its) {
    return InvalidArgument(where + " is the backup of another store: choose another folder");
  }
  if (*event != std::to_string(target.LastEvent())) {
    return InvalidArgument(where +
                           " was served from and written to since its backup: it is a store "
                           "of its own now; choose another folder");
  }
  return OkStatus();
}

Result<BackupReport> CheckpointStore::BackupTo(
    const std::filesystem::path& directory,
    const std::function<void(int64_t done, int64_t total)>& progress) const {
  if (!directory.is_absolute()) return InvalidArgument("the folder must be an absolute path");
  std::error_code error;
  const auto inside = std::filesystem::weakly_canonical(directory, error);
  const auto data = std::filesystem::weakly_canonical(impl_->options.directory, error);
  if (std::mismatch(data.begin(), data.end(), inside.begin(), inside.end()).first == data.end()) {
    return InvalidArgument("the folder is inside the store itself");
  }
  if (HoldsOtherFiles(directory)) {
    return InvalidArgument(directory.string() + " is not empty and no backup");
  }
  const std::shared_lock maintenance(impl_->maintenance_mutex, std::try_to_lock);
  if (!maintenance.owns_lock()) {
    return Unavailable("a garbage collection is running: try again after it");
  }
  StoreOptions options = impl_->options;
  options.directory = directory;
  options.failpoints = nullptr;
  STOCKPOT_ASSIGN_OR_RETURN(auto target, Open(std::move(options)));
  STOCKPOT_RETURN_IF_ERROR(impl_->CheckBackupTarget(*target->impl_));
  Impl& to = *target->impl_;
  // From here on it is a backup, also one that was interrupted.
  STOCKPOT_RETURN_IF_ERROR(to.NoteBackupOf(*impl_));
  STOCKPOT_ASSIGN_OR_RETURN(BackupReport report, StoreCopy(*this, *target).Copy(progress));
  // What the source collected since the last time.
  STOCKPOT_RETURN_IF_ERROR(target->CollectGarbage({.purge = false}).status());
  return report;
}

Status CheckpointStore::Impl::NoteBackupOf(const Impl& source) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto id, source.catalog->Get(Column::kRecords, keys::kStoreId));
  CatalogBatch batch(*catalog);
  batch.Put(Column::kRecords, keys::kStoreId, id.value_or(""));
  batch.Put(Column::kRecords, keys::kBackupEvent, std::to_string(LastEvent()));
  return catalog->Write(batch, /*synced=*/true);
}

Result<BackupReport> RestoreStore(const std::filesystem::path& backup,
                                  const std::filesystem::path& data, const Clock& clock,
                                  const std::function<void(int64_t, int64_t)>& progress) {
  std::error_code error;
  if (!std::filesystem::exists(backup / "catalog", error)) {
    return NotFound(backup.string() + " holds no backup");
  }
  if (std::filesystem::exists(data, error)) {
    return AlreadyExists(data.string() + " exists: a store is restored into a new folder");
  }
  const std::filesystem::path whole = data.has_filename() ? data : data.parent_path();
  const std::filesystem::path partial = whole.string() + ".restoring";
  std::filesystem::remove_all(partial, error);  // of an attempt that was interrupted
  BackupReport report;
  {
    STOCKPOT_ASSIGN_OR_RETURN(const auto source,
                              CheckpointStore::Open({.directory = backup, .clock = clock}));
    STOCKPOT_ASSIGN_OR_RETURN(const auto target,
                              CheckpointStore::Open({.directory = partial, .clock = clock}));
    STOCKPOT_ASSIGN_OR_RETURN(report, StoreCopy(*source, *target).Copy(progress));
    STOCKPOT_ASSIGN_OR_RETURN(const ScrubReport scrubbed, target->Scrub(nullptr));
    if (!scrubbed.damaged.empty()) {
      return Corruption("what was written to " + partial.string() +
                        " does not read back: " + scrubbed.damaged[0].error);
    }
  }
  std::filesystem::rename(partial, whole, error);
  if (error) return ErrnoStatus(error.value(), whole.string());
  STOCKPOT_RETURN_IF_ERROR(SyncDirectory(std::filesystem::absolute(whole).parent_path()));
  return report;
}

// --- repair ---

Result<ScrubReport> CheckpointStore::Repair(
    const std::filesystem::path& backup,
    const std::function<void(int64_t done, int64_t total)>& progress) {
  std::error_code error;
  if (!backup.is_absolute() || !std::filesystem::exists(backup / "catalog", error)) {
    return InvalidArgument(backup.string() + " is no absolute path of a backup");
  }
  const std::shared_lock maintenance(impl_->maintenance_mutex, std::try_to_lock);
  if (!maintenance.owns_lock()) {
    return Unavailable("a garbage collection is running: try again after it");
  }
  STOCKPOT_ASSIGN_OR_RETURN(ScrubReport report, impl_->ScrubAll(*this, progress));
  if (report.damaged.empty()) return report;
  STOCKPOT_ASSIGN_OR_RETURN(const auto copy,
                            Open({.directory = backup, .clock = impl_->options.clock}));
  for (ScrubReport::Damage& damage : report.damaged) {
    const Status repaired = impl_->RepairFrom(*copy, damage.chunk);
    damage.repaired = repaired.ok();
    if (!repaired.ok()) damage.error += "; not repaired: " + repaired.message();
    STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(impl_->options.failpoints, "repair.chunk"));
  }
  STOCKPOT_RETURN_IF_ERROR(Apply({}).status());  // the new places become the index's
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(impl_->options.failpoints, "repair.done"));
  for (ScrubReport::Damage& damage : report.damaged) {
    if (!damage.repaired || HasArtifact(damage.chunk)) continue;
    const Status read = ReadChunk(damage.chunk).status();
    damage.repaired = read.ok();
    if (!read.ok()) damage.error += "; " + read.message();
  }
  return report;
}

// `digest` names a chunk, or an artifact whose manifest is damaged.
Status CheckpointStore::Impl::RepairFrom(const CheckpointStore& copy, const Digest& digest) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto kind,
                            catalog->Get(Column::kRecords, keys::Artifact(digest)));
  if (kind) {
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, copy.GetManifest(digest));
    CatalogBatch batch(*catalog);
    batch.Put(Column::kManifests, digest.raw(), manifest.ToJson());
    return catalog->Write(batch, /*synced=*/true);
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<std::byte> data, copy.ReadChunk(digest));
  return StoreChunk(digest, data);
}

}  // namespace stockpot
