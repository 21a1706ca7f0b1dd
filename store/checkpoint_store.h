// The store: chunks in pack files, everything else in RocksDB, one commit for all that becomes
// visible.
//
//   auto store = CheckpointStore::Open({.directory = dir, .clock = SystemClock()});
//   (*store)->PutChunk(digest, bytes);          // any number, any thread; not visible yet
//   Commit commit;  commit.artifacts.push_back(manifest);  commit.edges = ...;
//   (*store)->Apply(commit);                    // durable and visible as a whole, or not at all
//
// What is on disk (format document: store/README.md):
//   DIR/LOCK  DIR/packs/NNNNNNNN.pack  DIR/catalog/ (RocksDB)
// Order of a commit: chunks appended -> fdatasync(packs) -> fsync(directory) for a new pack -> ONE
// synced WriteBatch {chunk index, manifests, edges, steps, aliases, routes, jobs, evals, events}.
// After a crash, bytes of packs that no index entry names are unreferenced; nothing visible is
// torn.
//
// Thread promise: every method may be called from any thread at any time. Commits are serialised
// (several waiting ones share one sync). Readers never wait for writers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "store/digest.h"
#include "store/failpoints.h"
#include "store/history.h"
#include "store/manifest.h"
#include "store/names.h"
#include "store/pool_records.h"
#include "store/records.h"
#include "store/retention.h"

namespace stockpot {

using Clock = std::function<int64_t()>;  // Unix milliseconds
Clock SystemClock();

struct StoreOptions {
  std::filesystem::path directory;
  Clock clock;                                      // REQUIRES: set
  int64_t pack_bytes = int64_t{256} << 20;          // a pack is closed when it is over this
  int64_t free_bytes_reserve = int64_t{512} << 20;  // below it PutChunk: ResourceExhausted
  // Bytes of the packs on disk. Before a chunk over it is refused, retention is applied and garbage
  // collected (once a minute at most). 0: no quota. Compaction and history may exceed it for a while.
  int64_t quota_bytes = 0;
  std::shared_ptr<Failpoints> failpoints;  // of tests; null: none
};

// A name to move, by compare-and-set where `expected` is given (zero digest: must not exist).
struct AliasMove {
  std::string name;
  Digest to;  // zero: delete
  std::optional<Digest> expected;
  std::string by;
};
using RouteMove = AliasMove;

struct RetentionChange {
  std::string run;
  RetentionPolicy policy;  // without rules: everything stays
};

struct GateChange {
  std::string run;
  GateConfig config;
};

struct ResumeChange {
  ResumeDecision decision;
  bool forget = false;  // takes it out again; no error where there is none
};

// What a job has made so far (CheckpointStore::GetDraft).
struct DraftChange {
  std::string job;  // key
  Manifest made;    // valid by itself; every chunk it names must have been put
};

struct PoolChange {
  PoolRecord pool;       // of version 0: there is none from now on; it has no tasks then
  int64_t expected = 0;  // the version that it takes the place of; 0: there is no such pool
};

struct PinChange {
  Pin pin;         // time_ms is set by the store
  bool on = true;  // false: takes the pin off; no error where there is none
};

// Everything that becomes visible together. Order inside does not matter.
struct Commit {
  std::vector<Manifest> artifacts;  // every chunk they name must have been put (or be stored)
  std::vector<Edge> edges;          // both ends exist or are in `artifacts`
  std::vector<Run> runs;
  std::vector<StepRecord> steps;
  std::vector<AliasMove> aliases;
  std::vector<RouteMove> routes;
  // New ones, or new states of known ones (by key). One that is done or failed loses its draft.
  std::vector<Job> jobs;
  std::vector<DraftChange> drafts;  // in place of the job's last one
  std::vector<Eval> evals;
  std::vector<ResumeChange> resumes;  // AlreadyExists: the key of the run has a decision
  std::vector<RetentionChange> retention;
  std::vector<ProbeSet> probes;  // in place of the run's; without texts: it has none any more
  // Likewise. InvalidArgument: a text that a probe of the run has, for the most part, and the other
  // way round (store/text_overlap.h).
  std::vector<ProbeSet> calibrations;
  std::vector<GateChange> gates;
  std::vector<PoolChange> pools;  // AlreadyExists: another version is there by then
  std::vector<PinChange> pins;
  // Deletes softly: InvalidArgument names what keeps the artifact (store/retention.h IsFirm). With
  // by == kRetentionAuthor any reason to keep it is AlreadyExists: decide anew. deleted_ms is set
  // by the store; an artifact that is deleted already gets this tombstone instead of its own.
  std::vector<Tombstone> deletions;
  std::vector<Digest> undeletions;  // no error where nothing is deleted
  // Removes deleted artifacts for good, with their steps, evals and edges up. AlreadyExists if one
  // is not deleted, its grace lasts, or something came to need it.
  std::vector<Digest> purges;
  // Set: AlreadyExists if the last event is another one by then: decide anew.
  std::optional<int64_t> last_event;
  std::vector<Event> events;  // sequence and time are set by the store
};

// Everything that retention knows, and what follows from it: fates[i] is of artifacts[i].
struct RetentionView {
  RetentionInputs inputs;
  std::vector<Fate> fates;
};

struct RetentionChanges {
  std::vector<Digest> deleted;
  std::vector<Digest> undeleted;
};

// The slowest that a collection may copy: one that takes days keeps scrubs and backups waiting.
inline constexpr int64_t kMinGarbageBytesPerSecond = 1'000'000;

struct GarbageOptions {
  bool dry_run = false;          // only says what would go,
  bool retention = false;        // and also what ApplyRetention would delete now
  double live_ratio = 0.5;       // a pack with a smaller share of live bytes is compacted
  int64_t bytes_per_second = 0;  // of copying live records; 0: as fast as the disk. Else at least
                                 // kMinGarbageBytesPerSecond
  bool purge = true;             // false: takes only chunks without an owner, and writes no event
};

// InvalidArgument names the option.
Status CheckGarbageOptions(const GarbageOptions& options);

struct BackupReport {
  int64_t artifacts = 0;
  int64_t total_chunks = 0;
  int64_t copied_chunks = 0;  // were not there yet
  int64_t copied_bytes = 0;
  int64_t event = 0;  // the newest that the backup holds
};

struct GarbageReport {
  struct Gone {
    Digest artifact;
    ArtifactKind kind = ArtifactKind::kCheckpoint;
    std::string run;
    int64_t step = -1;
    std::string group;  // of a state
    int64_t bytes = 0;  // of chunks that go with it and with none listed before
    int64_t purge_ms = 0;  // of a dry run, over 0: not now, but when its grace ends
  };
  std::vector<Gone> artifacts;  // purged
  int64_t chunks = 0;           // out of the index, those that never had an owner included
  int64_t chunk_bytes = 0;
  int64_t packs_compacted = 0;
  int64_t packs_removed = 0;
  int64_t copied_bytes = 0;  // live ones
  int64_t pack_bytes_before = 0;
  int64_t pack_bytes_after = 0;
};

// Keeps chunks that are put, or found to be there, while it is held from being collected before a
// commit names them. Movable; ends with its destruction.
class ChunkGuard {
 public:
  ChunkGuard() = default;
  explicit ChunkGuard(std::shared_ptr<void> held) : held_(std::move(held)) {}

 private:
  std::shared_ptr<void> held_;
};

// Keeps an artifact from being purged while it is read. Movable; ends with its destruction.
class ArtifactLease {
 public:
  ArtifactLease() = default;
  explicit ArtifactLease(std::shared_ptr<void> held) : held_(std::move(held)) {}

 private:
  std::shared_ptr<void> held_;
};

struct ScrubReport {
  int64_t chunks = 0;
  int64_t bytes = 0;
  struct Damage {
    Digest chunk;
    std::string error;
    std::vector<std::string> needed_by;  // "artifact <hex> tensor <name>" / "... file <name>"
    bool repaired = false;               // from the other copy, and read back
  };
  std::vector<Damage> damaged;
};

struct StoreUsage {
  int64_t chunks = 0;
  int64_t chunk_bytes = 0;   // live, as indexed
  int64_t stored_bytes = 0;  // likewise, as they are stored: less, with compressed history
  int64_t pack_bytes = 0;   // on disk, unreferenced bytes included
  int64_t artifacts = 0;
  int64_t events = 0;
};

class CheckpointStore {
 public:
  // Creates the directory if it is missing. Unavailable if another process has it open.
  static Result<std::unique_ptr<CheckpointStore>> Open(StoreOptions options);
  ~CheckpointStore();
  CheckpointStore(const CheckpointStore&) = delete;
  CheckpointStore& operator=(const CheckpointStore&) = delete;

  // --- chunks ---
  // Present: durable, or put and on its way to a pack that has not failed.
  std::vector<bool> HaveChunks(std::span<const Digest> digests) const;
  // Appends unless present. InvalidArgument if the bytes do not hash to `digest` or exceed
  // kChunkBytes; ResourceExhausted if the disk's reserve or the store's quota is met. Durable only once a commit names
  // it, and only if no write of its pack failed until then.
  Status PutChunk(const Digest& digest, std::span<const std::byte> data);
  // For whoever puts chunks now and commits later, while garbage may be collected.
  ChunkGuard GuardChunks() const;
  // Splits, hashes and puts a whole run of bytes.
  Result<Part> PutBytes(std::span<const std::byte> data);
  // The verified bytes of a stored chunk. NotFound; Corruption names the pack and offset.
  Result<std::vector<std::byte>> ReadChunk(const Digest& digest) const;
  // Verified bytes [offset, offset + out.size()) of a part. InvalidArgument past the end.
  Status ReadPart(const Part& part, int64_t offset, std::span<std::byte> out) const;

  // --- commits ---
  // All or nothing. InvalidArgument (an invalid manifest, a missing chunk, a dangling edge),
  // AlreadyExists (a compare-and-set lost; a (run, step) that already has another artifact). An
  // artifact that exists already is no error: commits are idempotent; one that was deleted is
  // undeleted by it. Aliases, routes and pins refuse a deleted artifact. Unavailable or
  // ResourceExhausted: a pack failed and took chunks along that were not durable yet (put them
  // again), or the disk is full, or after Shutdown(). Returns the sequence of the last event.
  Result<int64_t> Apply(Commit commit);

  // --- reads ---
  // Lists leave out records that cannot be read; the Get methods and Scrub() name them.
  Result<Manifest> GetManifest(const Digest& artifact) const;
  bool HasArtifact(const Digest& artifact) const;
  // It was here and was deleted for good.
  bool WasPurged(const Digest& artifact) const;
  // A name to one artifact: full hex, alias (a base's name is one), "RUN@STEP", "RUN@STEP.merge",
  // any other route, unique hex prefix (>= 6 digits), and with ".GROUP" behind any of them the state
  // of that checkpoint. In this order: an exact name never changes its meaning because an artifact
  // arrives whose digest begins like it, or because a step was deleted whose variant is still served
  // as RUN@STEP. NotFound / InvalidArgument (ambiguous).
  Result<Digest> ResolveName(std::string_view name) const;
  std::vector<Digest> ListArtifacts() const;
  std::vector<Run> ListRuns() const;
  Result<Run> GetRun(std::string_view name) const;
  // By step, then kind, then group; deleted ones too, with `deleted` set.
  std::vector<StepRecord> ListSteps(std::string_view run) const;
  // One of them, without looking at the others; null: there is none.
  std::optional<StepRecord> GetStep(std::string_view run, int64_t step, ArtifactKind kind,
                                    std::string_view group = "") const;
  std::vector<ResumeDecision> ListResumeDecisions(std::string_view run) const;  // by key
  // The same, complete or an error: for whoever decides by it.
  Result<std::vector<StepRecord>> ReadSteps(std::string_view run) const;
  std::vector<Edge> Parents(const Digest& child) const;
  std::vector<Edge> Children(const Digest& parent) const;
  std::optional<Alias> GetAlias(std::string_view name) const;
  std::vector<Alias> ListAliases() const;
  std::optional<Route> GetRoute(std::string_view name) const;
  std::vector<Route> ListRoutes() const;
  std::vector<Job> ListJobs() const;  // by sequence
  // Queued and running ones, by sequence, without looking at the others.
  std::vector<Job> ListOpenJobs() const;
  std::optional<Job> GetJob(std::string_view key) const;
  // What an interrupted job had made: its chunks are durable, and stay until the job ends. No
  // artifact, not listed, not in backups. Null: nothing, or nothing that can be read.
  std::optional<Manifest> GetDraft(std::string_view job) const;
  std::vector<Eval> ListEvals(const Digest& artifact) const;
  RetentionPolicy GetRetention(std::string_view run) const;  // the default where none is set
  // Null: the run has none. Corruption: it cannot be read.
  Result<std::optional<ProbeSet>> GetProbe(std::string_view run) const;
  Result<std::optional<ProbeSet>> GetCalibration(std::string_view run) const;
  // The default where none is set. Corruption: it cannot be read.
  Result<GateConfig> GetGate(std::string_view run) const;
  // NotFound; Corruption: it cannot be read.
  Result<PoolRecord> GetPool(std::string_view name) const;
  std::vector<PoolRecord> ListPools() const;
  std::optional<Pin> GetPin(const Digest& artifact) const;
  std::optional<Tombstone> GetTombstone(const Digest& artifact) const;
  // What may go, and why the rest stays, now. Corruption: a record that this depends on.
  Result<RetentionView> Retention() const;
  // NotFound: no such artifact. What is leased is neither deleted by retention nor purged.
  Result<ArtifactLease> Lease(const Digest& artifact) const;
  // Events with sequence > since, at most `limit`, oldest first.
  std::vector<Event> EventsSince(int64_t since, int64_t limit) const;
  // The sequence of the newest event; 0: none.
  int64_t LastEvent() const;
  // Waits until an event newer than `since` exists, the timeout passes or Shutdown() is called;
  // true if there is one.
  bool WaitForEvents(int64_t since, int64_t timeout_ms) const;
  int64_t quota_bytes() const;
  // Bytes of the distinct chunks that a run's checkpoints, merges and states consist of, those to
  // come in `more` included. Reads their manifests, but for those it knows from the last time.
  Result<int64_t> RunBytesWith(const std::string& run, std::span<const Manifest> more) const;
  // ResourceExhausted: that is over the run's quota, also after MakeRoom().
  Status CheckRunQuota(const Run& run, std::span<const Manifest> more);
  // Applies retention and collects garbage because a quota is met; once a minute at most. True if it
  // did.
  bool MakeRoom();
  // Counts by scanning the index: for status pages, not for loops.
  StoreUsage Usage() const;

  // --- maintenance: one scrub or backup, or one collection, at a time; Unavailable meanwhile ---

  // Deletes what the policy of the run (empty: of every run) does not keep, and undeletes what it
  // deleted before and keeps now. One commit.
  Result<RetentionChanges> ApplyRetention(const std::string& run, bool dry_run = false);
  // Purges deleted artifacts whose grace is over, takes chunks that nothing refers to out of the
  // index, compacts packs, unlinks what is empty (store/garbage.cc). Corruption: a manifest cannot
  // be read, so that nothing is proven unreferenced; purged is what was purged.
  Result<GarbageReport> CollectGarbage(const GarbageOptions& options);

  // Gives the older checkpoints and states of a run their history form, and makes whole again what
  // must be (store/history.h). One at a time: Unavailable meanwhile. InvalidArgument: the artifact
  // stays whole. The bytes come back with the next collections of garbage.
  Result<HistoryReport> CompressHistory(const HistoryOptions& options);
  bool IsCompressed(const Digest& artifact) const;

  // Reads every chunk; reports what is damaged and who needs it. `progress` may be null. A chunk
  // that is found damaged counts as absent for HaveChunks and PutChunk: pushing it again repairs
  // it.
  Result<ScrubReport> Scrub(const std::function<void(int64_t done, int64_t total)>& progress) const;
  // Scrubs, and takes what is damaged from a backup that has it.
  Result<ScrubReport> Repair(const std::filesystem::path& backup,
                             const std::function<void(int64_t done, int64_t total)>& progress);
  // Brings the backup in `directory` (absolute; new, or of this store) up to this moment, while
  // commits go on: copies the chunks that are missing there, then replaces its records at once.
  // InvalidArgument: it holds something else. Corruption: something here is damaged; the backup is
  // then what it was.
  Result<BackupReport> BackupTo(
      const std::filesystem::path& directory,
      const std::function<void(int64_t done, int64_t total)>& progress) const;

  // Wakes WaitForEvents; later commits are Unavailable. Reads go on until destruction.
  void Shutdown();

 private:
  friend class GarbageCollector;
  friend class HistoryCompressor;
  friend class StoreCopy;
  struct Impl;  // store/checkpoint_store_impl.h
  explicit CheckpointStore(std::unique_ptr<Impl> impl);
  Status CheckQuota(int64_t bytes);
  Result<std::optional<Digest>> ResolvePlain(std::string_view name) const;
  Result<std::optional<Digest>> ResolveState(std::string_view name) const;
  std::unique_ptr<Impl> impl_;
};

// Makes a store at `data`, which must not exist, from a backup: everything is verified as it is
// read, and once more after it was written. Nothing is at `data` after a failure.
Result<BackupReport> RestoreStore(const std::filesystem::path& backup,
                                  const std::filesystem::path& data, const Clock& clock,
                                  const std::function<void(int64_t done, int64_t total)>& progress);

}  // namespace stockpot
