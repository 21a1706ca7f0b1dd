#include "store/pack_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/base/check.h"

namespace stockpot {
namespace {

// --- limits ---
constexpr int64_t kStagingBytes = int64_t{8} << 20;  // one write of direct I/O
constexpr int kStagingBuffers = 4;                   // one filling, one being written, two between
constexpr int64_t kPreallocateBytes = int64_t{64} << 20;  // lost at most, until reopened, by a kill
constexpr size_t kMaxLostChunks = 1'000'000;              // remembered with their reason
static_assert(kStagingBytes % kPackBlockBytes == 0);
static_assert(kStagingBytes >= kPackHeaderBytes);
static_assert(kStagingBuffers >= 2);

}  // namespace

void PackWriter::FreeDeleter::operator()(std::byte* p) const { std::free(p); }

PackWriter::PackWriter(Options options)
    : options_(std::move(options)),
      next_pack_(options_.next_pack),
      writer_([this] { WriterLoop(); }) {}

PackWriter::~PackWriter() {
  {
    std::lock_guard append_lock(append_mutex_);
    if (current_ != nullptr) ClosePack();
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  writer_.join();
}

// --- appending ---

Status PackWriter::Append(const Digest& digest, std::span<const std::byte> data, uint32_t crc) {
  return AppendForm(digest, data, {.length = static_cast<uint32_t>(data.size()), .crc = crc});
}

Status PackWriter::AppendForm(const Digest& digest, std::span<const std::byte> data,
                              ChunkLocation location) {
  STOCKPOT_CHECK(data.size() == location.stored_length(), data.size(), location.stored_length());
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !appending_.contains(digest); });
    if (pending_.contains(digest)) return OkStatus();
    appending_.insert(digest);
  }
  Status status;
  {
    std::lock_guard append_lock(append_mutex_);
    status = AppendOnce(digest, data, location);
    // A pack that failed under the append says nothing about the next one.
    if (status.code() == StatusCode::kUnavailable) status = AppendOnce(digest, data, location);
  }
  std::lock_guard lock(mutex_);
  appending_.erase(digest);
  changed_.notify_all();
  return status;
}

Status PackWriter::AppendOnce(const Digest& digest, std::span<const std::byte> data,
                              ChunkLocation location) {
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.append"));
  STOCKPOT_RETURN_IF_ERROR(EnsurePack());
  location.pack = current_->number;
  location.offset = static_cast<uint64_t>(buffer_offset_ + buffer_fill_);
  STOCKPOT_RETURN_IF_ERROR(CopyIn(EncodeRecordHeader(digest, location)));
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.append.header"));
  STOCKPOT_RETURN_IF_ERROR(CopyIn(data));
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.append.data"));
  std::lock_guard lock(mutex_);
  if (!current_->failure.ok()) return current_->failure;
  pending_[digest] = Pending{location, current_};
  lost_.erase(digest);
  return OkStatus();
}

Status PackWriter::EnsurePack() {
  if (current_ != nullptr) {
    bool failed = false;
    {
      std::lock_guard lock(mutex_);
      failed = !current_->failure.ok();
      if (failed && buffer_ != nullptr) free_buffers_.push_back(std::move(buffer_));
    }
    if (failed) {
      current_ = nullptr;
      buffer_ = nullptr;
    } else if (buffer_offset_ + buffer_fill_ >= options_.pack_bytes) {
      ClosePack();
    }
  }
  return current_ == nullptr ? OpenPack() : OkStatus();
}

Status PackWriter::OpenPack() {
  auto pack = std::make_shared<PackFile>();
  {
    std::lock_guard lock(mutex_);
    pack->number = next_pack_++;
  }
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.create"));
  // O_EXCL: a pack that is there already is never appended to, whatever the numbers say.
  Result<std::shared_ptr<FileHandle>> file =
      OpenFile(PackPath(options_.directory, pack->number), O_WRONLY | O_CREAT | O_EXCL);
  if (!file.ok()) return file.status().WithContext("new pack");
  pack->handle = *file;
  STOCKPOT_RETURN_IF_ERROR(Reach("pack.created"));
  pack->direct = TryDirect(*pack->handle);
  buffer_offset_ = 0;
  buffer_fill_ = 0;
  STOCKPOT_RETURN_IF_ERROR(TakeBuffer());
  EncodePackHeader(pack->number, {buffer_.get(), kPackHeaderBytes});
  buffer_fill_ = kPackHeaderBytes;
  std::lock_guard lock(mutex_);
  current_ = pack;
  unsynced_.push_back(std::move(pack));
  return OkStatus();
}

Status PackWriter::TakeBuffer() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock,
                [&] { return !free_buffers_.empty() || allocated_buffers_ < kStagingBuffers; });
  if (!free_buffers_.empty()) {
    buffer_ = std::move(free_buffers_.back());
    free_buffers_.pop_back();
    return OkStatus();
  }
  buffer_.reset(static_cast<std::byte*>(std::aligned_alloc(kPackBlockBytes, kStagingBytes)));
  if (buffer_ == nullptr) return ResourceExhausted("no memory for a staging buffer");
  ++allocated_buffers_;
  return OkStatus();
}

Status PackWriter::CopyIn(std::span<const std::byte> data) {
  while (!data.empty()) {
    if (buffer_ == nullptr) STOCKPOT_RETURN_IF_ERROR(TakeBuffer());
    const size_t room = static_cast<size_t>(kStagingBytes - buffer_fill_);
    const size_t n = std::min(data.size(), room);
    std::memcpy(buffer_.get() + buffer_fill_, data.data(), n);
    buffer_fill_ += static_cast<int64_t>(n);
    data = data.subspan(n);
    if (buffer_fill_ == kStagingBytes) SealBuffer();
  }
  return OkStatus();
}

// Hands the buffer to the writer thread, padded to whole blocks.
void PackWriter::SealBuffer() {
  if (buffer_ == nullptr) return;
  const int64_t length = RoundUpToBlock(buffer_fill_);
  std::memset(buffer_.get() + buffer_fill_, 0, static_cast<size_t>(length - buffer_fill_));
  std::lock_guard lock(mutex_);
  if (length == 0) {
    free_buffers_.push_back(std::move(buffer_));
  } else {
    current_->enqueued = buffer_offset_ + length;
    queue_.push_back(Task{current_, std::move(buffer_), buffer_offset_, length});
  }
  buffer_ = nullptr;
  buffer_offset_ += length;
  buffer_fill_ = 0;
  changed_.notify_all();
}

void PackWriter::ClosePack() {
  SealBuffer();
  std::lock_guard lock(mutex_);
  queue_.push_back(Task{current_, nullptr, 0, 0});
  current_ = nullptr;
  changed_.notify_all();
}

// --- the writer thread ---

void PackWriter::WriterLoop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !queue_.empty() || stopping_; });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    Status status = task.pack->failure;
    if (status.ok()) {
      lock.unlock();
      status = task.buffer != nullptr ? WriteTask(task) : FinishPack(*task.pack);
      lock.lock();
      if (!status.ok()) FailPack(*task.pack, status);
    }
    if (task.buffer != nullptr) {
      if (status.ok()) task.pack->written = task.offset + task.length;
      free_buffers_.push_back(std::move(task.buffer));
    } else {
      if (status.ok()) {
        task.pack->synced = task.pack->enqueued;
        task.pack->directory_synced = true;
      }
      task.pack->handle = nullptr;
      Retire(*task.pack);
    }
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

// Makes a full pack durable early, so that its descriptor can be closed.
Status PackWriter::FinishPack(PackFile& pack) {
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
  struct Target {
    std::shared_ptr<PackFile> pack;
    std::shared_ptr<FileHandle> handle;
    int64_t end = 0;
    Status status;
  };
  std::vector<Target> targets;
  {
    std::lock_guard append_lock(append_mutex_);
    if (current_ != nullptr) SealBuffer();
    std::lock_guard lock(mutex_);
    for (const auto& pack : unsynced_) {
      if (pack->enqueued > pack->synced) targets.push_back({pack, nullptr, pack->enqueued, {}});
    }
  }
  bool directory_dirty = false;
  {
    std::unique_lock lock(mutex_);
    for (Target& target : targets) {
      changed_.wait(
          lock, [&] { return target.pack->written >= target.end || !target.pack->failure.ok(); });
      if (target.pack->failure.ok()) target.handle = target.pack->handle;  // null: closed, durable
      directory_dirty = directory_dirty || !target.pack->directory_synced;
    }
  }
  for (Target& target : targets) {
    if (target.handle == nullptr) continue;
    target.status = Reach("pack.sync");
    if (target.status.ok()) target.status = SyncFileData(*target.handle);
    if (target.status.ok()) target.status = Reach("pack.sync.data");
  }
  Status directory = directory_dirty ? Reach("pack.sync.directory") : OkStatus();
  if (directory_dirty && directory.ok()) directory = SyncDirectory(options_.directory);

  std::vector<IndexedChunk> durable;
  std::lock_guard lock(mutex_);
  for (Target& target : targets) {
    PackFile& pack = *target.pack;
    if (target.handle == nullptr) continue;
    if (target.status.ok() && !pack.directory_synced) target.status = directory;
    if (!target.status.ok()) {
      FailPack(pack, target.status);
    } else {
      pack.synced = std::max(pack.synced, target.end);
      pack.directory_synced = true;
    }
  }
  for (const auto& [digest, chunk] : pending_) {
    if (chunk.location.end() <= static_cast<uint64_t>(chunk.pack->synced)) {
      durable.push_back({digest, chunk.location});
    }
  }
  changed_.notify_all();
  return durable;
}

void PackWriter::MarkIndexed(std::span<const IndexedChunk> chunks) {
  std::lock_guard lock(mutex_);
  for (const IndexedChunk& chunk : chunks) pending_.erase(chunk.digest);
}

// --- asking ---

std::optional<ChunkLocation> PackWriter::FindPending(const Digest& digest) const {
  std::lock_guard lock(mutex_);
  const auto it = pending_.find(digest);
  if (it == pending_.end()) return std::nullopt;
  return it->second.location;
}

std::vector<IndexedChunk> PackWriter::PendingDeltas() const {
  std::lock_guard lock(mutex_);
  std::vector<IndexedChunk> deltas;
  for (const auto& [digest, chunk] : pending_) {
    if (chunk.location.form == ChunkForm::kDelta) deltas.push_back({digest, chunk.location});
  }
  return deltas;
}

Status PackWriter::WaitUntilReadable(const Digest& digest) {
  Pending chunk;
  {
    std::lock_guard lock(mutex_);
    const auto it = pending_.find(digest);
    if (it == pending_.end()) return OkStatus();
    chunk = it->second;
    if (static_cast<uint64_t>(chunk.pack->written) >= chunk.location.end()) return OkStatus();
  }
  // Rare: somebody reads what was just appended. Its end may still be in the staging buffer.
  {
    std::lock_guard append_lock(append_mutex_);
    const int64_t staged_end = buffer_offset_ + buffer_fill_;
    if (chunk.pack == current_ && buffer_fill_ > 0 &&
        chunk.location.end() > static_cast<uint64_t>(buffer_offset_) &&
        chunk.location.offset < static_cast<uint64_t>(staged_end)) {
      SealBuffer();
    }
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    return static_cast<uint64_t>(chunk.pack->written) >= chunk.location.end() ||
           !chunk.pack->failure.ok();
  });
  return chunk.pack->failure;
}

void PackWriter::Roll() {
  const std::lock_guard append_lock(append_mutex_);
  if (current_ == nullptr) return;
  const std::shared_ptr<PackFile> pack = current_;
  ClosePack();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return pack->handle == nullptr; });
}

std::optional<uint32_t> PackWriter::current_pack() {
  const std::lock_guard append_lock(append_mutex_);
  if (current_ == nullptr) return std::nullopt;
  return current_->number;
}

bool PackWriter::IsOpen(uint32_t pack) {
  const std::lock_guard append_lock(append_mutex_);
  if (current_ != nullptr && current_->number == pack) return true;
  const std::lock_guard lock(mutex_);
  for (const auto& other : unsynced_) {
    if (other->number == pack) return true;
  }
  for (const auto& [digest, chunk] : pending_) {
    if (chunk.location.pack == pack) return true;
  }
  return false;
}

int64_t PackWriter::unwritten_bytes() {
  const std::lock_guard append_lock(append_mutex_);
  const std::lock_guard lock(mutex_);
  int64_t bytes = buffer_ == nullptr ? 0 : buffer_fill_;
  for (const auto& pack : unsynced_) {
    if (pack->failure.ok()) bytes += pack->enqueued - pack->written;
  }
  return bytes;
}

Status PackWriter::LostReason(const Digest& digest) const {
  std::lock_guard lock(mutex_);
  const auto it = lost_.find(digest);
  return it == lost_.end() ? OkStatus() : it->second;
}

uint32_t PackWriter::next_pack() const {
  std::lock_guard lock(mutex_);
  return next_pack_;
}

}  // namespace stockpot
