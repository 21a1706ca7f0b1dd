// Many threads put, commit, read and watch at once.
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

constexpr int kThreads = 6;
constexpr int kCommitsEach = 12;

using StoreConcurrencyTest = StoreTest;

TEST_F(StoreConcurrencyTest, CommitsAreSerialisedAndEventsHaveNoGaps) {
  pack_bytes_ = 2 << 20;
  Reopen();
  const RunRecord run = CommitRun("r", CommitBase());
  const auto shared = RandomBytes(random_, 150'000);  // everybody puts it
  std::atomic<int> committed{0};
  std::atomic<bool> writers_done{false};
  std::mutex sequences_mutex;
  std::set<int64_t> sequences;

  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t) + 1);
      for (int i = 0; i < kCommitsEach; ++i) {
        Manifest m = MakeCheckpoint(run, t * kCommitsEach + i,
                                    RandomBytes(random, 50'000 + random() % 300'000));
        m.tensors.push_back(PutTensor(*store_, "x", shared));
        const Result<int64_t> applied = store_->Apply(CheckpointCommit(m));
        ASSERT_TRUE(applied.ok()) << applied.status().ToString();
        // What is acknowledged is visible to everybody at once.
        ASSERT_TRUE(store_->HasArtifact(m.digest()));
        ++committed;
        std::lock_guard lock(sequences_mutex);
        sequences.insert(*applied);
      }
    });
  }
  std::thread watcher([&] {
    int64_t seen = 0;
    while (seen < kThreads * kCommitsEach) {
      if (!store_->WaitForEvents(seen, 60'000)) break;
      for (const Event& event : store_->EventsSince(seen, 7)) {
        ASSERT_EQ(event.sequence, seen + 1) << "a gap, or out of order";
        seen = event.sequence;
      }
    }
    ASSERT_EQ(seen, kThreads * kCommitsEach);
  });
  std::thread reader([&] {
    while (!writers_done) {
      for (const StepRecord& step : store_->ListSteps("r")) {
        const Result<Manifest> m = store_->GetManifest(step.artifact);
        ASSERT_TRUE(m.ok()) << "a visible step has its artifact: " << m.status().ToString();
        std::vector<std::byte> out(static_cast<size_t>(m->tensors[0].parts.at("data").bytes));
        const Status read = store_->ReadPart(m->tensors[0].parts.at("data"), 0, out);
        ASSERT_TRUE(read.ok()) << read.ToString();
      }
    }
  });
  for (std::thread& thread : threads) thread.join();
  writers_done = true;
  reader.join();
  watcher.join();
  EXPECT_EQ(committed, kThreads * kCommitsEach);
  EXPECT_EQ(store_->LastEvent(), kThreads * kCommitsEach);
  EXPECT_EQ(sequences.size(), static_cast<size_t>(kThreads * kCommitsEach));
  Reopen();
  EXPECT_EQ(store_->ListSteps("r").size(), static_cast<size_t>(kThreads * kCommitsEach));
  const Result<ScrubReport> report = store_->Scrub(nullptr);
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(report->damaged.empty());
}

// A job that ends queues the next one in the same commit: whoever looks sees one of them.
TEST_F(StoreConcurrencyTest, WorkThatGoesOnIsNeverSeenIdle) {
  constexpr int kJobs = 200;
  const auto job = [](int number, JobState state) {
    Job made;
    made.key = "job/" + std::to_string(number);
    made.kind = JobKind::kExpire;
    made.state = state;
    return made;
  };
  Commit first;
  first.jobs.push_back(job(0, JobState::kQueued));
  ASSERT_TRUE(store_->Apply(std::move(first)).ok());
  std::atomic<bool> is_done{false};
  std::atomic<int64_t> looks{0}, idle{0};
  std::vector<std::thread> readers;
  for (int t = 0; t < 2; ++t) {
    readers.emplace_back([&] {
      while (!is_done) {
        idle += store_->ListOpenJobs().empty();
        ++looks;
      }
    });
  }
  for (int number = 1; number < kJobs; ++number) {
    Commit commit;
    commit.jobs.push_back(job(number - 1, JobState::kDone));
    commit.jobs.push_back(job(number, JobState::kQueued));
    EXPECT_TRUE(store_->Apply(std::move(commit)).ok());
  }
  is_done = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(idle, 0) << "of " << looks << " looks";
  EXPECT_EQ(store_->ListOpenJobs().size(), 1u);
}

TEST_F(StoreConcurrencyTest, TheSameChunkPutByManyIsStoredOnce) {
  const auto data = RandomBytes(random_, 2'000'000);
  const Digest digest = Sha256(data);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] { ASSERT_TRUE(store_->PutChunk(digest, data).ok()); });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(store_->Apply({}).ok());
  EXPECT_EQ(store_->Usage().chunks, 1);
  EXPECT_LE(store_->Usage().pack_bytes, 2'000'000 + 3 * 4096);
}

TEST_F(StoreConcurrencyTest, OnlyOneOfManyWinsAStepAndAnAlias) {
  const RunRecord run = CommitRun("r", CommitBase());
  std::atomic<int> won{0};
  std::atomic<int> lost{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t) + 1);
      const Manifest m = MakeCheckpoint(run, 7, RandomBytes(random, 100'000));
      Commit commit = CheckpointCommit(m);
      commit.aliases.push_back({"winner", m.digest(), Digest{}, ""});
      const Result<int64_t> applied = store_->Apply(std::move(commit));
      ++(applied.ok() ? won : lost);
      ASSERT_TRUE(applied.ok() || applied.status().code() == StatusCode::kAlreadyExists);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(won, 1);
  EXPECT_EQ(lost, kThreads - 1);
  EXPECT_EQ(store_->GetAlias("winner")->artifact, store_->ListSteps("r")[0].artifact);
  EXPECT_EQ(store_->ListArtifacts().size(), 2u);
  EXPECT_EQ(store_->LastEvent(), 1);
}

}  // namespace
}  // namespace stockpot::test
