// Appends chunks to pack files. Appending copies into one of a few staging buffers; a thread of its
// own writes full buffers with direct I/O, so that hashing, copying and writing overlap. Another
// one makes durable what is written already, so that Sync() waits for little more than the tail.
//
//   Append(...)                   any number; the chunk is pending: readable, not durable
//   durable = Sync()              everything appended before is on disk, but for what failed
//   ... the caller writes the index entries of `durable` ...
//   MarkIndexed(durable)          pending no longer
//
// A failed write or fdatasync is final for its pack: what of it was not durable yet is lost
// (LostReason says why), the next append takes a new pack, and the chunks count as absent until
// they are appended again. Nothing is retried on the same descriptor: after a failed fdatasync the
// kernel may have dropped the dirty pages and report success the second time.
//
// Thread promise: any thread; Sync() and MarkIndexed() by one at a time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kernels/base/status.h"
#include "store/digest.h"
#include "store/failpoints.h"
#include "store/file_handle.h"
#include "store/pack_format.h"

namespace stockpot {

struct IndexedChunk {
  Digest digest;
  ChunkLocation location;
};

class PackWriter {
 public:
  struct Options {
    std::filesystem::path directory;  // exists
    int64_t pack_bytes = 0;           // a pack over this is closed
    int64_t sync_ahead_bytes = 0;     // of a pack, written and not durable: synced before Sync()
    uint32_t next_pack = 1;           // the first number to use; never one that was used before
    std::shared_ptr<Failpoints> failpoints;  // null: none
  };
  explicit PackWriter(Options options);
  ~PackWriter();  // finishes queued writes; what no Sync covered stays unreferenced

  // Appends unless the chunk is pending already (another thread's append of it is waited for).
  // `crc` is the chunk's CRC32C. An error: nothing of the chunk counts.
  Status Append(const Digest& digest, std::span<const std::byte> data, uint32_t crc);
  // Likewise, in the form that `location` says (length, crc, form and parent; its place is set
  // here). REQUIRES: data.size() == location.stored_length().
  Status AppendForm(const Digest& digest, std::span<const std::byte> data, ChunkLocation location);

  // Where a pending chunk is or will be.
  std::optional<ChunkLocation> FindPending(const Digest& digest) const;
  // What is pending and stored as a difference to another chunk, which must therefore stay.
  std::vector<IndexedChunk> PendingDeltas() const;
  // Waits until a pending chunk can be read from its pack. OK if it is not pending.
  Status WaitUntilReadable(const Digest& digest);

  std::vector<IndexedChunk> Sync();
  void MarkIndexed(std::span<const IndexedChunk> chunks);

  // Closes the pack that is being filled, and returns when it is closed; the next append takes a
  // new one.
  void Roll();
  // The pack that is being filled; null: none.
  std::optional<uint32_t> current_pack();
  // Whether the pack can still come to hold chunks that the index does not name: it is being filled
  // or written, or has pending chunks.
  bool IsOpen(uint32_t pack);

  // Of packs, appended and not in their files yet.
  int64_t unwritten_bytes();

  // Why an appended chunk was lost; OK if it was not.
  Status LostReason(const Digest& digest) const;
  // A number above every pack this writer made.
  uint32_t next_pack() const;

 private:
  // One pack of this process. All but the constants are guarded by mutex_.
  struct PackFile {
    uint32_t number = 0;                 // constant
    bool direct = false;                 // the writer thread's alone
    int64_t preallocated = 0;            // the writer thread's alone
    std::shared_ptr<FileHandle> handle;  // null once closed
    int64_t enqueued = 0;                // bytes handed to the writer thread
    int64_t written = 0;
    int64_t synced = 0;
    bool directory_synced = false;
    // Some thread is in fdatasync. One at a time: an error is told once a descriptor, so a second
    // caller would take the bytes for durable.
    bool syncing = false;
    Status failure;
  };
  struct FreeDeleter {
    void operator()(std::byte* p) const;
  };
  using Buffer = std::unique_ptr<std::byte, FreeDeleter>;
  struct Task {
    std::shared_ptr<PackFile> pack;
    Buffer buffer;  // null: the pack is full, and everything of it was written before
    int64_t offset = 0;
    int64_t length = 0;
  };
  struct Pending {
    ChunkLocation location;
    std::shared_ptr<PackFile> pack;
  };

  Status Reach(std::string_view name) const { return ReachFailpoint(options_.failpoints, name); }
  Status AppendOnce(const Digest& digest, std::span<const std::byte> data, ChunkLocation location);
  Status EnsurePack();
  Status OpenPack();
  Status CopyIn(std::span<const std::byte> data);
  Status TakeBuffer();
  void SealBuffer();
  void ClosePack();

  void WriterLoop();
  Status WriteTask(const Task& task);

  void SyncLoop();
  std::shared_ptr<PackFile> NextToSync() const;  // null: nothing to do. REQUIRES: mutex_ held
  Status SyncAhead(const PackFile& pack, bool with_directory);
  Status FinishPack(const PackFile& pack);
  void FailPack(PackFile& pack, const Status& status);  // REQUIRES: mutex_ held
  void Retire(const PackFile& pack);                    // REQUIRES: mutex_ held

  struct SyncTarget {
    std::shared_ptr<PackFile> pack;
    int64_t end = 0;
    bool is_ours = false;  // `syncing` is set for this thread; else the sync thread did it
    Status status;
  };
  std::vector<SyncTarget> TakeSyncTargets();
  void SyncTargets(std::span<SyncTarget> targets);
  std::vector<IndexedChunk> SettleSync(std::span<const SyncTarget> targets);

  const Options options_;

  // Lock order: append_mutex_, then mutex_.
  std::mutex append_mutex_;
  std::shared_ptr<PackFile> current_;  // these four guarded by append_mutex_
  Buffer buffer_;
  int64_t buffer_offset_ = 0;  // of the buffer in the pack
  int64_t buffer_fill_ = 0;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;  // anything below; one is enough for so few threads
  std::deque<Task> queue_;
  std::vector<Buffer> free_buffers_;
  int allocated_buffers_ = 0;
  uint32_t next_pack_;
  std::vector<std::shared_ptr<PackFile>> unsynced_;  // not closed, not failed
  std::deque<std::shared_ptr<PackFile>> finishing_;  // full: to be synced and closed
  std::unordered_map<Digest, Pending, DigestHash> pending_;
  std::unordered_set<Digest, DigestHash> appending_;
  std::unordered_map<Digest, Status, DigestHash> lost_;
  bool committing_ = false;   // in Sync(): nothing more is synced ahead
  bool stopping_ = false;     // the writer thread ends when its queue is empty
  bool written_out_ = false;  // it has; so does the sync thread

  std::thread writer_;
  std::thread syncer_;
};

}  // namespace stockpot
