// Turns a Commit into catalogue writes: first everything is checked, then everything is written, so
// a refused commit leaves the batch as it was and others may share the batch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "store/catalog.h"
#include "store/checkpoint_store.h"

namespace stockpot {

// A commit with what can be computed before its turn: digests and canonical JSON.
struct PreparedCommit {
  Commit commit;
  struct Artifact {
    Digest digest;
    std::string json;
  };
  std::vector<Artifact> artifacts;  // of commit.artifacts, in order

  bool removes() const { return !commit.deletions.empty() || !commit.purges.empty(); }
};

// Validates the manifests, names and values; the base of every artifact must be stored or in the
// commit, and tensors that refer to the base must fit it. `load` reads a stored manifest.
using LoadManifest = std::function<Result<Manifest>(const Digest&)>;
Result<PreparedCommit> PrepareCommit(Commit commit, const LoadManifest& load);

// Adds commits to one batch, numbering events and jobs. One thread.
class CommitWriter {
 public:
  struct Ask {
    // Why a chunk that is not stored was lost, OK if it was never put.
    std::function<Status(const Digest&)> lost;
    // The chunk is in use from now on.
    std::function<void(const Digest&)> claim;
    // The fates as the catalogue is now; asked for commits that remove, which come alone.
    std::function<Result<RetentionView>()> retention;
  };
  CommitWriter(CatalogBatch& batch, int64_t now_ms, int64_t last_event, int64_t last_job, Ask ask);

  // InvalidArgument, AlreadyExists as CheckpointStore::Apply; then the batch is unchanged.
  // Returns the sequence of the last event.
  Result<int64_t> Add(const PreparedCommit& prepared);

  int64_t last_event() const { return last_event_; }
  int64_t last_job() const { return last_job_; }

 private:
  Status CheckArtifacts(const PreparedCommit& prepared);
  Status CheckDrafts(const Commit& commit);
  Status CheckChunks(const Manifest& manifest);
  Status CheckPart(const Part& part);
  Status CheckReferences(const Commit& commit);
  Status CheckSteps(const Commit& commit);
  Status CheckRuns(const Commit& commit);
  Status CheckMoves(const std::vector<AliasMove>& moves, std::string_view prefix,
                    const Commit& commit);
  Status CheckResumes(const Commit& commit) const;
  Status CheckRetentionChanges(const Commit& commit) const;
  Status CheckPools(const Commit& commit) const;
  Status CheckTextsApart(const Commit& commit) const;
  Status CheckRemovals(const Commit& commit);
  Status CheckDeletion(const Tombstone& tombstone) const;
  Status CheckPurge(const Digest& artifact) const;
  Status RequireArtifact(const Digest& digest) const;
  // Likewise, and that nobody deleted it. AlreadyExists if somebody did: it may have happened after
  // the caller looked.
  Status RequireLive(const Digest& digest, const Commit& commit) const;
  Result<ArtifactKind> KindOf(const Digest& digest) const;
  Result<std::vector<Job>> NumberJobs(const std::vector<Job>& jobs) const;

  void WriteArtifacts(const PreparedCommit& prepared);
  void WriteRecords(const Commit& commit);
  void WriteRetention(const Commit& commit);
  void Undelete(const Digest& artifact);
  void Purge(const Digest& artifact);
  void WriteMoves(const std::vector<AliasMove>& moves, std::string_view prefix);
  void WriteJobs(const std::vector<Job>& jobs);
  void WriteEvents(const std::vector<Event>& events);

  CatalogBatch& batch_;
  const int64_t now_ms_;
  int64_t last_event_;
  int64_t last_job_;
  const Ask ask_;
  std::map<Digest, ArtifactKind> own_artifacts_;  // of the commit being added
  RetentionView retention_;                       // likewise, where it removes something
  std::map<Digest, size_t> removable_;            // digest -> place in retention_
};

}  // namespace stockpot
