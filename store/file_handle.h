// File descriptors with an owner, and the few calls on them that the packs need, as Status.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

#include "kernels/base/status.h"

namespace stockpot {

// Closes what it holds. Shared where several threads use one file.
class FileHandle {
 public:
  explicit FileHandle(int fd) : fd_(fd) {}
  ~FileHandle();
  FileHandle(const FileHandle&) = delete;
  FileHandle& operator=(const FileHandle&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// open(2) with O_CLOEXEC; messages name the path.
Result<std::shared_ptr<FileHandle>> OpenFile(const std::filesystem::path& path, int flags);

// Reads exactly out.size() bytes. Corruption if the file ends before.
Status ReadExactly(const FileHandle& file, int64_t offset, std::span<std::byte> out);

// Turns O_DIRECT on; false where the file system refuses it (tmpfs, some network ones).
bool TryDirect(const FileHandle& file);

// Writes all of `data`. `direct` is in/out: a file system that refuses O_DIRECT only at the write
// turns it off for the descriptor and the write goes through the page cache.
Status WriteExactly(const FileHandle& file, int64_t offset, std::span<const std::byte> data,
                    bool& direct);

Status SyncFileData(const FileHandle& file);                   // fdatasync
Status SyncDirectory(const std::filesystem::path& directory);  // fsync
// Bytes an unprivileged process may still write to the file system of `path`.
Result<int64_t> FreeBytes(const std::filesystem::path& path);

}  // namespace stockpot
