// Turns the bytes a fuzzer gives into decisions, front to back. When they run out everything is
// zero, so that every input is a whole one. Borrows the bytes. Thread promise: one thread.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>

namespace stockpot::fuzz {

class ByteReader {
 public:
  explicit ByteReader(std::span<const uint8_t> bytes) : left_(bytes) {}

  bool empty() const { return left_.empty(); }

  uint8_t Byte() {
    if (left_.empty()) return 0;
    const uint8_t byte = left_[0];
    left_ = left_.subspan(1);
    return byte;
  }

  // Little-endian.
  template <std::integral T>
  T Integer() {
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{Byte()} << (8 * i);
    return static_cast<T>(value);
  }

  // [0, limit); 0 where limit is 0. Takes one byte where that is enough.
  size_t Below(size_t limit) {
    if (limit <= 1) return 0;
    return limit <= 256 ? Byte() % limit : Integer<uint32_t>() % limit;
  }

  bool OneIn(size_t n) { return Below(n) == n - 1; }  // false once the bytes ran out, for n > 1

  template <typename Choices>
  const auto& Pick(const Choices& choices) {
    return *(std::begin(choices) + static_cast<std::ptrdiff_t>(Below(std::size(choices))));
  }

  std::string String(size_t max_bytes) {
    const size_t size = std::min(Below(max_bytes + 1), left_.size());
    const std::string text(reinterpret_cast<const char*>(left_.data()), size);
    left_ = left_.subspan(size);
    return text;
  }

  std::string Rest() {
    const std::string text(reinterpret_cast<const char*>(left_.data()), left_.size());
    left_ = {};
    return text;
  }

 private:
  std::span<const uint8_t> left_;
};

}  // namespace stockpot::fuzz
