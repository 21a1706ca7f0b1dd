// Tensor groups: what comes with a checkpoint and is no weight is an artifact of its own.
#include <gmock/gmock.h>

#include <algorithm>

#include "store/ingest.h"
#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using ::testing::HasSubstr;

class StoreStatesTest : public StoreTest {
 protected:
  void SetUp() override {
    ingest_ = std::make_unique<Ingest>(*store_, IngestLimits{}, [this] { return now_ms_.load(); });
    CommitBase("base", 1000);
    RunConfig config;
    config.merge_every = 0;
    config.publish = PublishPolicy::kOnRequest;
    ASSERT_TRUE(ingest_->CreateRun("r", "base", config, {}).ok());
  }

  TensorEntry Tensor(const std::string& name, const std::string& text) {
    return PutTensor(*store_, name, Bytes(text));
  }

  // With an optimizer's and a generator's state, of the same tensor names.
  ShardCommit Shard(int64_t step, bool states = true) {
    const std::string text = std::to_string(step);
    ShardCommit shard;
    shard.tensors = {Tensor("w", "weights " + text)};
    if (!states) return shard;
    shard.states["optimizer"] = {Tensor("w", "moments " + text), Tensor("step", text)};
    shard.states["rng"] = {Tensor("cpu", "state " + text)};
    return shard;
  }

  Result<CommitReply> Save(int64_t step, ShardCommit shard) {
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session,
                              ingest_->OpenSession({.run = "r", .step = step}));
    return ingest_->CommitShard(session, std::move(shard));
  }
  CommitReply Saved(int64_t step) {
    const auto reply = Save(step, Shard(step));
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
    return reply.ok() ? *reply : CommitReply{};
  }

  void SetRules(const RetentionPolicy& policy) {
    Commit commit;
    commit.retention.push_back({"r", policy});
    const auto applied = store_->Apply(std::move(commit));
    ASSERT_TRUE(applied.ok()) << applied.status().ToString();
  }
  std::string Left() {
    std::string left;
    for (const StepRecord& step : store_->ListSteps("r")) {
      if (step.deleted) continue;
      left += std::to_string(step.step) + (step.group.empty() ? "" : "." + step.group) + " ";
    }
    return left;
  }
  std::string ReadText(const Digest& artifact, const std::string& tensor) {
    const auto manifest = store_->GetManifest(artifact);
    const Part& part = manifest->Find(tensor)->parts.at("data");
    std::vector<std::byte> out(static_cast<size_t>(part.bytes));
    EXPECT_TRUE(store_->ReadPart(part, 0, out).ok());
    return {reinterpret_cast<const char*>(out.data()), out.size()};
  }

  std::unique_ptr<Ingest> ingest_;
};

TEST_F(StoreStatesTest, CommittedWithTheCheckpointAndFoundByName) {
  const CommitReply reply = Saved(7);
  ASSERT_EQ(reply.states.size(), 2u);
  EXPECT_EQ(*store_->ResolveName("r@7.optimizer"), reply.states.at("optimizer"));
  EXPECT_EQ(*store_->ResolveName("r@latest.rng"), reply.states.at("rng"));
  EXPECT_EQ(*store_->ResolveName(reply.artifact.Hex() + ".optimizer"),
            reply.states.at("optimizer"));
  for (const char* nothing : {"r@7.ema", "r@8.optimizer", "base.optimizer", ".optimizer", "r@7."}) {
    EXPECT_EQ(store_->ResolveName(nothing).status().code(), StatusCode::kNotFound) << nothing;
  }
  EXPECT_EQ(ReadText(reply.artifact, "w"), "weights 7");
  EXPECT_EQ(ReadText(reply.states.at("optimizer"), "w"), "moments 7");
  const auto manifest = store_->GetManifest(reply.states.at("optimizer"));
  EXPECT_EQ(manifest->kind, ArtifactKind::kState);
  EXPECT_EQ(manifest->group, "optimizer");
  EXPECT_EQ(manifest->step, 7);
  const auto parents = store_->Parents(reply.states.at("rng"));
  ASSERT_EQ(parents.size(), 1u);
  EXPECT_EQ(parents[0].type, EdgeType::kStateOf);
  EXPECT_EQ(parents[0].parent, reply.artifact);
  Reopen();
  EXPECT_EQ(*store_->ResolveName("r@7.optimizer"), reply.states.at("optimizer"));
}

// Dropping a state, or never sending it, never changes what the checkpoint is.
TEST_F(StoreStatesTest, TheCheckpointIsTheSameWithAndWithout) {
  const auto alone = Save(1, Shard(1, /*states=*/false));
  ASSERT_TRUE(alone.ok());
  const CommitReply with = Saved(1);
  EXPECT_EQ(with.artifact, alone->artifact);
  EXPECT_FALSE(with.existed) << "the states are new";
  EXPECT_EQ(*store_->ResolveName("r@1.optimizer"), with.states.at("optimizer"));
  const CommitReply again = Saved(1);
  EXPECT_TRUE(again.existed);
  EXPECT_EQ(again.states, with.states);
  const auto events = store_->EventsSince(0, 1000);
  EXPECT_EQ(std::count_if(events.begin(), events.end(),
                          [](const Event& e) { return e.type == "checkpoint"; }),
            1);
}

TEST_F(StoreStatesTest, RefusalsLeaveNothing) {
  const CommitReply saved = Saved(1);
  ShardCommit other = Shard(1);
  other.states["optimizer"][0] = Tensor("w", "other moments");
  const auto differs = Save(1, other);
  EXPECT_EQ(differs.status().code(), StatusCode::kAlreadyExists);
  EXPECT_THAT(differs.status().message(), HasSubstr("r@1.optimizer is artifact"));

  const struct {
    const char* what;
    std::function<void(ShardCommit&)> spoil;
  } kCases[] = {
      {"a group without tensors", [](ShardCommit& s) { s.states["empty"]; }},
      {"merge is no group", [](ShardCommit& s) { s.states["merge"] = s.states["rng"]; }},
      {"a dot in the name", [](ShardCommit& s) { s.states["a.b"] = s.states["rng"]; }},
      {"a name twice", [](ShardCommit& s) { s.states["rng"].push_back(s.states["rng"][0]); }},
      {"no weights", [](ShardCommit& s) { s.tensors.clear(); }},
      {"too many groups",
       [](ShardCommit& s) {
         for (int i = 0; i < 40; ++i) s.states["g" + std::to_string(i)] = s.states["rng"];
       }},
      {"a chunk nobody sent",
       [](ShardCommit& s) {
         s.states["rng"][0].parts["data"].chunks[0] = Sha256(std::string_view("?"));
       }},
  };
  for (const auto& one : kCases) {
    ShardCommit shard = Shard(2);
    one.spoil(shard);
    EXPECT_EQ(Save(2, shard).status().code(), StatusCode::kInvalidArgument) << one.what;
    EXPECT_EQ(Left(), "1 1.optimizer 1.rng ") << one.what;
  }
  Manifest base{.kind = ArtifactKind::kBase};
  const auto session = ingest_->OpenSession({.kind = ArtifactKind::kBase, .run = "b2"});
  ASSERT_TRUE(session.ok());
  ShardCommit shard = Shard(3);
  shard.files["config.json"] = *store_->PutBytes(Bytes("{}"));
  EXPECT_EQ(ingest_->CommitShard(*session, shard).status().code(), StatusCode::kInvalidArgument);
}

// "Weights of every 1000th, optimizer of the last 2."
TEST_F(StoreStatesTest, RulesOfTheirOwn) {
  SetRules({.every = 1000, .groups = {{"optimizer", 2, 0}}, .grace_ms = 0});
  for (int64_t step = 500; step <= 3500; step += 500) Saved(step);
  ASSERT_TRUE(store_->ApplyRetention("r").ok());
  // 3000: by its rule. 3500: the last good one. Their random numbers have no rule of their own.
  EXPECT_EQ(Left(), "1000 1000.rng 2000 2000.rng 3000 3000.optimizer 3000.rng "
                    "3500 3500.optimizer 3500.rng ");
  ASSERT_TRUE(store_->CollectGarbage({}).ok());
  EXPECT_EQ(store_->ListSteps("r").size(), 10u);
  EXPECT_EQ(store_->ResolveName("r@1000.optimizer").status().code(), StatusCode::kNotFound);
  const auto step = store_->ResolveName("r@1000");
  ASSERT_TRUE(step.ok());
  EXPECT_EQ(ReadText(*step, "w"), "weights 1000");
}

// A state that stays by its rule keeps its checkpoint: alone it resumes nothing.
TEST_F(StoreStatesTest, AStateKeepsItsCheckpoint) {
  SetRules({.keep_last = 1, .groups = {{"optimizer", 3, 20}}, .grace_ms = 0});
  for (int64_t step = 10; step <= 60; step += 10) Saved(step);
  ASSERT_TRUE(store_->ApplyRetention("r").ok());
  EXPECT_EQ(Left(), "20 20.optimizer 20.rng 40 40.optimizer 40.rng 50 50.optimizer 50.rng "
                    "60 60.optimizer 60.rng ");
  const auto view = store_->Retention();
  ASSERT_TRUE(view.ok());
  for (size_t i = 0; i < view->fates.size(); ++i) {
    if (view->inputs.artifacts[i].step != 20) continue;
    if (view->inputs.artifacts[i].kind != ArtifactKind::kCheckpoint) continue;
    ASSERT_EQ(view->fates[i].keeps.size(), 1u);
    EXPECT_EQ(KeepText(view->fates[i].keeps[0]), "its optimizer stays");
  }
}

TEST_F(StoreStatesTest, WithoutRulesAStateLivesAndDiesWithItsCheckpoint) {
  for (int64_t step = 1; step <= 3; ++step) Saved(step);
  ASSERT_TRUE(store_->ApplyRetention("r").ok());
  EXPECT_EQ(store_->ListSteps("r").size(), 9u);
  // A person may drop any state, and the checkpoint that a state belongs to.
  Commit commit;
  commit.deletions.push_back(
      {.artifact = *store_->ResolveName("r@3.rng"), .purge_ms = now_ms_, .by = "ann"});
  commit.deletions.push_back(
      {.artifact = *store_->ResolveName("r@1"), .purge_ms = now_ms_ + 1000, .by = "ann"});
  ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
  ASSERT_TRUE(store_->ApplyRetention("r").ok());
  EXPECT_EQ(Left(), "2 2.optimizer 2.rng 3 3.optimizer ");
  // With it they come back.
  Commit undelete;
  undelete.undeletions.push_back(*store_->ResolveName("r@1"));
  ASSERT_TRUE(store_->Apply(std::move(undelete)).ok());
  ASSERT_TRUE(store_->ApplyRetention("r").ok());
  EXPECT_EQ(Left(), "1 1.optimizer 1.rng 2 2.optimizer 2.rng 3 3.optimizer ");
}

TEST_F(StoreStatesTest, PinsHoldAndRulesAreChecked) {
  SetRules({.keep_last = 1, .groups = {{"optimizer", 1, 0}}, .grace_ms = 0});
  for (int64_t step = 1; step <= 2; ++step) Saved(step);
  Commit pin;
  pin.pins.push_back({{.artifact = *store_->ResolveName("r@1.rng")}, true});
  ASSERT_TRUE(store_->Apply(std::move(pin)).ok());
  ASSERT_TRUE(store_->ApplyRetention("r").ok());
  EXPECT_EQ(Left(), "1.rng 2 2.optimizer 2.rng ");
  for (const RetentionPolicy& bad :
       {RetentionPolicy{.groups = {{"optimizer", 0, 0}}},
        RetentionPolicy{.groups = {{"merge", 1, 0}}},
        RetentionPolicy{.groups = {{"optimizer", -1, 5}}},
        RetentionPolicy{.groups = {{"optimizer", 1, 0}, {"optimizer", 2, 0}}}}) {
    EXPECT_EQ(CheckRetention(bad).code(), StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace stockpot::test
