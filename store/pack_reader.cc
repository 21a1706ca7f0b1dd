#include "store/pack_reader.h"

#include <fcntl.h>

#include <array>
#include <chrono>
#include <thread>

#include "kernels/base/check.h"
#include "store/crc32c.h"

namespace stockpot {
namespace {

// --- limits ---
constexpr int kReadAttempts = 4;  // when the disk does not answer (EIO)
constexpr std::chrono::milliseconds kFirstPause{5};  // doubles

}  // namespace

std::string DescribeChunk(const Digest& digest, const ChunkLocation& location) {
  if (location.is_inline()) return "inline chunk " + digest.Hex();
  return "pack " + PackPath("", location.pack).string() + ", offset " +
         std::to_string(location.offset) + ", chunk " + digest.Hex();
}

Result<std::shared_ptr<FileHandle>> PackReader::Open(uint32_t pack) const {
  std::lock_guard lock(mutex_);
  if (const auto it = open_.find(pack); it != open_.end()) return it->second;
  Result<std::shared_ptr<FileHandle>> file = OpenFile(PackPath(directory_, pack), O_RDONLY);
  if (!file.ok()) {
    // The index names the pack, so its absence is damage, not an unknown name.
    if (file.status().code() == StatusCode::kNotFound)
      return Corruption("the pack file is missing");
    return file.status();
  }
  if (open_.size() >= kMaxOpenPacks) open_.erase(open_.begin());
  open_[pack] = *file;
  return *file;
}

void PackReader::Forget(uint32_t pack) const {
  std::lock_guard lock(mutex_);
  open_.erase(pack);
}

Status PackReader::ReadBytes(const ChunkLocation& location, uint64_t offset,
                             std::span<std::byte> out) const {
  Status status;
  auto pause = kFirstPause;
  for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
    const Result<std::shared_ptr<FileHandle>> file = Open(location.pack);
    status = file.ok() ? ReadExactly(**file, static_cast<int64_t>(offset), out) : file.status();
    if (status.code() != StatusCode::kUnavailable) break;
    std::this_thread::sleep_for(pause);
    pause *= 2;
  }
  return status;
}

Status PackReader::Read(const Digest& digest, const ChunkLocation& location,
                        std::span<std::byte> out) const {
  STOCKPOT_CHECK(out.size() == location.length, out.size(), location.length);
  Status status = ReadBytes(location, location.offset + kRecordHeaderBytes, out);
  if (status.ok() && Sha256(out) != digest) status = Corruption("SHA-256 does not match");
  if (status.ok()) return status;
  return status.WithContext(DescribeChunk(digest, location));
}

Status PackReader::ReadStored(const Digest& digest, const ChunkLocation& location,
                              std::span<std::byte> out) const {
  STOCKPOT_CHECK(out.size() == location.stored_length(), out.size(), location.stored_length());
  std::array<std::byte, kRecordHeaderBytes> header;
  Status status = ReadBytes(location, location.offset, header);
  if (status.ok()) status = CheckRecordHeader(header, digest, location);
  if (status.ok()) status = ReadBytes(location, location.offset + kRecordHeaderBytes, out);
  if (status.ok() && Crc32c(out) != location.crc) status = Corruption("CRC32C does not match");
  if (status.ok()) return status;
  return status.WithContext(DescribeChunk(digest, location));
}

Status PackReader::ReadAndCheckRecord(const Digest& digest, const ChunkLocation& location,
                                      std::span<std::byte> out) const {
  STOCKPOT_RETURN_IF_ERROR(Read(digest, location, out));
  std::array<std::byte, kRecordHeaderBytes> header;
  Status status = ReadBytes(location, location.offset, header);
  if (status.ok()) status = CheckRecordHeader(header, digest, location);
  if (status.ok() && Crc32c(out) != location.crc) status = Corruption("CRC32C does not match");
  if (status.ok()) return status;
  return status.WithContext(DescribeChunk(digest, location));
}

Status PackReader::CheckPack(uint32_t number) const {
  std::array<std::byte, kPackHeaderBytes> block;
  Result<std::shared_ptr<FileHandle>> file = Open(number);
  Status status = file.status();
  if (status.ok()) status = ReadExactly(**file, 0, block);
  if (status.ok()) status = CheckPackHeader(block, number);
  if (status.ok()) return status;
  return status.WithContext("pack " + PackPath("", number).string());
}

}  // namespace stockpot
