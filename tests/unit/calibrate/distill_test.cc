// The objective of distillation and its gradient against PyTorch in float64 (distill_oracle.py),
// and what the loop around it promises.
#include "serve/calibrate/distill.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <random>

#include "serve/calibrate/calibrate.h"
#include "store/artifact_source.h"
#include "store/safetensors.h"
#include "tests/unit/engine/tiny_model.h"
#include "tests/unit/model/world.h"

namespace stockpot {
namespace {

using test::World;

class DistillTest : public ::testing::Test {
 protected:
  DistillTest()
      : model_(test::TinyChatModel(1)), tuned_(test::TunedFrom(model_, 2)), world_(model_) {
    std::mt19937_64 random(7);
    for (const int64_t length : {70, 45, 3}) {
      auto& text = texts_.emplace_back();
      for (int64_t i = 0; i < length; ++i) text.push_back(static_cast<int32_t>(3 + random() % 256));
    }
    models_ = {.base = world_.base,
               .full = world_.Load(world_.Publish(tuned_, PublishCodec::kDense)),
               .draft = world_.Load(world_.Publish(tuned_))};
    start_ = ScalesOf(*models_.draft);
  }
  static DistillOptions Options() {
    return {.sequence = 16,
            .batch = 2,
            .steps = 12,
            .seconds = 1e6,
            .learning_rate = 0.02,
            .evaluate_every = 3,
            .save_every = 1};
  }
  Result<Distillation> Run(const DistillOptions& options, const DistillationState* resume = nullptr,
                           const SaveDistillation& save = nullptr,
                           const ProgressFunction& progress = nullptr) const {
    return Distill(models_, start_, texts_, options, resume, save, progress);
  }

  const TestModel model_;
  const TestModel tuned_;
  World world_;
  CalibratedModels models_;
  ModelScales start_;
  std::vector<std::vector<int32_t>> texts_;
};

TEST_F(DistillTest, LossAndGradientAreThoseOfTorch) {
  const std::filesystem::path folder = world_.folder.path() / "oracle";
  ASSERT_OK(WriteModelFolder(model_, folder / "base"));
  ASSERT_OK(WriteModelFolder(tuned_, folder / "tuned"));
  const std::vector<std::span<const int32_t>> sequences = {std::span(texts_[0]).first(24),
                                                           std::span(texts_[0]).subspan(30, 24),
                                                           std::span(texts_[1]).first(24)};
  // Away from mean |delta|, so that a gradient of another place would show.
  ModelScales scales = start_;
  std::mt19937_64 random(3);
  for (auto& [name, layer] : scales) {
    for (float& alpha : layer[0])
      alpha *= std::exp(std::normal_distribution<float>(0, 0.3f)(random));
  }
  ThreadPool threads(2);
  LogitLoss objective(models_, threads);
  const auto teacher = objective.Teacher(sequences, nullptr);
  ASSERT_OK(teacher);
  ModelScales gradient;
  const auto loss = objective.Student(sequences, *teacher, scales, &gradient, nullptr);
  ASSERT_OK(loss);
  const auto again = objective.Student(sequences, *teacher, scales, nullptr, nullptr);
  ASSERT_OK(again);
  EXPECT_EQ(*again, *loss);

  TestModel numbers;
  std::vector<double> tokens;
  for (const auto& sequence : sequences)
    tokens.insert(tokens.end(), sequence.begin(), sequence.end());
  numbers.Set("tokens", DType::kF32, {3, 24}, tokens);
  numbers.Set("loss", DType::kF32, {1}, {*loss});
  for (const auto& [name, layer] : scales) {
    const auto rows = static_cast<int64_t>(layer[0].size());
    numbers.Set("alpha/" + name, DType::kF32, {rows}, {layer[0].begin(), layer[0].end()});
    const std::vector<float>& found = gradient.at(name)[0];
    numbers.Set("gradient/" + name, DType::kF32, {rows}, {found.begin(), found.end()});
  }
  numbers.config_files["config.json"] = "{}";
  ASSERT_OK(WriteModelFolder(numbers, folder / "numbers"));
  EXPECT_TRUE(RunPython("../calibrate/distill_oracle.py", {folder.string()}));
}

TEST_F(DistillTest, FindsScalesThatAreBetterOnWhatNoStepSaw) {
  const auto found = Run(Options());
  ASSERT_OK(found);
  EXPECT_EQ(found->steps, 12);
  EXPECT_EQ(found->resumed_at, 0);
  EXPECT_EQ(found->tokens + found->held_back, (70 / 16 + 45 / 16) * 16);
  EXPECT_GT(found->held_back, 0);
  EXPECT_LT(found->loss, found->loss_before);
  EXPECT_NE(found->alpha, start_);
  for (const auto& [name, layer] : found->alpha) {
    for (const float alpha : layer[0]) EXPECT_GT(alpha, 0);
  }
}

TEST_F(DistillTest, NothingThatIsWorseIsKept) {
  DistillOptions options = Options();
  options.learning_rate = 3;  // every step leaves
  const auto found = Run(options);
  ASSERT_OK(found);
  EXPECT_EQ(found->loss, found->loss_before);
  EXPECT_EQ(found->alpha, start_);
  const auto none = Run({.sequence = 16, .steps = 0});
  ASSERT_OK(none);
  EXPECT_EQ(none->alpha, start_);
}

// As if it had never stopped, bit for bit.
TEST_F(DistillTest, GoesOnWhereItWasInterrupted) {
  const auto whole = Run(Options());
  ASSERT_OK(whole);
  std::optional<DistillationState> saved;
  int saves = 0;
  const SaveDistillation save = [&](const DistillationState& state) {
    saved = state;
    return ++saves == 5 ? Unavailable("stop") : OkStatus();
  };
  EXPECT_EQ(Run(Options(), nullptr, save).status().code(), StatusCode::kUnavailable);
  ASSERT_TRUE(saved);
  EXPECT_EQ(saved->step, 5);
  const auto rest = Run(Options(), &*saved);
  ASSERT_OK(rest);
  EXPECT_EQ(rest->resumed_at, 5);
  EXPECT_EQ(rest->steps, 12);
  EXPECT_EQ(rest->alpha, whole->alpha);
  EXPECT_EQ(rest->loss, whole->loss);
  EXPECT_EQ(rest->loss_before, whole->loss_before);

  // A state of other tensors is none.
  DistillationState other = *saved;
  other.tensors.begin()->second.log_scale.pop_back();
  const auto anew = Run(Options(), &other);
  ASSERT_OK(anew);
  EXPECT_EQ(anew->resumed_at, 0);
}

TEST_F(DistillTest, StopsAtItsTimeAndWhenItIsToldTo) {
  DistillOptions options = Options();
  options.seconds = 0;
  const auto found = Run(options);
  ASSERT_OK(found);
  EXPECT_EQ(found->steps, 0);
  int asked = 0;
  const auto stopped = Run(Options(), nullptr, nullptr, [&](double share) {
    EXPECT_GE(share, 0);
    EXPECT_LE(share, 1);
    return ++asked == 9 ? Unavailable("stop") : OkStatus();
  });
  EXPECT_EQ(stopped.status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(asked, 9);
}

TEST_F(DistillTest, NeedsTwoSequences) {
  texts_ = {{5, 6, 7, 8}};
  EXPECT_EQ(Run(Options()).status().code(), StatusCode::kInvalidArgument);
  texts_ = {};
  EXPECT_EQ(Run(Options()).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(DistillTest, CalibrateSaysWhichMethodItsScalesAreOf) {
  CalibrationRequest request{.method = AlphaMethod::kDistilled};
  CalibrateOptions options{.distill = Options()};
  options.closed_form.window = 32;
  const auto better = Calibrate(models_, request, texts_, options, nullptr);
  ASSERT_OK(better);
  EXPECT_EQ(better->method, AlphaMethod::kDistilled);
  ASSERT_TRUE(better->distillation);
  EXPECT_LT(better->distillation->loss, better->distillation->loss_before);
  options.distill.steps = 0;
  const auto same = Calibrate(models_, request, texts_, options, nullptr);
  ASSERT_OK(same);
  EXPECT_EQ(same->method, AlphaMethod::kClosedForm);
  EXPECT_FALSE(same->why.empty());
  const std::vector<std::vector<int32_t>> short_texts = {{5, 6, 7, 8}};
  const auto shorter = Calibrate(models_, request, short_texts, options, nullptr);
  ASSERT_OK(shorter);
  EXPECT_EQ(shorter->method, AlphaMethod::kClosedForm);
  EXPECT_NE(shorter->why.find("too short"), std::string::npos);
  request.method = AlphaMethod::kClosedForm;
  const auto plain = Calibrate(models_, request, texts_, options, nullptr);
  ASSERT_OK(plain);
  EXPECT_FALSE(plain->distillation);
  EXPECT_TRUE(plain->why.empty());
  EXPECT_EQ(plain->tensors.begin()->second.alpha, same->tensors.begin()->second.alpha);
}

}  // namespace
}  // namespace stockpot
