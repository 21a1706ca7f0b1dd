// The durable jobs: merge, publish, score, expire, compress and pool. One runner thread takes queued jobs
// in order, does the work, and commits the outcome together with the job's new state, so that a
// restart resumes exactly what was not finished and does nothing twice.
//
// One commit each:
//   pool     record of the pool, routes, merged member with edges pooled_from, job done, events; what
//            left is collected after it
//   publish  variant, edge compressed_from, routes (policy.h RouteNamesFor), job done, events
//   score    held-out loss of an artifact on its run's probe texts (an evaluation of the task
//            "probe"), RUN@best and what follows from it (store/best_model.h), job done, event
//   merge    merged artifact, edges merged_from, step record, follow-up publish jobs (policy.h
//            JobsForMerge), job done, event; where the run has probe texts, its held-out loss beside
//            that of its parents and of their mean (evaluations), and RUN@best if it is the best
// An expire job applies the retention of its run (store/retention.h) and collects garbage, as
// CheckpointStore::ApplyRetention and CollectGarbage do it; it leaves the collection to the next
// one while a scrub or backup runs. It is queued in the commit of a checkpoint, never before it;
// the artifacts that queued and running jobs name stay. A merge whose (run, step) has another merge
// already is committed without a step record: it is found by its digest, and published under a
// given name.
//
// A compress job gives the history of its run another form (store/history.h), then the bytes back.
// It runs when no other job is queued, stops between two chunks for one that comes, and goes on
// after it.
//
// Events (fields are text; digests hex):
//   "job"      a job was submitted.        subject: key. fields: kind
//   "variant"  subject: the variant. fields: variant, source, base, codec, run, step, bytes,
//              bytes_full, routes (the names that moved to it, one a line), job: enough to load and
//              to serve it; and what the gate measured (store/variant_gate.h GateFields), gate
//              (passed, forced), of a forced one overruled (what was refused), force (why), by;
//              where other scales than mean |delta| were asked for, what came of it
//              (store/calibration.h AlphaFields)
//   "route"    one for each moved name.    subject: name. fields: variant, was ("": none), source
//   "merge"    subject: the merge. fields: artifact, run, step, parents (by comma), method,
//              kept_energy_min, job; where it was scored probe, loss, parent_losses (by comma),
//              best_parent_loss, mean_loss, or unscored (why not)
//   "merge_worse"  likewise, beside it: its held-out loss is over a parent's
//   "publish_refused", "merge_refused"     the gate or the request itself; old routes stay.
//              subject: the artifact (merge: run@step). fields: reason, code, job, and the job's
//              arguments; of the gate also run, step, metric, measured, limit (of the first that is
//              not within it) and all that was measured
//   "score"    an artifact was scored.     subject: it. fields: artifact, run, step, probe, tokens,
//              loss (nats a token), job
//   "compress" history was compressed.     subject: run. fields: run, artifacts, chunks,
//              chunk_bytes, stored_bytes, whole_chunks
//   "pool"     a pool was made, changed or deleted (store/adapter_pool.h). subject: it. fields: pool,
//              op, outcome, tasks, member, own, bytes, budget_bytes, job; what was measured: nearest,
//              similarity, threshold, rank, kept_energy, kept_energy_min, quality (a line a task:
//              its name, before, after), unmeasured (tasks), was (a member that left), evicted
//              (tasks), path (what was tried before)
//   "pool_refused"  likewise, and reason: nothing has changed
//   "delete", "undelete", "purge", "gc"    see store/README.md
//   "publish_failed", "merge_failed", "score_failed", "expire_failed", "compress_failed"  anything
//              else, after the last attempt. Fields likewise
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "store/calibration.h"
#include "store/checkpoint_store.h"
#include "store/policy.h"
#include "store/progress.h"
#include "store/scoring.h"

namespace stockpot {

// How a merge is computed; the composition root passes BuildMerge, which brings LibTorch, so
// that the pipeline itself links without it.
using MergeFunction = std::function<Result<Manifest>(
    CheckpointStore&, std::span<const Digest>, const std::string& run, int64_t step,
    const MergeOptions&, const ProgressFunction& progress)>;

// Thread promise: any thread.
class Pipeline {
 public:
  struct Options {
    MergeFunction merge;   // REQUIRES: set
    ScoreFunction score;   // null: no model is served here, and what needs a score is refused
    CalibrateFunction calibrate;  // null: likewise, and 1-bit variants have the scales of `mean`
    // Of pools of adapters (store/adapter_pool.h): requests of the last window by route, null:
    // nobody counts; whether the endpoint answers by the routes as of an event, null: there is none.
    std::function<int64_t(const std::string& route)> requests;
    std::function<bool(int64_t event)> followed;
    int threads = 1;       // of the codecs
    int max_attempts = 3;  // of a retryable failure (kernels/base/status.h); others fail at once
    int64_t backoff_ms = 200;  // before the second attempt; doubles with each
    Clock clock;               // REQUIRES: set
    int64_t expire_bytes_per_second = int64_t{100} << 20;   // of compaction; 0: no throttle
    int64_t history_bytes_per_second = int64_t{100} << 20;  // of compression; 0: no throttle
  };
  // Starts the runner; a job that was running when the last one ended is done again, a publish from
  // behind the last tensor of its draft (store/publish_draft.h). `store` must outlive the pipeline.
  Pipeline(CheckpointStore& store, Options options);
  // Stops after the current tensor and finishes nothing: the job stays queued.
  ~Pipeline();

  // Queues (idempotent: a job that is queued, running or done is returned as it is). Queued again:
  // a failed one, and a publish whose names were moved or taken away since. Returns the job.
  Result<Job> Submit(Job job);
  // Share done of the running job, [0, 1]; empty key: none.
  struct Progress {
    std::string key;
    double share = 0;
  };
  Progress progress() const;
  // Waits until no job is queued or running and the runner itself rests (what it cleans when it
  // starts is cleaned, every event is seen), or the timeout; true if idle.
  bool WaitIdle(int64_t timeout_ms);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
