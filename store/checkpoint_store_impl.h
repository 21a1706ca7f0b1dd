// What is behind CheckpointStore. Private to store/: checkpoint_store.cc (chunks and commits),
// checkpoint_store_reads.cc, scrub.cc.
#pragma once

#include <array>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <vector>

#include "store/catalog.h"
#include "store/checkpoint_store.h"
#include "store/chunk_guards.h"
#include "store/commit_writer.h"
#include "store/failpoints.h"
#include "store/file_handle.h"
#include "store/pack_reader.h"
#include "store/pack_writer.h"
#include "store/retention_state.h"

namespace stockpot {

// Chunks below this are values of the catalogue: a record in a pack would cost a seek and a header
// each.
inline constexpr int64_t kInlineChunkBytes = int64_t{64} << 10;

struct CheckpointStore::Impl {
  // Constant once open. Destroyed from the last to the first: the writer before the catalogue, and
  // the lock on the directory at the very end.
  StoreOptions options;
  std::filesystem::path packs_directory;
  std::shared_ptr<FileHandle> lock;
  std::unique_ptr<Catalog> catalog;
  std::unique_ptr<PackReader> reader;
  std::unique_ptr<PackWriter> writer;

  // One waiting Apply.
  struct Waiter {
    const PreparedCommit* prepared = nullptr;
    Result<int64_t> outcome = Internal("the commit did not run");
    bool done = false;
  };

  // Group commit: who finds no leader becomes it and commits all that wait.
  std::mutex commit_mutex;
  std::condition_variable commit_done;
  std::vector<Waiter*> waiting;  // guarded by commit_mutex
  bool leading = false;          // guarded by commit_mutex
  int64_t last_job = 0;          // the leader's alone

  mutable std::mutex event_mutex;
  mutable std::condition_variable event_added;
  int64_t last_event = 0;  // guarded by event_mutex; written by the leader alone
  bool shut_down = false;  // guarded by event_mutex

  // The last chunks that were read in pieces, so that small reads verify each chunk once.
  struct CachedChunk {
    Digest digest;
    std::shared_ptr<const std::vector<std::byte>> data;
  };
  mutable std::mutex cache_mutex;
  mutable std::array<CachedChunk, 4> cache;  // guarded by cache_mutex
  mutable size_t cache_next = 0;             // guarded by cache_mutex

  // Artifacts being read, with how many leases each has. Held over the check and the write of a
  // purge, so that a lease is either seen by it or finds the artifact gone. Shared: a lease may be
  // given back after the store is closed.
  struct Leases {
    std::mutex mutex;
    std::map<Digest, int> counts;  // guarded by mutex
  };
  std::shared_ptr<Leases> leases = std::make_shared<Leases>();

  mutable std::mutex facts_mutex;
  mutable std::map<Digest, ManifestFacts> facts;  // guarded by facts_mutex; of manifests read once

  Result<Manifest> ReadManifest(const Digest& artifact) const;
  Result<ManifestFacts> FactsOfArtifact(const Digest& artifact) const;
  // REQUIRES: leases->mutex held.
  Result<RetentionView> ReadRetentionView() const;

  // Shared by whoever needs every chunk to stay where it is or at least to stay, exclusive for the
  // collection. Only tried, never waited for.
  std::shared_mutex maintenance_mutex;

  // Shared while somebody is told that a chunk is there, exclusive while entries are swept.
  mutable std::shared_mutex claim_mutex;
  std::shared_ptr<ChunkGuards> guards = std::make_shared<ChunkGuards>();

  // Chunks that the last scrub could not read: they count as absent for whoever can send them.
  mutable std::mutex damaged_mutex;
  mutable std::set<Digest> damaged;  // guarded by damaged_mutex

  // Whether the chunk is stored; from here on the open guards keep it.
  bool ClaimChunk(const Digest& digest) const;
  bool IsShutDown() const;
  // Runs `body` while no commit is being written.
  template <typename Body>
  Status Lead(Body body);
  std::vector<uint32_t> ListPacks() const;
  int64_t PackFileBytes(uint32_t number) const;  // 0: there is no such file
  int64_t PackBytes() const;                     // of all packs

  // Where a chunk is; null: not stored.
  Result<std::optional<ChunkLocation>> FindChunk(const Digest& digest) const;
  bool HasChunk(const Digest& digest) const;
  // Fills `out`, whose size is the length the caller expects, with the verified chunk.
  Status ReadChunkInto(const Digest& digest, const ChunkLocation& location,
                       std::span<std::byte> out, bool check_record) const;
  // A verified chunk out of the cache above, or into it.
  Result<std::shared_ptr<const std::vector<std::byte>>> ReadCached(const Digest& digest) const;
  Status CheckReserve(size_t bytes) const;
  // Stores a chunk that was checked, whether it is there or not.
  Status StoreChunk(const Digest& digest, std::span<const std::byte> data);
  Result<ScrubReport> ScrubAll(const CheckpointStore& store,
                               const std::function<void(int64_t, int64_t)>& progress) const;
  // A name of its own, which its backups carry too.
  Status EnsureIdentity();
  Status CheckBackupTarget(const Impl& target) const;
  // That it is a backup of `source`, as of its own last event.
  Status NoteBackupOf(const Impl& source);
  Status RepairFrom(const CheckpointStore& copy, const Digest& digest);
  Status PutInline(const Digest& digest, std::span<const std::byte> data);
  // How many of those who wait share the next sync: one that deletes is committed alone, so that
  // its checks see everything before it in the catalogue. REQUIRES: commit_mutex held.
  size_t NextGroupSize() const;
  void CommitGroup(std::span<Waiter* const> group);
  Status WriteGroup(std::span<Waiter* const> group);
  int64_t LastEvent() const;
};

template <typename Body>
Status CheckpointStore::Impl::Lead(Body body) {
  std::unique_lock guard(commit_mutex);
  commit_done.wait(guard, [&] { return !leading; });
  leading = true;
  guard.unlock();
  const Status status = body();
  guard.lock();
  leading = false;
  commit_done.notify_all();
  return status;
}

}  // namespace stockpot
