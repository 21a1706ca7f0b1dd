// The scorer against sums over the logits of single passes, written out plainly.
#include "serve/engine/scorer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/unit/engine/tiny_model.h"
#include "tests/unit/model/run_model.h"
#include "tests/unit/model/world.h"

namespace stockpot {
namespace {

using test::World;

constexpr int64_t kWindow = 48;

class ScorerTest : public ::testing::Test {
 protected:
  ScorerTest() : model_(test::TinyChatModel(1)), world_(model_) {
    std::mt19937_64 random(7);
    for (int i = 0; i < 131; ++i) tokens_.push_back(static_cast<int32_t>(3 + random() % 256));
  }

  Result<ProbeScores> Score(const std::vector<VariantLease>& models, ScorerOptions options,
                            const ProgressFunction& progress = nullptr) const {
    return ScoreModels(world_.base, models, {&tokens_, 1}, options, progress);
  }
  static ScorerOptions Options(int64_t rows = 64, int threads = 1) {
    return {.window = kWindow, .rows = rows, .threads = threads};
  }

  // log softmax of every row of a window, in double.
  std::vector<std::vector<double>> LogProbs(const VariantModel* variant,
                                            std::span<const int32_t> window) const {
    ThreadPool threads(1);
    KvPool pool(world_.base->config(), int64_t{4} << 20);
    Transformer transformer(world_.base, threads);
    const int64_t prompt = (static_cast<int64_t>(window.size()) + 1) / 2;
    const std::vector<float> logits =
        test::PromptLogits(transformer, pool, variant, window, prompt);
    std::vector<std::vector<double>> rows;
    const size_t vocab = logits.size() / window.size();
    for (size_t row = 0; row < window.size(); ++row) {
      double sum = 0;
      for (size_t i = 0; i < vocab; ++i) sum += std::exp(double{logits[row * vocab + i]});
      std::vector<double>& out = rows.emplace_back();
      for (size_t i = 0; i < vocab; ++i) out.push_back(logits[row * vocab + i] - std::log(sum));
    }
    return rows;
  }

  struct Expected {
    int64_t tokens = 0;
    double loss_first = 0, loss = 0, kl = 0, top1 = 0;
  };
  Expected Expect(const VariantModel* first, const VariantModel* other) const {
    Expected e;
    for (size_t begin = 0; begin < tokens_.size(); begin += kWindow) {
      const size_t count = std::min<size_t>(kWindow, tokens_.size() - begin);
      const auto window = std::span(tokens_).subspan(begin, count);
      const auto p = LogProbs(first, window);
      const auto q = LogProbs(other, window);
      for (size_t row = 0; row + 1 < count; ++row) {
        const auto next = static_cast<size_t>(window[row + 1]);
        e.loss_first -= p[row][next];
        e.loss -= q[row][next];
        for (size_t i = 0; i < p[row].size(); ++i) {
          e.kl += std::exp(p[row][i]) * (p[row][i] - q[row][i]);
        }
        e.top1 += std::max_element(p[row].begin(), p[row].end()) - p[row].begin() ==
                  std::max_element(q[row].begin(), q[row].end()) - q[row].begin();
        ++e.tokens;
      }
    }
    const auto n = static_cast<double>(e.tokens);
    return {e.tokens, e.loss_first / n, e.loss / n, e.kl / n, e.top1 / n};
  }

  const TestModel model_;
  World world_;
  std::vector<int32_t> tokens_;
};

TEST_F(ScorerTest, GivesLossKlAndTop1OfPlainSums) {
  const VariantLease full =
      world_.Load(world_.Publish(test::TunedFrom(model_, 2), PublishCodec::kDense));
  const VariantLease one_bit = world_.Load(world_.Publish(test::TunedFrom(model_, 2)));
  const auto scores = Score({full, one_bit, nullptr}, Options());
  ASSERT_TRUE(scores.ok()) << scores.status().ToString();
  ASSERT_EQ(scores->models.size(), 3u);
  for (const auto& [index, variant] : {std::pair(1, one_bit.get()), {2, nullptr}}) {
    const Expected expected = Expect(full.get(), variant);
    const ModelScore& score = scores->models[static_cast<size_t>(index)];
    EXPECT_EQ(scores->tokens, expected.tokens);
    EXPECT_NEAR(scores->models[0].loss, expected.loss_first, 1e-9);
    EXPECT_NEAR(score.loss, expected.loss, 1e-9);
    EXPECT_NEAR(score.kl, expected.kl, 1e-9);
    EXPECT_DOUBLE_EQ(score.top1, expected.top1);
    EXPECT_GT(score.kl, 0);
    EXPECT_LT(score.top1, 1);  // the test could not tell otherwise
  }
  EXPECT_EQ(scores->models[0].kl, 0);
  EXPECT_EQ(scores->models[0].top1, 1);
}

TEST_F(ScorerTest, DoesNotDependOnRowsAndThreads) {
  const VariantLease variant = world_.Load(world_.Publish(test::TunedFrom(model_, 3)));
  const auto wanted = Score({nullptr, variant}, Options());
  ASSERT_TRUE(wanted.ok());
  for (const auto& [rows, threads] : {std::pair(1, 1), {5, 1}, {48, 2}, {1000, 3}}) {
    const auto scores = Score({nullptr, variant}, Options(rows, threads));
    ASSERT_TRUE(scores.ok());
    EXPECT_EQ(scores->models[0].loss, wanted->models[0].loss) << rows;
    EXPECT_EQ(scores->models[1].loss, wanted->models[1].loss) << rows;
    EXPECT_EQ(scores->models[1].kl, wanted->models[1].kl) << rows;
  }
}

TEST_F(ScorerTest, OneModelTwiceIsTheSame) {
  const VariantLease variant = world_.Load(world_.Publish(test::TunedFrom(model_, 4)));
  const auto scores = Score({variant, variant}, Options());
  ASSERT_TRUE(scores.ok());
  EXPECT_EQ(scores->models[1].kl, 0);
  EXPECT_EQ(scores->models[1].top1, 1);
  EXPECT_EQ(scores->models[1].loss, scores->models[0].loss);
}

// What the gate scores a checkpoint as, before anything is committed.
TEST_F(ScorerTest, ACheckpointIsScoredAsItsDenseVariantThatNobodyCommitted) {
  const TestModel tuned = test::TunedFrom(model_, 5);
  const VariantLease published = world_.Load(world_.Publish(tuned, PublishCodec::kDense));
  const Manifest full = PutModel(*world_.store, tuned, ArtifactKind::kCheckpoint,
                                 world_.base_digest, "other", 1);
  const Manifest base = world_.ManifestOf(world_.base_digest);
  const auto loaded =
      VariantModel::Load(world_.base, *world_.store, DenseVariantOf(full, base));
  ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
  const auto scores = Score({published, *loaded}, Options());
  ASSERT_TRUE(scores.ok());
  EXPECT_EQ(scores->models[1].loss, scores->models[0].loss);
  EXPECT_EQ(scores->models[1].kl, 0);
  // The base as a dense variant of itself is all references.
  const Manifest same = DenseVariantOf(base, base);
  for (const TensorEntry& entry : same.tensors) {
    EXPECT_TRUE(entry.codec == Codec::kBase || !entry.alias_of.empty()) << entry.name;
  }
}

TEST_F(ScorerTest, RefusesWhatItCannotScore) {
  tokens_ = {5};
  EXPECT_EQ(Score({nullptr}, Options()).status().code(), StatusCode::kInvalidArgument);
  tokens_ = {};
  EXPECT_EQ(Score({nullptr}, Options()).status().code(), StatusCode::kInvalidArgument);
  tokens_ = {5, static_cast<int32_t>(test::kTinyVocab)};
  const Status status = Score({nullptr}, Options()).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("272"), std::string::npos) << status.message();
}

TEST_F(ScorerTest, AWindowOfOneTokenHasNothingToScore) {
  tokens_.resize(static_cast<size_t>(kWindow) + 1);
  const auto scores = Score({nullptr}, Options());
  ASSERT_TRUE(scores.ok());
  EXPECT_EQ(scores->tokens, kWindow - 1);
}

// The mean is over all tokens, and no window reaches from one text into the next.
TEST_F(ScorerTest, SeveralTextsAreScoredEachByItself) {
  const VariantLease variant = world_.Load(world_.Publish(test::TunedFrom(model_, 6)));
  const std::vector<VariantLease> models = {nullptr, variant};
  const std::vector<std::vector<int32_t>> texts = {
      {tokens_.begin(), tokens_.begin() + 70}, {7}, {}, {tokens_.begin() + 70, tokens_.end()}};
  double last = 0;
  const auto together = ScoreModels(world_.base, models, texts, Options(8), [&](double share) {
    EXPECT_GE(share, last);
    EXPECT_LE(share, 1);
    last = share;
    return OkStatus();
  });
  ASSERT_TRUE(together.ok()) << together.status().ToString();
  double loss = 0;
  double kl = 0;
  double top1 = 0;
  int64_t tokens = 0;
  for (const size_t i : {size_t{0}, size_t{3}}) {
    const auto alone = ScoreModels(world_.base, models, {&texts[i], 1}, Options(8), nullptr);
    ASSERT_TRUE(alone.ok());
    const auto n = static_cast<double>(alone->tokens);
    loss += n * alone->models[1].loss;
    kl += n * alone->models[1].kl;
    top1 += n * alone->models[1].top1;
    tokens += alone->tokens;
  }
  EXPECT_EQ(together->tokens, tokens);
  const auto n = static_cast<double>(tokens);
  EXPECT_NEAR(together->models[1].loss, loss / n, 1e-12);
  EXPECT_NEAR(together->models[1].kl, kl / n, 1e-12);
  EXPECT_NEAR(together->models[1].top1, top1 / n, 1e-12);
}

TEST_F(ScorerTest, StopsWhenProgressSaysSo) {
  int calls = 0;
  double last = -1;
  const auto scores = Score({nullptr, nullptr}, Options(8), [&](double share) -> Status {
    EXPECT_GE(share, last);
    EXPECT_LE(share, 1);
    last = share;
    return ++calls == 5 ? Unavailable("the pipeline is stopping") : OkStatus();
  });
  EXPECT_EQ(scores.status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(calls, 5);
}

}  // namespace
}  // namespace stockpot
