// Quotas and limits: refused by name, with what to do, and nothing half done.
#include <gmock/gmock.h>

#include "store/ingest.h"
#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using ::testing::HasSubstr;

constexpr size_t kTensorBytes = 1 << 20;
constexpr int64_t kMinuteMs = 60'000;

class StoreQuotaTest : public StoreTest {
 protected:
  void SetUp() override { Start(0, 0); }

  void Start(int64_t store_quota, int64_t run_quota) {
    ingest_.reset();
    store_.reset();
    pack_bytes_ = 1 << 20;
    StoreOptions options = Options();
    options.quota_bytes = store_quota;
    auto store = CheckpointStore::Open(options);
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = *std::move(store);
    ingest_ = std::make_unique<Ingest>(*store_, IngestLimits{}, [this] { return now_ms_.load(); });
    if (!store_->GetAlias("base")) CommitBase("base", 1000);
    RunConfig config;
    config.merge_every = 0;
    config.publish = PublishPolicy::kOnRequest;
    config.quota_bytes = run_quota;
    ASSERT_TRUE(ingest_->CreateRun("r", "base", config, {}).ok());
  }

  Status Save(int64_t step, size_t bytes = kTensorBytes) {
    return Save(step, RandomBytes(random_, bytes));
  }
  Status Save(int64_t step, const std::vector<std::byte>& data) {
    now_ms_ += 2 * kMinuteMs;
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session,
                              ingest_->OpenSession({.run = "r", .step = step}));
    Part part{.bytes = static_cast<int64_t>(data.size())};
    part.chunks = {Sha256(std::span(data))};
    const Status put = ingest_->PutChunk(session, part.chunks[0], data);
    if (!put.ok()) {
      EXPECT_TRUE(ingest_->Abort(session).ok());
      return put;
    }
    ShardCommit shard;
    TensorEntry tensor{.name = "w", .dtype = DType::kU8, .shape = {part.bytes}};
    tensor.parts["data"] = part;
    shard.tensors = {tensor};
    const Status status = ingest_->CommitShard(session, std::move(shard)).status();
    if (!status.ok()) static_cast<void>(ingest_->Abort(session));
    return status;
  }
  void KeepTheLast(int64_t count) {
    Commit commit;
    commit.retention.push_back({"r", {.keep_last = count, .grace_ms = 0}});
    ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
  }
  size_t Steps() const { return store_->ListSteps("r").size(); }

  std::unique_ptr<Ingest> ingest_;
};

TEST_F(StoreQuotaTest, AFullStoreSaysSoAndGoesOnReading) {
  Start(5 << 20, 0);
  int64_t step = 0;
  Status status;
  while ((status = Save(step)).ok() && step < 20) ++step;
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("the store's quota of 5 MiB is met"));
  EXPECT_THAT(status.message(), HasSubstr("--quota-mib"));
  EXPECT_GE(step, 3);
  EXPECT_LE(step, 5);
  EXPECT_EQ(Steps(), static_cast<size_t>(step)) << "nothing of it is there";
  const auto scrubbed = store_->Scrub(nullptr);
  ASSERT_TRUE(scrubbed.ok());
  EXPECT_TRUE(scrubbed->damaged.empty());
  EXPECT_LE(store_->Usage().pack_bytes, 5 << 20);
  Start(50 << 20, 0);
  EXPECT_TRUE(Save(step).ok()) << "a larger quota, and it goes on";
}

// A trainer tries again and again: the log says it once, until something of the run is stored.
TEST_F(StoreQuotaTest, ARefusalIsAnEvent) {
  const auto refusals = [&] {
    std::vector<Event> found;
    for (const Event& event : store_->EventsSince(0, 10'000)) {
      if (event.type == "push_refused") found.push_back(event);
    }
    return found;
  };
  Start(3 << 20, 0);
  while (Save(static_cast<int64_t>(Steps())).ok() && Steps() < 20) {
  }
  for (int again = 0; again < 3; ++again) EXPECT_FALSE(Save(50).ok());
  ASSERT_EQ(refusals().size(), 1u) << "of a chunk";
  const Event event = refusals()[0];
  EXPECT_EQ(event.subject, "r");
  EXPECT_EQ(event.fields.at("step"), std::to_string(Steps()));
  EXPECT_THAT(event.fields.at("reason"), HasSubstr("the store's quota of 3 MiB is met"));
  Start(0, static_cast<int64_t>(Steps()) << 20);
  EXPECT_FALSE(Save(60).ok());
  EXPECT_FALSE(Save(61).ok());
  ASSERT_EQ(refusals().size(), 2u) << "of a commit";
  EXPECT_EQ(refusals()[1].fields.at("step"), "60");
  KeepTheLast(1);
  EXPECT_TRUE(Save(62).ok());
  EXPECT_FALSE(Save(63, 4 * kTensorBytes).ok());
  EXPECT_EQ(refusals().size(), 3u) << "something was stored in between";
}

// What is there already costs nothing, also when the store is full.
TEST_F(StoreQuotaTest, KnownChunksAreNotRefused) {
  Start(3 << 20, 0);
  const auto data = RandomBytes(random_, kTensorBytes);
  ASSERT_TRUE(Save(0, data).ok());
  while (Save(static_cast<int64_t>(Steps())).ok() && Steps() < 20) {
  }
  EXPECT_TRUE(Save(100, data).ok());
}

TEST_F(StoreQuotaTest, RetentionMakesRoomFirst) {
  Start(5 << 20, 0);
  KeepTheLast(1);
  for (int64_t step = 0; step < 20; ++step) {
    const Status status = Save(step);
    ASSERT_TRUE(status.ok()) << step << ": " << status.ToString();
  }
  EXPECT_LE(store_->Usage().pack_bytes, 5 << 20);
}

TEST_F(StoreQuotaTest, ARunHasAQuotaOfItsOwn) {
  Start(0, 3 << 20);
  const auto data = RandomBytes(random_, kTensorBytes);
  ASSERT_TRUE(Save(0, data).ok());
  for (int64_t step = 1; step < 10; ++step) ASSERT_TRUE(Save(step, data).ok()) << "shared bytes";
  ASSERT_TRUE(Save(10).ok());
  ASSERT_TRUE(Save(11).ok());
  const Status status = Save(12);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("run 'r' would hold 4 MiB, its quota is 3 MiB"));
  EXPECT_EQ(Steps(), 12u);
  EXPECT_FALSE(store_->ResolveName("r@12").ok());
  KeepTheLast(2);
  EXPECT_TRUE(Save(13).ok());
  EXPECT_EQ(*store_->RunBytesWith("r", {}), 3 << 20);
}

// The states count, and a run without a quota is not looked at.
TEST_F(StoreQuotaTest, StatesCountToo) {
  Start(0, 2 << 20);
  const auto session = ingest_->OpenSession({.run = "r", .step = 1});
  ASSERT_TRUE(session.ok());
  ShardCommit shard;
  shard.tensors = {PutTensor(*store_, "w", RandomBytes(random_, kTensorBytes))};
  shard.states["optimizer"] = {PutTensor(*store_, "m", RandomBytes(random_, 2 * kTensorBytes))};
  EXPECT_EQ(ingest_->CommitShard(*session, shard).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(Steps(), 0u);
  shard.states.clear();
  EXPECT_TRUE(ingest_->CommitShard(*session, shard).ok()) << "the session lives on";
}

}  // namespace
}  // namespace stockpot::test
