// The engine of builds without libFuzzer: runs a target over the files of a corpus, and over a
// fixed number of mutations of each, always the same ones.
//   PROGRAM [-mutations=N] FILE_OR_FOLDER...
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/target.h"

extern "C" {
int LLVMFuzzerInitialize(int* argc, char*** argv) __attribute__((weak));
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed)
    __attribute__((weak));
}

namespace {

constexpr size_t kMaxInputBytes = 64 << 10;

std::minstd_rand& EngineRandom() {
  static std::minstd_rand random(1);
  return random;
}

std::vector<std::filesystem::path> FilesOf(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) return {path};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<uint8_t> ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// In memory of exactly its size, so that a sanitizer sees a read past the end.
void RunOnce(const std::vector<uint8_t>& input) {
  const std::vector<uint8_t> exact(input.begin(), input.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

void RunMutations(const std::vector<uint8_t>& input, int count) {
  for (int i = 0; i < count; ++i) {
    std::vector<uint8_t> bytes = input;
    const size_t size = std::min(input.size(), kMaxInputBytes);
    bytes.resize(kMaxInputBytes);
    const auto seed = static_cast<unsigned int>(EngineRandom()());
    const size_t mutated = LLVMFuzzerCustomMutator != nullptr
                               ? LLVMFuzzerCustomMutator(bytes.data(), size, bytes.size(), seed)
                               : LLVMFuzzerMutate(bytes.data(), size, bytes.size());
    bytes.resize(mutated);
    RunOnce(bytes);
  }
}

}  // namespace

// A few bytes changed, inserted, or cut.
size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size) {
  std::minstd_rand& random = EngineRandom();
  for (size_t n = 1 + random() % 4; n > 0; --n) {
    const size_t at = size == 0 ? 0 : random() % size;
    switch (random() % 3) {
      case 0:
        if (size > 0) data[at] = static_cast<uint8_t>(random());
        break;
      case 1:
        if (size == max_size) break;
        std::memmove(data + at + 1, data + at, size - at);
        data[at] = static_cast<uint8_t>(random());
        ++size;
        break;
      default: {
        const size_t cut = size == 0 ? 0 : random() % std::min<size_t>(size - at, 16);
        std::memmove(data + at, data + at + cut, size - at - cut);
        size -= cut;
        break;
      }
    }
  }
  return size;
}

int main(int argc, char** argv) {
  if (LLVMFuzzerInitialize != nullptr) LLVMFuzzerInitialize(&argc, &argv);
  int mutations = 0, files = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    constexpr std::string_view kMutations = "-mutations=";
    if (argument.starts_with(kMutations)) {
      mutations = std::atoi(argument.c_str() + kMutations.size());
      continue;
    }
    for (const std::filesystem::path& path : FilesOf(argument)) {
      std::printf("%s\n", path.c_str());
      std::fflush(stdout);  // the last one named is the one that crashed
      const std::vector<uint8_t> input = ReadFile(path);
      RunOnce(input);
      RunMutations(input, mutations);
      ++files;
    }
  }
  std::printf("%d inputs, %d mutations of each\n", files, mutations);
  return files > 0 ? 0 : 1;  // a corpus that is not there proves nothing
}
