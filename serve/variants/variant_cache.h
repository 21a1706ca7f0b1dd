// Resident variants, keyed by digest, within a byte budget. A variant that is not resident is loaded
// once, however many ask; those who ask wait for that load and nobody else does.
//
// Eviction: least recently used of the unleased, hot ones (by request rate) last. A variant larger than
// the budget is refused.
// Thread promise: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "serve/model/weights.h"

namespace stockpot {

// Keeps a variant resident while it lives. Copyable; cheap.
using VariantLease = std::shared_ptr<const VariantModel>;

struct VariantCacheStats {
  int64_t hits = 0;
  int64_t misses = 0;      // loads started
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
  };
  using Callback = std::function<void(Result<VariantLease>)>;

  // `store` must outlive the cache.
  VariantCache(std::shared_ptr<const BaseModel> base, const CheckpointStore& store, Options options);
  ~VariantCache();  // waits for running loads; callbacks that wait get Unavailable

  // Calls back with a lease: at once (on this thread) if resident, else from a loader thread when the one
  // load of this digest is done. A failed load is not remembered: the next request tries again.
  void Acquire(const Digest& variant, Callback callback);
  // Loads ahead of the first request (a published variant); `done` may be null.
  void Prefetch(const Digest& variant, Callback done);

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
  std::shared_ptr<State> state_;
};

}  // namespace stockpot
