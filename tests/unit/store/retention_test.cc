// Retention as a pure function: against a slow reference on random histories, and case by case.
#include "store/retention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <random>
#include <set>

namespace stockpot {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr int kHistories = 3000;

// --- the reference: every rule as its sentence in retention.h, by counting ---

class Reference {
 public:
  explicit Reference(const RetentionInputs& inputs) : in_(inputs) {}

  std::vector<std::set<KeepReason>> Decide() {
    std::vector<std::set<KeepReason>> keeps(in_.artifacts.size());
    for (size_t i = 0; i < keeps.size(); ++i) keeps[i] = Direct(in_.artifacts[i]);
    for (size_t round = 0; round <= keeps.size(); ++round) {  // long enough for every chain
      for (size_t i = 0; i < keeps.size(); ++i) {
        const RetentionArtifact& a = in_.artifacts[i];
        if (!a.has_step && !ByPerson(a) && AnyOf(keeps, a.sources)) {
          keeps[i].insert(KeepReason::kSource);
        }
      }
    }
    for (size_t round = 0; round <= keeps.size(); ++round) {
      for (size_t i = 0; i < keeps.size(); ++i) {
        if (keeps[i].empty() && !in_.artifacts[i].tombstone) continue;
        for (size_t j = 0; j < keeps.size(); ++j) {
          for (const Digest& needed : in_.artifacts[i].needs) {
            if (needed == in_.artifacts[j].digest) keeps[j].insert(KeepReason::kNeeded);
          }
        }
      }
    }
    return keeps;
  }

 private:
  static bool ByPerson(const RetentionArtifact& a) {
    return a.tombstone && a.tombstone->by != kRetentionAuthor;
  }
  bool AnyOf(const std::vector<std::set<KeepReason>>& keeps, const std::vector<Digest>& of) const {
    for (size_t i = 0; i < keeps.size(); ++i) {
      for (const Digest& d : of) {
        if (in_.artifacts[i].digest == d && !keeps[i].empty()) return true;
      }
    }
    return false;
  }
  // How many others of the run stand before `a` in the order `before`.
  int64_t Rank(const RetentionArtifact& a,
               const std::function<bool(const RetentionArtifact&)>& before) const {
    int64_t rank = 0;
    for (const RetentionArtifact& b : in_.artifacts) {
      rank += b.has_step && b.run == a.run && !ByPerson(b) && before(b);
    }
    return rank;
  }
  static std::optional<double> Metric(const RetentionArtifact& a, const std::string& name) {
    if (a.metrics.contains(name)) return a.metrics.at(name);
    std::optional<double> value;
    int64_t newest = -1;  // the histories give every evaluation of an artifact a time of its own
    for (const Eval& e : a.evals) {
      const bool named =
          name.find('/') == std::string::npos ? e.metric == name : e.task + "/" + e.metric == name;
      if (named && e.time_ms > newest) {
        newest = e.time_ms;
        value = e.value;
      }
    }
    return value;
  }
  // Whether b comes before a by the metric; null metric: never.
  static bool Beats(const RetentionArtifact& b, const RetentionArtifact& a,
                    std::optional<double> vb, double va, bool lower) {
    if (!vb) return false;
    if (*vb != va) return lower ? *vb < va : *vb > va;
    return b.step != a.step ? b.step < a.step : b.kind < a.kind;
  }
  const Run* FindRun(const std::string& name) const {
    for (const Run& run : in_.runs) {
      if (run.name == name) return &run;
    }
    return nullptr;
  }

  std::set<KeepReason> Direct(const RetentionArtifact& a) const {
    std::set<KeepReason> keeps;
    if (a.kind == ArtifactKind::kBase) keeps.insert(KeepReason::kBase);
    for (const Hold& hold : in_.holds) {
      if (hold.artifact == a.digest) keeps.insert(hold.reason);
    }
    if (ByPerson(a) || a.kind == ArtifactKind::kBase) return keeps;
    const Run* run = a.has_step ? FindRun(a.run) : nullptr;
    if (run == nullptr) {
      if (a.sources.empty()) keeps.insert(KeepReason::kNoRule);
      return keeps;
    }
    AddFirm(a, *run, keeps);
    AddRules(a, keeps);
    return keeps;
  }

  void AddFirm(const RetentionArtifact& a, const Run& run, std::set<KeepReason>& keeps) const {
    if (a.kind != ArtifactKind::kCheckpoint) return;
    const std::string& metric = run.config.best_metric;
    if (a.metrics.contains(metric)) {
      const int64_t better = Rank(a, [&](const RetentionArtifact& b) {
        if (b.kind != ArtifactKind::kCheckpoint || !b.metrics.contains(metric)) return false;
        return Beats(b, a, b.metrics.at(metric), a.metrics.at(metric), run.config.best_is_lower);
      });
      if (better == 0) keeps.insert(KeepReason::kBest);
    }
    const auto newer = [&](bool good) {
      return Rank(a, [&](const RetentionArtifact& b) {
        return b.kind == a.kind && b.step > a.step && (!good || !b.refused);
      });
    };
    if (newer(false) == 0 || (!a.refused && newer(true) == 0)) keeps.insert(KeepReason::kLastGood);
  }

  void AddRules(const RetentionArtifact& a, std::set<KeepReason>& keeps) const {
    const auto it = in_.policies.find(a.run);
    if (it == in_.policies.end() || it->second.KeepsEverything()) {
      keeps.insert(KeepReason::kNoRule);
      return;
    }
    const RetentionPolicy& policy = it->second;
    if (Rank(a, [&](const auto& b) { return b.kind == a.kind && b.step > a.step; }) <
        policy.keep_last) {
      keeps.insert(KeepReason::kRuleLast);
    }
    if (policy.every > 0 && a.step % policy.every == 0) keeps.insert(KeepReason::kRuleEvery);
    for (const RetentionPolicy::Best& rule : policy.best) {
      const std::optional<double> value = Metric(a, rule.metric);
      if (!value) continue;
      const int64_t better = Rank(a, [&](const RetentionArtifact& b) {
        return Beats(b, a, Metric(b, rule.metric), *value, rule.lower);
      });
      if (better < rule.keep) keeps.insert(KeepReason::kRuleBest);
    }
  }

  const RetentionInputs& in_;
};

// --- random histories ---

class History {
 public:
  explicit History(uint64_t seed) : random_(seed) {}

  RetentionInputs Make() {
    for (int i = 0; i < 2; ++i) {
      const Digest base = Add(ArtifactKind::kBase, "").digest;
      MakeRun("run" + std::to_string(i), base);
    }
    const size_t extras = Below(6);
    for (size_t i = 0; i < extras; ++i) AddFollower();
    constexpr std::array kHolds = {KeepReason::kPinned, KeepReason::kAlias,  KeepReason::kRoute,
                                   KeepReason::kJob,    KeepReason::kResume, KeepReason::kLeased};
    for (size_t i = Below(5); i > 0; --i) {
      in_.holds.push_back({kHolds[Below(kHolds.size())], "name" + std::to_string(i),
                           Below(8) == 0 ? Sha256("gone") : Any()});
    }
    for (RetentionArtifact& a : in_.artifacts) {
      if (a.kind == ArtifactKind::kBase || Below(4) != 0) continue;
      a.tombstone = Tombstone{.artifact = a.digest,
                              .by = Below(2) == 0 ? std::string(kRetentionAuthor) : "ann"};
    }
    return std::move(in_);
  }

 private:
  size_t Below(size_t n) { return random_() % n; }
  Digest Any() { return in_.artifacts[Below(in_.artifacts.size())].digest; }

  // The reference holds until the next one is added.
  RetentionArtifact& Add(ArtifactKind kind, const std::string& run) {
    RetentionArtifact a;
    a.digest = Sha256("artifact" + std::to_string(in_.artifacts.size()));
    a.kind = kind;
    a.run = run;
    in_.artifacts.push_back(std::move(a));
    return in_.artifacts.back();
  }

  void MakeRun(const std::string& name, const Digest& base) {
    Run run{.name = name, .base = base};
    run.config.best_is_lower = Below(2) == 0;
    if (Below(10) != 0) in_.runs.push_back(run);  // now and then steps of an unknown run
    if (Below(3) != 0) {
      RetentionPolicy& policy = in_.policies[name];
      policy.keep_last = static_cast<int64_t>(Below(4));
      policy.every = static_cast<int64_t>(Below(3) == 0 ? 0 : Below(5));
      for (const char* metric : {"loss", "acc", "task/acc"}) {
        if (Below(3) == 0) {
          policy.best.push_back({metric, Below(2) == 0, static_cast<int64_t>(1 + Below(3))});
        }
      }
    }
    for (int64_t step = 0, end = static_cast<int64_t>(Below(14)); step < end; ++step) {
      if (Below(5) == 0) continue;
      AddStep(Add(ArtifactKind::kCheckpoint, name), step, base);
      if (Below(4) == 0) AddStep(Add(ArtifactKind::kMerge, name), step, base);
    }
  }

  void AddStep(RetentionArtifact& a, int64_t step, const Digest& base) {
    a.has_step = true;
    a.step = step;
    a.needs = {base};
    a.refused = Below(5) == 0;
    if (Below(3) != 0) a.metrics["loss"] = static_cast<double>(Below(5));
    for (int64_t time = 1, end = static_cast<int64_t>(Below(4)); time <= end; ++time) {
      a.evals.push_back({a.digest, Below(2) == 0 ? "task" : "other", Below(2) == 0 ? "acc" : "loss",
                         static_cast<double>(Below(4)), time, "me"});
    }
  }

  // A variant or a merge without a step; some are stored as a difference to another artifact.
  void AddFollower() {
    const Digest source = Any();
    const Digest needed = Any();
    RetentionArtifact& a = Add(Below(2) == 0 ? ArtifactKind::kVariant : ArtifactKind::kMerge, "");
    if (Below(6) != 0) a.sources.push_back(source);
    if (Below(3) == 0) a.sources.push_back(needed);
    if (Below(2) == 0) a.needs.push_back(needed);
  }

  std::mt19937_64 random_;
  RetentionInputs in_;
};

TEST(RetentionTest, RandomHistoriesAgreeWithTheReference) {
  const char* given = std::getenv("STOCKPOT_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  size_t gone = 0;
  std::set<KeepReason> seen;
  for (uint64_t i = 0; i < kHistories; ++i) {
    const RetentionInputs inputs = History(seed + i).Make();
    const std::vector<Fate> fates = DecideRetention(inputs);
    const auto expected = Reference(inputs).Decide();
    ASSERT_EQ(fates.size(), inputs.artifacts.size());
    for (size_t a = 0; a < fates.size(); ++a) {
      ASSERT_EQ(fates[a].artifact, inputs.artifacts[a].digest);
      std::set<KeepReason> reasons;
      for (const Keep& keep : fates[a].keeps) reasons.insert(keep.reason);
      ASSERT_EQ(reasons, expected[a]) << "history of seed " << seed + i << ", artifact " << a;
      seen.insert(reasons.begin(), reasons.end());
      gone += reasons.empty();
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(KeepReason::kSource) + 1) << "a reason never occurs";
  EXPECT_GT(gone, static_cast<size_t>(kHistories)) << "the histories keep nearly everything";
}

// --- case by case ---

struct Case {
  Case() {
    in.runs.push_back({.name = "r"});
    in.policies["r"] = {};
  }
  RetentionArtifact& Step(int64_t step, std::map<std::string, double> metrics = {},
                          ArtifactKind kind = ArtifactKind::kCheckpoint) {
    RetentionArtifact a{
        .digest = Sha256(std::to_string(step) + std::string(ArtifactKindName(kind))),
        .kind = kind,
        .run = "r",
        .step = step,
        .has_step = true,
        .metrics = std::move(metrics)};
    in.artifacts.push_back(std::move(a));
    return in.artifacts.back();
  }
  std::vector<int64_t> Stay() const {
    std::vector<int64_t> steps;
    for (const Fate& fate : DecideRetention(in)) {
      if (!fate.stays()) continue;
      for (const auto& a : in.artifacts) {
        if (a.digest == fate.artifact) steps.push_back(a.step);
      }
    }
    return steps;
  }
  std::vector<std::string> Reasons(size_t artifact) const {
    std::vector<std::string> texts;
    const std::vector<Fate> fates = DecideRetention(in);
    for (const Keep& keep : fates[artifact].keeps) texts.push_back(KeepText(keep));
    return texts;
  }
  RetentionInputs in;
};

TEST(RetentionTest, WithoutRulesEverythingStays) {
  Case c;
  for (int step = 0; step < 5; ++step) c.Step(step);
  EXPECT_THAT(c.Stay(), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(c.Reasons(1), ElementsAre("no rule"));
  c.in.policies.clear();
  EXPECT_THAT(c.Stay(), ElementsAre(0, 1, 2, 3, 4));
}

TEST(RetentionTest, ReasonsSayWhy) {
  Case c;
  c.in.policies["r"] = {.keep_last = 2, .best = {{"acc", false, 1}}, .every = 3};
  for (int step = 1; step <= 6; ++step) c.Step(step, {{"loss", step}, {"acc", step == 4}});
  c.in.holds.push_back({KeepReason::kAlias, "prod", c.in.artifacts[1].digest});
  EXPECT_THAT(c.Stay(), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(c.Reasons(0), ElementsAre("best of its run by loss"));
  EXPECT_THAT(c.Reasons(1), ElementsAre("alias prod"));
  EXPECT_THAT(c.Reasons(2), ElementsAre("every 3"));
  EXPECT_THAT(c.Reasons(3), ElementsAre("best 1 by acc"));
  EXPECT_THAT(c.Reasons(4), ElementsAre("last 2"));
  EXPECT_THAT(c.Reasons(5), UnorderedElementsAre("last good checkpoint of r", "last 2", "every 3"));
  c.in.holds.clear();
  EXPECT_THAT(c.Stay(), ElementsAre(1, 3, 4, 5, 6));
  EXPECT_THAT(c.Reasons(1), IsEmpty());
}

// C2: the one that training can go on from.
TEST(RetentionTest, TheLastGoodOneStaysThoughNewerOnesAreBroken) {
  Case c;
  c.in.policies["r"] = {.keep_last = 1};
  for (int step = 1; step <= 4; ++step) c.Step(step).refused = step >= 3;
  EXPECT_THAT(c.Stay(), ElementsAre(2, 4));
  EXPECT_THAT(c.Reasons(1), ElementsAre("last good checkpoint of r"));
}

// C7: whatever the order in which evaluations arrive, and whatever was deleted between.
TEST(RetentionTest, BestDoesNotDependOnTheOrderOfEvaluations) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    Case c;
    c.in.policies["r"] = {.keep_last = 1, .best = {{"task/acc", false, 2}}};
    for (int step = 0; step < 8; ++step) c.Step(step);
    std::vector<size_t> order(8);
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) {
      RetentionArtifact& a = c.in.artifacts[i];
      a.evals.push_back({a.digest, "task", "acc", static_cast<double>(i * 3 % 8), 1, "e"});
      // What the job would do after each evaluation.
      const std::vector<Fate> fates = DecideRetention(c.in);
      for (size_t n = 0; n < fates.size(); ++n) {
        RetentionArtifact& b = c.in.artifacts[n];
        b.tombstone.reset();
        if (!fates[n].stays()) b.tombstone = Tombstone{.by = std::string(kRetentionAuthor)};
      }
    }
    EXPECT_THAT(c.Stay(), ElementsAre(2, 5, 7)) << "values 6 and 7, and the newest";
  }
}

TEST(RetentionTest, WhatAPersonDeletedTakesNoPlace) {
  Case c;
  c.in.policies["r"] = {.keep_last = 2};
  for (int step = 1; step <= 4; ++step) c.Step(step);
  EXPECT_THAT(c.Stay(), ElementsAre(3, 4));
  c.in.artifacts[2].tombstone = Tombstone{.by = "ann"};
  EXPECT_THAT(c.Stay(), ElementsAre(2, 4));
}

TEST(RetentionTest, VariantsFollowTheirSourceUnlessARouteHoldsThem) {
  Case c;
  c.in.policies["r"] = {.keep_last = 1};
  c.Step(1);
  c.Step(2);
  for (const char* name : {"variant of 1", "another of 1", "variant of 2"}) {
    RetentionArtifact v{.digest = Sha256(name), .kind = ArtifactKind::kVariant, .run = "r"};
    v.sources = {c.in.artifacts[std::string(name).ends_with('2') ? 1 : 0].digest};
    c.in.artifacts.push_back(std::move(v));
  }
  c.in.holds.push_back({KeepReason::kRoute, "r@1", c.in.artifacts[2].digest});
  EXPECT_THAT(c.Reasons(0), IsEmpty()) << "a served variant does not need its source";
  EXPECT_THAT(c.Reasons(2), ElementsAre("route r@1"));
  EXPECT_THAT(c.Reasons(3), IsEmpty());
  EXPECT_THAT(c.Reasons(4),
              ElementsAre("its source " + c.in.artifacts[1].digest.ShortHex() + " stays"));
}

TEST(RetentionTest, ADeltaKeepsWhatItIsADifferenceTo) {
  Case c;
  c.in.policies["r"] = {.keep_last = 1};
  for (int step = 1; step <= 4; ++step) c.Step(step);
  c.in.artifacts[3].needs = {c.in.artifacts[1].digest};
  c.in.artifacts[1].needs = {c.in.artifacts[0].digest};
  EXPECT_THAT(c.Stay(), ElementsAre(1, 2, 4)) << "a chain";
  c.in.artifacts[2].needs = {c.in.artifacts[0].digest};
  c.in.artifacts[2].tombstone = Tombstone{.by = "ann"};
  c.in.artifacts[3].needs.clear();
  EXPECT_THAT(c.Stay(), ElementsAre(1, 4)) << "3 is deleted, but can be undeleted";
}

TEST(CheckRetentionTest, NamesTheField) {
  EXPECT_TRUE(CheckRetention({}).ok());
  EXPECT_TRUE(CheckRetention({.keep_last = 5, .best = {{"a", true, 1}, {"a", false, 2}}}).ok());
  const auto message = [](RetentionPolicy policy) { return CheckRetention(policy).message(); };
  EXPECT_THAT(message({.keep_last = -1}), ::testing::StartsWith("keep_last"));
  EXPECT_THAT(message({.every = 2'000'000}), ::testing::StartsWith("every"));
  EXPECT_THAT(message({.best = {{"", true, 1}}}), ::testing::HasSubstr("metric"));
  EXPECT_THAT(message({.best = {{"a\n", true, 1}}}), ::testing::HasSubstr("metric"));
  EXPECT_THAT(message({.best = {{"a", true, 0}}}), ::testing::HasSubstr("best by a"));
  EXPECT_THAT(message({.best = {{"a", true, 1}, {"a", true, 2}}}), ::testing::HasSubstr("twice"));
  EXPECT_THAT(message({.grace_ms = -1}), ::testing::StartsWith("grace_ms"));
  EXPECT_THAT(message({.best = std::vector<RetentionPolicy::Best>(33)}),
              ::testing::HasSubstr("at most"));
}

}  // namespace
}  // namespace stockpot
