#include "store/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace stockpot {
namespace {

// Slicing by 8: table[k][b] is the CRC of byte b followed by k zero bytes. Reflected polynomial.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables MakeTables() {
  Tables t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
    t[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xFF];
  }
  return t;
}

constexpr Tables kTables = MakeTables();

#if defined(__x86_64__)

// Three streams at once hide the latency of the crc32 instruction (3 cycles, one a cycle). Their
// CRCs are joined by advancing over the zero bytes of a block: multiplying by x^(8 * kBlockBytes)
// modulo the polynomial, tabulated for each byte of the CRC.
constexpr size_t kBlockBytes = 8192;

// CRC state after `bytes` zero bytes, for a state with one byte set: linear in the state.
constexpr uint32_t AdvanceZeros(uint32_t crc, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) crc = (crc >> 8) ^ kTables[0][crc & 0xFF];
  return crc;
}

using ShiftTable = std::array<std::array<uint32_t, 256>, 4>;

ShiftTable MakeShiftTable() {
  ShiftTable t{};
  for (size_t byte = 0; byte < 4; ++byte) {
    std::array<uint32_t, 8> of_bit{};
    for (size_t bit = 0; bit < 8; ++bit) {
      of_bit[bit] = AdvanceZeros(uint32_t{1} << (8 * byte + bit), kBlockBytes);
    }
    for (size_t value = 0; value < 256; ++value) {
      for (size_t bit = 0; bit < 8; ++bit) {
        if (value >> bit & 1) t[byte][value] ^= of_bit[bit];
      }
    }
  }
  return t;
}

uint32_t Shift(const ShiftTable& t, uint32_t crc) {
  return t[0][crc & 0xFF] ^ t[1][crc >> 8 & 0xFF] ^ t[2][crc >> 16 & 0xFF] ^ t[3][crc >> 24];
}

uint64_t Load64(const std::byte* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

__attribute__((target("sse4.2"))) uint32_t Crc32cSse42(std::span<const std::byte> data) {
  static const ShiftTable shift = MakeShiftTable();  // constant once made
  const std::byte* p = data.data();
  size_t left = data.size();
  uint64_t crc = 0xFFFFFFFFu;
  while (left >= 3 * kBlockBytes) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kBlockBytes; i += 8) {
      crc = _mm_crc32_u64(crc, Load64(p + i));
      second = _mm_crc32_u64(second, Load64(p + kBlockBytes + i));
      third = _mm_crc32_u64(third, Load64(p + 2 * kBlockBytes + i));
    }
    crc = Shift(shift, static_cast<uint32_t>(crc)) ^ second;
    crc = Shift(shift, static_cast<uint32_t>(crc)) ^ third;
    p += 3 * kBlockBytes;
    left -= 3 * kBlockBytes;
  }
  for (; left >= 8; left -= 8, p += 8) crc = _mm_crc32_u64(crc, Load64(p));
  auto tail = static_cast<uint32_t>(crc);
  for (; left > 0; --left, ++p) tail = _mm_crc32_u8(tail, static_cast<uint8_t>(*p));
  return ~tail;
}

#endif

}  // namespace

uint32_t Crc32cPortable(std::span<const std::byte> data) {
  const auto* p = reinterpret_cast<const uint8_t*>(data.data());
  size_t left = data.size();
  uint32_t crc = 0xFFFFFFFFu;
  for (; left >= 8; left -= 8, p += 8) {
    crc ^= uint32_t{p[0]} | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24;
    crc = kTables[7][crc & 0xFF] ^ kTables[6][crc >> 8 & 0xFF] ^ kTables[5][crc >> 16 & 0xFF] ^
          kTables[4][crc >> 24] ^ kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^
          kTables[0][p[7]];
  }
  for (; left > 0; --left, ++p) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xFF];
  return ~crc;
}

uint32_t Crc32c(std::span<const std::byte> data) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return Crc32cSse42(data);
#endif
  return Crc32cPortable(data);
}

}  // namespace stockpot
