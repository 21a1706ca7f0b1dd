// kernels/base/cuda_mma.cuh on the host. Included by cuda_emulation.h.
//
// Tensor cores do not round as IEEE does: the products of a step and the accumulator are aligned to
// the largest of them, cut there, added, and the sum is cut to float32 (Fasi, Higham, Mikaitis,
// Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021). MmaBF16 here does so eight products
// at a time and keeps no guard bit, which is no better than any card measured there: what passes
// its tolerance here does not owe it to a kinder sum.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "kernels/base/dtype.h"
#include "tests/unit/kernels/cuda_emulation/block.h"

#define STOCKPOT_DYNAMIC_SHARED(type, name) \
  type* name = reinterpret_cast<type*>(::stockpot::emulation::DynamicSharedMemory())

namespace stockpot {
namespace emulation {

// A float64 cut towards zero to float32.
inline float CutToFloat(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits &= ~((uint64_t{1} << 29) - 1);
  std::memcpy(&value, &bits, sizeof bits);
  return static_cast<float>(value);
}

// accumulator + the eight products, as a tensor core adds them.
inline float TensorCoreSum(float accumulator, const double (&products)[8]) {
  double largest = std::fabs(accumulator);
  double plain = accumulator;
  for (const double product : products) {
    largest = std::fmax(largest, std::fabs(product));
    plain += product;
  }
  if (largest == 0 || !std::isfinite(plain)) return static_cast<float>(plain);
  int exponent;
  std::frexp(largest, &exponent);
  const double unit = std::ldexp(1.0, exponent - 24);  // of the 24th bit of the largest
  const double scale = std::ldexp(1.0, 24 - exponent);
  int64_t sum = static_cast<int64_t>(accumulator * scale);  // towards zero
  for (const double product : products) sum += static_cast<int64_t>(product * scale);
  return CutToFloat(static_cast<double>(sum) * unit);
}

}  // namespace emulation

inline void MmaBF16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Fragments {
    uint32_t a[4], b[2];
  };
  const Fragments mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const emulation::Exchanged all = emulation::Exchange(0xffffffffu, &mine, sizeof mine);
  if (all.lanes != 0xffffffffu) throw std::logic_error("mma.sync without all lanes of the warp");
  const auto half = [](uint32_t word, int high) {
    return static_cast<double>(FloatFromBF16(static_cast<uint16_t>(high ? word >> 16 : word)));
  };
  const int g = emulation::Lane() / 4;
  const int t = emulation::Lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int lower = i / 2;  // rows 8 .. 15
    const int column = 2 * t + i % 2;
    for (int step = 0; step < 2; ++step) {  // columns 0 .. 7 of A, then 8 .. 15
      double products[8];
      for (int q = 0; q < 4; ++q) {
        Fragments of_a, of_b;
        std::memcpy(&of_a, all.slots[g * 4 + q], sizeof of_a);
        std::memcpy(&of_b, all.slots[column * 4 + q], sizeof of_b);
        for (int high = 0; high < 2; ++high) {
          products[2 * q + high] = half(of_a.a[lower + 2 * step], high) * half(of_b.b[step], high);
        }
      }
      d[i] = emulation::TensorCoreSum(d[i], products);
    }
  }
}

template <uint8_t kTable>
uint32_t Lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  if (kTable & 0x01) result |= ~a & ~b & ~c;
  if (kTable & 0x02) result |= ~a & ~b & c;
  if (kTable & 0x04) result |= ~a & b & ~c;
  if (kTable & 0x08) result |= ~a & b & c;
  if (kTable & 0x10) result |= a & ~b & ~c;
  if (kTable & 0x20) result |= a & ~b & c;
  if (kTable & 0x40) result |= a & b & ~c;
  if (kTable & 0x80) result |= a & b & c;
  return result;
}

inline uint32_t PackHighHalves(uint32_t low, uint32_t high) {
  return (high & 0xffff0000u) | (low >> 16);
}

inline uint32_t PackBF16(float low, float high) {
  return BF16FromFloat(low) | static_cast<uint32_t>(BF16FromFloat(high)) << 16;
}

inline void CopyAsync16(void* shared, const void* global, int source_bytes) {
  emulation::BeginCopy(shared, global, 16, static_cast<size_t>(source_bytes));
}
inline void CopyAsync4(void* shared, const void* global) {
  emulation::BeginCopy(shared, global, 4, 4);
}
inline void CommitCopies() { emulation::CommitCopies(); }
template <int kPending>
void WaitForCopies() {
  emulation::WaitForCopies(kPending);
}

}  // namespace stockpot
