// Which chunks somebody may be about to commit. A chunk that was put, or that somebody was told is
// there, is referred to by no manifest yet: as long as a guard is open that was open then, garbage
// collection leaves it alone.
//
// Thread promise: any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "store/digest.h"

namespace stockpot {

class ChunkGuards : public std::enable_shared_from_this<ChunkGuards> {
 public:
  // Open until the last copy is gone.
  std::shared_ptr<void> Open();

  // Notes that the chunk matters to whoever has a guard open now. Costs nothing without one.
  void Touch(const Digest& chunk);

  // Whether it was touched while a guard was open that still is.
  bool Protects(const Digest& chunk) const;

 private:
  void Close(uint64_t epoch);

  std::atomic<int64_t> open_count_{0};
  mutable std::mutex mutex_;
  uint64_t epoch_ = 0;            // guarded: of the newest guard
  std::multiset<uint64_t> open_;  // guarded: epochs of the open guards
  std::unordered_map<Digest, uint64_t, DigestHash>
      touched_;  // guarded: the epoch of the last touch
};

}  // namespace stockpot
