// Several ranks and tensors that are no weights: what a checkpoint of them holds, and that a
// daemon, a disk or a rank that goes away costs nothing that is still somewhere.
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/unit/hooks/hook_world.h"

namespace stockpot {
namespace {

constexpr int64_t kRows = 11;  // not divisible by the worlds of these tests
constexpr int64_t kColumns = 5;
constexpr const char* kWeight = "model.layers.0.mlp.up_proj.weight";
constexpr const char* kMoment = "optimizer/up_proj/exp_avg";

// One rank's rows of a matrix and of its moment; rank 0 also has what is not cut.
struct RankModel {
  RankModel(int32_t r, int32_t w, float salt) : rank(r), world(w) {
    const int64_t begin = rank * kRows / world;
    const int64_t end = (rank + 1) * kRows / world;
    first_row = begin;
    for (int64_t i = begin * kColumns; i < end * kColumns; ++i) {
      weight.push_back(salt + static_cast<float>(i));
      moment.push_back(-salt - static_cast<float>(i));
    }
    position = {static_cast<int64_t>(salt), rank};
    norm.assign(4, salt);
  }

  std::vector<TensorView> Views() const {
    std::vector<TensorView> views = {Rows(kWeight, "", weight), Rows(kMoment, "optimizer", moment)};
    views.push_back({.name = "loader/rank-" + std::to_string(rank),
                     .dtype = DType::kI64,
                     .shape = {2},
                     .data = position.data(),
                     .group = "loader"});
    if (rank != 0) return views;
    views.push_back(
        {.name = "model.norm.weight", .dtype = DType::kF32, .shape = {4}, .data = norm.data()});
    views.push_back(
        {.name = "tied", .dtype = DType::kF32, .shape = {kRows, kColumns}, .alias_of = kWeight});
    return views;
  }

  int32_t rank;
  int32_t world;
  int64_t first_row = 0;
  std::vector<float> weight;
  std::vector<float> moment;
  std::vector<int64_t> position;
  std::vector<float> norm;

 private:
  TensorView Rows(const std::string& name, const std::string& group,
                  const std::vector<float>& values) const {
    return {.name = name,
            .dtype = DType::kF32,
            .shape = {static_cast<int64_t>(values.size()) / kColumns, kColumns},
            .data = values.data(),
            .group = group,
            .global_shape = {kRows, kColumns},
            .offsets = {first_row, 0}};
  }
};

class HookRanksTest : public HookTest {
 protected:
  CheckpointHookOptions RankOptions(int32_t rank, int32_t world, bool spools = false) {
    CheckpointHookOptions options = Options();
    options.rank = rank;
    options.world = world;
    options.attempt = "first";
    if (spools) options.spool_directory = spool();
    return options;
  }
  std::filesystem::path spool() const { return folder_.path() / "spool"; }

  static void WaitFor(const std::function<bool()>& condition) {
    const auto start = SteadyClock::now();
    while (!condition()) {
      ASSERT_LT(MillisecondsSince(start), kFlushMs);
      ::usleep(1000);
    }
  }

  // The step holds what RankModels of `salt` hold together.
  void ExpectStored(int64_t step, float salt, int32_t world) {
    const std::string id = "hooked@" + std::to_string(step);
    const RankModel whole(0, 1, salt);
    EXPECT_EQ(Stored(id, kWeight), whole.weight);
    EXPECT_EQ(Stored(id, "tied"), whole.weight);
    EXPECT_EQ(Stored(id, "model.norm.weight"), whole.norm);
    EXPECT_EQ(Stored(id + ".optimizer", kMoment), whole.moment);
    const auto client = world_.NewClient();
    const auto loader = OpenRemoteArtifact(*client, id + ".loader");
    ASSERT_OK(loader);
    EXPECT_EQ(std::ssize((*loader)->tensors()), world);
    for (int32_t rank = 0; rank < world; ++rank) {
      const auto bytes = (*loader)->ReadAll("loader/rank-" + std::to_string(rank));
      ASSERT_OK(bytes);
      std::vector<int64_t> position(2);
      ASSERT_EQ(bytes->size(), 16u);
      std::memcpy(position.data(), bytes->data(), 16);
      EXPECT_EQ(position, (std::vector<int64_t>{static_cast<int64_t>(salt), rank}));
    }
  }

  TemporaryFolder folder_;
};

TEST_F(HookRanksTest, AGroupIsAStateBesideTheCheckpoint) {
  const auto hook = MakeHook(Options());
  RankModel model(0, 1, 3);
  std::vector<TensorView> views = model.Views();
  ASSERT_TRUE(hook->OnStep(3, views, {{"loss", 1.0}}));
  std::fill(model.moment.begin(), model.moment.end(), 0.0f);  // the optimizer goes on at once
  ASSERT_TRUE(hook->Flush(kFlushMs));
  ASSERT_EQ(hook->Stats().committed, 1) << hook->Stats().last_error.ToString();
  ExpectStored(3, 3, 1);
  const auto client = world_.NewClient();
  const auto source = OpenRemoteArtifact(*client, "hooked@3");
  ASSERT_OK(source);
  EXPECT_EQ((*source)->Find(kMoment), nullptr) << "no weight";
  const auto log = client->Log("hooked");
  ASSERT_OK(log);
  ASSERT_EQ(log->size(), 1u);
  EXPECT_EQ((*log)[0].states.size(), 2u);
}

TEST_F(HookRanksTest, RanksMakeOneCheckpoint) {
  constexpr int32_t kWorld = 3;
  std::vector<std::unique_ptr<CheckpointHook>> hooks;
  for (int32_t rank = 0; rank < kWorld; ++rank) {
    hooks.push_back(MakeHook(RankOptions(rank, kWorld)));
  }
  for (int64_t step = 1; step <= 3; ++step) {
    for (int32_t rank = kWorld - 1; rank >= 0; --rank) {
      const RankModel model(rank, kWorld, static_cast<float>(100 * step));
      ASSERT_TRUE(hooks[rank]->OnStep(step, model.Views(), {{"loss", rank}}));
    }
  }
  for (const auto& hook : hooks) {
    ASSERT_TRUE(hook->Flush(kFlushMs));
    EXPECT_EQ(hook->Stats().committed, 3) << hook->Stats().last_error.ToString();
    EXPECT_EQ(hook->Stats().gathering, 0);
    EXPECT_EQ(hook->Stats().staged_bytes, 0);
  }
  for (int64_t step = 1; step <= 3; ++step) {
    ExpectStored(step, static_cast<float>(100 * step), kWorld);
  }
  const auto shown = world_.NewClient()->Show("hooked@1");
  ASSERT_OK(shown);
  EXPECT_EQ(shown->metrics, (std::map<std::string, double>{{"loss", 0.0}})) << "the lowest rank's";
}

// C9: nobody waits for a rank that is late, and the outcome tells which one it was.
TEST_F(HookRanksTest, ALateRankStopsNobody) {
  const auto early = MakeHook(RankOptions(0, 2));
  for (int64_t step = 1; step <= 4; ++step) {
    ASSERT_TRUE(early->OnStep(step, RankModel(0, 2, static_cast<float>(step)).Views(), {}));
  }
  WaitFor([&] { return early->Stats().gathering == 4; });
  EXPECT_EQ(early->Stats().committed, 0);
  EXPECT_FALSE(early->Flush(10)) << "not durable as a checkpoint";
  const auto late = MakeHook(RankOptions(1, 2));
  for (int64_t step = 1; step <= 4; ++step) {
    ASSERT_TRUE(late->OnStep(step, RankModel(1, 2, static_cast<float>(step)).Views(), {}));
  }
  ASSERT_TRUE(late->Flush(kFlushMs));
  ASSERT_TRUE(early->Flush(kFlushMs));
  EXPECT_EQ(early->Stats().committed, 4);
  for (int64_t step = 1; step <= 4; ++step) ExpectStored(step, static_cast<float>(step), 2);
}

// What the daemon had of a checkpoint that was not complete is sent again.
TEST_F(HookRanksTest, ADaemonThatRestartsBetweenTwoRanksCostsNothing) {
  const auto first = MakeHook(RankOptions(0, 2));
  const auto second = MakeHook(RankOptions(1, 2));
  ASSERT_TRUE(first->OnStep(1, RankModel(0, 2, 7).Views(), {}));
  WaitFor([&] { return first->Stats().gathering == 1; });
  world_.Stop();
  world_.Start();
  ASSERT_TRUE(second->OnStep(1, RankModel(1, 2, 7).Views(), {}));
  ASSERT_TRUE(second->Flush(kFlushMs));
  ASSERT_TRUE(first->Flush(kFlushMs));
  EXPECT_EQ(first->Stats().committed, 1);
  ExpectStored(1, 7, 2);
}

TEST_F(HookRanksTest, MemoryOfSentPartsIsUsedForLaterSteps) {
  CheckpointHookOptions options = RankOptions(0, 2);
  options.staging_bytes = 2 * 384;  // two parts
  const auto early = MakeHook(options);
  for (int64_t step = 1; step <= 6; ++step) {
    ASSERT_TRUE(early->OnStep(step, RankModel(0, 2, static_cast<float>(step)).Views(), {})) << step;
    WaitFor([&] { return early->Stats().gathering == step; });
    EXPECT_LE(early->Stats().staged_bytes, options.staging_bytes);
  }
  EXPECT_EQ(early->Stats().skipped, 0);
  const auto late = MakeHook(RankOptions(1, 2));
  for (int64_t step = 1; step <= 6; ++step) {
    ASSERT_TRUE(late->OnStep(step, RankModel(1, 2, static_cast<float>(step)).Views(), {}));
  }
  ASSERT_TRUE(early->Flush(kFlushMs));
  EXPECT_EQ(early->Stats().committed, 6);
  EXPECT_EQ(early->Stats().staged_bytes, 0);
  ExpectStored(6, 6, 2);
}

TEST_F(HookRanksTest, PartsThatDoNotFitAreRefusedByName) {
  const auto first = MakeHook(RankOptions(0, 2));
  const auto second = MakeHook(RankOptions(1, 2));
  RankModel overlapping(1, 2, 7);
  overlapping.first_row -= 1;
  ASSERT_TRUE(first->OnStep(1, RankModel(0, 2, 7).Views(), {}));
  ASSERT_TRUE(second->OnStep(1, overlapping.Views(), {}));
  ASSERT_TRUE(second->Flush(kFlushMs));
  ASSERT_TRUE(first->Flush(kFlushMs));
  EXPECT_EQ(first->Stats().failed, 1) << "each rank is told";
  EXPECT_EQ(second->Stats().failed, 1);
  for (const Status& error : Errors()) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument) << error.ToString();
    EXPECT_NE(error.message().find(kWeight), std::string::npos) << error.ToString();
  }
  EXPECT_EQ(Errors().size(), 2u);
  EXPECT_FALSE(world_.NewClient()->Resolve("hooked@1").ok());
}

TEST_F(HookRanksTest, MalformedPiecesAreRefusedWithTheirName) {
  const auto hook = MakeHook(RankOptions(0, 2));
  const RankModel model(0, 2, 1);
  const auto refused = [&](const std::function<void(std::vector<TensorView>&)>& change) {
    std::vector<TensorView> views = model.Views();
    change(views);
    EXPECT_FALSE(hook->OnStep(1, views, {}));
    return hook->Stats().last_error.message();
  };
  const auto names = [](const std::string& message, const std::string& name) {
    return message.find(name) != std::string::npos;
  };
  EXPECT_TRUE(names(refused([](auto& v) { v[0].offsets = {-1, 0}; }), kWeight));
  EXPECT_TRUE(names(refused([](auto& v) { v[0].offsets = {kRows, 0}; }), kWeight));
  EXPECT_TRUE(names(refused([](auto& v) { v[0].offsets = {0}; }), kWeight));
  EXPECT_TRUE(names(refused([](auto& v) { v[0].global_shape = {-3, 5}; }), kWeight));
  EXPECT_TRUE(names(refused([](auto& v) { v[1].group = "no/group"; }), "no/group"));
  EXPECT_TRUE(names(refused([](auto& v) { v[1].name = v[0].name; }), kWeight)) << "twice";
  EXPECT_TRUE(names(refused([](auto& v) { v[4].group = "optimizer"; }), "tied"));
  EXPECT_TRUE(names(refused([](auto& v) { v[4].offsets = {0, 0}; }), "tied"));
  EXPECT_EQ(hook->Stats().staged_bytes, 0);
}

// --- the spool ---

TEST_F(HookRanksTest, RanksSpoolAndSendTheirParts) {
  world_.Stop();
  for (int32_t rank = 0; rank < 2; ++rank) {
    const auto hook = MakeHook(RankOptions(rank, 2, /*spools=*/true));
    for (int64_t step = 1; step <= 3; ++step) {
      ASSERT_TRUE(hook->OnStep(step, RankModel(rank, 2, static_cast<float>(step)).Views(), {}));
    }
  }  // close_ms is 0: ends at once, and writes what it has
  world_.Start();
  const auto first = MakeHook(RankOptions(0, 2, true));
  WaitFor([&] { return first->Stats().gathering == 3; });
  EXPECT_EQ(first->Stats().spooled, 3) << "kept until the others' parts are in";
  const auto second = MakeHook(RankOptions(1, 2, true));
  ASSERT_TRUE(first->Flush(kFlushMs));
  ASSERT_TRUE(second->Flush(kFlushMs));
  EXPECT_EQ(first->Stats().committed, 3);
  EXPECT_EQ(first->Stats().spooled, 0);
  for (int64_t step = 1; step <= 3; ++step) ExpectStored(step, static_cast<float>(step), 2);
}

TEST_F(HookRanksTest, ASpooledPartOutlivesTheDaemonsMemory) {
  world_.Stop();
  for (int32_t rank = 0; rank < 2; ++rank) {
    const auto hook = MakeHook(RankOptions(rank, 2, /*spools=*/true));
    ASSERT_TRUE(hook->OnStep(1, RankModel(rank, 2, 9).Views(), {}));
  }
  world_.Start();
  const auto first = MakeHook(RankOptions(0, 2, true));
  WaitFor([&] { return first->Stats().gathering == 1; });
  world_.Stop();
  world_.Start();
  const auto second = MakeHook(RankOptions(1, 2, true));
  ASSERT_TRUE(second->Flush(kFlushMs));
  ASSERT_TRUE(first->Flush(kFlushMs));
  EXPECT_EQ(first->Stats().committed, 1);
  ExpectStored(1, 9, 2);
}

// A process that ends after its part was sent leaves it on disk: the daemon may forget it.
TEST_F(HookRanksTest, WhatIsNotCompleteAtTheEndIsSpooled) {
  {
    const auto hook = MakeHook(RankOptions(0, 2, /*spools=*/true));
    ASSERT_TRUE(hook->OnStep(1, RankModel(0, 2, 5).Views(), {}));
    WaitFor([&] { return hook->Stats().gathering == 1; });
  }
  world_.Stop();
  world_.Start();
  const auto second = MakeHook(RankOptions(1, 2));
  ASSERT_TRUE(second->OnStep(1, RankModel(1, 2, 5).Views(), {}));
  const auto first = MakeHook(RankOptions(0, 2, true));
  EXPECT_EQ(first->Stats().spooled, 1);
  ASSERT_TRUE(first->Flush(kFlushMs));
  ASSERT_TRUE(second->Flush(kFlushMs));
  ExpectStored(1, 5, 2);
}

// A job that comes back with other ranks sends what the old ones left.
TEST_F(HookRanksTest, AnotherWorldTakesTheSpoolOver) {
  world_.Stop();
  for (int32_t rank = 0; rank < 5; ++rank) {
    const auto hook = MakeHook(RankOptions(rank, 5, /*spools=*/true));
    for (int64_t step = 1; step <= 2; ++step) {
      ASSERT_TRUE(hook->OnStep(step, RankModel(rank, 5, static_cast<float>(step)).Views(), {}));
    }
  }
  world_.Start();
  const auto first = MakeHook(RankOptions(0, 2, true));
  const auto second = MakeHook(RankOptions(1, 2, true));
  EXPECT_EQ(first->Stats().spooled + second->Stats().spooled, 10);
  ASSERT_TRUE(first->Flush(kFlushMs));
  ASSERT_TRUE(second->Flush(kFlushMs));
  EXPECT_EQ(first->Stats().committed, 6) << "parts of ranks 0, 2 and 4";
  EXPECT_EQ(second->Stats().committed, 4);
  for (int64_t step = 1; step <= 2; ++step) ExpectStored(step, static_cast<float>(step), 5);
}

TEST_F(HookRanksTest, TheSpoolSaysWhereAPartBelongs) {
  const auto client = world_.NewClient();
  const Result<Digest> base = client->Resolve("tiny");
  ASSERT_OK(base);
  world_.Stop();
  {
    CheckpointHookOptions options = RankOptions(1, 2, /*spools=*/true);
    options.resumed_from = base->Hex();
    const auto hook = MakeHook(std::move(options));
    ASSERT_TRUE(hook->OnStep(7, RankModel(1, 2, 1).Views(), {}));
  }
  const auto entry = spool() / "hooked" / "rank-1-of-2" / "step-000000000007";
  const auto manifest = nlohmann::json::parse(std::ifstream(entry / "manifest.json"));
  EXPECT_EQ(manifest["rank"], 1);
  EXPECT_EQ(manifest["world"], 2);
  EXPECT_EQ(manifest["attempt"], "first");
  EXPECT_EQ(manifest["resumed_from"], base->Hex());
  EXPECT_EQ(manifest["groups"],
            (nlohmann::json{{kMoment, "optimizer"}, {"loader/rank-1", "loader"}}));
  const nlohmann::json place = {{"global_shape", {11, 5}}, {"offset", {5, 0}}};
  EXPECT_EQ(manifest["shards"], (nlohmann::json{{kWeight, place}, {kMoment, place}}));
  EXPECT_TRUE(manifest["files"].empty()) << "rank 0 sends them";
}

TEST(HookRanksOptionsTest, RefusesWhatCannotWork) {
  const auto code = [](const std::function<void(CheckpointHookOptions&)>& change) {
    CheckpointHookOptions options{.run = "r", .base = "b"};
    change(options);
    return CheckpointHook::Create(options).status().code();
  };
  EXPECT_EQ(code([](auto& o) { o.world = 2, o.attempt = "a"; }), StatusCode::kOk);
  EXPECT_EQ(code([](auto& o) { o.world = 2; }), StatusCode::kInvalidArgument) << "no attempt";
  EXPECT_EQ(code([](auto& o) { o.world = 2, o.attempt = "a\n"; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.rank = 1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.rank = -1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.world = 1025, o.attempt = "a"; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.resumed_from = "demo@3"; }), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stockpot
