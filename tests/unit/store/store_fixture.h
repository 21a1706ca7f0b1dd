// A store in a fresh folder, and small artifacts to put into it.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "store/checkpoint_store.h"

namespace stockpot::test {

// Inside a test the name Run is GoogleTest's.
using RunRecord = stockpot::Run;

// Removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "stockpot_XXXXXX").string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline std::vector<std::byte> RandomBytes(std::mt19937_64& random, size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, size - i));
  }
  return bytes;
}

inline std::vector<std::byte> Bytes(std::string_view text) {
  const auto span = std::as_bytes(std::span(text.data(), text.size()));
  return {span.begin(), span.end()};
}

// Puts `data` as a raw U8 tensor.
inline TensorEntry PutTensor(CheckpointStore& store, const std::string& name,
                             std::span<const std::byte> data) {
  TensorEntry tensor;
  tensor.name = name;
  tensor.dtype = DType::kU8;
  tensor.shape = {static_cast<int64_t>(data.size())};
  Result<Part> part = store.PutBytes(data);
  EXPECT_TRUE(part.ok()) << part.status().ToString();
  if (part.ok()) tensor.parts["data"] = *part;
  return tensor;
}

class StoreTest : public ::testing::Test {
 protected:
  StoreTest() { Open(); }

  StoreOptions Options() const {
    StoreOptions options;
    options.directory = folder_.path() / "data";
    options.clock = [this] { return now_ms_.load(); };
    options.pack_bytes = pack_bytes_;
    options.free_bytes_reserve = reserve_bytes_;
    return options;
  }

  void Open() {
    Result<std::unique_ptr<CheckpointStore>> store = CheckpointStore::Open(Options());
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = *std::move(store);
  }
  void Reopen() {
    store_.reset();
    Open();
  }
  std::filesystem::path packs() const { return folder_.path() / "data" / "packs"; }

  // Commits a base with one tensor of random bytes under an alias; returns its digest.
  Digest CommitBase(const std::string& name = "base", size_t bytes = 100'000) {
    Manifest manifest;
    manifest.kind = ArtifactKind::kBase;
    const auto data = RandomBytes(random_, bytes);
    manifest.tensors.push_back(PutTensor(*store_, "w", data));
    Result<Part> config = store_->PutBytes(Bytes("{}"));
    EXPECT_TRUE(config.ok());
    manifest.files["config.json"] = *config;
    Commit commit;
    commit.artifacts.push_back(manifest);
    commit.aliases.push_back({name, manifest.digest(), Digest{}, "test"});
    const Result<int64_t> applied = store_->Apply(std::move(commit));
    EXPECT_TRUE(applied.ok()) << applied.status().ToString();
    return manifest.digest();
  }

  RunRecord CommitRun(const std::string& name, const Digest& base) {
    RunRecord run{.name = name, .base = base};
    Commit commit;
    commit.runs.push_back(run);
    const Result<int64_t> applied = store_->Apply(std::move(commit));
    EXPECT_TRUE(applied.ok()) << applied.status().ToString();
    return run;
  }

  // A checkpoint of one tensor, not committed.
  Manifest MakeCheckpoint(const RunRecord& run, int64_t step, std::span<const std::byte> data) {
    Manifest manifest;
    manifest.kind = ArtifactKind::kCheckpoint;
    manifest.base = run.base;
    manifest.run = run.name;
    manifest.step = step;
    manifest.tensors.push_back(PutTensor(*store_, "w", data));
    return manifest;
  }

  static Commit CheckpointCommit(const Manifest& manifest) {
    Commit commit;
    commit.artifacts.push_back(manifest);
    commit.steps.push_back({.run = manifest.run,
                            .step = manifest.step,
                            .kind = manifest.kind,
                            .artifact = manifest.digest()});
    commit.edges.push_back({EdgeType::kTrainedFrom, manifest.digest(), *manifest.base});
    commit.events.push_back({.type = "checkpoint", .subject = manifest.run});
    return commit;
  }

  TemporaryFolder folder_;
  std::atomic<int64_t> now_ms_{1'000'000};
  int64_t pack_bytes_ = int64_t{256} << 20;
  int64_t reserve_bytes_ = 0;
  std::mt19937_64 random_{42};
  std::unique_ptr<CheckpointStore> store_;
};

}  // namespace stockpot::test
