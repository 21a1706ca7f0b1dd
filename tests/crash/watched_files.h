// What this process does to the files below one folder, seen from under libc: the program that
// links watched_files.cc has open, pread, pwrite, write, fsync, fdatasync, sync_file_range, fallocate,
// ftruncate, truncate, rename, unlink and mkdir of its own, for itself and for every library it
// loads (RocksDB, libstdc++). They do what libc's do, and besides
//
//   fail one call    Fail(k, ...): the k-th call from then on fails, and only that one
//   keep a record    of everything that changes files, for LossyDisk to lose power at
//
// Syncs do not reach the disk while a folder is watched: nothing here survives the machine's own
// power loss, and nothing needs to.
//
// Thread promise: any thread; one WatchedFiles at a time in a process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace stockpot::crash {

// One change, in the order in which it was made. Paths are relative to the folder.
struct FileChange {
  enum class Kind {
    kOpen,           // path, handle, created, truncated
    kWrite,          // handle, offset, bytes
    kTruncate,       // handle (or path, handle 0), offset: the new size
    kSync,           // handle: everything written to the file is on disk
    kSyncDirectory,  // path: its entries are on disk
    kRename,         // path, to
    kUnlink,         // path
    kMakeDirectory,  // path
    kNote,           // note: what the test wants to know of the order
  };
  Kind kind = Kind::kNote;
  std::string path;
  std::string to;
  int64_t handle = 0;  // of one open()
  bool created = false;
  bool truncated = false;
  int64_t offset = 0;
  std::vector<std::byte> bytes;
  int64_t note = 0;
};

enum class Fault {
  kIoError,     // EIO, of any call
  kNoSpace,     // ENOSPC, of calls that need room: creating, writing, allocating, syncing, renaming
  kShortWrite,  // a write takes half of the bytes
};

class WatchedFiles {
 public:
  explicit WatchedFiles(const std::filesystem::path& root);
  ~WatchedFiles();
  WatchedFiles(const WatchedFiles&) = delete;
  WatchedFiles& operator=(const WatchedFiles&) = delete;

  // The k-th call that `fault` can meet, from now on, fails. k >= 1.
  void Fail(int64_t k, Fault fault);
  // No call fails any more. What was hit ("fdatasync packs/00000003.pack"); null: nothing.
  std::optional<std::string> StopFailing();

  void Note(int64_t note);
  // The record from the beginning or the last time on.
  std::vector<FileChange> TakeRecord();

 private:
  friend struct WatchedFilesState;
};

}  // namespace stockpot::crash
