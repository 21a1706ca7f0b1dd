// How LoraDelta lies in memory. For the kernels and their tests only.
//
//   a[rank][columns]              row-major, columns padded with zeros to kLoraPadding: a row never
//                                 needs a tail
//   b[output / 16][rank][16]      16 outputs beside each other, so that the expansion broadcasts
//                                 one hidden value to as many outputs as there are lanes and no sum
//                                 is ever folded, whatever the rank; outputs padded with zeros
#pragma once

#include <cstdint>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/lora/lora_linear.h"

namespace stockpot {

inline constexpr int64_t kLoraPadding = 16;    // columns; a multiple of every target's lanes
inline constexpr int64_t kLoraBlockRows = 16;  // outputs

struct LoraDelta::Layout {
  int64_t d_out = 0;
  int64_t d_in = 0;
  int64_t rank = 0;
  int64_t a_stride = 0;         // elements
  DType a_dtype = DType::kF32;  // F32 or BF16
  DType b_dtype = DType::kF32;
  AlignedBuffer<unsigned char> a;
  AlignedBuffer<unsigned char> b;

  int64_t blocks() const { return (d_out + kLoraBlockRows - 1) / kLoraBlockRows; }
  int64_t BIndex(int64_t o, int64_t k) const {
    return (o / kLoraBlockRows * rank + k) * kLoraBlockRows + o % kLoraBlockRows;
  }
  // Elements as float32, B with the scale. For the reference and the tests.
  float A(int64_t k, int64_t i) const { return LoadWeight(a.data(), a_dtype, k * a_stride + i); }
  float B(int64_t o, int64_t k) const { return LoadWeight(b.data(), b_dtype, BIndex(o, k)); }
};

// InvalidArgument naming the field of `args` whose shape or index does not fit.
Status CheckLoraArgs(const LoraLinearArgs& args);

}  // namespace stockpot
