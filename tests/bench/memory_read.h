// The yardstick of what is bound by memory: loops that read and do nothing else.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/threads.h"
#include "tests/bench/bench.h"

namespace stockpot {

struct MemoryReadLoop {
  int64_t range_bytes;  // of each stream, handed to a thread at a time
  int64_t ahead_bytes;  // prefetched; 0: left to the processor
};

// A plain loop is no upper bound by itself: the best of several counts.
inline constexpr MemoryReadLoop kMemoryReadLoops[] = {
    {64 << 10, 0}, {64 << 10, 2048}, {1 << 20, 0}, {1 << 20, 2048}};

// Reads buffers[0], buffers[1], ... of `bytes` each with all threads, `streams` (1 or 2) of them at
// a time. REQUIRES: bytes is a multiple of 512, buffers.size() of `streams`.
void ReadMemory(const std::vector<const void*>& buffers, int64_t bytes, int streams,
                const MemoryReadLoop& loop, ThreadPool& threads);

// Adds all loops to a comparison, named "read/..."; Seconds("read/") is of reading all buffers.
void AddMemoryRead(Comparison& comparison, const std::vector<const void*>& buffers, int64_t bytes,
                   int streams, ThreadPool& threads);

}  // namespace stockpot
