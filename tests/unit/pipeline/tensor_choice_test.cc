// The choice among measured forms: hulls, byte budgets, fidelity, against exhaustive search.
#include "store/tensor_choice.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using Hulls = std::vector<std::vector<Candidate>>;

Candidate Form(int64_t bytes, double left) {
  return {.codec = Codec::kBitDelta, .planes = 1, .bytes = bytes, .left = left};
}

struct Sums {
  int64_t bytes = 0;
  double left = 0;
};

Sums SumsOf(const Hulls& hulls, const std::vector<size_t>& chosen) {
  Sums sums;
  for (size_t i = 0; i < hulls.size(); ++i) {
    sums.bytes += hulls[i][chosen[i]].bytes;
    sums.left += hulls[i][chosen[i]].left;
  }
  return sums;
}

// Random tensors, each with a form that loses nothing.
Hulls RandomHulls(std::mt19937_64& random, size_t tensors) {
  Hulls hulls;
  for (size_t i = 0; i < tensors; ++i) {
    std::vector<Candidate> forms = {Form(2000 + static_cast<int64_t>(random() % 2000), 0)};
    for (size_t n = random() % 6; n > 0; --n) {
      forms.push_back(
          Form(1 + static_cast<int64_t>(random() % 2000), static_cast<double>(random() % 1000)));
    }
    hulls.push_back(LowerHull(forms));
  }
  return hulls;
}

// Calls `visit` with every choice.
void EachChoice(const Hulls& hulls, const std::function<void(const Sums&)>& visit) {
  std::vector<size_t> chosen(hulls.size(), 0);
  for (;;) {
    visit(SumsOf(hulls, chosen));
    size_t i = 0;
    while (i < chosen.size() && ++chosen[i] == hulls[i].size()) chosen[i++] = 0;
    if (i == chosen.size()) return;
  }
}

TEST(LowerHull, KeepsWhatNoMixtureBeats) {
  EXPECT_EQ(LowerHull({Form(4, 0), Form(1, 10), Form(2, 4), Form(3, 3), Form(2, 5), Form(9, 0)}),
            (std::vector<Candidate>{Form(1, 10), Form(2, 4), Form(4, 0)}));
  EXPECT_EQ(LowerHull({Form(1, 10), Form(2, 9), Form(3, 0)}),
            (std::vector<Candidate>{Form(1, 10), Form(3, 0)}));
  EXPECT_EQ(LowerHull({Form(5, 0), Form(1, 0)}), (std::vector<Candidate>{Form(1, 0)}));
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 500; ++round) {
    const std::vector<Candidate> hull = RandomHulls(random, 1)[0];
    for (size_t i = 1; i < hull.size(); ++i) {
      ASSERT_GT(hull[i].bytes, hull[i - 1].bytes);
      ASSERT_LT(hull[i].left, hull[i - 1].left);
    }
    for (size_t i = 2; i < hull.size(); ++i) {
      const auto worth = [&](size_t j) {
        return (hull[j - 1].left - hull[j].left) /
               static_cast<double>(hull[j].bytes - hull[j - 1].bytes);
      };
      ASSERT_LT(worth(i), worth(i - 1));
    }
    ASSERT_EQ(hull.back().left, 0);
  }
}

TEST(ChooseCandidates, ABudgetIsKeptToTheByteAndIsNearlyUsed) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 300; ++round) {
    const Hulls hulls = RandomHulls(random, 1 + random() % 6);
    int64_t least = 0, widest = 0;
    double longest = 0;  // what one step of a hull removes
    for (const auto& hull : hulls) {
      least += hull[0].bytes;
      for (size_t i = 1; i < hull.size(); ++i) {
        widest = std::max(widest, hull[i].bytes - hull[i - 1].bytes);
        longest = std::max(longest, hull[i - 1].left - hull[i].left);
      }
    }
    const int64_t fixed = static_cast<int64_t>(random() % 100);
    const int64_t budget = fixed + least + static_cast<int64_t>(random() % 8000) - 500;
    const auto chosen =
        ChooseCandidates(hulls, {.bytes = budget, .fixed_bytes = fixed, .left = {}});
    if (budget < fixed + least) {
      ASSERT_EQ(chosen.status().code(), StatusCode::kInvalidArgument);
      ASSERT_NE(chosen.status().message().find(std::to_string(fixed + least)), std::string::npos);
      continue;
    }
    ASSERT_OK(chosen);
    const Sums sums = SumsOf(hulls, *chosen);
    ASSERT_LE(fixed + sums.bytes, budget);
    double best = 1e300;
    EachChoice(hulls, [&](const Sums& other) {
      if (fixed + other.bytes <= budget) best = std::min(best, other.left);
    });
    ASSERT_LE(sums.left, best + longest);  // the Lagrangian's gap: one step of a hull
  }
}

TEST(ChooseCandidates, AFidelityIsMetWithNearlyTheFewestBytes) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 300; ++round) {
    const Hulls hulls = RandomHulls(random, 1 + random() % 6);
    int64_t widest = 0;
    double most = 0;
    for (const auto& hull : hulls) {
      most += hull[0].left;
      for (size_t i = 1; i < hull.size(); ++i) {
        widest = std::max(widest, hull[i].bytes - hull[i - 1].bytes);
      }
    }
    const double target = most * static_cast<double>(random() % 101) / 100;
    const auto chosen = ChooseCandidates(hulls, {.bytes = {}, .left = target});
    ASSERT_OK(chosen);
    const Sums sums = SumsOf(hulls, *chosen);
    ASSERT_LE(sums.left, target);
    int64_t fewest = std::numeric_limits<int64_t>::max();
    EachChoice(hulls, [&](const Sums& other) {
      if (other.left <= target) fewest = std::min(fewest, other.bytes);
    });
    ASSERT_LE(sums.bytes, fewest + widest);
    // Both limits: the error first, and what it takes is what the refusal names.
    const auto both = ChooseCandidates(hulls, {.bytes = sums.bytes - 1, .left = target});
    ASSERT_EQ(both.status().code(), StatusCode::kInvalidArgument);
    ASSERT_OK(ChooseCandidates(hulls, {.bytes = sums.bytes, .left = target}));
  }
}

TEST(ChooseCandidates, NothingToChoose) {
  EXPECT_TRUE(ChooseCandidates({}, {.bytes = 0, .left = {}})->empty());
  EXPECT_TRUE(ChooseCandidates({}, {.bytes = {}, .left = 0})->empty());
  EXPECT_EQ(ChooseCandidates({}, {.bytes = 9, .fixed_bytes = 10, .left = {}}).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stockpot
