// What the engine calls, and what a target may call back. The engine is libFuzzer where the build
// has it (cmake --preset fuzz), and replay_main.cc elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

extern "C" {
// The target: anything but a return of 0 is a bug of the target, a crash or a failed CHECK a
// finding.
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Optional: changes data[0, size) in place, up to max_size bytes; returns the new size.
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed);

// The engine's own mutation, for mutators to fall back on.
size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
}

namespace stockpot::fuzz {

inline std::string_view AsText(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}
inline std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace stockpot::fuzz
