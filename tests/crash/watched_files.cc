#include "tests/crash/watched_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace stockpot::crash {

enum class Call { kOpen, kCreate, kRead, kWrite, kSync, kAllocate, kTruncate, kRename, kUnlink };

// Behind the libc functions below, which have no object to belong to: the one global of the tests.
struct WatchedFilesState {
  struct OpenFile {
    int64_t handle = 0;
    std::string path;
    bool directory = false;
    bool writable = false;
  };

  std::mutex mutex;
  std::string root;                // empty: nothing is watched
  std::map<int, OpenFile> files;   // by descriptor
  int64_t last_handle = 0;
  std::vector<FileChange> record;
  int64_t fail_in = 0;             // calls until one fails; 0: none
  Fault fault = Fault::kIoError;
  std::optional<std::string> hit;

  // REQUIRES for all: mutex held.
  std::optional<std::string> Relative(const char* path) const {
    if (root.empty() || std::strncmp(path, root.c_str(), root.size()) != 0) return std::nullopt;
    if (path[root.size()] != '/' && path[root.size()] != 0) return std::nullopt;
    std::string normal = std::filesystem::path(path + root.size()).lexically_normal().string();
    while (!normal.empty() && normal.front() == '/') normal.erase(0, 1);
    while (!normal.empty() && normal.back() == '/') normal.pop_back();
    return normal == "." ? "" : normal;
  }
  const OpenFile* Find(int fd) const {
    const auto it = files.find(fd);
    return root.empty() || it == files.end() ? nullptr : &it->second;
  }

  static bool CanMeet(Fault fault, Call call) {
    switch (fault) {
      case Fault::kIoError:
        return true;
      case Fault::kNoSpace:
        return call != Call::kOpen && call != Call::kRead && call != Call::kUnlink;
      case Fault::kShortWrite:
        return call == Call::kWrite;
    }
    return false;
  }
  bool Trips(Call call, const char* name, const std::string& path) {
    if (fail_in == 0 || !CanMeet(fault, call) || --fail_in > 0) return false;
    hit = std::string(name) + " " + path;
    return true;
  }
  // For calls that cannot be short.
  bool Fails(Call call, const char* name, const std::string& path) {
    if (fault == Fault::kShortWrite || !Trips(call, name, path)) return false;
    errno = fault == Fault::kNoSpace ? ENOSPC : EIO;
    return true;
  }
  // How many of `n` bytes a write takes; -1: it fails.
  ssize_t Takes(const char* name, const std::string& path, size_t n) {
    if (!Trips(Call::kWrite, name, path)) return static_cast<ssize_t>(n);
    if (fault == Fault::kShortWrite) {
      const size_t half = n / 2;
      const size_t blocks = half / 4096 * 4096;  // as direct I/O would
      return static_cast<ssize_t>(blocks > 0 ? blocks : std::max<size_t>(half, 1));
    }
    errno = fault == Fault::kNoSpace ? ENOSPC : EIO;
    return -1;
  }
};

namespace {

WatchedFilesState& State() {
  static auto* state = new WatchedFilesState;  // outlives every thread of every library
  return *state;
}

using Kind = FileChange::Kind;

int DoOpen(const char* path, int flags, mode_t mode) {
  WatchedFilesState& state = State();
  const std::lock_guard lock(state.mutex);
  const auto open_it = [&] {
    return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
  };
  const std::optional<std::string> relative = state.Relative(path);
  if (!relative) {
    const int fd = open_it();
    if (fd >= 0) state.files.erase(fd);  // of a descriptor that somebody else closed
    return fd;
  }
  const bool creates = (flags & O_CREAT) != 0 && ::access(path, F_OK) != 0;
  if (state.Fails(creates ? Call::kCreate : Call::kOpen, creates ? "create" : "open", *relative)) {
    return -1;
  }
  const int fd = open_it();
  if (fd < 0) return fd;
  struct stat info = {};
  ::fstat(fd, &info);
  WatchedFilesState::OpenFile file{.handle = ++state.last_handle,
                                   .path = *relative,
                                   .directory = S_ISDIR(info.st_mode),
                                   .writable = (flags & O_ACCMODE) != O_RDONLY};
  if (file.writable) {
    state.record.push_back({.kind = Kind::kOpen,
                            .path = *relative,
                            .handle = file.handle,
                            .created = creates,
                            .truncated = (flags & O_TRUNC) != 0});
  }
  state.files[fd] = std::move(file);
  return fd;
}

ssize_t DoWrite(const char* name, int fd, const void* data, size_t n, std::optional<off_t> at) {
  WatchedFilesState& state = State();
  const std::lock_guard lock(state.mutex);
  const WatchedFilesState::OpenFile* file = state.Find(fd);
  if (file != nullptr) {
    const ssize_t takes = state.Takes(name, file->path, n);
    if (takes < 0) return -1;
    n = static_cast<size_t>(takes);
  }
  const off_t offset = at ? *at : file != nullptr ? ::lseek(fd, 0, SEEK_CUR) : 0;
  const ssize_t wrote = at ? ::syscall(SYS_pwrite64, fd, data, n, offset)
                           : ::syscall(SYS_write, fd, data, n);
  if (file != nullptr && file->writable && wrote > 0) {
    const auto* bytes = static_cast<const std::byte*>(data);
    state.record.push_back({.kind = Kind::kWrite,
                            .handle = file->handle,
                            .offset = offset,
                            .bytes = {bytes, bytes + wrote}});
  }
  return wrote;
}

int DoSync(const char* name, int fd, long number) {
  WatchedFilesState& state = State();
  const std::lock_guard lock(state.mutex);
  const WatchedFilesState::OpenFile* file = state.Find(fd);
  if (file == nullptr) return static_cast<int>(::syscall(number, fd));
  if (state.Fails(Call::kSync, name, file->path)) return -1;
  if (file->directory) {
    state.record.push_back({.kind = Kind::kSyncDirectory, .path = file->path});
  } else {
    state.record.push_back({.kind = Kind::kSync, .handle = file->handle});
  }
  return 0;
}

}  // namespace

WatchedFiles::WatchedFiles(const std::filesystem::path& root) {
  WatchedFilesState& state = State();
  const std::lock_guard lock(state.mutex);
  if (!state.root.empty()) std::abort();
  state.root = root.lexically_normal().string();
  state.files.clear();
  state.record.clear();
  state.fail_in = 0;
  state.hit.reset();
}

WatchedFiles::~WatchedFiles() {
  WatchedFilesState& state = State();
  const std::lock_guard lock(state.mutex);
  state.root.clear();
  state.files.clear();
  state.record.clear();
}

void WatchedFiles::Fail(int64_t k, Fault fault) {
  WatchedFilesState& state = State();
  const std::lock_guard lock(state.mutex);
  state.fail_in = k;
  state.fault = fault;
  state.hit.reset();
}

std::optional<std::string> WatchedFiles::StopFailing() {
  WatchedFilesState& state = State();
  const std::lock_guard lock(state.mutex);
  state.fail_in = 0;
  return std::exchange(state.hit, std::nullopt);
}

void WatchedFiles::Note(int64_t note) {
  WatchedFilesState& state = State();
  const std::lock_guard lock(state.mutex);
  state.record.push_back({.kind = Kind::kNote, .note = note});
}

std::vector<FileChange> WatchedFiles::TakeRecord() {
  WatchedFilesState& state = State();
  const std::lock_guard lock(state.mutex);
  return std::exchange(state.record, {});
}

}  // namespace stockpot::crash

// --- libc's names ---

using stockpot::crash::Call;
using stockpot::crash::FileChange;
using stockpot::crash::State;

extern "C" {

int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return stockpot::crash::DoOpen(path, flags, mode);
}

int close(int fd) {
  const std::lock_guard lock(State().mutex);
  State().files.erase(fd);
  return static_cast<int>(::syscall(SYS_close, fd));
}

ssize_t pread(int fd, void* data, size_t n, off_t offset) {
  {
    const std::lock_guard lock(State().mutex);
    const auto* file = State().Find(fd);
    if (file != nullptr && State().Fails(Call::kRead, "pread", file->path)) return -1;
  }
  return ::syscall(SYS_pread64, fd, data, n, offset);
}

ssize_t write(int fd, const void* data, size_t n) {
  return stockpot::crash::DoWrite("write", fd, data, n, std::nullopt);
}

ssize_t pwrite(int fd, const void* data, size_t n, off_t offset) {
  return stockpot::crash::DoWrite("pwrite", fd, data, n, offset);
}

int fsync(int fd) { return stockpot::crash::DoSync("fsync", fd, SYS_fsync); }
int fdatasync(int fd) { return stockpot::crash::DoSync("fdatasync", fd, SYS_fdatasync); }

// Starts writing and promises nothing: no record, and no fault (RocksDB only probes with it, and
// asserts that the probe works).
int sync_file_range(int fd, off_t offset, off_t n, unsigned int flags) {
  {
    const std::lock_guard lock(State().mutex);
    if (State().Find(fd) != nullptr) return 0;
  }
  return static_cast<int>(::syscall(SYS_sync_file_range, fd, offset, n, flags));
}

// Callers keep the size (FALLOC_FL_KEEP_SIZE): contents do not change.
int fallocate(int fd, int mode, off_t offset, off_t length) {
  const std::lock_guard lock(State().mutex);
  const auto* file = State().Find(fd);
  if (file != nullptr && State().Fails(Call::kAllocate, "fallocate", file->path)) return -1;
  return static_cast<int>(::syscall(SYS_fallocate, fd, mode, offset, length));
}

int ftruncate(int fd, off_t size) noexcept {
  const std::lock_guard lock(State().mutex);
  const auto* file = State().Find(fd);
  if (file != nullptr && State().Fails(Call::kTruncate, "ftruncate", file->path)) return -1;
  const int done = static_cast<int>(::syscall(SYS_ftruncate, fd, size));
  if (file != nullptr && done == 0) {
    State().record.push_back(
        {.kind = FileChange::Kind::kTruncate, .handle = file->handle, .offset = size});
  }
  return done;
}

int truncate(const char* path, off_t size) noexcept {
  const std::lock_guard lock(State().mutex);
  const auto relative = State().Relative(path);
  if (relative && State().Fails(Call::kTruncate, "truncate", *relative)) return -1;
  const int done = static_cast<int>(::syscall(SYS_truncate, path, size));
  if (relative && done == 0) {
    State().record.push_back(
        {.kind = FileChange::Kind::kTruncate, .path = *relative, .offset = size});
  }
  return done;
}

int rename(const char* from, const char* to) noexcept {
  const std::lock_guard lock(State().mutex);
  const auto relative = State().Relative(from);
  if (relative && State().Fails(Call::kRename, "rename", *relative)) return -1;
  const int done = static_cast<int>(::syscall(SYS_rename, from, to));
  if (relative && done == 0) {
    State().record.push_back({.kind = FileChange::Kind::kRename,
                              .path = *relative,
                              .to = State().Relative(to).value_or("")});
  }
  return done;
}

int unlink(const char* path) noexcept {
  const std::lock_guard lock(State().mutex);
  const auto relative = State().Relative(path);
  if (relative && State().Fails(Call::kUnlink, "unlink", *relative)) return -1;
  const int done = static_cast<int>(::syscall(SYS_unlink, path));
  if (relative && done == 0) {
    State().record.push_back({.kind = FileChange::Kind::kUnlink, .path = *relative});
  }
  return done;
}

int mkdir(const char* path, mode_t mode) noexcept {
  const std::lock_guard lock(State().mutex);
  const auto relative = State().Relative(path);
  if (relative && State().Fails(Call::kCreate, "mkdir", *relative)) return -1;
  const int done = static_cast<int>(::syscall(SYS_mkdir, path, mode));
  if (relative && done == 0) {
    State().record.push_back({.kind = FileChange::Kind::kMakeDirectory, .path = *relative});
  }
  return done;
}

}  // extern "C"
