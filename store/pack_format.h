// The bytes of a pack file (store/README.md). All integers little-endian.
//
//   [0, 4096)     file header: magic "STKPACK1", u32 format = 1, u32 pack number, u32 CRC32C of the
//                 first 16 bytes, zeros
//   [4096, ...)   records, back to back: 64 bytes of header, the chunk; after the last record
//   before
//                 a sync, zeros up to the next multiple of 4096 (direct I/O writes whole blocks and
//                 never writes a block twice)
//
// Record header: u32 magic, u32 length of what follows, u32 CRC32C of what follows, 32 bytes SHA-256
// of the chunk, 16 bytes, u32 CRC32C of the first 60 bytes. What follows is the chunk itself (the 16
// bytes are zeros), or its history form (store/history_codec.h): then the magic is another one, and
// the 16 bytes are u8 form, 3 zeros, u32 length of the chunk, 8 zeros.
//
// Invariants: a pack is written by one process, once, front to back, and never opened for writing
// again. A chunk counts only if the catalogue's index names it; whatever else a pack holds is
// unreferenced.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kernels/base/status.h"
#include "store/digest.h"

namespace stockpot {

inline constexpr int64_t kPackBlockBytes = 4096;  // of direct I/O: offsets, lengths, memory
inline constexpr int64_t kPackHeaderBytes = kPackBlockBytes;
inline constexpr int64_t kRecordHeaderBytes = 64;
inline constexpr uint32_t kPackFormat = 1;

// How a record holds its chunk.
enum class ChunkForm : uint8_t {
  kWhole,   // as it is
  kPlanes,  // byte planes, the compressible ones compressed
  kDelta,   // byte planes of the XOR with the chunk `parent`
};

// Where a chunk is and how. `offset` is that of its record header in the pack.
struct ChunkLocation {
  uint32_t pack = 0;  // 0: not in a pack but in the catalogue itself, whole
  uint64_t offset = 0;
  uint32_t length = 0;  // of the chunk
  uint32_t crc = 0;     // CRC32C of the record's bytes behind its header
  ChunkForm form = ChunkForm::kWhole;
  uint32_t form_bytes = 0;  // of the record behind its header, where it is not whole
  Digest parent;            // kDelta: as long as this chunk

  bool is_inline() const { return pack == 0; }
  bool is_whole() const { return form == ChunkForm::kWhole; }
  uint32_t stored_length() const { return is_whole() ? length : form_bytes; }
  uint64_t end() const { return offset + kRecordHeaderBytes + stored_length(); }
  bool operator==(const ChunkLocation&) const = default;

  std::string Encode() const;
  static Result<ChunkLocation> Decode(std::string_view raw);
};

// Of a whole chunk, and of one in the form that `location` says (its place does not matter).
std::array<std::byte, kRecordHeaderBytes> EncodeRecordHeader(const Digest& digest, uint32_t length,
                                                             uint32_t crc);
std::array<std::byte, kRecordHeaderBytes> EncodeRecordHeader(const Digest& digest,
                                                             const ChunkLocation& location);
// Corruption unless the header is whole and is that of this chunk at this place.
Status CheckRecordHeader(std::span<const std::byte> header, const Digest& digest,
                         const ChunkLocation& location);

// Fills the first block of a pack. REQUIRES: block.size() == kPackHeaderBytes.
void EncodePackHeader(uint32_t number, std::span<std::byte> block);
Status CheckPackHeader(std::span<const std::byte> block, uint32_t number);

// DIR/00000012.pack, and back; null: not a pack's name.
std::filesystem::path PackPath(const std::filesystem::path& directory, uint32_t number);
std::optional<uint32_t> PackNumber(const std::filesystem::path& path);

constexpr int64_t RoundUpToBlock(int64_t bytes) {
  return (bytes + kPackBlockBytes - 1) / kPackBlockBytes * kPackBlockBytes;
}

}  // namespace stockpot
