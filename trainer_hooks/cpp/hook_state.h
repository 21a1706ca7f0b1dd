// What is behind a CheckpointHook. Private to the hook: checkpoint_hook.cc (the training loop's
// side), hook_uploads.cc (the background thread).
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
  std::optional<SpoolKey> spooled;  // none: it is staged
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
  // The background thread alone adds and removes; OnStep may take the memory of one.
  std::deque<AwaitedPart> awaited;
  std::vector<StagingBuffer> free_buffers;
  CheckpointHookStats stats;
  std::optional<StatusCode> reported;  // told to on_error since the last success
  Status background;                   // the first failure that no OnStep has told yet

  // --- the training loop's side ---
  Status Start();
  Result<StagingBuffer> Reserve(int64_t bytes);
  bool MakeRoomLocked(int64_t bytes);
  void ReleaseLocked(StagingBuffer buffer);
  void Release(StagingBuffer buffer);
  Status Stage(int64_t step, std::span<const TensorView> tensors,
               const std::map<std::string, double>& metrics);
  void Count(const Status& status, double stall_ms);
  void Report(const Status& status);

  // --- the background thread ---
  struct Part;
  void Run();
  bool WaitForWork();
  bool HasUnsentLocked() const;
  bool MaySend() const;
  bool Pause(int64_t pause_ms);
  void ReportInBackground(const Status& status);

  Status SendNext(int& refusals);
  Result<bool> SendFirst(FirstPart& first);
  Result<bool> Send(const Part& part);
  rpc::StepKey KeyOf(int64_t step, int32_t world, const std::string& attempt) const;

  void FinishFirst(const FirstPart& first, const Status& status);
  void FinishSpooled(const SpoolKey& key, const Status& status, bool is_damaged);
  void CountFinished(const Status& status, int64_t step);
  const StagedCheckpoint* FirstStaged() const;
  void PopStaged();
  void Spill();
  void NoteSpool();

  // Of parts whose checkpoint other ranks have yet to complete.
  void AwaitFirst(const FirstPart& first);
  Status AskAfterAwaited();
  void FinishAwaited(const Status& status);
  void AwaitFrontLonger();
  bool SendAgain();
  void RecallAwaited();
};

}  // namespace stockpot
