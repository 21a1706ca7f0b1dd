// Borrowed matrices. A view never owns and never outlives the call it is passed to.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace stockpot {

// [rows, cols] of float, row r at data + r * stride (stride in elements, >= cols).
struct FloatMatrix {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  float* row(int64_t r) const { return data + r * stride; }
};

struct ConstFloatMatrix {
  const float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  const float* row(int64_t r) const { return data + r * stride; }
};

// A weight [rows = d_out, cols = d_in] of F32, F16 or BF16; stride in elements.
struct WeightMatrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  const void* row(int64_t r) const {
    return static_cast<const char*>(data) + r * stride * DTypeSize(dtype);
  }
  float at(int64_t r, int64_t c) const { return LoadWeight(row(r), dtype, c); }
};

}  // namespace stockpot
