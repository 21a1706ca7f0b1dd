#include "tests/bench/raw_disk.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <system_error>

namespace stockpot {
namespace {

constexpr int64_t kRawWriteBytes = int64_t{8} << 20;  // as the packs'

}  // namespace

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Die(const std::string& what) {
  std::fprintf(stderr, "bench: %s\n", what.c_str());
  std::exit(1);
}

BenchFolder::BenchFolder(const std::filesystem::path& parent) {
  std::string pattern = (parent / "stockpot_bench_XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) Die("cannot make " + pattern);
  path_ = pattern;
}

BenchFolder::~BenchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

BenchData::BenchData(int64_t bytes) : bytes_(bytes) {
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, static_cast<size_t>(bytes))));
  if (data_ == nullptr) Die("no memory");
  std::mt19937_64 random(1);
  for (int64_t i = 0; i < bytes; i += 8) {
    const uint64_t word = random();
    std::memcpy(data_.get() + i, &word, 8);
  }
}

void BenchData::Stamp(int64_t number) {
  for (int64_t i = 0; i < bytes_; i += 4096) std::memcpy(data_.get() + i, &number, 8);
}

double RawWriteSeconds(const BenchFolder& folder, std::span<const std::byte> data) {
  const std::filesystem::path path = folder.path() / "raw";
  const double begin = Seconds();
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_DIRECT, 0644);
  if (fd < 0) Die("this file system has no direct I/O: give another --dir");
  for (size_t at = 0; at < data.size();) {
    const size_t n = std::min(data.size() - at, static_cast<size_t>(kRawWriteBytes));
    if (::write(fd, data.data() + at, n) != static_cast<ssize_t>(n)) Die("raw write");
    at += n;
  }
  if (::fdatasync(fd) != 0) Die("fdatasync");
  ::close(fd);
  const double seconds = Seconds() - begin;
  ::unlink(path.c_str());
  return seconds;
}

}  // namespace stockpot
