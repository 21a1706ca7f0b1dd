#include "store/commit_mark.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

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

constexpr int64_t kMaxFileListBytes = int64_t{64} << 20;  // of what is marked
// "manifest " 20 digits " bytes " 20 digits " sum " 8 digits " crc " 8 digits '\n', a terminator
using FileListLine = std::array<char, 84>;
constexpr size_t kSumEnd = 69;

FileListLine MakeFileListLine(uint64_t number, int64_t bytes, uint32_t sum) {
  FileListLine line{};
  std::snprintf(line.data(), line.size(),
                "manifest %020" PRIu64 " bytes %020" PRId64 " sum %08" PRIx32, number, bytes, sum);
  const uint32_t crc = Crc32c(std::as_bytes(std::span(line).first(kSumEnd)));
  std::snprintf(line.data() + kSumEnd, line.size() - kSumEnd, " crc %08" PRIx32 "\n", crc);
  return line;
}

// The number of the list of files that CURRENT names; 0: it names none.
uint64_t CurrentFileList(const std::filesystem::path& catalog) {
  const auto file = OpenFile(catalog / "CURRENT", O_RDONLY);
  std::array<char, 64> text{};
  if (!file.ok()) return 0;
  // It is shorter: what there is of it is read.
  (void)ReadExactly(**file, 0, std::as_writable_bytes(std::span(text).first(text.size() - 1)));
  uint64_t number = 0;
  return std::sscanf(text.data(), "MANIFEST-%20" SCNu64, &number) == 1 ? number : 0;
}

std::filesystem::path FileListPath(const std::filesystem::path& catalog, uint64_t number) {
  std::array<char, 40> name{};
  std::snprintf(name.data(), name.size(), "MANIFEST-%06" PRIu64, number);
  return catalog / name.data();
}

// CRC32C of the first `bytes`.
Result<uint32_t> SumOf(const FileHandle& file, int64_t bytes) {
  std::vector<std::byte> data(static_cast<size_t>(bytes));
  STOCKPOT_RETURN_IF_ERROR(ReadExactly(file, 0, data));
  return Crc32c(data);
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
  mark->ReadFileList();
  return mark;
}

void CommitMark::ReadFileList() {
  FileListLine line{};
  const Status read = ReadExactly(*file_, kLineBytes - 1,
                                  std::as_writable_bytes(std::span(line).first(line.size() - 1)));
  FileList list;
  const bool parsed =
      std::sscanf(line.data(), "manifest %20" SCNu64 " bytes %20" SCNd64 " sum %8" SCNx32,
                  &list.number, &list.bytes, &list.sum) == 3;
  if (!read.ok() || !parsed) return;
  if (MakeFileListLine(list.number, list.bytes, list.sum) == line) file_list_ = list;
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
      "Restore the store from a backup (`stockpot restore`), or remove " +
      path_.string() + " to go on without what is lost");
}

void CommitMark::NoteFileList(const std::filesystem::path& catalog, bool opened) {
  const std::lock_guard lock(mutex_);
  struct stat info {};
  const std::filesystem::path noted = FileListPath(catalog, file_list_.number);
  if (!opened && ::stat(noted.c_str(), &info) == 0 && info.st_size == file_list_.bytes) return;
  FileList list{.number = CurrentFileList(catalog)};
  const auto file = OpenFile(FileListPath(catalog, list.number), O_RDWR);  // to sync it
  if (!file.ok() || ::fstat((*file)->fd(), &info) != 0) return;
  list.bytes = info.st_size;
  if (list.bytes > kMaxFileListBytes || !SyncFileData(**file).ok()) return;
  const Result<uint32_t> sum = SumOf(**file, list.bytes);
  if (!sum.ok()) return;
  list.sum = *sum;
  const FileListLine line = MakeFileListLine(list.number, list.bytes, list.sum);
  bool direct = false;
  const Status written = WriteExactly(
      *file_, kLineBytes - 1, std::as_bytes(std::span(line).first(line.size() - 1)), direct);
  if (!written.ok()) return;
  file_list_ = list;
}

Status CommitMark::CheckFileList(const std::filesystem::path& catalog) const {
  const std::lock_guard lock(mutex_);
  const uint64_t number = CurrentFileList(catalog);
  // RocksDB names what is wrong with CURRENT itself; a later list was written by a later opening.
  if (file_list_.number == 0 || number == 0 || number > file_list_.number) return OkStatus();
  const std::filesystem::path path = FileListPath(catalog, file_list_.number);
  Status status = Corruption("CURRENT names an older one");
  if (number == file_list_.number) {
    const auto file = OpenFile(path, O_RDONLY);
    if (!file.ok()) return OkStatus();  // likewise
    const Result<uint32_t> sum = SumOf(**file, file_list_.bytes);
    if (sum.ok() && *sum == file_list_.sum) return OkStatus();
    if (sum.status().code() == StatusCode::kUnavailable) return sum.status();
    status = Corruption("its first " + std::to_string(file_list_.bytes) +
                        " bytes are not what was written");
  }
  return status.WithContext(path.string() + ", the catalogue's list of files")
      .WithContext("restore the store from a backup (`stockpot restore`), or remove " +
                   path_.string() + " to open it without what is lost");
}

}  // namespace stockpot
