#include "store/pack_writer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/base/check.h"

namespace stockpot {
namespace {

// --- limits ---
constexpr int64_t kStagingBytes = int64_t{8} << 20;  // one write of direct I/O
constexpr int64_t kHugePageBytes = int64_t{2} << 20;
constexpr int kStagingBuffers = 4;  // one filling, one being written, two between
static_assert(kStagingBytes % kHugePageBytes == 0 && kHugePageBytes % kPackBlockBytes == 0);
static_assert(kStagingBytes >= kPackHeaderBytes);
static_assert(kStagingBuffers >= 2);

}  // namespace

void PackWriter::FreeDeleter::operator()(std::byte* p) const { std::free(p); }

PackWriter::PackWriter(Options options)
    : options_(std::move(options)),
      next_pack_(options_.next_pack),
      writer_([this] { WriterLoop(); }),
      syncer_([this] { SyncLoop(); }) {}

PackWriter::~PackWriter() {
  {
    std::lock_guard append_lock(append_mutex_);
    if (current_ != nullptr) ClosePack();
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  writer_.join();
  {
    std::lock_guard lock(mutex_);
    written_out_ = true;
    changed_.notify_all();
  }
  syncer_.join();
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
  buffer_.reset(static_cast<std::byte*>(std::aligned_alloc(kHugePageBytes, kStagingBytes)));
  if (buffer_ == nullptr) return ResourceExhausted("no memory for a staging buffer");
  // Direct I/O from 4 KiB pages is cut into so many segments that it costs half of the speed. A
  // system without huge pages is as right.
  [[maybe_unused]] const int advised = ::madvise(buffer_.get(), kStagingBytes, MADV_HUGEPAGE);
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
