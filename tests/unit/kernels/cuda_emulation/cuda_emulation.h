// The CUDA language, kernels/base/cuda_platform.cuh and cuda_mma.cuh, as far as our kernels use
// them, on the host. Include before a *_cuda.cuh, in place of the platform file; launch with
// EmulateLaunch. No CUDA toolkit is needed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/base/dtype.h"
#include "tests/unit/kernels/cuda_emulation/block.h"
#include "tests/unit/kernels/cuda_emulation/cuda_mma_emulation.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define threadIdx (::stockpot::emulation::ThreadIndex())
#define blockIdx (::stockpot::emulation::BlockIndex())
#define blockDim (::stockpot::emulation::BlockSize())
#define gridDim (::stockpot::emulation::GridSize())

// One array for the block: the lambda's static names the place that declares it.
#define STOCKPOT_SHARED(type, name, ...)   \
  using name##_type = type __VA_ARGS__;    \
  static const char name##_place = 0;      \
  auto& name = *static_cast<name##_type*>( \
      ::stockpot::emulation::SharedMemory(&name##_place, sizeof(name##_type)))

inline void __syncthreads() { ::stockpot::emulation::BlockBarrier(); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  static_assert(sizeof(T) <= ::stockpot::emulation::kExchangeBytes);
  const auto all = ::stockpot::emulation::Exchange(mask, &value, sizeof value);
  T result;
  std::memcpy(&result, all.slots[::stockpot::emulation::Lane() ^ lane_mask], sizeof result);
  return result;
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto all = ::stockpot::emulation::Exchange(mask, &predicate, sizeof predicate);
  unsigned result = 0;
  for (int lane = 0; lane < ::stockpot::emulation::kWarpLanes; ++lane) {
    int value;
    std::memcpy(&value, all.slots[lane], sizeof value);
    if (((all.lanes >> lane) & 1) && value != 0) result |= 1u << lane;
  }
  return result;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  static_assert(sizeof(T) <= ::stockpot::emulation::kExchangeBytes);
  const auto all = ::stockpot::emulation::Exchange(mask, &value, sizeof value);
  T result;
  std::memcpy(&result, all.slots[lane % ::stockpot::emulation::kWarpLanes], sizeof result);
  return result;
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  ::stockpot::emulation::Exchange(mask, &mask, sizeof mask);
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

namespace stockpot {

inline float FloatFromHalfBits(uint16_t bits) { return FloatFromF16(bits); }

// kernel<<<grid, block>>>(arguments...)
template <typename... Parameters, typename... Arguments>
void EmulateLaunch(const emulation::Schedule& schedule, emulation::Dim3 grid, emulation::Dim3 block,
                   void (*kernel)(Parameters...), const Arguments&... arguments) {
  emulation::RunGrid(grid, block, schedule, [&] { kernel(arguments...); });
}

// kernel<<<grid, block, dynamic_bytes>>>(arguments...)
template <typename... Parameters, typename... Arguments>
void EmulateLaunch(const emulation::Schedule& schedule, emulation::Dim3 grid, emulation::Dim3 block,
                   size_t dynamic_bytes, void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
  emulation::RunGrid(
      grid, block, schedule, [&] { kernel(arguments...); }, dynamic_bytes);
}

}  // namespace stockpot
