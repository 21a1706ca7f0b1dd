// The small records of the catalogue: runs, steps, edges, aliases, routes, events, jobs, evals.
// Times are Unix milliseconds. All are plain values; the catalogue (checkpoint_store.h) keeps them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/digest.h"
#include "store/manifest.h"

namespace stockpot {

// What is published by itself when a checkpoint or merge is committed.
enum class PublishPolicy : uint8_t { kEvery, kMerges, kBest, kOnRequest };
std::string_view PublishPolicyName(PublishPolicy policy);  // "every", "merges", "best", "request"
Result<PublishPolicy> PublishPolicyFromName(std::string_view name);

// How checkpoints are merged: the formulas are in store/merge.h.
enum class MergeMethod : uint8_t { kMonoSoup, kMonoSoupSpectral, kMean, kModelStock };
std::string_view MergeMethodName(MergeMethod method);  // "monosoup", "monosoup-spectral", "mean",
                                                       // "model-stock"
Result<MergeMethod> MergeMethodFromName(std::string_view name);

// What a method does not use must have its default.
struct MergeOptions {
  MergeMethod method = MergeMethod::kMonoSoup;
  // mean: one a parent, in their order, >= 0 and not all 0; empty: equal ones.
  std::vector<double> weights = {};
  // monosoup: what of each delta of a matrix is kept.
  double energy = 0.95;  // share of ||delta||_F^2, (0, 1]
  int64_t rank = 0;      // > 0: fixed rank instead of the energy floor
  bool force = false;    // accept a fixed rank that keeps less than `energy`
  // monosoup-spectral: 0: the effective rank decides; else the share R of ||delta||_F^2, (0, 1].
  double spectral = 0;
};

// How publish stores the tensors that changed (store/bitdelta_codec.h).
enum class PublishCodec : uint8_t {
  kBitDelta,  // "bitdelta": sign planes for the linear layers, the rest exactly
  kDense,     // "dense": every changed tensor raw. Its chunks are the checkpoint's own: 0 new bytes
  kAuto,      // "auto": tensor by tensor what is measured to be worth its bytes
  kSparse,    // "sparse": exactly; the changed elements alone where that is smaller
};
std::string_view PublishCodecName(PublishCodec codec);
Result<PublishCodec> PublishCodecFromName(std::string_view name);

// How the scales of sign planes are found (store/calibration.h).
enum class AlphaMethod : uint8_t {
  kMean,
  kClosedForm,
  kDistilled,
  kAuto,  // of codec bitdelta, where the run has calibration texts and a model is served, by closed
          // form; else mean
};
std::string_view AlphaMethodName(AlphaMethod method);  // "mean", "closed-form", "distilled", "auto"
Result<AlphaMethod> AlphaMethodFromName(std::string_view name);

// What a codec does not use must have its default.
struct PublishOptions {
  // bitdelta, auto. By closed form and distilled need calibration texts of the run.
  AlphaMethod alpha = AlphaMethod::kAuto;
  // bitdelta: of each matrix; auto: at most. 0: the codec's own number.
  int64_t planes = 0;
  int64_t residual_rank = 0;  // likewise, of the low-rank residual beside the planes; 0: none
  // auto: what a variant may take, tensors and files, in bytes or as a share of the artifact's
  // logical bytes, (0, 1]. 0: no limit. Both: the smaller one.
  int64_t max_bytes = 0;
  double max_share = 0;
  // auto: what may be lost of the update, sum ||W - W'||_F^2 / sum ||W - W_base||_F^2, [0, 1]. 0 is
  // nothing; negative: no limit.
  double max_error = -1;
  bool operator==(const PublishOptions&) const = default;
};

struct RunConfig {
  int64_t merge_every = 1000;  // steps; 0: never
  PublishPolicy publish = PublishPolicy::kEvery;
  // Of the metrics that come with a checkpoint, or TASK/METRIC of an evaluation: "probe/loss" is the
  // held-out loss on the run's probe texts (store/best_model.h).
  std::string best_metric = "loss";
  bool best_is_lower = true;
  double merge_energy = 0.95;  // kept share of ||delta||_F^2 per matrix, (0, 1]
  int64_t merge_rank = 0;      // > 0: fixed rank instead of the energy floor
  // Older checkpoints are stored as differences, in the background (store/history.h). Off unless
  // asked for: it costs a core beside the training and writes what it compresses a second time.
  bool compress_history = false;
  int64_t quota_bytes = 0;  // of the distinct chunks of its artifacts; 0: none
  MergeMethod merge_method = MergeMethod::kMonoSoup;  // energy and rank are monosoup's
  double merge_spectral = 0;                          // monosoup-spectral's: see MergeOptions
  PublishCodec publish_codec = PublishCodec::kBitDelta;  // of what is published by itself,
  PublishOptions publish_options;                        // and how
  bool operator==(const RunConfig&) const = default;
};

struct Run {
  std::string name;  // [A-Za-z0-9][A-Za-z0-9._-]{0,127}
  Digest base;
  RunConfig config;
  std::map<std::string, std::string> tags;
  int64_t created_ms = 0;
};

// One complete checkpoint, merge or state of a run. A (run, step) has at most one of each kind, and
// of states one of each group.
struct StepRecord {
  std::string run;
  int64_t step = 0;
  ArtifactKind kind = ArtifactKind::kCheckpoint;  // or kMerge, kState
  std::string group;                              // of a state; else empty
  Digest artifact;
  std::map<std::string, double> metrics;  // as reported by the trainer; finite
  int64_t committed_ms = 0;
  int32_t world = 1;     // the ranks that sent it,
  std::string attempt;   // and how they named their try (store/ingest.h)
  bool deleted = false;  // has a tombstone; not part of the record
};

enum class EdgeType : uint8_t {
  kTrainedFrom,
  kMergedFrom,
  kCompressedFrom,
  kAdapterOf,
  kPooledFrom,
  kResumedFrom,
  kStateOf,
};
std::string_view EdgeTypeName(EdgeType type);  // "trained_from", ...
Result<EdgeType> EdgeTypeFromName(std::string_view name);

struct Edge {
  EdgeType type = EdgeType::kTrainedFrom;
  Digest child;
  Digest parent;
};

// Where a start of a job that is named `key` resumes from. Made once, then the same for everybody.
struct ResumeDecision {
  std::string run;
  std::string key;
  Digest artifact;    // zero: no checkpoint, from the run's base
  int64_t step = -1;  // -1: likewise
  int64_t decided_ms = 0;
};

// A name that moves: `RUN@latest` and `RUN@best` (checkpoints), or any name.
struct Alias {
  std::string name;
  Digest artifact;
  int64_t moved_ms = 0;
  std::string moved_by;
};

// A name the endpoint answers to -> the variant that answers. `RUN@STEP`, `RUN@latest`, `RUN@best`,
// `RUN@STEP.merge`, or a name given with publish.
struct Route {
  std::string name;
  Digest variant;
  int64_t moved_ms = 0;
  std::string moved_by;
};

struct Event {
  int64_t sequence = 0;  // 1, 2, 3, ... without gaps
  int64_t time_ms = 0;
  std::string type;  // "checkpoint", "merge", "variant", "route", "alias", "publish_refused", ...
  std::string subject;  // run, name or digest the event is about
  std::map<std::string, std::string> fields;
};

enum class JobKind : uint8_t { kMerge, kPublish, kExpire, kCompress, kScore, kPool };
enum class JobState : uint8_t { kQueued, kRunning, kDone, kFailed };
std::string_view JobKindName(JobKind kind);  // "merge", "publish", "expire", "compress", "score",
                                               // "pool"
Result<JobKind> JobKindFromName(std::string_view name);
std::string_view JobStateName(JobState state);  // "queued", "running", "done", "failed"
Result<JobState> JobStateFromName(std::string_view name);

// Durable work, keyed by what it makes, so that asking twice is asking once.
struct Job {
  std::string key;  // "publish/<artifact hex>/<codec>/<name>", "merge/<run>/<step>", ...
  JobKind kind = JobKind::kPublish;
  std::map<std::string, std::string> args;
  JobState state = JobState::kQueued;
  int64_t sequence = 0;  // order of creation: the runner's order
  int32_t attempts = 0;
  std::string error;   // of the last attempt
  std::string result;  // hex digest of what was made
  int64_t created_ms = 0;
  int64_t finished_ms = 0;
};

struct Eval {
  Digest artifact;
  std::string task;
  std::string metric;
  double value = 0;
  int64_t time_ms = 0;
  std::string by;
};

// Texts that no training of a run has seen: what its checkpoints, merges and variants are scored on
// (store/scoring.h). Its calibration texts (store/calibration.h) are kept likewise, and are others.
struct ProbeSet {
  struct Text {
    std::string name;  // for a person: the file's
    std::string text;  // UTF-8
    bool operator==(const Text&) const = default;
  };
  std::string run;
  std::vector<Text> texts;
  int64_t time_ms = 0;
  std::string by;

  // Of the texts in their order, whatever they are called. Scores of two sets do not compare.
  Digest digest() const;
};
inline constexpr int64_t kMaxProbeTexts = 64;
inline constexpr int64_t kMaxProbeBytes = int64_t{1} << 20;  // of all texts of a run
// Evaluations that the engine measured on a probe set have this task, and say in `by` which set.
inline constexpr std::string_view kProbeTask = "probe";
std::string ProbeAuthor(const Digest& probe);  // "probe 0123456789ab"

// What a variant of a run must be like before a route moves to it (store/variant_gate.h). Where the
// defaults come from: store/README.md.
struct GateConfig {
  double max_kl = 0.1;         // nats a token, KL(checkpoint || variant) on the probe texts
  double min_top1 = 0.9;       // share of tokens on whose most likely successor they agree
  double max_loss_rise = 0.05; // nats a token, held-out loss of the variant over the checkpoint's
  double max_update = 1;       // ||W - W_base||_F / ||W_base||_F
  double min_update = 0;       // likewise; over 0: an untrained checkpoint is refused
  double max_error = 0.95;     // share of a matrix's squared update that its codec may miss, [0, 1]
  bool operator==(const GateConfig&) const = default;
};
inline constexpr double kGateNoLimit = 1e9;

// Which checkpoints and merges of a run stay. One that any rule wants stays; without a rule
// everything does. What the rules mean and what stays whatever they say: store/retention.h.
struct RetentionPolicy {
  struct Best {
    std::string metric;  // of the step ("loss"), or of an evaluation ("loss", "TASK/METRIC")
    bool lower = true;   // is better
    int64_t keep = 1;
    bool operator==(const Best&) const = default;
  };
  int64_t keep_last = 0;   // the newest n checkpoints and the newest n merges; 0: no such rule
  std::vector<Best> best;  // the best k by each metric
  int64_t every = 0;       // steps that are multiples of it; 0: no such rule
  // Of the states of a group: the newest n, and those at multiples of m. Without a rule a state
  // stays as long as its checkpoint; one that stays by a rule keeps its checkpoint.
  struct Group {
    std::string group;
    int64_t keep_last = 0;
    int64_t every = 0;
    bool operator==(const Group&) const = default;
  };
  std::vector<Group> groups;
  int64_t grace_ms = int64_t{7} * 24 * 3600 * 1000;  // from the deletion to the end of undelete

  // Of checkpoints and merges.
  bool KeepsEveryStep() const { return keep_last == 0 && best.empty() && every == 0; }
  bool KeepsEverything() const { return KeepsEveryStep() && groups.empty(); }
  bool operator==(const RetentionPolicy&) const = default;
};

// Keeps an artifact, whatever a policy or a person's `delete` says, until it is taken off.
struct Pin {
  Digest artifact;
  int64_t time_ms = 0;
  std::string by;
  std::string why;
};

// A deleted artifact. Until `purge_ms` it is readable and undelete brings it back; nothing new may
// refer to it. After that the next garbage collection removes it for good.
struct Tombstone {
  Digest artifact;
  int64_t deleted_ms = 0;
  int64_t purge_ms = 0;
  std::string by;  // a person, or kRetentionAuthor
  std::string why;
};
inline constexpr std::string_view kRetentionAuthor = "retention";

}  // namespace stockpot
