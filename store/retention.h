// Which artifacts may go, and why each of the others stays. A pure function over records: the
// store reads them (CheckpointStore::Retention), commits check deletions with it, the job `expire`
// acts on it.
//
// Whatever a policy or a person says, these stay (IsFirm):
//   base        every base
//   pinned      by `pin`
//   alias       a name points at it: RUN@latest and RUN@best among them
//   route       the endpoint answers from it
//   best        the best checkpoint of its run by the run's own metric (store/policy.h BestStep)
//   last good   the newest checkpoint of its run, and the newest that the publish gate did not
//   refuse
//   job         a queued or running job works on it
//   needed      something that stays, or can still be undeleted, is stored as a difference to it
//   resume      the newest start of a job of its run resumed from it (store/ingest.h ResumePoint)
//   leased      somebody is reading it
// These stay because of the run's policy:
//   no rule     the run has no rule: everything stays
//   last n      one of the n newest checkpoints, or of the n newest merges
//   best k      one of the k best by a metric, checkpoints and merges together; ties go to the
//               earlier step, then to the checkpoint; without a value there is no place
//   every m     its step is a multiple of m
//   source      a variant, adapter or merge without a step: what it was made from stays; a state of
//               a group without a rule: its checkpoint stays
//   state       the state of one of its groups stays by a rule
// A state has the rules of its group alone, never fewer than the newest one of a group, and none
// once a person deleted its checkpoint. A person may delete any state.
// An artifact that belongs to no run and was made from nothing stays (no rule).
//
// What was deleted by a person takes no place in the rules. What was deleted by retention does: a
// late evaluation that makes it one of the best brings it back, so that the outcome does not depend
// on the order of evaluations as long as the grace lasts.
//
// A metric named "TASK/METRIC" is the newest evaluation of that task and metric. One without '/' is
// the step's own; where the step has none, the newest evaluation of that metric of any task.
//
// Thread promise: pure functions.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "store/records.h"

namespace stockpot {

enum class KeepReason : uint8_t {
  kBase,
  kPinned,
  kAlias,
  kRoute,
  kBest,
  kLastGood,
  kJob,
  kNeeded,
  kResume,
  kLeased,
  kNoRule,
  kRuleLast,
  kRuleBest,
  kRuleEvery,
  kSource,
  kState,
};
// True for the reasons that also a person's `delete` respects.
constexpr bool IsFirm(KeepReason reason) { return reason <= KeepReason::kLeased; }

struct Keep {
  KeepReason reason = KeepReason::kNoRule;
  std::string detail;  // the alias, route, job, metric, or digest in question
  bool operator==(const Keep&) const = default;
};
// "alias demo@latest", "last 3", "best 2 by loss", ... for a person.
std::string KeepText(const Keep& keep);

struct RetentionArtifact {
  Digest digest;
  ArtifactKind kind = ArtifactKind::kCheckpoint;
  std::string run;        // of the manifest; empty: none
  int64_t step = -1;      // likewise; -1: none
  std::string group;      // likewise; of a state
  bool has_step = false;  // (run, step, kind) names it
  bool refused = false;   // the publish gate found it broken
  int64_t committed_ms = 0;
  std::vector<Digest> needs;    // to be restored
  std::vector<Digest> sources;  // what it was made from: compressed, merged, ...; of a state its
                                // checkpoint
  std::vector<Edge> edges;      // all to its parents
  std::map<std::string, double> metrics;  // of its step
  std::vector<Eval> evals;
  std::optional<Tombstone> tombstone;
};

// One name, job, start or reader and the artifact it holds.
struct Hold {
  KeepReason reason = KeepReason::kAlias;
  std::string name;
  Digest artifact;
};

struct RetentionInputs {
  std::vector<Run> runs;
  std::map<std::string, RetentionPolicy> policies;  // by run; none: keeps everything
  std::vector<RetentionArtifact> artifacts;
  std::vector<Hold> holds;  // pins, aliases, routes, unfinished jobs, resume points, leases
};

// The fate of one artifact: it may go if `keeps` is empty.
struct Fate {
  Digest artifact;
  std::vector<Keep> keeps;
  bool stays() const { return !keeps.empty(); }
  bool firm() const;  // one of the reasons is
};

// One a tracked artifact, in their order. An artifact that a person deleted has firm reasons only.
std::vector<Fate> DecideRetention(const RetentionInputs& inputs);

// The value of a metric as the rules see it; null: none.
std::optional<double> MetricOf(const RetentionArtifact& artifact, const std::string& metric);

// InvalidArgument names the field: counts are 0..1,000,000, a metric is 1..256 printable bytes and
// named once per direction, at most 32 of them; a group has one rule that says something, at most 32
// of them; the grace is 0..10 years.
Status CheckRetention(const RetentionPolicy& policy);

}  // namespace stockpot
