// Sessions: how an artifact arrives from outside. A client opens a session, sends the chunks that
// are missing, and commits a manifest; until then nothing of it is visible, and a session that is
// left alone expires; its chunks go with the next garbage collection, and not before. The policy of
// the run (merge every n steps, what to publish) is applied in the same commit, as durable jobs.
//
// Thread promise: any thread. A session belongs to one client, but a second thread of it may put
// chunks at the same time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/checkpoint_store.h"

namespace stockpot {

struct IngestLimits {
  int64_t sessions = 64;                     // open at once
  int64_t session_idle_ms = 10 * 60 * 1000;  // without a call: expired
  int64_t chunks_per_query = 100'000;        // have_chunks
};

struct SessionRequest {
  ArtifactKind kind = ArtifactKind::kCheckpoint;  // kCheckpoint or kBase
  std::string run;                                // checkpoint: the run; base: its name
  int64_t step = -1;                              // checkpoint: >= 0
  int32_t rank = 0;
  int32_t world = 1;  // sharded sessions (world > 1) are refused by name in this version
  std::optional<Digest> resumed_from;
};

// What a client says an artifact consists of: a manifest of raw tensors (kind, base, run and step
// are set by the server from the session), and the metrics that came with the step.
struct ShardCommit {
  std::vector<TensorEntry> tensors;  // the weights; codec raw, or alias_of
  // What is no weight, by group (store/names.h): each becomes a state of its own.
  std::map<std::string, std::vector<TensorEntry>> states;
  std::map<std::string, Part> files;
  std::map<std::string, double> metrics;
};

struct CommitReply {
  Digest artifact;
  int64_t event_sequence = 0;
  bool existed = false;  // this very artifact was committed before: nothing changed
  std::map<std::string, Digest> states;  // by group
};

class Ingest {
 public:
  Ingest(CheckpointStore& store, IngestLimits limits, Clock clock);
  ~Ingest();

  // Creates the run, or confirms that it exists with the same base. AlreadyExists if the base
  // differs; a different config, or other tags (unless none are given), replace the old ones (an
  // event says so). NotFound: unknown base. `base` is a name or a hex digest.
  Result<Run> CreateRun(const std::string& name, const std::string& base, const RunConfig& config,
                        const std::map<std::string, std::string>& tags);

  // NotFound: unknown run. ResourceExhausted: too many sessions. A step that has a checkpoint may
  // be opened again: whether it is the same one shows at its commit.
  Result<std::string> OpenSession(const SessionRequest& request);
  Result<std::vector<bool>> HaveChunks(const std::string& session, std::span<const Digest> digests);
  Status PutChunk(const std::string& session, const Digest& digest,
                  std::span<const std::byte> data);
  // One commit: artifact, its states (edges state_of) and their steps, step, lineage (trained_from the run's base, resumed_from), alias
  // RUN@latest (moves forward in steps only), RUN@best by the run's metric, event "checkpoint"
  // {run, step, artifact, metrics as JSON}, "states" {run, step, artifact, groups by comma} if it has
  // some, one "alias" per move, and the policy's jobs. States of a checkpoint may come later. A
  // metric that is not finite is dropped and named in the event's "dropped_metrics": a loss of NaN
  // must not cost the checkpoint. For a base: the artifact, the alias NAME, event "base"; a base
  // must hold config.json. Values and completeness of weights are the publish gate's to judge, not
  // asked here. AlreadyExists: the step has another checkpoint, or the name another base. The
  // session ends whatever the outcome, but for the retryable ones (IsRetryable): send again what
  // HaveChunks says is missing, and commit again.
  Result<CommitReply> CommitShard(const std::string& session, ShardCommit shard);
  Status Abort(const std::string& session);

  // Drops sessions that were idle too long; called by the daemon's ticker. Returns how many.
  int64_t ExpireIdle();
  int64_t open_sessions() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
