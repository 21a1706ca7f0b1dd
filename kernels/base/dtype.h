// Element types of tensors, named as safetensors names them, and the float conversions of the
// two 16-bit ones. Thread promise: pure functions.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

namespace stockpot {

enum class DType : uint8_t {
  kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU64, kU32, kU16, kU8, kBool, kF8E4M3, kF8E5M2,
};

// "F64", "F32", "F16", "BF16", "I64", ..., "BOOL", "F8_E4M3", "F8_E5M2".
std::string_view DTypeName(DType dtype);
std::optional<DType> DTypeFromName(std::string_view name);
int64_t DTypeSize(DType dtype);  // bytes

// The types a weight can have where arithmetic is done on it: F32, F16, BF16.
constexpr bool IsWeightDType(DType d) {
  return d == DType::kF32 || d == DType::kF16 || d == DType::kBF16;
}

inline float FloatFromBF16(uint16_t b) { return std::bit_cast<float>(uint32_t{b} << 16); }

// Round to nearest even; NaN stays NaN.
inline uint16_t BF16FromFloat(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x0040u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float FloatFromF16(uint16_t h) {
  _Float16 v;
  std::memcpy(&v, &h, sizeof v);
  return static_cast<float>(v);
}

inline uint16_t F16FromFloat(float f) {
  const _Float16 v = static_cast<_Float16>(f);
  uint16_t h;
  std::memcpy(&h, &v, sizeof h);
  return h;
}

// One element of a weight of dtype F32 / F16 / BF16 as float. REQUIRES: IsWeightDType(dtype).
inline float LoadWeight(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == DType::kBF16 ? FloatFromBF16(bits) : FloatFromF16(bits);
}

}  // namespace stockpot
