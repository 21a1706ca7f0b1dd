// The gate and the scores, on a real store and job runner; what the serving side measures is given.
// The measuring itself: tests/unit/engine/scorer_test.cc and tests/integration/test_gate.py.
#include "store/variant_gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "store/best_model.h"
#include "store/bitdelta_codec.h"
#include "store/ingest.h"
#include "store/merge.h"
#include "store/pipeline.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kPatienceMs = 120'000;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const std::string kQ = "model.layers.0.self_attn.q_proj.weight";
const std::string kBias = "model.norm.weight";

GateMeasures Fine() {
  GateMeasures measures{.update = 0.1, .error = 0.4, .error_tensor = kQ};
  measures.probe =
      GateMeasures::Probe{.tokens = 100, .full_loss = 2, .loss = 2.01, .kl = 0.01, .top1 = 0.97};
  return measures;
}

TEST(JudgeTest, EveryLimitIsInclusiveAndANaNIsOutsideOfEach) {
  const GateConfig config{.max_kl = 0.1,
                          .min_top1 = 0.9,
                          .max_loss_rise = 0.25,
                          .max_update = 0.5,
                          .min_update = 0.01,
                          .max_error = 0.6};
  EXPECT_FALSE(Judge(config, Fine()));
  struct Case {
    const char* metric;
    double at_limit, beyond;
    std::function<void(GateMeasures&, double)> set;
  };
  const std::vector<Case> cases = {
      {"kl", 0.1, 0.100001, [](auto& m, double v) { m.probe->kl = v; }},
      {"top1", 0.9, 0.899, [](auto& m, double v) { m.probe->top1 = v; }},
      {"loss_rise", 1, 1.1,
       [](auto& m, double v) { m.probe->loss = v, m.probe->full_loss = 0.75; }},
      {"update", 0.5, 0.51, [](auto& m, double v) { m.update = v; }},
      {"update", 0.01, 0.0099, [](auto& m, double v) { m.update = v; }},
      {"error", 0.6, 0.61, [](auto& m, double v) { m.error = v; }},
  };
  for (const Case& c : cases) {
    GateMeasures measures = Fine();
    c.set(measures, c.at_limit);
    EXPECT_FALSE(Judge(config, measures)) << c.metric;
    for (const double value : {c.beyond, kNaN}) {
      c.set(measures, value);
      const auto refusal = Judge(config, measures);
      ASSERT_TRUE(refusal) << c.metric << " " << value;
      EXPECT_EQ(refusal->metric, c.metric);
      EXPECT_THAT(refusal->reason, HasSubstr(c.metric));
    }
  }
  GateMeasures broken = Fine();
  broken.probe->full_loss = kNaN;  // the checkpoint itself computes nothing
  EXPECT_EQ(Judge(config, broken)->metric, "loss_rise");
}

TEST(JudgeTest, SaysAllThatIsWrongWithNumbersAndLimits) {
  GateMeasures measures = Fine();
  measures.probe->kl = 0.25;
  measures.error = 0.99;
  const auto refusal = Judge({.max_kl = 0.125, .max_error = 0.5}, measures);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->metric, "kl");
  EXPECT_EQ(refusal->measured, "0.25");
  EXPECT_EQ(refusal->limit, "0.125");
  for (const char* word : {"0.25", "0.125", "0.99", "0.5", kQ.c_str()}) {
    EXPECT_THAT(refusal->reason, HasSubstr(word));
  }
}

TEST(JudgeTest, WithoutProbeTextsUpdateAndErrorAreAllThereIs) {
  GateMeasures measures{.update = 0.1, .error = 0.9, .error_tensor = kQ};
  EXPECT_FALSE(Judge({.max_kl = 0, .min_top1 = 1}, measures));
  EXPECT_EQ(Judge({.max_error = 0.8}, measures)->metric, "error");
  measures.error_tensor.clear();  // nothing is stored in one bit
  EXPECT_FALSE(Judge({.max_error = 0.8}, measures));
}

TEST(JudgeTest, LimitsAreChecked) {
  EXPECT_OK(CheckGate({}));
  for (const GateConfig& bad : {GateConfig{.max_kl = -1},
                                {.max_kl = kNaN},
                                {.min_top1 = 1.1},
                                {.max_loss_rise = kNaN},
                                {.max_update = INFINITY},
                                {.max_update = 0.1, .min_update = 0.2},
                                {.max_error = 2}}) {
    EXPECT_EQ(CheckGate(bad).code(), StatusCode::kInvalidArgument);
  }
}

class GateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(Send({.kind = ArtifactKind::kBase, .run = "tiny"}, base_model_, {}));
  }
  void CreateRun(const RunConfig& config) {
    ASSERT_OK(ingest_->CreateRun("demo", "tiny", config, {}));
  }
  void SetProbe(const std::string& text = "held out") {
    Commit commit;
    commit.probes.push_back({.run = "demo", .texts = {{"a.txt", text}}, .by = "test"});
    ASSERT_OK(store_->Apply(std::move(commit)));
  }
  void SetGate(const GateConfig& config) {
    Commit commit;
    commit.gates.push_back({"demo", config});
    ASSERT_OK(store_->Apply(std::move(commit)));
  }
  // Scores come from `measure_`, by the digest of the artifact behind each model.
  void Start() {
    pipeline_ = std::make_unique<Pipeline>(
        *store_, Pipeline::Options{
                     .merge = BuildMerge,
                     .score =
                         [this](const ScoreRequest& request, const ProgressFunction& progress) {
                           ++scored_;
                           return measure_(request, progress);
                         },
                     .backoff_ms = 1,
                     .clock = SystemClock()});
  }
  static ProbeScores Scores(std::vector<ModelScore> models) {
    return {.tokens = 10, .models = std::move(models)};
  }
  // Full loss 2 for any model; the second one is off by `kl` and `rise`.
  static ProbeScores GateScores(const ScoreRequest& request, double kl, double rise) {
    ProbeScores scores = Scores({{.loss = 2, .kl = 0, .top1 = 1}});
    if (request.models.size() > 1) scores.models.push_back({2 + rise, kl, 0.99});
    return scores;
  }
  Result<CommitReply> Send(const SessionRequest& request, const TensorSource& model,
                           const std::map<std::string, double>& metrics) {
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session, ingest_->OpenSession(request));
    const Manifest manifest =
        PutModel(*store_, model, ArtifactKind::kCheckpoint, std::nullopt, "run", request.step);
    return ingest_->CommitShard(
        session, {.tensors = manifest.tensors, .files = manifest.files, .metrics = metrics});
  }
  Digest Push(int64_t step, const TestModel& model, std::map<std::string, double> metrics = {}) {
    const auto reply = Send({.run = "demo", .step = step}, model, metrics);
    EXPECT_OK(reply);
    return reply.ok() ? reply->artifact : Digest{};
  }
  Digest PushAndWait(int64_t step) {
    const Digest pushed = Push(step, Tuned());
    EXPECT_TRUE(pipeline_->WaitIdle(kPatienceMs));
    return pushed;
  }
  TestModel Tuned(double sigma = 0.01) {
    TestModel model = base_model_;
    model.PerturbAll(random_, sigma);
    return model;
  }
  // As the base, but for an element of each row, which moves by `far`, and noise in all others.
  void Spike(TestModel& model, const std::string& name, double far) {
    const std::vector<float> base = base_model_.Values(name);
    const auto cols = static_cast<size_t>(base_model_.Find(name)->shape[1]);
    std::normal_distribution<double> noise(0, far / 50);
    for (size_t i = 0; i < base.size(); ++i) {
      model.SetElement(name, static_cast<int64_t>(i),
                       base[i] + (i % cols == 5 ? far : noise(random_)));
    }
  }
  Job SubmitAndWait(const Job& job) {
    EXPECT_OK(pipeline_->Submit(job));
    EXPECT_TRUE(pipeline_->WaitIdle(kPatienceMs));
    return store_->GetJob(job.key).value();
  }
  std::vector<Event> Events(const std::string& type) const {
    std::vector<Event> found;
    for (const Event& event : store_->EventsSince(0, 100'000)) {
      if (event.type == type) found.push_back(event);
    }
    return found;
  }
  std::string Route(const std::string& name) const {
    const auto route = store_->GetRoute(name);
    return route ? route->variant.Hex() : "";
  }
  Digest Best() const { return store_->GetAlias("demo@best").value_or(Alias{}).artifact; }
  // The runner collects after its job is done.
  bool CollectedEverything() const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
    while (std::chrono::steady_clock::now() < deadline) {
      const auto garbage = store_->CollectGarbage({.dry_run = true});
      if (garbage.ok() && garbage->chunks == 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  std::optional<double> EvalOf(const Digest& artifact, const std::string& name) const {
    for (const Eval& eval : store_->ListEvals(artifact)) {
      if (eval.task + "/" + eval.metric == name) return eval.value;
    }
    return std::nullopt;
  }

  TemporaryFolder temporary_;
  std::unique_ptr<CheckpointStore> store_ = OpenStore(temporary_.path() / "store");
  std::unique_ptr<Ingest> ingest_ =
      std::make_unique<Ingest>(*store_, IngestLimits{}, SystemClock());
  std::mt19937_64 random_{TestSeed()};
  TestModel base_model_ = TinyLlama(random_);
  ScoreFunction measure_ = [](const ScoreRequest& request, const ProgressFunction&) {
    return Result<ProbeScores>(GateScores(request, 0.01, 0.001));
  };
  std::atomic<int> scored_ = 0;
  std::unique_ptr<Pipeline> pipeline_;  // last: its jobs call back
};

// The slow obvious sums, in double, against what the variant says of itself.
TEST_F(GateTest, MeasuresAreThoseOfTheDefinition) {
  const Digest base = *store_->ResolveName("tiny");
  TestModel tuned = base_model_;
  for (const TensorInfo& info : base_model_.tensors()) {
    if (info.name == kBias || info.name.find("proj") != std::string::npos) {
      tuned.Perturb(info.name, random_, info.name == kQ ? 0.2 : 0.02);
    }
  }
  // What one bit cannot say, in a matrix that holds next to nothing of the update.
  Spike(tuned, "model.layers.1.self_attn.k_proj.weight", 0.05);
  const Digest checkpoint = StoreModel(*store_, tuned, ArtifactKind::kCheckpoint, base, "run", 1);
  ThreadPool threads(2);
  const auto variant = BuildVariant(*store_, checkpoint, PublishCodec::kBitDelta, threads, nullptr);
  ASSERT_OK(variant);

  double update = 0;
  double origin = 0;
  std::map<std::string, std::pair<double, double>> matrices;  // ||delta||^2, error
  for (const TensorEntry& entry : variant->tensors) {
    if (entry.codec == Codec::kBase || !entry.alias_of.empty()) continue;
    const std::vector<float> was = base_model_.Values(entry.name), is = tuned.Values(entry.name);
    const size_t cols = is.size() / static_cast<size_t>(entry.shape[0]);
    double square = 0;
    double missed = 0;
    for (size_t begin = 0; begin < is.size(); begin += cols) {
      double alpha = 0;
      for (size_t i = begin; i < begin + cols; ++i) {
        const double delta = double{is[i]} - double{was[i]};
        square += delta * delta;
        alpha += std::fabs(delta) / static_cast<double>(cols);
        origin += double{was[i]} * double{was[i]};
      }
      for (size_t i = begin; i < begin + cols; ++i) {
        const double delta = double{is[i]} - double{was[i]};
        missed += std::pow(delta - (delta >= 0 ? alpha : -alpha), 2);
      }
    }
    update += square;
    if (entry.codec == Codec::kBitDelta) matrices[entry.name] = {square, missed / square};
  }
  double energy = 0;
  for (const auto& [name, matrix] : matrices) energy += matrix.first;
  double worst = 0;
  double worst_of_all = 0;
  for (const auto& [name, matrix] : matrices) {
    worst_of_all = std::max(worst_of_all, matrix.second);
    const bool counts =
        matrix.first >= kGateEnergyShare * energy / static_cast<double>(matrices.size());
    if (counts) worst = std::max(worst, matrix.second);
    const auto facts = nlohmann::json::parse(variant->attributes.at("tensor/" + name));
    EXPECT_NEAR(facts.at("row_error").get<double>(), matrix.second, 2e-5) << name;
    EXPECT_NEAR(facts.at("delta").get<double>(), std::sqrt(matrix.first),
                1e-5 * std::sqrt(matrix.first));
  }
  const auto measures = MeasuresOf(*variant);
  ASSERT_OK(measures);
  EXPECT_NEAR(measures->update, std::sqrt(update / origin), 1e-5 * std::sqrt(update / origin));
  EXPECT_NEAR(measures->error, worst, 2e-5);
  EXPECT_NEAR(measures->error, 1 - 2 / M_PI, 0.15) << "the error of a Gaussian update";
  EXPECT_GT(worst_of_all, 0.8) << "of the small one, which does not count";
  EXPECT_LT(worst, 0.8);

  Manifest without = *variant;
  without.attributes.erase("tensor/" + kQ);
  EXPECT_EQ(MeasuresOf(without).status().code(), StatusCode::kInvalidArgument);
  without = *variant;
  without.attributes.erase("update");
  EXPECT_EQ(MeasuresOf(without).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(GateTest, AVariantWithinItsLimitsIsServedAndItsNumbersAreKept) {
  CreateRun({.merge_every = 0});
  SetProbe();
  Start();
  const Digest pushed = PushAndWait(1);
  const auto variants = Events("variant");
  ASSERT_EQ(variants.size(), 1u);
  const auto& fields = variants[0].fields;
  EXPECT_EQ(fields.at("gate"), "passed");
  EXPECT_EQ(fields.at("kl"), "0.01");
  EXPECT_EQ(fields.at("top1"), "0.99");
  EXPECT_EQ(fields.at("full_loss"), "2");
  EXPECT_EQ(fields.at("loss"), "2.001");
  EXPECT_EQ(fields.at("tokens"), "10");
  EXPECT_GT(std::stod(fields.at("update")), 0);
  EXPECT_EQ(Route("demo@1"), variants[0].subject);
  const Digest variant = Digest::FromHex(variants[0].subject).value();
  EXPECT_EQ(EvalOf(variant, "gate/kl"), 0.01);
  EXPECT_EQ(EvalOf(variant, "gate/top1"), 0.99);
  EXPECT_EQ(EvalOf(variant, "probe/loss"), 2.001);
  EXPECT_EQ(EvalOf(pushed, "probe/loss"), 2.0);
  EXPECT_EQ(scored_, 1) << "one pass over both";

  // The texts and the models that were asked about.
  measure_ = [&](const ScoreRequest& request, const ProgressFunction&) -> Result<ProbeScores> {
    EXPECT_EQ(request.base, *store_->ResolveName("tiny"));
    EXPECT_THAT(request.texts, ::testing::ElementsAre("held out"));
    EXPECT_EQ(request.models.size(), 2u);
    EXPECT_EQ(request.models[0]->Find(kQ)->codec, Codec::kRaw);
    EXPECT_EQ(request.models[1]->Find(kQ)->codec, Codec::kBitDelta);
    return GateScores(request, 0.01, 0.001);
  };
  PushAndWait(2);
}

TEST_F(GateTest, AWorseVariantIsRefusedAndTheOldOneStays) {
  CreateRun({.merge_every = 0});
  SetProbe();
  SetGate({.max_kl = 0.125});
  Start();
  PushAndWait(1);
  const std::string old = Route("demo@latest");
  ASSERT_NE(old, "");
  measure_ = [](const ScoreRequest& request, const ProgressFunction&) {
    return Result<ProbeScores>(GateScores(request, 0.25, 0.001));
  };
  const Digest bad = PushAndWait(2);
  EXPECT_EQ(Route("demo@latest"), old);
  EXPECT_EQ(Route("demo@2"), "");
  const auto refused = Events("publish_refused");
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_EQ(refused[0].subject, bad.Hex());
  EXPECT_EQ(refused[0].fields.at("metric"), "kl");
  EXPECT_EQ(refused[0].fields.at("measured"), "0.25");
  EXPECT_EQ(refused[0].fields.at("limit"), "0.125");
  EXPECT_EQ(refused[0].fields.at("kl"), "0.25");
  EXPECT_EQ(refused[0].fields.at("step"), "2");
  EXPECT_THAT(refused[0].fields.at("reason"), HasSubstr("0.125"));
  EXPECT_EQ(EvalOf(bad, "probe/loss"), 2.0) << "the checkpoint was measured all the same";
  const Job job = store_->GetJob(refused[0].fields.at("job")).value();
  EXPECT_EQ(job.state, JobState::kFailed);
  EXPECT_EQ(job.attempts, 1);

  // By force, with a reason, which stays beside the numbers.
  const Job forced = SubmitAndWait(
      MakeForcedPublishJob(bad, PublishCodec::kBitDelta, "", "a demo for one hour", "ann"));
  EXPECT_EQ(forced.state, JobState::kDone) << forced.error;
  EXPECT_EQ(Route("demo@latest"), forced.result);
  const Event event = Events("variant").back();
  EXPECT_EQ(event.fields.at("gate"), "forced");
  EXPECT_EQ(event.fields.at("force"), "a demo for one hour");
  EXPECT_EQ(event.fields.at("by"), "ann");
  EXPECT_THAT(event.fields.at("overruled"), HasSubstr("kl"));
  EXPECT_EQ(event.fields.at("kl"), "0.25");

  // With other limits the same request is another question.
  SetGate({.max_kl = 0.3});
  EXPECT_EQ(SubmitAndWait(MakePublishJob(bad, PublishCodec::kBitDelta, "")).state, JobState::kDone);
}

TEST_F(GateTest, WhatCannotBeComputedDoesNotPass) {
  CreateRun({.merge_every = 0});
  SetProbe();
  Start();
  struct Case {
    const char* name;
    ScoreFunction measure;
    const char* event;
  };
  const std::vector<Case> cases = {
      {"another base is served",
       [](const auto&, const auto&) -> Result<ProbeScores> { return NotFound("another base"); },
       "publish_refused"},
      {"broken", [](const auto&, const auto&) -> Result<ProbeScores> { return Internal("broken"); },
       "publish_refused"},
      {"NaN",
       [](const auto& request, const auto&) -> Result<ProbeScores> {
         return GateScores(request, kNaN, 0);
       },
       "publish_refused"},
      {"loss NaN",
       [](const auto& request, const auto&) -> Result<ProbeScores> {
         return GateScores(request, 0, kNaN);
       },
       "publish_refused"},
      {"not now",
       [](const auto&, const auto&) -> Result<ProbeScores> { return Unavailable("busy"); },
       "publish_failed"},
  };
  int64_t step = 0;
  for (const Case& c : cases) {
    const size_t before = Events(c.event).size();
    measure_ = c.measure;
    PushAndWait(++step);
    EXPECT_EQ(Events(c.event).size(), before + 1) << c.name;
    EXPECT_EQ(Route("demo@" + std::to_string(step)), "") << c.name;
  }
  EXPECT_TRUE(store_->ListRoutes().empty());
  EXPECT_EQ(store_->GetJob(Events("publish_failed").back().fields.at("job"))->attempts, 3);

  // Nor without anything that could compute it.
  pipeline_.reset();
  pipeline_ = std::make_unique<Pipeline>(
      *store_, Pipeline::Options{.merge = BuildMerge, .backoff_ms = 1, .clock = SystemClock()});
  PushAndWait(++step);
  EXPECT_TRUE(store_->ListRoutes().empty());
  EXPECT_THAT(Events("publish_refused").back().fields.at("reason"),
              HasSubstr("cannot be computed"));
  // Without probe texts nothing needs it.
  Commit commit;
  commit.probes.push_back({.run = "demo", .by = "test"});
  ASSERT_OK(store_->Apply(std::move(commit)));
  PushAndWait(++step);
  EXPECT_NE(Route("demo@latest"), "");
}

TEST_F(GateTest, WithoutProbeTextsUpdatesAndErrorsAreJudged) {
  CreateRun({.merge_every = 0});
  SetGate({.max_update = 0.5, .max_error = 0.8});
  Start();
  PushAndWait(1);
  EXPECT_NE(Route("demo@1"), "");
  EXPECT_EQ(scored_, 0);
  Push(2, Tuned(10));  // no fine-tune of this base any more
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  EXPECT_EQ(Events("publish_refused").back().fields.at("metric"), "update");
  // One element of each row moved far, all others a little.
  TestModel spiky = base_model_;
  for (const TensorInfo& info : base_model_.tensors()) {
    if (info.name.find("proj") != std::string::npos) Spike(spiky, info.name, 0.05);
  }
  const Digest few = Push(3, spiky);
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  EXPECT_EQ(Events("publish_refused").back().fields.at("metric"), "error");
  EXPECT_THAT(Events("publish_refused").back().fields.at("error_tensor"), HasSubstr("proj"));
  // Stored exactly it has no such error.
  EXPECT_EQ(SubmitAndWait(MakePublishJob(few, PublishCodec::kDense, "")).state, JobState::kDone);
  EXPECT_EQ(Events("publish_refused").size(), 2u);
}

// "probe/loss" as the run's metric: what the engine measures decides, whenever it arrives.
TEST_F(GateTest, TheBestFollowsTheHeldOutLoss) {
  CreateRun({.merge_every = 0, .publish = PublishPolicy::kBest, .best_metric = "probe/loss"});
  SetProbe();
  std::map<std::string, double> losses;  // by the content of one tensor
  const auto key = [](const Manifest& m) { return m.Find(kBias)->parts.at("data").digest().Hex(); };
  measure_ = [&](const ScoreRequest& request, const ProgressFunction&) -> Result<ProbeScores> {
    ProbeScores scores = Scores({{.loss = losses.at(key(*request.models[0])), .kl = 0, .top1 = 1}});
    if (request.models.size() > 1) scores.models.push_back({scores.models[0].loss, 0, 1});
    return scores;
  };
  Start();
  const auto push = [&](int64_t step, double loss) {
    const TestModel model = Tuned();
    losses[key(PutModel(*store_, model, ArtifactKind::kCheckpoint, std::nullopt, "x", step))] =
        loss;
    const Digest pushed = Push(step, model, {{"loss", -static_cast<double>(step)}});
    EXPECT_TRUE(pipeline_->WaitIdle(kPatienceMs));
    return pushed;
  };
  const Digest one = push(1, 3.0);
  EXPECT_EQ(Best(), one);
  const Digest two = push(2, 2.0);
  EXPECT_EQ(Best(), two);
  push(3, 2.5);  // newer, by the trainer's loss better, and worse
  EXPECT_EQ(Best(), two);
  EXPECT_EQ(Route("demo@2"), Route("demo@best"));
  EXPECT_NE(Route("demo@best"), "");
  EXPECT_EQ(Route("demo@3"), "") << "only the best is published";
  const auto scores = Events("score");
  ASSERT_EQ(scores.size(), 3u);
  EXPECT_EQ(scores[1].fields.at("loss"), "2");
  EXPECT_EQ(scores[1].subject, two.Hex());

  // Scores on other texts do not compare: nobody is the best by them yet, and the name stays.
  SetProbe("other texts");
  EXPECT_EQ(Best(), two);
  const Digest four = push(4, 9.0);
  EXPECT_EQ(Best(), four) << "the only one with a score on these texts";
}

// A merge is scored beside both parents and the mean; better than all it is the best, else not.
TEST_F(GateTest, AMergeIsTheBestOnlyIfItWasMeasuredToBe) {
  CreateRun({.merge_every = 2, .publish = PublishPolicy::kBest, .best_metric = "probe/loss"});
  SetProbe();
  // What is asked about for the first time gets the next loss; asked again it has the same.
  std::vector<double> next;
  std::map<std::string, double> known;
  measure_ = [&](const ScoreRequest& request, const ProgressFunction&) -> Result<ProbeScores> {
    const std::string key = request.models[0]->Find(kQ)->parts.at("data").digest().Hex();
    if (!known.contains(key)) {
      if (next.empty()) return Internal("nobody expected this model");
      known[key] = next.front();
      next.erase(next.begin());
    }
    ProbeScores scores = Scores({{.loss = known[key], .kl = 0, .top1 = 1}});
    if (request.models.size() > 1) scores.models.push_back({known[key], 0, 1});
    return scores;
  };
  Start();
  next = {3.0};
  const Digest one = PushAndWait(1);
  EXPECT_EQ(Best(), one);
  next = {1.5, 2.0, 1.75};  // the merge, the checkpoint it came with, the mean
  const Digest two = PushAndWait(2);
  const auto merge = store_->ResolveName("demo@2.merge");
  ASSERT_OK(merge);
  EXPECT_TRUE(next.empty());
  EXPECT_EQ(EvalOf(*merge, "probe/loss"), 1.5);
  EXPECT_EQ(EvalOf(*merge, "merge/best_parent_loss"), 2.0);
  EXPECT_EQ(EvalOf(*merge, "merge/mean_loss"), 1.75);
  EXPECT_EQ(EvalOf(two, "probe/loss"), 2.0);
  EXPECT_EQ(Best(), *merge);
  EXPECT_EQ(Route("demo@best"), Route("demo@2.merge"));
  EXPECT_NE(Route("demo@best"), "");
  const Event event = Events("merge").back();
  EXPECT_EQ(event.fields.at("loss"), "1.5");
  EXPECT_EQ(event.fields.at("parent_losses"), "2,3");
  EXPECT_EQ(event.fields.at("mean_loss"), "1.75");
  EXPECT_TRUE(Events("merge_worse").empty());
  EXPECT_TRUE(CollectedEverything()) << "of the mean that was only scored";

  next = {9.0};
  PushAndWait(3);
  next = {5.0, 4.0, 4.5};
  PushAndWait(4);
  EXPECT_TRUE(next.empty());
  ASSERT_EQ(Events("merge_worse").size(), 1u);
  EXPECT_EQ(Events("merge_worse")[0].subject, store_->ResolveName("demo@4.merge")->Hex());
  EXPECT_EQ(Events("merge_worse")[0].fields.at("best_parent_loss"), "2") << "of step 2";
  EXPECT_EQ(Best(), *merge);
  EXPECT_EQ(Route("demo@best"), Route("demo@2.merge"));
  EXPECT_EQ(Route("demo@4.merge"), "") << "only the best is published";

  // What cannot be scored stands, and is nobody's best.
  next = {};
  PushAndWait(5);
  PushAndWait(6);
  EXPECT_THAT(Events("merge").back().fields.at("unscored"), HasSubstr("nobody expected"));
  EXPECT_EQ(Best(), *merge);
}

TEST_F(GateTest, AnEvaluationThatArrivesLaterMovesTheBest) {
  CreateRun({.merge_every = 0, .best_metric = "task/acc", .best_is_lower = false});
  Start();
  const Digest one = PushAndWait(1), two = PushAndWait(2);
  EXPECT_TRUE(Best().IsZero());
  const auto eval = [&](const Digest& artifact, double value, int64_t time_ms) {
    Commit commit;
    commit.evals.push_back({artifact, "task", "acc", value, time_ms, "ann"});
    ASSERT_OK(FollowBest(*store_, *store_->GetRun("demo"), "eval", commit));
    ASSERT_OK(store_->Apply(std::move(commit)));
    ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  };
  eval(one, 0.5, 1);
  EXPECT_EQ(Best(), one);
  EXPECT_EQ(Route("demo@best"), Route("demo@1")) << "published before it was the best";
  eval(two, 0.6, 2);
  EXPECT_EQ(Best(), two);
  EXPECT_EQ(Route("demo@best"), Route("demo@2"));
  eval(two, 0.4, 3);  // measured again
  EXPECT_EQ(Best(), one);
  EXPECT_EQ(Route("demo@best"), Route("demo@1"));
}

TEST_F(GateTest, AnInterruptedScoreIsDoneByTheNextPipeline) {
  CreateRun({.merge_every = 0, .publish = PublishPolicy::kOnRequest});
  SetProbe();
  std::atomic<bool> inside = false;
  measure_ = [&](const ScoreRequest&, const ProgressFunction& progress) -> Result<ProbeScores> {
    inside = true;
    for (;;) {
      STOCKPOT_RETURN_IF_ERROR(progress(0.5));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  Start();
  const Digest pushed = Push(1, Tuned());
  while (!inside) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  pipeline_.reset();
  EXPECT_EQ(EvalOf(pushed, "probe/loss"), std::nullopt);
  ASSERT_EQ(store_->ListOpenJobs().size(), 1u);
  EXPECT_EQ(store_->ListOpenJobs()[0].kind, JobKind::kScore);
  measure_ = [](const ScoreRequest& request, const ProgressFunction&) {
    return Result<ProbeScores>(GateScores(request, 0, 0));
  };
  Start();
  ASSERT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  EXPECT_EQ(EvalOf(pushed, "probe/loss"), 2.0);
  // Asking again is asking once, until the texts change.
  const Digest probe = (*store_->GetProbe("demo"))->digest();
  const int before = scored_;
  EXPECT_EQ(SubmitAndWait(MakeScoreJob(pushed, probe)).state, JobState::kDone);
  EXPECT_EQ(scored_, before);
  SetProbe("others");
  const Digest other = (*store_->GetProbe("demo"))->digest();
  EXPECT_EQ(SubmitAndWait(MakeScoreJob(pushed, other)).state, JobState::kDone);
  EXPECT_EQ(scored_, before + 1);
}

}  // namespace
}  // namespace stockpot
