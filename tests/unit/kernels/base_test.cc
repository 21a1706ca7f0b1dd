// kernels/base: statuses, element types, buffers, the thread pool, the device report.
#include <gtest/gtest.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/check.h"
#include "kernels/base/device.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status.h"
#include "kernels/base/threads.h"

namespace stockpot {
namespace {

TEST(Status, MessageGrowsOnTheWayUp) {
  EXPECT_TRUE(OkStatus().WithContext("ignored").ok());
  const Status status = NotFound("no such file").WithContext("reading a header");
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_EQ(status.ToString(), "NotFound: reading a header: no such file");
  EXPECT_EQ(ErrnoStatus(ENOSPC, "write").code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrnoStatus(ENOENT, "open").code(), StatusCode::kNotFound);
  EXPECT_EQ(ErrnoStatus(EIO, "read").code(), StatusCode::kUnavailable);
  EXPECT_EQ(ErrnoStatus(EBADF, "read").code(), StatusCode::kInternal);
  EXPECT_TRUE(IsRetryable(StatusCode::kUnavailable));
  EXPECT_FALSE(IsRetryable(StatusCode::kCorruption));
}

Result<int> Half(int n) {
  if (n % 2 != 0) return InvalidArgument("odd");
  return n / 2;
}

Result<int> Quarter(int n) {
  STOCKPOT_ASSIGN_OR_RETURN(const int half, Half(n));
  return Half(half);
}

TEST(Result, HoldsAValueOrAStatus) {
  EXPECT_EQ(Quarter(12).value(), 3);
  EXPECT_EQ(Quarter(6).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Result<int>(OkStatus()).status().code(), StatusCode::kInternal);
  auto moved = Result<std::unique_ptr<int>>(std::make_unique<int>(7));
  EXPECT_EQ(*std::move(moved).value(), 7);
}

TEST(ResultDeathTest, ValueOfAFailureNamesTheStatus) {
  EXPECT_DEATH(Half(3).value(), "InvalidArgument: odd");
  EXPECT_DEATH(STOCKPOT_CHECK(1 + 1 == 3, 42), "1 \\+ 1 == 3.*42");
}

TEST(DType, NamesAndSizes) {
  EXPECT_EQ(DTypeFromName("BF16"), DType::kBF16);
  EXPECT_EQ(DTypeFromName("bf16"), std::nullopt);
  for (int i = 0; i <= static_cast<int>(DType::kF8E5M2); ++i) {
    const DType dtype = static_cast<DType>(i);
    EXPECT_EQ(DTypeFromName(DTypeName(dtype)), dtype);
    EXPECT_GE(DTypeSize(dtype), 1);
  }
  EXPECT_EQ(DTypeSize(DType::kF64), 8);
}

TEST(DType, EverySixteenBitPatternSurvives) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float brain = FloatFromBF16(half);
    const float ieee = FloatFromF16(half);
    if (std::isnan(brain)) {
      EXPECT_TRUE(std::isnan(FloatFromBF16(BF16FromFloat(brain))));
    } else {
      EXPECT_EQ(BF16FromFloat(brain), half);
    }
    if (std::isnan(ieee)) {
      EXPECT_TRUE(std::isnan(FloatFromF16(F16FromFloat(ieee))));
    } else {
      EXPECT_EQ(F16FromFloat(ieee), half);
    }
  }
}

TEST(DType, RoundsToNearestEven) {
  EXPECT_EQ(BF16FromFloat(1.0f + 1.0f / 256), BF16FromFloat(1.0f));              // a tie, to even
  EXPECT_EQ(BF16FromFloat(1.0f + 3.0f / 256), BF16FromFloat(1.0f + 1.0f / 64));  // likewise, up
  EXPECT_EQ(BF16FromFloat(3.4e38f), 0x7f80);  // beyond the largest: infinity
  EXPECT_EQ(BF16FromFloat(-0.0f), 0x8000);
}

TEST(AlignedBuffer, GrowsAndKeepsItsAlignment) {
  AlignedBuffer<float> buffer;
  for (const int64_t count : {1, 100, 50, 1000}) {
    float* data = buffer.Reserve(count);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % kCacheLineBytes, 0u);
    EXPECT_GE(buffer.capacity(), count);
    data[count - 1] = 1;
  }
  const float* before = buffer.data();
  EXPECT_EQ(buffer.Reserve(10), before);
}

TEST(ThreadPool, CoversEveryIndexOnce) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const int size : {1, 2, 3, 7}) {
    ThreadPool threads(size);
    EXPECT_EQ(threads.size(), size);
    for (int round = 0; round < 300; ++round) {
      const int64_t n = static_cast<int64_t>(random() % 200);
      const int64_t grain = 1 + static_cast<int64_t>(random() % 20);
      std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
      threads.ParallelFor(n, grain, [&](int64_t begin, int64_t end) {
        EXPECT_LE(end - begin, grain);
        for (int64_t i = begin; i < end; ++i) visits[i].fetch_add(1);
      });
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(visits[i].load(), 1) << i;
    }
  }
}

TEST(ThreadPool, ResultsOfALoopAreVisibleAfterIt) {
  ThreadPool threads(3);
  std::vector<int64_t> values(1000);
  for (int round = 0; round < 200; ++round) {
    threads.ParallelFor(1000, 10, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] += i;  // not atomic: ThreadSanitizer watches
    });
  }
  for (int64_t i = 0; i < 1000; ++i) EXPECT_EQ(values[i], 200 * i);
}

TEST(ThreadPool, CallersTakeTurns) {
  ThreadPool threads(2);
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        threads.ParallelFor(50, 5, [&](int64_t begin, int64_t end) { sum += end - begin; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum.load(), 4 * 100 * 50);
}

TEST(ThreadPool, AllThreadsWork) {
  ThreadPool threads(3);
  std::atomic<int> inside{0};
  std::atomic<bool> met{false};
  // Ranges that wait for one another can only end when three threads run them.
  threads.ParallelFor(3, 1, [&](int64_t, int64_t) {
    if (inside.fetch_add(1) + 1 == 3) met = true;
    while (!met) std::this_thread::yield();
  });
  EXPECT_TRUE(met);
}

double ProcessSeconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

TEST(ThreadPool, IdleThreadsSleep) {
  ThreadPool threads(3);
  std::atomic<int64_t> sum{0};
  const auto work = [&] {
    threads.ParallelFor(100, 1, [&](int64_t begin, int64_t) { sum += begin; });
  };
  work();
  // Windows of 20 ms until one costs under a tenth of it; a pool that spins never gets there.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  double used = 1;
  while (used > 2e-3 && std::chrono::steady_clock::now() < deadline) {
    const double before = ProcessSeconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    used = ProcessSeconds() - before;
  }
  EXPECT_LE(used, 2e-3);
  work();  // and they wake again
  EXPECT_EQ(sum.load(), 2 * 99 * 100 / 2);
}

TEST(Device, ReportsWhatAnswers) {
  const DeviceReport report = ProbeDevices();
  EXPECT_FALSE(report.simd_target.empty());
  EXPECT_NE(report.simd_target, "Unknown");
  if (report.cuda.empty()) {
    EXPECT_FALSE(report.cuda_reason.empty());
  } else {
    EXPECT_TRUE(report.cuda_compiled);
    EXPECT_GT(report.cuda[0].memory_bytes, 0);
  }
}

}  // namespace
}  // namespace stockpot
