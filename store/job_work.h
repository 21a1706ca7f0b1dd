// What one job does: from its arguments to the commit that makes its outcome visible. Internal to
// the pipeline, which adds threads, retries and restarts.
#pragma once

#include <functional>

#include "kernels/base/threads.h"
#include "store/checkpoint_store.h"
#include "store/job_arguments.h"
#include "store/pipeline.h"
#include "store/pool_work.h"
#include "store/variant_gate.h"

namespace stockpot {

// `options` must outlive it. Thread promise: one caller at a time.
class JobWork {
 public:
  JobWork(CheckpointStore& store, const Pipeline::Options& options)
      : store_(store),
        merge_(options.merge),
        score_(options.score),
        calibrate_(options.calibrate),
        clock_(options.clock),
        garbage_{.bytes_per_second = options.expire_bytes_per_second},
        pool_({.store = store,
               .score = options.score,
               .requests = options.requests,
               .followed = options.followed,
               .clock = options.clock,
               .garbage = garbage_}),
        history_bytes_per_second_(options.history_bytes_per_second),
        threads_(options.threads) {}

  // Does the job and commits its outcome, with the job's state kDone. On an error nothing is
  // visible.
  Status Do(const Job& job, const ProgressFunction& progress);

  // Whether what a finished job made still stands: a merge does; a publish while every name that it
  // would move now answers with its variant. Any thread.
  bool StillStands(const Job& job) const;

  // What a process that was killed in a job of a pool left over.
  Status CleanPools(const ProgressFunction& progress) { return pool_.CleanAll(progress); }

  // Commits that the job failed for good, and the event that says so.
  Status Fail(Job job, const Status& why,
              const std::map<std::string, std::string>& more_fields = {});

 private:
  // A publish job's arguments, read.
  struct PublishRequest {
    Digest artifact;
    Manifest source;  // the artifact's
    PublishCodec codec = PublishCodec::kBitDelta;
    PublishOptions options;
    std::string name;   // empty: the default names
    std::string force;  // not empty: why the gate's refusal does not count
    std::string by;     // who said so
  };
  // How a merge does on the probe texts beside its parents and their mean.
  struct MergeScores {
    std::vector<Eval> evals;
    std::map<std::string, std::string> fields;  // of the event
    bool worse = false;                         // than one of the parents
  };
  // What the gate found. Without a refusal, or with `request.force`, the variant may be served.
  struct GateOutcome {
    std::map<std::string, std::string> fields;  // of the event
    std::optional<GateRefusal> refusal;
    std::optional<GateMeasures::Probe> probe;
  };
  Result<PublishRequest> ReadPublish(const Job& job) const;
  // The texts and limits that a publish of the run goes by; empty: none but the defaults.
  std::string JudgedBy(const std::string& run) const;
  Status Publish(const Job& job, const ProgressFunction& progress);
  // The draft with the scales that were asked for; or as it is, and why, where that cannot be. An
  // error: not now, but perhaps later.
  Result<Manifest> Calibrate(const Job& job, const PublishRequest& request, Manifest draft,
                             const ProgressFunction& progress);
  // An error: not now, but perhaps later; whatever else keeps it from measuring is a refusal.
  Result<GateOutcome> PassGate(const PublishRequest& request, const Manifest& variant,
                               const ProgressFunction& progress) const;
  Result<GateMeasures> MeasureVariant(const PublishRequest& request, const Manifest& variant,
                                      const ProgressFunction& progress) const;
  // To the commit of the variant `made`: its evaluations, and the fields of the last event.
  void AddGate(const GateOutcome& gate, const Digest& made, Commit& commit) const;
  Status Refuse(const Job& job, const PublishRequest& request, const GateOutcome& gate);
  // Commits the held-out loss of a step, and what it does to RUN@best.
  Status KeepLoss(const Manifest& model, const Digest& artifact, const Digest& probe, double loss);
  Result<Commit> PublishCommit(const Job& job, const PublishRequest& request,
                               const Manifest& variant, const GateOutcome& gate) const;
  Result<std::vector<std::string>> RouteNames(const Manifest& source, const Digest& source_digest,
                                              PublishCodec codec, const std::string& name) const;
  Status Merge(const Job& job, const ProgressFunction& progress);
  Result<Commit> MergeCommit(const Job& job, const MergeArguments& args, const Manifest& merged,
                             const MergeScores& scores) const;
  // Nothing where the run has no probe texts; why, where the scores cannot be computed. An error:
  // not now.
  Result<MergeScores> ScoreMerge(const MergeArguments& args, const Manifest& merged,
                                 const ProgressFunction& progress);
  Status MeasureMerge(const MergeArguments& args, const Manifest& merged, const ProbeSet& probe,
                      const ProgressFunction& progress, MergeScores& scores);
  bool ScoreStands(const Job& job) const;
  Status Score(const Job& job, const ProgressFunction& progress);
  // On the probe texts, of an artifact with a base. InvalidArgument: it cannot be computed here.
  Result<ProbeScores> ScoreOn(const ProbeSet& probe, const std::vector<const Manifest*>& models,
                              const ProgressFunction& progress) const;
  // The held-out loss of a checkpoint, merge or variant, measured now.
  Result<double> MeasureLoss(const ProbeSet& probe, const Manifest& model,
                             const ProgressFunction& progress) const;
  Status Expire(const Job& job);
  Status Pool(const Job& job, const ProgressFunction& progress);
  Status Compress(const Job& job, const ProgressFunction& progress);
  // Commits the end of a job that others queue: done, or queued again where `again` says so as of
  // the very commit. What came between a look and a commit would be overwritten.
  Status Conclude(const Job& job, Commit commit, const std::function<bool()>& again);
  // Whether a checkpoint of the run came after `event`: its commit queued this very job again.
  bool CheckpointSince(int64_t event, const std::string& run) const;
  // Likewise a name or pin of something compressed, which must become whole.
  bool WholeSince(int64_t event) const;
  Job Finished(Job job, const Digest& result) const;

  CheckpointStore& store_;
  const MergeFunction& merge_;
  const ScoreFunction& score_;
  const CalibrateFunction& calibrate_;
  const Clock& clock_;
  const GarbageOptions garbage_;
  PoolWork pool_;
  bool leftovers_ = false;  // chunks that no artifact has got: of a mean that was only scored, ...
  const int64_t history_bytes_per_second_;
  ThreadPool threads_;
};

}  // namespace stockpot
