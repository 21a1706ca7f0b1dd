// A fixed pool that runs one parallel loop at a time. The kernels take it as an argument; no global.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace stockpot {

class ThreadPool {
 public:
  // `threads` >= 1 counts the calling thread: ThreadPool(1) starts none.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls body(begin, end) over disjoint ranges that cover [0, n), each at most `grain` long
  // (>= 1), from all threads of the pool, and returns when all are done. Ranges are handed out
  // dynamically, so cores that are slower do less. `body` must not throw and must not call
  // ParallelFor of the same pool. Allocates nothing. Thread promise: one caller at a time; a second
  // one waits.
  void ParallelFor(int64_t n, int64_t grain,
                   const std::function<void(int64_t begin, int64_t end)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
