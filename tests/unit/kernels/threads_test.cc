// The thread pool under pressure: all threads work, none is left asleep, nothing is allocated.
// (That every index is visited once and that idle threads sleep: base_test.cc.)
#include "kernels/base/threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "tests/unit/kernels/count_allocations.h"

namespace stockpot {
namespace {

// Holds its callers back until `parties` of them are inside, again and again.
class Barrier {
 public:
  explicit Barrier(int parties) : parties_(parties) {}

  void Wait() {
    const int64_t generation = generation_.load();
    if (inside_.fetch_add(1) + 1 == parties_) {
      inside_ = 0;
      generation_.fetch_add(1);
      return;
    }
    while (generation_.load() == generation) std::this_thread::yield();
  }

 private:
  const int parties_;
  std::atomic<int> inside_{0};
  std::atomic<int64_t> generation_{0};
};

// How many ranges each thread ran.
class RangeCounts {
 public:
  void Count() {
    const std::lock_guard lock(mutex_);
    ++counts_[std::this_thread::get_id()];
  }
  const std::map<std::thread::id, int64_t>& counts() const { return counts_; }

 private:
  std::mutex mutex_;
  std::map<std::thread::id, int64_t> counts_;
};

// Ranges of one length are shared out evenly, the calling thread included: a range ends only when
// every thread of the pool is in one, so a thread that took none, or fewer, would hang the loop.
TEST(ThreadPoolLoad, EqualRangesAreSharedEvenly) {
  for (const int size : {1, 2, 3, 5}) {
    ThreadPool threads(size);
    constexpr int64_t kRangesEach = 50;
    Barrier barrier(size);
    RangeCounts ranges;
    threads.ParallelFor(kRangesEach * size, 1, [&](int64_t, int64_t) {
      ranges.Count();
      barrier.Wait();
    });
    EXPECT_EQ(ranges.counts().size(), static_cast<size_t>(size));
    EXPECT_EQ(ranges.counts().count(std::this_thread::get_id()), 1u);
    for (const auto& [thread, count] : ranges.counts()) EXPECT_EQ(count, kRangesEach);
  }
}

// A thread that is slow takes few ranges; the others do not wait for it between ranges.
TEST(ThreadPoolLoad, OtherThreadsTakeTheRangesOfASlowOne) {
  constexpr int64_t kRanges = 100;
  ThreadPool threads(2);
  std::atomic<int64_t> done{0};
  RangeCounts ranges;
  threads.ParallelFor(kRanges, 1, [&](int64_t begin, int64_t) {
    ranges.Count();
    // The first range ends last: whoever has it takes no other.
    while (begin == 0 && done.load() < kRanges - 1) std::this_thread::yield();
    done.fetch_add(1);
  });
  ASSERT_EQ(ranges.counts().size(), 2u);
  const int64_t first = ranges.counts().begin()->second;
  EXPECT_EQ(std::min(first, kRanges - first), 1);
}

TEST(ThreadPoolLoad, NoWakeUpIsLostInManyTinyLoops) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  ThreadPool threads(2);
  std::atomic<int64_t> sum{0};
  int64_t expected = 0;
  for (int loop = 0; loop < 100'000; ++loop) {
    const int64_t n = 2 + static_cast<int64_t>(random() % 4);
    threads.ParallelFor(n, 1, [&](int64_t begin, int64_t) { sum.fetch_add(begin + 1); });
    expected += n * (n + 1) / 2;
  }
  EXPECT_EQ(sum.load(), expected);  // and the loop came to its end
}

// Loops that need both threads, started while the worker looks for work, falls asleep, sleeps.
TEST(ThreadPoolLoad, AWorkerComesFromEveryState) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  ThreadPool threads(2);
  Barrier barrier(2);
  for (int loop = 0; loop < 2'000; ++loop) {
    const auto pause = std::chrono::microseconds(random() % 250);  // it looks for about 100 us
    const auto start = std::chrono::steady_clock::now() + pause;
    while (std::chrono::steady_clock::now() < start) {
    }
    threads.ParallelFor(2, 1, [&](int64_t, int64_t) { barrier.Wait(); });
  }
}

TEST(ThreadPoolLoad, ALoopAllocatesNothing) {
  ThreadPool threads(3);
  std::atomic<int64_t> sum{0};
  const std::function<void(int64_t, int64_t)> body = [&](int64_t begin, int64_t end) {
    sum.fetch_add(end - begin);
  };
  threads.ParallelFor(100, 1, body);
  const int64_t before = CountedAllocations();
  for (int loop = 0; loop < 1'000; ++loop) {
    threads.ParallelFor(100, 1, body);
    threads.ParallelFor(3, 5, body);                                         // one range
    threads.ParallelFor(7, 2, [&](int64_t, int64_t) { sum.fetch_add(1); });  // made here
  }
  EXPECT_EQ(CountedAllocations() - before, 0);
  EXPECT_EQ(sum.load(), 100 + 1'000 * (100 + 3 + 4));
}

}  // namespace
}  // namespace stockpot
