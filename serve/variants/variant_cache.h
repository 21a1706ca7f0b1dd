// Resident variants, keyed by digest, within a byte budget. A variant that is not resident is
// loaded once, however many ask; those who ask wait for that load and nobody else does.
//
// Eviction: the unleased variant with the lowest LRFU score goes first (Lee et al., IEEE Trans.
// Comput. 50(12), 2001): every request counts 1 and decays with a half-life, so an entry is kept
// for being hot or for being recent. A variant larger than the budget is refused, and so is one for
// which everything else that could go is in use. Memory counts as resident until its last lease is
// gone. Thread promise: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "serve/model/weights.h"

namespace stockpot {

// Keeps a variant resident while it lives. Copyable; cheap. May outlive the cache.
using VariantLease = std::shared_ptr<const VariantModel>;

struct VariantCacheStats {
  int64_t hits = 0;
  int64_t misses = 0;  // loads started
  int64_t evictions = 0;
  int64_t failures = 0;
  int64_t resident_bytes = 0;
  int64_t resident = 0;
  double load_seconds_sum = 0;
};

class VariantCache {
 public:
  struct Options {
    int64_t budget_bytes = int64_t{2} << 30;
    int loader_threads = 1;
    int64_t waiting_requests = 4096;  // for all loads together; over it: ResourceExhausted
    Clock clock = SystemClock();      // for the scores
  };
  using Callback = std::function<void(Result<VariantLease>)>;

  // `store` must outlive the cache.
  VariantCache(std::shared_ptr<const BaseModel> base, const CheckpointStore& store,
               Options options);
  // Waits for running loads; callbacks of loads that have not begun get Unavailable.
  ~VariantCache();
  VariantCache(const VariantCache&) = delete;
  VariantCache& operator=(const VariantCache&) = delete;

  // Calls back exactly once with a lease: at once (on this thread) if resident, else from a loader
  // thread when the one load of this digest is done. A failed load is not remembered: the next
  // request tries again. Loads that requests wait for go before those that were only prefetched.
  // The callback may call the cache.
  void Acquire(const Digest& variant, Callback callback);
  // Loads ahead of the first request (a published variant); `done` may be null.
  void Prefetch(const Digest& variant, Callback done);
  // Forgets a variant that no name leads to any more: its memory goes with its last lease.
  void Retire(const Digest& variant);

  struct Entry {
    Digest digest;
    std::string state;  // "resident", "loading"
    int64_t bytes = 0;
    int64_t leases = 0;
  };
  std::vector<Entry> entries() const;
  VariantCacheStats stats() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
