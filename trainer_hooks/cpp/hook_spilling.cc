// The thread of a CheckpointHook that moves what is staged to the spool: while nothing can be sent,
// when the memory is full, and at the end.
#include <algorithm>
#include <chrono>
#include <utility>

#include "trainer_hooks/cpp/hook_state.h"

namespace stockpot {
namespace {

// Queued while the memory is full: a sender that has nothing else to do has taken it by then.
constexpr std::chrono::milliseconds kSpillAfter{100};

}  // namespace

void CheckpointHook::State::ReportInBackground(const Status& status) {
  {
    const std::lock_guard lock(mutex);
    if (background.ok()) background = status;
  }
  Report(status);
}

// Before those of later steps.
void CheckpointHook::State::PutBackLocked(std::unique_ptr<StagedCheckpoint> staged) {
  const auto later = std::find_if(queue.begin(), queue.end(), [&](const auto& other) {
    return other->step() > staged->step();
  });
  queue.insert(later, std::move(staged));
  changed.notify_all();
}

void CheckpointHook::State::NoteSpool() {
  const std::lock_guard lock(mutex);
  stats.spooled = spool->entries();
  stats.spooled_bytes = spool->bytes();
  changed.notify_all();
}

bool CheckpointHook::State::MaySpillLocked() const {
  return !queue.empty() && !spool_is_full && (is_pausing || is_full || has_ended);
}

// The oldest that is queued, once it is to go to the disk. Null: the hook has ended.
std::unique_ptr<StagedCheckpoint> CheckpointHook::State::TakeToSpill() {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [&] { return has_ended || MaySpillLocked(); });
    if (!is_pausing && !has_ended) {
      changed.wait_for(lock, kSpillAfter, [&] { return has_ended || queue.empty(); });
    }
    if (MaySpillLocked()) break;
    if (has_ended) return nullptr;
  }
  is_full = false;
  is_spilling = true;
  std::unique_ptr<StagedCheckpoint> staged = std::move(queue.front());
  queue.pop_front();
  return staged;
}

void CheckpointHook::State::Spill(std::unique_ptr<StagedCheckpoint> staged) {
  const Status status = spool->Write({.run = options.run,
                                      .base = options.base,
                                      .step = staged->step(),
                                      .rank = options.rank,
                                      .world = options.world,
                                      .attempt = options.world > 1 ? options.attempt : "",
                                      .resumed_from = options.resumed_from,
                                      .config = options.run_config,
                                      .tags = options.tags,
                                      .metrics = staged->metrics(),
                                      .placements = staged->placements()},
                                     *staged);
  if (!status.ok()) {
    ReportInBackground(status.WithContext("step " + std::to_string(staged->step())));
  }
  // The request itself is wrong and stays wrong; or there is no room now.
  const bool is_lost =
      status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kAlreadyExists;
  NoteSpool();
  const std::lock_guard lock(mutex);
  is_spilling = false;
  if (is_lost) ++stats.failed;
  if (status.ok() || is_lost) return ReleaseLocked(staged->TakeBuffer());
  spool_is_full = true;
  PutBackLocked(std::move(staged));
}

void CheckpointHook::State::SpillLoop() {
  while (std::unique_ptr<StagedCheckpoint> staged = TakeToSpill()) Spill(std::move(staged));
}

}  // namespace stockpot
