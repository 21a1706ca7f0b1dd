// Loading weights of any weight dtype as float32 vectors. Included once per SIMD target.
#include <cstdint>

#include "kernels/base/dtype.h"

#if defined(STOCKPOT_WEIGHT_LOAD_TOGGLE) == defined(HWY_TARGET_TOGGLE)
#ifdef STOCKPOT_WEIGHT_LOAD_TOGGLE
#undef STOCKPOT_WEIGHT_LOAD_TOGGLE
#else
#define STOCKPOT_WEIGHT_LOAD_TOGGLE
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {

// Element types by which the kernels are instantiated: distinct although both hold 16 bits.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// Calls body(T{}) with T = float, F16 or BF16. REQUIRES: IsWeightDType(dtype).
template <class Body>
HWY_INLINE void WithWeightType(DType dtype, const Body& body) {
  if (dtype == DType::kF32) return body(float{});
  if (dtype == DType::kF16) return body(F16{});
  return body(BF16{});
}

// Lanes(d) consecutive elements from any alignment, exactly, as float32.
template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> LoadAsFloat(D d, const float* p) {
  return hwy::HWY_NAMESPACE::LoadU(d, p);
}

template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> LoadAsFloat(D d, const BF16* p) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto wide = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(d, hn::ShiftLeft<16>(wide));
}

template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> LoadAsFloat(D d, const F16* p) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::Rebind<hwy::float16_t, D> d16;
  const auto value = hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_ARCH_ARM_A64
  return value;  // the processor's own conversion
#else
  // Highway's takes infinity and NaN for numbers above 65504: make them here.
  const hn::Rebind<uint16_t, D> du16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(p)));
  const auto exponent = hn::Set(d32, 0x7C00u);
  const auto special = hn::Eq(hn::And(bits, exponent), exponent);
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d32, 0x8000u)));
  const auto mantissa = hn::ShiftLeft<13>(hn::And(bits, hn::Set(d32, 0x03FFu)));
  const auto made = hn::Or(hn::Or(sign, mantissa), hn::Set(d32, 0x7F800000u));
  return hn::IfThenElse(hn::RebindMask(d, special), hn::BitCast(d, made), value);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#endif  // per target
