#include "trainer_hooks/cpp/checkpoint_hook.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "store/ingest.h"
#include "store/names.h"
#include "thrift/limits.h"
#include "trainer_hooks/cpp/hook_state.h"

namespace stockpot {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kMaxFreeBuffers = 2;  // kept, so that later copies meet no page fault
constexpr int kConnectMs = 2'000;

double MillisecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double, std::milli>(SteadyClock::now() - start).count();
}

ClientOptions MakeClientOptions(const CheckpointHookOptions& options) {
  return {.connect_timeout_ms = kConnectMs,
          .send_timeout_ms = options.answer_ms,
          .receive_timeout_ms = options.answer_ms,
          .chunks_in_flight = options.chunks_in_flight,
          .tls = options.tls,
          .token = options.token};
}

Status CheckPlace(const CheckpointHookOptions& options) {
  if (options.world < 1 || options.world > kMaxWorld || options.rank < 0 ||
      options.rank >= options.world) {
    return InvalidArgument("rank " + std::to_string(options.rank) + " of a world of " +
                           std::to_string(options.world) + ": a world has 1 to " +
                           std::to_string(kMaxWorld) + " ranks, counted from 0");
  }
  const bool needs_attempt = options.world > 1 || !options.attempt.empty();
  if (needs_attempt && !IsPrintableName(options.attempt, kMaxAttemptBytes)) {
    return InvalidArgument("several ranks need the attempt's name: 1 to " +
                           std::to_string(kMaxAttemptBytes) + " printable bytes, the same on all");
  }
  if (options.resumed_from.empty()) return OkStatus();
  return Digest::FromHex(options.resumed_from).status().WithContext("resumed_from");
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
  return CheckPlace(options);
}

}  // namespace

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
  STOCKPOT_ASSIGN_OR_RETURN(spool, Spool::Open(options.spool_directory, options.run, options.rank,
                                               options.world, options.spool_bytes));
  NoteSpool();
  return OkStatus();
}

CheckpointHook::CheckpointHook(std::unique_ptr<State> state) : state_(std::move(state)) {
  state_->sender = std::thread([borrowed = state_.get()] { borrowed->SendLoop(); });
  if (state_->spool == nullptr) return;
  state_->spiller = std::thread([borrowed = state_.get()] { borrowed->SpillLoop(); });
}

CheckpointHook::~CheckpointHook() {
  (void)Flush(state_->options.close_ms);
  state_->closing = true;
  {
    const std::lock_guard lock(state_->mutex);
    state_->changed.notify_all();
  }
  for (const auto& client : state_->clients) client->Shutdown();
  state_->sender.join();
  if (state_->spiller.joinable()) state_->spiller.join();
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
  stats.waiting = std::ssize(state_->queue) + int{state_->is_sending} + int{state_->is_spilling};
  stats.gathering = static_cast<int64_t>(state_->awaited.size());
  return stats;
}

bool CheckpointHook::Flush(int64_t timeout_ms) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, milliseconds(timeout_ms), [&] {
    return state_->queue.empty() && !state_->is_sending && !state_->is_spilling &&
           state_->awaited.empty() && state_->stats.spooled == 0;
  });
}

Status CheckpointHook::State::Stage(int64_t step, std::span<const TensorView> tensors,
                                    const std::map<std::string, double>& metrics) {
  STOCKPOT_ASSIGN_OR_RETURN(std::unique_ptr<StagedCheckpoint> staged,
                            StagedCheckpoint::Plan(step, tensors, metrics, files, options.world));
  STOCKPOT_ASSIGN_OR_RETURN(StagingBuffer buffer, Reserve(staged->bytes()));
  const Status filled = staged->Fill(std::move(buffer), tensors, copy_threads);
  if (!filled.ok()) {
    Release(staged->TakeBuffer());
    return filled;
  }
  const std::lock_guard lock(mutex);
  is_full = NeededBytesLocked() + staged->bytes() > options.staging_bytes;
  queue.push_back(std::move(staged));
  changed.notify_all();
  return OkStatus();
}

// Staged bytes without the copies of parts that were sent.
int64_t CheckpointHook::State::NeededBytesLocked() const {
  int64_t bytes = stats.staged_bytes;
  for (const AwaitedPart& part : awaited) {
    if (part.staged != nullptr) bytes -= part.staged->buffer_bytes();
  }
  return bytes;
}

// True: `bytes` more fit the limit, perhaps because copies of parts that were sent are given up,
// the oldest first.
bool CheckpointHook::State::MakeRoomLocked(int64_t bytes) {
  if (NeededBytesLocked() + bytes > options.staging_bytes) return false;
  for (AwaitedPart& part : awaited) {
    if (stats.staged_bytes + bytes <= options.staging_bytes) break;
    if (part.staged == nullptr) continue;
    ReleaseLocked(part.staged->TakeBuffer());
    part.staged = nullptr;
  }
  return true;
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
  const auto fits = [&] { return MakeRoomLocked(bytes); };
  const int64_t wait_ms = options.when_full == WhenStagingIsFull::kWait ? options.wait_ms : 0;
  if (!changed.wait_for(lock, milliseconds(wait_ms), fits)) {
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

void CheckpointHook::State::ReleaseLocked(StagingBuffer buffer) {
  stats.staged_bytes -= buffer.bytes();
  if (free_buffers.size() < kMaxFreeBuffers) free_buffers.push_back(std::move(buffer));
  changed.notify_all();
}

void CheckpointHook::State::Release(StagingBuffer buffer) {
  const std::lock_guard lock(mutex);
  ReleaseLocked(std::move(buffer));
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

}  // namespace stockpot
