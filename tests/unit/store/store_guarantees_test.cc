// What goes wrong elsewhere, each on random histories against a slow model of the promise:
//   C2  retention runs only after the commit, and the only good checkpoint can never be deleted
//   C5  a collection deletes only what is proven unreferenced; its dry run says what and how much
//   C7  the best and the last are kept under any order of evaluations, late ones too
// Seeds are printed; STOCKPOT_SEED repeats one.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "store/ingest.h"
#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

constexpr int kHistories = 12;
constexpr int kOperations = 60;

class StoreGuaranteesTest : public StoreTest {
 protected:
  void SetUp() override {
    const char* given = std::getenv("STOCKPOT_SEED");
    const uint64_t seed =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("seed %lu\n", static_cast<unsigned long>(seed));
    random_.seed(seed);
    pack_bytes_ = 1 << 20;
    Reopen();
    base_ = CommitBase("base", 1000);
  }
  size_t Below(size_t n) { return static_cast<size_t>(random_() % n); }

  Digest base_;
};

// --- C2 ---

class RetentionGuaranteeTest : public StoreGuaranteesTest {
 protected:
  void BeginRun(const std::string& name) {
    ingest_ = std::make_unique<Ingest>(*store_, IngestLimits{}, Options().clock);
    ASSERT_TRUE(ingest_->CreateRun(name, "base", {.merge_every = 0}, {}).ok());
    Commit commit;
    commit.retention.push_back({name, {.keep_last = 1, .grace_ms = 0}});
    ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
    run_ = name;
    bytes_.clear();
    broken_.clear();
    newest_ = -1;
  }
  void Push(int64_t step, bool fails) {
    const auto session = ingest_->OpenSession({.run = run_, .step = step});
    ASSERT_TRUE(session.ok());
    const auto data = RandomBytes(random_, 1 + Below(200'000));
    ShardCommit shard{.metrics = {{"loss", static_cast<double>(Below(10))}}};
    shard.tensors.push_back(PutTensor(*store_, "w", data));
    if (fails) shard.tensors.push_back(shard.tensors[0]);  // a name twice: refused
    const std::set<int64_t> before = Steps();
    const auto reply = ingest_->CommitShard(*session, std::move(shard));
    ASSERT_EQ(reply.ok(), !fails) << reply.status().ToString();
    ASSERT_TRUE(StillThere(before)) << "a commit deleted something";
    if (fails) return;
    bytes_[step] = data;
    newest_ = std::max(newest_, step);
  }
  bool StillThere(const std::set<int64_t>& before) const {
    const std::set<int64_t> now = Steps();
    return std::includes(now.begin(), now.end(), before.begin(), before.end());
  }
  std::set<int64_t> Steps() const {
    std::set<int64_t> steps;
    for (const StepRecord& step : store_->ListSteps(run_)) {
      if (!step.deleted) steps.insert(step.step);
    }
    return steps;
  }
  // As the publish gate does: the job failed for what the artifact is.
  void Break(int64_t step) {
    const auto artifact = store_->ResolveName(run_ + "@" + std::to_string(step));
    if (!artifact.ok()) return;
    Job job{.key = "publish/" + artifact->Hex() + "/bitdelta/", .args = {{"artifact",
                                                                          artifact->Hex()}}};
    job.state = JobState::kFailed;
    job.error = "InvalidArgument: tensor 'w' is not finite";
    Commit commit;
    commit.jobs.push_back(job);
    ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
    broken_.insert(step);
  }
  void TryToDelete(int64_t step) {
    const auto artifact = store_->ResolveName(run_ + "@" + std::to_string(step));
    if (!artifact.ok()) return;
    const bool only_good = step == NewestGood() || step == newest_;
    Commit commit;
    commit.deletions.push_back({.artifact = *artifact, .purge_ms = now_ms_, .by = "ann"});
    const Status status = store_->Apply(std::move(commit)).status();
    if (only_good) {
      ASSERT_EQ(status.code(), StatusCode::kInvalidArgument) << step;
    }
  }
  // The newest that is there and not broken; -1: none.
  int64_t NewestGood() const {
    int64_t newest = -1;
    for (const int64_t step : Steps()) {
      if (!broken_.contains(step)) newest = std::max(newest, step);
    }
    return newest;
  }
  void Expect(int64_t good_before) {
    if (newest_ < 0) return;
    const auto latest = store_->ResolveName(run_ + "@latest");
    ASSERT_TRUE(latest.ok());
    ASSERT_EQ(*latest, *store_->ResolveName(run_ + "@" + std::to_string(newest_)));
    ASSERT_GE(NewestGood(), good_before) << "the only good one is gone";
    for (const int64_t step : {newest_, NewestGood()}) {
      if (step < 0) continue;
      const auto manifest =
          store_->GetManifest(*store_->ResolveName(run_ + "@" + std::to_string(step)));
      ASSERT_TRUE(manifest.ok());
      std::vector<std::byte> out(bytes_.at(step).size());
      ASSERT_TRUE(store_->ReadPart(manifest->tensors[0].parts.at("data"), 0, out).ok());
      ASSERT_EQ(out, bytes_.at(step));
    }
  }

  std::unique_ptr<Ingest> ingest_;
  std::string run_;
  std::map<int64_t, std::vector<std::byte>> bytes_;
  std::set<int64_t> broken_;
  int64_t newest_ = -1;
};

TEST_F(RetentionGuaranteeTest, C02_OnlyAfterCommitAndNeverTheOnlyGoodOne) {
  for (int history = 0; history < kHistories; ++history) {
    BeginRun("run" + std::to_string(history));
    for (int i = 0; i < kOperations && !HasFatalFailure(); ++i) {
      int64_t good = NewestGood();
      switch (Below(5)) {
        case 0:
        case 1:
          Push(newest_ + 1, Below(4) == 0);
          break;
        case 2: {
          const int64_t step = newest_ - static_cast<int64_t>(Below(3));
          if (step == good && Below(2) == 0) break;
          Break(step);
          if (step == good) good = NewestGood();
          break;
        }
        case 3:
          TryToDelete(newest_ - static_cast<int64_t>(Below(4)));
          break;
        case 4:
          ASSERT_TRUE(store_->ApplyRetention(Below(2) == 0 ? run_ : "").ok());
          ASSERT_TRUE(store_->CollectGarbage({}).ok());
          break;
      }
      Expect(good);
    }
    ASSERT_FALSE(HasFatalFailure()) << "history " << history;
  }
}

// A commit that does not become durable queues nothing: what was kept before is kept.
TEST_F(RetentionGuaranteeTest, C02_ACommitThatFailsQueuesNoRetention) {
  store_.reset();
  StoreOptions options = Options();
  options.failpoints = *Failpoints::FromText("commit.before_write=error@4");
  store_ = *CheckpointStore::Open(options);
  BeginRun("r");  // commits 1 and 2
  Push(0, false);
  ASSERT_TRUE(store_->GetJob("expire/r").has_value());
  const auto session = ingest_->OpenSession({.run = "r", .step = 1});
  ShardCommit shard;
  shard.tensors.push_back(PutTensor(*store_, "w", RandomBytes(random_, 1000)));
  const int64_t events = store_->LastEvent();
  ASSERT_EQ(ingest_->CommitShard(*session, shard).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(store_->LastEvent(), events);
  EXPECT_EQ(Steps(), std::set<int64_t>{0});
  ASSERT_TRUE(store_->ApplyRetention("r").ok());
  EXPECT_EQ(Steps(), std::set<int64_t>{0}) << "the step that failed must not count as the newest";
  ASSERT_TRUE(ingest_->CommitShard(*session, shard).ok()) << "the session outlives the failure";
}

// --- C5 ---

class CollectionGuaranteeTest : public StoreGuaranteesTest {
 protected:
  void SetUp() override {
    StoreGuaranteesTest::SetUp();
    run_ = CommitRun("r", base_);
    for (int i = 0; i < 24; ++i) {
      pool_.push_back(RandomBytes(random_, i % 3 == 0 ? 500 + Below(3000) : 70'000 + Below(90'000)));
    }
  }
  // Two to four tensors out of the pool: chunks are shared.
  void Add(int64_t step) {
    Manifest manifest{
        .kind = ArtifactKind::kCheckpoint, .base = base_, .run = "r", .step = step};
    std::set<size_t> chosen;
    for (size_t i = 2 + Below(3); i > 0; --i) chosen.insert(Below(pool_.size()));
    for (const size_t i : chosen) {
      manifest.tensors.push_back(PutTensor(*store_, "t" + std::to_string(10 + i), pool_[i]));
    }
    const auto applied = store_->Apply(CheckpointCommit(manifest));
    ASSERT_TRUE(applied.ok()) << applied.status().ToString();
    chunks_[manifest.digest()] = chosen;
  }
  void Delete(const Digest& artifact) {
    Commit commit;
    commit.deletions.push_back({.artifact = artifact, .purge_ms = now_ms_, .by = "ann"});
    if (store_->Apply(std::move(commit)).ok()) deleted_.insert(artifact);
  }
  // Put and never committed: nobody owns it.
  void Litter() { ASSERT_TRUE(store_->PutBytes(pool_[Below(pool_.size())]).ok()); }

  std::set<size_t> LiveChunks() const {
    std::set<size_t> live;
    for (const auto& [artifact, chunks] : chunks_) {
      if (!deleted_.contains(artifact)) live.insert(chunks.begin(), chunks.end());
    }
    return live;
  }
  bool Has(size_t chunk) const {
    const Digest digest = Sha256(pool_[chunk]);
    return store_->ReadChunk(digest).ok();
  }
  void CollectAndCompare() {
    ASSERT_TRUE(store_->Apply({}).ok()) << "what was put gets its place in the index";
    std::set<size_t> stored;
    for (size_t i = 0; i < pool_.size(); ++i) {
      if (Has(i)) stored.insert(i);
    }
    const std::set<size_t> live = LiveChunks();
    int64_t bytes = 0;
    int64_t count = 0;
    for (const size_t i : stored) {
      if (live.contains(i)) continue;
      bytes += static_cast<int64_t>(pool_[i].size());
      ++count;
    }
    const auto dry = store_->CollectGarbage({.dry_run = true});
    ASSERT_TRUE(dry.ok()) << dry.status().ToString();
    std::set<Digest> named;
    for (const auto& gone : dry->artifacts) named.insert(gone.artifact);
    ASSERT_EQ(named, deleted_);
    ASSERT_EQ(dry->chunk_bytes, bytes);
    ASSERT_EQ(dry->chunks, count);
    for (const size_t i : stored) ASSERT_TRUE(Has(i)) << "a dry run took a chunk";

    const auto report = store_->CollectGarbage({.live_ratio = 0.7});
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    ASSERT_EQ(report->chunk_bytes, bytes);
    for (size_t i = 0; i < pool_.size(); ++i) ASSERT_EQ(Has(i), live.contains(i)) << i;
    for (const Digest& artifact : deleted_) {
      ASSERT_TRUE(store_->WasPurged(artifact));
      chunks_.erase(artifact);
    }
    deleted_.clear();
    for (const auto& [artifact, chunks] : chunks_) {
      ASSERT_TRUE(store_->GetManifest(artifact).ok());
    }
  }

  RunRecord run_;
  std::vector<std::vector<std::byte>> pool_;
  std::map<Digest, std::set<size_t>> chunks_;  // of the artifacts that are not purged
  std::set<Digest> deleted_;
};

TEST_F(CollectionGuaranteeTest, C05_OnlyWhatIsProvenUnreferencedGoesAndTheDryRunSaysSo) {
  int64_t step = 0;
  for (int i = 0; i < kOperations * 4 && !HasFatalFailure(); ++i) {
    switch (Below(8)) {
      case 0:
        Litter();
        break;
      case 1:
      case 2:
        if (!chunks_.empty()) {
          Delete(std::next(chunks_.begin(), static_cast<ptrdiff_t>(Below(chunks_.size())))->first);
        }
        break;
      case 3:
        CollectAndCompare();
        break;
      case 4:
        if (Below(3) == 0) Reopen();
        break;
      default:
        Add(step++);
    }
  }
  ASSERT_FALSE(HasFatalFailure());
  CollectAndCompare();
  Reopen();
  EXPECT_TRUE(store_->Scrub(nullptr)->damaged.empty());
}

// --- C7 ---

TEST_F(StoreGuaranteesTest, C07_BestAndLastHoldUnderAnyOrderOfEvaluations) {
  constexpr int64_t kSteps = 8;
  constexpr int64_t kKeepBest = 2;
  for (int history = 0; history < kHistories; ++history) {
    const std::string name = "run" + std::to_string(history);
    const RunRecord run = CommitRun(name, base_);
    Commit rules;
    rules.retention.push_back(
        {name, {.keep_last = 2, .best = {{"task/acc", false, kKeepBest}}, .grace_ms = 1'000'000}});
    ASSERT_TRUE(store_->Apply(std::move(rules)).ok());
    // Commits in order; evaluations whenever they come, some before later commits, some long after.
    std::vector<double> values(kSteps);
    std::vector<int64_t> pending;
    std::map<int64_t, Digest> artifacts;
    int64_t committed = 0;
    while (committed < kSteps || !pending.empty()) {
      if (committed < kSteps && (pending.empty() || Below(2) == 0)) {
        const Manifest m = MakeCheckpoint(run, committed, RandomBytes(random_, 100));
        Commit commit = CheckpointCommit(m);
        commit.aliases.push_back({name + "@latest", m.digest(), std::nullopt, "test"});
        ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
        artifacts[committed] = m.digest();
        values[static_cast<size_t>(committed)] = static_cast<double>(Below(5));
        pending.push_back(committed++);
      } else {
        const size_t at = Below(pending.size());
        const int64_t step = pending[at];
        pending.erase(pending.begin() + static_cast<ptrdiff_t>(at));
        Commit commit;
        commit.evals.push_back({artifacts[step], "task", "acc", values[static_cast<size_t>(step)],
                                ++now_ms_, "test"});
        ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
      }
      if (Below(2) == 0) {
        ASSERT_TRUE(store_->ApplyRetention(name).ok());
      }
    }
    ASSERT_TRUE(store_->ApplyRetention(name).ok());
    // The slow model: sort all, best first, ties to the earlier.
    std::vector<int64_t> order(kSteps);
    for (int64_t step = 0; step < kSteps; ++step) order[static_cast<size_t>(step)] = step;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
    });
    std::set<int64_t> expected(order.begin(), order.begin() + kKeepBest);
    expected.insert({kSteps - 2, kSteps - 1});
    std::set<int64_t> kept;
    for (const StepRecord& step : store_->ListSteps(name)) {
      if (!step.deleted) kept.insert(step.step);
    }
    ASSERT_EQ(kept, expected) << "history " << history;
  }
}

}  // namespace
}  // namespace stockpot::test
