// The decoder's other operations: against their formulas in double precision, on every SIMD target,
// and their promise that a row does not depend on the rows beside it.
#include "kernels/transformer/ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "tests/unit/kernels/backends.h"
#include "tests/unit/kernels/matrices.h"

namespace stockpot {
namespace {

constexpr double kEpsilon = 1.1920929e-7;  // of float32

class OpsTargets : public testing::TestWithParam<SimdTarget> {
 protected:
  void SetUp() override { target_.emplace(GetParam()); }

 private:
  std::optional<ScopedSimdTarget> target_;
};

TEST_P(OpsTargets, RmsNormFollowsItsFormula) {
  Random random(1);
  for (const int64_t cols : {1, 3, 15, 16, 17, 64, 577}) {
    OwnedFloats x = OwnedFloats::Gaussian(3, cols, random, 2);
    const OwnedFloats weights = OwnedFloats::Gaussian(2, cols, random);
    const float* weight_of_row[] = {weights.view().row(0), weights.view().row(1),
                                    weights.view().row(0)};
    OwnedFloats y(3, cols, 1);
    RmsNorm(x.cview(), weight_of_row, 1e-5f, y.view());
    for (int64_t t = 0; t < 3; ++t) {
      double square = 0;
      for (int64_t c = 0; c < cols; ++c) square += std::pow(x.cview().row(t)[c], 2);
      const double scale = 1 / std::sqrt(square / static_cast<double>(cols) + 1e-5);
      for (int64_t c = 0; c < cols; ++c) {
        const double want = x.cview().row(t)[c] * scale * weight_of_row[t][c];
        EXPECT_NEAR(y.view().row(t)[c], want, 8 * kEpsilon * std::abs(want) + 1e-30)
            << cols << " columns, row " << t << ", column " << c;
      }
    }
  }
}

TEST_P(OpsTargets, SiluMulFollowsItsFormula) {
  Random random(2);
  for (const int64_t cols : {1, 7, 16, 33, 100}) {
    OwnedFloats gate = OwnedFloats::Gaussian(2, cols, random, 1);
    OwnedFloats up = OwnedFloats::Gaussian(2, cols, random);
    gate.view().row(0)[0] = -200.0f;  // exp overflows float32: the result is -0, not NaN
    gate.view().row(1)[0] = 200.0f;
    std::vector<double> want;
    for (int64_t t = 0; t < 2; ++t) {
      for (int64_t c = 0; c < cols; ++c) {
        const double g = gate.view().row(t)[c];
        want.push_back(g / (1 + std::exp(-g)) * up.view().row(t)[c]);
      }
    }
    SiluMul(gate.cview(), up.cview(), gate.view());  // in place
    for (int64_t t = 0; t < 2; ++t) {
      for (int64_t c = 0; c < cols; ++c) {
        const double w = want[t * cols + c];
        EXPECT_NEAR(gate.view().row(t)[c], w, 1e-6 * std::abs(w) + 1e-30) << t << ' ' << c;
      }
    }
  }
}

// Keys and values of one sequence in pages of its own.
class Cache {
 public:
  Cache(int64_t tokens, int64_t width, int64_t page_tokens, Random& random)
      : page_tokens_(page_tokens) {
    for (int64_t first = 0; first < tokens; first += page_tokens) {
      for (auto* pages : {&keys_, &values_}) {
        pages->emplace_back(static_cast<size_t>(page_tokens * width));
        for (float& v : pages->back()) v = Gaussian(random);
      }
    }
    for (auto& page : keys_) key_pages_.push_back(page.data());
    for (auto& page : values_) value_pages_.push_back(page.data());
  }

  PagedKv view() const { return {key_pages_, value_pages_, page_tokens_}; }

 private:
  int64_t page_tokens_;
  std::vector<std::vector<float>> keys_, values_;
  std::vector<float*> key_pages_, value_pages_;
};

struct AttentionShape {
  int64_t rows, start, heads, kv_heads, head_dim, page_tokens;
};

constexpr AttentionShape kShapes[] = {
    {1, 0, 1, 1, 1, 1},     {1, 0, 9, 3, 64, 16},   {3, 5, 4, 2, 7, 4},
    {1, 31, 2, 1, 16, 32},  {2, 31, 2, 1, 20, 32},  {33, 0, 3, 3, 64, 16},
    {17, 63, 2, 2, 80, 24}, {1, 300, 9, 3, 64, 64}, {5, 130, 4, 1, 256, 10},
};

TEST_P(OpsTargets, AttentionMatchesDoublePrecision) {
  Random random(3);
  ThreadPool threads(2);
  for (const AttentionShape& s : kShapes) {
    const Cache cache(s.start + s.rows, s.kv_heads * s.head_dim, s.page_tokens, random);
    const OwnedFloats q = OwnedFloats::Gaussian(s.rows, s.heads * s.head_dim, random, 3);
    OwnedFloats got(s.rows, s.heads * s.head_dim, 1);
    OwnedFloats want(s.rows, s.heads * s.head_dim);
    AttentionArgs args{.q = q.view(),
                       .kv = cache.view(),
                       .start = s.start,
                       .heads = s.heads,
                       .kv_heads = s.kv_heads,
                       .head_dim = s.head_dim,
                       .scale = 1 / std::sqrt(static_cast<float>(s.head_dim)),
                       .out = got.view()};
    Attention({&args, 1}, threads);
    args.out = want.view();
    AttentionReference(args);
    for (int64_t t = 0; t < s.rows; ++t) {
      for (int64_t c = 0; c < s.heads * s.head_dim; ++c) {
        // Weights sum to 1 and values are near 5 at most; scores err by a few epsilon of |q| |k|.
        EXPECT_NEAR(got.view().row(t)[c], want.view().row(t)[c], 5e-6)
            << s.rows << " rows at " << s.start << ", head size " << s.head_dim;
      }
    }
  }
}

TEST_P(OpsTargets, AttentionRowsDoNotDependOnTheirBatch) {
  Random random(4);
  ThreadPool one(1);
  ThreadPool three(3);
  const int64_t heads = 4, kv_heads = 2, head_dim = 24, tokens = 70;
  // The same tokens, in pages of two sizes.
  const Cache cache(tokens, kv_heads * head_dim, tokens, random);
  Random same(4);
  const Cache other(tokens, kv_heads * head_dim, tokens, same);
  const OwnedFloats q = OwnedFloats::Gaussian(tokens, heads * head_dim, random);
  OwnedFloats all(tokens, heads * head_dim);
  AttentionArgs whole{.q = q.view(),
                      .kv = cache.view(),
                      .start = 0,
                      .heads = heads,
                      .kv_heads = kv_heads,
                      .head_dim = head_dim,
                      .scale = 0.2f,
                      .out = all.view()};
  Attention({&whole, 1}, three);
  for (int64_t t = 0; t < tokens; ++t) {
    OwnedFloats out(2, heads * head_dim);
    AttentionArgs single = whole;
    single.kv = other.view();
    single.start = t;
    single.q = {q.view().row(t), 1, heads * head_dim, heads * head_dim};
    single.out = {out.view().row(0), 1, heads * head_dim, heads * head_dim};
    AttentionArgs neighbour = single;  // another sequence in the same call
    neighbour.start = 0;
    neighbour.out.data = out.view().row(1);
    const AttentionArgs both[] = {neighbour, single};
    Attention(both, t % 2 == 0 ? one : three);
    EXPECT_EQ(0, std::memcmp(out.view().row(0), all.view().row(t),
                             static_cast<size_t>(heads * head_dim) * sizeof(float)))
        << "row " << t;
  }
}

TEST_P(OpsTargets, LogSoftmaxAndItsBest) {
  Random random(5);
  for (const int64_t vocab : {1, 5, 16, 1000, 49152}) {
    std::vector<float> logits(static_cast<size_t>(vocab));
    for (float& v : logits) v = 3 * Gaussian(random) + 500;  // exp would overflow without the shift
    if (vocab > 20) logits[17] = logits[3] = *std::max_element(logits.begin(), logits.end()) + 1;
    double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float v : logits) sum += std::exp(v - max);
    const auto want = [&](int64_t i) { return logits[i] - max - std::log(sum); };
    const int32_t token = static_cast<int32_t>(vocab / 2);
    std::vector<TokenLogprob> top(static_cast<size_t>(std::min<int64_t>(vocab, 7)));
    EXPECT_NEAR(LogSoftmaxAt(logits, token, top), want(token), 1e-5);
    std::vector<int32_t> order(static_cast<size_t>(vocab));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    for (size_t i = 0; i < top.size(); ++i) {
      EXPECT_EQ(top[i].token, order[i]) << vocab << " tokens, place " << i;
      EXPECT_NEAR(top[i].logprob, want(order[i]), 1e-5);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, OpsTargets, testing::ValuesIn(SimdTargets()),
                         [](const auto& target) { return target.param.name; });

TEST(Ops, LogSoftmaxKeepsPlacesThatNobodyTook) {
  const std::vector<float> logits = {1, 2};
  std::vector<TokenLogprob> top(3);
  LogSoftmaxAt(logits, 0, top);
  EXPECT_EQ(top[0].token, 1);
  EXPECT_EQ(top[1].token, 0);
  EXPECT_EQ(top[2].token, -1);
}

TEST(Ops, RopeTurnsPairsOfTheHalfSplit) {
  Random random(6);
  const int64_t heads = 3, head_dim = 8;
  OwnedFloats x = OwnedFloats::Gaussian(4, heads * head_dim, random, 5);
  OwnedFloats before = x;
  const std::vector<int64_t> positions = {0, 1, 77, 8191};
  std::vector<float> inv_freq;
  for (int i = 0; i < 4; ++i) inv_freq.push_back(std::pow(10000.0f, -2.0f * i / head_dim));
  Rope(x.view(), heads, head_dim, positions, inv_freq);
  for (int64_t t = 0; t < 4; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < head_dim / 2; ++i) {
        // The angle is float32, as in the models' own code: at 8191 it errs by 2^-11 already.
        const double angle = static_cast<float>(positions[t]) * inv_freq[i];
        const double low = before.view().row(t)[h * head_dim + i];
        const double high = before.view().row(t)[h * head_dim + i + head_dim / 2];
        EXPECT_NEAR(x.view().row(t)[h * head_dim + i],
                    low * std::cos(angle) - high * std::sin(angle), 1e-6);
        EXPECT_NEAR(x.view().row(t)[h * head_dim + i + head_dim / 2],
                    high * std::cos(angle) + low * std::sin(angle), 1e-6);
      }
    }
  }
}

}  // namespace
}  // namespace stockpot
