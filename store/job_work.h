// What one job does: from its arguments to the commit that makes its outcome visible. Internal to
// the pipeline, which adds threads, retries and restarts.
#pragma once

#include "kernels/base/threads.h"
#include "store/checkpoint_store.h"
#include "store/pipeline.h"

namespace stockpot {

// `options` must outlive it. Thread promise: one caller at a time.
class JobWork {
 public:
  JobWork(CheckpointStore& store, const Pipeline::Options& options)
      : store_(store),
        merge_(options.merge),
        clock_(options.clock),
        garbage_{.bytes_per_second = options.expire_bytes_per_second},
        history_bytes_per_second_(options.history_bytes_per_second),
        threads_(options.threads) {}

  // Does the job and commits its outcome, with the job's state kDone. On an error nothing is
  // visible.
  Status Do(const Job& job, const ProgressFunction& progress);

  // Whether what a finished job made still stands: a merge does; a publish while every name that it
  // would move now answers with its variant. Any thread.
  bool StillStands(const Job& job) const;

  // Commits that the job failed for good, and the event that says so.
  Status Fail(Job job, const Status& why);

 private:
  // A publish job's arguments, read.
  struct PublishRequest {
    Digest artifact;
    Manifest source;  // the artifact's
    PublishCodec codec = PublishCodec::kBitDelta;
    std::string name;  // empty: the default names
  };
  Result<PublishRequest> ReadPublish(const Job& job) const;
  Status Publish(const Job& job, const ProgressFunction& progress);
  Result<Commit> PublishCommit(const Job& job, const Manifest& source, const Digest& source_digest,
                               const Manifest& variant, PublishCodec codec) const;
  Result<std::vector<std::string>> RouteNames(const Manifest& source, const Digest& source_digest,
                                              PublishCodec codec, const std::string& name) const;
  Status Merge(const Job& job, const ProgressFunction& progress);
  Status Expire(const Job& job);
  Status Compress(const Job& job, const ProgressFunction& progress);
  // Whether a checkpoint of the run came after `event`: its commit queued this very job again.
  bool CheckpointSince(int64_t event, const std::string& run) const;
  // Likewise a name or pin of something compressed, which must become whole.
  bool WholeSince(int64_t event) const;
  Job Finished(Job job, const Digest& result) const;

  CheckpointStore& store_;
  const MergeFunction& merge_;
  const Clock& clock_;
  const GarbageOptions garbage_;
  const int64_t history_bytes_per_second_;
  ThreadPool threads_;
};

}  // namespace stockpot
