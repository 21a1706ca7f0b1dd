#include "serve/variants/variant_cache.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "kernels/base/check.h"

namespace stockpot {
namespace {

constexpr double kScoreHalfLifeMs = 60'000;

// Bytes of loaded variants that still live somewhere; shared with every lease.
struct ResidentBytes {
  std::atomic<int64_t> value{0};
};

// A lease that tells when its memory is gone.
VariantLease Counted(VariantLease model, std::shared_ptr<ResidentBytes> resident) {
  const VariantModel* const raw = model.get();
  resident->value += raw->resident_bytes();
  return VariantLease(raw, [model = std::move(model),
                            resident = std::move(resident)](const VariantModel* gone) mutable {
    const int64_t bytes = gone->resident_bytes();
    model.reset();
    resident->value -= bytes;
  });
}

struct Slot {
  VariantLease model;                         // null while loading
  std::weak_ptr<const VariantModel> retired;  // dropped by the cache, perhaps still leased
  std::vector<VariantCache::Callback> waiting;
  bool loading = false;
  bool demanded = false;  // a request waits, not only a prefetch
  double score = 0;       // as of scored_ms
  int64_t scored_ms = 0;

  double ScoreAt(int64_t now_ms) const {
    return score * std::exp2(-static_cast<double>(now_ms - scored_ms) / kScoreHalfLifeMs);
  }
  void CountRequest(int64_t now_ms) {
    score = ScoreAt(now_ms) + 1;
    scored_ms = now_ms;
  }
};

}  // namespace

struct VariantCache::State {
  State(std::shared_ptr<const BaseModel> model, const CheckpointStore& checkpoint_store,
        Options cache_options)
      : base(std::move(model)), store(checkpoint_store), options(std::move(cache_options)) {}

  // --- constant ---
  const std::shared_ptr<const BaseModel> base;
  const CheckpointStore& store;
  const Options options;
  const std::shared_ptr<ResidentBytes> resident = std::make_shared<ResidentBytes>();
  std::vector<std::thread> loaders;

  // --- self-synchronised ---
  std::mutex reserve_mutex;  // one Reserve at a time; taken before `mutex`

  // --- guarded by mutex ---
  mutable std::mutex mutex;
  std::condition_variable wake;
  std::unordered_map<Digest, Slot, DigestHash> slots;
  std::deque<Digest> demand;   // loads not begun that requests wait for
  std::deque<Digest> ahead;    // loads not begun that were prefetched
  int64_t waiting = 0;         // callbacks in slots
  int64_t reserved_bytes = 0;  // for running loads
  VariantCacheStats counters;
  bool stopping = false;

  void Ask(const Digest& digest, bool is_request, Callback callback);
  void Enqueue(const Digest& digest, Slot& slot, bool is_request);
  bool TakeNext(std::unique_lock<std::mutex>& lock, Digest* digest);
  void Run();
  Result<VariantLease> Load(const Digest& digest);
  Status Reserve(int64_t bytes);
  void Unreserve(int64_t bytes);
  std::optional<VariantLease> EvictOne();
  void SweepRetired();
};

// REQUIRES: the mutex is held.
void VariantCache::State::Enqueue(const Digest& digest, Slot& slot, bool is_request) {
  if (!slot.loading) {
    slot.loading = true;
    slot.demanded = is_request;
    (is_request ? demand : ahead).push_back(digest);
    wake.notify_one();
    return;
  }
  if (!is_request || slot.demanded) return;
  slot.demanded = true;
  const auto it = std::find(ahead.begin(), ahead.end(), digest);
  if (it == ahead.end()) return;  // it has begun
  ahead.erase(it);
  demand.push_back(digest);
}

void VariantCache::State::Ask(const Digest& digest, bool is_request, Callback callback) {
  VariantLease lease;
  Status refused;
  {
    std::lock_guard lock(mutex);
    if (stopping) {
      refused = Unavailable("the endpoint is shutting down");
    } else {
      Slot& slot = slots[digest];
      if (slot.model == nullptr && !slot.loading) slot.model = slot.retired.lock();
      if (is_request || slot.score == 0) slot.CountRequest(options.clock());
      if (slot.model != nullptr) {
        if (is_request) ++counters.hits;
        lease = slot.model;
      } else if (waiting >= options.waiting_requests) {
        refused =
            ResourceExhausted(std::to_string(waiting) + " requests wait for variants to be loaded");
        if (!slot.loading) slots.erase(digest);
      } else {
        if (callback) {
          slot.waiting.push_back(std::move(callback));
          ++waiting;
        }
        Enqueue(digest, slot, is_request);
        return;
      }
    }
  }
  if (!callback) return;
  if (refused.ok()) {
    callback(std::move(lease));
  } else {
    callback(refused);
  }
}

// The unleased variant with the lowest score. REQUIRES: the mutex is held; the caller destroys what
// it gets after releasing it.
std::optional<VariantLease> VariantCache::State::EvictOne() {
  const int64_t now = options.clock();
  auto victim = slots.end();
  for (auto it = slots.begin(); it != slots.end(); ++it) {
    if (it->second.model == nullptr || it->second.model.use_count() > 1) continue;
    if (victim == slots.end() || it->second.ScoreAt(now) < victim->second.ScoreAt(now)) victim = it;
  }
  if (victim == slots.end()) return std::nullopt;
  VariantLease model = std::move(victim->second.model);
  slots.erase(victim);
  ++counters.evictions;
  return model;
}

// Makes room for `bytes` more within the budget and holds it until Unreserve. What is evicted is
// destroyed without `mutex`, which takes milliseconds, but before another load counts what is left.
Status VariantCache::State::Reserve(int64_t bytes) {
  std::lock_guard one_at_a_time(reserve_mutex);
  std::vector<VariantLease> evicted;
  int64_t evicted_bytes = 0;
  std::lock_guard lock(mutex);
  if (bytes > options.budget_bytes) {
    return ResourceExhausted("it takes " + std::to_string(bytes) +
                             " bytes, the budget for variants is " +
                             std::to_string(options.budget_bytes));
  }
  while (resident->value - evicted_bytes + reserved_bytes + bytes > options.budget_bytes) {
    std::optional<VariantLease> victim = EvictOne();
    if (!victim) {
      return ResourceExhausted("no room for " + std::to_string(bytes) +
                               " bytes: the variants in use fill the budget of " +
                               std::to_string(options.budget_bytes));
    }
    evicted_bytes += (*victim)->resident_bytes();
    evicted.push_back(*std::move(victim));
  }
  reserved_bytes += bytes;
  return OkStatus();
}

void VariantCache::State::Unreserve(int64_t bytes) {
  std::lock_guard lock(mutex);
  reserved_bytes -= bytes;
}

// Room is made before anything is read, by what is stored, and settled afterwards by what it
// became.
Result<VariantLease> VariantCache::State::Load(const Digest& digest) {
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store.GetManifest(digest));
  int64_t stored = 0;
  for (const TensorEntry& tensor : manifest.tensors) stored += tensor.stored_bytes();
  STOCKPOT_RETURN_IF_ERROR(Reserve(stored));
  Result<VariantLease> model = VariantModel::Load(base, store, digest);
  Unreserve(stored);
  if (!model.ok()) return model;
  STOCKPOT_RETURN_IF_ERROR(Reserve((*model)->resident_bytes()));
  VariantLease counted = Counted(*model, resident);
  Unreserve(counted->resident_bytes());
  return counted;
}

// False: the cache stops.
bool VariantCache::State::TakeNext(std::unique_lock<std::mutex>& lock, Digest* digest) {
  wake.wait(lock, [&] { return stopping || !demand.empty() || !ahead.empty(); });
  if (stopping) return false;
  std::deque<Digest>& queue = demand.empty() ? ahead : demand;
  *digest = queue.front();
  queue.pop_front();
  return true;
}

void VariantCache::State::Run() {
  Digest digest;
  std::unique_lock lock(mutex);
  while (TakeNext(lock, &digest)) {
    ++counters.misses;
    lock.unlock();
    const auto begin = std::chrono::steady_clock::now();
    Result<VariantLease> loaded = Load(digest);  // gone before the loader waits again
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    lock.lock();
    counters.load_seconds_sum += seconds.count();
    Slot& slot = slots[digest];
    std::vector<Callback> callbacks = std::move(slot.waiting);
    waiting -= static_cast<int64_t>(callbacks.size());
    slot.waiting.clear();
    slot.loading = false;
    if (loaded.ok()) {
      slot.model = *loaded;
    } else {
      ++counters.failures;
      slots.erase(digest);
    }
    lock.unlock();
    // The last one takes the loader's own lease with it.
    for (size_t i = 0; i + 1 < callbacks.size(); ++i) callbacks[i](loaded);
    if (!callbacks.empty()) callbacks.back()(std::move(loaded));
    callbacks.clear();
    lock.lock();
  }
}

// REQUIRES: the mutex is held.
void VariantCache::State::SweepRetired() {
  std::erase_if(slots, [](const auto& item) {
    const Slot& slot = item.second;
    return slot.model == nullptr && !slot.loading && slot.retired.expired();
  });
}

VariantCache::VariantCache(std::shared_ptr<const BaseModel> base, const CheckpointStore& store,
                           Options options)
    : state_(std::make_unique<State>(std::move(base), store, std::move(options))) {
  STOCKPOT_CHECK(state_->options.loader_threads >= 1, state_->options.loader_threads);
  for (int i = 0; i < state_->options.loader_threads; ++i) {
    state_->loaders.emplace_back([this] { state_->Run(); });
  }
}

VariantCache::~VariantCache() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->wake.notify_all();
  }
  for (std::thread& loader : state_->loaders) loader.join();
  // No other thread is inside any more; callbacks that ask again are refused.
  std::vector<Callback> left;
  {
    std::lock_guard lock(state_->mutex);
    for (auto& [digest, slot] : state_->slots) {
      std::move(slot.waiting.begin(), slot.waiting.end(), std::back_inserter(left));
      slot.waiting.clear();
    }
  }
  for (Callback& callback : left) callback(Unavailable("the endpoint is shutting down"));
}

void VariantCache::Acquire(const Digest& variant, Callback callback) {
  STOCKPOT_CHECK(callback != nullptr);
  state_->Ask(variant, /*is_request=*/true, std::move(callback));
}

void VariantCache::Prefetch(const Digest& variant, Callback done) {
  state_->Ask(variant, /*is_request=*/false, std::move(done));
}

void VariantCache::Retire(const Digest& variant) {
  VariantLease model;  // destroyed after the lock is released
  std::lock_guard lock(state_->mutex);
  state_->SweepRetired();
  const auto it = state_->slots.find(variant);
  if (it == state_->slots.end() || it->second.model == nullptr) return;
  it->second.retired = it->second.model;
  model = std::move(it->second.model);
}

std::vector<VariantCache::Entry> VariantCache::entries() const {
  std::vector<Entry> entries;
  std::lock_guard lock(state_->mutex);
  for (const auto& [digest, slot] : state_->slots) {
    if (slot.loading) {
      entries.push_back({digest, "loading", 0, 0});
    } else if (slot.model != nullptr) {
      entries.push_back(
          {digest, "resident", slot.model->resident_bytes(), slot.model.use_count() - 1});
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.digest < b.digest; });
  return entries;
}

VariantCacheStats VariantCache::stats() const {
  std::lock_guard lock(state_->mutex);
  VariantCacheStats stats = state_->counters;
  stats.resident_bytes = state_->resident->value;
  for (const auto& [digest, slot] : state_->slots) stats.resident += slot.model != nullptr ? 1 : 0;
  return stats;
}

}  // namespace stockpot
