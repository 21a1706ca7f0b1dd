// What follows from a checkpoint or merge: the best one, the jobs, the routes.
#include "store/policy.h"
#include "store/publish_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <tuple>

namespace stockpot {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;

StepRecord Checkpoint(int64_t step, std::map<std::string, double> metrics = {}) {
  return {.run = "r",
          .step = step,
          .kind = ArtifactKind::kCheckpoint,
          .artifact = Sha256("checkpoint" + std::to_string(step)),
          .metrics = std::move(metrics)};
}

StepRecord Merge(int64_t step, std::map<std::string, double> metrics = {}) {
  StepRecord merge = Checkpoint(step, std::move(metrics));
  merge.kind = ArtifactKind::kMerge;
  merge.artifact = Sha256("merge" + std::to_string(step));
  return merge;
}

TEST(BestStepTest, ByMetricDirectionAndEarlierOnTies) {
  RunConfig config;
  const std::vector<StepRecord> steps = {Checkpoint(1),
                                         Checkpoint(2, {{"loss", 3}}),
                                         Checkpoint(3, {{"loss", 2}}),
                                         Merge(3, {{"loss", 0}}),
                                         Checkpoint(4, {{"loss", NAN}}),
                                         Checkpoint(5, {{"loss", 2}}),
                                         Checkpoint(6, {{"accuracy", 9}})};
  EXPECT_EQ(BestStep(config, steps), &steps[2]);
  config.best_is_lower = false;
  EXPECT_EQ(BestStep(config, steps), &steps[1]);
  config.best_metric = "accuracy";
  EXPECT_EQ(BestStep(config, steps), &steps[6]);
  config.best_metric = "other";
  EXPECT_EQ(BestStep(config, steps), nullptr);
  EXPECT_EQ(BestStep(config, {}), nullptr);
}

TEST(JobsForCheckpointTest, MergesOnTheGridWithTheBestPreviousOne) {
  stockpot::Run run{.name = "r"};
  run.config.merge_every = 10;
  run.config.publish = PublishPolicy::kOnRequest;
  const std::vector<StepRecord> previous = {Checkpoint(5, {{"loss", 1}}),
                                            Checkpoint(15, {{"loss", 2}}), Merge(10)};
  EXPECT_TRUE(JobsForCheckpoint(run, Checkpoint(21), previous).empty()) << "off the grid";
  EXPECT_TRUE(JobsForCheckpoint(run, Checkpoint(0), {}).empty()) << "nothing before";
  EXPECT_TRUE(JobsForCheckpoint(run, Checkpoint(20), {Merge(10)}).empty())
      << "no checkpoint before";
  EXPECT_TRUE(JobsForCheckpoint(run, Checkpoint(0), previous).empty()) << "all are later";

  auto jobs = JobsForCheckpoint(run, Checkpoint(20), previous);
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].kind, JobKind::kMerge);
  EXPECT_EQ(jobs[0].args["parents"],
            Checkpoint(20).artifact.Hex() + "," + Checkpoint(5).artifact.Hex());
  EXPECT_EQ(jobs[0].args["run"], "r");
  EXPECT_EQ(jobs[0].args["step"], "20");
  EXPECT_EQ(std::stod(jobs[0].args["energy"]), 0.95);

  run.config.best_metric = "other";
  jobs = JobsForCheckpoint(run, Checkpoint(20), previous);
  EXPECT_EQ(jobs[0].args["parents"],
            Checkpoint(20).artifact.Hex() + "," + Checkpoint(15).artifact.Hex())
      << "the latest, where none has the metric";
  run.config.merge_every = 0;
  EXPECT_TRUE(JobsForCheckpoint(run, Checkpoint(20), previous).empty());
}

TEST(JobsForCheckpointTest, PublishesByPolicy) {
  stockpot::Run run{.name = "r"};
  run.config.merge_every = 0;
  const std::vector<StepRecord> previous = {Checkpoint(5, {{"loss", 1}})};
  const auto publishes = [&](PublishPolicy policy, const StepRecord& step) {
    run.config.publish = policy;
    const auto jobs = JobsForCheckpoint(run, step, previous);
    return jobs.size() == 1 && jobs[0].kind == JobKind::kPublish &&
           jobs[0].args.at("artifact") == step.artifact.Hex();
  };
  EXPECT_TRUE(publishes(PublishPolicy::kEvery, Checkpoint(6)));
  EXPECT_FALSE(publishes(PublishPolicy::kMerges, Checkpoint(6)));
  EXPECT_FALSE(publishes(PublishPolicy::kOnRequest, Checkpoint(6)));
  EXPECT_TRUE(publishes(PublishPolicy::kBest, Checkpoint(6, {{"loss", 0.5}})));
  EXPECT_FALSE(publishes(PublishPolicy::kBest, Checkpoint(6, {{"loss", 1.5}})));
  EXPECT_FALSE(publishes(PublishPolicy::kBest, Checkpoint(6)));
  for (const auto& [policy, expected] :
       {std::pair(PublishPolicy::kEvery, true), std::pair(PublishPolicy::kMerges, true),
        std::pair(PublishPolicy::kBest, false), std::pair(PublishPolicy::kOnRequest, false)}) {
    run.config.publish = policy;
    EXPECT_EQ(!JobsForMerge(run, Merge(10)).empty(), expected);
  }
}

TEST(JobsForCheckpointTest, MergesByTheMethodOfTheRun) {
  stockpot::Run run{.name = "r"};
  run.config.merge_every = 10;
  run.config.publish = PublishPolicy::kOnRequest;
  run.config.merge_energy = 0.9;
  run.config.merge_spectral = 0.8;
  for (const auto& [method, energy, spectral] :
       {std::tuple(MergeMethod::kMonoSoup, 0.9, 0.0), std::tuple(MergeMethod::kMean, 0.95, 0.0),
        std::tuple(MergeMethod::kModelStock, 0.95, 0.0),
        std::tuple(MergeMethod::kMonoSoupSpectral, 0.95, 0.8)}) {
    run.config.merge_method = method;
    const MergeOptions options = MergeOptionsOf(run.config);
    EXPECT_TRUE(CheckMergeOptions(options, 2).ok()) << MergeMethodName(method);
    EXPECT_EQ(options.energy, energy);
    EXPECT_EQ(options.spectral, spectral);
    const auto jobs = JobsForCheckpoint(run, Checkpoint(20), {Checkpoint(10)});
    ASSERT_EQ(jobs.size(), 1u);
    EXPECT_EQ(jobs[0].args.at("method"), MergeMethodName(method));
  }
}

TEST(BestModelTest, MergesCountByTheMetricAsCheckpointsDo) {
  const RunConfig config{.best_metric = "probe/loss"};
  const std::vector<StepRecord> steps = {Checkpoint(1, {{"probe/loss", 2}}),
                                         Merge(2, {{"probe/loss", 1}}), Merge(3, {{"loss", 0}})};
  EXPECT_EQ(BestModel(config, steps), &steps[1]);
  EXPECT_EQ(BestStep(config, steps), &steps[0]) << "what is merged again is a checkpoint";
}

TEST(JobsForCheckpointTest, IsScoredWhereNothingElseDoesIt) {
  stockpot::Run run{.name = "r"};
  run.config.merge_every = 10;
  run.config.publish = PublishPolicy::kOnRequest;
  const Digest probe = Sha256("probe");
  auto jobs = JobsForCheckpoint(run, Checkpoint(6), {Checkpoint(5)}, probe);
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].kind, JobKind::kScore);
  EXPECT_EQ(jobs[0].key,
            "score/" + Checkpoint(6).artifact.Hex() + "/" + probe.ShortHex());
  EXPECT_TRUE(JobsForCheckpoint(run, Checkpoint(6), {Checkpoint(5)}).empty());
  jobs = JobsForCheckpoint(run, Checkpoint(10), {Checkpoint(5)}, probe);
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].kind, JobKind::kMerge);
  run.config.publish = PublishPolicy::kEvery;
  jobs = JobsForCheckpoint(run, Checkpoint(6), {Checkpoint(5)}, probe);
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].kind, JobKind::kPublish);
  EXPECT_FALSE(jobs[0].args.contains("alpha"));
  run.config.publish_options.alpha = AlphaMethod::kClosedForm;
  jobs = JobsForCheckpoint(run, Checkpoint(6), {Checkpoint(5)}, probe);
  EXPECT_EQ(jobs.at(0).args.at("alpha"), "closed-form");
  EXPECT_EQ(JobsForMerge(run, Checkpoint(6)).at(0).args.at("alpha"), "closed-form");
}

TEST(JobKeyTest, NamesWhatIsMade) {
  const Digest a = Sha256("a");
  const Digest b = Sha256("b");
  EXPECT_EQ(MakePublishJob(a, PublishCodec::kDense, "x").key, "publish/" + a.Hex() + "/dense/x");
  // What was queued before there were options keeps its key; each option makes another job.
  const Job job = MakePublishJob(a, PublishCodec::kAuto, "x", {.planes = 2, .max_error = 0.1});
  EXPECT_EQ(job.key,
            "publish/" + a.Hex() + "/auto+planes=2+max_error=0.10000000000000001/x");
  EXPECT_EQ(job.args.at("planes"), "2");
  EXPECT_FALSE(job.args.contains("max_bytes"));
  const Job forced = MakeForcedPublishJob(a, PublishCodec::kDense, "x", "why", "ann");
  EXPECT_EQ(forced.key, "publish_forced/" + a.Hex() + "/dense/x");
  EXPECT_EQ(forced.args.at("force"), "why");
  const PublishOptions closed_form{.alpha = AlphaMethod::kClosedForm};
  const Job calibrated = MakePublishJob(a, PublishCodec::kBitDelta, "x", closed_form);
  EXPECT_EQ(calibrated.key, "publish/" + a.Hex() + "/bitdelta+alpha=closed-form/x");
  EXPECT_EQ(calibrated.args.at("codec"), "bitdelta");
  EXPECT_EQ(calibrated.args.at("alpha"), "closed-form");
  EXPECT_FALSE(MakePublishJob(a, PublishCodec::kBitDelta, "x").args.contains("alpha"));
  EXPECT_EQ(MakeForcedPublishJob(a, PublishCodec::kBitDelta, "x", "why", "ann", closed_form).key,
            "publish_forced/" + a.Hex() + "/bitdelta+alpha=closed-form/x");
  EXPECT_TRUE(CheckPublishOptions(PublishCodec::kBitDelta, closed_form).ok());
  EXPECT_FALSE(CheckPublishOptions(PublishCodec::kDense, closed_form).ok());
  EXPECT_EQ(forced.kind, JobKind::kPublish);
  const Job merge = MakeMergeJob("r", 20, {a, b}, {});
  EXPECT_THAT(merge.key, StartsWith("merge/r/20/"));
  EXPECT_EQ(merge.key, MakeMergeJob("r", 20, {b, a}, {}).key) << "order makes no difference";
  EXPECT_NE(merge.key, MakeMergeJob("r", 20, {a, b}, {.energy = 0.9}).key);
  EXPECT_NE(merge.key, MakeMergeJob("r", 20, {a, a}, {}).key);
  EXPECT_NE(merge.key, MakeMergeJob("r", 21, {a, b}, {}).key);
  using enum MergeMethod;
  std::set<std::string> keys = {merge.key};
  for (const MergeOptions& options :
       {MergeOptions{.method = kMean}, MergeOptions{.method = kMean, .weights = {1, 2}},
        MergeOptions{.method = kMean, .weights = {2, 1}}, MergeOptions{.method = kModelStock},
        MergeOptions{.method = kMonoSoupSpectral},
        MergeOptions{.method = kMonoSoupSpectral, .spectral = 0.8}}) {
    EXPECT_TRUE(keys.insert(MakeMergeJob("r", 20, {a, b}, options).key).second);
  }
  // A weight goes with its parent.
  EXPECT_EQ(MakeMergeJob("r", 20, {a, b}, {.method = kMean, .weights = {1, 2}}).key,
            MakeMergeJob("r", 20, {b, a}, {.method = kMean, .weights = {2, 1}}).key);
}

// Keys that stores hold of before there were several methods.
TEST(JobKeyTest, OfMonoSoupStaysWhatItWas) {
  const Digest a = Sha256("a"), b = Sha256("b");
  std::string made = "0.94999999999999996/0/false";
  for (const Digest& parent : {std::min(a, b), std::max(a, b)}) made += "/" + parent.Hex();
  EXPECT_EQ(MakeMergeJob("r", 20, {a, b}, {}).key, "merge/r/20/" + Sha256(made).ShortHex());
}

TEST(RouteNamesTest, Defaults) {
  const auto names = [](const StepRecord& s, PublishCodec c, const std::string& given,
                        int64_t latest,
                        bool best) { return RouteNamesFor(s, c, given, latest, best); };
  constexpr auto kBit = PublishCodec::kBitDelta;
  constexpr auto kDense = PublishCodec::kDense;
  EXPECT_THAT(names(Checkpoint(7), kBit, "", -1, false), ElementsAre("r@7", "r@latest"));
  EXPECT_THAT(names(Checkpoint(7), kBit, "", 7, true), ElementsAre("r@7", "r@latest", "r@best"));
  EXPECT_THAT(names(Checkpoint(7), kBit, "", 8, false), ElementsAre("r@7"));
  EXPECT_THAT(names(Checkpoint(7), kDense, "", -1, true), ElementsAre("r@7.full"));
  EXPECT_THAT(names(Merge(7), kBit, "", -1, false), ElementsAre("r@7.merge"));
  EXPECT_THAT(names(Merge(7), kBit, "", -1, true), ElementsAre("r@7.merge", "r@best"));
  EXPECT_THAT(names(Merge(7), kDense, "", -1, true), ElementsAre("r@7.merge.full"));
  EXPECT_THAT(names(Checkpoint(7), kBit, "mine", -1, true), ElementsAre("mine"));
}

TEST(PolicyTest, OptionsOfPublishAreChecked) {
  const PublishOptions of_planes{.planes = 8, .residual_rank = 16};
  const PublishOptions of_limits{.max_bytes = 1, .max_share = 1, .max_error = 0};
  for (const PublishCodec codec : {PublishCodec::kBitDelta, PublishCodec::kDense,
                                   PublishCodec::kAuto, PublishCodec::kSparse}) {
    const bool is_auto = codec == PublishCodec::kAuto;
    EXPECT_TRUE(CheckPublishOptions(codec, {}).ok());
    EXPECT_EQ(CheckPublishOptions(codec, of_planes).ok(),
              is_auto || codec == PublishCodec::kBitDelta);
    EXPECT_EQ(CheckPublishOptions(codec, of_limits).ok(), is_auto);
  }
  for (const PublishOptions& bad :
       {PublishOptions{.planes = -1}, PublishOptions{.planes = 9},
        PublishOptions{.residual_rank = -1}, PublishOptions{.residual_rank = 1025},
        PublishOptions{.max_bytes = -1}, PublishOptions{.max_share = -0.1},
        PublishOptions{.max_share = 1.1}, PublishOptions{.max_share = std::nan("")},
        PublishOptions{.max_error = 1.5}, PublishOptions{.max_error = std::nan("")},
        PublishOptions{.max_error = -INFINITY}}) {
    EXPECT_EQ(CheckPublishOptions(PublishCodec::kAuto, bad).code(), StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace stockpot
