// The threads of PackWriter: writing what was appended, and making it durable.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "store/pack_writer.h"

namespace stockpot {
namespace {

// --- limits ---
constexpr int64_t kPreallocateBytes = int64_t{64} << 20;  // lost at most, until reopened, by a kill
constexpr size_t kMaxFinishing = 4;                       // packs; then writing waits for syncing
constexpr size_t kMaxLostChunks = 1'000'000;              // remembered with their reason

}  // namespace

// --- the writer thread ---

void PackWriter::WriterLoop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock,
                  [&] { return queue_.empty() ? stopping_ : finishing_.size() < kMaxFinishing; });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    if (task.buffer == nullptr) {
      finishing_.push_back(task.pack);
      changed_.notify_all();
      continue;
    }
    Status status = task.pack->failure;
    if (status.ok()) {
      lock.unlock();
      status = WriteTask(task);
      lock.lock();
      if (!status.ok()) FailPack(*task.pack, status);
    }
    if (status.ok()) task.pack->written = task.offset + task.length;
    free_buffers_.push_back(std::move(task.buffer));
    changed_.notify_all();
  }
}

Status PackWriter::WriteTask(const Task& task) {
  PackFile& pack = *task.pack;
  const int64_t end = task.offset + task.length;
  if (end > pack.preallocated) {
    // Fewer extents and no allocation inside the write. A file system without it is as right.
    const int64_t bytes = std::max(kPreallocateBytes, task.length);
    if (::fallocate(pack.handle->fd(), FALLOC_FL_KEEP_SIZE, task.offset, bytes) == 0) {
      pack.preallocated = task.offset + bytes;
    } else {
      pack.preallocated = INT64_MAX;  // do not ask again
    }
  }
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.write"));
  STOCKPOT_RETURN_IF_ERROR(WriteExactly(*pack.handle, task.offset,
                                        {task.buffer.get(), static_cast<size_t>(task.length)},
                                        pack.direct));
  return Reach("pack.written");
}

// --- the sync thread ---

std::shared_ptr<PackWriter::PackFile> PackWriter::NextToSync() const {
  for (const auto& pack : finishing_) {
    if (!pack->syncing) return pack;
  }
  if (committing_) return nullptr;
  for (const auto& pack : unsynced_) {
    if (!pack->syncing && pack->written - pack->synced >= options_.sync_ahead_bytes) return pack;
  }
  return nullptr;
}

void PackWriter::SyncLoop() {
  std::unique_lock lock(mutex_);
  while (true) {
    std::shared_ptr<PackFile> pack;
    changed_.wait(lock, [&] {
      pack = NextToSync();
      return pack != nullptr || (written_out_ && finishing_.empty());
    });
    if (pack == nullptr) return;
    const bool is_full = std::find(finishing_.begin(), finishing_.end(), pack) != finishing_.end();
    if (pack->failure.ok()) {
      const int64_t end = pack->written;
      const bool with_directory = !pack->directory_synced;
      pack->syncing = true;
      lock.unlock();
      const Status status = is_full ? FinishPack(*pack) : SyncAhead(*pack, with_directory);
      lock.lock();
      pack->syncing = false;
      if (!status.ok()) {
        FailPack(*pack, status);
      } else if (pack->failure.ok()) {
        pack->synced = std::max(pack->synced, end);
        pack->directory_synced = true;
      }
    }
    if (is_full) {
      pack->handle = nullptr;
      std::erase(finishing_, pack);
      Retire(*pack);
    }
    changed_.notify_all();
  }
}

Status PackWriter::SyncAhead(const PackFile& pack, bool with_directory) {
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.sync"));
  STOCKPOT_RETURN_IF_ERROR(SyncFileData(*pack.handle));
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.sync.data"));
  if (!with_directory) return OkStatus();
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.sync.directory"));
  return SyncDirectory(options_.directory);
}

// Makes a full pack durable, so that its descriptor can be closed.
Status PackWriter::FinishPack(const PackFile& pack) {
  // Gives back what was preallocated past the end; failing that costs space only.
  [[maybe_unused]] const int trimmed = ::ftruncate(pack.handle->fd(), pack.written);
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.finish"));
  STOCKPOT_RETURN_IF_ERROR(SyncFileData(*pack.handle));
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.finish.synced"));
  return SyncDirectory(options_.directory);
}

void PackWriter::FailPack(PackFile& pack, const Status& status) {
  if (!pack.failure.ok()) return;
  // Callers may try again with the chunks, into another pack.
  const StatusCode code = status.code() == StatusCode::kResourceExhausted
                              ? StatusCode::kResourceExhausted
                              : StatusCode::kUnavailable;
  pack.failure = Status(code, "pack " + PackPath("", pack.number).string() +
                                  " failed (send its chunks again): " + status.message());
  for (auto it = pending_.begin(); it != pending_.end();) {
    const bool lost = it->second.pack.get() == &pack &&
                      it->second.location.end() > static_cast<uint64_t>(pack.synced);
    if (lost && lost_.size() < kMaxLostChunks) lost_[it->first] = pack.failure;
    it = lost ? pending_.erase(it) : std::next(it);
  }
  Retire(pack);
  // Nothing of it was ever durable, so nothing can name it.
  if (pack.synced == 0) ::unlink(PackPath(options_.directory, pack.number).c_str());
}

void PackWriter::Retire(const PackFile& pack) {
  std::erase_if(unsynced_, [&](const auto& other) { return other.get() == &pack; });
}

// --- syncing ---

std::vector<IndexedChunk> PackWriter::Sync() {
  std::vector<SyncTarget> targets = TakeSyncTargets();
  SyncTargets(targets);
  return SettleSync(targets);
}

// What must be durable at the end, written and in this thread's hand.
std::vector<PackWriter::SyncTarget> PackWriter::TakeSyncTargets() {
  std::vector<SyncTarget> targets;
  {
    std::lock_guard append_lock(append_mutex_);
    if (current_ != nullptr) SealBuffer();
    std::lock_guard lock(mutex_);
    committing_ = true;
    for (const auto& pack : unsynced_) {
      if (pack->enqueued > pack->synced) targets.push_back({pack, pack->enqueued});
    }
  }
  std::unique_lock lock(mutex_);
  const auto is_settled = [](const SyncTarget& target) {
    return target.pack->synced >= target.end || !target.pack->failure.ok();
  };
  // Nothing is in this thread's hand as long as it waits for the writer.
  for (const SyncTarget& target : targets) {
    changed_.wait(lock, [&] { return is_settled(target) || target.pack->written >= target.end; });
  }
  for (SyncTarget& target : targets) {
    changed_.wait(lock, [&] {
      const bool is_full = std::find(finishing_.begin(), finishing_.end(), target.pack) !=
                           finishing_.end();  // the sync thread's
      return is_settled(target) || (!target.pack->syncing && !is_full);
    });
    target.is_ours = !is_settled(target);
    if (target.is_ours) target.pack->syncing = true;
  }
  return targets;
}

void PackWriter::SyncTargets(std::span<SyncTarget> targets) {
  bool directory_dirty = false;
  for (SyncTarget& target : targets) {
    if (!target.is_ours) continue;
    target.status = Reach("pack.sync");
    if (target.status.ok()) target.status = SyncFileData(*target.pack->handle);
    if (target.status.ok()) target.status = Reach("pack.sync.data");
    const std::lock_guard lock(mutex_);
    directory_dirty = directory_dirty || !target.pack->directory_synced;
  }
  if (!directory_dirty) return;
  Status directory = Reach("pack.sync.directory");
  if (directory.ok()) directory = SyncDirectory(options_.directory);
  const std::lock_guard lock(mutex_);
  for (SyncTarget& target : targets) {
    if (target.status.ok() && !target.pack->directory_synced) target.status = directory;
  }
}

std::vector<IndexedChunk> PackWriter::SettleSync(std::span<const SyncTarget> targets) {
  const std::lock_guard lock(mutex_);
  for (const SyncTarget& target : targets) {
    if (!target.is_ours) continue;
    PackFile& pack = *target.pack;
    pack.syncing = false;
    if (!target.status.ok()) {
      FailPack(pack, target.status);
    } else if (pack.failure.ok()) {
      pack.synced = std::max(pack.synced, target.end);
      pack.directory_synced = true;
    }
  }
  committing_ = false;
  std::vector<IndexedChunk> durable;
  for (const auto& [digest, chunk] : pending_) {
    if (chunk.location.end() <= static_cast<uint64_t>(chunk.pack->synced)) {
      durable.push_back({digest, chunk.location});
    }
  }
  changed_.notify_all();
  return durable;
}

}  // namespace stockpot
