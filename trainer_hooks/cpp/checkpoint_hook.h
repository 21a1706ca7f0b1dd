// The hook of a C++ training loop: copy, return, upload in the background. Links neither Torch nor
// RocksDB; libtorch_adapter.h turns a torch::nn::Module into the views below.
//
//   auto hook = CheckpointHook::Create({.run = "demo", .base = "smollm2", .files = {...}});
//   for (int64_t step = 1; ...; ++step) {
//     ...
//     if (step % 100 == 0) (*hook)->OnStep(step, views, {{"loss", loss}});
//   }
//   (*hook)->Flush(60'000);
//
// What a training loop can rely on:
//   - OnStep never throws and returns within one copy of the bytes (plus options.wait_ms, if
//     staging is full and the loop chose to wait), whatever the daemon does: nothing of the network
//     happens in it. Stored values are those at the call.
//   - A daemon that is away, slow or refuses never stops the loop. With options.spool_directory
//     what cannot be sent, or waits when the memory is full, goes to the local disk
//     (trainer_hooks/SPOOL.md) and is sent in order later, by this process or by the next one of
//     the run. Without it, it stays in memory and is tried again until it arrives. What fits
//     neither is skipped and counted.
//   - A failure in the background shows in the next OnStep's outcome and in Stats(); on_error is
//     called once for each kind of trouble until things work again.
//   - Destruction takes at most options.close_ms, plus a connection attempt's time-out, plus
//     writing what is staged into the spool.
//
// Tensors with a `group` (the optimizer's, a loader's position) become a state beside the
// checkpoint, RUN@STEP.GROUP, committed with it.
//
// Several ranks: each process has a hook with its `rank`, the same `world` and the same `attempt`,
// calls it with the same steps, and hands over its own pieces. No rank waits for another; the
// checkpoint exists when the last part is in. A part that was sent stays in memory until then, or
// until a later step needs the memory, so that a daemon that restarts in between costs nothing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/base/status.h"
#include "store/records.h"
#include "thrift/address.h"
#include "thrift/security.h"

namespace stockpot {

// One tensor of the model or of the training state, or this rank's piece of it: contiguous,
// row-major, borrowed for the call. Names are unique, over the groups too.
struct TensorView {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // unused for an alias
  std::string alias_of;        // not empty: tied to the tensor of that name
  // Instead of `data`, for bytes that the CPU cannot read: copies all of them to `out`. Called by
  // OnStep, in its thread.
  std::function<Status(std::span<std::byte> out)> read = nullptr;
  std::string group;  // empty: a weight
  // Of a piece, whose shape is `shape`: the whole tensor's shape, and where the piece begins, in
  // elements. Both empty: the view is the whole tensor. An alias has the whole tensor's shape, and
  // is handed over by a rank that holds a piece of what it is tied to.
  std::vector<int64_t> global_shape;
  std::vector<int64_t> offsets;
};

// What OnStep does when the staging memory is full.
enum class WhenStagingIsFull {
  kSkip,  // the checkpoint is skipped and counted
  kWait,  // waits up to wait_ms for an upload to finish, then skips
};

// Memory of that many bytes, for copies; null: there is none. Called by OnStep.
using StagingAllocator = std::function<std::shared_ptr<void>(int64_t bytes)>;

struct CheckpointHookOptions {
  std::string address{kDefaultRpcAddress};
  ClientTls tls;                        // of a TCP address
  std::string token;                    // that the daemon asks for
  std::string run;                      // REQUIRED
  std::string base;                     // name or digest of the base this run fine-tunes. REQUIRED
  std::optional<RunConfig> run_config;  // none: an existing run keeps its own
  std::map<std::string, std::string> tags;
  // config.json, tokenizer.json, ...: what makes the checkpoint a complete model. Files that are
  // left out are taken from the base.
  std::map<std::string, std::string> files;

  // Which process of the job this is. Files are sent by rank 0 alone.
  int32_t rank = 0;
  int32_t world = 1;         // at most kMaxWorld
  std::string attempt;       // one start of the job, the same on all ranks and never used again;
                             // world > 1 needs it: 1..128 printable bytes
  std::string resumed_from;  // hex digest of the artifact that training continues from; empty: none

  int64_t staging_bytes = int64_t{4} << 30;  // of all checkpoints that await their upload
  StagingAllocator allocate;                 // null: pageable memory of the system
  WhenStagingIsFull when_full = WhenStagingIsFull::kSkip;
  int64_t wait_ms = 0;

  // On a local disk. One process at a time uses the folder of a run. Empty: no spool.
  std::filesystem::path spool_directory;
  int64_t spool_bytes = int64_t{64} << 30;

  int connections = 4;        // 1..8, each with a thread while uploading
  int chunks_in_flight = 4;   // 1..16 of a connection, that await their answer
  int answer_ms = 30'000;     // how long a daemon that is there may be silent
  int copy_threads = 2;       // of the copy in OnStep, the caller's own included
  int64_t close_ms = 10'000;  // how long the destructor waits for uploads
  // From the background thread, or from OnStep. Must not call the hook. May be null.
  std::function<void(const Status&)> on_error;
};

struct CheckpointHookStats {
  int64_t offered = 0;    // calls of OnStep
  int64_t committed = 0;  // durable and visible, all ranks' parts
  int64_t skipped = 0;    // staging was full
  // Refused for good (last_error says why), damaged, malformed, or a rank never came.
  int64_t failed = 0;
  int64_t retries = 0;    // uploads that were begun again
  int64_t waiting = 0;    // staged in memory, not yet sent
  int64_t gathering = 0;  // sent, and not a checkpoint yet: other ranks' parts are awaited
  int64_t staged_bytes = 0;
  int64_t spooled = 0;  // on the local disk, not yet committed; of earlier processes too
  int64_t spooled_bytes = 0;
  int64_t sent_bytes = 0;   // that travelled
  int64_t total_bytes = 0;  // of the committed checkpoints: the rest the daemon had
  int64_t last_committed_step = -1;
  double last_stall_ms = 0;
  double max_stall_ms = 0;
  Status last_error;  // OK: none since the last success
};

// What came of a call of OnStep.
struct StepOutcome {
  bool staged = false;  // this checkpoint was copied
  Status background;    // the first failure in the background since the last call; OK: none
  explicit operator bool() const { return staged; }
};

// Thread promise: OnStep from one thread at a time; Stats and Flush from any.
class CheckpointHook {
 public:
  // Does not connect. InvalidArgument: the options. Unavailable: another process uses the spool
  // folder of this rank.
  static Result<std::unique_ptr<CheckpointHook>> Create(CheckpointHookOptions options);
  ~CheckpointHook();
  CheckpointHook(const CheckpointHook&) = delete;
  CheckpointHook& operator=(const CheckpointHook&) = delete;

  // Copies `tensors` and returns. With several ranks they may be none. Metrics that are not finite
  // are dropped by the daemon, whose event names them: a loss of NaN does not cost the checkpoint.
  StepOutcome OnStep(int64_t step, std::span<const TensorView> tensors,
                     const std::map<std::string, double>& metrics) noexcept;

  CheckpointHookStats Stats() const;

  // Waits until everything staged and spooled is committed, all ranks' parts, or has failed; true
  // if nothing is left.
  bool Flush(int64_t timeout_ms);

 private:
  struct State;
  explicit CheckpointHook(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
