// A file system that really fills up: a small tmpfs in a mount namespace of this process's own.
// Needs the right to mount (root, or user namespaces); elsewhere the test says that it was skipped.
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

constexpr char kSize[] = "size=64m";

// Null: not permitted here.
std::unique_ptr<TemporaryFolder> MountSmallDisk() {
  if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return nullptr;
  // Nothing of it may show outside.
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return nullptr;
  auto folder = std::make_unique<TemporaryFolder>();
  if (::mount("none", folder->path().c_str(), "tmpfs", 0, kSize) != 0) return nullptr;
  return folder;
}

class DiskFullTest : public ::testing::Test {
 protected:
  void SetUp() override {
    disk_ = MountSmallDisk();
    if (disk_ == nullptr) GTEST_SKIP() << "no right to mount a tmpfs";
    Open();
  }
  void TearDown() override {
    store_.reset();
    if (disk_ != nullptr) ::umount(disk_->path().c_str());
  }
  void Open() {
    store_.reset();
    auto store = CheckpointStore::Open(
        {.directory = disk_->path() / "data", .clock = SystemClock(), .free_bytes_reserve = 0});
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = *std::move(store);
  }
  void FillDisk() {
    std::ofstream file(filler(), std::ios::binary);
    const std::string block(4096, 'x');
    while (file.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  std::filesystem::path filler() const { return disk_->path() / "filler"; }

  static Commit LargeNote() {
    Commit commit;
    commit.events.push_back({.type = "note", .subject = std::string(2'000'000, 'x')});
    return commit;
  }

  std::unique_ptr<TemporaryFolder> disk_;
  std::unique_ptr<CheckpointStore> store_;
  std::mt19937_64 random_{7};
};

TEST_F(DiskFullTest, C15_CommitsAreRefusedThenResumeAndNothingAcknowledgedIsLost) {
  const auto data = RandomBytes(random_, 1'000'000);
  Manifest base;
  base.kind = ArtifactKind::kBase;
  base.tensors.push_back(PutTensor(*store_, "w", data));
  Commit commit;
  commit.artifacts.push_back(base);
  ASSERT_TRUE(store_->Apply(commit).ok());
  FillDisk();

  // The log still has room that was reserved for it, then it is full.
  int64_t acknowledged = 0;
  Status refused;
  for (int i = 0; i < 100 && refused.ok(); ++i) {
    refused = store_->Apply(LargeNote()).status();
    acknowledged += refused.ok();
  }
  ASSERT_EQ(refused.code(), StatusCode::kResourceExhausted) << refused.ToString();
  EXPECT_TRUE(IsRetryable(store_->Apply(LargeNote()).status().code()));
  EXPECT_EQ(store_->LastEvent(), acknowledged);
  EXPECT_EQ(static_cast<int64_t>(store_->EventsSince(0, 1000).size()), acknowledged);
  EXPECT_EQ(*store_->ReadChunk(Sha256(data)), data);
  const auto more = RandomBytes(random_, 1'000'000);

  std::filesystem::remove(filler());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  Result<int64_t> resumed = store_->Apply(LargeNote());
  while (!resumed.ok() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    resumed = store_->Apply(LargeNote());
  }
  ASSERT_TRUE(resumed.ok()) << resumed.status().ToString();
  EXPECT_EQ(*resumed, acknowledged + 1);
  EXPECT_TRUE(store_->PutChunk(Sha256(more), more).ok());
  Open();
  const auto events = store_->EventsSince(0, 1000);
  ASSERT_EQ(static_cast<int64_t>(events.size()), acknowledged + 1);
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i].sequence, static_cast<int64_t>(i) + 1);
  }
  EXPECT_EQ(*store_->ReadChunk(Sha256(data)), data);
  EXPECT_TRUE(store_->Scrub(nullptr)->damaged.empty());
}

// The disk fills up between the check of the reserve and the write.
TEST_F(DiskFullTest, APackThatMeetsTheFullDiskIsFinal) {
  std::vector<std::vector<std::byte>> chunks;
  for (int i = 0; i < 24; ++i) chunks.push_back(RandomBytes(random_, 4'000'000));
  Manifest base;
  base.kind = ArtifactKind::kBase;
  Status put;
  for (size_t i = 0; i < chunks.size() && put.ok(); ++i) {
    TensorEntry tensor{.name = "t" + std::to_string(10 + i),
                       .dtype = DType::kU8,
                       .shape = {static_cast<int64_t>(chunks[i].size())}};
    tensor.parts["data"] = {static_cast<int64_t>(chunks[i].size()), {Sha256(chunks[i])}};
    put = store_->PutChunk(Sha256(chunks[i]), chunks[i]);
    if (put.ok()) base.tensors.push_back(std::move(tensor));
  }
  EXPECT_EQ(put.code(), StatusCode::kResourceExhausted) << put.ToString();
  Commit commit;
  commit.artifacts.push_back(base);
  const Status refused = store_->Apply(commit).status();
  const bool visible = store_->HasArtifact(base.digest());
  EXPECT_EQ(visible, refused.ok()) << refused.ToString();
  EXPECT_TRUE(refused.ok() || IsRetryable(refused.code())) << refused.ToString();
  Open();
  EXPECT_EQ(store_->HasArtifact(base.digest()), visible);
  if (visible) {
    for (size_t i = 0; i < base.tensors.size(); ++i) {
      EXPECT_EQ(*store_->ReadChunk(Sha256(chunks[i])), chunks[i]);
    }
  }
}

}  // namespace
}  // namespace stockpot::test
