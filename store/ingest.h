// Sessions: how an artifact arrives from outside. A client opens a session, sends the chunks that
// are missing, and commits a manifest; until then nothing of it is visible, and a session that is
// left alone expires; its chunks go with the next garbage collection, and not before. The policy of
// the run (merge every n steps, what to publish) is applied in the same commit, as durable jobs.
//
// Several ranks (world > 1): each has a session of its own, sends its pieces of the tensors
// (store/shard_set.h) and commits its shard. What carries the same StepKey gathers into one
// checkpoint, made by the commit that completes the set. No rank waits here for another, but in
// GetStepState() for as long as it asks. The rules, as clients see them: thrift/stockpot.thrift.
// What is gathered lives in memory; the chunks of a shard are durable when its commit returns, so
// that after a restart they need not travel again.
//
// Thread promise: any thread. A session belongs to one client, but a second thread of it may put
// chunks at the same time.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/checkpoint_store.h"
#include "store/shard_set.h"

namespace stockpot {

inline constexpr size_t kMaxAttemptBytes = 128;    // of an attempt's name, and of a resume key
inline constexpr size_t kMaxResumeDecisions = 64;  // that a run remembers
inline constexpr int64_t kMaxStepWaitMs = 30'000;  // GetStepState

struct IngestLimits {
  int64_t sessions = 2 * kMaxWorld;          // open at once
  int64_t session_idle_ms = 10 * 60 * 1000;  // without a call: expired; gatherings likewise
  int64_t session_bytes = int64_t{16} << 40;  // put by one session, what was there already too
  int64_t chunks_per_query = 100'000;        // have_chunks
  int64_t gatherings = 64;                   // open at once
  int64_t gathered_bytes = 256 << 20;        // memory of the shards that wait for others
};

// The one file of a variant's shard: its canonical manifest, whose chunks the session has put.
inline constexpr std::string_view kVariantManifestFile = "manifest.json";

struct SessionRequest {
  // kCheckpoint, kBase, kAdapter or kVariant (one that was made elsewhere)
  ArtifactKind kind = ArtifactKind::kCheckpoint;
  std::string run;                                // checkpoint: the run; others: the name
  int64_t step = -1;                              // checkpoint: >= 0
  int32_t rank = 0;
  int32_t world = 1;  // ranks; a base has one
  std::optional<Digest> resumed_from;
  std::string attempt;  // world > 1: 1..128 printable bytes
  std::string base;     // adapter: name or digest of the base it was trained over
};

// One try of the ranks of a job to make one checkpoint.
struct StepKey {
  std::string run;
  int64_t step = -1;
  int32_t world = 1;
  std::string attempt;
  auto operator<=>(const StepKey&) const = default;
};

enum class GatherState : uint8_t { kOpen, kComplete, kFailed };

struct StepState {
  GatherState state = GatherState::kOpen;
  Digest artifact;               // complete
  int64_t event_sequence = 0;    // complete
  std::vector<int32_t> missing;  // open: ranks that have not committed; failed: that never did
  std::string why;               // failed
};

struct CommitReply {
  Digest artifact;  // zero while it is not complete
  int64_t event_sequence = 0;
  bool existed = false;  // this very artifact was committed before: nothing changed
  bool complete = true;
  std::vector<int32_t> missing;  // not complete: the ranks that have not committed
  std::map<std::string, Digest> states;  // by group
};

// A gathering that is not complete.
struct OpenGathering {
  StepKey key;
  std::vector<int32_t> missing;
  int64_t opened_ms = 0;
  int64_t expires_ms = 0;  // unless one of its ranks calls
};

class Ingest {
 public:
  Ingest(CheckpointStore& store, IngestLimits limits, Clock clock);
  ~Ingest();

  // Creates the run, or confirms that it exists with the same base. AlreadyExists if the base
  // differs; a different config (unless `keep_config`), or other tags (unless none are given),
  // replace the old ones (an event says so). NotFound: unknown base. `base` is a name or a hex
  // digest.
  Result<Run> CreateRun(const std::string& name, const std::string& base, const RunConfig& config,
                        const std::map<std::string, std::string>& tags, bool keep_config = false);

  // NotFound: unknown run. ResourceExhausted: too many sessions or gatherings. A step that has a
  // checkpoint may be opened again: whether it is the same one shows at its commit.
  Result<std::string> OpenSession(const SessionRequest& request);
  Result<std::vector<bool>> HaveChunks(const std::string& session, std::span<const Digest> digests);
  // InvalidArgument: over the session's limit of bytes, which ends nothing: what is there may be
  // committed. ResourceExhausted: no room (a quota, the disk); here and at a commit an event
  // "push_refused" {run, step, reason}, one until something of that run is committed.
  Status PutChunk(const std::string& session, const Digest& digest,
                  std::span<const std::byte> data);
  // One commit: artifact, its states (edges state_of) and their steps, step, lineage (trained_from
  // the run's base, resumed_from), alias RUN@latest (moves forward in steps only), RUN@best by the
  // run's metric, event "checkpoint" {run, step, artifact, metrics as JSON}, "states" {run, step,
  // artifact, groups by comma} if it has some, one "alias" per move, and the policy's jobs. States
  // of a checkpoint may come later. A
  // metric that is not finite is dropped and named in the event's "dropped_metrics": a loss of NaN
  // must not cost the checkpoint. For a base: the artifact, the alias NAME, event "base"; a base
  // must hold config.json. Values and completeness of weights are the publish gate's to judge, not
  // asked here. For an adapter: the artifact, the edge adapter_of its base, the route NAME (none where the
  // name is POOL/TASK: then the pool decides, store/adapter_pool.h), events
  // "adapter" and "route"; it must be one that can be served (store/lora_adapter.h), of finite
  // values. For a variant that was made elsewhere: the artifact that its manifest is (the one file of
  // the shard), the edge compressed_from where its source is here, the route NAME, events "variant"
  // and "route"; its base must be here, and it must pass what of the gate needs no checkpoint
  // (store/variant_check.h, the size of the update). AlreadyExists: the step has another checkpoint, or the name another base or adapter. The
  // session ends whatever the outcome, but for the retryable ones (IsRetryable): send again what
  // HaveChunks says is missing, and commit again. Committing the same content again, also through a
  // session that such a commit ended, gives the answer that is true by then.
  //
  // Of several ranks: the shard's chunks are durable when it returns, complete or not. What shows
  // when the shards are put together (ShardSet::Assemble) fails the gathering for all of its ranks,
  // and so does a rank that commits other content than before.
  Result<CommitReply> CommitShard(const std::string& session, ShardCommit shard);
  Status Abort(const std::string& session);

  // The state of a gathering; waits while it is open, for at most timeout_ms (0..kMaxStepWaitMs).
  // NotFound: no rank opened it since this object was made, it ended long ago, and the step's
  // checkpoint is not its work.
  Result<StepState> GetStepState(const StepKey& key, int64_t timeout_ms);
  std::vector<OpenGathering> OpenGatherings() const;  // by key

  // Where the start of a job that is named `key` resumes from: the run's newest checkpoint when the
  // first caller with that key asked, and from then on the same (durable). InvalidArgument: a key
  // that is not 1..128 printable bytes. NotFound: unknown run.
  Result<ResumeDecision> ResumePoint(const std::string& run, const std::string& key);

  // Drops sessions that were idle too long; called by the daemon's ticker. Returns how many.
  int64_t ExpireIdle();
  int64_t open_sessions() const;

 private:
  struct State;  // store/ingest_state.h
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
