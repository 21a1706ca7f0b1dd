#include "store/pending_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace stockpot {

PendingFiles::PendingFiles(std::filesystem::path folder) : folder_(std::move(folder)) {}

PendingFiles::~PendingFiles() {
  CloseFile();
  std::error_code ignored;
  for (const std::string& name : names_) std::filesystem::remove(Partial(name), ignored);
}

Status PendingFiles::Begin(const std::string& name) {
  fd_ = ::open(Partial(name).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) return ErrnoStatus(errno, Partial(name).string());
  names_.push_back(name);
  return OkStatus();
}

Status PendingFiles::Append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, Partial(names_.back()).string());
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return OkStatus();
}

Status PendingFiles::End() {
  if (::fsync(fd_) != 0) return ErrnoStatus(errno, Partial(names_.back()).string());
  CloseFile();
  return OkStatus();
}

Status PendingFiles::Write(const std::string& name, std::string_view text) {
  STOCKPOT_RETURN_IF_ERROR(Begin(name));
  STOCKPOT_RETURN_IF_ERROR(Append(text));
  return End();
}

Status PendingFiles::Publish() {
  for (const std::string& name : names_) {
    if (::rename(Partial(name).c_str(), (folder_ / name).c_str()) != 0) {
      return ErrnoStatus(errno, (folder_ / name).string());
    }
  }
  names_.clear();
  const int fd = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, folder_.string());
  const Status status = ::fsync(fd) == 0 ? OkStatus() : ErrnoStatus(errno, folder_.string());
  ::close(fd);
  return status;
}

std::filesystem::path PendingFiles::Partial(const std::string& name) const {
  return folder_ / (name + std::string(kPartialSuffix));
}

void PendingFiles::CloseFile() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

}  // namespace stockpot
