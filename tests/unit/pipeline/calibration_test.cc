// The step between a draft and the gate, on a real store and job runner; what the serving side
// finds is given. The finding itself: tests/unit/calibrate and
// tests/integration/test_calibration.py.
#include "store/calibration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>

#include "store/bitdelta_codec.h"
#include "store/ingest.h"
#include "store/merge.h"
#include "store/pipeline.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPatienceMs = 120'000;
const std::string kQ = "model.layers.0.self_attn.q_proj.weight";

class CalibrationTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(Send({.kind = ArtifactKind::kBase, .run = "tiny"}, base_model_));
    ASSERT_OK(ingest_->CreateRun("demo", "tiny",
                                 {.merge_every = 0,
                                  .publish = PublishPolicy::kOnRequest,
                                  .publish_options = {.alpha = AlphaMethod::kClosedForm}},
                                 {}));
    TestModel tuned = base_model_;
    tuned.PerturbAll(random_, 0.01);
    const auto pushed = Send({.run = "demo", .step = 1}, tuned);
    ASSERT_OK(pushed);
    checkpoint_ = pushed->artifact;
    pipeline_ = std::make_unique<Pipeline>(
        *store_,
        Pipeline::Options{
            .merge = BuildMerge,
            .score = [this](const ScoreRequest& request,
                            const ProgressFunction&) { return Score(request); },
            .calibrate =
                [this](const CalibrationRequest& request, const ProgressFunction& progress) {
                  ++calibrated_;
                  return calibrate_(request, progress);
                },
            .backoff_ms = 1,
            .clock = SystemClock()});
  }
  Result<CommitReply> Send(const SessionRequest& request, const TensorSource& model) {
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session, ingest_->OpenSession(request));
    const Manifest manifest =
        PutModel(*store_, model, ArtifactKind::kCheckpoint, std::nullopt, "run", request.step);
    return ingest_->CommitShard(session, {.tensors = manifest.tensors, .files = manifest.files});
  }
  void SetTexts() {
    Commit commit;
    commit.calibrations.push_back({.run = "demo", .texts = {{"c", "one"}, {"d", "two"}}});
    commit.probes.push_back({.run = "demo", .texts = {{"p", "held out"}}});
    ASSERT_OK(store_->Apply(std::move(commit)));
  }
  // Keeps the scales of the model that the gate looks at.
  Result<ProbeScores> Score(const ScoreRequest& request) {
    seen_by_gate_ = AlphaOf(*request.models.at(1), kQ);
    return ProbeScores{.tokens = 10, .models = {{2, 0, 1}, {2, 0.01, 0.99}}};
  }
  // Twice the draft's scales, for every 1-bit tensor.
  Calibration Doubled(const Manifest& draft) const {
    Calibration found{.tokens = 77};
    for (const TensorEntry& entry : draft.tensors) {
      if (entry.codec != Codec::kBitDelta) continue;
      CalibratedTensor tensor{.alpha = {AlphaOf(draft, entry.name)},
                              .rows_kept = 1,
                              .error_before = 0.5,
                              .error = 0.25};
      for (float& alpha : tensor.alpha[0]) alpha *= 2;
      found.tensors[entry.name] = std::move(tensor);
    }
    return found;
  }
  std::vector<float> AlphaOf(const Manifest& variant, const std::string& name) const {
    const Part& part = variant.Find(name)->parts.at("alpha");
    std::vector<float> alpha(static_cast<size_t>(part.bytes) / sizeof(float));
    EXPECT_OK(store_->ReadPart(part, 0, std::as_writable_bytes(std::span(alpha))));
    return alpha;
  }
  Manifest Mean() {
    ThreadPool threads(1);
    const auto built =
        BuildVariant(*store_, checkpoint_, PublishCodec::kBitDelta, threads, nullptr);
    EXPECT_OK(built);
    return *built;
  }
  Manifest Publish(AlphaMethod alpha = AlphaMethod::kClosedForm) {
    const Job job = MakePublishJob(checkpoint_, PublishCodec::kBitDelta, "", {.alpha = alpha});
    EXPECT_OK(pipeline_->Submit(job));
    EXPECT_TRUE(pipeline_->WaitIdle(kPatienceMs));
    const Job done = store_->GetJob(job.key).value();
    EXPECT_EQ(done.state, JobState::kDone) << done.error;
    return *store_->GetManifest(Digest::FromHex(done.result).value());
  }
  std::map<std::string, std::string> LastVariantEvent() const {
    std::map<std::string, std::string> fields;
    for (const Event& event : store_->EventsSince(0, 100'000)) {
      if (event.type == "variant") fields = event.fields;
    }
    return fields;
  }

  TemporaryFolder temporary_;
  std::unique_ptr<CheckpointStore> store_ = OpenStore(temporary_.path() / "store");
  std::unique_ptr<Ingest> ingest_ =
      std::make_unique<Ingest>(*store_, IngestLimits{}, SystemClock());
  std::mt19937_64 random_{TestSeed()};
  TestModel base_model_ = TinyLlama(random_);
  Digest checkpoint_;
  std::atomic<int> calibrated_ = 0;
  std::vector<float> seen_by_gate_;
  CalibrateFunction calibrate_ = [this](const CalibrationRequest& request,
                                        const ProgressFunction&) {
    return Result<Calibration>(Doubled(*request.draft));
  };
  std::unique_ptr<Pipeline> pipeline_;  // last: its jobs call back
};

TEST_F(CalibrationTest, TheGateAndTheRouteGetTheVariantWithNewScales) {
  SetTexts();
  CalibrationRequest asked;
  calibrate_ = [&](const CalibrationRequest& request, const ProgressFunction&) {
    asked = request;
    EXPECT_EQ(request.full->kind, ArtifactKind::kVariant);
    EXPECT_EQ(request.full->Find(kQ)->codec, Codec::kRaw);
    return Result<Calibration>(Doubled(*request.draft));
  };
  const Manifest variant = Publish();
  EXPECT_EQ(asked.texts, (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(asked.method, AlphaMethod::kClosedForm);
  const Manifest mean = Mean();
  std::vector<float> wanted = AlphaOf(mean, kQ);
  for (float& alpha : wanted) alpha *= 2;
  EXPECT_EQ(AlphaOf(variant, kQ), wanted);
  EXPECT_EQ(seen_by_gate_, wanted);
  EXPECT_EQ(store_->GetRoute("demo@1")->variant, variant.digest());

  // Everything else is the draft's.
  Manifest same = variant;
  for (TensorEntry& entry : same.tensors) {
    if (entry.codec == Codec::kBitDelta) entry.parts = mean.Find(entry.name)->parts;
  }
  same.attributes = mean.attributes;
  EXPECT_EQ(same.digest(), mean.digest());
  EXPECT_EQ(variant.attributes.at("bytes"), mean.attributes.at("bytes"));

  const auto alpha = nlohmann::json::parse(variant.attributes.at("alpha"));
  EXPECT_EQ(alpha.at("method"), "closed-form");
  EXPECT_EQ(alpha.at("tokens"), 77);
  EXPECT_EQ(alpha.at("error_before"), 0.5);
  EXPECT_EQ(alpha.at("texts"), (*store_->GetCalibration("demo"))->digest().ShortHex());
  const auto facts = nlohmann::json::parse(variant.attributes.at("tensor/" + kQ));
  EXPECT_EQ(facts.at("output_error"), 0.25);
  const auto fields = LastVariantEvent();
  EXPECT_EQ(fields.at("alpha"), "closed-form");
  EXPECT_EQ(fields.at("alpha_error"), "0.25");
}

TEST_F(CalibrationTest, WithoutTextsTheScalesAreMeanAndTheVariantSaysSo) {
  const Manifest variant = Publish();
  EXPECT_EQ(calibrated_, 0);
  EXPECT_EQ(AlphaOf(variant, kQ), AlphaOf(Mean(), kQ));
  const auto alpha = nlohmann::json::parse(variant.attributes.at("alpha"));
  EXPECT_EQ(alpha.at("method"), "mean");
  EXPECT_EQ(alpha.at("asked"), "closed-form");
  EXPECT_THAT(LastVariantEvent().at("alpha_why"), HasSubstr("calibration set"));
}

TEST_F(CalibrationTest, MeanIsTheVariantOfOld) {
  SetTexts();
  EXPECT_EQ(Publish(AlphaMethod::kMean).digest(), Mean().digest());
  EXPECT_EQ(calibrated_, 0);
  EXPECT_FALSE(LastVariantEvent().contains("alpha"));
}

TEST_F(CalibrationTest, WhereNobodyAskedTheScalesAreOfTheClosedFormIfThereAreTexts) {
  SetTexts();
  CalibrationRequest asked;
  calibrate_ = [&](const CalibrationRequest& request, const ProgressFunction&) {
    asked = request;
    return Result<Calibration>(Doubled(*request.draft));
  };
  const Manifest variant = Publish(AlphaMethod::kAuto);
  EXPECT_EQ(calibrated_, 1);
  EXPECT_EQ(asked.method, AlphaMethod::kClosedForm);
  EXPECT_NE(AlphaOf(variant, kQ), AlphaOf(Mean(), kQ));
  EXPECT_EQ(LastVariantEvent().at("alpha"), "closed-form");
}

TEST_F(CalibrationTest, WhereNobodyAskedAndThereAreNoTextsNothingIsSaid) {
  EXPECT_EQ(Publish(AlphaMethod::kAuto).digest(), Mean().digest());
  EXPECT_EQ(calibrated_, 0);
  EXPECT_FALSE(LastVariantEvent().contains("alpha"));
}

TEST_F(CalibrationTest, WhatCannotBeFoundIsMeanAndWhatCannotBeYetIsTriedAgain) {
  SetTexts();
  calibrate_ = [](const CalibrationRequest&, const ProgressFunction&) {
    return Result<Calibration>(InvalidArgument("too short, \xff say"));
  };
  EXPECT_THAT(Publish().attributes.at("alpha"), HasSubstr("too short"));
  EXPECT_EQ(calibrated_, 1);
  calibrate_ = [this](const CalibrationRequest& request, const ProgressFunction&) {
    if (calibrated_ < 3) return Result<Calibration>(Unavailable("soon"));
    return Result<Calibration>(Doubled(*request.draft));
  };
  const Job job =
      MakePublishJob(checkpoint_, PublishCodec::kBitDelta, "other", {AlphaMethod::kClosedForm});
  EXPECT_OK(pipeline_->Submit(job));
  EXPECT_TRUE(pipeline_->WaitIdle(kPatienceMs));
  EXPECT_EQ(store_->GetJob(job.key)->state, JobState::kDone);
  EXPECT_EQ(calibrated_, 3);
  EXPECT_EQ(LastVariantEvent().at("alpha"), "closed-form");
}

TEST_F(CalibrationTest, ScalesThatDoNotFitAreRefused) {
  const Manifest draft = Mean();
  const auto refused = [&](const std::function<void(Calibration&)>& spoil) {
    Calibration found = Doubled(draft);
    spoil(found);
    const auto made = WithCalibration(*store_, draft, found, Digest{});
    return made.status().code() == StatusCode::kInvalidArgument;
  };
  EXPECT_FALSE(refused([](Calibration&) {}));
  EXPECT_TRUE(refused([](Calibration& c) { c.tensors[kQ].alpha[0].pop_back(); }));
  EXPECT_TRUE(refused([](Calibration& c) { c.tensors[kQ].alpha[0][0] = NAN; }));
  EXPECT_TRUE(refused([](Calibration& c) { c.tensors[kQ].alpha.clear(); }));
  EXPECT_TRUE(
      refused([](Calibration& c) { c.tensors[kQ].alpha.push_back(c.tensors[kQ].alpha[0]); }));
  EXPECT_TRUE(refused([](Calibration& c) { c.tensors["lm_head.weight"] = {}; }));
  EXPECT_TRUE(refused([](Calibration& c) { c.tensors["model.norm.weight"] = {}; }));
}

}  // namespace
}  // namespace stockpot
