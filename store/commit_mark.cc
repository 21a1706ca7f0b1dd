#include "store/commit_mark.h"

#include <fcntl.h>

#include <array>
#include <cinttypes>
#include <cstdio>
#include <string_view>

#include "store/crc32c.h"

namespace stockpot {
namespace {

constexpr size_t kLineBytes = 44;  // "sequence " 20 digits " crc " 8 digits '\n', and a terminator
using Line = std::array<char, kLineBytes>;
constexpr size_t kDigitsEnd = 29;

Line MakeLine(uint64_t sequence) {
  Line line{};
  std::snprintf(line.data(), line.size(), "sequence %020" PRIu64, sequence);
  const uint32_t crc = Crc32c(std::as_bytes(std::span(line).first(kDigitsEnd)));
  std::snprintf(line.data() + kDigitsEnd, line.size() - kDigitsEnd, " crc %08" PRIx32 "\n", crc);
  return line;
}

}  // namespace

CommitMark::CommitMark(std::filesystem::path path, std::shared_ptr<FileHandle> file)
    : path_(std::move(path)), file_(std::move(file)) {}

Result<std::unique_ptr<CommitMark>> CommitMark::Open(const std::filesystem::path& path) {
  STOCKPOT_ASSIGN_OR_RETURN(auto file, OpenFile(path, O_RDWR | O_CREAT));
  std::unique_ptr<CommitMark> mark(new CommitMark(path, std::move(file)));
  Line line{};
  const Status read =
      ReadExactly(*mark->file_, 0, std::as_writable_bytes(std::span(line).first(kLineBytes - 1)));
  if (read.code() == StatusCode::kUnavailable) return read.WithContext(path.string());
  uint64_t sequence = 0;
  const bool parsed = std::sscanf(line.data(), "sequence %20" SCNu64, &sequence) == 1;
  if (read.ok() && parsed && MakeLine(sequence) == line) mark->last_ = sequence;
  return mark;
}

uint64_t CommitMark::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

void CommitMark::Advance(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  if (sequence <= last_) return;
  const Line line = MakeLine(sequence);
  bool direct = false;
  const Status written =
      WriteExactly(*file_, 0, std::as_bytes(std::span(line).first(kLineBytes - 1)), direct);
  if (written.ok()) last_ = sequence;
}

Status CommitMark::Check(uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  if (sequence >= last_) return OkStatus();
  return Corruption(
      "the catalogue ends at write " + std::to_string(sequence) + ", but " + std::to_string(last_) +
      " were acknowledged: its log (*.log) or its list of files (MANIFEST-*) is damaged or cut. "
      "Restore the store from a backup (`stockpot restore`), or remove " + path_.string() +
      " to go on without what is lost");
}

}  // namespace stockpot
