#include "store/pack_format.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "kernels/base/check.h"
#include "store/crc32c.h"

namespace stockpot {
namespace {

constexpr char kPackMagic[] = "STKPACK1";
constexpr uint32_t kRecordMagic = 0x43524B53;   // "SKRC"
constexpr uint32_t kHistoryMagic = 0x48524B53;  // "SKRH"
constexpr size_t kLocationBytes = 4 + 8 + 4 + 4;
constexpr size_t kPlanesLocationBytes = kLocationBytes + 1 + 4;
constexpr size_t kDeltaLocationBytes = kPlanesLocationBytes + 32;
constexpr size_t kRecordCrcOffset = kRecordHeaderBytes - 4;
constexpr size_t kPackCrcOffset = 16;

void PutInteger(std::byte* out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(value >> (8 * i));
}

uint64_t GetInteger(const std::byte* in, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= uint64_t{static_cast<uint8_t>(in[i])} << (8 * i);
  return value;
}

// The part of an index entry that only chunks in a history form have.
Status DecodeForm(std::string_view raw, ChunkLocation& location) {
  const auto* in = reinterpret_cast<const std::byte*>(raw.data());
  const uint64_t form = GetInteger(in + kLocationBytes, 1);
  const auto expected = raw.size() == kDeltaLocationBytes ? ChunkForm::kDelta : ChunkForm::kPlanes;
  if (form != static_cast<uint64_t>(expected)) {
    return Corruption("an index entry of the unknown form " + std::to_string(form));
  }
  location.form = expected;
  location.form_bytes = static_cast<uint32_t>(GetInteger(in + kLocationBytes + 1, 4));
  if (location.form_bytes == 0 || location.form_bytes > location.length || location.is_inline()) {
    return Corruption("an index entry with " + std::to_string(location.form_bytes) +
                      " bytes for a chunk of " + std::to_string(location.length));
  }
  if (expected == ChunkForm::kPlanes) return OkStatus();
  STOCKPOT_ASSIGN_OR_RETURN(location.parent, Digest::FromRaw(raw.substr(kPlanesLocationBytes)));
  return OkStatus();
}

}  // namespace

std::string ChunkLocation::Encode() const {
  std::array<std::byte, kLocationBytes> raw;
  PutInteger(raw.data(), pack, 4);
  PutInteger(raw.data() + 4, offset, 8);
  PutInteger(raw.data() + 12, length, 4);
  PutInteger(raw.data() + 16, crc, 4);
  std::string text(reinterpret_cast<const char*>(raw.data()), raw.size());
  if (is_whole()) return text;
  std::array<std::byte, kPlanesLocationBytes - kLocationBytes> more;
  PutInteger(more.data(), static_cast<uint8_t>(form), 1);
  PutInteger(more.data() + 1, form_bytes, 4);
  text.append(reinterpret_cast<const char*>(more.data()), more.size());
  if (form == ChunkForm::kDelta) text += parent.raw();
  return text;
}

Result<ChunkLocation> ChunkLocation::Decode(std::string_view raw) {
  if (raw.size() != kLocationBytes && raw.size() != kPlanesLocationBytes &&
      raw.size() != kDeltaLocationBytes) {
    return Corruption("an index entry of the wrong size");
  }
  const auto* in = reinterpret_cast<const std::byte*>(raw.data());
  ChunkLocation location;
  location.pack = static_cast<uint32_t>(GetInteger(in, 4));
  location.offset = GetInteger(in + 4, 8);
  location.length = static_cast<uint32_t>(GetInteger(in + 12, 4));
  location.crc = static_cast<uint32_t>(GetInteger(in + 16, 4));
  if (location.length == 0 || location.length > kChunkBytes) {
    return Corruption("an index entry with a length of " + std::to_string(location.length));
  }
  if (raw.size() != kLocationBytes) STOCKPOT_RETURN_IF_ERROR(DecodeForm(raw, location));
  return location;
}

std::array<std::byte, kRecordHeaderBytes> EncodeRecordHeader(const Digest& digest, uint32_t length,
                                                             uint32_t crc) {
  return EncodeRecordHeader(digest, ChunkLocation{.length = length, .crc = crc});
}

std::array<std::byte, kRecordHeaderBytes> EncodeRecordHeader(const Digest& digest,
                                                             const ChunkLocation& location) {
  std::array<std::byte, kRecordHeaderBytes> header{};
  PutInteger(header.data(), location.is_whole() ? kRecordMagic : kHistoryMagic, 4);
  PutInteger(header.data() + 4, location.stored_length(), 4);
  PutInteger(header.data() + 8, location.crc, 4);
  std::memcpy(header.data() + 12, digest.bytes.data(), digest.bytes.size());
  if (!location.is_whole()) {
    PutInteger(header.data() + 44, static_cast<uint8_t>(location.form), 1);
    PutInteger(header.data() + 48, location.length, 4);
  }
  PutInteger(header.data() + kRecordCrcOffset, Crc32c(std::span(header).first(kRecordCrcOffset)),
             4);
  return header;
}

Status CheckRecordHeader(std::span<const std::byte> header, const Digest& digest,
                         const ChunkLocation& location) {
  STOCKPOT_CHECK(header.size() == kRecordHeaderBytes, header.size());
  const auto expected = EncodeRecordHeader(digest, location);
  if (std::equal(header.begin(), header.end(), expected.begin())) return OkStatus();
  return Corruption("the record header is not that of the chunk");
}

void EncodePackHeader(uint32_t number, std::span<std::byte> block) {
  STOCKPOT_CHECK(block.size() == kPackHeaderBytes, block.size());
  std::fill(block.begin(), block.end(), std::byte{0});
  std::memcpy(block.data(), kPackMagic, 8);
  PutInteger(block.data() + 8, kPackFormat, 4);
  PutInteger(block.data() + 12, number, 4);
  PutInteger(block.data() + kPackCrcOffset, Crc32c(block.first(kPackCrcOffset)), 4);
}

Status CheckPackHeader(std::span<const std::byte> block, uint32_t number) {
  std::array<std::byte, kPackHeaderBytes> expected;
  EncodePackHeader(number, expected);
  if (std::equal(block.begin(), block.end(), expected.begin(), expected.end())) return OkStatus();
  return Corruption("the file header is damaged, or of another pack or format");
}

std::filesystem::path PackPath(const std::filesystem::path& directory, uint32_t number) {
  char name[32];
  std::snprintf(name, sizeof name, "%08u.pack", number);
  return directory / name;
}

std::optional<uint32_t> PackNumber(const std::filesystem::path& path) {
  const std::string stem = path.stem().string();
  if (path.extension() != ".pack" || stem.size() < 8 || stem.size() > 10) return std::nullopt;
  uint64_t number = 0;
  for (const char c : stem) {
    if (c < '0' || c > '9') return std::nullopt;
    number = number * 10 + static_cast<uint64_t>(c - '0');
  }
  if (number == 0 || number > UINT32_MAX) return std::nullopt;
  return static_cast<uint32_t>(number);
}

}  // namespace stockpot
