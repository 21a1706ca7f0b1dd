#include "store/adapter_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>
#include <thread>

#include "store/pipeline.h"
#include "tests/unit/pipeline/pool_world.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using namespace stockpot::test;

constexpr int64_t kRank = 4;
constexpr int64_t kIdleMs = 60'000;

class AdapterPool : public ::testing::Test {
 protected:
  AdapterPool() {
    store_ = OpenStore(folder_.path() / "data");
    base_ = *CommitPoolBase(*store_);
    const Digest probe = Adapter(1, 1);
    one_ = AdapterBytesOf(*store_->GetManifest(probe)).total();
  }
  ~AdapterPool() override { pipeline_.reset(); }

  Digest Adapter(uint64_t direction, uint64_t seed, int64_t rank = kRank, double noise = 0.3) {
    const auto digest =
        CommitPoolAdapter(*store_, base_, PoolDelta(direction, seed, rank, noise), DType::kF32);
    EXPECT_OK(digest);
    return *digest;
  }

  // `room`: budget in adapters of rank kRank, over what the record of a pool with three tasks
  // takes.
  void Create(double room, PoolConfig config = {.threshold = std::nullopt, .quality = 0.95}) {
    config.base = base_;
    config.budget_bytes = kPoolMemberBytes + 600 + 3 * (kPoolTaskBytes + 600) +
                          static_cast<int64_t>(room * static_cast<double>(one_));
    ASSERT_OK(CreatePool(*store_, "p", config, 1));
  }

  void Start(ScoreFunction score) {
    Pipeline::Options options;
    options.merge = [](CheckpointStore&, std::span<const Digest>, const std::string&, int64_t,
                       const MergeOptions&, const ProgressFunction&) -> Result<Manifest> {
      return Internal("no merge in this test");
    };
    options.score = std::move(score);
    options.requests = [this](const std::string& route) { return requests_[route]; };
    options.clock = SystemClock();
    pipeline_ = std::make_unique<Pipeline>(*store_, std::move(options));
  }

  // The job, ended.
  Job Run(Job job) {
    const std::string key = job.key;
    EXPECT_OK(pipeline_->Submit(std::move(job)));
    EXPECT_TRUE(pipeline_->WaitIdle(kIdleMs));
    // The runner cleans after the outcome is there: an empty commit's turn says it is idle.
    for (int i = 0; i < 500; ++i) {
      const Result<PoolRecord> pool = store_->GetPool("p");
      if (!pool.ok() || pool->leaving.empty()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_OK(CheckPools(*store_));
    return *store_->GetJob(key);
  }
  Job Add(const std::string& task, const Digest& adapter, bool with_texts = true) {
    PoolAddRequest request{.pool = "p", .tasks = {task}, .artifact = adapter, .owned = true};
    if (with_texts) request.texts = {{"t", "held out"}};
    return Run(MakePoolAddJob(request));
  }
  PoolRecord Pool() const { return *store_->GetPool("p"); }
  static std::string Text(const Event& event) {
    std::string text = event.type;
    for (const auto& [name, value] : event.fields) text += "\n  " + name + ": " + value;
    return text;
  }
  Event LastPoolEvent() const {
    Event last;
    for (const Event& event : store_->EventsSince(0, 100'000)) {
      if (event.type.starts_with("pool")) last = event;
    }
    return last;
  }

  TemporaryFolder folder_;
  std::unique_ptr<CheckpointStore> store_;
  Digest base_;
  int64_t one_ = 0;  // bytes of an adapter
  std::map<std::string, int64_t> requests_;
  std::unique_ptr<Pipeline> pipeline_;
};

TEST_F(AdapterPool, KeepsApartWhatFitsAndIsTheAdapterItself) {
  Create(4);
  Start(FakeScore(0));
  const Digest a = Adapter(1, 1), b = Adapter(2, 2);
  EXPECT_EQ(Add("a", a).state, JobState::kDone);
  EXPECT_EQ(Add("b", b).state, JobState::kDone);
  EXPECT_EQ(store_->GetRoute("p/a")->variant, a);
  EXPECT_EQ(store_->GetRoute("p/b")->variant, b);
  EXPECT_EQ(LastPoolEvent().fields.at("outcome"), "apart");
  EXPECT_EQ(Add("also", a).state, JobState::kDone);
  EXPECT_EQ(LastPoolEvent().fields.at("outcome"), "joined");
  EXPECT_EQ(Pool().members.size(), 2u);
  const Job again = Add("a", b);
  EXPECT_EQ(again.state, JobState::kFailed);
  EXPECT_NE(again.error.find("remove it first"), std::string::npos) << again.error;
}

// Equal to the merge itself, with the lineage, and what left is collected.
TEST_F(AdapterPool, MergesWhatIsSimilar) {
  for (const PoolMethod method :
       {PoolMethod::kOpcm, PoolMethod::kMean, PoolMethod::kTaskArithmetic}) {
    SCOPED_TRACE(PoolMethodName(method));
    if (method != PoolMethod::kOpcm) {
      pipeline_.reset();
      store_.reset();
      store_ = OpenStore(folder_.path() / PoolMethodName(method));
      base_ = *CommitPoolBase(*store_);
    }
    Create(4, {.method = method, .threshold = 0.2});
    Start(FakeScore(0));
    const AdapterDelta x = PoolDelta(1, 1, kRank, 0.3), y = PoolDelta(1, 2, kRank, 0.3);
    const Digest a = Adapter(1, 1), b = Adapter(1, 2);
    EXPECT_EQ(Add("a", a).state, JobState::kDone);
    const Job job = Add("b", b);
    ASSERT_EQ(job.state, JobState::kDone) << job.error;
    const PoolRecord pool = Pool();
    ASSERT_EQ(pool.members.size(), 1u);
    EXPECT_EQ(store_->GetRoute("p/a")->variant, pool.members[0].artifact);
    EXPECT_EQ(store_->GetRoute("p/b")->variant, pool.members[0].artifact);
    const Manifest merged = *store_->GetManifest(pool.members[0].artifact);
    const LoadedAdapter got = *LoadAdapterDelta(*store_, merged, *store_->GetManifest(base_));
    const AdapterMerge wanted =
        *MergeAdapter(x, *FreshState(x), y, {.method = method, .rank = kRank});
    EXPECT_EQ(pool.members[0].state.count, 2);
    EXPECT_NEAR(pool.members[0].state.lambda, wanted.state.lambda, 1e-5);
    // In float32: both merges are of the same factors but for their rounding.
    AdapterMerge off = *WeightedSum({&got.delta, &wanted.merged}, {1, -1}, 0);
    EXPECT_LT(*AdapterNorm(off.merged), 1e-5 * *AdapterNorm(wanted.merged));
    std::set<Digest> parents;
    for (const Edge& edge : store_->Parents(pool.members[0].artifact)) {
      if (edge.type == EdgeType::kPooledFrom) parents.insert(edge.parent);
    }
    EXPECT_EQ(parents, (std::set<Digest>{a, b}));
    EXPECT_TRUE(pool.leaving.empty());
    for (int i = 0; i < 500 && store_->HasArtifact(b); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_FALSE(store_->HasArtifact(a)) << "a former member is collected";
    EXPECT_FALSE(store_->HasArtifact(b)) << "and what came for the pool alone";
    const Event event = LastPoolEvent();
    EXPECT_EQ(event.fields.at("outcome"), "merged");
    EXPECT_EQ(event.fields.at("quality"), "a 1 1\nb 1 1");
  }
}

TEST_F(AdapterPool, AMergeThatCostsQualityIsKeptApartWhereItFits) {
  Create(4, {.threshold = 0.2, .quality = 0.95});
  Start([](const ScoreRequest& request, const ProgressFunction&) -> Result<ProbeScores> {
    const bool made = request.models[0]->attributes.contains("method");
    return ProbeScores{.tokens = 10, .models = {{.loss = made ? 3.0 : 2.0}}};
  });
  EXPECT_EQ(Add("a", Adapter(1, 1)).state, JobState::kDone);
  EXPECT_EQ(Add("b", Adapter(1, 2)).state, JobState::kDone);
  const Event event = LastPoolEvent();
  EXPECT_EQ(event.fields.at("outcome"), "apart");
  EXPECT_NE(event.fields.at("path").find("worse than 0.95"), std::string::npos)
      << event.fields.at("path");
  EXPECT_EQ(Pool().members.size(), 2u);
}

// What cannot be measured is not risked while there is room; then similarity decides.
TEST_F(AdapterPool, WithoutTextsSimilarityDecidesWhereThereIsNoRoomAndTheEventSaysSo) {
  Create(3.5, {.threshold = 0.2});
  Start(FakeScore(10));
  EXPECT_EQ(Add("a", Adapter(1, 1), false).state, JobState::kDone);
  EXPECT_EQ(Add("b", Adapter(1, 2), false).state, JobState::kDone);
  EXPECT_EQ(LastPoolEvent().fields.at("outcome"), "apart");
  EXPECT_EQ(Add("c", Adapter(1, 3), false).state, JobState::kDone);
  EXPECT_EQ(LastPoolEvent().fields.at("outcome"), "merged");
  EXPECT_EQ(LastPoolEvent().fields.at("unmeasured").size(), 3u) << "two of the three tasks";
}

TEST_F(AdapterPool, TheThresholdIsAQuantileOfThePool) {
  EXPECT_FALSE(PoolThreshold({.threshold = std::nullopt}, {0.1, 0.2}));
  EXPECT_DOUBLE_EQ(*PoolThreshold({.threshold = std::nullopt}, {0.3, 0.1, 0.2}), 0.2);
  EXPECT_DOUBLE_EQ(
      *PoolThreshold({.threshold = std::nullopt, .quantile = 0.25}, {0.3, 0.1, 0.2, 0.5, 0.4}),
      0.2);
  EXPECT_DOUBLE_EQ(*PoolThreshold({.threshold = 0.7}, {0.3, 0.1, 0.2}), 0.7);
  // Independent ones: hardly a similarity, and some of it below zero.
  EXPECT_DOUBLE_EQ(*PoolThreshold({.threshold = std::nullopt}, {-0.003, 0.001, -0.01}),
                   kLeastPoolSimilarity);
  EXPECT_DOUBLE_EQ(*PoolThreshold({.threshold = -1.0}, {0.3, 0.1, 0.2}), -1.0);
}

// Unlike ones in a full pool, whose merge would cost too much: first with less rank, then in place
// of the one that was asked for least, then not at all.
TEST_F(AdapterPool, TheRejectPath) {
  Create(3.8, {.threshold = 1.0, .quality = 0.9});
  Start([](const ScoreRequest& request, const ProgressFunction&) -> Result<ProbeScores> {
    const auto& attributes = request.models[0]->attributes;
    const auto it = attributes.find("method");
    const bool merged = it != attributes.end() && it->second != "shrink";
    return ProbeScores{.tokens = 10, .models = {{.loss = merged ? 9.0 : 2.0}}};
  });
  const Digest a = Adapter(1, 1);
  EXPECT_EQ(Add("a", a).state, JobState::kDone);
  EXPECT_EQ(Add("b", Adapter(2, 2)).state, JobState::kDone);
  // Two members and the room for the larger one a second time: less than an adapter is left.
  const Job shrunk = Add("c", Adapter(3, 3));
  ASSERT_EQ(shrunk.state, JobState::kDone) << shrunk.error;
  Event event = LastPoolEvent();
  ASSERT_EQ(event.fields["outcome"], "shrunk") << Text(event);
  EXPECT_LT(std::stoi(event.fields.at("rank")), kRank);
  requests_ = {{"p/a", 5}, {"p/b", 1}, {"p/c", 9}};
  EXPECT_EQ(Add("d", Adapter(4, 4)).state, JobState::kDone);
  event = LastPoolEvent();
  EXPECT_EQ(event.fields.at("outcome"), "apart, another one evicted");
  EXPECT_EQ(event.fields.at("evicted"), "b");
  EXPECT_FALSE(store_->GetRoute("p/b"));
  EXPECT_EQ(store_->GetRoute("p/a")->variant, a);

  const PoolRecord before = Pool();
  const size_t routes = store_->ListRoutes().size();
  const Digest large = Adapter(5, 5, 16);
  const Job refused = Add("e", large);
  EXPECT_EQ(refused.state, JobState::kFailed);
  EXPECT_EQ(refused.attempts, 1);
  for (const std::string& part :
       {std::string("ResourceExhausted"), std::to_string(before.config.budget_bytes),
        std::to_string(*PoolBytes(*store_, before))}) {
    EXPECT_NE(refused.error.find(part), std::string::npos) << refused.error;
  }
  EXPECT_EQ(LastPoolEvent().type, "pool_refused");
  EXPECT_EQ(Pool(), before);
  EXPECT_EQ(store_->ListRoutes().size(), routes);
  for (int i = 0; i < 500 && store_->HasArtifact(large); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_FALSE(store_->HasArtifact(large));
}

TEST_F(AdapterPool, RemoveAndEvict) {
  Create(6);
  Start(FakeScore(0));
  const Digest a = Adapter(1, 1), b = Adapter(2, 2);
  Add("a", a);
  Add("a2", a);
  Add("b", b);
  requests_ = {{"p/a", 2}, {"p/b", 1}};
  EXPECT_EQ(Run(MakePoolRemoveJob("p", "a2")).state, JobState::kDone);
  EXPECT_EQ(Pool().members.size(), 2u) << "its member has another task";
  EXPECT_EQ(Run(MakePoolEvictJob("p")).state, JobState::kDone);
  EXPECT_EQ(LastPoolEvent().fields.at("tasks"), "b");
  EXPECT_EQ(Run(MakePoolRemoveJob("p", "b")).state, JobState::kFailed);
  EXPECT_EQ(Run(MakePoolEvictJob("p")).state, JobState::kDone);
  EXPECT_TRUE(Pool().members.empty() && Pool().tasks.empty());
  EXPECT_EQ(Run(MakePoolEvictJob("p")).state, JobState::kFailed);
  EXPECT_FALSE(store_->HasArtifact(a));
  EXPECT_EQ(Add("a", Adapter(1, 1)).state, JobState::kDone) << "it may come again";
}

TEST_F(AdapterPool, IsDeletedWithWhatIsItsAlone) {
  Create(6);
  Start(FakeScore(0));
  const Digest a = Adapter(1, 1), b = Adapter(2, 2);
  Add("a", a);
  Run(MakePoolAddJob({.pool = "p", .tasks = {"b"}, .artifact = b}));
  const PoolRecord before = Pool();
  const Job refused = Run(MakePoolDeleteJob("p", false));
  EXPECT_EQ(refused.state, JobState::kFailed);
  EXPECT_NE(refused.error.find("2 tasks (a, b): --force"), std::string::npos) << refused.error;
  EXPECT_EQ(Pool(), before);

  EXPECT_EQ(Run(MakePoolDeleteJob("p", true)).state, JobState::kDone);
  EXPECT_EQ(store_->GetPool("p").status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(store_->ListPools().empty());
  EXPECT_FALSE(store_->GetRoute("p/a") || store_->GetRoute("p/b"));
  EXPECT_FALSE(store_->HasArtifact(a)) << "it came for the pool alone";
  EXPECT_TRUE(store_->HasArtifact(b) && !store_->GetTombstone(b)) << "it did not";
  EXPECT_EQ(LastPoolEvent().fields.at("tasks"), "a,b");
  EXPECT_EQ(Run(MakePoolDeleteJob("p", true)).state, JobState::kFailed) << "there is none";

  Create(6);  // by the same name, and empty
  EXPECT_TRUE(Pool().tasks.empty() && Pool().similarities.empty());
  EXPECT_EQ(Add("a", Adapter(1, 1)).state, JobState::kDone);
  EXPECT_EQ(store_->GetRoute("p/a")->variant, a);
  Run(MakePoolRemoveJob("p", "a"));
  EXPECT_EQ(Run(MakePoolDeleteJob("p", false)).state, JobState::kDone) << "an empty one";
  EXPECT_EQ(store_->GetPool("p").status().code(), StatusCode::kNotFound);
}

// What a commit alone says: routes would be left without a pool.
TEST_F(AdapterPool, WithTasksDoesNotGoInACommit) {
  Create(6);
  Start(FakeScore(0));
  Add("a", Adapter(1, 1));
  PoolRecord pool = Pool();
  const int64_t version = std::exchange(pool.version, 0);
  Commit commit;
  commit.pools.push_back({.pool = pool, .expected = version});
  EXPECT_EQ(store_->Apply(std::move(commit)).status().code(), StatusCode::kInvalidArgument);
  EXPECT_OK(store_->GetPool("p"));
}

TEST_F(AdapterPool, RecordsAreChecked) {
  EXPECT_EQ(CreatePool(*store_, "x", {.base = base_, .budget_bytes = 10}, 1).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_FALSE(CreatePool(*store_, "a/b", {.base = base_, .budget_bytes = 1 << 20}, 1).ok());
  EXPECT_FALSE(
      CreatePool(*store_, "x", {.base = base_, .budget_bytes = 1 << 20, .quality = 2}, 1).ok());
  Create(1);
  EXPECT_EQ(CreatePool(*store_, "p", {.base = base_, .budget_bytes = 1 << 20}, 1).status().code(),
            StatusCode::kAlreadyExists);
  const PoolRecord pool = Pool();
  EXPECT_EQ(*DecodePool(EncodePool(pool)), pool);
  for (const char* text : {"", "{}", "[1]", "{\"name\":1}"}) {
    EXPECT_EQ(DecodePool(text).status().code(), StatusCode::kCorruption) << text;
  }
  PoolRecord wrong = pool;
  wrong.tasks.push_back({.name = "a", .member = base_});
  EXPECT_FALSE(CheckPool(wrong).ok()) << "a task without a member";
  wrong = pool;
  wrong.members.push_back({.artifact = base_});
  EXPECT_FALSE(CheckPool(wrong).ok()) << "a member without a task";
  EXPECT_FALSE(SplitPoolRoute("a/b/c") || SplitPoolRoute("/b") || SplitPoolRoute("a@1/b"));
  EXPECT_EQ(SplitPoolRoute("a/b")->second, "b");
}

}  // namespace
}  // namespace stockpot
