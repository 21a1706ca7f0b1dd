#include "kernels/base/threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/check.h"

// A decode step runs some 200 loops of 20-200 us each, back to back; waking a sleeping thread costs
// about 50 us. So a worker that has run out of work first looks again for a while, and sleeps only
// when nothing came.
//
// Invariant: `ticket` holds the loop's generation (high half) and the number of ranges not yet
// handed out (low half). A range is claimed by decrementing it, so a claim proves that the loop is
// still open and that `body`, `n` and `grain`, written before the ticket, are its own. A worker
// that wakes late finds no range and touches nothing; a loop never waits for a thread that did not
// join it.

namespace stockpot {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(100);
constexpr int kSpinsPerClockRead = 64;
constexpr int kRangeBits = 32;
constexpr uint64_t kRangeMask = (uint64_t{1} << kRangeBits) - 1;
constexpr int64_t kMaxRanges = int64_t{1} << 31;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True as soon as `ready()` holds, false after kSpinTime.
template <typename Ready>
bool SpinUntil(const Ready& ready) {
  if (ready()) return true;
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kSpinsPerClockRead; ++i) {
      if (ready()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace

struct ThreadPool::State {
  std::mutex caller;  // one loop at a time

  // Written by the caller while no range is open, read by whoever has claimed one.
  const std::function<void(int64_t, int64_t)>* body = nullptr;
  int64_t n = 0;
  int64_t grain = 1;
  int64_t ranges = 0;

  alignas(kCacheLineBytes) std::atomic<uint64_t> ticket{0};
  alignas(kCacheLineBytes) std::atomic<int64_t> finished{0};  // ranges of the current loop
  std::atomic<int> sleepers{0};                               // workers in or entering start.wait
  std::atomic<bool> caller_sleeps{false};
  std::atomic<bool> stop{false};

  std::mutex mutex;  // for the two condition variables only
  std::condition_variable start;
  std::condition_variable done;

  std::vector<std::thread> workers;

  bool HasWork() const { return (ticket.load(std::memory_order_seq_cst) & kRangeMask) != 0; }

  // Runs ranges until none is left to hand out.
  void Drain() {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while ((seen & kRangeMask) != 0) {
      if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel,
                                        std::memory_order_acquire)) {
        continue;
      }
      const int64_t index = ranges - static_cast<int64_t>(seen & kRangeMask);
      const int64_t begin = index * grain;
      const int64_t all =
          ranges;  // after the last `finished` the fields may belong to the next loop
      (*body)(begin, std::min(begin + grain, n));
      if (finished.fetch_add(1, std::memory_order_seq_cst) + 1 == all && caller_sleeps.load()) {
        std::lock_guard lock(mutex);
        done.notify_one();
      }
      seen = ticket.load(std::memory_order_acquire);
    }
  }

  void Work() {
    const auto ready = [&] { return stop.load() || HasWork(); };
    for (;;) {
      if (!SpinUntil(ready)) {
        std::unique_lock lock(mutex);
        sleepers.fetch_add(1);
        start.wait(lock, ready);
        sleepers.fetch_sub(1);
      }
      if (stop.load()) return;
      Drain();
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  STOCKPOT_CHECK(threads >= 1, threads);
  for (int i = 1; i < threads; ++i) state_->workers.emplace_back([this] { state_->Work(); });
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true);
  {
    std::lock_guard lock(state_->mutex);
    state_->start.notify_all();
  }
  for (std::thread& worker : state_->workers) worker.join();
}

int ThreadPool::size() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::ParallelFor(int64_t n, int64_t grain,
                             const std::function<void(int64_t, int64_t)>& body) {
  STOCKPOT_CHECK(grain >= 1, grain);
  if (n <= 0) return;
  if (state_->workers.empty() || n <= grain) {
    for (int64_t begin = 0; begin < n; begin += grain) body(begin, std::min(begin + grain, n));
    return;
  }
  State& s = *state_;
  std::lock_guard one_loop(s.caller);
  s.body = &body;
  s.n = n;
  s.grain = grain;
  s.ranges = (n + grain - 1) / grain;
  STOCKPOT_CHECK(s.ranges < kMaxRanges, s.ranges);
  s.finished.store(0, std::memory_order_relaxed);
  const uint64_t generation = (s.ticket.load(std::memory_order_relaxed) >> kRangeBits) + 1;
  s.ticket.store((generation << kRangeBits) | static_cast<uint64_t>(s.ranges));
  if (s.sleepers.load() > 0) {
    std::lock_guard lock(s.mutex);
    s.start.notify_all();
  }
  s.Drain();
  const auto all_done = [&] { return s.finished.load() == s.ranges; };
  if (SpinUntil(all_done)) return;
  std::unique_lock lock(s.mutex);
  s.caller_sleeps.store(true);
  s.done.wait(lock, all_done);
  s.caller_sleeps.store(false);
}

}  // namespace stockpot
