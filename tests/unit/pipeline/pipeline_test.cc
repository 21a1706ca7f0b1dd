// Jobs on a real store: from a pushed checkpoint to routes, lineage and events; refusals, retries,
// interruption and restart.
#include "store/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <future>
#include <limits>
#include <random>
#include <thread>

#include "store/artifact_source.h"
#include "store/ingest.h"
#include "store/merge.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPatienceMs = 120'000;
const std::string kQ = "model.layers.0.self_attn.q_proj.weight";

class PipelineTest : public ::testing::Test {
 protected:
  void SetUp() override { Import(base_model_, "tiny"); }

  void StartPipeline(MergeFunction merge = BuildMerge) {
    pipeline_ = std::make_unique<Pipeline>(
        *store_,
        Pipeline::Options{.merge = std::move(merge), .backoff_ms = 1, .clock = SystemClock()});
  }
  void Reopen() {
    pipeline_.reset();
    ingest_.reset();
    store_.reset();
    store_ = OpenStore(temporary_.path() / "store");
    ingest_ = std::make_unique<Ingest>(*store_, IngestLimits{}, SystemClock());
  }
  Result<CommitReply> Send(const SessionRequest& request, const TensorSource& model,
                           const std::map<std::string, double>& metrics) {
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session, ingest_->OpenSession(request));
    const Manifest manifest =
        PutModel(*store_, model, ArtifactKind::kCheckpoint, std::nullopt, "run", request.step);
    return ingest_->CommitShard(
        session, {.tensors = manifest.tensors, .files = manifest.files, .metrics = metrics});
  }
  void Import(const TensorSource& model, const std::string& name) {
    EXPECT_OK(Send({.kind = ArtifactKind::kBase, .run = name}, model, {}));
  }
  void CreateRun(const RunConfig& config) {
    ASSERT_OK(ingest_->CreateRun("demo", "tiny", config, {}));
  }
  Digest Push(int64_t step, double loss, const TestModel& model) {
    const auto reply = Send({.run = "demo", .step = step}, model, {{"loss", loss}});
    EXPECT_OK(reply);
    return reply.ok() ? reply->artifact : Digest{};
  }
  TestModel Tuned() {
    TestModel model = base_model_;
    model.PerturbAll(random_, 0.01);
    return model;
  }
  Job SubmitAndWait(const Job& job) {
    EXPECT_OK(pipeline_->Submit(job));
    EXPECT_TRUE(pipeline_->WaitIdle(kPatienceMs));
    return store_->GetJob(job.key).value();
  }
  Digest RouteTo(const std::string& name) const {
    const auto route = store_->GetRoute(name);
    EXPECT_TRUE(route.has_value()) << name;
    return route ? route->variant : Digest{};
  }
  std::vector<Event> Events(const std::string& type) const {
    std::vector<Event> found;
    for (const Event& event : store_->EventsSince(0, 100'000)) {
      if (event.type == type) found.push_back(event);
    }
    return found;
  }
  Digest VariantOf(const Digest& artifact) const {
    std::vector<Digest> variants;
    for (const Edge& edge : store_->Children(artifact)) {
      if (edge.type == EdgeType::kCompressedFrom) variants.push_back(edge.child);
    }
    EXPECT_EQ(variants.size(), 1u);
    return variants.empty() ? Digest{} : variants[0];
  }
  int64_t CountArtifacts(ArtifactKind kind) const {
    int64_t count = 0;
    for (const Digest& digest : store_->ListArtifacts()) {
      count += store_->GetManifest(digest).value().kind == kind;
    }
    return count;
  }

  TemporaryFolder temporary_;
  std::unique_ptr<CheckpointStore> store_ = OpenStore(temporary_.path() / "store");
  std::unique_ptr<Ingest> ingest_ =
      std::make_unique<Ingest>(*store_, IngestLimits{}, SystemClock());
  std::mt19937_64 random_{TestSeed()};
  TestModel base_model_ = TinyLlama(random_);
  std::unique_ptr<Pipeline> pipeline_;
};

TEST_F(PipelineTest, FromPushesToRoutesLineageAndEvents) {
  CreateRun({.merge_every = 2, .publish = PublishPolicy::kEvery, .merge_energy = 0.9});
  StartPipeline();
  const std::vector<TestModel> models = {Tuned(), Tuned(), Tuned()};
  const Digest c1 = Push(1, 3.0, models[0]), c2 = Push(2, 2.0, models[1]),
               c3 = Push(3, 2.5, models[2]);
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));

  for (const Job& job : store_->ListJobs()) {
    EXPECT_EQ(job.state, JobState::kDone) << job.key << ": " << job.error;
    EXPECT_EQ(job.attempts, 1) << job.key;
    EXPECT_TRUE(store_->HasArtifact(Digest::FromHex(job.result).value())) << job.key;
  }
  EXPECT_EQ(store_->ListJobs().size(), 5u);  // three publishes, a merge and its publish

  const auto merge = store_->ResolveName("demo@2.merge");
  ASSERT_OK(merge);
  std::vector<Digest> parents;
  for (const Edge& edge : store_->Parents(*merge)) {
    EXPECT_EQ(edge.type, EdgeType::kMergedFrom);
    parents.push_back(edge.parent);
  }
  EXPECT_THAT(parents, ::testing::UnorderedElementsAre(c1, c2));
  EXPECT_EQ(store_->GetManifest(*merge)->step, 2);

  EXPECT_EQ(RouteTo("demo@1"), VariantOf(c1));
  EXPECT_EQ(RouteTo("demo@2"), VariantOf(c2));
  EXPECT_EQ(RouteTo("demo@3"), VariantOf(c3));
  EXPECT_EQ(RouteTo("demo@latest"), VariantOf(c3));
  EXPECT_EQ(RouteTo("demo@best"), VariantOf(c2));
  EXPECT_EQ(RouteTo("demo@2.merge"), VariantOf(*merge));
  EXPECT_EQ(store_->ListRoutes().size(), 6u);

  const auto variants = Events("variant");
  ASSERT_EQ(variants.size(), 4u);
  for (const Event& event : variants) {
    const Digest variant = Digest::FromHex(event.fields.at("variant")).value();
    EXPECT_EQ(event.subject, variant.Hex());
    EXPECT_EQ(event.fields.at("base"), store_->ResolveName("tiny")->Hex());
    EXPECT_EQ(event.fields.at("run"), "demo");
    EXPECT_EQ(VariantOf(Digest::FromHex(event.fields.at("source")).value()), variant);
    EXPECT_EQ(event.fields.at("bytes"),
              std::to_string(store_->GetManifest(variant)->stored_bytes()));
    EXPECT_THAT(event.fields.at("routes"), HasSubstr("demo@" + event.fields.at("step")));
  }
  const auto merges = Events("merge");
  ASSERT_EQ(merges.size(), 1u);
  EXPECT_EQ(merges[0].fields.at("artifact"), merge->Hex());
  EXPECT_GE(std::stod(merges[0].fields.at("kept_energy_min")), 0.9);

  // What is served decodes to base + alpha * sign, alpha the mean of |delta|.
  const auto served = OpenArtifact(*store_, RouteTo("demo@2"), true);
  ASSERT_OK(served);
  const auto bytes = (*served)->ReadAll(kQ);
  ASSERT_OK(bytes);
  const auto base = base_model_.Values(kQ), tuned = models[1].Values(kQ);
  for (size_t row = 0; row < 24; ++row) {
    double alpha = 0;
    for (size_t c = 0; c < 24; ++c)
      alpha += std::fabs(tuned[row * 24 + c] - base[row * 24 + c]) / 24;
    for (size_t i = row * 24; i < row * 24 + 24; ++i) {
      ASSERT_NEAR(LoadWeight(bytes->data(), DType::kF32, static_cast<int64_t>(i)),
                  base[i] + std::copysign(alpha, tuned[i] >= base[i] ? 1.0 : -1.0), 1e-7);
    }
  }
}

TEST_F(PipelineTest, ABrokenCheckpointIsKeptAndNotServed) {
  CreateRun({.merge_every = 2, .publish = PublishPolicy::kEvery});
  StartPipeline();
  const Digest good = Push(1, 1.0, Tuned());
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  const Digest served = RouteTo("demo@latest");
  TestModel broken = Tuned();
  broken.SetElement(kQ, 9, std::numeric_limits<float>::quiet_NaN());
  const Digest bad = Push(2, 0.5, broken);
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));

  EXPECT_TRUE(store_->HasArtifact(bad));
  EXPECT_EQ(*store_->ResolveName("demo@2"), bad);
  EXPECT_EQ(RouteTo("demo@latest"), served);
  EXPECT_EQ(RouteTo("demo@best"), served);
  EXPECT_FALSE(store_->GetRoute("demo@2").has_value());
  const auto refused = Events("publish_refused");
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_EQ(refused[0].subject, bad.Hex());
  EXPECT_THAT(refused[0].fields.at("reason"), HasSubstr(kQ));
  EXPECT_EQ(refused[0].fields.at("code"), "InvalidArgument");
  const auto merge_refused = Events("merge_refused");
  ASSERT_EQ(merge_refused.size(), 1u);
  EXPECT_EQ(merge_refused[0].subject, "demo@2");
  EXPECT_THAT(merge_refused[0].fields.at("reason"), HasSubstr(kQ));
  const Job job = store_->GetJob(refused[0].fields.at("job")).value();
  EXPECT_EQ(job.state, JobState::kFailed);
  EXPECT_EQ(job.attempts, 1);
  EXPECT_THAT(job.error, HasSubstr("NaN"));

  const Digest next = Push(3, 0.9, Tuned());  // the run goes on
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  EXPECT_EQ(RouteTo("demo@latest"), VariantOf(next));
  EXPECT_EQ(RouteTo("demo@1"), VariantOf(good));

  // A failed job may be asked for again, and fails again.
  const Job again = SubmitAndWait(job);
  EXPECT_EQ(again.state, JobState::kFailed);
  EXPECT_EQ(Events("publish_refused").size(), 2u);
}

TEST_F(PipelineTest, NamesAndRequests) {
  CreateRun({.merge_every = 0, .publish = PublishPolicy::kOnRequest});
  StartPipeline();
  const Digest c1 = Push(1, 1.0, Tuned()), c3 = Push(3, 2.0, Tuned());
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  EXPECT_TRUE(store_->ListJobs().empty());

  // `latest` never goes back; `best` is the alias's.
  EXPECT_EQ(SubmitAndWait(MakePublishJob(c3, PublishCodec::kBitDelta, "")).state, JobState::kDone);
  EXPECT_FALSE(store_->GetRoute("demo@best").has_value());
  EXPECT_EQ(SubmitAndWait(MakePublishJob(c1, PublishCodec::kBitDelta, "")).state, JobState::kDone);
  EXPECT_EQ(RouteTo("demo@latest"), VariantOf(c3));
  EXPECT_EQ(RouteTo("demo@best"), VariantOf(c1));

  // Dense and given names.
  const Job dense = SubmitAndWait(MakePublishJob(c1, PublishCodec::kDense, "prod"));
  EXPECT_EQ(dense.state, JobState::kDone);
  EXPECT_EQ(RouteTo("prod").Hex(), dense.result);
  EXPECT_EQ(SubmitAndWait(MakePublishJob(c3, PublishCodec::kDense, "")).state, JobState::kDone);
  EXPECT_TRUE(store_->GetRoute("demo@3.full").has_value());

  // Asking twice is asking once.
  const auto before = store_->EventsSince(0, 100'000).size();
  const auto again = pipeline_->Submit(MakePublishJob(c1, PublishCodec::kDense, "prod"));
  ASSERT_OK(again);
  EXPECT_EQ(again->state, JobState::kDone);
  EXPECT_EQ(again->result, dense.result);
  EXPECT_EQ(store_->EventsSince(0, 100'000).size(), before);

  // Moving a name says what it was.
  const Job moved = SubmitAndWait(MakePublishJob(c3, PublishCodec::kBitDelta, "prod"));
  EXPECT_EQ(moved.state, JobState::kDone);
  EXPECT_EQ(Events("route").back().subject, "prod");
  EXPECT_EQ(Events("route").back().fields.at("was"), dense.result);

  // Asking for what somebody moved or took away since is asking again.
  EXPECT_EQ(SubmitAndWait(MakePublishJob(c1, PublishCodec::kDense, "prod")).result, dense.result);
  EXPECT_EQ(RouteTo("prod").Hex(), dense.result);
  for (const char* name : {"demo@3", "demo@latest"}) {
    Commit unpublish;
    unpublish.routes.push_back({.name = name, .to = {}, .by = "test"});
    ASSERT_OK(store_->Apply(std::move(unpublish)));
    ASSERT_FALSE(store_->GetRoute(name).has_value());
    const Job asked_again = SubmitAndWait(MakePublishJob(c3, PublishCodec::kBitDelta, ""));
    EXPECT_EQ(asked_again.state, JobState::kDone);
    EXPECT_EQ(asked_again.result, moved.result);
    EXPECT_EQ(RouteTo(name).Hex(), moved.result) << name;
  }

  // An artifact that is no step needs a name.
  const Digest loose = StoreModel(*store_, Tuned(), ArtifactKind::kCheckpoint,
                                  *store_->ResolveName("tiny"), "elsewhere", 5);
  Job job = SubmitAndWait(MakePublishJob(loose, PublishCodec::kBitDelta, ""));
  EXPECT_EQ(job.state, JobState::kFailed);
  EXPECT_THAT(job.error, HasSubstr("give a name"));
  job = SubmitAndWait(MakePublishJob(loose, PublishCodec::kBitDelta, "loose"));
  EXPECT_EQ(job.state, JobState::kDone) << job.error;
  EXPECT_EQ(RouteTo("loose"), VariantOf(loose));

  for (const auto& [name, reason] : std::map<std::string, std::string>{
           {"tiny", "name of a base"}, {std::string(300, 'x'), "no route name"}}) {
    job = SubmitAndWait(MakePublishJob(c1, PublishCodec::kBitDelta, name));
    EXPECT_EQ(job.state, JobState::kFailed);
    EXPECT_THAT(job.error, HasSubstr(reason));
  }
  job = SubmitAndWait(MakePublishJob(Sha256("none"), PublishCodec::kBitDelta, "none"));
  EXPECT_EQ(job.state, JobState::kFailed);
  EXPECT_EQ(Events("publish_refused").back().fields.at("code"), "NotFound");
}

TEST_F(PipelineTest, MergesByHand) {
  CreateRun({.merge_every = 0, .publish = PublishPolicy::kMerges});
  StartPipeline();
  const Digest c1 = Push(1, 1.0, Tuned()), c2 = Push(2, 2.0, Tuned());
  const Job first = SubmitAndWait(MakeMergeJob("", -1, {c1, c2}, {.energy = 0.9}));
  ASSERT_EQ(first.state, JobState::kDone) << first.error;
  EXPECT_EQ(store_->ResolveName("demo@2.merge")->Hex(),
            first.result);                                    // the parents' run, last step
  EXPECT_TRUE(store_->GetRoute("demo@2.merge").has_value());  // published by the policy

  // A second merge of the step stands beside the first.
  const Job second = SubmitAndWait(MakeMergeJob("demo", 2, {c1, c2}, {.energy = 0.5}));
  ASSERT_EQ(second.state, JobState::kDone) << second.error;
  EXPECT_NE(second.result, first.result);
  EXPECT_EQ(Events("merge").back().fields.at("step_is"), first.result);
  EXPECT_EQ(store_->ResolveName("demo@2.merge")->Hex(), first.result);
  const Digest made = Digest::FromHex(second.result).value();
  const Job named = SubmitAndWait(MakePublishJob(made, PublishCodec::kBitDelta, "half"));
  EXPECT_EQ(named.state, JobState::kDone) << named.error;

  const Job unknown_run = SubmitAndWait(MakeMergeJob("nowhere", 2, {c1, c2}, {}));
  EXPECT_EQ(unknown_run.state, JobState::kFailed);
  Job mangled = MakeMergeJob("demo", 2, {c1}, {});
  mangled.args["parents"] = "zz";
  EXPECT_EQ(SubmitAndWait(mangled).state, JobState::kFailed);
  mangled = MakeMergeJob("demo", 3, {c1}, {});
  mangled.args.erase("energy");
  EXPECT_EQ(SubmitAndWait(mangled).state, JobState::kFailed);
  EXPECT_EQ(Events("merge_refused").size(), 3u);
}

TEST_F(PipelineTest, TransientFailuresAreRetriedAndBounded) {
  CreateRun({.merge_every = 0, .publish = PublishPolicy::kOnRequest});
  std::atomic<int> failures_left = 2;
  StartPipeline([&](auto& store, auto parents, const auto& run, int64_t step, const auto& options,
                    const auto& progress) -> Result<Manifest> {
    if (failures_left-- > 0) return ResourceExhausted("the disk is full");
    return BuildMerge(store, parents, run, step, options, progress);
  });
  const Digest c1 = Push(1, 1.0, Tuned()), c2 = Push(2, 2.0, Tuned());
  Job job = SubmitAndWait(MakeMergeJob("demo", 2, {c1, c2}, {}));
  EXPECT_EQ(job.state, JobState::kDone);
  EXPECT_EQ(job.attempts, 3);
  EXPECT_EQ(job.error, "");

  failures_left = 1'000'000;
  job = SubmitAndWait(MakeMergeJob("demo", 1, {c1}, {}));
  EXPECT_EQ(job.state, JobState::kFailed);
  EXPECT_EQ(job.attempts, 3);
  const auto failed = Events("merge_failed");
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_THAT(failed[0].fields.at("reason"), HasSubstr("disk is full"));
  failures_left = 0;
  EXPECT_EQ(SubmitAndWait(job).state, JobState::kDone);
}

// Stopped in the middle of a merge, and the daemon's memory lost: the job is done once, by the next
// one.
TEST_F(PipelineTest, AnInterruptedJobIsDoneOnceByTheNextPipeline) {
  CreateRun({.merge_every = 2, .publish = PublishPolicy::kMerges});
  std::promise<void> started;
  // The real merge, held at its first step until the pipeline is told to stop.
  StartPipeline([&](auto& store, auto parents, const auto& run, int64_t step, const auto& options,
                    const auto& progress) {
    return BuildMerge(store, parents, run, step, options, [&](double share) {
      Status status = progress(share);
      started.set_value();
      while (status.ok()) {
        std::this_thread::yield();
        status = progress(share);
      }
      return status;
    });
  });
  Push(1, 2.0, Tuned());
  Push(2, 1.0, Tuned());
  started.get_future().wait();
  const std::vector<Job> jobs = store_->ListJobs();
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].state, JobState::kRunning);
  EXPECT_FALSE(pipeline_->WaitIdle(1));
  EXPECT_EQ(pipeline_->progress().key, jobs[0].key);

  Reopen();
  EXPECT_EQ(store_->GetJob(jobs[0].key)->state, JobState::kQueued);
  EXPECT_EQ(CountArtifacts(ArtifactKind::kMerge), 0);
  StartPipeline();
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  EXPECT_EQ(store_->GetJob(jobs[0].key)->state, JobState::kDone);
  EXPECT_EQ(CountArtifacts(ArtifactKind::kMerge), 1);
  EXPECT_EQ(CountArtifacts(ArtifactKind::kVariant), 1);
  EXPECT_EQ(Events("merge").size(), 1u);

  Reopen();  // nothing is left to do
  StartPipeline();
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  EXPECT_EQ(CountArtifacts(ArtifactKind::kMerge), 1);
  EXPECT_EQ(Events("variant").size(), 1u);
}

// What a kill leaves behind: a job that says it is running, and nobody at it.
TEST_F(PipelineTest, AJobThatWasRunningWhenTheDaemonDiedIsTakenUp) {
  CreateRun({.merge_every = 0, .publish = PublishPolicy::kEvery});
  const Digest c1 = Push(1, 1.0, Tuned());
  Job job = store_->ListJobs().at(0);
  job.state = JobState::kRunning;
  job.attempts = 3;
  Commit commit;
  commit.jobs.push_back(job);
  ASSERT_OK(store_->Apply(std::move(commit)));
  Reopen();
  StartPipeline();
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  const Job done = store_->GetJob(job.key).value();
  EXPECT_EQ(done.state, JobState::kDone);
  EXPECT_EQ(done.attempts, 1);  // an interruption is no failure
  EXPECT_EQ(RouteTo("demo@latest"), VariantOf(c1));
}

// A publish that is asked for again while later ones take RUN@latest over is not done again.
TEST_F(PipelineTest, AskingAgainWhileRoutesMoveQueuesNothing) {
  constexpr int64_t kSteps = 24;
  CreateRun({.merge_every = 0, .publish = PublishPolicy::kOnRequest});
  std::vector<Job> jobs;
  for (int64_t step = 1; step <= kSteps; ++step) {
    jobs.push_back(MakePublishJob(Push(step, 1.0, Tuned()), PublishCodec::kBitDelta, ""));
  }
  StartPipeline();
  std::atomic<bool> stop = false;
  std::thread asker([&] {
    while (!stop) {
      for (const Job& job : jobs) {
        const std::optional<Job> known = store_->GetJob(job.key);
        if (known && known->state == JobState::kDone) EXPECT_OK(pipeline_->Submit(job));
      }
    }
  });
  for (const Job& job : jobs) EXPECT_OK(pipeline_->Submit(job));
  EXPECT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  stop = true;
  asker.join();
  EXPECT_EQ(Events("job").size(), static_cast<size_t>(kSteps));
  EXPECT_EQ(Events("variant").size(), static_cast<size_t>(kSteps));
}

TEST_F(PipelineTest, ManyThreadsMayAskAndStopComesAnyTime) {
  CreateRun({.merge_every = 0, .publish = PublishPolicy::kOnRequest});
  std::vector<Digest> checkpoints;
  for (int64_t step = 1; step <= 4; ++step) checkpoints.push_back(Push(step, 1.0, Tuned()));
  StartPipeline();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (const Digest& checkpoint : checkpoints) {
        EXPECT_OK(pipeline_->Submit(MakePublishJob(checkpoint, PublishCodec::kBitDelta, "")));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Reopen();  // wherever it is
  StartPipeline();
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  EXPECT_EQ(store_->ListJobs().size(), 4u);
  EXPECT_EQ(Events("variant").size(), 4u);
  EXPECT_EQ(Events("job").size(), 4u);
  EXPECT_EQ(RouteTo("demo@latest"), VariantOf(checkpoints.back()));
  store_->Shutdown();  // the pipeline survives it, and ends
  EXPECT_FALSE(
      pipeline_->Submit(MakePublishJob(checkpoints[0], PublishCodec::kDense, "late")).ok());
}

}  // namespace
}  // namespace stockpot
