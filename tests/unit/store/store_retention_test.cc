// Retention on a real store: policies, pins, deletion and undeletion, purges, and who may not go.
#include <gmock/gmock.h>

#include "store/ingest.h"
#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using ::testing::HasSubstr;

class StoreRetentionTest : public StoreTest {
 protected:
  void SetUp() override { run_ = CommitRun("r", CommitBase()); }

  Digest CommitStep(int64_t step) {
    const Manifest m = MakeCheckpoint(run_, step, RandomBytes(random_, 70'000));
    Commit commit = CheckpointCommit(m);
    commit.aliases.push_back({"r@latest", m.digest(), std::nullopt, "test"});
    const auto applied = store_->Apply(std::move(commit));
    EXPECT_TRUE(applied.ok()) << applied.status().ToString();
    return m.digest();
  }
  Status Delete(const Digest& artifact, int64_t grace_ms = 1000, const std::string& by = "ann") {
    Commit commit;
    commit.deletions.push_back(
        {.artifact = artifact, .purge_ms = now_ms_ + grace_ms, .by = by, .why = "test"});
    return store_->Apply(std::move(commit)).status();
  }
  Status Undelete(const Digest& artifact) {
    Commit commit;
    commit.undeletions.push_back(artifact);
    return store_->Apply(std::move(commit)).status();
  }
  Status Purge(const Digest& artifact) {
    Commit commit;
    commit.purges.push_back(artifact);
    return store_->Apply(std::move(commit)).status();
  }
  Status SetPin(const Digest& artifact, bool on) {
    Commit commit;
    commit.pins.push_back({{.artifact = artifact, .by = "ann", .why = "paper"}, on});
    return store_->Apply(std::move(commit)).status();
  }
  size_t Count(const std::string& type) const {
    size_t count = 0;
    for (const Event& event : store_->EventsSince(0, 10'000)) count += event.type == type;
    return count;
  }

  RunRecord run_;
};

TEST_F(StoreRetentionTest, PoliciesAndPinsAreKept) {
  const RetentionPolicy policy{.keep_last = 3,
                               .best = {{"loss", true, 2}, {"t/acc", false, 1}},
                               .every = 100,
                               .grace_ms = 5};
  EXPECT_EQ(store_->GetRetention("r"), RetentionPolicy{});
  Commit commit;
  commit.retention.push_back({"r", policy});
  ASSERT_TRUE(store_->Apply(commit).ok());
  const Digest one = CommitStep(1);
  ASSERT_TRUE(SetPin(one, true).ok());
  Reopen();
  EXPECT_EQ(store_->GetRetention("r"), policy);
  ASSERT_TRUE(store_->GetPin(one));
  EXPECT_EQ(store_->GetPin(one)->why, "paper");
  EXPECT_EQ(store_->GetPin(one)->time_ms, now_ms_);
  ASSERT_TRUE(SetPin(one, false).ok());
  EXPECT_FALSE(store_->GetPin(one));
  EXPECT_TRUE(SetPin(one, false).ok()) << "twice is once";
  commit.retention[0].run = "nobody";
  EXPECT_EQ(store_->Apply(commit).status().code(), StatusCode::kNotFound);
  commit.retention[0] = {"r", {.keep_last = -1}};
  EXPECT_EQ(store_->Apply(commit).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(StoreRetentionTest, DeletedIsReadableUndeletableAndThenPurged) {
  const Digest one = CommitStep(1);
  const Digest two = CommitStep(2);
  ASSERT_TRUE(Delete(one).ok());
  ASSERT_TRUE(Delete(one).ok()) << "idempotent";
  EXPECT_TRUE(store_->GetManifest(one).ok());
  EXPECT_EQ(*store_->ResolveName("r@1"), one) << "a deleted one can be named, to undelete it";
  EXPECT_TRUE(store_->ListSteps("r")[0].deleted);
  EXPECT_EQ(Purge(one).code(), StatusCode::kAlreadyExists) << "its grace lasts";
  ASSERT_TRUE(Undelete(one).ok());
  ASSERT_TRUE(Undelete(one).ok());
  EXPECT_FALSE(store_->ListSteps("r")[0].deleted);
  now_ms_ += 5000;
  EXPECT_EQ(Purge(one).code(), StatusCode::kAlreadyExists) << "it is not deleted";
  ASSERT_TRUE(Delete(one).ok());
  now_ms_ += 1000;
  ASSERT_TRUE(Purge(one).ok());
  EXPECT_EQ(Purge(one).code(), StatusCode::kAlreadyExists);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(store_->GetManifest(one).status().code(), StatusCode::kNotFound);
    EXPECT_FALSE(store_->HasArtifact(one));
    EXPECT_TRUE(store_->WasPurged(one));
    EXPECT_EQ(store_->ResolveName("r@1").status().code(), StatusCode::kNotFound);
    EXPECT_EQ(store_->ListSteps("r").size(), 1u);
    EXPECT_TRUE(store_->Parents(one).empty());
    EXPECT_EQ(store_->Children(run_.base).size(), 1u);
    EXPECT_EQ(*store_->ResolveName("r@latest"), two);
    Reopen();
  }
  EXPECT_EQ(Count("delete"), 3u);
  EXPECT_EQ(Count("undelete"), 1u);
  EXPECT_EQ(Count("purge"), 1u);
}

// RUN@STEP is a step and, once that is published, a route as well.
TEST_F(StoreRetentionTest, AStepThatIsGoneIsNotItsVariant) {
  const Digest one = CommitStep(1);
  CommitStep(2);
  const Digest served = CommitStep(3);  // any artifact may stand in for the variant
  Commit commit;
  commit.routes.push_back({"r@1", served, std::nullopt, "test"});
  commit.routes.push_back({"r@1.full", served, std::nullopt, "test"});
  ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
  EXPECT_EQ(*store_->ResolveName("r@1"), one);
  ASSERT_TRUE(Delete(one, 0).ok());
  ASSERT_TRUE(Purge(one).ok());
  const auto resolved = store_->ResolveName("r@1");
  EXPECT_EQ(resolved.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(resolved.status().message(), HasSubstr(served.Hex()));
  EXPECT_FALSE(store_->ResolveName("r@1.optimizer").ok());
  EXPECT_EQ(*store_->ResolveName("r@1.full"), served);
}

TEST_F(StoreRetentionTest, WhatSomethingHoldsCannotBeDeleted) {
  const Digest one = CommitStep(1);
  const Digest two = CommitStep(2);
  const Digest three = CommitStep(3);
  EXPECT_THAT(Delete(run_.base).message(), HasSubstr("a base"));
  EXPECT_THAT(Delete(three).message(), HasSubstr("alias r@latest"));
  EXPECT_EQ(Delete(Sha256("x")).code(), StatusCode::kNotFound);
  {
    Commit commit;
    commit.jobs.push_back(
        {.key = "publish/x", .args = {{"artifact", one.Hex()}}, .state = JobState::kQueued});
    ASSERT_TRUE(store_->Apply(commit).ok());
    EXPECT_THAT(Delete(one).message(), HasSubstr("job publish/x"));
    commit.jobs[0].state = JobState::kDone;
    ASSERT_TRUE(store_->Apply(commit).ok());
  }
  {
    const auto lease = store_->Lease(one);
    ASSERT_TRUE(lease.ok());
    EXPECT_THAT(Delete(one).message(), HasSubstr("being read"));
  }
  ASSERT_TRUE(SetPin(one, true).ok());
  EXPECT_THAT(Delete(one).message(), HasSubstr("pinned: paper"));
  ASSERT_TRUE(SetPin(one, false).ok());
  ASSERT_TRUE(Delete(one).ok());
  ASSERT_TRUE(Delete(two).ok());
  EXPECT_EQ(Delete(three).code(), StatusCode::kInvalidArgument) << "the last good one";
  EXPECT_EQ(store_->ListSteps("r").size(), 3u);
}

TEST_F(StoreRetentionTest, ADeletedArtifactTakesNoNewNamesAndALeaseStopsItsPurge) {
  const Digest one = CommitStep(1);
  CommitStep(2);
  ASSERT_TRUE(Delete(one).ok());
  for (const bool route : {false, true}) {
    Commit commit;
    (route ? commit.routes : commit.aliases).push_back({"name", one, std::nullopt, "ann"});
    EXPECT_EQ(store_->Apply(commit).status().code(), StatusCode::kAlreadyExists);
    commit.undeletions.push_back(one);
    commit.routes.clear();
    commit.aliases.clear();
  }
  EXPECT_EQ(SetPin(one, true).code(), StatusCode::kAlreadyExists);
  now_ms_ += 1000;
  auto lease = store_->Lease(one);
  ASSERT_TRUE(lease.ok());
  EXPECT_THAT(Purge(one).message(), HasSubstr("being read"));
  *lease = ArtifactLease();
  EXPECT_TRUE(Purge(one).ok());
  EXPECT_EQ(store_->Lease(one).status().code(), StatusCode::kNotFound);
}

// A checkpoint that is pushed again while it is deleted, or after its purge, is acknowledged: it
// must be there.
TEST_F(StoreRetentionTest, PushingADeletedCheckpointBringsItBack) {
  Ingest ingest(*store_, {}, [this] { return now_ms_.load(); });
  ASSERT_TRUE(ingest
                  .CreateRun("r", run_.base.Hex(),
                             {.merge_every = 0, .publish = PublishPolicy::kOnRequest}, {})
                  .ok());
  const auto data = RandomBytes(random_, 90'000);
  const auto push = [&](int64_t step) {
    const auto session = ingest.OpenSession({.run = "r", .step = step});
    EXPECT_TRUE(session.ok());
    ShardCommit shard;
    shard.tensors.push_back(PutTensor(*store_, "w", data));
    const auto reply = ingest.CommitShard(*session, std::move(shard));
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
    return reply.ok() ? *reply : CommitReply{};
  };
  const Digest one = push(1).artifact;
  push(2);
  ASSERT_TRUE(Delete(one).ok());
  EXPECT_EQ(push(1).artifact, one);
  EXPECT_FALSE(store_->GetTombstone(one));
  now_ms_ += 5000;
  EXPECT_EQ(Purge(one).code(), StatusCode::kAlreadyExists);
  ASSERT_TRUE(Delete(one, 0).ok());
  ASSERT_TRUE(Purge(one).ok());
  EXPECT_TRUE(ingest.OpenSession({.run = "r", .step = 3, .resumed_from = one}).ok())
      << "lineage may name what was purged";
  const CommitReply again = push(1);
  EXPECT_EQ(again.artifact, one);
  EXPECT_FALSE(again.existed);
  EXPECT_FALSE(store_->WasPurged(one));
  EXPECT_EQ(*store_->ResolveName("r@latest"), *store_->ResolveName("r@2"));
}

TEST_F(StoreRetentionTest, RetentionDoesNotDeleteWhatStaysByNow) {
  const Digest one = CommitStep(1);
  CommitStep(2);
  const std::string retention(kRetentionAuthor);
  EXPECT_EQ(Delete(one, 0, retention).code(), StatusCode::kAlreadyExists) << "no rule";
  Commit commit;
  commit.retention.push_back({"r", {.keep_last = 1}});
  ASSERT_TRUE(store_->Apply(commit).ok());
  EXPECT_TRUE(Delete(one, 0, retention).ok());
}

}  // namespace
}  // namespace stockpot::test
