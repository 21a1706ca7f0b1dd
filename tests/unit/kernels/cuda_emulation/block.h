// The machine below cuda_emulation.h: runs the threads of a CUDA grid on the host, one block after
// another, each thread of a block as a fiber that runs until it meets a barrier or ends.
//
// It proves logic and indexing: a missing barrier shows as wrong values under another order of
// threads, a divergent one as a deadlock that names the waiting threads, an asynchronous copy that
// nobody waited for as NaN, a stray access under AddressSanitizer. It proves nothing about speed or
// about memory ordering between blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace stockpot::emulation {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// In which order the threads of a block get their turns. A correct kernel does not notice.
enum class ThreadOrder { kForward, kReverse, kShuffled };

struct Schedule {
  ThreadOrder order = ThreadOrder::kForward;
  uint64_t seed = 1;  // of kShuffled
};

// Runs body() once for each thread of the grid; a block has dynamic_bytes of dynamic shared memory.
// Throws std::runtime_error on a deadlock, std::logic_error on a misuse that hardware would punish
// or hide, and whatever body throws.
void RunGrid(Dim3 grid, Dim3 block, const Schedule& schedule, const std::function<void()>& body,
             size_t dynamic_bytes = 0);

// The calls below are for device code, that is within RunGrid's body.
Dim3 ThreadIndex();
Dim3 BlockIndex();
Dim3 BlockSize();
Dim3 GridSize();
int Lane();  // of the warp, 0 .. 31

// Waits until every thread of the block that has not ended is here.
void BlockBarrier();

inline constexpr int kWarpLanes = 32;
inline constexpr size_t kExchangeBytes = 32;  // the largest value a lane can publish

// What the lanes of a warp published in one collective; valid until the calling lane's next one.
struct Exchanged {
  const unsigned char (*slots)[kExchangeBytes] = nullptr;  // [kWarpLanes]
  uint32_t lanes = 0;                                      // that took part
};

// Publishes `bytes` bytes of `value` and waits for all lanes of `mask` that have not ended.
Exchanged Exchange(uint32_t mask, const void* value, size_t bytes);

// Memory of the current block, the same for all its threads, named by the place that asks.
// Filled with 0xA5 before each block, so that reading what nobody wrote shows.
void* SharedMemory(const void* place, size_t bytes);

// The block's dynamic shared memory, filled likewise.
void* DynamicSharedMemory();

// An asynchronous copy of `bytes` bytes, of which source_bytes are read and the others are zero.
// Its target holds 0xFF (NaN) until WaitForCopies delivers it: a reader that came too early sees
// that, and so does one of the old contents that was not done. A thread may not end with copies
// that it has not waited for.
void BeginCopy(void* to, const void* from, size_t bytes, size_t source_bytes);
void CommitCopies();              // what was begun since the last call is a group
void WaitForCopies(int pending);  // delivers all groups of this thread but the latest `pending`

}  // namespace stockpot::emulation
