#include "store/pipeline.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "kernels/base/check.h"
#include "store/job_work.h"

namespace stockpot {
namespace {

constexpr int64_t kWakeMs = 200;         // longest wait that does not look whether to stop
constexpr int64_t kIdlePollMs = 20;      // of WaitIdle
constexpr int64_t kStoreRetryMs = 1000;  // after the store refused to note a job's state
constexpr int64_t kMaxBackoffMs = 30'000;

}  // namespace

struct Pipeline::State {
  State(CheckpointStore& the_store, Options the_options)
      : store(the_store),
        options(std::move(the_options)),
        work(store, options) {}

  // --- constant ---
  CheckpointStore& store;
  const Options options;

  // --- of the runner ---
  JobWork work;

  // --- guarded by mutex ---
  mutable std::mutex mutex;
  std::condition_variable wake;
  bool stopping = false;
  Progress progress;
  std::optional<int64_t> rests_after;  // the event, while the runner waits for the next one

  std::mutex submit_mutex;  // one Submit at a time
  std::thread runner;

  bool Stopping() const {
    const std::lock_guard lock(mutex);
    return stopping;
  }

  // False: the pipeline is stopping.
  bool Sleep(int64_t ms) {
    std::unique_lock lock(mutex);
    return !wake.wait_for(lock, std::chrono::milliseconds(ms), [this] { return stopping; });
  }

  Status SetProgress(const std::string& key, double share) {
    const std::lock_guard lock(mutex);
    if (stopping) return Unavailable("the pipeline is stopping");
    progress = {key, share};
    return OkStatus();
  }

  Status Save(const Job& job) {
    Commit commit;
    commit.jobs.push_back(job);
    return store.Apply(std::move(commit)).status();
  }

  // A job that is running while the runner is not at it was interrupted: by a kill, or because the
  // store could not note its end. Compression of history waits for everything else.
  std::optional<Job> NextJob() const {
    std::vector<Job> open = store.ListOpenJobs();
    const auto next = std::find_if(open.begin(), open.end(), [](const Job& job) {
      return job.kind != JobKind::kCompress;
    });
    if (next != open.end()) return std::move(*next);
    if (open.empty()) return std::nullopt;
    return std::move(open.front());
  }

  void Run() {
    // What cannot be cleaned now is cleaned with the next job of its pool.
    static_cast<void>(work.CleanPools(
        [this](double) { return Stopping() ? Unavailable("stopping") : OkStatus(); }));
    while (!Stopping()) {
      const int64_t event = store.LastEvent();
      std::optional<Job> job = NextJob();
      if (!job) {
        WaitForEventAfter(event);
        continue;
      }
      if (job->state == JobState::kRunning) job->attempts = 0;
      const Status status = Process(*job);
      {
        const std::lock_guard lock(mutex);
        progress = {};
      }
      wake.notify_all();
      if (!status.ok()) Sleep(kStoreRetryMs);
    }
  }

  void SetResting(std::optional<int64_t> event) {
    {
      const std::lock_guard lock(mutex);
      rests_after = event;
    }
    wake.notify_all();
  }

  bool RestsAfter(int64_t event) const {
    const std::lock_guard lock(mutex);
    return rests_after == event;
  }

  // Whoever queues a job commits an event with it.
  void WaitForEventAfter(int64_t event) {
    SetResting(event);
    while (!Stopping()) {
      const auto begin = std::chrono::steady_clock::now();
      if (store.WaitForEvents(event, kWakeMs)) break;
      // Back early and without an event: the store is shut down, and this pipeline will be stopped.
      if (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(kWakeMs / 2)) {
        Sleep(kWakeMs);
      }
    }
    SetResting(std::nullopt);
  }

  // Does one job to its end: done, failed, or interrupted. An error: its state could not be noted.
  Status Process(Job job) {
    for (int64_t backoff_ms = options.backoff_ms;;
         backoff_ms = std::min(2 * backoff_ms, kMaxBackoffMs)) {
      job.state = JobState::kRunning;
      ++job.attempts;
      STOCKPOT_RETURN_IF_ERROR(Save(job));
      const Status status = work.Do(job, [&](double share) { return SetProgress(job.key, share); });
      if (status.ok()) return status;
      job.error = status.ToString();
      const bool retry = IsRetryable(status.code()) && job.attempts < options.max_attempts;
      if (!Stopping()) {
        if (!retry) return work.Fail(job, status);
        if (Sleep(backoff_ms)) continue;
      }
      job.state = JobState::kQueued;  // interrupted: for the next pipeline
      job.attempts = 0;
      return Save(job);
    }
  }
};

Pipeline::Pipeline(CheckpointStore& store, Options options)
    : state_(std::make_unique<State>(store, std::move(options))) {
  STOCKPOT_CHECK(state_->options.merge != nullptr);
  STOCKPOT_CHECK(state_->options.clock != nullptr);
  state_->runner = std::thread([state = state_.get()] { state->Run(); });
}

Pipeline::~Pipeline() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->wake.notify_all();
  state_->runner.join();
}

Result<Job> Pipeline::Submit(Job job) {
  if (job.key.empty()) return InvalidArgument("a job needs a key");
  const std::lock_guard lock(state_->submit_mutex);
  const std::optional<Job> known = state_->store.GetJob(job.key);
  const bool stands =
      known && (known->state == JobState::kDone ? state_->work.StillStands(*known)
                                                : known->state != JobState::kFailed);
  if (stands) return *known;
  if (known) job.sequence = known->sequence;
  job.state = JobState::kQueued;
  job.attempts = 0;
  job.error.clear();
  job.result.clear();
  job.created_ms = state_->options.clock();
  job.finished_ms = 0;
  Commit commit;
  commit.events.push_back({.type = "job",
                           .subject = job.key,
                           .fields = {{"kind", std::string(JobKindName(job.kind))}}});
  const std::string key = job.key;
  commit.jobs.push_back(std::move(job));
  STOCKPOT_RETURN_IF_ERROR(state_->store.Apply(std::move(commit)).status());
  const std::optional<Job> queued = state_->store.GetJob(key);
  if (!queued) return Internal("job " + key + " was committed and is not there");
  return *queued;
}

Pipeline::Progress Pipeline::progress() const {
  const std::lock_guard lock(state_->mutex);
  return state_->progress;
}

bool Pipeline::WaitIdle(int64_t timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (;;) {
    const int64_t event = state_->store.LastEvent();
    if (state_->store.ListOpenJobs().empty() && state_->RestsAfter(event)) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::unique_lock lock(state_->mutex);
    state_->wake.wait_for(lock, std::chrono::milliseconds(kIdlePollMs));
  }
}

}  // namespace stockpot
