#include "kernels/base/threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/base/check.h"

namespace stockpot {

struct ThreadPool::State {
  std::mutex caller;  // one loop at a time

  std::mutex mutex;  // guards the rest up to the atomics
  std::condition_variable start;
  std::condition_variable done;
  uint64_t generation = 0;
  int running = 0;  // workers that have not finished the current loop
  bool stop = false;
  const std::function<void(int64_t, int64_t)>* body = nullptr;
  int64_t n = 0;
  int64_t grain = 1;

  std::atomic<int64_t> next{0};
  std::vector<std::thread> workers;

  void Drain(const std::function<void(int64_t, int64_t)>& loop_body, int64_t end, int64_t step) {
    for (;;) {
      const int64_t begin = next.fetch_add(step, std::memory_order_relaxed);
      if (begin >= end) return;
      loop_body(begin, std::min(begin + step, end));
    }
  }

  void Work() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      start.wait(lock, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      const auto* loop_body = body;
      const int64_t end = n;
      const int64_t step = grain;
      lock.unlock();
      Drain(*loop_body, end, step);
      lock.lock();
      if (--running == 0) done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  STOCKPOT_CHECK(threads >= 1, threads);
  for (int i = 1; i < threads; ++i) state_->workers.emplace_back([this] { state_->Work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->start.notify_all();
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
  std::lock_guard one_loop(state_->caller);
  {
    std::lock_guard lock(state_->mutex);
    state_->body = &body;
    state_->n = n;
    state_->grain = grain;
    state_->next.store(0, std::memory_order_relaxed);
    state_->running = static_cast<int>(state_->workers.size());
    ++state_->generation;
  }
  state_->start.notify_all();
  state_->Drain(body, n, grain);
  std::unique_lock lock(state_->mutex);
  state_->done.wait(lock, [&] { return state_->running == 0; });
}

}  // namespace stockpot
