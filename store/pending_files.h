// Files of a folder that appear together: written as NAME.partial, renamed in the order they were
// begun, removed by the destructor otherwise. Internal to what writes files out.
// Thread promise: one thread.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"

namespace stockpot {

inline constexpr std::string_view kPartialSuffix = ".partial";

class PendingFiles {
 public:
  explicit PendingFiles(std::filesystem::path folder);
  ~PendingFiles();
  PendingFiles(const PendingFiles&) = delete;
  PendingFiles& operator=(const PendingFiles&) = delete;

  // One file at a time: Begin, Append any number of times, End, which syncs it.
  Status Begin(const std::string& name);
  Status Append(std::span<const std::byte> bytes);
  Status Append(std::string_view text) { return Append(std::as_bytes(std::span(text))); }
  Status End();
  Status Write(const std::string& name, std::string_view text);

  // Renames all of them, and syncs the folder.
  Status Publish();

 private:
  std::filesystem::path Partial(const std::string& name) const;
  void CloseFile();

  const std::filesystem::path folder_;
  std::vector<std::string> names_;
  int fd_ = -1;
};

}  // namespace stockpot
