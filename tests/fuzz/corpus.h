// Where the writers of seeds put them.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "kernels/base/check.h"

namespace stockpot::fuzz {

// FOLDER/TARGET/seed_NAME. Seeds of another name in tests/fuzz/corpus come from long runs and from
// findings.
class Corpus {
 public:
  explicit Corpus(std::filesystem::path folder) : folder_(std::move(folder)) {}
  void Add(const std::string& target, const std::string& name, std::string_view bytes) const {
    std::filesystem::create_directories(folder_ / target);
    std::ofstream file(folder_ / target / ("seed_" + name), std::ios::binary);
    file << bytes;
    STOCKPOT_CHECK(file.good(), target, name);
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace stockpot::fuzz
