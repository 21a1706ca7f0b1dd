// Merges of whole models against a NumPy oracle in float64, and what must hold exactly.
#include "store/merge.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "store/artifact_source.h"
#include "store/safetensors.h"
#include "store/weight_rounding.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

const std::string kQ = "model.layers.0.self_attn.q_proj.weight";
const std::string kEmbed = "model.embed_tokens.weight";
const std::string kNorm = "model.norm.weight";

class MergeTest : public ::testing::Test {
 protected:
  Digest Checkpoint(const TensorSource& model) {
    return StoreModel(*store_, model, ArtifactKind::kCheckpoint, base_, "run", step_++);
  }
  Result<Manifest> Merge(const std::vector<Digest>& parents, const MergeOptions& options = {}) {
    return BuildMerge(*store_, parents, "run", 100, options, nullptr);
  }
  std::unique_ptr<TensorSource> Open(const Manifest& merged) {
    Commit commit;
    commit.artifacts.push_back(merged);
    EXPECT_OK(store_->Apply(std::move(commit)));
    auto source = OpenArtifact(*store_, merged.digest());
    EXPECT_OK(source);
    return std::move(*source);
  }
  void ExpectRefused(const std::vector<Digest>& parents, const std::vector<std::string>& words,
                     const MergeOptions& options = {}) {
    const auto merged = Merge(parents, options);
    ASSERT_EQ(merged.status().code(), StatusCode::kInvalidArgument) << words[0];
    for (const std::string& word : words) {
      EXPECT_NE(merged.status().message().find(word), std::string::npos)
          << word << " in " << merged.status().ToString();
    }
  }

  TemporaryFolder temporary_;
  std::unique_ptr<CheckpointStore> store_ = OpenStore(temporary_.path() / "store");
  std::mt19937_64 random_{TestSeed()};
  TestModel model_ = TinyLlama(random_);
  Digest base_ = StoreModel(*store_, model_, ArtifactKind::kBase);
  int64_t step_ = 1;
};

TEST_F(MergeTest, WhatMustBeExact) {
  // base + base = base
  TestModel same = model_;
  same.SetElement(kNorm, 0, -0.0);
  const Digest other_base = base_ = StoreModel(*store_, same, ArtifactKind::kBase);
  auto merged = Merge({Checkpoint(same), Checkpoint(same)});
  ASSERT_OK(merged);
  EXPECT_EQ(merged->base, other_base);
  EXPECT_EQ(merged->attributes.at("matrices"), "0");
  EXPECT_TRUE(SameTensors(same, *Open(*merged)));

  // One checkpoint with all its energy comes back, whatever its float type.
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
    TestModel tuned = same;
    for (const TensorInfo& info : same.tensors()) tuned.Cast(info.name, dtype);
    tuned.PerturbAll(random_, 0.01);
    tuned.SetElement(kQ, 3, 1000);  // far from the base: base + (W - base) would lose bits
    tuned.SetElement(kQ, 4, 1e-6);
    merged = Merge({Checkpoint(tuned)}, {.energy = 1});
    ASSERT_OK(merged);
    EXPECT_TRUE(SameTensors(tuned, *Open(*merged)));
  }
}

TEST_F(MergeTest, TablesNormsAndBiasesAreMeansAndFilesAreTheFirsts) {
  TestModel a = model_, b = model_;
  a.PerturbAll(random_, 0.01);
  b.PerturbAll(random_, 0.01);
  a.config_files["config.json"].insert(1, "\"rope_theta\": 1e4, ");
  std::vector<double> shares;
  const auto merged = BuildMerge(*store_, std::vector{Checkpoint(a), Checkpoint(b)}, "run", 100, {},
                                 [&](double share) {
                                   shares.push_back(share);
                                   return OkStatus();
                                 });
  ASSERT_OK(merged);
  EXPECT_EQ(merged->kind, ArtifactKind::kMerge);
  EXPECT_EQ(merged->step, 100);
  const auto source = Open(*merged);
  for (const std::string& name : {kEmbed, kNorm}) {
    const auto bytes = *source->ReadAll(name);
    const std::vector<float> x = a.Values(name), y = b.Values(name);
    for (size_t i = 0; i < x.size(); ++i) {
      const float mean = static_cast<float>((static_cast<double>(x[i]) + y[i]) / 2);
      ASSERT_EQ(LoadWeight(bytes.data(), DType::kBF16, static_cast<int64_t>(i)),
                FloatFromBF16(BF16FromFloat(mean)));
    }
    EXPECT_FALSE(merged->attributes.contains("tensor/" + name));
  }
  EXPECT_EQ(*source->ReadFile("config.json"), a.config_files["config.json"]);
  const auto facts = nlohmann::json::parse(merged->attributes.at("tensor/" + kQ));
  for (const double kept : facts.at("kept_energy")) EXPECT_GE(kept, 0.95);
  for (const int64_t rank : facts.at("rank")) EXPECT_TRUE(rank > 0 && rank < 24);
  EXPECT_EQ(merged->attributes.at("matrices"), "14");
  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  EXPECT_GE(shares.size(), 1u);
}

TEST_F(MergeTest, TiesHoldOrBreak) {
  const std::string head = "lm_head.weight";
  TestModel a = model_, b = model_;
  a.PerturbAll(random_, 0.01);
  b.PerturbAll(random_, 0.01);
  a.Tie(head, kEmbed);
  b.Tie(head, kEmbed);
  auto merged = Merge({Checkpoint(a), Checkpoint(b)});
  ASSERT_OK(merged);
  EXPECT_EQ(merged->Find(head)->alias_of, kEmbed);
  b.Remove(head);
  b.SetRandom(head, DType::kBF16, b.Find(kEmbed)->shape, random_, 0.05);
  merged = Merge({Checkpoint(a), Checkpoint(b)});
  ASSERT_OK(merged);
  EXPECT_EQ(merged->Find(head)->alias_of, "");
  const auto bytes = *Open(*merged)->ReadAll(head);
  EXPECT_EQ(LoadWeight(bytes.data(), DType::kBF16, 7),
            FloatFromBF16(BF16FromFloat((a.Values(kEmbed)[7] + b.Values(head)[7]) / 2)));
}

TEST_F(MergeTest, Refuses) {
  TestModel a = model_;
  a.PerturbAll(random_, 0.01);
  const Digest good = Checkpoint(a);
  ExpectRefused({}, {"needs a checkpoint"});
  ExpectRefused({base_}, {"base"});
  ExpectRefused({good, good}, {kQ.substr(0, 15), "rank 2 of", "floor"},
                {.energy = 0.95, .rank = 2});
  EXPECT_OK(Merge({good, good}, {.energy = 0.95, .rank = 2, .force = true}));
  for (const std::string& name : {kQ, kNorm, kEmbed}) {
    TestModel bad = a;
    bad.SetElement(name, 1, std::numeric_limits<float>::quiet_NaN());
    ExpectRefused({good, Checkpoint(bad)}, {name, "NaN or infinite"});
  }
  TestModel missing = a;
  missing.Remove(kNorm);
  ExpectRefused({good, Checkpoint(missing)}, {kNorm, "missing"});
  ExpectRefused({Checkpoint(missing), good}, {kNorm, "not in the first"});
  TestModel resized = a;
  resized.SetRandom(kEmbed, DType::kBF16, {41, 24}, random_, 1);
  ExpectRefused({good, Checkpoint(resized)}, {kEmbed, "[41, 24]", "[40, 24]"});
  base_ = StoreModel(*store_, a, ArtifactKind::kBase);
  ExpectRefused({good, Checkpoint(a)}, {"another base"});
  const auto stopped = BuildMerge(*store_, std::vector{good}, "run", 1, {},
                                  [](double) { return Unavailable("stop"); });
  EXPECT_EQ(stopped.status().code(), StatusCode::kUnavailable);
}

// A convolution, a parameter of three dimensions and another type: what a method does with each.
void AddOddTensors(TestModel& model, std::mt19937_64& random) {
  model.SetRandom("model.layers.0.conv.weight", DType::kF32, {12, 5, 3, 2}, random, 0.05);
  model.SetRandom("model.layers.1.experts", DType::kBF16, {3, 10, 7}, random, 0.05);
  model.SetRandom("model.layers.1.gain", DType::kF16, {9}, random, 0.05);
}

TEST_F(MergeTest, EveryMethodAgreesWithNumpy) {
  using enum MergeMethod;
  struct Case {
    size_t parents;
    DType dtype;
    MergeOptions options;
  };
  const std::vector<Case> cases = {
      {3, DType::kBF16, {.energy = 0.9}},
      {2, DType::kF32, {.energy = 0.95}},
      {2, DType::kF32, {.energy = 0.1, .rank = 7}},
      {1, DType::kF16, {.energy = 0.5}},
      {2, DType::kF32, {.method = kMonoSoupSpectral}},
      {3, DType::kBF16, {.method = kMonoSoupSpectral}},
      {2, DType::kF32, {.method = kMonoSoupSpectral, .spectral = 0.8}},
      {1, DType::kF32, {.method = kMonoSoupSpectral}},
      {3, DType::kF32, {.method = kMean}},
      {3, DType::kBF16, {.method = kMean, .weights = {1, 0.25, 3}}},
      {2, DType::kF32, {.method = kMean, .weights = {0, 2}}},
      {2, DType::kF32, {.method = kModelStock}},
      {4, DType::kBF16, {.method = kModelStock}},
      {1, DType::kF32, {.method = kModelStock}},
  };
  AddOddTensors(model_, random_);
  model_.SetRandom("model.layers.1.wide.weight", DType::kBF16, {200, 160}, random_, 0.05);
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const auto folder = temporary_.path() / ("case" + std::to_string(i));
    TestModel base = model_;
    for (const TensorInfo& info : model_.tensors()) base.Cast(info.name, c.dtype);
    base_ = StoreModel(*store_, base, ArtifactKind::kBase);
    ASSERT_OK(WriteModelFolder(base, folder / "base"));
    TestModel common = base;  // the deltas have something in common, as those of one run have
    common.PerturbAll(random_, 0.01);
    std::vector<Digest> parents;
    for (size_t p = 0; p < c.parents; ++p) {
      TestModel tuned = common;
      tuned.PerturbAll(random_, 0.01);
      parents.push_back(Checkpoint(tuned));
      ASSERT_OK(WriteModelFolder(tuned, folder / ("p" + std::to_string(p))));
    }
    const auto merged = Merge(parents, c.options);
    ASSERT_OK(merged);
    EXPECT_EQ(merged->attributes.at("method"), MergeMethodName(c.options.method));
    ASSERT_OK(WriteModelFolder(*Open(*merged), folder / "merged"));
    const nlohmann::json facts = {{"parents", c.parents},
                                  {"method", MergeMethodName(c.options.method)},
                                  {"weights", c.options.weights},
                                  {"energy", c.options.energy},
                                  {"rank", c.options.rank},
                                  {"spectral", c.options.spectral},
                                  {"attributes", merged->attributes}};
    std::ofstream(folder / "options.json") << facts.dump();
    EXPECT_TRUE(RunPython("merge_oracle.py", {"models", folder.string()})) << "case " << i;
    // Repeatable, bit for bit.
    const auto again = Merge(parents, c.options);
    ASSERT_OK(again);
    EXPECT_EQ(again->digest(), merged->digest()) << "case " << i;
  }
}

TEST_F(MergeTest, TheBaseWithItselfIsTheBaseByEveryMethod) {
  AddOddTensors(model_, random_);
  base_ = StoreModel(*store_, model_, ArtifactKind::kBase);
  TestModel tuned = model_;
  tuned.PerturbAll(random_, 0.01);
  for (const MergeOptions& options :
       {MergeOptions{}, MergeOptions{.method = MergeMethod::kMonoSoupSpectral},
        MergeOptions{.method = MergeMethod::kMonoSoupSpectral, .spectral = 0.8},
        MergeOptions{.method = MergeMethod::kMean},
        MergeOptions{.method = MergeMethod::kModelStock}}) {
    const Digest same = Checkpoint(model_);
    const auto merged = Merge({same, same, same}, options);
    ASSERT_OK(merged);
    EXPECT_TRUE(SameTensors(model_, *Open(*merged)));
    // One checkpoint's mean and Model Stock are itself; so is a delta whose cosine with itself
    // is 1.
    const Digest one = Checkpoint(tuned);
    if (options.method == MergeMethod::kMonoSoup) continue;
    if (options.method == MergeMethod::kMonoSoupSpectral) continue;
    for (const std::vector<Digest>& parents : {std::vector{one}, std::vector{one, one}}) {
      const auto alone = Merge(parents, options);
      ASSERT_OK(alone);
      EXPECT_TRUE(SameTensors(tuned, *Open(*alone)));
    }
  }
}

// Deltas that point apart say nothing in common: Model Stock stays at the base.
TEST_F(MergeTest, ModelStockOfOppositeDeltasIsTheBase) {
  TestModel plus = model_, minus = model_;
  for (const TensorInfo& info : model_.tensors()) {
    const std::vector<float> values = model_.Values(info.name);
    std::vector<double> up, down;
    for (const float v : values) {
      up.push_back(v * 1.5);
      down.push_back(v * 0.5);
    }
    plus.Set(info.name, DType::kF32, info.shape, up);
    minus.Set(info.name, DType::kF32, info.shape, down);
  }
  const auto merged =
      Merge({Checkpoint(plus), Checkpoint(minus)}, {.method = MergeMethod::kModelStock});
  ASSERT_OK(merged);
  EXPECT_EQ(merged->attributes.at("tensor/" + kQ), R"({"cosine":-1.0,"t":0.0})");
  const auto source = Open(*merged);
  for (const std::string& name : {kQ, kEmbed}) {
    const auto bytes = *source->ReadAll(name);
    const std::vector<float> values = model_.Values(name);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(LoadWeight(bytes.data(), DType::kF32, static_cast<int64_t>(i)), values[i]);
    }
  }
}

TEST_F(MergeTest, RefusesOptionsThatDoNotFit) {
  TestModel a = model_;
  a.PerturbAll(random_, 0.01);
  const std::vector<Digest> one = {Checkpoint(a)};
  using enum MergeMethod;
  for (const MergeOptions& options :
       {MergeOptions{.energy = 0}, MergeOptions{.energy = 1.01},
        MergeOptions{.energy = std::nan("")}, MergeOptions{.rank = -1},
        MergeOptions{.weights = {1}}, MergeOptions{.spectral = 0.8},
        MergeOptions{.method = kMean, .weights = {1, 1}},
        MergeOptions{.method = kMean, .weights = {0}},
        MergeOptions{.method = kMean, .weights = {-1}},
        MergeOptions{.method = kMean, .weights = {std::nan("")}},
        MergeOptions{.method = kMean, .weights = {INFINITY}},
        MergeOptions{.method = kMean, .rank = 3},
        MergeOptions{.method = kModelStock, .force = true},
        MergeOptions{.method = kMonoSoupSpectral, .energy = 0.9},
        MergeOptions{.method = kMonoSoupSpectral, .spectral = -0.1},
        MergeOptions{.method = kMonoSoupSpectral, .spectral = 1.5}}) {
    EXPECT_EQ(Merge(one, options).status().code(), StatusCode::kInvalidArgument);
  }
}

#ifdef __linux__
int64_t StatusBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) << 10;
  }
  return -1;
}

// Memory goes by the largest tensor, whatever the number of parents: a model of many times that is
// merged within 3 x the largest tensor + 200 MB.
TEST_F(MergeTest, MemoryGoesByTheLargestTensor) {
  constexpr int64_t kParents = 7;
  constexpr int64_t kRows = 40'000, kCols = 1024;
  constexpr int64_t kTableBytes = kRows * kCols * 2;
  const auto make = [&](uint32_t seed) {
    TestModel model = model_;
    std::vector<std::byte> bytes(kTableBytes);
    for (int64_t i = 0; i < kRows * kCols; ++i) {
      StoreWeight(static_cast<double>((i * 2654435761u + seed * 97) % 1009) / 1009, DType::kBF16,
                  bytes.data(), i);
    }
    model.SetBytes("model.extra.embed_tokens.weight", DType::kBF16, {kRows, kCols},
                   std::move(bytes));
    for (int m = 0; m < 4; ++m) {
      model.SetRandom("model.layers.9.m" + std::to_string(m) + ".weight", DType::kBF16, {512, 640},
                      random_, 0.02);
    }
    return model;
  };
  base_ = StoreModel(*store_, make(0), ArtifactKind::kBase);
  std::vector<Digest> parents;
  for (uint32_t p = 1; p <= kParents; ++p) parents.push_back(Checkpoint(make(p)));
  for (const MergeMethod method : {MergeMethod::kMonoSoup, MergeMethod::kMonoSoupSpectral,
                                   MergeMethod::kMean, MergeMethod::kModelStock}) {
    ::malloc_trim(0);
    if (!(std::ofstream("/proc/self/clear_refs") << "5").flush()) {
      GTEST_SKIP() << "the kernel does not reset the peak of resident memory";
    }
    const int64_t before = StatusBytes("VmRSS");
    ASSERT_OK(Merge(parents, {.method = method}));
    const int64_t peak = StatusBytes("VmHWM") - before;
    EXPECT_GT(peak, 1 << 20);
    EXPECT_LE(peak, 3 * kTableBytes + 200'000'000) << MergeMethodName(method);
    RecordProperty(std::string(MergeMethodName(method)), std::to_string(peak >> 20) + " MiB");
  }
}
#endif

}  // namespace
}  // namespace stockpot
