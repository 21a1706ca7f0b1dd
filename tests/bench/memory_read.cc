#include "tests/bench/memory_read.h"

#include <atomic>
#include <string>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/memory_read.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kStepBytes = 256;  // of each stream

template <int kStreams, bool kAhead>
uint64_t Sum(const uint8_t* a, const uint8_t* b, int64_t bytes, int64_t ahead) {
  const hn::ScalableTag<uint8_t> d;
  constexpr int kLanes = hn::MaxLanes(d);
  constexpr int kVectors = 4;
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
  for (int64_t i = 0; i < bytes; i += kStepBytes) {
    if constexpr (kAhead) {
      for (int64_t line = 0; line < kStepBytes; line += 64) {
        hwy::Prefetch(a + i + ahead + line);
        if constexpr (kStreams == 2) hwy::Prefetch(b + i + ahead + line);
      }
    }
    for (int64_t j = i; j < i + kStepBytes; j += kVectors * kLanes) {
      for (const uint8_t* p : {a, b}) {
        sum0 = hn::Xor(sum0, hn::LoadU(d, p + j));
        sum1 = hn::Xor(sum1, hn::LoadU(d, p + j + kLanes));
        sum2 = hn::Xor(sum2, hn::LoadU(d, p + j + 2 * kLanes));
        sum3 = hn::Xor(sum3, hn::LoadU(d, p + j + 3 * kLanes));
        if constexpr (kStreams == 1) break;
      }
    }
  }
  return hn::GetLane(hn::Xor(hn::Xor(sum0, sum1), hn::Xor(sum2, sum3)));
}

uint64_t SumStreams(const uint8_t* a, const uint8_t* b, int64_t bytes, int64_t ahead) {
  if (b == nullptr) {
    return ahead > 0 ? Sum<1, true>(a, a, bytes, ahead) : Sum<1, false>(a, a, bytes, 0);
  }
  return ahead > 0 ? Sum<2, true>(a, b, bytes, ahead) : Sum<2, false>(a, b, bytes, 0);
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {
namespace {
HWY_EXPORT(SumStreams);
}  // namespace

void ReadMemory(const std::vector<const void*>& buffers, int64_t bytes, int streams,
                const MemoryReadLoop& loop, ThreadPool& threads) {
  std::atomic<uint64_t> sink{0};  // so that no load is left out
  for (size_t i = 0; i + streams <= buffers.size(); i += streams) {
    const auto* a = static_cast<const uint8_t*>(buffers[i]);
    const auto* b = streams == 2 ? static_cast<const uint8_t*>(buffers[i + 1]) : nullptr;
    threads.ParallelFor(bytes, loop.range_bytes, [&](int64_t begin, int64_t end) {
      sink += HWY_DYNAMIC_DISPATCH(SumStreams)(a + begin, b == nullptr ? nullptr : b + begin,
                                               end - begin, loop.ahead_bytes);
    });
  }
}

void AddMemoryRead(Comparison& comparison, const std::vector<const void*>& buffers, int64_t bytes,
                   int streams, ThreadPool& threads) {
  for (const MemoryReadLoop& loop : kMemoryReadLoops) {
    comparison.Add("read/" + std::to_string(loop.range_bytes >> 10) + "Ki_ahead" +
                       std::to_string(loop.ahead_bytes),
                   [=, &threads] { ReadMemory(buffers, bytes, streams, loop, threads); });
  }
}

}  // namespace stockpot
#endif  // HWY_ONCE
