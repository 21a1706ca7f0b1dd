#include "trainer_hooks/cpp/checkpoint_hook.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "thrift/client.h"
#include "thrift/conversions.h"
#include "thrift/limits.h"
#include "thrift/upload.h"
#include "trainer_hooks/cpp/spool.h"
#include "trainer_hooks/cpp/staging.h"

namespace stockpot {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int64_t kFirstBackoffMs = 100;
constexpr int64_t kLastBackoffMs = 5'000;
constexpr int kAttemptsWhenRefused = 3;  // of a failure that may be a restart in between
constexpr size_t kMaxFreeBuffers = 2;    // kept, so that later copies meet no page fault
constexpr int kConnectMs = 2'000;

double MillisecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double, std::milli>(SteadyClock::now() - start).count();
}

// The request itself is wrong and stays wrong.
bool IsFinal(StatusCode code) {
  return code == StatusCode::kInvalidArgument || code == StatusCode::kAlreadyExists;
}

ClientOptions MakeClientOptions(const CheckpointHookOptions& options) {
  return {.connect_timeout_ms = kConnectMs,
          .send_timeout_ms = options.answer_ms,
          .receive_timeout_ms = options.answer_ms,
          .chunks_in_flight = options.chunks_in_flight,
          .tls = options.tls,
          .token = options.token};
}

Status CheckOptions(const CheckpointHookOptions& options) {
  if (options.run.empty()) return InvalidArgument("the hook needs the name of the run");
  if (options.base.empty()) return InvalidArgument("the hook needs the run's base");
  if (options.connections < 1 || options.connections > rpc_limits::kMaxUploadConnections) {
    return InvalidArgument("connections must be 1.." +
                           std::to_string(rpc_limits::kMaxUploadConnections));
  }
  if (options.chunks_in_flight < 1 || options.chunks_in_flight > rpc_limits::kMaxChunksInFlight) {
    return InvalidArgument("chunks_in_flight must be 1.." +
                           std::to_string(rpc_limits::kMaxChunksInFlight));
  }
  if (options.copy_threads < 1) return InvalidArgument("copy_threads must be at least 1");
  if (options.staging_bytes < 1 || options.spool_bytes < 1 || options.answer_ms < 1) {
    return InvalidArgument("staging_bytes, spool_bytes and answer_ms must be at least 1");
  }
  if (options.wait_ms < 0 || options.close_ms < 0) {
    return InvalidArgument("wait_ms and close_ms must not be negative");
  }
  return OkStatus();
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
  std::unique_ptr<Spool> spool;  // null: none
  bool spool_is_full = false;
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
  Status background;                   // the first failure that no OnStep has told yet

  Status Start();
  Result<StagingBuffer> Reserve(int64_t bytes);
  void Release(StagingBuffer buffer);
  Status Stage(int64_t step, std::span<const TensorView> tensors,
               const std::map<std::string, double>& metrics);
  void Count(const Status& status, double stall_ms);
  void Report(const Status& status);
  void ReportInBackground(const Status& status);

  void Run();
  bool WaitForWork();
  bool IsSpooled() const { return spool != nullptr && !spool->empty(); }
  const StagedCheckpoint* FirstStaged() const;
  Status SendFirst(bool& is_damaged);
  Status Send(int64_t step, const TensorSource& source,
              const std::map<std::string, double>& metrics, const StagedCheckpoint* in_memory);
  void FinishFirst(const Status& status, bool is_damaged);
  void FinishSpooled(const Status& status, bool is_damaged);
  void PopStaged();
  void Spill();
  void NoteSpool();
  bool Pause(int64_t pause_ms);
};

Result<std::unique_ptr<CheckpointHook>> CheckpointHook::Create(CheckpointHookOptions options) {
  STOCKPOT_RETURN_IF_ERROR(CheckOptions(options));
  auto state = std::make_unique<State>(std::move(options));
  STOCKPOT_RETURN_IF_ERROR(state->Start());
  return std::unique_ptr<CheckpointHook>(new CheckpointHook(std::move(state)));
}

Status CheckpointHook::State::Start() {
  for (int i = 0; i < options.connections; ++i) {
    STOCKPOT_ASSIGN_OR_RETURN(auto client,
                              Client::Create(options.address, MakeClientOptions(options)));
    clients.push_back(std::move(client));
  }
  if (options.spool_directory.empty()) return OkStatus();
  STOCKPOT_ASSIGN_OR_RETURN(spool, Spool::Open(options.spool_directory, options.run, /*rank=*/0,
                                               /*world=*/1, options.spool_bytes));
  NoteSpool();
  return OkStatus();
}

CheckpointHook::CheckpointHook(std::unique_ptr<State> state) : state_(std::move(state)) {
  state_->thread = std::thread([borrowed = state_.get()] { borrowed->Run(); });
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

// --- the training loop's side ---

StepOutcome CheckpointHook::OnStep(int64_t step, std::span<const TensorView> tensors,
                                   const std::map<std::string, double>& metrics) noexcept {
  const auto start = SteadyClock::now();
  Status status;
  try {
    status = state_->Stage(step, tensors, metrics);
  } catch (const std::exception& error) {
    status = Internal(error.what());
  }
  state_->Count(status, MillisecondsSince(start));
  if (!status.ok()) state_->Report(status.WithContext("step " + std::to_string(step)));
  const std::lock_guard lock(state_->mutex);
  return {.staged = status.ok(), .background = std::exchange(state_->background, OkStatus())};
}

void CheckpointHook::State::Count(const Status& status, double stall_ms) {
  const std::lock_guard lock(mutex);
  ++stats.offered;
  stats.last_stall_ms = stall_ms;
  stats.max_stall_ms = std::max(stats.max_stall_ms, stall_ms);
  if (!status.ok()) ++(status.code() == StatusCode::kUnavailable ? stats.skipped : stats.failed);
}

CheckpointHookStats CheckpointHook::Stats() const {
  const std::lock_guard lock(state_->mutex);
  CheckpointHookStats stats = state_->stats;
  stats.waiting = static_cast<int64_t>(state_->queue.size());
  return stats;
}

bool CheckpointHook::Flush(int64_t timeout_ms) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, milliseconds(timeout_ms), [&] {
    return state_->queue.empty() && state_->stats.spooled == 0;
  });
}

Status CheckpointHook::State::Stage(int64_t step, std::span<const TensorView> tensors,
                                    const std::map<std::string, double>& metrics) {
  STOCKPOT_ASSIGN_OR_RETURN(std::unique_ptr<StagedCheckpoint> staged,
                            StagedCheckpoint::Plan(step, tensors, metrics, options.files));
  STOCKPOT_ASSIGN_OR_RETURN(StagingBuffer buffer, Reserve(staged->bytes()));
  const Status filled = staged->Fill(std::move(buffer), tensors, copy_threads);
  if (!filled.ok()) {
    Release(staged->TakeBuffer());
    return filled;
  }
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
  std::vector<StagingBuffer> too_small;  // given back after the lock
  std::unique_lock lock(mutex);
  const auto fits = [&] { return stats.staged_bytes + bytes <= options.staging_bytes; };
  if (options.when_full == WhenStagingIsFull::kWait && !fits()) {
    changed.wait_for(lock, milliseconds(options.wait_ms), fits);
  }
  if (!fits()) {
    return Unavailable("skipped: " + std::to_string(queue.size()) +
                       " checkpoints await their upload and staging is full");
  }
  for (auto it = free_buffers.begin(); it != free_buffers.end(); ++it) {
    if (it->bytes() < bytes || stats.staged_bytes + it->bytes() > options.staging_bytes) continue;
    StagingBuffer buffer = std::move(*it);
    free_buffers.erase(it);
    stats.staged_bytes += buffer.bytes();
    return buffer;
  }
  std::swap(too_small, free_buffers);
  stats.staged_bytes += bytes;
  lock.unlock();
  too_small.clear();
  Result<StagingBuffer> buffer = StagingBuffer::Allocate(bytes, options.allocate);
  if (!buffer.ok()) {
    lock.lock();
    stats.staged_bytes -= bytes;
  }
  return buffer;
}

void CheckpointHook::State::Release(StagingBuffer buffer) {
  const std::lock_guard lock(mutex);
  stats.staged_bytes -= buffer.bytes();
  if (free_buffers.size() < kMaxFreeBuffers) free_buffers.push_back(std::move(buffer));
  changed.notify_all();
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

// --- the background thread ---

void CheckpointHook::State::ReportInBackground(const Status& status) {
  {
    const std::lock_guard lock(mutex);
    if (background.ok()) background = status;
  }
  Report(status);
}

// False: the hook is closing.
bool CheckpointHook::State::WaitForWork() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return closing || !queue.empty() || stats.spooled > 0; });
  return !closing;
}

// False: the hook is closing. What is staged meanwhile goes to the disk.
bool CheckpointHook::State::Pause(int64_t pause_ms) {
  const auto end = SteadyClock::now() + milliseconds(pause_ms);
  const auto can_spill = [&] { return spool != nullptr && !spool_is_full && !queue.empty(); };
  while (true) {
    {
      std::unique_lock lock(mutex);
      changed.wait_until(lock, end, [&] { return closing || can_spill(); });
      if (closing) return false;
      if (!can_spill()) return true;
    }
    Spill();
  }
}

// Null: none. Stays valid until PopStaged: only this thread takes from the queue.
const StagedCheckpoint* CheckpointHook::State::FirstStaged() const {
  const std::lock_guard lock(mutex);
  return queue.empty() ? nullptr : queue.front().get();
}

void CheckpointHook::State::PopStaged() {
  std::unique_ptr<StagedCheckpoint> staged;
  {
    const std::lock_guard lock(mutex);
    staged = std::move(queue.front());
    queue.pop_front();
  }
  Release(staged->TakeBuffer());
}

void CheckpointHook::State::NoteSpool() {
  const std::lock_guard lock(mutex);
  stats.spooled = spool->entries();
  stats.spooled_bytes = spool->bytes();
  changed.notify_all();
}

// Moves what waits in memory to the disk, the oldest first, as far as there is room.
void CheckpointHook::State::Spill() {
  while (spool != nullptr) {
    const StagedCheckpoint* staged = FirstStaged();
    if (staged == nullptr) return;
    const Status status = spool->Write({.run = options.run,
                                        .base = options.base,
                                        .step = staged->step(),
                                        .config = options.run_config,
                                        .tags = options.tags,
                                        .metrics = staged->metrics()},
                                       *staged);
    if (!status.ok()) {
      ReportInBackground(status.WithContext("step " + std::to_string(staged->step())));
      spool_is_full = !IsFinal(status.code());
      if (spool_is_full) return;
      const std::lock_guard lock(mutex);
      ++stats.failed;
    }
    NoteSpool();
    PopStaged();
  }
}

// `in_memory`: the source, where its tensors can be sent from where they are; null: they cannot.
Status CheckpointHook::State::Send(int64_t step, const TensorSource& source,
                                   const std::map<std::string, double>& metrics,
                                   const StagedCheckpoint* in_memory) {
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
  request.step = step;
  UploadOptions upload{.cancel = &closing};
  if (in_memory != nullptr) {
    upload.borrow = [in_memory](const std::string& name, int64_t offset, int64_t bytes) {
      return in_memory->Borrow(name, offset, bytes);
    };
  }
  std::vector<Client*> borrowed;
  for (const auto& client : clients) borrowed.push_back(client.get());
  STOCKPOT_ASSIGN_OR_RETURN(const UploadReport report,
                            UploadArtifact(borrowed, request, source, metrics, upload));
  const std::lock_guard lock(mutex);
  stats.sent_bytes += report.bytes.sent_bytes;
  stats.total_bytes += report.bytes.total_bytes;
  stats.last_committed_step = step;
  return OkStatus();
}

// What is on disk is older than what is in memory.
Status CheckpointHook::State::SendFirst(bool& is_damaged) {
  if (!IsSpooled()) {
    const StagedCheckpoint* staged = FirstStaged();
    return Send(staged->step(), *staged, staged->metrics(), staged)
        .WithContext("step " + std::to_string(staged->step()));
  }
  const std::string what = "spooled step " + std::to_string(spool->first_step());
  const auto entry = spool->ReadFirst();
  is_damaged = !entry.ok() && entry.status().code() != StatusCode::kInvalidArgument;
  if (!entry.ok()) return entry.status().WithContext(what);
  const SpoolRecord& record = (*entry)->record();
  return Send(record.step, **entry, record.metrics, nullptr).WithContext(what);
}

void CheckpointHook::State::FinishSpooled(const Status& status, bool is_damaged) {
  const Status moved =
      status.ok() ? spool->RemoveFirst() : spool->SetFirstAside(is_damaged ? "damaged" : "refused");
  spool_is_full = false;
  NoteSpool();
  if (!moved.ok()) ReportInBackground(moved);
}

// The first one is done with, one way or the other.
void CheckpointHook::State::FinishFirst(const Status& status, bool is_damaged) {
  {
    const std::lock_guard lock(mutex);
    ++(status.ok() ? stats.committed : stats.failed);
    if (status.ok()) {
      stats.last_error = OkStatus();
      reported.reset();
    }
  }
  if (IsSpooled()) {
    FinishSpooled(status, is_damaged);
  } else {
    PopStaged();
  }
}

void CheckpointHook::State::Run() {
  int64_t backoff_ms = kFirstBackoffMs;
  int refusals = 0;
  while (WaitForWork()) {
    bool is_damaged = false;
    const Status status = SendFirst(is_damaged);
    if (closing && !status.ok()) break;
    if (!status.ok()) ReportInBackground(status);
    const bool gives_up = is_damaged || IsFinal(status.code()) ||
                          (!IsRetryable(status.code()) && ++refusals == kAttemptsWhenRefused);
    if (status.ok() || gives_up) {
      FinishFirst(status, is_damaged);
      backoff_ms = kFirstBackoffMs;
      refusals = 0;
      continue;
    }
    {
      const std::lock_guard lock(mutex);
      ++stats.retries;
    }
    if (!Pause(backoff_ms)) break;
    backoff_ms = std::min(2 * backoff_ms, kLastBackoffMs);
  }
  Spill();
}

}  // namespace stockpot
