// What clang 14 lacks: _Float16 on x86 without AVX512-FP16. Included before everything in the build
// of the fuzzers (CMakePresets.json), and nowhere else. Conversions are those of _Float16, bit for
// bit: to the nearest, ties to even; NaN becomes quiet.
#pragma once

#if defined(__clang__) && __clang_major__ < 15 && !defined(__AVX512FP16__)

#include <bit>
#include <cstdint>

class StockpotFuzzHalf {
 public:
  StockpotFuzzHalf() = default;
  explicit StockpotFuzzHalf(float f) : bits_(FromFloat(f)) {}
  explicit operator float() const {
    const uint32_t sign = uint32_t{bits_ & 0x8000u} << 16, rest = bits_ & 0x7fffu;
    const uint32_t quiet = rest > 0x7c00u ? 0x400000u : 0;
    if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | quiet | rest << 13);
    if (rest >= 0x400u) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
    return (sign != 0 ? -0x1p-24f : 0x1p-24f) * static_cast<float>(rest);
  }

 private:
  static uint16_t FromFloat(float f) {
    const uint32_t bits = std::bit_cast<uint32_t>(f);
    const uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t half = 0x7c00u;
    if (rest > 0x7f800000u) {
      half = 0x7e00u | (rest >> 13 & 0x3ffu);
    } else if (rest < 0x38800000u) {  // below 2^-14: one step is 2^-24, as of floats at 0.5
      half = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
    } else if (rest < 0x47800000u) {
      half = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
    }
    return static_cast<uint16_t>(sign | half);
  }

  uint16_t bits_;
};
#define _Float16 StockpotFuzzHalf

#endif
