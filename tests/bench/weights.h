// The weights that kernel benches walk through: one large linear layer, several times, more than
// 512 MB in all, so that no cache keeps them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/base/view.h"

namespace stockpot {

inline constexpr int64_t kBenchDOut = 11008;
inline constexpr int64_t kBenchDIn = 4096;
inline constexpr int64_t kBenchElements = kBenchDOut * kBenchDIn;
inline constexpr int64_t kBenchRotateBytes = int64_t{513} << 20;
inline constexpr char kBenchSizes[] = "11008 x 4096 bf16, 6 weights rotating";

// Copies that take more than kBenchRotateBytes together: 6 of bf16, 3 of fp32.
int64_t BenchCopies(DType dtype);

// BenchCopies(dtype) weights near N(0, 0.02^2). BF16 or F32.
class RotatingWeights {
 public:
  explicit RotatingWeights(DType dtype);

  int64_t size() const { return static_cast<int64_t>(weights_.size()); }
  WeightMatrix operator[](int64_t i) const;
  void* data(int64_t i) { return weights_[static_cast<size_t>(i)].data(); }
  int64_t bytes() const { return kBenchElements * DTypeSize(dtype_); }  // of one
  std::vector<const void*> Buffers() const;

 private:
  DType dtype_;
  std::vector<AlignedBuffer<std::byte>> weights_;
};

// Random canonical signs of one weight.
std::vector<uint8_t> RandomSigns(uint64_t seed, int64_t planes);

}  // namespace stockpot
