// Sessions: what a client may ask, what a commit makes of it, and what is refused.
#include "store/ingest.h"

#include <gmock/gmock.h>

#include <cmath>
#include <thread>

#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using ::testing::HasSubstr;

class IngestTest : public StoreTest {
 protected:
  IngestTest() { Restart(); }

  void Restart(IngestLimits limits = {}) {
    ingest_ = std::make_unique<Ingest>(*store_, limits, [this] { return now_ms_.load(); });
  }

  // Sends one tensor through a session; returns the commit's outcome.
  Result<CommitReply> Push(const SessionRequest& request, const std::vector<std::byte>& data,
                           std::map<std::string, double> metrics = {}) {
    const Result<std::string> session = ingest_->OpenSession(request);
    if (!session.ok()) return session.status();
    STOCKPOT_RETURN_IF_ERROR(ingest_->PutChunk(*session, Sha256(data), data));
    ShardCommit shard = Shard(data);
    shard.metrics = std::move(metrics);
    if (request.kind == ArtifactKind::kBase) {
      const auto config = Bytes("{}");
      STOCKPOT_RETURN_IF_ERROR(ingest_->PutChunk(*session, Sha256(config), config));
      shard.files["config.json"] = {2, {Sha256(config)}};
    }
    return ingest_->CommitShard(*session, std::move(shard));
  }

  static ShardCommit Shard(const std::vector<std::byte>& data) {
    ShardCommit shard;
    TensorEntry tensor{
        .name = "w", .dtype = DType::kBF16, .shape = {static_cast<int64_t>(data.size()) / 2}};
    tensor.parts["data"] = {static_cast<int64_t>(data.size()), {Sha256(data)}};
    shard.tensors.push_back(tensor);
    return shard;
  }

  Digest PushBase(const std::string& name = "base") {
    const auto reply =
        Push({.kind = ArtifactKind::kBase, .run = name}, RandomBytes(random_, 100'000));
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
    return reply.ok() ? reply->artifact : Digest{};
  }

  void MakeRun(const RunConfig& config = {}) {
    base_ = PushBase();
    const auto run = ingest_->CreateRun("r", "base", config, {});
    ASSERT_TRUE(run.ok()) << run.status().ToString();
    ASSERT_EQ(run->base, base_);
  }

  CommitReply PushStep(int64_t step, std::map<std::string, double> metrics = {}) {
    const auto reply =
        Push({.run = "r", .step = step}, RandomBytes(random_, 100'000), std::move(metrics));
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
    return reply.ok() ? *reply : CommitReply{};
  }

  std::vector<Event> EventsOfType(const std::string& type) {
    std::vector<Event> events = store_->EventsSince(0, 10'000);
    std::erase_if(events, [&](const Event& event) { return event.type != type; });
    return events;
  }

  std::unique_ptr<Ingest> ingest_;
  Digest base_;
};

TEST_F(IngestTest, ABaseArrivesUnderItsName) {
  const auto data = RandomBytes(random_, 100'000);
  const SessionRequest request{.kind = ArtifactKind::kBase, .run = "smollm2"};
  const auto first = Push(request, data);
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_FALSE(first->existed);
  EXPECT_EQ(*store_->ResolveName("smollm2"), first->artifact);
  EXPECT_EQ(store_->GetManifest(first->artifact)->kind, ArtifactKind::kBase);
  EXPECT_EQ(EventsOfType("base").size(), 1u);
  const int64_t events = store_->LastEvent();
  const auto again = Push(request, data);
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->existed);
  EXPECT_EQ(again->artifact, first->artifact);
  EXPECT_EQ(store_->LastEvent(), events);
  EXPECT_EQ(Push(request, RandomBytes(random_, 100)).status().code(), StatusCode::kAlreadyExists);
  const auto other_name = Push({.kind = ArtifactKind::kBase, .run = "copy"}, data);
  ASSERT_TRUE(other_name.ok());
  EXPECT_EQ(other_name->artifact, first->artifact);
  EXPECT_EQ(*store_->ResolveName("copy"), first->artifact);
}

TEST_F(IngestTest, ACheckpointBringsItsLineageAliasesEventAndJobs) {
  RunConfig config;
  config.merge_every = 10;
  MakeRun(config);
  const CommitReply ten = PushStep(10, {{"loss", 2.0}});
  const CommitReply eleven = PushStep(11, {{"loss", 3.0}});
  EXPECT_EQ(store_->GetAlias("r@latest")->artifact, eleven.artifact);
  EXPECT_EQ(store_->GetAlias("r@best")->artifact, ten.artifact);
  const CommitReply twenty = PushStep(20, {{"loss", 1.0}});
  EXPECT_EQ(store_->GetAlias("r@latest")->artifact, twenty.artifact);
  EXPECT_EQ(store_->GetAlias("r@best")->artifact, twenty.artifact);
  EXPECT_EQ(twenty.event_sequence, store_->LastEvent());
  const Manifest manifest = *store_->GetManifest(twenty.artifact);
  EXPECT_EQ(manifest.run, "r");
  EXPECT_EQ(manifest.step, 20);
  EXPECT_EQ(manifest.base, base_);
  ASSERT_EQ(store_->Parents(twenty.artifact).size(), 1u);
  EXPECT_EQ(store_->Parents(twenty.artifact)[0].type, EdgeType::kTrainedFrom);
  EXPECT_EQ(store_->Parents(twenty.artifact)[0].parent, base_);

  const auto events = EventsOfType("checkpoint");
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[2].fields.at("run"), "r");
  EXPECT_EQ(events[2].fields.at("step"), "20");
  EXPECT_EQ(events[2].fields.at("artifact"), twenty.artifact.Hex());
  EXPECT_EQ(events[2].fields.at("metrics"), "{\"loss\":1.0}");
  EXPECT_EQ(EventsOfType("alias").size(), 1u + 2 + 1 + 2) << "base, 10, 11, 20";

  std::vector<std::string> publishes;
  std::vector<std::string> merges;
  for (const Job& job : store_->ListJobs()) {
    EXPECT_EQ(job.state, JobState::kQueued);
    (job.kind == JobKind::kMerge ? merges : publishes)
        .push_back(job.args.at(job.kind == JobKind::kMerge ? "parents" : "artifact"));
  }
  EXPECT_EQ(publishes, (std::vector<std::string>{ten.artifact.Hex(), eleven.artifact.Hex(),
                                                 twenty.artifact.Hex()}));
  EXPECT_EQ(merges, (std::vector<std::string>{twenty.artifact.Hex() + "," + ten.artifact.Hex()}));
}

TEST_F(IngestTest, LatestOnlyMovesForwardAndBestHoldsUnderAnyOrder) {
  MakeRun();
  const CommitReply thirty = PushStep(30, {{"loss", 5}});
  const CommitReply late = PushStep(20, {{"loss", 1}});
  EXPECT_EQ(store_->GetAlias("r@latest")->artifact, thirty.artifact);
  EXPECT_EQ(store_->GetAlias("r@best")->artifact, late.artifact);
  PushStep(25, {{"loss", 1}});
  EXPECT_EQ(store_->GetAlias("r@best")->artifact, late.artifact) << "ties go to the earlier step";
  PushStep(40);
  EXPECT_EQ(store_->GetAlias("r@best")->artifact, late.artifact) << "no metric, no claim";
}

TEST_F(IngestTest, ResendingIsIdempotentAndADifferentStepIsRefused) {
  MakeRun();
  const auto data = RandomBytes(random_, 100'000);
  const SessionRequest request{.run = "r", .step = 5};
  const auto first = Push(request, data, {{"loss", 1}});
  ASSERT_TRUE(first.ok());
  const int64_t events = store_->LastEvent();
  const size_t jobs = store_->ListJobs().size();
  const auto again = Push(request, data, {{"loss", 1}});
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_TRUE(again->existed);
  EXPECT_EQ(again->artifact, first->artifact);
  EXPECT_EQ(store_->LastEvent(), events);
  EXPECT_EQ(store_->ListJobs().size(), jobs);
  const auto other = Push(request, RandomBytes(random_, 100'000));
  EXPECT_EQ(other.status().code(), StatusCode::kAlreadyExists);
  EXPECT_THAT(other.status().message(), HasSubstr("r@5"));
  EXPECT_EQ(store_->ListSteps("r").size(), 1u);
}

TEST_F(IngestTest, ALossOfNaNDoesNotCostTheCheckpoint) {
  MakeRun();
  const CommitReply reply = PushStep(1, {{"loss", NAN}, {"lr", 0.5}, {"norm", INFINITY}});
  ASSERT_FALSE(reply.artifact.IsZero());
  EXPECT_EQ(store_->ListSteps("r")[0].metrics, (std::map<std::string, double>{{"lr", 0.5}}));
  EXPECT_EQ(EventsOfType("checkpoint")[0].fields.at("dropped_metrics"), "loss,norm");
  EXPECT_FALSE(store_->GetAlias("r@best").has_value());
}

TEST_F(IngestTest, ResumedFromIsAnEdge) {
  MakeRun();
  const CommitReply one = PushStep(1);
  const auto two =
      Push({.run = "r", .step = 2, .resumed_from = one.artifact}, RandomBytes(random_, 1000));
  ASSERT_TRUE(two.ok());
  bool found = false;
  for (const Edge& edge : store_->Parents(two->artifact)) {
    found = found || (edge.type == EdgeType::kResumedFrom && edge.parent == one.artifact);
  }
  EXPECT_TRUE(found);
  EXPECT_EQ(
      ingest_->OpenSession({.run = "r", .step = 3, .resumed_from = Sha256("x")}).status().code(),
      StatusCode::kNotFound);
}

TEST_F(IngestTest, RunsAreConfirmedNotReplaced) {
  MakeRun();
  const int64_t events = store_->LastEvent();
  EXPECT_TRUE(ingest_->CreateRun("r", base_.Hex(), {}, {}).ok());
  EXPECT_EQ(store_->LastEvent(), events) << "nothing changed";
  RunConfig config;
  config.merge_every = 7;
  const int64_t created_ms = store_->GetRun("r")->created_ms;
  now_ms_ += 1000;
  EXPECT_TRUE(ingest_->CreateRun("r", "base", config, {{"k", "v"}}).ok());
  EXPECT_EQ(store_->GetRun("r")->config.merge_every, 7);
  EXPECT_EQ(store_->GetRun("r")->created_ms, created_ms);
  EXPECT_EQ(EventsOfType("run").back().fields.at("change"), "config");
  EXPECT_TRUE(ingest_->CreateRun("r", "base", config, {}).ok());
  EXPECT_EQ(store_->GetRun("r")->tags.at("k"), "v") << "no tags given: the old ones stay";
  EXPECT_EQ(ingest_->CreateRun("r", "base", {}, {}, /*keep_config=*/true)->config.merge_every, 7);
  EXPECT_EQ(store_->GetRun("r")->config.merge_every, 7);
  EXPECT_EQ(ingest_->CreateRun("kept", "base", config, {}, true)->config.merge_every, 7) << "new";
  PushBase("other");
  EXPECT_EQ(ingest_->CreateRun("r", "other", config, {}).status().code(),
            StatusCode::kAlreadyExists);
  EXPECT_EQ(ingest_->CreateRun("s", "nobody", {}, {}).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(ingest_->CreateRun("s/t", "base", {}, {}).status().code(),
            StatusCode::kInvalidArgument);
  PushStep(1);
  EXPECT_EQ(ingest_->CreateRun("s", "r@1", {}, {}).status().code(), StatusCode::kInvalidArgument);
  config.merge_energy = NAN;
  EXPECT_EQ(ingest_->CreateRun("s", "base", config, {}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST_F(IngestTest, BadSessionRequests) {
  MakeRun();
  const auto code = [&](const SessionRequest& request) {
    return ingest_->OpenSession(request).status().code();
  };
  EXPECT_EQ(code({.run = "q", .step = 1}), StatusCode::kNotFound);
  EXPECT_EQ(code({.run = "", .step = 1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.run = "r", .step = -1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.run = "r", .step = 1, .rank = 1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.run = "r", .step = 1, .world = 0}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.run = "r", .step = 1, .world = -5}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.kind = ArtifactKind::kBase, .run = "b", .step = 1}),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.kind = ArtifactKind::kMerge, .run = "r", .step = 1}),
            StatusCode::kInvalidArgument);
  const auto ranks = ingest_->OpenSession({.run = "r", .step = 1, .rank = 1, .world = 4});
  EXPECT_EQ(ranks.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(ranks.status().message(), HasSubstr("name of their attempt"));
  EXPECT_EQ(ingest_->open_sessions(), 0);
}

TEST_F(IngestTest, BadCommitsStoreNothingAndEndTheSession) {
  MakeRun();
  const auto data = RandomBytes(random_, 100'000);
  struct Case {
    const char* what;
    const char* words;
    std::function<void(ShardCommit&)> spoil;
  };
  const std::vector<Case> cases = {
      {"no tensors", "no tensors", [](ShardCommit& s) { s.tensors.clear(); }},
      {"missing chunk", "not stored",
       [](ShardCommit& s) { s.tensors[0].parts["data"].chunks[0] = Sha256("missing"); }},
      {"shape larger than the data", "'w'", [](ShardCommit& s) { s.tensors[0].shape[0] += 1; }},
      {"dtype larger than the data", "'w'",
       [](ShardCommit& s) { s.tensors[0].dtype = DType::kF32; }},
      {"size and chunk disagree", "needs",
       [](ShardCommit& s) {
         s.tensors[0].shape[0] -= 1;
         s.tensors[0].parts["data"].bytes -= 2;
       }},
      {"negative size", "'w'", [](ShardCommit& s) { s.tensors[0].shape[0] *= -1; }},
      {"overflowing shape", "'w'",
       [](ShardCommit& s) {
         s.tensors[0].shape = {INT64_MAX, INT64_MAX, 2};
       }},
      {"tensor twice", "twice",
       [](ShardCommit& s) { s.tensors.push_back(TensorEntry(s.tensors[0])); }},
      {"empty tensor twice", "'none': rank 0 names it twice",
       [](ShardCommit& s) {
         TensorEntry none{.name = "none", .dtype = DType::kF32, .shape = {0, 3}};
         none.parts["data"] = {};
         s.tensors.insert(s.tensors.end(), 2, none);
       }},
      {"alias twice", "'tied': rank 0 names it twice",
       [](ShardCommit& s) {
         const TensorEntry tied{.name = "tied",
                                .dtype = DType::kBF16,
                                .shape = s.tensors[0].shape,
                                .alias_of = "w"};
         s.tensors.insert(s.tensors.end(), 2, tied);
       }},
      {"no name", "name of tensor", [](ShardCommit& s) { s.tensors[0].name = ""; }},
      {"alias of nothing", "'v'",
       [](ShardCommit& s) {
         s.tensors.push_back({.name = "v",
                              .dtype = DType::kBF16,
                              .shape = s.tensors[0].shape,
                              .alias_of = "nothing"});
       }},
      {"encoded tensor", "only raw",
       [](ShardCommit& s) {
         s.tensors[0].codec = Codec::kBase;
         s.tensors[0].content = Sha256("x");
         s.tensors[0].parts.clear();
       }},
      {"file outside", "file name", [](ShardCommit& s) { s.files["../../etc/passwd"] = Part{}; }},
      {"missing file chunk", "file notes.txt",
       [](ShardCommit& s) {
         s.files["notes.txt"] = {5, {Sha256("notes")}};
       }},
      {"nameless metric", "metric", [](ShardCommit& s) { s.metrics[""] = 1; }},
      {"too many metrics", "metrics",
       [](ShardCommit& s) {
         for (int i = 0; i <= 1000; ++i) s.metrics["m" + std::to_string(i)] = i;
       }},
  };
  const int64_t events = store_->LastEvent();
  for (const Case& one : cases) {
    const auto session = ingest_->OpenSession({.run = "r", .step = 1});
    ASSERT_TRUE(session.ok());
    ASSERT_TRUE(ingest_->PutChunk(*session, Sha256(data), data).ok());
    ShardCommit shard = Shard(data);
    one.spoil(shard);
    const auto reply = ingest_->CommitShard(*session, std::move(shard));
    EXPECT_EQ(reply.status().code(), StatusCode::kInvalidArgument) << one.what;
    EXPECT_THAT(reply.status().message(), HasSubstr(one.words)) << one.what;
    EXPECT_THAT(reply.status().message(), HasSubstr("r@1")) << one.what;
    EXPECT_EQ(ingest_->open_sessions(), 0) << one.what;
    EXPECT_TRUE(store_->ListSteps("r").empty()) << one.what;
    EXPECT_EQ(store_->LastEvent(), events) << one.what;
  }
  const auto base = ingest_->OpenSession({.kind = ArtifactKind::kBase, .run = "b"});
  const auto reply = ingest_->CommitShard(*base, Shard(data));
  EXPECT_EQ(reply.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(reply.status().message(), HasSubstr("config.json"));
}

TEST_F(IngestTest, TiedTensorsAreAliases) {
  MakeRun();
  const auto data = RandomBytes(random_, 100'000);
  const auto session = ingest_->OpenSession({.run = "r", .step = 1});
  ASSERT_TRUE(ingest_->PutChunk(*session, Sha256(data), data).ok());
  ShardCommit shard = Shard(data);
  shard.tensors.insert(
      shard.tensors.begin(),
      {.name = "z.head", .dtype = DType::kBF16, .shape = shard.tensors[0].shape, .alias_of = "w"});
  const auto reply = ingest_->CommitShard(*session, std::move(shard));
  ASSERT_TRUE(reply.ok()) << reply.status().ToString();
  EXPECT_EQ(store_->GetManifest(reply->artifact)->Resolve("z.head")->name, "w");
}

TEST_F(IngestTest, SessionsExpireAreLimitedAndUnknownOnesAreNamed) {
  MakeRun();
  Restart({.sessions = 2, .session_idle_ms = 1000, .chunks_per_query = 3});
  const auto one = ingest_->OpenSession({.run = "r", .step = 1});
  const auto two = ingest_->OpenSession({.run = "r", .step = 2});
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(one->size(), 32u);
  EXPECT_NE(*one, *two);
  EXPECT_EQ(ingest_->OpenSession({.run = "r", .step = 3}).status().code(),
            StatusCode::kResourceExhausted);
  const std::vector<Digest> many(4, Sha256("x"));
  EXPECT_EQ(ingest_->HaveChunks(*one, many).status().code(), StatusCode::kInvalidArgument);
  now_ms_ += 900;
  EXPECT_TRUE(ingest_->HaveChunks(*one, std::span(many).first(3)).ok()) << "keeps it alive";
  now_ms_ += 900;
  EXPECT_EQ(ingest_->ExpireIdle(), 1);
  EXPECT_EQ(ingest_->HaveChunks(*two, {}).status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(ingest_->HaveChunks(*one, {}).ok());
  EXPECT_TRUE(ingest_->Abort(*one).ok());
  EXPECT_EQ(ingest_->Abort(*one).code(), StatusCode::kNotFound);
  const auto data = RandomBytes(random_, 10);
  EXPECT_EQ(ingest_->PutChunk(*one, Sha256(data), data).code(), StatusCode::kNotFound);
  EXPECT_EQ(ingest_->CommitShard(*one, Shard(data)).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(ingest_->CommitShard("", Shard(data)).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(ingest_->open_sessions(), 0);
}

// A client that sends without end fills the disk with what nobody committed.
TEST_F(IngestTest, ASessionTakesSoManyBytesAndNoMore) {
  MakeRun();
  Restart({.session_bytes = 250'000});
  const auto session = ingest_->OpenSession({.run = "r", .step = 1});
  ASSERT_TRUE(session.ok());
  const auto data = RandomBytes(random_, 100'000);
  const auto other = RandomBytes(random_, 100'000);
  const auto last = RandomBytes(random_, 50'001);
  ASSERT_TRUE(ingest_->PutChunk(*session, Sha256(data), data).ok());
  ASSERT_TRUE(ingest_->PutChunk(*session, Sha256(other), other).ok());
  const Status over = ingest_->PutChunk(*session, Sha256(last), last);
  EXPECT_EQ(over.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(over.message(), HasSubstr("250000"));
  EXPECT_THAT(over.message(), HasSubstr("r@1"));
  EXPECT_FALSE(store_->HaveChunks(std::vector{Sha256(last)})[0]) << "not taken";
  EXPECT_TRUE(ingest_->CommitShard(*session, Shard(data)).ok()) << "the session goes on";
  const auto another = ingest_->OpenSession({.run = "r", .step = 2});
  ASSERT_TRUE(another.ok());
  EXPECT_TRUE(ingest_->PutChunk(*another, Sha256(last), last).ok()) << "each has its own";
}

TEST_F(IngestTest, ASessionOutlivesARetryableFailure) {
  MakeRun();
  const auto data = RandomBytes(random_, 100'000);
  const auto session = ingest_->OpenSession({.run = "r", .step = 1});
  ASSERT_TRUE(ingest_->PutChunk(*session, Sha256(data), data).ok());
  store_->Shutdown();
  EXPECT_EQ(ingest_->CommitShard(*session, Shard(data)).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(ingest_->open_sessions(), 1);
}

TEST_F(IngestTest, ManyClientsOfOneRunAtOnce) {
  MakeRun();
  constexpr int kClients = 6;
  constexpr int kSteps = 8;
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.emplace_back([&, c] {
      std::mt19937_64 random(static_cast<uint64_t>(c) + 1);
      for (int i = 0; i < kSteps; ++i) {
        const int64_t step = i * kClients + c;
        const auto reply = Push({.run = "r", .step = step}, RandomBytes(random, 80'000),
                                {{"loss", std::abs(static_cast<double>(step) - 20.0)}});
        ASSERT_TRUE(reply.ok()) << reply.status().ToString();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(store_->ListSteps("r").size(), static_cast<size_t>(kClients * kSteps));
  EXPECT_EQ(*store_->ResolveName("r@latest"), *store_->ResolveName("r@47"));
  EXPECT_EQ(*store_->ResolveName("r@best"), *store_->ResolveName("r@20"));
}

}  // namespace
}  // namespace stockpot::test
