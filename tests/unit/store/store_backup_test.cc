// Backup while serving, restore, and repair from the backup.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <thread>

#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using ::testing::HasSubstr;

constexpr size_t kTensorBytes = 200'000;

class StoreBackupTest : public StoreTest {
 protected:
  void SetUp() override {
    pack_bytes_ = 1 << 20;
    Reopen();
    run_ = CommitRun("r", CommitBase("base", 1000));
  }
  Digest CommitStep(int64_t step) {
    data_[step] = RandomBytes(random_, kTensorBytes);
    const Manifest m = MakeCheckpoint(run_, step, data_[step]);
    Commit commit = CheckpointCommit(m);
    commit.aliases.push_back({"r@latest", m.digest(), std::nullopt, "test"});
    EXPECT_TRUE(store_->Apply(std::move(commit)).ok());
    return m.digest();
  }
  BackupReport BackUp() {
    const auto report = store_->BackupTo(backup(), nullptr);
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    return report.ok() ? *report : BackupReport{};
  }
  std::filesystem::path backup() const { return folder_.path() / "backup"; }
  std::filesystem::path restored() const { return folder_.path() / "restored"; }

  std::unique_ptr<CheckpointStore> Restore() {
    const auto report = RestoreStore(backup(), restored(), Options().clock, nullptr);
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    StoreOptions options = Options();
    options.directory = restored();
    auto store = CheckpointStore::Open(options);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return store.ok() ? *std::move(store) : nullptr;
  }
  static std::vector<std::string> EventsOf(const CheckpointStore& store) {
    std::vector<std::string> events;
    for (const Event& event : store.EventsSince(0, 100'000)) {
      events.push_back(std::to_string(event.sequence) + " " + event.type + " " + event.subject);
    }
    return events;
  }
  // Everything of `store` is what `expected` holds.
  static void ExpectSame(const CheckpointStore& store, const CheckpointStore& expected) {
    EXPECT_EQ(store.ListArtifacts(), expected.ListArtifacts());
    EXPECT_EQ(EventsOf(store), EventsOf(expected));
    EXPECT_EQ(store.LastEvent(), expected.LastEvent());
    EXPECT_EQ(*store.ResolveName("r@latest"), *expected.ResolveName("r@latest"));
    EXPECT_EQ(store.ListSteps("r").size(), expected.ListSteps("r").size());
    for (const Digest& artifact : expected.ListArtifacts()) {
      const auto manifest = store.GetManifest(artifact);
      ASSERT_TRUE(manifest.ok());
      for (const TensorEntry& tensor : manifest->tensors) {
        const Part& part = tensor.parts.at("data");
        std::vector<std::byte> out(static_cast<size_t>(part.bytes));
        std::vector<std::byte> wanted(out.size());
        ASSERT_TRUE(store.ReadPart(part, 0, out).ok());
        ASSERT_TRUE(expected.ReadPart(part, 0, wanted).ok());
        ASSERT_EQ(out, wanted);
      }
    }
  }
  // Flips one bit of every copy of these bytes in the packs of a folder.
  static void Damage(const std::filesystem::path& packs, const std::vector<std::byte>& data) {
    const std::string needle(reinterpret_cast<const char*>(data.data()), 64);
    int flipped = 0;
    for (const auto& entry : std::filesystem::directory_iterator(packs)) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::string content{std::istreambuf_iterator<char>(file), {}};
      const size_t at = content.find(needle);
      if (at == std::string::npos) continue;
      const int fd = ::open(entry.path().c_str(), O_WRONLY);
      const char wrong = static_cast<char>(content[at] ^ 4);
      ASSERT_EQ(::pwrite(fd, &wrong, 1, static_cast<off_t>(at)), 1);
      ::close(fd);
      ++flipped;
    }
    ASSERT_GT(flipped, 0);
  }

  RunRecord run_;
  std::map<int64_t, std::vector<std::byte>> data_;
};

TEST_F(StoreBackupTest, IncrementalAndRestoredBitExactly) {
  for (int step = 0; step < 6; ++step) CommitStep(step);
  EXPECT_EQ(BackUp().copied_chunks, 8) << "two of the base, one a step";
  EXPECT_EQ(BackUp().copied_chunks, 0) << "nothing is new";
  CommitStep(6);
  const BackupReport report = BackUp();
  EXPECT_EQ(report.copied_chunks, 1);
  EXPECT_EQ(report.copied_bytes, static_cast<int64_t>(kTensorBytes));
  EXPECT_EQ(report.total_chunks, 9);
  EXPECT_EQ(report.event, store_->LastEvent());
  auto copy = Restore();
  ASSERT_NE(copy, nullptr);
  ExpectSame(*copy, *store_);
  // It is a store like any other: it takes commits, and its backups go on.
  Commit commit;
  commit.events.push_back({.type = "note", .subject = "restored"});
  EXPECT_EQ(*copy->Apply(std::move(commit)), store_->LastEvent() + 1);
  EXPECT_TRUE(copy->BackupTo(backup(), nullptr).ok());
}

TEST_F(StoreBackupTest, FollowsDeletionsAndGivesTheirBytesBack) {
  for (int step = 0; step < 12; ++step) CommitStep(step);
  BackUp();
  const auto bytes_of = [&] {
    int64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(backup() / "packs")) {
      bytes += static_cast<int64_t>(entry.file_size());
    }
    return bytes;
  };
  const int64_t before = bytes_of();
  Commit commit;
  for (int step = 0; step < 10; ++step) {
    commit.deletions.push_back({.artifact = *store_->ResolveName("r@" + std::to_string(step)),
                                .purge_ms = now_ms_,
                                .by = "ann"});
  }
  ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
  BackUp();
  EXPECT_EQ(Restore()->ListSteps("r").size(), 12u) << "deleted is not purged";
  std::filesystem::remove_all(restored());
  ASSERT_TRUE(store_->CollectGarbage({}).ok());
  BackUp();
  EXPECT_LE(bytes_of(), before - static_cast<int64_t>(9 * kTensorBytes));
  auto copy = Restore();
  ASSERT_NE(copy, nullptr);
  ExpectSame(*copy, *store_);
}

TEST_F(StoreBackupTest, WhileTrainingGoesOn) {
  std::atomic<bool> done{false};
  std::thread trainer([&] {
    for (int step = 0; step < 60; ++step) CommitStep(step);
    done = true;
  });
  int backups = 0;
  while (!done || backups == 0) {
    const auto report = store_->BackupTo(backup(), nullptr);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    ++backups;
    // Whatever moment it is of: whole.
    StoreOptions options = Options();
    options.directory = backup();
    auto copy = CheckpointStore::Open(options);
    ASSERT_TRUE(copy.ok());
    EXPECT_EQ((*copy)->LastEvent(), report->event);
    const auto steps = (*copy)->ListSteps("r");
    if (!steps.empty()) EXPECT_EQ(*(*copy)->ResolveName("r@latest"), steps.back().artifact);
    const auto scrubbed = (*copy)->Scrub(nullptr);
    ASSERT_TRUE(scrubbed.ok());
    EXPECT_TRUE(scrubbed->damaged.empty());
  }
  trainer.join();
  std::printf("%d backups beside 60 commits\n", backups);
  BackUp();
  ExpectSame(*Restore(), *store_);
}

TEST_F(StoreBackupTest, WrongFoldersAreRefused) {
  CommitStep(1);
  const auto code = [&](const std::filesystem::path& folder) {
    return store_->BackupTo(folder, nullptr).status().code();
  };
  EXPECT_EQ(code("relative"), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(folder_.path() / "data" / "backup"), StatusCode::kInvalidArgument);
  const auto other = folder_.path() / "other";
  std::filesystem::create_directories(other);
  std::ofstream(other / "thesis.txt") << "not ours";
  EXPECT_EQ(code(other), StatusCode::kInvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(other / "packs"));
  {
    StoreOptions options = Options();
    options.directory = folder_.path() / "store";
    auto store = CheckpointStore::Open(options);
    Commit commit;
    commit.events.push_back({.type = "note"});
    ASSERT_TRUE((*store)->Apply(std::move(commit)).ok());
    ASSERT_TRUE((*store)->BackupTo(folder_.path() / "its_backup", nullptr).ok());
  }
  EXPECT_THAT(store_->BackupTo(folder_.path() / "store", nullptr).status().message(),
              HasSubstr("not a backup"));
  EXPECT_THAT(store_->BackupTo(folder_.path() / "its_backup", nullptr).status().message(),
              HasSubstr("another store"));
  BackUp();
  {
    StoreOptions options = Options();
    options.directory = backup();
    auto store = CheckpointStore::Open(options);
    Commit commit;
    commit.events.push_back({.type = "note"});
    ASSERT_TRUE((*store)->Apply(std::move(commit)).ok());
  }
  EXPECT_THAT(store_->BackupTo(backup(), nullptr).status().message(), HasSubstr("written to"));
  EXPECT_EQ(RestoreStore(other, restored(), Options().clock, nullptr).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(RestoreStore(backup(), other, Options().clock, nullptr).status().code(),
            StatusCode::kAlreadyExists);
}

TEST_F(StoreBackupTest, DamageStopsABackupAndARestore) {
  for (int step = 0; step < 4; ++step) CommitStep(step);
  BackUp();
  CommitStep(4);
  Damage(packs(), data_[4]);
  EXPECT_EQ(store_->BackupTo(backup(), nullptr).status().code(), StatusCode::kCorruption);
  {
    auto copy = Restore();
    ASSERT_NE(copy, nullptr);
    EXPECT_EQ(copy->ListSteps("r").size(), 4u) << "the backup is what it was";
  }
  std::filesystem::remove_all(restored());
  Damage(backup() / "packs", data_[2]);
  EXPECT_EQ(RestoreStore(backup(), restored(), Options().clock, nullptr).status().code(),
            StatusCode::kCorruption);
  EXPECT_FALSE(std::filesystem::exists(restored()));
}

TEST_F(StoreBackupTest, RepairTakesWhatTheBackupHas) {
  for (int step = 0; step < 4; ++step) CommitStep(step);
  BackUp();
  CommitStep(4);
  Damage(packs(), data_[1]);
  Damage(packs(), data_[4]);  // the backup does not have it
  const auto report = store_->Repair(backup(), nullptr);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  ASSERT_EQ(report->damaged.size(), 2u);
  for (const ScrubReport::Damage& damage : report->damaged) {
    const bool in_backup = damage.chunk == Sha256(data_[1]);
    EXPECT_EQ(damage.repaired, in_backup);
    EXPECT_EQ(damage.needed_by.size(), 1u);
    EXPECT_THAT(damage.error, HasSubstr(in_backup ? ".pack" : "not repaired"));
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(*store_->ReadChunk(Sha256(data_[1])), data_[1]);
    const auto left = store_->Scrub(nullptr);
    ASSERT_TRUE(left.ok());
    ASSERT_EQ(left->damaged.size(), 1u);
    EXPECT_EQ(left->damaged[0].chunk, Sha256(data_[4]));
    Reopen();
  }
  EXPECT_EQ(store_->Repair("/nowhere", nullptr).status().code(), StatusCode::kInvalidArgument);
}

// Another rank, or the trainer that pushes again, has the bytes too.
TEST_F(StoreBackupTest, ADamagedChunkIsRepairedByPushingItAgain) {
  CommitStep(1);
  const std::vector<Digest> chunk = {Sha256(data_[1])};
  Damage(packs(), data_[1]);
  EXPECT_EQ(store_->HaveChunks(chunk), std::vector<bool>{true}) << "nobody has looked yet";
  ASSERT_EQ(store_->Scrub(nullptr)->damaged.size(), 1u);
  EXPECT_EQ(store_->HaveChunks(chunk), std::vector<bool>{false});
  ASSERT_TRUE(store_->PutChunk(chunk[0], data_[1]).ok());
  ASSERT_TRUE(store_->Apply({}).ok());
  EXPECT_EQ(store_->HaveChunks(chunk), std::vector<bool>{true});
  Reopen();
  EXPECT_EQ(*store_->ReadChunk(chunk[0]), data_[1]);
  EXPECT_TRUE(store_->Scrub(nullptr)->damaged.empty());
}

}  // namespace
}  // namespace stockpot::test
