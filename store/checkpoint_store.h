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
  virtual ~CheckpointStore() = default;

  // --- chunks ---
  virtual std::vector<bool> HaveChunks(std::span<const Digest> digests) const = 0;
  // Appends unless present. InvalidArgument if the bytes do not hash to `digest` or exceed
  // kChunkBytes; ResourceExhausted if the disk's reserve is met. Durable only once a commit names
  // it.
  virtual Status PutChunk(const Digest& digest, std::span<const std::byte> data) = 0;
  // Splits, hashes and puts a whole run of bytes.
  virtual Result<Part> PutBytes(std::span<const std::byte> data) = 0;
  // The verified bytes of a stored chunk. NotFound; Corruption names the pack and offset.
  virtual Result<std::vector<std::byte>> ReadChunk(const Digest& digest) const = 0;
  // Verified bytes [offset, offset + out.size()) of a part. InvalidArgument past the end.
  virtual Status ReadPart(const Part& part, int64_t offset, std::span<std::byte> out) const = 0;

  // --- commits ---
  // All or nothing. InvalidArgument (an invalid manifest, a missing chunk, a dangling edge),
  // AlreadyExists (a compare-and-set lost; a (run, step) that already has another artifact). An
  // artifact that exists already is no error: commits are idempotent. Returns the last event's
  // sequence.
  virtual Result<int64_t> Apply(Commit commit) = 0;

  // --- reads ---
  virtual Result<Manifest> GetManifest(const Digest& artifact) const = 0;
  virtual bool HasArtifact(const Digest& artifact) const = 0;
  // A name to one artifact: full hex, unique hex prefix (>= 6 digits), alias, base name,
  // "RUN@STEP", "RUN@STEP.merge", or a route (last). NotFound / InvalidArgument (ambiguous prefix).
  virtual Result<Digest> ResolveName(std::string_view name) const = 0;
  virtual std::vector<Digest> ListArtifacts() const = 0;
  virtual std::vector<Run> ListRuns() const = 0;
  virtual Result<Run> GetRun(std::string_view name) const = 0;
  virtual std::vector<StepRecord> ListSteps(std::string_view run) const = 0;  // by step, then kind
  virtual std::vector<Edge> Parents(const Digest& child) const = 0;
  virtual std::vector<Edge> Children(const Digest& parent) const = 0;
  virtual std::optional<Alias> GetAlias(std::string_view name) const = 0;
  virtual std::vector<Alias> ListAliases() const = 0;
  virtual std::optional<Route> GetRoute(std::string_view name) const = 0;
  virtual std::vector<Route> ListRoutes() const = 0;
  virtual std::vector<Job> ListJobs() const = 0;  // by sequence
  virtual std::optional<Job> GetJob(std::string_view key) const = 0;
  virtual std::vector<Eval> ListEvals(const Digest& artifact) const = 0;
  // Events with sequence > since, at most `limit`, oldest first.
  virtual std::vector<Event> EventsSince(int64_t since, int64_t limit) const = 0;
  // Waits until an event newer than `since` exists, the timeout passes or Shutdown() is called;
  // true if there is one.
  virtual bool WaitForEvents(int64_t since, int64_t timeout_ms) const = 0;
  virtual StoreUsage Usage() const = 0;

  // Reads every chunk; reports what is damaged and who needs it. `progress` may be null.
  virtual Result<ScrubReport> Scrub(
      const std::function<void(int64_t done, int64_t total)>& progress) const = 0;

  // Wakes WaitForEvents; later commits are Unavailable. Reads go on until destruction.
  virtual void Shutdown() = 0;
};

}  // namespace stockpot
