// A folder of its own under TMPDIR, removed with everything in it. The fuzzers' runs name a folder
// in memory there.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "kernels/base/check.h"

namespace stockpot::fuzz {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "stockpot_fuzz_XXXXXX").string();
    STOCKPOT_CHECK(::mkdtemp(pattern.data()) != nullptr, pattern);
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace stockpot::fuzz
