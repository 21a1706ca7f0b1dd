#include "trainer_hooks/cpp/spool.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>

#include "store/names.h"

namespace stockpot {
namespace {

using std::filesystem::path;

constexpr std::string_view kEntryPrefix = "step-";
constexpr int kStepDigits = 12;

// The decimal number that `text` begins with is taken off it.
std::optional<int64_t> TakeNumber(std::string_view& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

bool TakePrefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// The step of an entry's name; none: it is no entry's.
std::optional<int64_t> StepOf(std::string_view name) {
  if (!TakePrefix(name, kEntryPrefix) || std::ssize(name) != kStepDigits) return std::nullopt;
  const std::optional<int64_t> step = TakeNumber(name);
  return name.empty() ? step : std::nullopt;
}

struct RankOfWorld {
  int64_t rank = 0;
  int64_t world = 0;
};

// Of the name of a rank's folder.
std::optional<RankOfWorld> RankOf(std::string_view name) {
  if (!TakePrefix(name, "rank-")) return std::nullopt;
  const std::optional<int64_t> rank = TakeNumber(name);
  if (!rank || !TakePrefix(name, "-of-")) return std::nullopt;
  const std::optional<int64_t> world = TakeNumber(name);
  if (!world || !name.empty()) return std::nullopt;
  return RankOfWorld{*rank, *world};
}

int64_t FolderBytes(const path& folder) {
  int64_t bytes = 0;
  std::error_code error;
  for (auto it = std::filesystem::recursive_directory_iterator(folder, error);
       !error && it != std::filesystem::recursive_directory_iterator(); it.increment(error)) {
    if (it->is_regular_file(error)) bytes += static_cast<int64_t>(it->file_size(error));
  }
  return bytes;
}

int64_t BytesOf(const TensorSource& source) {
  int64_t bytes = 0;
  for (const TensorInfo& tensor : source.tensors()) {
    if (tensor.alias_of.empty()) bytes += tensor.bytes();
  }
  for (const std::string& name : source.files()) {
    const Result<std::string> contents = source.ReadFile(name);
    if (contents.ok()) bytes += static_cast<int64_t>(contents->size());
  }
  return bytes;
}

}  // namespace

path SpoolKey::path() const {
  std::string digits = std::to_string(step);
  digits.insert(0, static_cast<size_t>(std::max<int64_t>(0, kStepDigits - std::ssize(digits))),
                '0');
  return folder / (std::string(kEntryPrefix) + digits);
}

Result<std::unique_ptr<Spool>> Spool::Open(const path& directory, const std::string& run,
                                           int32_t rank, int32_t world, int64_t max_bytes) {
  if (!IsValidRunName(run)) return InvalidArgument("'" + run + "' is no run name");
  const path own =
      directory / run / ("rank-" + std::to_string(rank) + "-of-" + std::to_string(world));
  std::error_code error;
  std::filesystem::create_directories(own, error);
  if (error) return ErrnoStatus(error.value(), own.string());
  std::unique_ptr<Spool> spool(new Spool(own, max_bytes));
  STOCKPOT_RETURN_IF_ERROR(spool->TakeOver(own));
  STOCKPOT_RETURN_IF_ERROR(spool->TakeOverOthers(rank, world));
  return spool;
}

// Unavailable: another process has it open.
Status Spool::TakeOver(const path& folder) {
  auto lock = std::make_unique<SpoolDescriptor>(
      ::open((folder / "LOCK").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (lock->get() < 0) return ErrnoStatus(errno, folder.string());
  if (::flock(lock->get(), LOCK_EX | LOCK_NB) != 0) {
    return Unavailable("another process uses the spool in " + folder.string());
  }
  locks_.push_back(std::move(lock));
  std::error_code error;
  std::filesystem::directory_iterator found(folder, error);
  if (error) return ErrnoStatus(error.value(), folder.string());
  for (const auto& item : found) {
    const std::string name = item.path().filename();
    if (name.starts_with(".")) {
      std::filesystem::remove_all(item.path(), error);
    } else if (const std::optional<int64_t> step = StepOf(name)) {
      Add({*step, folder});
    }
  }
  return OkStatus();
}

Status Spool::TakeOverOthers(int32_t rank, int32_t world) {
  std::error_code error;
  std::filesystem::directory_iterator found(own_.parent_path(), error);
  if (error) return ErrnoStatus(error.value(), own_.parent_path().string());
  for (const auto& item : found) {
    const std::optional<RankOfWorld> other = RankOf(item.path().filename().string());
    if (!other || other->world == world || other->rank % world != rank) continue;
    const Status taken = TakeOver(item.path());
    if (!taken.ok() && taken.code() != StatusCode::kUnavailable) return taken;
  }
  return OkStatus();
}

void Spool::Add(const SpoolKey& key) {
  const int64_t bytes = FolderBytes(key.path());
  const std::lock_guard lock(mutex_);
  bytes_ += entries_[key].bytes = bytes;
}

void Spool::Forget(const SpoolKey& key) {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(key);
  bytes_ -= entry->second.bytes;
  entries_.erase(entry);
}

int64_t Spool::entries() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(entries_.size());
}

int64_t Spool::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

Status Spool::CheckRoom(const SpoolKey& key, int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  if (entries_.contains(key)) {
    return AlreadyExists("the spool holds a checkpoint of step " + std::to_string(key.step));
  }
  if (bytes > max_bytes_ - bytes_) {
    return ResourceExhausted("the spool holds " + std::to_string(bytes_) + " of " +
                             std::to_string(max_bytes_) + " bytes: no room for " +
                             std::to_string(bytes));
  }
  return OkStatus();
}

Status Spool::Write(const SpoolRecord& record, const TensorSource& source) {
  const std::lock_guard one_at_a_time(writing_);
  const SpoolKey key{record.step, own_};
  STOCKPOT_RETURN_IF_ERROR(CheckRoom(key, BytesOf(source)));
  const path entry = key.path();
  const path temporary = own_ / (".tmp-" + entry.filename().string());
  std::error_code ignored;
  std::filesystem::remove_all(temporary, ignored);
  Status status;
  try {
    status = WriteSpoolEntry(temporary, record, source);
  } catch (const std::exception& error) {
    status = Internal(error.what());  // a name that is not UTF-8, no memory
  }
  if (status.ok() && ::rename(temporary.c_str(), entry.c_str()) != 0) {
    status = ErrnoStatus(errno, entry.string());
  }
  if (status.ok()) status = SyncFolder(own_);
  if (!status.ok()) {
    std::filesystem::remove_all(temporary, ignored);
    return status.WithContext("spool");
  }
  Add(key);
  return OkStatus();
}

std::optional<SpoolKey> Spool::First() const {
  const std::lock_guard lock(mutex_);
  const auto first = std::find_if(entries_.begin(), entries_.end(),
                                  [](const auto& entry) { return !entry.second.is_held; });
  if (first == entries_.end()) return std::nullopt;
  return first->first;
}

void Spool::Hold(const SpoolKey& key, bool is_held) {
  const std::lock_guard lock(mutex_);
  entries_.find(key)->second.is_held = is_held;
}

Result<std::unique_ptr<SpooledCheckpoint>> Spool::Read(const SpoolKey& key) const {
  return ReadSpoolEntry(key.path());
}

// Renamed first: a folder that is half deleted has no name of an entry. What cannot be renamed is
// forgotten too: the next process sends it again, which changes nothing.
Status Spool::Remove(const SpoolKey& key) {
  const path entry = key.path();
  const path gone = key.folder / (".gone-" + entry.filename().string());
  Forget(key);
  if (::rename(entry.c_str(), gone.c_str()) != 0) return ErrnoStatus(errno, entry.string());
  std::error_code ignored;
  std::filesystem::remove_all(gone, ignored);
  return OkStatus();
}

Status Spool::SetAside(const SpoolKey& key, const std::string& prefix) {
  const path entry = key.path();
  const path aside = key.folder / (prefix + "-" + entry.filename().string());
  std::error_code ignored;
  std::filesystem::remove_all(aside, ignored);  // of the same step, once before
  Forget(key);
  if (::rename(entry.c_str(), aside.c_str()) != 0) return ErrnoStatus(errno, entry.string());
  return OkStatus();
}

}  // namespace stockpot
