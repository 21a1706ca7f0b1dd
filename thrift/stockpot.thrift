// The remote interface of stockpotd: four services on one port (TMultiplexedProcessor under the
// names "checkpoint", "lineage", "control", "pool"), strict binary protocol, buffered transport with large
// buffers.
//
// Digests travel as 32 raw bytes, manifests as their canonical JSON (store/manifest.h). Every call
// may throw Error; its code is the StatusCode of kernels/base/status.h, one to one.
namespace cpp stockpot.rpc
namespace py stockpot.rpc

const i32 PROTOCOL_VERSION = 1
const i32 MAX_CHUNK_BYTES = 4194304
const i32 MAX_WORLD = 1024         // ranks of one checkpoint

enum ErrorCode {
  INVALID_ARGUMENT = 1, NOT_FOUND = 2, ALREADY_EXISTS = 3, RESOURCE_EXHAUSTED = 4,
  UNAVAILABLE = 5, CORRUPTION = 6, INTERNAL = 7
}

exception Error {
  1: ErrorCode code
  2: string message     // for a person; names the thing and what to do
  3: bool retryable     // the same call may succeed later, unchanged
}

struct HelloReply {
  1: i32 protocol
  2: string version     // of the daemon
  3: i32 chunk_bytes    // how tensors are to be cut
}

// STATE: one group of a step's tensors that are no weights (the optimizer's, the random numbers').
enum Kind { BASE = 0, CHECKPOINT = 1, MERGE = 2, VARIANT = 3, ADAPTER = 4, STATE = 5 }

struct RunConfig {
  1: i64 merge_every = 1000       // steps; 0 = never
  2: string publish = "every"     // every | merges | best | request
  3: string best_metric = "loss"  // of the steps, or TASK/METRIC of evaluations: "probe/loss" is
                                  // the held-out loss on the run's probe texts
  4: bool best_is_lower = true
  5: double merge_energy = 0.95
  6: i64 merge_rank = 0           // 0: by energy
  7: bool compress_history = false  // older checkpoints as differences, in the background
  8: i64 quota_bytes = 0          // of the distinct chunks of the run's artifacts; 0: none
  9: string merge_method = "monosoup"  // MergeOptions.method
  10: double merge_spectral = 0   // MergeOptions.spectral
  // How a variant is published by itself: codec (bitdelta, dense, auto, sparse) and PublishOptions.
  11: string publish_alpha = "auto"
  12: string publish_codec = "bitdelta"
  13: i64 publish_planes = 0
  14: i64 publish_residual_rank = 0
  15: i64 publish_max_bytes = 0
  16: double publish_max_share = 0
  17: double publish_max_error = -1
}

struct Run {
  1: string name
  2: binary base                  // digest
  3: RunConfig config
  4: map<string, string> tags
  5: i64 created_ms
}

// --- sessions of one rank and of many ---
//
// With world = 1 a session is a whole checkpoint (or base): open, have_chunks, put_chunk, commit.
//
// With world > 1 every rank does the same for its own part, in any order, at its own pace, and no
// rank needs another one for it: what carries the same (run, step, world, attempt) gathers into ONE
// checkpoint. The commit that completes the set makes it; the ones before return at once, complete
// = false, with their chunks durable. A rank that wants to know the outcome asks step_state.
//   - A tensor is sent in pieces: `shape` is the piece's, `global_shape` the whole tensor's,
//     `offsets` where the piece begins, all of the same length. A shard may hold several pieces of
//     one tensor (several entries of one name), and none of most. An empty piece may be left out.
//   - All pieces together hold each element of each tensor exactly once; the server proves it, and
//     names tensor, ranks and index range of an overlap or a gap. dtype and global_shape are the
//     same everywhere. The exception are replicas: the same piece (or whole tensor) from several
//     ranks is taken once if its bytes are the same, and refused by name if they are not.
//   - An alias is sent by one rank at least (`shape`: the whole tensor's), likewise a file; of a
//     metric that several ranks report the lowest rank's counts. resumed_from: the same or none.
//   - `attempt` names one try of the job and is the same on all its ranks: the launcher's id and
//     its restart count, say. A restarted job takes another one, so that its shards never mix with
//     those that the one before left behind. Whichever attempt is complete first makes the
//     checkpoint; a second one is ALREADY_EXISTS unless its shards are the very same.
//   - Committing again, from whatever session or thread, with the same content, is no error and
//     changes nothing: also when the checkpoint is complete, also after a restart of the daemon. A
//     rank that commits other content under the same attempt fails the attempt.
//   - An attempt whose ranks send nothing for the session's idle limit expires. Its sessions and
//     step_state then say which ranks never committed. Ranks may begin anew: chunks that are there
//     do not travel again. A restart of the daemon forgets attempts that are not complete.
struct SessionRequest {
  // Or BASE, ADAPTER (world = 1, whole tensors), VARIANT: one that was made elsewhere, whose shard is
  // one file, "manifest.json": its canonical manifest, the chunks of which the session has put.
  1: Kind kind = Kind.CHECKPOINT
  2: string run                   // for any other kind: the name it is known and served under
  3: i64 step = -1
  4: i32 rank = 0                 // 0 .. world - 1
  5: i32 world = 1                // at most MAX_WORLD
  6: optional binary resumed_from
  7: string attempt               // world > 1: 1..128 printable bytes; else it may be empty
  8: string base                  // of an adapter: name or digest of the base it was trained over
}

// One checkpoint that ranks gather.
struct StepKey {
  1: string run
  2: i64 step
  3: i32 world
  4: string attempt
}

enum GatherState { OPEN = 0, COMPLETE = 1, FAILED = 2 }

struct StepState {
  1: GatherState state
  2: binary artifact              // COMPLETE
  3: i64 event_sequence           // COMPLETE
  4: list<i32> missing            // OPEN: ranks that have not committed; FAILED: that never did
  5: string why                   // FAILED: names tensor and ranks
}

// A gathering as `status` lists it.
struct Gathering {
  1: StepKey key
  2: list<i32> missing            // have not committed yet
  3: i64 opened_ms
  4: i64 expires_ms               // unless one of its ranks sends something
}

// Where a job resumes from.
struct ResumePoint {
  1: binary artifact              // empty: there is no checkpoint: from the run's base
  2: i64 step                     // -1: from the base
  3: i64 decided_ms
}

struct Part {
  1: i64 bytes
  2: list<binary> chunks
}

struct Tensor {
  1: string name
  2: string dtype                 // safetensors' names: "BF16", "F32", ...
  3: list<i64> shape              // of `data`, which is row-major
  4: string alias_of              // tied to that tensor; then no data
  5: Part data
  6: list<i64> global_shape       // of a piece; both empty: `data` is the whole tensor
  7: list<i64> offsets            // of a piece, in elements
  // "": a weight. Otherwise the name of a group ("optimizer", "rng"): it becomes an artifact of its
  // own, RUN@STEP.GROUP, committed with the checkpoint and kept by rules of its own. Names are
  // unique within a group.
  8: string group
}

struct Shard {
  1: list<Tensor> tensors
  2: map<string, Part> files      // config.json, tokenizer.json, ...
  3: map<string, double> metrics
}

struct CommitReply {
  1: binary artifact              // empty while it is not complete
  2: i64 event_sequence
  3: bool existed
  4: bool complete = true         // false: other ranks are missing, or the last is just completing
  5: list<i32> missing            // ranks that have not committed
  6: map<string, binary> states   // artifact of each group that came with it
}

// How training loops and importers send, and how anyone fetches.
service CheckpointService {
  // First on every connection to a daemon that asks for a token; others ignore it. Until it was right
  // every call is INVALID_ARGUMENT, and a wrong one ends the connection after that answer.
  HelloReply hello(1: i32 protocol, 2: string token) throws (1: Error error)
  // Creates the run or confirms it; `base` is a name or a hex digest. `keep_config`: an existing run
  // keeps its own configuration, and `config` is for a new one.
  Run create_run(1: string name, 2: string base, 3: RunConfig config, 4: map<string, string> tags,
                 5: bool keep_config) throws (1: Error error)
  string open_session(1: SessionRequest request) throws (1: Error error)
  list<bool> have_chunks(1: string session, 2: list<binary> digests) throws (1: Error error)
  void put_chunk(1: string session, 2: binary digest, 3: binary data) throws (1: Error error)
  // Returns once the artifact is durable and visible; of several ranks: once this shard's chunks
  // are durable, and for the one that completes the set once the artifact is.
  CommitReply commit_shard(1: string session, 2: Shard shard) throws (1: Error error)
  // The state of an attempt; waits up to timeout_ms (at most 30 s) while it is OPEN. NOT_FOUND: no
  // rank opened it since the daemon started, it is not what the step was made from, or it ended
  // long ago: open and commit again.
  StepState step_state(1: StepKey key, 2: i32 timeout_ms) throws (1: Error error)
  // Where this start of the job resumes from: the same answer for every caller with the same `key`
  // (1..128 printable bytes; the attempt's name, say), also when newer checkpoints come meanwhile
  // and after a restart of the daemon. The first caller's question decides: the run's newest
  // checkpoint. The newest 64 keys of a run are remembered, and the newest decision's checkpoint is
  // not deleted.
  ResumePoint resume_point(1: string run, 2: string key) throws (1: Error error)
  void abort(1: string session) throws (1: Error error)
  // A raw tensor has its bytes in the part "data"; one that ranks sent in pieces has "pieces", a list
  // of {"offsets", "shape"}, and the bytes of the i-th of them, row-major, in the part "data/<i>".
  string fetch_manifest(1: string id) throws (1: Error error)
  binary fetch_chunk(1: binary digest) throws (1: Error error)
  void report_eval(1: string id, 2: string task, 3: string metric, 4: double value, 5: string by)
      throws (1: Error error)
}

struct Step {
  1: string run
  2: i64 step
  3: Kind kind
  4: binary artifact
  5: map<string, double> metrics
  6: i64 committed_ms
  7: string group                 // of a state
}

struct Edge {
  1: string type                  // trained_from, merged_from, compressed_from, ...
  2: binary child
  3: binary parent
}

struct Alias {
  1: string name
  2: binary target
  3: i64 moved_ms
  4: string moved_by
}

struct Eval {
  1: string task
  2: string metric
  3: double value
  4: i64 time_ms
  5: string by
}

// A variant that was made and not served; what answered before goes on.
struct Refusal {
  1: string job
  2: string codec
  3: string name                  // of the route; "": the default names
  4: string reason                // names the measured numbers and their limits
  5: i64 time_ms
}

// One artifact as a person asks about it.
struct ArtifactInfo {
  1: binary digest
  2: Kind kind
  3: string run
  4: i64 step
  5: i64 tensors
  6: i64 logical_bytes            // as a full model
  7: i64 stored_bytes             // of its own parts
  8: list<Edge> parents
  9: list<Edge> children
  10: list<Alias> aliases         // that point here
  11: list<Alias> routes          // that point here
  12: list<Eval> evals
  13: map<string, string> attributes
  14: map<string, double> metrics // of its step
  15: i64 purge_ms                // deleted, and gone for good after this; 0: not deleted
  16: bool pinned
  17: string group                // of a state
  18: bool compressed             // its chunks are stored as history (store/README.md)
  19: list<Refusal> refusals      // publishes of it that failed, by the gate or otherwise
}

struct LogEntry {
  1: Step step
  2: ArtifactInfo artifact
  3: list<ArtifactInfo> variants  // compressed from it
  4: list<ArtifactInfo> states    // the groups that came with it
}

// Points `name` at an artifact, or deletes the name when `id` is empty. With `expected` set the move
// is a compare-and-set: ALREADY_EXISTS if the name points elsewhere by now ("": must not exist yet).
// RUN@latest and RUN@best are moved by commits only.
struct AliasMove {
  1: string name
  2: string id
  3: string by
  4: optional string expected
}

// `id` is what a person has at hand: a digest or a unique prefix of one (>= 6 digits), an alias, a
// base's name, RUN@STEP, RUN@STEP.merge, RUN@latest, RUN@best, or another route. With ".GROUP" behind
// the name of a checkpoint: its state of that group (RUN@latest.optimizer).
service LineageService {
  list<Run> runs() throws (1: Error error)
  list<LogEntry> log(1: string run) throws (1: Error error)
  ArtifactInfo show(1: string id) throws (1: Error error)
  list<Alias> aliases() throws (1: Error error)
  Alias move_alias(1: AliasMove move) throws (1: Error error)
  string resolve(1: string id) throws (1: Error error)   // hex digest
  RetentionPolicy set_retention(1: string run, 2: RetentionPolicy policy) throws (1: Error error)
  RetentionReport retention(1: string run) throws (1: Error error)
  void pin(1: string id, 2: string by, 3: string why) throws (1: Error error)
  void unpin(1: string id) throws (1: Error error)
  // Readable and undeletable for grace_ms more. INVALID_ARGUMENT names what keeps it.
  void delete_artifact(1: string id, 2: i64 grace_ms, 3: string by, 4: string why)
      throws (1: Error error)
  void undelete(1: string id) throws (1: Error error)
  // Applies every run's policy, purges what was deleted long enough ago, gives the bytes back.
  // Returns when that is done; a dry run says what would be. bytes_per_second: of moving what stays;
  // 0: as fast as it goes, else at least 1000000.
  GcReply gc(1: bool dry_run, 2: i64 bytes_per_second) throws (1: Error error)
  // Texts in place of the run's; none: the run has no probe texts any more. Scores on other texts
  // count no more for RUN@best.
  ProbeSet set_probe(1: string run, 2: list<ProbeText> texts, 3: string by)
      throws (1: Error error)
  ProbeSet probe(1: string run) throws (1: Error error)  // without texts where there are none
  // Likewise: the texts on which the scales of 1-bit variants are found. INVALID_ARGUMENT names a
  // text that is a probe text as well, and set_probe one that is a calibration text.
  ProbeSet set_calibration(1: string run, 2: list<ProbeText> texts, 3: string by)
      throws (1: Error error)
  ProbeSet calibration(1: string run) throws (1: Error error)
  Gate set_gate(1: string run, 2: Gate gate) throws (1: Error error)
  Gate gate(1: string run) throws (1: Error error)
}

// The limits of a run's gate (store/variant_gate.h): a variant that is not within them does not
// answer under any name.
struct Gate {
  1: double max_kl = 0.1          // nats a token, KL(checkpoint || variant) on the probe texts
  2: double min_top1 = 0.9        // share of tokens on whose most likely successor they agree
  3: double max_loss_rise = 0.05  // nats a token, held-out loss of the variant over the checkpoint's
  4: double max_update = 1        // ||W - W_base|| / ||W_base||
  5: double min_update = 0
  6: double max_error = 0.95      // share of a matrix's squared update that its codec may miss
}

// Texts that the run's training has not seen: what its models are scored on. UTF-8, at most 64 of
// them and 1 MiB together.
struct ProbeText {
  1: string name                  // for a person
  2: string text
}

struct ProbeSet {
  1: string run
  2: list<ProbeText> texts
  3: binary digest                // of the texts; empty: there are none
  4: i64 time_ms
  5: string by
}

// Which checkpoints and merges of a run stay (store/retention.h). Without rules all of them do.
struct BestRule {
  1: string metric                // of the step ("loss") or of an evaluation ("TASK/METRIC")
  2: bool lower = true            // is better
  3: i64 keep = 1
}

// Which states of a group stay. A group without a rule stays with its checkpoints; a state that
// stays by a rule keeps its checkpoint.
struct GroupRule {
  1: string group
  2: i64 keep_last = 0            // the newest n; 0: no such rule
  3: i64 every = 0                // steps that are multiples of it; 0: no such rule
}

struct RetentionPolicy {
  1: i64 keep_last = 0            // 0: no such rule
  2: list<BestRule> best
  3: i64 every = 0                // 0: no such rule
  4: i64 grace_ms = 604800000     // from the deletion to the end of undelete
  5: list<GroupRule> groups
}

// Why one artifact stays; without reasons it may go.
struct Fate {
  1: binary artifact
  2: Kind kind
  3: i64 step                     // -1: none
  4: list<string> reasons         // for a person
  5: i64 purge_ms                 // deleted already; 0: not
  6: i64 stored_bytes             // of its parts, shared ones included
  7: string group                 // of a state
}

struct RetentionReport {
  1: RetentionPolicy policy
  2: list<Fate> fates             // of the run's artifacts
}

struct GoneArtifact {
  1: binary artifact
  2: Kind kind
  3: string run
  4: i64 step
  5: i64 bytes                    // of chunks that go with it and with none listed before
  6: string group                 // of a state
  7: i64 purge_ms                 // of a dry run, over 0: deleted now, it would go only then
}

struct GcReply {
  1: list<binary> deleted         // by the runs' policies, now
  2: list<binary> undeleted       // what a policy deleted before and keeps now
  3: list<GoneArtifact> purged    // for good
  4: i64 chunks                   // without an owner any more
  5: i64 chunk_bytes
  6: i64 packs_compacted
  7: i64 packs_removed
  8: i64 copied_bytes
  9: i64 pack_bytes_before
  10: i64 pack_bytes_after
}

struct Job {
  1: string key
  2: string kind
  3: string state                 // queued, running, done, failed
  4: i32 attempts
  5: string error
  6: string result                // hex digest
  7: double share                 // done of a running one, 0..1
  8: map<string, string> arguments
  9: i64 created_ms
  10: i64 finished_ms
}

struct Event {
  1: i64 sequence
  2: i64 time_ms
  3: string type
  4: string subject
  5: map<string, string> fields
}

struct ServedModel {
  1: string name
  2: string digest                // hex
  3: string state                 // resident, stored, loading, failed
  4: i64 resident_bytes
}

// What the process is doing. `base` and `served` are the endpoint's.
struct DaemonStatus {
  1: string version
  2: i64 uptime_ms
  3: string base                  // name, or empty
  4: string base_state            // missing, loading, ready, failed: reason
  5: i64 runs
  6: i64 artifacts
  7: i64 chunks
  8: i64 chunk_bytes
  9: i64 pack_bytes
  10: i64 open_sessions
  11: list<Job> jobs              // not finished, and the last failed ones
  12: list<ServedModel> served
  13: string devices              // for a person
  14: string http_address
  15: string thrift_address
  16: list<Gathering> gatherings  // that are not complete
  17: i64 stored_chunk_bytes      // of the chunks as they are stored: less, with compressed history
  18: i64 quota_bytes             // of the packs; 0: none
}

struct Damage {
  1: binary chunk
  2: string error
  3: list<string> needed_by
  4: bool repaired                // from the other copy, and read back
}

struct ScrubReply {
  1: i64 chunks
  2: i64 bytes
  3: list<Damage> damaged
}

struct BackupReply {
  1: i64 artifacts
  2: i64 total_chunks
  3: i64 copied_chunks            // were not there yet
  4: i64 copied_bytes
  5: i64 event                    // the newest it holds
}

// How a merge is made, beside what `merge` says of the method monosoup. A method takes no option of
// another one.
struct MergeOptions {
  1: string method = "monosoup"   // monosoup, monosoup-spectral, mean, model-stock
  2: list<double> weights         // mean: one an id, in their order; none: equal
  3: double spectral = 0          // monosoup-spectral: 0: effective rank; else the share R, (0, 1]
  // > 0: the newest so many checkpoints, the oldest first, of the run that `ids` names, or up to the
  // one checkpoint that it names.
  4: i32 last = 0
}

// How a variant is stored. A codec takes no option of another one.
struct PublishOptions {
  // bitdelta, auto: how the scale of a row of signs is found: mean (of |delta|), closed-form (least
  // squares of the layer's outputs on the run's calibration texts), distilled (from there by
  // gradient steps on the logits), or auto: of codec bitdelta closed-form where the run has such
  // texts, else mean. "": as the run says. Where closed-form or distilled is asked for without
  // texts it is mean, and the variant and its event say so.
  1: string alpha
  2: i64 planes = 0               // bitdelta: sign planes of a matrix; auto: at most. 0: 1, or 4
  3: i64 residual_rank = 0        // likewise, of the low-rank residual beside them; 0: none
  4: i64 max_bytes = 0            // auto: of the variant, tensors and files; 0: no limit
  5: double max_share = 0         // auto: likewise, as a share of the full model's bytes, (0, 1]
  6: double max_error = -1        // auto: lost share of the squared update, [0, 1]; -1: no limit
}

service ControlService {
  // These queue a durable job and return it; ask job() until it is done or failed.
  // `run` may be empty: the first id's; `step` -1: the newest one's.
  Job merge(1: list<string> ids, 2: string run, 3: i64 step, 4: double energy, 5: i64 rank,
            6: bool force, 7: MergeOptions options) throws (1: Error error)
  // `codec`: bitdelta, dense, auto or sparse; "": the run's, with what `options` say otherwise.
  Job publish(1: string id, 2: string codec, 3: string name, 4: PublishOptions options)
      throws (1: Error error)
  // Likewise, also over the gate's limits: it is measured, and the event of the variant says what was
  // overruled, why and by whom. A broken checkpoint is refused all the same. `why` must not be empty.
  Job publish_forced(1: string id, 2: string codec, 3: string name, 4: string why, 5: string by,
                     6: PublishOptions options) throws (1: Error error)
  // Stores the history of a run, or of one of its artifacts, as differences (store/README.md).
  Job compress(1: string id) throws (1: Error error)
  // Held-out loss of a checkpoint, merge or variant on its run's probe texts: an evaluation of the
  // task "probe".
  Job score(1: string id) throws (1: Error error)
  Job job(1: string key) throws (1: Error error)
  list<Job> jobs() throws (1: Error error)              // all, by age
  void unpublish(1: string name) throws (1: Error error)
  list<Alias> routes() throws (1: Error error)
  DaemonStatus status() throws (1: Error error)
  // Events after `since`, waiting up to timeout_ms (at most 30 s) for the first.
  list<Event> watch(1: i64 since, 2: i32 limit, 3: i32 timeout_ms) throws (1: Error error)
  // Reads everything. `repair_from`: an absolute path on the daemon's machine, of a backup that has
  // what is damaged; "": only reports.
  ScrubReply scrub(1: string repair_from) throws (1: Error error)
  // Brings the backup in that folder of the daemon's machine up to now. Training goes on meanwhile.
  BackupReply backup(1: string directory) throws (1: Error error)
}

// --- pools of LoRA adapters under a budget (store/adapter_pool.h) ---

struct PoolConfig {
  1: i64 budget_bytes             // members, their manifests, and the pool's record
  2: string method = "opcm"       // opcm, mean, task-arithmetic
  3: double projection = 0.5      // opcm's a, [0, 1)
  4: double scale = 0.5           // of task arithmetic
  // Similarity (cosine) from which on a new adapter is merged although it would fit; 1: none.
  5: double threshold = 1
  // In its place: that quantile of the similarities of all pairs, at least 0.01, once there are
  // three adapters.
  6: optional double quantile
  7: double quality = 0.75        // exp(own loss - member's loss) that each task keeps in a merge
  8: i64 rank = 0                 // of a merged member; 0: the larger one of its two
  9: bool evict = true            // the least requested member may go for a new one
}

struct PoolMember {
  1: binary artifact
  2: list<string> tasks
  3: i64 merged                   // adapters that went into it
  4: double opcm_lambda
  5: double norm_sum
  6: i64 bytes                    // manifest and chunks
  7: bool owned                   // the pool's alone: its bytes go when it leaves
}

struct PoolTask {
  1: string task
  2: binary member
  3: binary own                   // the adapter that came with it; it may be gone
  4: i64 probe_texts
  5: optional double own_loss     // nats a token on its probe texts
  6: optional double loss         // likewise, of its member
  7: i64 requests                 // of the endpoint's last window
  8: i64 added_ms
}

struct Pool {
  1: string name
  2: binary base
  3: PoolConfig config
  4: list<PoolMember> members
  5: list<PoolTask> tasks
  6: i64 bytes                    // all that counts against the budget
  7: i64 leaving_bytes            // of it: former members that no collection has taken yet
  8: optional double threshold    // the similarity that counts now
}

struct PoolAdd {
  1: string pool
  2: list<string> tasks           // one; several of a member that is adopted
  3: string id                    // of an adapter
  4: list<ProbeText> probe        // held-out texts of the task, 64 KiB at most; none: not measured
  5: bool owned = false           // it came for the pool alone and may be deleted
  // Takes the adapter as it is, with what it remembers of a merge: an exported pool comes back so.
  6: bool adopt = false
  7: i64 merged = 1
  8: double opcm_lambda = 1
  9: double norm_sum = 0          // 0: the adapter's own norm
}

// A session of kind ADAPTER whose `run` is "POOL/TASK" brings an adapter for a pool: it gets no name.
service PoolService {
  Pool create(1: string name, 2: string base, 3: PoolConfig config) throws (1: Error error)
  list<Pool> pools() throws (1: Error error)
  Pool pool(1: string name) throws (1: Error error)
  // These queue a durable job. add: INVALID_ARGUMENT, NOT_FOUND, or a failed job whose error says
  // what did not fit.
  Job add(1: PoolAdd request) throws (1: Error error)
  Job remove(1: string pool, 2: string task) throws (1: Error error)
  // The member with the fewest requests of the last window, with all of its tasks.
  Job evict(1: string pool) throws (1: Error error)
  // With the adapters that are the pool's alone. INVALID_ARGUMENT: it has tasks, and no force.
  Job delete_pool(1: string pool, 2: bool force) throws (1: Error error)
}
