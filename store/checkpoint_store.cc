#include "store/checkpoint_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include "kernels/base/check.h"
#include "store/catalog_keys.h"
#include "store/checkpoint_store_impl.h"
#include "store/crc32c.h"
#include "store/record_codec.h"

namespace stockpot {
namespace {

constexpr size_t kMaxGroup = 64;      // commits that share one sync
constexpr int64_t kSyncsAPack = 4;    // of one that is filled between two commits

Result<std::shared_ptr<FileHandle>> LockDirectory(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "LOCK";
  STOCKPOT_ASSIGN_OR_RETURN(auto file, OpenFile(path, O_RDWR | O_CREAT));
  if (::flock(file->fd(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      return Unavailable(directory.string() + " is open in another process (or twice in this one)");
    }
    return ErrnoStatus(errno, path.string());
  }
  return file;
}

// Makes the folder and those above it that are missing, each with a name that lasts.
Status MakeDirectories(const std::filesystem::path& directory) {
  std::error_code error;
  if (std::filesystem::is_directory(directory, error)) return OkStatus();
  const std::filesystem::path parent = std::filesystem::absolute(directory).parent_path();
  STOCKPOT_RETURN_IF_ERROR(MakeDirectories(parent));
  std::filesystem::create_directory(directory, error);
  if (error) return ErrnoStatus(error.value(), directory.string());
  return SyncDirectory(parent);
}

// Gives back the space that a killed process had preallocated past the end of its last pack.
void TrimPack(const std::filesystem::path& path) {
  struct stat info;
  constexpr int64_t kSlackBytes = 1 << 20;
  if (::stat(path.c_str(), &info) != 0) return;
  if (int64_t{info.st_blocks} * 512 <= info.st_size + kSlackBytes) return;
  [[maybe_unused]] const int trimmed = ::truncate(path.c_str(), info.st_size);
}

// The greatest number of a pack in the folder, after trimming them all.
Result<uint32_t> SurveyPacks(const std::filesystem::path& directory) {
  uint32_t greatest = 0;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(directory, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const std::optional<uint32_t> number = PackNumber(it->path());
    if (!number) continue;
    greatest = std::max(greatest, *number);
    TrimPack(it->path());
  }
  if (error) return ErrnoStatus(error.value(), directory.string());
  return greatest;
}

// Events are never deleted: where the first one is missing, the catalogue lost its oldest file.
Status CheckFirstEvent(const Catalog& catalog) {
  std::string first;
  STOCKPOT_RETURN_IF_ERROR(
      catalog.Scan(Column::kEvents, "", "", [&](std::string_view key, std::string_view) {
        first = key;
        return false;
      }));
  if (first.empty() || first == catalog_keys::BigEndian(1)) return OkStatus();
  return Corruption("the catalogue lacks its first events: its list of files (MANIFEST-*) is "
                    "damaged or cut. Restore the store from a backup (`stockpot restore`)");
}

int64_t ParseCounter(const std::optional<std::string>& text) {
  return text ? std::strtoll(text->c_str(), nullptr, 10) : 0;
}

}  // namespace

Clock SystemClock() {
  return [] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  };
}

CheckpointStore::CheckpointStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointStore::~CheckpointStore() { Shutdown(); }

Result<std::unique_ptr<CheckpointStore>> CheckpointStore::Open(StoreOptions options) {
  STOCKPOT_CHECK(options.clock != nullptr);
  auto impl = std::make_unique<Impl>();
  impl->options = std::move(options);
  const std::filesystem::path& directory = impl->options.directory;
  impl->packs_directory = directory / "packs";
  STOCKPOT_RETURN_IF_ERROR(MakeDirectories(impl->packs_directory));
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(impl->options.failpoints, "open.directory"));
  STOCKPOT_ASSIGN_OR_RETURN(impl->lock, LockDirectory(directory));
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(impl->options.failpoints, "open.locked"));
  STOCKPOT_ASSIGN_OR_RETURN(impl->catalog, Catalog::Open(directory / "catalog"));
  // The names of packs/, catalog/ and COMMITTED, before anything in them is promised to anybody.
  STOCKPOT_RETURN_IF_ERROR(SyncDirectory(directory));

  STOCKPOT_RETURN_IF_ERROR(impl->EnsureIdentity());
  STOCKPOT_RETURN_IF_ERROR(impl->EnsureOpenJobs());
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(impl->options.failpoints, "open.catalog"));
  STOCKPOT_ASSIGN_OR_RETURN(const uint32_t greatest, SurveyPacks(impl->packs_directory));
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(impl->options.failpoints, "open.surveyed"));
  STOCKPOT_ASSIGN_OR_RETURN(const auto next_pack,
                            impl->catalog->Get(Column::kRecords, catalog_keys::kNextPack));
  STOCKPOT_RETURN_IF_ERROR(impl->ReadCounters());
  STOCKPOT_RETURN_IF_ERROR(CheckFirstEvent(*impl->catalog));
  PackWriter::Options packs{.directory = impl->packs_directory,
                            .pack_bytes = impl->options.pack_bytes,
                            .sync_ahead_bytes = impl->options.pack_bytes / kSyncsAPack,
                            .failpoints = impl->options.failpoints};
  packs.next_pack = std::max(greatest + 1, static_cast<uint32_t>(ParseCounter(next_pack)));
  impl->reader = std::make_unique<PackReader>(impl->packs_directory);
  impl->writer = std::make_unique<PackWriter>(std::move(packs));
  return std::unique_ptr<CheckpointStore>(new CheckpointStore(std::move(impl)));
}

// Stores of before there was a list of the open jobs get one.
Status CheckpointStore::Impl::EnsureOpenJobs() {
  if (catalog->Has(Column::kRecords, catalog_keys::kOpenJobsKept)) return OkStatus();
  CatalogBatch batch(*catalog);
  STOCKPOT_RETURN_IF_ERROR(catalog->Scan(
      Column::kRecords, catalog_keys::kJobs, "", [&](std::string_view, std::string_view value) {
        const Result<Job> job = DecodeJob(value);
        const bool open = job.ok() && (job->state == JobState::kQueued ||
                                       job->state == JobState::kRunning);
        if (open) batch.Put(Column::kRecords, catalog_keys::OpenJob(job->sequence), job->key);
        return true;
      }));
  batch.Put(Column::kRecords, catalog_keys::kOpenJobsKept, "1");
  return catalog->Write(batch, /*synced=*/true);
}

// --- chunks ---

Result<std::optional<ChunkLocation>> CheckpointStore::Impl::FindChunk(const Digest& digest) const {
  // Pending first: a chunk leaves it only after its index entry is there.
  if (const auto pending = writer->FindPending(digest)) return pending;
  STOCKPOT_ASSIGN_OR_RETURN(const auto raw, catalog->Get(Column::kChunks, digest.raw()));
  if (!raw) return std::optional<ChunkLocation>();
  Result<ChunkLocation> location = ChunkLocation::Decode(*raw);
  if (!location.ok()) return location.status().WithContext("chunk " + digest.Hex());
  return std::optional<ChunkLocation>(*location);
}

bool CheckpointStore::Impl::HasChunk(const Digest& digest) const {
  const auto location = FindChunk(digest);
  return location.ok() && location->has_value();
}

bool CheckpointStore::Impl::ClaimChunk(const Digest& digest) const {
  const std::shared_lock claims(claim_mutex);
  guards->Touch(digest);
  {
    const std::lock_guard guard(damaged_mutex);
    if (damaged.contains(digest)) return false;
  }
  return HasChunk(digest);
}

Status CheckpointStore::Impl::StoreChunk(const Digest& digest, std::span<const std::byte> data) {
  STOCKPOT_RETURN_IF_ERROR(CheckReserve(data.size()));
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(options.failpoints, "put.checked"));
  STOCKPOT_RETURN_IF_ERROR(static_cast<int64_t>(data.size()) < kInlineChunkBytes
                               ? PutInline(digest, data)
                               : writer->Append(digest, data, Crc32c(data)));
  const std::lock_guard guard(damaged_mutex);
  damaged.erase(digest);
  return OkStatus();
}

std::vector<bool> CheckpointStore::HaveChunks(std::span<const Digest> digests) const {
  std::vector<bool> have;
  have.reserve(digests.size());
  for (const Digest& digest : digests) have.push_back(impl_->ClaimChunk(digest));
  return have;
}

Status CheckpointStore::Impl::CheckReserve(size_t bytes) const {
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t free_bytes, FreeBytes(packs_directory));
  if (free_bytes >= options.free_bytes_reserve + static_cast<int64_t>(bytes)) return OkStatus();
  return ResourceExhausted("the disk of " + options.directory.string() + " has " +
                           std::to_string(free_bytes >> 20) + " MiB free, the reserve is " +
                           std::to_string(options.free_bytes_reserve >> 20) + " MiB");
}

Status CheckpointStore::Impl::PutInline(const Digest& digest, std::span<const std::byte> data) {
  const ChunkLocation location{.length = static_cast<uint32_t>(data.size()), .crc = Crc32c(data)};
  CatalogBatch batch(*catalog);
  batch.Put(Column::kInline, digest.raw(),
            {reinterpret_cast<const char*>(data.data()), data.size()});
  batch.Put(Column::kChunks, digest.raw(), location.Encode());
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(options.failpoints, "put.inline.before_write"));
  STOCKPOT_RETURN_IF_ERROR(catalog->Write(batch, /*synced=*/false));
  return ReachFailpoint(options.failpoints, "put.inline.after_write");
}

Status CheckpointStore::PutChunk(const Digest& digest, std::span<const std::byte> data) {
  if (data.empty() || static_cast<int64_t>(data.size()) > kChunkBytes) {
    return InvalidArgument("chunk " + digest.Hex() + " has " + std::to_string(data.size()) +
                           " bytes; 1 to " + std::to_string(kChunkBytes) + " are allowed");
  }
  if (Sha256(data) != digest) {
    return InvalidArgument("the bytes of chunk " + digest.Hex() + " have another SHA-256");
  }
  if (impl_->ClaimChunk(digest)) return OkStatus();
  STOCKPOT_RETURN_IF_ERROR(CheckQuota(static_cast<int64_t>(data.size())));
  return impl_->StoreChunk(digest, data);
}

Result<Part> CheckpointStore::PutBytes(std::span<const std::byte> data) {
  Part part;
  part.bytes = static_cast<int64_t>(data.size());
  part.chunks.reserve(static_cast<size_t>(ChunkCount(part.bytes)));
  while (!data.empty()) {
    const auto chunk = data.first(std::min(data.size(), static_cast<size_t>(kChunkBytes)));
    data = data.subspan(chunk.size());
    const Digest digest = Sha256(chunk);
    part.chunks.push_back(digest);
    if (impl_->ClaimChunk(digest)) continue;
    STOCKPOT_RETURN_IF_ERROR(CheckQuota(static_cast<int64_t>(chunk.size())));
    STOCKPOT_RETURN_IF_ERROR(impl_->StoreChunk(digest, chunk));
  }
  return part;
}

Status CheckpointStore::Impl::ReadChunkInto(const Digest& digest, const ChunkLocation& location,
                                            std::span<std::byte> out, bool check_record) const {
  if (location.length != out.size()) {
    return Corruption("chunk " + digest.Hex() + " has " + std::to_string(location.length) +
                      " bytes, " + std::to_string(out.size()) + " are expected");
  }
  if (!location.is_whole()) return RestoreChunk(digest, location, out);
  if (!location.is_inline()) {
    STOCKPOT_RETURN_IF_ERROR(writer->WaitUntilReadable(digest));
    const Status status = check_record ? reader->ReadAndCheckRecord(digest, location, out)
                                       : reader->Read(digest, location, out);
    if (status.ok()) return status;
    // Its pack may have been compacted between the look-up and the read: the chunk has moved.
    STOCKPOT_ASSIGN_OR_RETURN(const auto now, FindChunk(digest));
    if (now && !now->is_inline() && now->pack != location.pack) {
      return ReadChunkInto(digest, *now, out, check_record);
    }
    // Or have failed, and gone.
    STOCKPOT_RETURN_IF_ERROR(writer->LostReason(digest));
    return status;
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto data, catalog->Get(Column::kInline, digest.raw()));
  if (!data) return Corruption(DescribeChunk(digest, location) + ": its bytes are missing");
  if (data->size() != out.size() || Sha256(*data) != digest) {
    return Corruption(DescribeChunk(digest, location) + ": SHA-256 does not match");
  }
  std::memcpy(out.data(), data->data(), out.size());
  return OkStatus();
}

Result<std::vector<std::byte>> CheckpointStore::ReadChunk(const Digest& digest) const {
  STOCKPOT_ASSIGN_OR_RETURN(const auto location, impl_->FindChunk(digest));
  if (!location) return NotFound("chunk " + digest.Hex());
  std::vector<std::byte> data(location->length);
  STOCKPOT_RETURN_IF_ERROR(impl_->ReadChunkInto(digest, *location, data, false));
  return data;
}

Result<std::shared_ptr<const std::vector<std::byte>>> CheckpointStore::Impl::ReadCached(
    const Digest& digest) const {
  {
    std::lock_guard lock_guard(cache_mutex);
    for (const CachedChunk& chunk : cache) {
      if (chunk.data != nullptr && chunk.digest == digest) return chunk.data;
    }
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto location, FindChunk(digest));
  if (!location) return NotFound("chunk " + digest.Hex());
  auto data = std::make_shared<std::vector<std::byte>>(location->length);
  STOCKPOT_RETURN_IF_ERROR(ReadChunkInto(digest, *location, *data, false));
  std::lock_guard lock_guard(cache_mutex);
  cache[cache_next] = {digest, data};
  cache_next = (cache_next + 1) % cache.size();
  return std::shared_ptr<const std::vector<std::byte>>(std::move(data));
}

Status CheckpointStore::ReadPart(const Part& part, int64_t offset, std::span<std::byte> out) const {
  const auto length = static_cast<int64_t>(out.size());
  if (offset < 0 || offset > part.bytes || length > part.bytes - offset ||
      static_cast<int64_t>(part.chunks.size()) != ChunkCount(part.bytes)) {
    return InvalidArgument("bytes [" + std::to_string(offset) + ", +" + std::to_string(length) +
                           ") of a part of " + std::to_string(part.bytes));
  }
  while (!out.empty()) {
    const int64_t index = offset / kChunkBytes;
    const int64_t begin = offset % kChunkBytes;
    const int64_t chunk_bytes = std::min(kChunkBytes, part.bytes - index * kChunkBytes);
    const auto n =
        static_cast<size_t>(std::min(chunk_bytes - begin, static_cast<int64_t>(out.size())));
    const Digest& digest = part.chunks[static_cast<size_t>(index)];
    if (static_cast<int64_t>(n) == chunk_bytes) {
      STOCKPOT_ASSIGN_OR_RETURN(const auto location, impl_->FindChunk(digest));
      if (!location) return NotFound("chunk " + digest.Hex());
      STOCKPOT_RETURN_IF_ERROR(impl_->ReadChunkInto(digest, *location, out.first(n), false));
    } else {
      STOCKPOT_ASSIGN_OR_RETURN(const auto data, impl_->ReadCached(digest));
      if (static_cast<int64_t>(data->size()) != chunk_bytes) {
        return Corruption("chunk " + digest.Hex() + " has the wrong length");
      }
      std::memcpy(out.data(), data->data() + begin, n);
    }
    out = out.subspan(n);
    offset += static_cast<int64_t>(n);
  }
  return OkStatus();
}

// --- commits ---

Result<int64_t> CheckpointStore::Apply(Commit commit) {
  STOCKPOT_ASSIGN_OR_RETURN(
      const PreparedCommit prepared,
      PrepareCommit(std::move(commit), [this](const Digest& d) { return GetManifest(d); }));
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(impl_->options.failpoints, "commit.prepared"));
  Impl::Waiter self;
  self.prepared = &prepared;
  std::unique_lock lock(impl_->commit_mutex);
  impl_->waiting.push_back(&self);
  impl_->commit_done.wait(lock, [&] { return self.done || !impl_->leading; });
  if (self.done) return self.outcome;

  // Nobody leads: this thread commits itself and, in the same sync, everybody who waits.
  impl_->leading = true;
  while (!self.done) {
    const size_t count = impl_->NextGroupSize();
    const std::vector<Impl::Waiter*> group(impl_->waiting.begin(),
                                           impl_->waiting.begin() + static_cast<ptrdiff_t>(count));
    impl_->waiting.erase(impl_->waiting.begin(),
                         impl_->waiting.begin() + static_cast<ptrdiff_t>(count));
    lock.unlock();
    impl_->CommitGroup(group);
    lock.lock();
    for (Impl::Waiter* waiter : group) waiter->done = true;
  }
  impl_->leading = false;
  impl_->commit_done.notify_all();
  return self.outcome;
}

size_t CheckpointStore::Impl::NextGroupSize() const {
  size_t count = 0;
  for (const Waiter* waiter : waiting) {
    if (count == kMaxGroup) break;
    if (waiter->prepared->removes()) return std::max<size_t>(count, 1);
    ++count;
  }
  return count;
}

void CheckpointStore::Impl::CommitGroup(std::span<Waiter* const> group) {
  Status status = IsShutDown() ? Unavailable("the store is shutting down")
                               : ReachFailpoint(options.failpoints, "commit.leading");
  if (status.ok()) status = WriteGroup(group);
  if (status.ok()) return;
  for (Waiter* waiter : group) {
    if (waiter->outcome.ok() || waiter->outcome.status().code() == StatusCode::kInternal) {
      waiter->outcome = status;
    }
  }
}

// A commit that failed may have become whole when the catalogue was opened anew: what comes next is
// numbered after it.
Status CheckpointStore::Impl::ReadCounters() {
  const int64_t openings = catalog->openings();
  STOCKPOT_ASSIGN_OR_RETURN(const auto job, catalog->Get(Column::kRecords, catalog_keys::kLastJob));
  STOCKPOT_ASSIGN_OR_RETURN(const auto event, catalog->LastKey(Column::kEvents));
  last_job = ParseCounter(job);
  seen_openings = openings;
  const std::lock_guard guard(event_mutex);
  last_event = catalog_keys::ParseBigEndian(event);
  event_added.notify_all();
  return OkStatus();
}

// An error: nothing of the group is visible, unless the catalogue is opened anew (Catalog::Write).
// A failpoint after the write reports an error for what
// was committed all the same, as a lost connection would.
Status CheckpointStore::Impl::WriteGroup(std::span<Waiter* const> group) {
  STOCKPOT_RETURN_IF_ERROR(catalog->Heal());
  if (catalog->openings() != seen_openings) STOCKPOT_RETURN_IF_ERROR(ReadCounters());
  // The chunks first. Whatever is durable now gets its index entry in this batch, whoever put it.
  const std::vector<IndexedChunk> durable = writer->Sync();
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(options.failpoints, "commit.synced"));
  CatalogBatch batch(*catalog);
  for (const IndexedChunk& chunk : durable) {
    batch.Put(Column::kChunks, chunk.digest.raw(), chunk.location.Encode());
  }
  if (!durable.empty()) {
    batch.Put(Column::kRecords, catalog_keys::kNextPack, std::to_string(writer->next_pack()));
  }
  std::unique_lock<std::mutex> lease_lock;
  if (group[0]->prepared->removes()) lease_lock = std::unique_lock(leases->mutex);
  CommitWriter commits(batch, options.clock(), LastEvent(), last_job,
                       {.lost = [this](const Digest& chunk) { return writer->LostReason(chunk); },
                        .claim = [this](const Digest& chunk) { guards->Touch(chunk); },
                        .retention = [this] { return ReadRetentionView(); }});
  for (Waiter* waiter : group) waiter->outcome = commits.Add(*waiter->prepared);
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(options.failpoints, "commit.checked"));
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(options.failpoints, "commit.before_write"));
  STOCKPOT_RETURN_IF_ERROR(catalog->Write(batch, /*synced=*/true));
  const Status after_write = ReachFailpoint(options.failpoints, "commit.after_write");
  writer->MarkIndexed(durable);
  last_job = commits.last_job();
  {
    const std::lock_guard guard(event_mutex);
    last_event = commits.last_event();
    event_added.notify_all();
  }
  STOCKPOT_RETURN_IF_ERROR(after_write);
  return ReachFailpoint(options.failpoints, "commit.indexed");
}

int64_t CheckpointStore::Impl::LastEvent() const {
  const std::lock_guard guard(event_mutex);
  return last_event;
}

bool CheckpointStore::Impl::IsShutDown() const {
  const std::lock_guard guard(event_mutex);
  return shut_down;
}

std::vector<uint32_t> CheckpointStore::Impl::ListPacks() const {
  std::vector<uint32_t> packs;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(packs_directory, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    if (const std::optional<uint32_t> number = PackNumber(it->path())) packs.push_back(*number);
  }
  return packs;
}

int64_t CheckpointStore::Impl::PackFileBytes(uint32_t number) const {
  std::error_code error;
  const auto bytes = std::filesystem::file_size(PackPath(packs_directory, number), error);
  return error ? 0 : static_cast<int64_t>(bytes);
}

int64_t CheckpointStore::Impl::PackBytes() const {
  int64_t bytes = 0;
  for (const uint32_t number : ListPacks()) bytes += PackFileBytes(number);
  return bytes;
}

void CheckpointStore::Shutdown() {
  std::lock_guard lock(impl_->event_mutex);
  impl_->shut_down = true;
  impl_->event_added.notify_all();
}

}  // namespace stockpot
