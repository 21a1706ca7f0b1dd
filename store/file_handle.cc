#include "store/file_handle.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace stockpot {

FileHandle::~FileHandle() {
  if (fd_ >= 0) ::close(fd_);
}

Result<std::shared_ptr<FileHandle>> OpenFile(const std::filesystem::path& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus(errno, path.string());
  return std::make_shared<FileHandle>(fd);
}

Status ReadExactly(const FileHandle& file, int64_t offset, std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t n = ::pread(file.fd(), out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "read");
    if (n == 0) return Corruption("the file ends at byte " + std::to_string(offset));
    out = out.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return OkStatus();
}

bool TryDirect(const FileHandle& file) {
  const int flags = ::fcntl(file.fd(), F_GETFL);
  return flags >= 0 && ::fcntl(file.fd(), F_SETFL, flags | O_DIRECT) == 0;
}

Status WriteExactly(const FileHandle& file, int64_t offset, std::span<const std::byte> data,
                    bool& direct) {
  while (!data.empty()) {
    const ssize_t n = ::pwrite(file.fd(), data.data(), data.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && direct) {
      direct = false;
      const int flags = ::fcntl(file.fd(), F_GETFL);
      if (flags >= 0 && ::fcntl(file.fd(), F_SETFL, flags & ~O_DIRECT) == 0) continue;
      return ErrnoStatus(errno, "turn direct I/O off");
    }
    if (n < 0) return ErrnoStatus(errno, "write");
    if (n == 0) return Internal("write made no progress");
    data = data.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return OkStatus();
}

Status SyncFileData(const FileHandle& file) {
  if (::fdatasync(file.fd()) == 0) return OkStatus();
  return ErrnoStatus(errno, "fdatasync");
}

Status SyncDirectory(const std::filesystem::path& directory) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto file, OpenFile(directory, O_RDONLY | O_DIRECTORY));
  if (::fsync(file->fd()) == 0) return OkStatus();
  return ErrnoStatus(errno, "fsync of " + directory.string());
}

Result<int64_t> FreeBytes(const std::filesystem::path& path) {
  struct statvfs info;
  if (::statvfs(path.c_str(), &info) != 0) return ErrnoStatus(errno, path.string());
  const uint64_t bytes = uint64_t{info.f_bavail} * uint64_t{info.f_frsize};
  return static_cast<int64_t>(std::min<uint64_t>(bytes, INT64_MAX));
}

}  // namespace stockpot
