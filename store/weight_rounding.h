// A weight computed in float64 becomes an element of its tensor with ONE rounding (to nearest,
// even). float64 -> float32 -> bf16 would round twice and can miss by one unit in the last place.
// Thread promise: pure functions.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/base/dtype.h"

namespace stockpot {

// To float32 by "round to odd": an inexact value gets an odd last bit, so that a second rounding,
// to a type that is at least two bits shorter, sees on which side of a tie it lay. NaN and infinity
// stay.
inline float FloatRoundedToOdd(double value) {
  const float nearest = static_cast<float>(value);
  const uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const bool inexact = static_cast<double>(nearest) != value && value == value;
  // Where `nearest` is even, the odd one of the two floats around `value` is its neighbour towards
  // `value`. Without branches: which way it goes is as good as random.
  const bool away_from_zero = (value > 0) == (value > static_cast<double>(nearest));
  const uint32_t step = away_from_zero ? 1u : ~0u;
  const uint32_t moves = 0u - static_cast<uint32_t>(inexact & !(bits & 1));
  return std::bit_cast<float>(bits + (step & moves));
}

// Stores `value` as element `index` of a weight of dtype F32, F16 or BF16.
// REQUIRES: IsWeightDType(dtype).
inline void StoreWeight(double value, DType dtype, void* data, int64_t index) {
  if (dtype == DType::kF32) {
    static_cast<float*>(data)[index] = static_cast<float>(value);
    return;
  }
  const float odd = FloatRoundedToOdd(value);
  static_cast<uint16_t*>(data)[index] =
      dtype == DType::kBF16 ? BF16FromFloat(odd) : F16FromFloat(odd);
}

}  // namespace stockpot
