// SHA-256: the name of everything that is stored. Chunks are named by their bytes, tensors by their
// chunks, artifacts by their manifest.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"

namespace stockpot {

struct Digest {
  std::array<uint8_t, 32> bytes{};

  auto operator<=>(const Digest&) const = default;
  bool IsZero() const { return *this == Digest{}; }
  std::string Hex() const;       // 64 lower-case hex digits
  std::string ShortHex() const;  // the first 12: for people, never for lookups by a program
  std::string_view raw() const;  // the 32 bytes, as a key; borrows from this
  static Result<Digest> FromHex(std::string_view hex);
  static Result<Digest> FromRaw(std::string_view raw);  // exactly 32 bytes
};

struct DigestHash {
  size_t operator()(const Digest& d) const;  // the first 8 bytes: already uniform
};

Digest Sha256(std::span<const std::byte> data);
Digest Sha256(std::string_view data);

class Sha256Stream {
 public:
  Sha256Stream();
  ~Sha256Stream();
  void Update(std::span<const std::byte> data);
  Digest Finish();  // once

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The name of a run of bytes that is stored as chunks: SHA-256 over the concatenated chunk digests.
// The chunk size is fixed (kChunkBytes), so equal bytes have equal names, and the store can prove
// the name from the chunks it verified, without reading a tensor again.
Digest TreeDigest(std::span<const Digest> chunks);

// Chunks are this long, the last of a run shorter. Part of the format: digests depend on it.
inline constexpr int64_t kChunkBytes = int64_t{4} << 20;
constexpr int64_t ChunkCount(int64_t bytes) { return (bytes + kChunkBytes - 1) / kChunkBytes; }

}  // namespace stockpot
