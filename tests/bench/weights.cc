#include "tests/bench/weights.h"

#include <cstring>
#include <random>

#include "kernels/bitdelta/signs.h"

namespace stockpot {
namespace {

// A table of draws, walked at random offsets: half a gigabyte of Gaussian numbers would take a
// minute to draw.
constexpr int64_t kDraws = 1 << 16;

std::vector<std::byte> Draws(DType dtype) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<std::byte> draws(static_cast<size_t>(kDraws * DTypeSize(dtype)));
  for (int64_t i = 0; i < kDraws; ++i) {
    const float value = normal(random);
    if (dtype == DType::kF32) {
      std::memcpy(draws.data() + i * 4, &value, 4);
    } else {
      const uint16_t bits = BF16FromFloat(value);
      std::memcpy(draws.data() + i * 2, &bits, 2);
    }
  }
  return draws;
}

}  // namespace

int64_t BenchCopies(DType dtype) {
  return kBenchRotateBytes / (kBenchElements * DTypeSize(dtype)) + 1;
}

RotatingWeights::RotatingWeights(DType dtype) : dtype_(dtype) {
  const std::vector<std::byte> draws = Draws(dtype);
  const int64_t row_bytes = kBenchDIn * DTypeSize(dtype);
  std::mt19937_64 random(2);
  weights_.resize(static_cast<size_t>(BenchCopies(dtype)));
  for (AlignedBuffer<std::byte>& weight : weights_) {
    std::byte* out = weight.Reserve(bytes());
    for (int64_t r = 0; r < kBenchDOut; ++r) {
      const int64_t start = static_cast<int64_t>(random() % (kDraws - kBenchDIn));
      std::memcpy(out + r * row_bytes, draws.data() + start * DTypeSize(dtype), row_bytes);
    }
  }
}

WeightMatrix RotatingWeights::operator[](int64_t i) const {
  return {weights_[static_cast<size_t>(i)].data(), dtype_, kBenchDOut, kBenchDIn, kBenchDIn};
}

std::vector<const void*> RotatingWeights::Buffers() const {
  std::vector<const void*> buffers;
  for (const AlignedBuffer<std::byte>& weight : weights_) buffers.push_back(weight.data());
  return buffers;
}

std::vector<uint8_t> RandomSigns(uint64_t seed, int64_t planes) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> signs(static_cast<size_t>(planes * SignBytes(kBenchDOut, kBenchDIn)));
  for (size_t i = 0; i < signs.size(); i += 8) {
    const uint64_t bits = random();
    std::memcpy(signs.data() + i, &bits, 8);
  }
  return signs;
}

}  // namespace stockpot
