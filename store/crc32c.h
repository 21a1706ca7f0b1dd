// CRC32C (Castagnoli), the checksum of pack records. SSE4.2 where the CPU has it, tables elsewhere.
// Thread promise: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace stockpot {

uint32_t Crc32c(std::span<const std::byte> data);

// The portable implementation: the reference that tests compare the other with.
uint32_t Crc32cPortable(std::span<const std::byte> data);

}  // namespace stockpot
