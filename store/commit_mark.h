// The number of the last write of the catalogue that is known to be on disk, in a small file of its
// own. It tells a log that ends where the process died from one that was cut or damaged later: only
// the second lacks what the mark counts.
//
// The file holds one line, "sequence 00000000000000012345 crc 89abcdef". It is written after the
// sync it speaks of and not synced itself: after a loss of power it may count less than there is,
// never more. One that does not read (torn, damaged, empty) counts nothing.
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

 private:
  CommitMark(std::filesystem::path path, std::shared_ptr<FileHandle> file);

  const std::filesystem::path path_;
  const std::shared_ptr<FileHandle> file_;
  mutable std::mutex mutex_;
  uint64_t last_ = 0;  // guarded by mutex_
};

}  // namespace stockpot
