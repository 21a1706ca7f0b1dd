// What the ingest benches measure against: one raw file, written with direct I/O and synced once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace stockpot {

double Seconds();  // of a steady clock
[[noreturn]] void Die(const std::string& what);

// A fresh folder, removed with everything in it.
class BenchFolder {
 public:
  explicit BenchFolder(const std::filesystem::path& parent);
  ~BenchFolder();
  BenchFolder(const BenchFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Block-aligned and incompressible; after a Stamp with another number every 4 KiB differ, so that
// nothing is deduplicated.
class BenchData {
 public:
  explicit BenchData(int64_t bytes);
  void Stamp(int64_t number);
  std::span<const std::byte> span() const { return {data_.get(), static_cast<size_t>(bytes_)}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  int64_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// Writes `data` to a new file in blocks of 8 MiB, as packs are, and removes it.
double RawWriteSeconds(const BenchFolder& folder, std::span<const std::byte> data);

}  // namespace stockpot
