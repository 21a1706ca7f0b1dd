// Reading weights of any weight dtype in device code. Include cuda_platform.cuh (or the emulation)
// first.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace stockpot {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// One element as float32, exactly. REQUIRES: IsWeightDType(dtype).
__device__ __forceinline__ float LoadDeviceWeight(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  if (dtype == DType::kF16) return FloatFromHalfBits(bits);
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

// The sum over the lanes of a warp, in the lane that asks for lane 0's: halves are folded, 16
// first.
template <typename T>
__device__ __forceinline__ T FoldWarp(T value) {
  for (int half = 16; half > 0; half /= 2) value += __shfl_xor_sync(kAllLanes, value, half);
  return value;
}

}  // namespace stockpot
