// Reading golden/*.golden; the format is described in golden/make_golden.py.
#pragma once

#include <bit>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "tests/unit/kernels/matrices.h"

namespace stockpot {

// Walks the tokens of the file. Tests run in the project's root.
class GoldenFile {
 public:
  explicit GoldenFile(const std::string& name = "bitdelta.golden")
      : in_("tests/unit/kernels/golden/" + name) {}

  bool ok() const { return in_.is_open(); }

  // The next case's name, or "" at the end.
  std::string NextCase() {
    std::string name;
    in_ >> name;
    return name;
  }

  int64_t Number() {
    int64_t value = -1;
    in_ >> std::dec >> value;
    return value;
  }

  DType Type() {
    std::string name;
    in_ >> name;
    return DTypeFromName(name).value();
  }

  std::vector<float> Floats(int64_t count) {
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(std::bit_cast<float>(static_cast<uint32_t>(Bits())));
    }
    return values;
  }

  std::vector<double> Doubles(int64_t count) {
    std::vector<double> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(std::bit_cast<double>(Bits()));
    return values;
  }

  std::vector<uint8_t> Bytes(int64_t count) {
    std::vector<uint8_t> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<uint8_t>(Bits()));
    return values;
  }

  OwnedWeight Weight(DType dtype, int64_t rows, int64_t cols) {
    OwnedWeight weight(dtype, rows, cols);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const uint64_t bits = Bits();
        const uint16_t half = static_cast<uint16_t>(bits);
        weight.Set(r, c,
                   dtype == DType::kF32    ? std::bit_cast<float>(static_cast<uint32_t>(bits))
                   : dtype == DType::kBF16 ? FloatFromBF16(half)
                                           : FloatFromF16(half));
      }
    }
    return weight;
  }

 private:
  uint64_t Bits() {
    uint64_t value = 0;
    in_ >> std::hex >> value;
    return value;
  }

  std::ifstream in_;
};

}  // namespace stockpot
