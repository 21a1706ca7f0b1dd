// What the child of the crash test writes and the parent expects: the bytes of a step follow from
// its number alone, so the parent needs no word of the child about them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "store/checkpoint_store.h"
#include "store/ingest.h"

namespace stockpot::crash {

inline constexpr char kRun[] = "crash";
inline constexpr char kBase[] = "crash-base";
inline constexpr int64_t kPackBytes = int64_t{3} << 20;  // several packs are made and closed

inline StoreOptions WorkloadOptions(const char* directory) {
  return {.directory = directory,
          .clock = SystemClock(),
          .pack_bytes = kPackBytes,
          .free_bytes_reserve = 0};
}

inline void FillRandomly(std::mt19937_64& random, std::vector<std::byte>& bytes, size_t begin,
                         size_t stride) {
  for (size_t i = begin; i < bytes.size(); i += stride) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, bytes.size() - i));
  }
}

inline std::vector<std::byte> TensorBytes(int64_t step, int tensor) {
  std::mt19937_64 random(static_cast<uint64_t>(step) * 8 + static_cast<uint64_t>(tensor));
  // Inline, one chunk, and now and then several chunks.
  const size_t limit = tensor == 0 ? 2'000 : step % 7 == 5 ? 5'000'000 : 600'000;
  std::vector<std::byte> bytes((tensor == 0 ? 1 : 70'000) + random() % limit);
  if (tensor != 1 || step % 7 == 5) {
    FillRandomly(random, bytes, 0, 8);
    return bytes;
  }
  // What most steps save differs little from step to step, as a model does: its history compresses.
  bytes.resize(300'000);
  std::mt19937_64 shared(1);
  FillRandomly(shared, bytes, 0, 8);
  FillRandomly(random, bytes, 0, 80);
  return bytes;
}

// Deletes at once, so that every collection has something to purge.
inline RetentionPolicy WorkloadPolicy() {
  return {.keep_last = 4, .best = {{"loss", true, 1}}, .every = 10, .grace_ms = 0};
}

// The metric falls and rises: RUN@best moves and rests.
inline double Loss(int64_t step) { return static_cast<double>((step * 37) % 101); }

}  // namespace stockpot::crash
