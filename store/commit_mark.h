// The number of the last write of the catalogue that is known to be on disk, in a small file of its
// own. It tells a log that ends where the process died from one that was cut or damaged later: only
// the second lacks what the mark counts.
//
// The file holds two lines, "sequence 00000000000000012345 crc 89abcdef" and "manifest 000007 bytes
// 00000000000000001234 sum 01234567 crc 89abcdef". The second one is of RocksDB's list of its
// files: RocksDB takes one that was cut for a shorter list, and then deletes the files that are not
// on it. Each line is written after the sync it speaks of and not synced itself: after a loss of
// power it may count less than there is, never more. One that does not read (torn, damaged,
// missing) counts nothing.
//
// Thread promise: any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>

#include "kernels/base/status.h"
#include "store/file_handle.h"

namespace stockpot {

class CommitMark {
 public:
  // Makes the file if it is missing.
  static Result<std::unique_ptr<CommitMark>> Open(const std::filesystem::path& path);

  uint64_t last() const;
  // Writes up to `sequence` are on disk. A failure to note it costs evidence only.
  void Advance(uint64_t sequence);
  // Corruption if `sequence`, the last write that is there, is before the mark.
  Status Check(uint64_t sequence) const;

  // Syncs the list of files of the catalogue in `catalog`, and marks what it says by now. Cheap
  // while it stays the same. `opened`: the catalogue was just opened, which begins a new list. A
  // failure costs evidence only.
  void NoteFileList(const std::filesystem::path& catalog, bool opened = false);
  // Before the catalogue is opened. Corruption if its list of files does not begin with what is
  // marked, or is an older one.
  Status CheckFileList(const std::filesystem::path& catalog) const;

 private:
  // What is known of the MANIFEST file of that number: none where it is 0.
  struct FileList {
    uint64_t number = 0;
    int64_t bytes = 0;  // that it begins with
    uint32_t sum = 0;   // CRC32C of them
  };

  CommitMark(std::filesystem::path path, std::shared_ptr<FileHandle> file);
  void ReadFileList();

  const std::filesystem::path path_;
  const std::shared_ptr<FileHandle> file_;
  mutable std::mutex mutex_;
  uint64_t last_ = 0;   // guarded by mutex_
  FileList file_list_;  // guarded by mutex_
};

}  // namespace stockpot
