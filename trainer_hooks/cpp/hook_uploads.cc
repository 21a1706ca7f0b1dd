// The thread of a CheckpointHook that sends: what when, and what becomes of it.
#include <algorithm>
#include <chrono>
#include <utility>

#include "thrift/conversions.h"
#include "thrift/upload.h"
#include "trainer_hooks/cpp/hook_state.h"

namespace stockpot {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int64_t kFirstBackoffMs = 100;
constexpr int64_t kLastBackoffMs = 5'000;
constexpr int kAttemptsWhenRefused = 3;  // of a failure that may be a restart in between
constexpr int32_t kAwaitMs = 1'000;      // how long one question after other ranks' parts waits
// Checkpoints whose other parts are asked after; then nothing more is sent. Less than the daemon
// takes of all runs (IngestLimits::gatherings).
constexpr size_t kMaxAwaited = 32;

// The request itself is wrong and stays wrong.
bool IsFinal(StatusCode code) {
  return code == StatusCode::kInvalidArgument || code == StatusCode::kAlreadyExists;
}

constexpr char kForgotten[] = "the daemon restarted, and does not have this rank's part any more";

// Whether the daemon restarted without the part of `rank`, another one's perhaps being there again.
bool IsForgotten(const Result<rpc::StepState>& state, int32_t rank) {
  if (!state.ok()) return state.status().code() == StatusCode::kNotFound;
  return state->state == rpc::GatherState::OPEN &&
         std::find(state->missing.begin(), state->missing.end(), rank) != state->missing.end();
}

// Why a checkpoint did not come about. REQUIRES: failed.
Status WhyFailed(const rpc::StepState& state) {
  return state.missing.empty() ? InvalidArgument(state.why) : NotFound(state.why);
}

}  // namespace

// What one upload is of: staged here, or spooled by whatever rank of whatever world.
struct CheckpointHook::State::Part {
  int64_t step = 0;
  int32_t rank = 0;
  int32_t world = 1;
  const std::string& attempt;
  const std::string& resumed_from;
  const std::map<std::string, double>& metrics;
  const TensorPlacements& placements;
  const TensorSource& source;
  const StagedCheckpoint* in_memory = nullptr;  // the source, if its bytes can be sent from there
};

// False: the hook is closing.
bool CheckpointHook::State::WaitForWork() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return closing || HasUnsentLocked() || !awaited.empty(); });
  return !closing;
}

// What is on its way to the disk is older than what is queued, and is sent from there.
bool CheckpointHook::State::HasUnsentLocked() const {
  return !is_spilling && (!queue.empty() || (spool != nullptr && spool->First()));
}

bool CheckpointHook::State::MaySend() const {
  const std::lock_guard lock(mutex);
  return HasUnsentLocked() && awaited.size() < kMaxAwaited;
}

// False: the hook is closing. What is staged meanwhile goes to the disk.
bool CheckpointHook::State::Pause(int64_t pause_ms) {
  std::unique_lock lock(mutex);
  is_pausing = true;
  changed.notify_all();
  changed.wait_for(lock, milliseconds(pause_ms), [&] { return closing.load(); });
  is_pausing = false;
  return !closing;
}

// --- one part ---

// True: its checkpoint is complete. False: other ranks' parts are awaited.
Result<bool> CheckpointHook::State::Send(const Part& part) {
  if (!run_exists) {
    std::optional<rpc::RunConfig> config;
    if (options.run_config) config = ToRpc(*options.run_config);
    STOCKPOT_RETURN_IF_ERROR(
        clients[0]->CreateRun(options.run, options.base, config, options.tags).status());
    run_exists = true;
  }
  rpc::SessionRequest request;
  request.kind = rpc::Kind::CHECKPOINT;
  request.run = options.run;
  request.step = part.step;
  request.rank = part.rank;
  request.world = part.world;
  request.attempt = part.attempt;
  if (!part.resumed_from.empty()) {
    STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, Digest::FromHex(part.resumed_from));
    request.__set_resumed_from(RawBytes(digest));
  }
  UploadOptions upload{.placements = &part.placements, .cancel = &closing};
  if (part.in_memory != nullptr) {
    upload.borrow = [&part](const std::string& name, int64_t offset, int64_t bytes) {
      return part.in_memory->Borrow(name, offset, bytes);
    };
  }
  std::vector<Client*> borrowed;
  for (const auto& client : clients) borrowed.push_back(client.get());
  STOCKPOT_ASSIGN_OR_RETURN(const UploadReport report,
                            UploadArtifact(borrowed, request, part.source, part.metrics, upload));
  const std::lock_guard lock(mutex);
  stats.sent_bytes += report.bytes.sent_bytes;
  stats.total_bytes += report.bytes.total_bytes;
  return report.commit.complete;
}

// What is on disk is older than what is in memory. REQUIRES: there is something.
void CheckpointHook::State::TakeFirst(FirstPart& first) {
  const std::lock_guard lock(mutex);
  if (spool != nullptr) first.spooled = spool->First();
  if (first.spooled) return;
  first.staged = std::move(queue.front());
  queue.pop_front();
  is_sending = true;
}

// It was not sent: it is first again.
void CheckpointHook::State::PutBack(FirstPart& first) {
  if (first.staged == nullptr) return;
  const std::lock_guard lock(mutex);
  is_sending = false;
  PutBackLocked(std::move(first.staged));
}

Result<bool> CheckpointHook::State::SendFirst(FirstPart& first) {
  if (first.staged != nullptr) {
    const StagedCheckpoint& staged = *first.staged;
    first.key = KeyOf(staged.step(), options.world, options.attempt);
    first.rank = options.rank;
    return Send({.step = staged.step(),
                 .rank = options.rank,
                 .world = options.world,
                 .attempt = options.attempt,
                 .resumed_from = options.resumed_from,
                 .metrics = staged.metrics(),
                 .placements = staged.placements(),
                 .source = staged,
                 .in_memory = &staged});
  }
  first.key.step = first.spooled->step;
  const auto entry = spool->Read(*first.spooled);
  first.is_damaged = !entry.ok() && entry.status().code() != StatusCode::kInvalidArgument;
  if (!entry.ok()) return entry.status();
  const SpoolRecord& record = (*entry)->record();
  first.key = KeyOf(record.step, record.world, record.attempt);
  first.rank = record.rank;
  return Send({.step = record.step,
               .rank = record.rank,
               .world = record.world,
               .attempt = record.attempt,
               .resumed_from = record.resumed_from,
               .metrics = record.metrics,
               .placements = record.placements,
               .source = **entry});
}

rpc::StepKey CheckpointHook::State::KeyOf(int64_t step, int32_t world,
                                          const std::string& attempt) const {
  rpc::StepKey key;
  key.run = options.run;
  key.step = step;
  key.world = world;
  key.attempt = attempt;
  return key;
}

// --- what becomes of it ---

void CheckpointHook::State::CountFinished(const Status& status, int64_t step) {
  const std::lock_guard lock(mutex);
  ++(status.ok() ? stats.committed : stats.failed);
  if (!status.ok()) return;
  stats.last_committed_step = std::max(step, stats.last_committed_step);
  stats.last_error = OkStatus();
  reported.reset();
}

void CheckpointHook::State::FinishSpooled(const SpoolKey& key, const Status& status,
                                          bool is_damaged) {
  const Status moved =
      status.ok() ? spool->Remove(key) : spool->SetAside(key, is_damaged ? "damaged" : "refused");
  {
    const std::lock_guard lock(mutex);
    spool_is_full = false;
  }
  NoteSpool();
  if (!moved.ok()) ReportInBackground(moved);
}

// The first one is done with, one way or the other.
void CheckpointHook::State::FinishFirst(FirstPart& first, const Status& status) {
  CountFinished(status, first.key.step);
  if (first.spooled) return FinishSpooled(*first.spooled, status, first.is_damaged);
  const std::lock_guard lock(mutex);
  is_sending = false;
  ReleaseLocked(first.staged->TakeBuffer());
}

// The first one is with the daemon, and other ranks' parts are not.
void CheckpointHook::State::AwaitFirst(FirstPart& first) {
  if (first.spooled) spool->Hold(*first.spooled, true);
  const std::lock_guard lock(mutex);
  is_sending = false;
  awaited.push_back({.key = first.key,
                     .rank = first.rank,
                     .staged = std::move(first.staged),
                     .spooled = first.spooled});
  stats.last_error = OkStatus();
  reported.reset();
  changed.notify_all();
}

// Asks once after every one of them; waits a little for the first if there is nothing to send.
// Not OK: the daemon does not answer.
Status CheckpointHook::State::AskAfterAwaited() {
  int32_t wait_ms = MaySend() ? 0 : kAwaitMs;
  for (size_t left = awaited.size(); left > 0; --left) {  // this thread alone adds and removes
    const Result<rpc::StepState> state = clients[0]->StepState(awaited.front().key, wait_ms);
    wait_ms = 0;
    if (!state.ok() && IsRetryable(state.status().code())) return state.status();
    if (IsForgotten(state, awaited.front().rank)) {
      if (!SendAgain()) FinishAwaited(NotFound(kForgotten));
    } else if (!state.ok()) {
      FinishAwaited(state.status());
    } else if (state->state == rpc::GatherState::OPEN) {
      AwaitFrontLonger();
    } else {
      FinishAwaited(state->state == rpc::GatherState::COMPLETE ? OkStatus() : WhyFailed(*state));
    }
  }
  return OkStatus();
}

// The first of those that are awaited is done with.
void CheckpointHook::State::FinishAwaited(const Status& status) {
  const int64_t step = awaited.front().key.step;
  if (!status.ok()) ReportInBackground(status.WithContext("step " + std::to_string(step)));
  CountFinished(status, step);
  if (awaited.front().spooled)
    FinishSpooled(*awaited.front().spooled, status, /*is_damaged=*/false);
  const std::lock_guard lock(mutex);
  if (awaited.front().staged != nullptr) ReleaseLocked(awaited.front().staged->TakeBuffer());
  awaited.pop_front();
  changed.notify_all();
}

// The first of those that are awaited is unsent again, if its bytes are still here: the daemon does
// not know it, or may not.
bool CheckpointHook::State::SendAgain() {
  const std::lock_guard lock(mutex);
  AwaitedPart& part = awaited.front();
  if (part.spooled) {
    spool->Hold(*part.spooled, false);
  } else if (part.staged != nullptr) {
    PutBackLocked(std::move(part.staged));
  } else {
    return false;
  }
  awaited.pop_front();
  changed.notify_all();
  return true;
}

// The daemon is away: when it is back it may have forgotten what it was sent. What is still here is
// sent again, which changes nothing if it has not.
void CheckpointHook::State::RecallAwaited() {
  for (size_t left = awaited.size(); left > 0; --left) {
    if (!SendAgain()) AwaitFrontLonger();
  }
}

void CheckpointHook::State::AwaitFrontLonger() {
  const std::lock_guard lock(mutex);
  awaited.push_back(std::move(awaited.front()));
  awaited.pop_front();
}

// --- the loop ---

// Not OK: it is to be tried again, later.
Status CheckpointHook::State::SendNext(int& refusals) {
  FirstPart first;
  TakeFirst(first);
  const Result<bool> complete = SendFirst(first);
  if (complete.ok()) {
    refusals = 0;
    if (*complete) {
      FinishFirst(first, OkStatus());
    } else {
      AwaitFirst(first);
    }
    return OkStatus();
  }
  if (closing) {
    PutBack(first);
    return complete.status();
  }
  const Status status = complete.status().WithContext((first.spooled ? "spooled step " : "step ") +
                                                      std::to_string(first.key.step));
  ReportInBackground(status);
  const bool gives_up = first.is_damaged || IsFinal(status.code()) ||
                        (!IsRetryable(status.code()) && ++refusals == kAttemptsWhenRefused);
  if (!gives_up) {
    PutBack(first);
    return status;
  }
  refusals = 0;
  FinishFirst(first, status);
  return OkStatus();
}

void CheckpointHook::State::SendLoop() {
  int64_t backoff_ms = kFirstBackoffMs;
  int refusals = 0;
  while (WaitForWork()) {
    Status status = AskAfterAwaited();
    if (!status.ok() && !closing) ReportInBackground(status);
    if (status.ok() && MaySend()) status = SendNext(refusals);
    if (status.ok()) {
      backoff_ms = kFirstBackoffMs;
      continue;
    }
    if (closing) break;
    if (status.code() == StatusCode::kUnavailable) RecallAwaited();
    {
      const std::lock_guard lock(mutex);
      ++stats.retries;
    }
    if (!Pause(backoff_ms)) break;
    backoff_ms = std::min(2 * backoff_ms, kLastBackoffMs);
  }
  RecallAwaited();
  const std::lock_guard lock(mutex);
  has_ended = true;
  changed.notify_all();
}

}  // namespace stockpot
