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
#include <unordered_set>
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
  int64_t seen_openings = 0;     // likewise: of the catalogue, when its counters were read

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

  // What the artifacts of a run consist of.
  struct RunUse {
    std::set<Digest> artifacts;
    std::unordered_set<Digest, DigestHash> chunks;
    int64_t bytes = 0;
    // Bytes of the chunks of `manifest` that are not here yet; `keep`: from now on they are.
    int64_t Add(const Manifest& manifest, bool keep);
  };
  mutable std::mutex quota_mutex;
  int64_t surveyed_bytes = -1;                       // guarded by quota_mutex; of the packs; -1: not
  int64_t put_since_survey = 0;                      // guarded by quota_mutex
  int64_t made_room_ms = -1;                         // guarded by quota_mutex; -1: never
  mutable std::map<std::string, RunUse> run_uses;    // guarded by quota_mutex
  bool FitsQuota(int64_t bytes);
  Result<RunUse*> UseOfRun(const std::string& run, const std::vector<StepRecord>& steps) const;

  Result<Manifest> ReadManifest(const Digest& artifact) const;
  // All of them, or an error.
  Result<std::vector<Digest>> ReadArtifacts() const;
  Result<ManifestFacts> FactsOfArtifact(const Digest& artifact) const;
  // REQUIRES: leases->mutex held.
  Result<RetentionView> ReadRetentionView() const;

  // Shared by whoever needs every chunk to stay where it is or at least to stay, exclusive for the
  // collection. Only tried, never waited for.
  std::shared_mutex maintenance_mutex;

  // Held while chunks are given another form, and by a collection of garbage as a whole: what a
  // difference needs does not go while the difference comes to be. Order: maintenance_mutex first.
  std::mutex history_mutex;
  std::mutex compress_mutex;       // held by the one CompressHistory; only tried
  int64_t history_generation = 0;  // guarded by history_mutex; collections so far

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
  // Likewise, of a chunk in a history form: follows its chain (store/history.cc).
  Status RestoreChunk(const Digest& digest, const ChunkLocation& location,
                      std::span<std::byte> out) const;
  // The bytes of a record in a history form, wherever it lies by now. `location` becomes the one
  // that was read; whole if the chunk is stored so by now: then `stored` is empty.
  Status ReadForm(const Digest& digest, ChunkLocation& location,
                  std::vector<std::byte>& stored) const;
  // Appends a chunk in the best form: as a difference to `parent` (zero: none), as planes, or whole.
  // The next commit makes it the one that counts.
  Result<ChunkLocation> AppendHistory(const Digest& digest, const ChunkLocation& location,
                                      const Digest& parent, int element_bytes);
  // Likewise whole, which must be allowed by the reserve of free space.
  Status AppendWhole(const Digest& digest, const ChunkLocation& location);
  // A verified chunk out of the cache above, or into it.
  Result<std::shared_ptr<const std::vector<std::byte>>> ReadCached(const Digest& digest) const;
  Status CheckReserve(size_t bytes) const;
  // Stores a chunk that was checked, whether it is there or not.
  Status StoreChunk(const Digest& digest, std::span<const std::byte> data);
  Result<ScrubReport> ScrubAll(const CheckpointStore& store,
                               const std::function<void(int64_t, int64_t)>& progress) const;
  // A name of its own, which its backups carry too.
  Status EnsureIdentity();
  Status EnsureOpenJobs();
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
  // Numbers of the last event and job. REQUIRES: leads the commits, or nobody else is there.
  Status ReadCounters();
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
