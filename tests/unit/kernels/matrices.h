// Random matrices of the kernel tests: with guard rows of stride, of any weight dtype,
// reproducible.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/base/view.h"

namespace stockpot {

using Random = std::mt19937_64;

inline float Gaussian(Random& random) { return std::normal_distribution<float>()(random); }

// A weight that owns its memory. Rows lie `padding` elements apart, and the first element is not
// aligned to anything but its own size.
class OwnedWeight {
 public:
  OwnedWeight(DType dtype, int64_t rows, int64_t cols, int64_t padding = 0)
      : dtype_(dtype), rows_(rows), cols_(cols), stride_(cols + padding) {
    // Exactly what is needed: AddressSanitizer sees a read past the last element.
    const int64_t elements = rows == 0 ? 0 : (rows - 1) * stride_ + cols;
    bytes_.resize((elements + 1) * DTypeSize(dtype));
  }

  static OwnedWeight Gaussian(DType dtype, int64_t rows, int64_t cols, float sigma, Random& random,
                              int64_t padding = 0) {
    OwnedWeight w(dtype, rows, cols, padding);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) w.Set(r, c, sigma * stockpot::Gaussian(random));
    }
    return w;
  }

  void Set(int64_t r, int64_t c, float value) {
    char* p = bytes_.data() + (1 + r * stride_ + c) * DTypeSize(dtype_);
    if (dtype_ == DType::kF32) {
      std::memcpy(p, &value, sizeof value);
    } else {
      const uint16_t bits = dtype_ == DType::kBF16 ? BF16FromFloat(value) : F16FromFloat(value);
      std::memcpy(p, &bits, sizeof bits);
    }
  }

  WeightMatrix view() const {
    return {bytes_.data() + DTypeSize(dtype_), dtype_, rows_, cols_, stride_};
  }

 private:
  DType dtype_;
  int64_t rows_, cols_, stride_;
  std::vector<char> bytes_;
};

// A float matrix that owns its memory.
class OwnedFloats {
 public:
  OwnedFloats(int64_t rows, int64_t cols, int64_t padding = 0, float fill = 0)
      : rows_(rows),
        cols_(cols),
        stride_(cols + padding),
        values_(rows == 0 ? 0 : (rows - 1) * stride_ + cols, fill) {}

  static OwnedFloats Gaussian(int64_t rows, int64_t cols, Random& random, int64_t padding = 0) {
    OwnedFloats m(rows, cols, padding);
    for (float& v : m.values_) v = stockpot::Gaussian(random);
    return m;
  }

  FloatMatrix view() { return {values_.data(), rows_, cols_, stride_}; }
  ConstFloatMatrix view() const { return {values_.data(), rows_, cols_, stride_}; }
  ConstFloatMatrix cview() const { return view(); }

 private:
  int64_t rows_, cols_, stride_;
  std::vector<float> values_;
};

}  // namespace stockpot
