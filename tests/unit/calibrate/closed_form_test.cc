// The closed form against its definition in double: inputs of the layers as the full checkpoint
// computes them, C made in full, signs and weights as they are stored.
#include "serve/calibrate/closed_form.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>

#include "kernels/bitdelta/signs.h"
#include "serve/calibrate/token_windows.h"
#include "serve/model/transformer.h"
#include "serve/model/weights_internal.h"
#include "tests/unit/engine/tiny_model.h"
#include "tests/unit/model/world.h"

namespace stockpot {
namespace {

using test::World;

constexpr int64_t kWindow = 48;

class ClosedFormTest : public ::testing::Test {
 protected:
  ClosedFormTest()
      : model_(test::TinyChatModel(1)), tuned_(test::TunedFrom(model_, 2)), world_(model_) {
    std::mt19937_64 random(7);
    for (const int64_t length : {131, 20, 0, 50}) {
      auto& text = texts_.emplace_back();
      for (int64_t i = 0; i < length; ++i) text.push_back(static_cast<int32_t>(3 + random() % 256));
    }
    draft_digest_ = world_.Publish(tuned_);
    models_ = {.base = world_.base,
               .full = world_.Load(world_.Publish(tuned_, PublishCodec::kDense)),
               .draft = world_.Load(draft_digest_)};
  }
  static CalibratorOptions Options(int64_t rows = 64, int threads = 1) {
    return {.max_tokens = 1000, .window = kWindow, .rows = rows, .threads = threads};
  }
  Result<Calibration> Run(const CalibratorOptions& options,
                          const ProgressFunction& progress = nullptr) const {
    return CalibrateClosedForm(models_, texts_, options, progress);
  }

  // Inputs of every linear layer of a block, by tensor name: [tokens][d_in].
  std::map<std::string, std::vector<std::vector<float>>> Inputs() const {
    std::map<std::string, std::vector<std::vector<float>>> inputs;
    ThreadPool threads(1);
    KvPool pool(world_.base->config(), int64_t{4} << 20);
    Transformer transformer(world_.base, threads);
    const LinearObserver observer = [&](int64_t layer, Projection projection, ConstFloatMatrix x) {
      for (int64_t t = 0; t < x.rows; ++t) {
        inputs[ProjectionName(layer, projection, "weight")].emplace_back(x.row(t),
                                                                         x.row(t) + x.cols);
      }
    };
    for (const auto window : TokenWindows(texts_, kWindow, 1000)) {
      KvSequence cache = pool.NewSequence();
      const auto count = static_cast<int64_t>(window.size());
      EXPECT_TRUE(cache.Reserve(count).ok());
      const BatchSegment segment{.kv = &cache,
                                 .tokens = window,
                                 .variant = models_.full.get(),
                                 .logits_from = count,
                                 .prompt_rows = count};
      EXPECT_TRUE(transformer.Forward({&segment, 1}, nullptr, &observer).ok());
    }
    return inputs;
  }

  std::vector<uint8_t> SignsOf(const std::string& name) const {
    const Manifest manifest = world_.ManifestOf(draft_digest_);
    const Part& part = manifest.Find(name)->parts.at("signs");
    std::vector<uint8_t> signs(static_cast<size_t>(part.bytes));
    EXPECT_TRUE(world_.store->ReadPart(part, 0, std::as_writable_bytes(std::span(signs))).ok());
    return signs;
  }

  const TestModel model_;
  const TestModel tuned_;
  World world_;
  Digest draft_digest_;
  CalibratedModels models_;
  std::vector<std::vector<int32_t>> texts_;
};

TEST_F(ClosedFormTest, IsTheDefinition) {
  const auto found = Run(Options());
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_EQ(found->tokens, 131 + 20 + 50);
  const auto inputs = Inputs();
  EXPECT_EQ(found->tensors.size(), 2u * kProjections);
  double moved = 0;
  for (const auto& [name, tensor] : found->tensors) {
    const std::vector<float> base = model_.Values(name);
    const std::vector<float> full = tuned_.Values(name);
    const std::vector<uint8_t> signs = SignsOf(name);
    const auto rows = tensor.alpha[0].size();
    const size_t cols = base.size() / rows;
    int64_t kept = 0;                    // rows without a positive scale
    std::vector<double> c(cols * cols);  // sum over tokens of x^T x
    for (const std::vector<float>& x : inputs.at(name)) {
      for (size_t i = 0; i < cols; ++i) {
        for (size_t j = 0; j < cols; ++j) c[i * cols + j] += double{x[i]} * double{x[j]};
      }
    }
    for (size_t row = 0; row < rows; ++row) {
      double upper = 0, lower = 0, mean = 0;
      for (size_t i = 0; i < cols; ++i) {
        const double delta = double{full[row * cols + i]} - double{base[row * cols + i]};
        const auto sign = [&](size_t col) {
          return double{SignAt(signs.data(), static_cast<int64_t>(cols), static_cast<int64_t>(row),
                               static_cast<int64_t>(col))};
        };
        mean += std::fabs(delta) / static_cast<double>(cols);
        for (size_t j = 0; j < cols; ++j) {
          upper += delta * c[i * cols + j] * sign(j);
          lower += sign(i) * c[i * cols + j] * sign(j);
        }
      }
      const double alpha = upper / lower;
      if (alpha <= 0) {
        EXPECT_NEAR(tensor.alpha[0][row], mean, 1e-5 * mean) << name << " " << row;
        ++kept;
        continue;
      }
      EXPECT_NEAR(tensor.alpha[0][row], alpha, 1e-5 * alpha) << name << " " << row;
      moved = std::max(moved, std::fabs(alpha / mean - 1));
    }
    EXPECT_EQ(tensor.rows_kept, kept) << name;
    EXPECT_LT(kept, static_cast<int64_t>(rows) / 2) << name;
    EXPECT_LT(tensor.error, tensor.error_before) << name;
    EXPECT_GT(tensor.error, 0) << name;
  }
  EXPECT_GT(moved, 0.02) << "mean |delta| would pass as well";
}

// With a second plane and a residual of low rank beside them: what is left of the layer's output
// has no share of any plane any more.
TEST_F(ClosedFormTest, OfPlanesBesideAResidualTheRestIsOrthogonalToEach) {
  const std::string name = ProjectionName(1, Projection::kDown, "weight");
  Manifest manifest = world_.ManifestOf(draft_digest_);
  auto& parts = const_cast<TensorEntry*>(manifest.Find(name))->parts;
  const std::vector<float> base = model_.Values(name);
  const std::vector<float> full = tuned_.Values(name);
  const int64_t rows = manifest.Find(name)->shape[0];
  const int64_t cols = manifest.Find(name)->shape[1];
  std::mt19937_64 random(9);
  // Of a rank of 1 and of powers of two: exact in BF16, and a large share of the delta.
  std::vector<uint16_t> a, b;
  for (int64_t c = 0; c < cols; ++c) a.push_back(BF16FromFloat(random() % 2 == 0 ? 0.125f : 0.5f));
  for (int64_t r = 0; r < rows; ++r) b.push_back(BF16FromFloat(random() % 2 == 0 ? 1 / 64.0f : 0));
  std::vector<uint8_t> signs = SignsOf(name);
  for (size_t i = 0; i < signs.size(); i += 3) signs[i] ^= 0x15;
  const int64_t padding = SignRowBytes(cols) * 8 - cols;
  for (int64_t r = 0; r < rows; ++r) {
    signs[static_cast<size_t>((r + 1) * SignRowBytes(cols) - 1)] &=
        static_cast<uint8_t>(0xFF >> padding);
  }
  const std::vector<float> alpha(static_cast<size_t>(rows), 1e-3f);
  const auto put = [&](const auto& values) {
    return world_.store->PutBytes(std::as_bytes(std::span(values))).value();
  };
  parts["residual_a"] = put(a);
  parts["residual_b"] = put(b);
  parts["signs/1"] = put(signs);
  parts["alpha/1"] = put(alpha);
  models_.draft = world_.Load(world_.Add(manifest));
  const auto found = Run(Options());
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  const CalibratedTensor& tensor = found->tensors.at(name);
  ASSERT_EQ(tensor.alpha.size(), 2u);
  const std::vector<std::vector<uint8_t>> planes = {SignsOf(name), signs};
  const auto inputs = Inputs();
  int64_t changed = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const auto r = static_cast<size_t>(row);
    if (tensor.alpha[1][r] == alpha[r]) continue;  // the draft's stayed
    ++changed;
    std::array<double, 2> share{}, size{};
    for (const std::vector<float>& x : inputs.at(name)) {
      double rest = 0;
      std::array<double, 2> of_plane{};
      for (int64_t col = 0; col < cols; ++col) {
        const auto c = static_cast<size_t>(col);
        const size_t i = r * static_cast<size_t>(cols) + c;
        const double residual = double{FloatFromBF16(b[r])} * FloatFromBF16(a[c]);
        rest += (double{full[i]} - double{base[i]} - residual) * x[c];
        for (size_t p = 0; p < 2; ++p) {
          of_plane[p] += SignAt(planes[p].data(), cols, row, col) * double{x[c]};
        }
      }
      const double missed =
          rest - tensor.alpha[0][r] * of_plane[0] - tensor.alpha[1][r] * of_plane[1];
      for (size_t p = 0; p < 2; ++p) {
        share[p] += missed * of_plane[p];
        size[p] += std::fabs(rest * of_plane[p]);
      }
    }
    for (size_t p = 0; p < 2; ++p) EXPECT_LT(std::fabs(share[p]), 1e-4 * size[p]) << row;
  }
  EXPECT_GT(changed, 0);
  EXPECT_EQ(changed, rows - tensor.rows_kept);
}

// Bit for bit: each token's products depend on the token, and the sums are in their order.
TEST_F(ClosedFormTest, DoesNotDependOnRowsAndThreads) {
  const auto wanted = Run(Options());
  ASSERT_TRUE(wanted.ok());
  for (const auto& [rows, threads] : {std::pair(1, 1), {7, 3}, {1000, 2}}) {
    const auto found = Run(Options(rows, threads));
    ASSERT_TRUE(found.ok());
    for (const auto& [name, tensor] : wanted->tensors) {
      EXPECT_EQ(found->tensors.at(name).alpha, tensor.alpha) << name << " " << rows;
      EXPECT_EQ(found->tensors.at(name).error, tensor.error) << name << " " << rows;
    }
  }
}

TEST_F(ClosedFormTest, StopsWhenItIsToldTo) {
  int asked = 0;
  const auto stopped = Run(Options(), [&](double share) {
    EXPECT_GE(share, 0);
    EXPECT_LE(share, 1);
    return ++asked == 5 ? Unavailable("stop") : OkStatus();
  });
  EXPECT_EQ(stopped.status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(asked, 5) << "nothing is computed after that";
}

TEST_F(ClosedFormTest, NeedsTokensThatTheModelHas) {
  texts_ = {{}, {}};
  EXPECT_EQ(Run(Options()).status().code(), StatusCode::kInvalidArgument);
  texts_ = {{5, 100'000}};
  EXPECT_EQ(Run(Options()).status().code(), StatusCode::kInvalidArgument);
  texts_ = {{5}};
  EXPECT_TRUE(Run(Options()).ok());
}

TEST_F(ClosedFormTest, AVariantWithoutSignsHasNothingToCalibrate) {
  models_.draft = models_.full;
  const auto found = Run(Options());
  ASSERT_TRUE(found.ok());
  EXPECT_TRUE(found->tensors.empty());
}

TEST(TokenWindowsTest, TakesFromEachTextInTurn) {
  const std::vector<std::vector<int32_t>> texts = {{1, 2, 3, 4, 5}, {}, {6, 7, 8}};
  const auto all = [&](int64_t window, int64_t max) {
    std::vector<std::vector<int32_t>> windows;
    for (const auto& tokens : TokenWindows(texts, window, max)) {
      windows.emplace_back(tokens.begin(), tokens.end());
    }
    return windows;
  };
  using Windows = std::vector<std::vector<int32_t>>;
  EXPECT_EQ(all(2, 100), (Windows{{1, 2}, {6, 7}, {3, 4}, {8}, {5}}));
  EXPECT_EQ(all(2, 5), (Windows{{1, 2}, {6, 7}, {3}}));
  EXPECT_EQ(all(10, 8), (Windows{{1, 2, 3, 4, 5}, {6, 7, 8}}));
  EXPECT_EQ(all(10, 0), Windows{});
}

}  // namespace
}  // namespace stockpot
