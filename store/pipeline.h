// The durable jobs: merge and publish. One runner thread takes queued jobs in order, does the work, and
// commits the outcome together with the job's new state, so that a restart resumes exactly what was not
// finished and does nothing twice.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "kernels/base/threads.h"
#include "store/checkpoint_store.h"
#include "store/policy.h"

namespace stockpot {

// How a merge is computed; the composition root passes BuildMonoSoup, which brings LibTorch, so that the
// pipeline itself links without it.
using MergeFunction = std::function<Result<Manifest>(
    CheckpointStore&, std::span<const Digest>, const std::string& run, int64_t step,
    const MonoSoupOptions&, const std::function<void(double)>& progress)>;

class Pipeline {
 public:
  struct Options {
    MergeFunction merge;
    int threads = 1;            // of the codecs
    int max_attempts = 3;       // of a retryable failure; others fail at once
    Clock clock;
  };
  // Starts the runner. `store` must outlive it.
  Pipeline(CheckpointStore& store, Options options);
  ~Pipeline();  // finishes nothing: stops after the current tensor, the job stays queued

  // Queues (idempotent: a job that is queued, running or done is returned as it is; a failed one is
  // queued again). Returns the job.
  Result<Job> Submit(Job job);
  // Share done of the running job, [0, 1]; empty key: none.
  struct Progress { std::string key; double share = 0; };
  Progress progress() const;
  // Waits until no job is queued or running, or the timeout; true if idle.
  bool WaitIdle(int64_t timeout_ms);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
