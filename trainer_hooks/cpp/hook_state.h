// What is behind a CheckpointHook. Private to the hook: checkpoint_hook.cc (the training loop's
// side), hook_uploads.cc (the thread that sends), hook_spilling.cc (the thread that moves what is
// staged to the disk).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "kernels/base/threads.h"
#include "thrift/client.h"
#include "trainer_hooks/cpp/checkpoint_hook.h"
#include "trainer_hooks/cpp/spool.h"
#include "trainer_hooks/cpp/staging.h"

namespace stockpot {

// A part that was sent, of a checkpoint whose other parts are awaited. It may have to be sent
// again, should the daemon forget it.
struct AwaitedPart {
  rpc::StepKey key;
  int32_t rank = 0;
  std::unique_ptr<StagedCheckpoint> staged;  // null: in the spool, or its memory was needed
  std::optional<SpoolKey> spooled;
};

// What is sent next.
struct FirstPart {
  rpc::StepKey key;
  int32_t rank = 0;
  std::unique_ptr<StagedCheckpoint> staged;  // null: it is spooled
  std::optional<SpoolKey> spooled;
  bool is_damaged = false;
};

struct CheckpointHook::State {
  explicit State(CheckpointHookOptions given)
      : options(std::move(given)),
        files(options.rank == 0 ? options.files : std::map<std::string, std::string>{}),
        copy_threads(options.copy_threads) {}

  // --- constant ---
  const CheckpointHookOptions options;
  const std::map<std::string, std::string> files;  // that this rank sends

  // --- used by OnStep's thread only ---
  ThreadPool copy_threads;

  // --- used by the sending thread only, but for Shutdown ---
  std::vector<std::unique_ptr<Client>> clients;
  bool run_exists = false;

  // --- synchronises itself ---
  std::unique_ptr<Spool> spool;  // null: none
  std::atomic<bool> closing{false};
  std::thread sender;
  std::thread spiller;

  // --- guarded by mutex ---
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::unique_ptr<StagedCheckpoint>> queue;
  // The sending thread alone adds and removes; OnStep may take the memory of one.
  std::deque<AwaitedPart> awaited;
  bool is_sending = false;   // one that is no longer in the queue
  bool is_spilling = false;  // likewise
  bool is_full = false;      // the last one staged leaves no room for one like it
  bool is_pausing = false;   // nothing can be sent now
  bool has_ended = false;    // nothing will be sent any more
  bool spool_is_full = false;
  std::vector<StagingBuffer> free_buffers;
  CheckpointHookStats stats;
  std::optional<StatusCode> reported;  // told to on_error since the last success
  Status background;                   // the first failure that no OnStep has told yet

  // --- the training loop's side ---
  Status Start();
  Result<StagingBuffer> Reserve(int64_t bytes);
  int64_t NeededBytesLocked() const;
  bool MakeRoomLocked(int64_t bytes);
  void ReleaseLocked(StagingBuffer buffer);
  void Release(StagingBuffer buffer);
  Status Stage(int64_t step, std::span<const TensorView> tensors,
               const std::map<std::string, double>& metrics);
  void Count(const Status& status, double stall_ms);
  void Report(const Status& status);

  // --- both threads ---
  void ReportInBackground(const Status& status);
  void PutBackLocked(std::unique_ptr<StagedCheckpoint> staged);
  void NoteSpool();

  // --- the thread that moves what is staged to the disk ---
  void SpillLoop();
  bool MaySpillLocked() const;
  std::unique_ptr<StagedCheckpoint> TakeToSpill();
  void Spill(std::unique_ptr<StagedCheckpoint> staged);

  // --- the thread that sends ---
  struct Part;
  void SendLoop();
  bool WaitForWork();
  bool HasUnsentLocked() const;
  bool MaySend() const;
  bool Pause(int64_t pause_ms);

  Status SendNext(int& refusals);
  void TakeFirst(FirstPart& first);
  Result<bool> SendFirst(FirstPart& first);
  Result<bool> Send(const Part& part);
  rpc::StepKey KeyOf(int64_t step, int32_t world, const std::string& attempt) const;

  void PutBack(FirstPart& first);
  void FinishFirst(FirstPart& first, const Status& status);
  void FinishSpooled(const SpoolKey& key, const Status& status, bool is_damaged);
  void CountFinished(const Status& status, int64_t step);

  // Of parts whose checkpoint other ranks have yet to complete.
  void AwaitFirst(FirstPart& first);
  Status AskAfterAwaited();
  void FinishAwaited(const Status& status);
  void AwaitFrontLonger();
  bool SendAgain();
  void RecallAwaited();
};

}  // namespace stockpot
