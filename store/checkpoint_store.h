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
#include "store/manifest.h"
#include "store/names.h"
#include "store/records.h"

namespace stockpot {

using Clock = std::function<int64_t()>;  // Unix milliseconds
Clock SystemClock();

struct StoreOptions {
  std::filesystem::path directory;
  Clock clock;                                      // REQUIRES: set
  int64_t pack_bytes = int64_t{256} << 20;          // a pack is closed when it is over this
  int64_t free_bytes_reserve = int64_t{512} << 20;  // below it PutChunk: ResourceExhausted
};

// A name to move, by compare-and-set where `expected` is given (zero digest: must not exist).
struct AliasMove {
  std::string name;
  Digest to;  // zero: delete
  std::optional<Digest> expected;
  std::string by;
};
using RouteMove = AliasMove;

// Everything that becomes visible together. Order inside does not matter.
struct Commit {
  std::vector<Manifest> artifacts;  // every chunk they name must have been put (or be stored)
  std::vector<Edge> edges;          // both ends exist or are in `artifacts`
  std::vector<Run> runs;
  std::vector<StepRecord> steps;
  std::vector<AliasMove> aliases;
  std::vector<RouteMove> routes;
  std::vector<Job> jobs;  // new ones, or new states of known ones (by key)
  std::vector<Eval> evals;
  std::vector<Event> events;  // sequence and time are set by the store
};

struct ScrubReport {
  int64_t chunks = 0;
  int64_t bytes = 0;
  struct Damage {
    Digest chunk;
    std::string error;
    std::vector<std::string> needed_by;  // "artifact <hex> tensor <name>" / "... file <name>"
  };
  std::vector<Damage> damaged;
};

struct StoreUsage {
  int64_t chunks = 0;
  int64_t chunk_bytes = 0;  // live, as indexed
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
  // kChunkBytes; ResourceExhausted if the disk's reserve is met. Durable only once a commit names
  // it, and only if no write of its pack failed until then.
  Status PutChunk(const Digest& digest, std::span<const std::byte> data);
  // Splits, hashes and puts a whole run of bytes.
  Result<Part> PutBytes(std::span<const std::byte> data);
  // The verified bytes of a stored chunk. NotFound; Corruption names the pack and offset.
  Result<std::vector<std::byte>> ReadChunk(const Digest& digest) const;
  // Verified bytes [offset, offset + out.size()) of a part. InvalidArgument past the end.
  Status ReadPart(const Part& part, int64_t offset, std::span<std::byte> out) const;

  // --- commits ---
  // All or nothing. InvalidArgument (an invalid manifest, a missing chunk, a dangling edge),
  // AlreadyExists (a compare-and-set lost; a (run, step) that already has another artifact). An
  // artifact that exists already is no error: commits are idempotent. Unavailable or
  // ResourceExhausted: a pack failed and took chunks along that were not durable yet (put them
  // again), or the disk is full, or after Shutdown(). Returns the sequence of the last event.
  Result<int64_t> Apply(Commit commit);

  // --- reads ---
  // Lists leave out records that cannot be read; the Get methods and Scrub() name them.
  Result<Manifest> GetManifest(const Digest& artifact) const;
  bool HasArtifact(const Digest& artifact) const;
  // A name to one artifact: full hex, alias (a base's name is one), "RUN@STEP", "RUN@STEP.merge",
  // route, unique hex prefix (>= 6 digits). In this order: an exact name never changes its meaning
  // because an artifact arrives whose digest begins like it. NotFound / InvalidArgument
  // (ambiguous).
  Result<Digest> ResolveName(std::string_view name) const;
  std::vector<Digest> ListArtifacts() const;
  std::vector<Run> ListRuns() const;
  Result<Run> GetRun(std::string_view name) const;
  std::vector<StepRecord> ListSteps(std::string_view run) const;  // by step, then kind
  std::vector<Edge> Parents(const Digest& child) const;
  std::vector<Edge> Children(const Digest& parent) const;
  std::optional<Alias> GetAlias(std::string_view name) const;
  std::vector<Alias> ListAliases() const;
  std::optional<Route> GetRoute(std::string_view name) const;
  std::vector<Route> ListRoutes() const;
  std::vector<Job> ListJobs() const;  // by sequence
  std::optional<Job> GetJob(std::string_view key) const;
  std::vector<Eval> ListEvals(const Digest& artifact) const;
  // Events with sequence > since, at most `limit`, oldest first.
  std::vector<Event> EventsSince(int64_t since, int64_t limit) const;
  // The sequence of the newest event; 0: none.
  int64_t LastEvent() const;
  // Waits until an event newer than `since` exists, the timeout passes or Shutdown() is called;
  // true if there is one.
  bool WaitForEvents(int64_t since, int64_t timeout_ms) const;
  // Counts by scanning the index: for status pages, not for loops.
  StoreUsage Usage() const;

  // Reads every chunk; reports what is damaged and who needs it. `progress` may be null.
  Result<ScrubReport> Scrub(const std::function<void(int64_t done, int64_t total)>& progress) const;

  // Wakes WaitForEvents; later commits are Unavailable. Reads go on until destruction.
  void Shutdown();

 private:
  struct Impl;  // store/checkpoint_store_impl.h
  explicit CheckpointStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace stockpot
