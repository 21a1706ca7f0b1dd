// The emulator itself: right kernels give right values in every order of threads, wrong ones are
// caught.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "tests/unit/kernels/cuda_emulation/cuda_emulation.h"

namespace stockpot {
namespace {

using emulation::Schedule;
using emulation::ThreadOrder;

const Schedule kSchedules[] = {{ThreadOrder::kForward},
                               {ThreadOrder::kReverse},
                               {ThreadOrder::kShuffled, 1},
                               {ThreadOrder::kShuffled, 2}};

// Sums 256 values of a block: warps by shuffle, then the warps' sums through shared memory.
void ReduceKernel(const int* in, int* out) {
  STOCKPOT_SHARED(int, sums, [8]);
  int value = in[blockIdx.x * blockDim.x + threadIdx.x];
  for (int half = 16; half > 0; half /= 2) value += __shfl_xor_sync(0xffffffffu, value, half);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = std::accumulate(sums, sums + 8, 0);
}

TEST(CudaEmulation, ReducesInEveryOrder) {
  std::vector<int> in(3 * 256);
  std::iota(in.begin(), in.end(), -100);
  for (const Schedule& schedule : kSchedules) {
    std::vector<int> out(3);
    EmulateLaunch(schedule, {3}, {256}, ReduceKernel, in.data(), out.data());
    for (int block = 0; block < 3; ++block) {
      const auto begin = in.begin() + 256 * block;
      EXPECT_EQ(out[block], std::accumulate(begin, begin + 256, 0));
    }
  }
}

void BallotKernel(unsigned* out) {
  const unsigned bits = __ballot_sync(0xffffffffu, threadIdx.x % 3 == 0);
  if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = bits;
}

TEST(CudaEmulation, BallotHoldsEachLane) {
  for (const Schedule& schedule : kSchedules) {
    std::vector<unsigned> out(2);
    EmulateLaunch(schedule, {1}, {64}, BallotKernel, out.data());
    for (unsigned thread = 0; thread < 64; ++thread) {
      EXPECT_EQ((out[thread / 32] >> (thread % 32)) & 1, thread % 3 == 0 ? 1u : 0u);
    }
  }
}

// Two masks in one warp meet apart; lanes that have ended are not waited for.
void HalvesKernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane == 31) return;
  const unsigned mask = lane < 16 ? 0xffffu : 0xffff0000u;
  out[lane] = __popc(__ballot_sync(mask, 1));
}

TEST(CudaEmulation, MasksMeetApart) {
  for (const Schedule& schedule : kSchedules) {
    std::vector<int> out(32);
    EmulateLaunch(schedule, {1}, {32}, HalvesKernel, out.data());
    for (int lane = 0; lane < 31; ++lane) EXPECT_EQ(out[lane], lane < 16 ? 16 : 15) << lane;
  }
}

// Reads a neighbour's value without a barrier between.
void RacyKernel(int* out) {
  STOCKPOT_SHARED(int, values, [64]);
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = values[63 - threadIdx.x];
}

TEST(CudaEmulation, MissingBarrierGivesWrongValues) {
  std::vector<int> out(64);
  EmulateLaunch({}, {1}, {64}, RacyKernel, out.data());
  int wrong = 0;
  for (int i = 0; i < 64; ++i) wrong += out[i] != 63 - i;
  EXPECT_GT(wrong, 0);
}

// Half of the threads wait for a barrier, half for a collective of the whole warp.
void DivergentKernel(int* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
  } else {
    __syncthreads();
  }
}

TEST(CudaEmulation, DivergentBarrierIsADeadlock) {
  std::vector<int> out(32);
  try {
    EmulateLaunch({}, {1}, {32}, DivergentKernel, out.data());
    FAIL() << "no deadlock reported";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("thread 0 at a warp collective"), std::string::npos)
        << error.what();
  }
}

void UnwrittenKernel(unsigned* out) {
  STOCKPOT_SHARED(unsigned, values, [4]);
  out[blockIdx.x] = values[0];
  values[0] = 1;  // the next block must not see it
}

TEST(CudaEmulation, UnwrittenSharedMemoryShows) {
  std::vector<unsigned> out(2);
  EmulateLaunch({}, {2}, {1}, UnwrittenKernel, out.data());
  EXPECT_EQ(out[0], 0xA5A5A5A5u);
  EXPECT_EQ(out[1], 0xA5A5A5A5u);
}

}  // namespace
}  // namespace stockpot
