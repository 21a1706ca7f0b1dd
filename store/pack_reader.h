// Reads chunks out of pack files and verifies them.
//
// Thread promise: any thread. Keeps at most kMaxOpenPacks descriptors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "kernels/base/status.h"
#include "store/file_handle.h"
#include "store/pack_format.h"

namespace stockpot {

class PackReader {
 public:
  explicit PackReader(std::filesystem::path directory) : directory_(std::move(directory)) {}

  // Fills `out` with the chunk, which is stored whole, and verifies its SHA-256. REQUIRES:
  // out.size() == location.length.
  // Corruption names the pack, the offset and the chunk; `out` is then undefined. Unavailable: the
  // disk did not answer, several times.
  Status Read(const Digest& digest, const ChunkLocation& location, std::span<std::byte> out) const;

  // Like Read, and verifies the record's header and CRC32C too (scrub).
  Status ReadAndCheckRecord(const Digest& digest, const ChunkLocation& location,
                            std::span<std::byte> out) const;

  // Fills `out` with the bytes behind the record's header, in whatever form, and verifies header and
  // CRC32C. REQUIRES: out.size() == location.stored_length().
  Status ReadStored(const Digest& digest, const ChunkLocation& location,
                    std::span<std::byte> out) const;

  // Lets go of a pack's descriptor, so that unlinking the file gives its bytes back as soon as the
  // reads that are at it are done.
  void Forget(uint32_t pack) const;

  // Verifies the header of a pack file.
  Status CheckPack(uint32_t number) const;

 private:
  static constexpr size_t kMaxOpenPacks = 128;

  Result<std::shared_ptr<FileHandle>> Open(uint32_t pack) const;
  Status ReadBytes(const ChunkLocation& location, uint64_t offset, std::span<std::byte> out) const;

  const std::filesystem::path directory_;

  mutable std::mutex mutex_;
  mutable std::map<uint32_t, std::shared_ptr<FileHandle>> open_;  // guarded by mutex_
};

// "pack 00000007.pack, offset 4096, chunk <hex>": how errors about a stored chunk start.
std::string DescribeChunk(const Digest& digest, const ChunkLocation& location);

}  // namespace stockpot
