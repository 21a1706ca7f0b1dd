#include "trainer_hooks/cpp/checkpoint_hook.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "thrift/client.h"
#include "thrift/conversions.h"
#include "thrift/limits.h"
#include "thrift/upload.h"
#include "trainer_hooks/cpp/staging.h"

namespace stockpot {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int64_t kFirstBackoffMs = 100;
constexpr int64_t kLastBackoffMs = 5'000;
constexpr int kAttemptsWhenRefused = 3;  // of a failure that may be a restart in between
constexpr int64_t kMaxFreeBuffers = 2;   // kept, so that later copies meet no page fault
constexpr ClientOptions kClientOptions = {.connect_timeout_ms = 2'000};

double MillisecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double, std::milli>(SteadyClock::now() - start).count();
}

// The request itself is wrong and stays wrong.
bool IsFinal(StatusCode code) {
  return code == StatusCode::kInvalidArgument || code == StatusCode::kAlreadyExists;
}

}  // namespace

struct CheckpointHook::State {
  explicit State(CheckpointHookOptions given)
      : options(std::move(given)), copy_threads(options.copy_threads) {}

  // --- constant ---
  const CheckpointHookOptions options;

  // --- used by OnStep's thread only ---
  ThreadPool copy_threads;

  // --- used by the background thread only, but for Shutdown ---
  std::vector<std::unique_ptr<Client>> clients;
  bool run_exists = false;
  std::thread thread;

  // --- synchronises itself ---
  std::atomic<bool> closing{false};

  // --- guarded by mutex ---
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::unique_ptr<StagedCheckpoint>> queue;  // the first one is being uploaded
  std::vector<StagingBuffer> free_buffers;
  CheckpointHookStats stats;
  std::optional<StatusCode> reported;  // told to on_error since the last success

  Result<StagingBuffer> Reserve(int64_t bytes);
  void Release(StagingBuffer buffer, int64_t bytes);
  Status Stage(int64_t step, std::span<const TensorView> tensors,
               const std::map<std::string, double>& metrics);
  void Report(const Status& status);
  void Run();
  Status UploadOne(const StagedCheckpoint& staged);
  void Finish(const Status& status);
  bool Pause(int64_t pause_ms);
};

Result<std::unique_ptr<CheckpointHook>> CheckpointHook::Create(CheckpointHookOptions options) {
  if (options.run.empty()) return InvalidArgument("the hook needs the name of the run");
  if (options.base.empty()) return InvalidArgument("the hook needs the run's base");
  if (options.connections < 1 || options.connections > rpc_limits::kMaxUploadConnections) {
    return InvalidArgument("connections must be 1.." +
                           std::to_string(rpc_limits::kMaxUploadConnections));
  }
  if (options.copy_threads < 1) return InvalidArgument("copy_threads must be at least 1");
  if (options.staging_bytes < 1 || options.wait_ms < 0 || options.close_ms < 0) {
    return InvalidArgument("staging_bytes, wait_ms and close_ms must not be negative");
  }
  STOCKPOT_RETURN_IF_ERROR(ParseRpcAddress(options.address).status());
  return std::unique_ptr<CheckpointHook>(new CheckpointHook(std::move(options)));
}

CheckpointHook::CheckpointHook(CheckpointHookOptions options)
    : state_(std::make_unique<State>(std::move(options))) {
  for (int i = 0; i < state_->options.connections; ++i) {
    state_->clients.push_back(*Client::Create(state_->options.address, kClientOptions));
  }
  state_->thread = std::thread([state = state_.get()] { state->Run(); });
}

CheckpointHook::~CheckpointHook() {
  (void)Flush(state_->options.close_ms);
  state_->closing = true;
  {
    const std::lock_guard lock(state_->mutex);
    state_->changed.notify_all();
  }
  for (const auto& client : state_->clients) client->Shutdown();
  state_->thread.join();
}

bool CheckpointHook::OnStep(int64_t step, std::span<const TensorView> tensors,
                            const std::map<std::string, double>& metrics) noexcept {
  const auto start = SteadyClock::now();
  Status status;
  try {
    status = state_->Stage(step, tensors, metrics);
  } catch (const std::exception& error) {
    status = Internal(error.what());
  }
  const double stall_ms = MillisecondsSince(start);
  {
    const std::lock_guard lock(state_->mutex);
    CheckpointHookStats& stats = state_->stats;
    ++stats.offered;
    stats.last_stall_ms = stall_ms;
    stats.max_stall_ms = std::max(stats.max_stall_ms, stall_ms);
    if (!status.ok()) ++(status.code() == StatusCode::kUnavailable ? stats.skipped : stats.failed);
  }
  if (!status.ok()) state_->Report(status.WithContext("step " + std::to_string(step)));
  return status.ok();
}

CheckpointHookStats CheckpointHook::Stats() const {
  const std::lock_guard lock(state_->mutex);
  CheckpointHookStats stats = state_->stats;
  stats.waiting = static_cast<int64_t>(state_->queue.size());
  return stats;
}

bool CheckpointHook::Flush(int64_t timeout_ms) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, milliseconds(timeout_ms),
                                  [&] { return state_->queue.empty(); });
}

Status CheckpointHook::State::Stage(int64_t step, std::span<const TensorView> tensors,
                                    const std::map<std::string, double>& metrics) {
  STOCKPOT_ASSIGN_OR_RETURN(std::unique_ptr<StagedCheckpoint> staged,
                            StagedCheckpoint::Plan(step, tensors, metrics, options.files));
  STOCKPOT_ASSIGN_OR_RETURN(StagingBuffer buffer, Reserve(staged->bytes()));
  staged->Fill(std::move(buffer), tensors, copy_threads);
  const std::lock_guard lock(mutex);
  queue.push_back(std::move(staged));
  changed.notify_all();
  return OkStatus();
}

// Memory for a checkpoint, within the limit. Unavailable: staging is full.
Result<StagingBuffer> CheckpointHook::State::Reserve(int64_t bytes) {
  if (bytes > options.staging_bytes) {
    return InvalidArgument(
        "a checkpoint of " + std::to_string(bytes) +
        " bytes does not fit staging_bytes = " + std::to_string(options.staging_bytes));
  }
  std::unique_lock lock(mutex);
  const auto fits = [&] { return stats.staged_bytes + bytes <= options.staging_bytes; };
  if (options.when_full == WhenStagingIsFull::kWait && !fits()) {
    changed.wait_for(lock, milliseconds(options.wait_ms), fits);
  }
  if (!fits()) {
    return Unavailable("skipped: " + std::to_string(queue.size()) +
                       " checkpoints await their upload and staging is full");
  }
  stats.staged_bytes += bytes;
  while (!free_buffers.empty()) {
    StagingBuffer buffer = std::move(free_buffers.back());
    free_buffers.pop_back();
    if (buffer.bytes() >= bytes) return buffer;
  }
  lock.unlock();
  Result<StagingBuffer> buffer = StagingBuffer::Allocate(bytes);
  if (!buffer.ok()) {
    lock.lock();
    stats.staged_bytes -= bytes;
  }
  return buffer;
}

// `mutex` is held.
void CheckpointHook::State::Release(StagingBuffer buffer, int64_t bytes) {
  stats.staged_bytes -= bytes;
  if (static_cast<int64_t>(free_buffers.size()) < kMaxFreeBuffers) {
    free_buffers.push_back(std::move(buffer));
  }
}

void CheckpointHook::State::Report(const Status& status) {
  {
    const std::lock_guard lock(mutex);
    stats.last_error = status;
    if (reported == status.code()) return;
    reported = status.code();
  }
  if (!options.on_error) return;
  try {
    options.on_error(status);
  } catch (const std::exception&) {
    // Theirs; the loop goes on.
  }
}

// False: the hook is closing.
bool CheckpointHook::State::Pause(int64_t pause_ms) {
  std::unique_lock lock(mutex);
  changed.wait_for(lock, milliseconds(pause_ms), [&] { return closing.load(); });
  return !closing;
}

Status CheckpointHook::State::UploadOne(const StagedCheckpoint& staged) {
  if (!run_exists) {
    STOCKPOT_RETURN_IF_ERROR(
        clients[0]
            ->CreateRun(options.run, options.base, ToRpc(options.run_config), options.tags)
            .status());
    run_exists = true;
  }
  rpc::SessionRequest request;
  request.kind = rpc::Kind::CHECKPOINT;
  request.run = options.run;
  request.step = staged.step();
  std::vector<Client*> borrowed;
  for (const auto& client : clients) borrowed.push_back(client.get());
  STOCKPOT_ASSIGN_OR_RETURN(
      const UploadReport report,
      UploadArtifact(borrowed, request, staged, staged.metrics(), {.cancel = &closing}));
  const std::lock_guard lock(mutex);
  stats.sent_bytes += report.bytes.sent_bytes;
  stats.total_bytes += report.bytes.total_bytes;
  stats.last_committed_step = staged.step();
  return OkStatus();
}

// The first of the queue is done with, one way or the other.
void CheckpointHook::State::Finish(const Status& status) {
  const std::lock_guard lock(mutex);
  ++(status.ok() ? stats.committed : stats.failed);
  if (status.ok()) {
    stats.last_error = OkStatus();
    reported.reset();
  }
  std::unique_ptr<StagedCheckpoint> staged = std::move(queue.front());
  queue.pop_front();
  Release(staged->TakeBuffer(), staged->bytes());
  changed.notify_all();
}

void CheckpointHook::State::Run() {
  int64_t backoff_ms = kFirstBackoffMs;
  int refusals = 0;
  while (true) {
    const StagedCheckpoint* staged = nullptr;
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return closing || !queue.empty(); });
      if (closing) return;
      staged = queue.front().get();
    }
    const Status status = UploadOne(*staged);
    if (closing && !status.ok()) return;
    if (!status.ok()) Report(status.WithContext("step " + std::to_string(staged->step())));
    const bool gives_up = IsFinal(status.code()) ||
                          (!IsRetryable(status.code()) && ++refusals == kAttemptsWhenRefused);
    if (status.ok() || gives_up) {
      Finish(status);
      backoff_ms = kFirstBackoffMs;
      refusals = 0;
      continue;
    }
    {
      const std::lock_guard lock(mutex);
      ++stats.retries;
    }
    if (!Pause(backoff_ms)) return;
    backoff_ms = std::min(2 * backoff_ms, kLastBackoffMs);
  }
}

}  // namespace stockpot
