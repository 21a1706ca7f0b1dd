// Garbage collection on a real store: bytes come back, nothing that anybody needs goes.
#include <gmock/gmock.h>

#include <condition_variable>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>

#include "store/catalog.h"
#include "store/ingest.h"
#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using ::testing::HasSubstr;

constexpr size_t kTensorBytes = 300'000;

class StoreGarbageTest : public StoreTest {
 protected:
  void SetUp() override {
    pack_bytes_ = 2 << 20;
    Reopen();
    run_ = CommitRun("r", CommitBase("base", 1000));
  }

  Digest CommitStep(int64_t step, std::span<const std::byte> data) {
    const Manifest m = MakeCheckpoint(run_, step, data);
    Commit commit = CheckpointCommit(m);
    commit.aliases.push_back({"r@latest", m.digest(), std::nullopt, "test"});
    const auto applied = store_->Apply(std::move(commit));
    EXPECT_TRUE(applied.ok()) << applied.status().ToString();
    return m.digest();
  }
  Digest CommitStep(int64_t step) {
    data_[step] = RandomBytes(random_, kTensorBytes);
    return CommitStep(step, data_[step]);
  }
  void Delete(const Digest& artifact) {
    Commit commit;
    commit.deletions.push_back({.artifact = artifact, .purge_ms = now_ms_, .by = "ann"});
    const auto applied = store_->Apply(std::move(commit));
    ASSERT_TRUE(applied.ok()) << applied.status().ToString();
  }
  GarbageReport Collect(GarbageOptions options = {}) {
    const auto report = store_->CollectGarbage(options);
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    return report.ok() ? *report : GarbageReport{};
  }
  int64_t BytesOnDisk() const {
    int64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(packs())) {
      struct stat info;
      EXPECT_EQ(::stat(entry.path().c_str(), &info), 0);
      bytes += info.st_blocks * 512;
    }
    return bytes;
  }
  void ExpectStep(int64_t step) {
    const auto digest = store_->ResolveName("r@" + std::to_string(step));
    ASSERT_TRUE(digest.ok()) << digest.status().ToString();
    const auto manifest = store_->GetManifest(*digest);
    ASSERT_TRUE(manifest.ok());
    std::vector<std::byte> out(data_[step].size());
    const Status read = store_->ReadPart(manifest->tensors[0].parts.at("data"), 0, out);
    ASSERT_TRUE(read.ok()) << read.ToString();
    ASSERT_EQ(out, data_[step]) << step;
  }
  void ExpectWhole() {
    const auto report = store_->Scrub(nullptr);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_TRUE(report->damaged.empty());
  }

  RunRecord run_;
  std::map<int64_t, std::vector<std::byte>> data_;
};

// C5: the dry run names each and says what comes back; then exactly that comes back, on disk.
TEST_F(StoreGarbageTest, BytesComeBackOnDisk) {
  for (int step = 0; step < 20; ++step) CommitStep(step);
  const int64_t before = BytesOnDisk();
  std::set<Digest> deleted;
  for (int step = 0; step < 18; ++step) {
    if (step % 6 == 5) continue;  // survivors in the midst of packs
    deleted.insert(*store_->ResolveName("r@" + std::to_string(step)));
    Delete(*store_->ResolveName("r@" + std::to_string(step)));
  }
  const GarbageReport dry = Collect({.dry_run = true});
  EXPECT_EQ(BytesOnDisk(), before);
  EXPECT_EQ(store_->ListSteps("r").size(), 20u);
  EXPECT_EQ(dry.artifacts.size(), deleted.size());
  for (const auto& gone : dry.artifacts) {
    EXPECT_TRUE(deleted.contains(gone.artifact));
    EXPECT_EQ(gone.bytes, static_cast<int64_t>(kTensorBytes));
    EXPECT_EQ(gone.run, "r");
  }
  EXPECT_EQ(dry.chunk_bytes, static_cast<int64_t>(15 * kTensorBytes));

  const GarbageReport report = Collect();
  EXPECT_EQ(report.chunks, dry.chunks);
  EXPECT_EQ(report.chunk_bytes, dry.chunk_bytes);
  EXPECT_EQ(report.artifacts.size(), deleted.size());
  EXPECT_GT(report.packs_removed, 0);
  EXPECT_LE(BytesOnDisk(), before - static_cast<int64_t>(14 * kTensorBytes));
  EXPECT_EQ(report.pack_bytes_before - report.pack_bytes_after,
            report.pack_bytes_before - store_->Usage().pack_bytes);
  for (int i = 0; i < 2; ++i) {
    for (const int64_t step : {5, 11, 17, 18, 19}) ExpectStep(step);
    EXPECT_EQ(store_->ListSteps("r").size(), 5u);
    ExpectWhole();
    Reopen();
  }
  const GarbageReport again = Collect();
  EXPECT_EQ(again.chunks, 0);
  EXPECT_TRUE(again.artifacts.empty());
}

TEST_F(StoreGarbageTest, SharedChunksStayAndInlineOnesGo) {
  const auto shared = RandomBytes(random_, kTensorBytes);
  const Digest one = CommitStep(1, shared);
  data_[2] = shared;
  CommitStep(2, shared);
  const Digest small = CommitStep(3, RandomBytes(random_, 500));
  CommitStep(4);
  Delete(one);
  Delete(small);
  const GarbageReport report = Collect();
  EXPECT_EQ(report.chunk_bytes, 500);
  ASSERT_EQ(report.artifacts.size(), 2u);
  ExpectStep(2);
  ExpectStep(4);
  ExpectWhole();
}

TEST_F(StoreGarbageTest, GraceUndeleteAndLeasesAreRespected) {
  const Digest one = CommitStep(1);
  const Digest two = CommitStep(2);
  CommitStep(3);
  Commit commit;
  commit.deletions.push_back({.artifact = one, .purge_ms = now_ms_ + 1000, .by = "ann"});
  ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
  Delete(two);
  {
    const auto lease = store_->Lease(two);
    EXPECT_TRUE(Collect().artifacts.empty());
    ExpectStep(2);
  }
  EXPECT_EQ(Collect().artifacts.size(), 1u);
  ExpectStep(1);
  commit = {};
  commit.undeletions.push_back(one);
  ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
  now_ms_ += 5000;
  EXPECT_TRUE(Collect().artifacts.empty());
  ExpectStep(1);
}

// A session that was told a chunk is there, or that put one, finds it at its commit.
TEST_F(StoreGarbageTest, ChunksOfOpenSessionsStayAndThoseOfEndedOnesGo) {
  Ingest ingest(*store_, {.session_idle_ms = 1000}, [this] { return now_ms_.load(); });
  const Digest one = CommitStep(1);
  CommitStep(2);
  Delete(one);
  const Digest chunk = Sha256(data_[1]);
  auto fresh = RandomBytes(random_, kTensorBytes);

  const auto session = ingest.OpenSession({.run = "r", .step = 3});
  ASSERT_TRUE(session.ok());
  EXPECT_EQ(*ingest.HaveChunks(*session, std::vector<Digest>{chunk}), std::vector<bool>{true});
  ASSERT_TRUE(ingest.PutChunk(*session, Sha256(fresh), fresh).ok());
  ASSERT_TRUE(store_->Apply({}).ok());  // indexed, and nobody refers to it
  EXPECT_EQ(Collect().chunks, 0);
  ShardCommit shard;
  for (const auto& [name, data] : {std::pair("a", &data_[1]), std::pair("b", &fresh)}) {
    TensorEntry tensor{.name = name, .dtype = DType::kU8};
    tensor.shape = {static_cast<int64_t>(data->size())};
    tensor.parts["data"] = Part{static_cast<int64_t>(data->size()), {Sha256(*data)}};
    shard.tensors.push_back(tensor);
  }
  ASSERT_TRUE(ingest.CommitShard(*session, shard).ok());
  EXPECT_EQ(Collect().chunks, 0);
  ExpectWhole();

  // One that is left alone: expired, its chunks go.
  const auto lost = ingest.OpenSession({.run = "r", .step = 4});
  const auto orphan = RandomBytes(random_, kTensorBytes);
  ASSERT_TRUE(ingest.PutChunk(*lost, Sha256(orphan), orphan).ok());
  ASSERT_TRUE(store_->Apply({}).ok());
  EXPECT_EQ(Collect().chunks, 0);
  now_ms_ += 5000;
  EXPECT_EQ(ingest.ExpireIdle(), 1);
  EXPECT_EQ(Collect().chunk_bytes, static_cast<int64_t>(kTensorBytes));
  EXPECT_EQ(store_->HaveChunks(std::vector<Digest>{Sha256(orphan)}), std::vector<bool>{false});
}

// What an interrupted job will go on from outlives a restart and a collection; the end of the job
// gives it back.
TEST_F(StoreGarbageTest, TheDraftOfAJobStaysUntilTheJobEnds) {
  CommitStep(1);
  const auto fresh = RandomBytes(random_, kTensorBytes);
  Manifest made;
  made.kind = ArtifactKind::kVariant;
  made.base = store_->GetRun("r")->base;
  made.tensors.push_back(PutTensor(*store_, "half", fresh));
  Job job{.key = "publish/x", .kind = JobKind::kPublish, .state = JobState::kRunning};
  Commit commit;
  commit.jobs.push_back(job);
  commit.drafts.push_back({job.key, made});
  ASSERT_TRUE(store_->Apply(commit).ok());
  const std::vector<Digest> artifacts = store_->ListArtifacts();
  Reopen();
  EXPECT_EQ(Collect().chunks, 0);
  ASSERT_TRUE(store_->GetDraft(job.key));
  EXPECT_EQ(store_->GetDraft(job.key)->ToJson(), made.ToJson());
  EXPECT_EQ(store_->ListArtifacts(), artifacts) << "a draft is no artifact";
  EXPECT_EQ(*store_->ReadChunk(Sha256(fresh)), fresh);

  Commit lacking = commit;
  lacking.drafts[0].made.tensors[0].parts["data"].chunks[0] = Sha256("nobody put this");
  EXPECT_EQ(store_->Apply(lacking).status().code(), StatusCode::kInvalidArgument);

  job.state = JobState::kFailed;
  Commit end;
  end.jobs.push_back(job);
  ASSERT_TRUE(store_->Apply(end).ok());
  EXPECT_FALSE(store_->GetDraft(job.key));
  EXPECT_EQ(Collect().chunk_bytes, static_cast<int64_t>(kTensorBytes));
}

TEST_F(StoreGarbageTest, PacksThatNobodyNamesGo) {
  CommitStep(1);
  store_.reset();
  std::ofstream(packs() / "00000900.pack") << "left by a killed process";
  Open();
  EXPECT_GT(Collect().packs_removed, 0);
  EXPECT_FALSE(std::filesystem::exists(packs() / "00000900.pack"));
  ExpectStep(1);
  CommitStep(2);
  ExpectStep(2);
}

// Only what is proven unreferenced goes.
TEST_F(StoreGarbageTest, ADamagedManifestStopsTheCollection) {
  const Digest one = CommitStep(1);
  const Digest two = CommitStep(2);
  Delete(one);
  store_.reset();
  {
    auto catalog = Catalog::Open(folder_.path() / "data" / "catalog");
    ASSERT_TRUE(catalog.ok());
    CatalogBatch batch(**catalog);
    batch.Put(Column::kManifests, two.raw(), "{}");
    ASSERT_TRUE((*catalog)->Write(batch, true).ok());
  }
  Open();
  const auto report = store_->CollectGarbage({});
  EXPECT_EQ(report.status().code(), StatusCode::kCorruption);
  EXPECT_THAT(report.status().message(), HasSubstr(two.ShortHex()));
  EXPECT_EQ(store_->HaveChunks(std::vector<Digest>{Sha256(data_[1]), Sha256(data_[2])}),
            (std::vector<bool>{true, true}));
}

TEST_F(StoreGarbageTest, TheThrottleHolds) {
  for (int step = 0; step < 7; ++step) CommitStep(step);
  for (const int step : {0, 1, 3, 4}) Delete(*store_->ResolveName("r@" + std::to_string(step)));
  const auto begin = std::chrono::steady_clock::now();
  const GarbageReport report = Collect({.live_ratio = 1, .bytes_per_second = 1'000'000});
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  ASSERT_GE(report.copied_bytes, static_cast<int64_t>(2 * kTensorBytes));
  EXPECT_GE(seconds, static_cast<double>(report.copied_bytes) / 1e6);
  for (const int step : {2, 5, 6}) ExpectStep(step);
}

// What a dry run names, and its bytes, is what the real one then takes.
class PlannedGarbageTest : public StoreGarbageTest, public ::testing::WithParamInterface<int64_t> {};
INSTANTIATE_TEST_SUITE_P(GraceMs, PlannedGarbageTest, ::testing::Values(0, 1000));

TEST_P(PlannedGarbageTest, ADryRunKnowsWhatRetentionWouldDelete) {
  const int64_t grace_ms = GetParam();
  for (int step = 1; step <= 5; ++step) CommitStep(step);
  Commit commit;
  commit.retention.push_back({"r", {.keep_last = 2, .grace_ms = grace_ms}});
  ASSERT_TRUE(store_->Apply(commit).ok());
  const GarbageReport plan = Collect({.dry_run = true, .retention = true});
  ASSERT_EQ(plan.artifacts.size(), 3u);
  for (const GarbageReport::Gone& gone : plan.artifacts) {
    EXPECT_EQ(gone.run, "r");
    EXPECT_GT(gone.bytes, 0);
    EXPECT_EQ(gone.purge_ms, grace_ms == 0 ? 0 : now_ms_ + grace_ms);
  }
  EXPECT_TRUE(Collect({.dry_run = true}).artifacts.empty()) << "nothing is deleted yet";
  ASSERT_TRUE(store_->ApplyRetention("").ok());
  now_ms_ += grace_ms;
  const GarbageReport done = Collect();
  ASSERT_EQ(done.artifacts.size(), plan.artifacts.size());
  EXPECT_EQ(done.chunk_bytes, plan.chunk_bytes);
  for (size_t i = 0; i < done.artifacts.size(); ++i) {
    EXPECT_EQ(done.artifacts[i].artifact, plan.artifacts[i].artifact);
    EXPECT_EQ(done.artifacts[i].bytes, plan.artifacts[i].bytes);
  }
}

TEST_F(StoreGarbageTest, RetentionDeletesBringsBackAndTheCollectionFollows) {
  for (int step = 1; step <= 6; ++step) CommitStep(step);
  Commit commit;
  commit.retention.push_back(
      {"r", {.keep_last = 1, .best = {{"t/acc", false, 1}}, .grace_ms = 1000}});
  ASSERT_TRUE(store_->Apply(commit).ok());
  auto changes = store_->ApplyRetention("r", /*dry_run=*/true);
  ASSERT_TRUE(changes.ok());
  EXPECT_EQ(changes->deleted.size(), 5u);
  EXPECT_FALSE(store_->ListSteps("r")[0].deleted);
  changes = store_->ApplyRetention("r");
  ASSERT_TRUE(changes.ok()) << changes.status().ToString();
  EXPECT_EQ(changes->deleted.size(), 5u);
  EXPECT_TRUE(Collect().artifacts.empty()) << "the grace lasts";
  // A late evaluation makes step 3 the best.
  commit = {};
  commit.evals.push_back({*store_->ResolveName("r@3"), "t", "acc", 0.9, 5, "me"});
  ASSERT_TRUE(store_->Apply(commit).ok());
  changes = store_->ApplyRetention("");
  ASSERT_TRUE(changes.ok());
  EXPECT_EQ(changes->undeleted, std::vector<Digest>{*store_->ResolveName("r@3")});
  now_ms_ += 2000;
  EXPECT_EQ(Collect().artifacts.size(), 4u);
  ExpectStep(3);
  ExpectStep(6);
  EXPECT_EQ(store_->ListSteps("r").size(), 2u);
}

TEST_F(StoreGarbageTest, BadOptionsAreRefused) {
  EXPECT_EQ(store_->CollectGarbage({.live_ratio = 2}).status().code(),
            StatusCode::kInvalidArgument);
  // One byte a second would keep scrubs and backups waiting for years.
  for (const int64_t rate : {int64_t{-1}, int64_t{1}, kMinGarbageBytesPerSecond - 1,
                             std::numeric_limits<int64_t>::min()}) {
    const Status status = store_->CollectGarbage({.bytes_per_second = rate}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << rate;
    EXPECT_NE(status.message().find("bytes_per_second"), std::string::npos) << status.ToString();
  }
  EXPECT_TRUE(store_->CollectGarbage({.bytes_per_second = kMinGarbageBytesPerSecond}).ok());
  EXPECT_TRUE(
      store_->CollectGarbage({.bytes_per_second = std::numeric_limits<int64_t>::max()}).ok());
}

// Threads that push what others delete, again and again, while garbage is collected as fast as it
// goes: whatever is acknowledged can be read, and nobody is told of a chunk that is gone.
TEST_F(StoreGarbageTest, ConcurrentIngestReadsAndCollections) {
  constexpr int kWriters = 3;
  constexpr int kRounds = 25;
  Ingest ingest(*store_, {}, SystemClock());
  std::vector<std::vector<std::byte>> pool;
  for (int i = 0; i < 40; ++i) pool.push_back(RandomBytes(random_, 70'000 + 2'000 * i));
  std::atomic<bool> done{false};
  std::atomic<int> collections{0};
  std::atomic<int64_t> collected{0};

  const auto writer = [&](int t) {
    std::mt19937_64 random(static_cast<uint64_t>(t) + 1);
    for (int round = 0; round < kRounds; ++round) {
      const int64_t step = t * kRounds + round;
      const auto session = ingest.OpenSession({.run = "r", .step = step});
      ASSERT_TRUE(session.ok());
      ShardCommit shard;
      std::vector<const std::vector<std::byte>*> tensors;
      for (int i = 0; i < 2; ++i) {
        const auto& data = pool[random() % pool.size()];
        const Digest digest = Sha256(data);
        const auto have = ingest.HaveChunks(*session, std::vector<Digest>{digest});
        ASSERT_TRUE(have.ok());
        if (!(*have)[0]) ASSERT_TRUE(ingest.PutChunk(*session, digest, data).ok());
        TensorEntry tensor{.name = "t" + std::to_string(i), .dtype = DType::kU8};
        tensor.shape = {static_cast<int64_t>(data.size())};
        tensor.parts["data"] = Part{static_cast<int64_t>(data.size()), {digest}};
        shard.tensors.push_back(tensor);
        tensors.push_back(&data);
        if (random() % 2 == 0) std::this_thread::yield();
      }
      const auto reply = ingest.CommitShard(*session, shard);
      ASSERT_TRUE(reply.ok()) << reply.status().ToString();
      {
        const auto lease = store_->Lease(reply->artifact);
        if (lease.ok()) {
          for (int i = 0; i < 2; ++i) {
            std::vector<std::byte> out(tensors[i]->size());
            const Status read = store_->ReadPart(shard.tensors[i].parts["data"], 0, out);
            ASSERT_TRUE(read.ok()) << read.ToString();
            ASSERT_EQ(out, *tensors[i]);
          }
        }
      }
      // Deleted at once, unless something holds it.
      Commit commit;
      commit.deletions.push_back({.artifact = reply->artifact, .purge_ms = 0, .by = "ann"});
      static_cast<void>(store_->Apply(std::move(commit)));
    }
  };
  ASSERT_TRUE(ingest
                  .CreateRun("r", run_.base.Hex(),
                             {.merge_every = 0, .publish = PublishPolicy::kOnRequest}, {})
                  .ok());
  std::thread collector([&] {
    while (!done) {
      const auto report = store_->CollectGarbage({.live_ratio = 0.9});
      ASSERT_TRUE(report.ok()) << report.status().ToString();
      collected += report->chunks;
      ++collections;
    }
  });
  std::vector<std::thread> writers;
  for (int t = 0; t < kWriters; ++t) writers.emplace_back(writer, t);
  for (std::thread& thread : writers) thread.join();
  done = true;
  collector.join();
  std::printf("%d collections took %ld chunks\n", collections.load(),
              static_cast<long>(collected.load()));
  EXPECT_GT(collections, 1);
  EXPECT_GT(collected, 10) << "the writers kept everything alive";
  EXPECT_TRUE(store_->ResolveName("r@latest").ok());
  ExpectWhole();
  Reopen();
  ExpectWhole();
}

}  // namespace
}  // namespace stockpot::test
