// MonoSoup against a NumPy oracle in float64, and what must hold exactly.
#include "store/mono_soup.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "store/artifact_source.h"
#include "store/safetensors.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

const std::string kQ = "model.layers.0.self_attn.q_proj.weight";
const std::string kEmbed = "model.embed_tokens.weight";
const std::string kNorm = "model.norm.weight";

std::vector<float> Noise(std::mt19937_64& random, int64_t n, double sigma) {
  std::normal_distribution<double> normal(0, sigma);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = static_cast<float>(normal(random));
  return values;
}

// Rank-1 terms of falling size, and noise.
std::vector<float> LowRank(std::mt19937_64& random, int64_t rows, int64_t cols, int terms) {
  std::vector<float> matrix = Noise(random, rows * cols, 1e-4);
  for (int t = 0; t < terms; ++t) {
    const std::vector<float> u = Noise(random, rows, 1), v = Noise(random, cols, 1e-2 / (1 + t));
    for (int64_t i = 0; i < rows * cols; ++i) {
      matrix[static_cast<size_t>(i)] +=
          u[static_cast<size_t>(i / cols)] * v[static_cast<size_t>(i % cols)];
    }
  }
  return matrix;
}

void WriteFloats(const std::filesystem::path& path, const std::vector<float>& values) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(4 * values.size()));
}

TEST(MonoSoupMatrixTest, AgreesWithNumpy) {
  TemporaryFolder folder;
  std::mt19937_64 random(TestSeed());
  struct Case {
    int64_t rows, cols;
    int parents;
    MonoSoupOptions options;
  };
  const std::vector<Case> cases = {{48, 48, 1, {.energy = 0.95}},
                                   {48, 31, 2, {.energy = 0.95}},
                                   {31, 48, 3, {.energy = 0.8}},
                                   {96, 24, 2, {.energy = 0.3}},
                                   {24, 96, 2, {.energy = 0.999}},
                                   {48, 48, 2, {.energy = 0.95, .rank = 3, .force = true}},
                                   {40, 56, 2, {.energy = 0.1, .rank = 30}},
                                   {40, 56, 2, {.energy = 0.95, .rank = 40}},
                                   {1, 17, 2, {.energy = 0.9}},
                                   {17, 1, 2, {.energy = 0.9}},
                                   {1, 1, 3, {.energy = 0.9}},
                                   {32, 48, 2, {.energy = 1.0}}};
  nlohmann::json index = nlohmann::json::array();
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    std::vector<std::vector<float>> deltas;
    std::vector<float> all;
    for (int p = 0; p < c.parents; ++p) {
      deltas.push_back(i % 2 == 0 ? LowRank(random, c.rows, c.cols, 5)
                                  : Noise(random, c.rows * c.cols, 1e-3));
      all.insert(all.end(), deltas.back().begin(), deltas.back().end());
    }
    std::vector<const float*> pointers;
    for (const auto& delta : deltas) pointers.push_back(delta.data());
    std::vector<float> merged(deltas[0].size());
    const auto reports = MonoSoupMatrix(c.rows, c.cols, pointers, c.options, merged.data());
    ASSERT_OK(reports);
    ASSERT_EQ(reports->size(), deltas.size());
    nlohmann::json entry = {{"rows", c.rows},
                            {"cols", c.cols},
                            {"energy", c.options.energy},
                            {"rank", c.options.rank},
                            {"ranks", nlohmann::json::array()},
                            {"kept", nlohmann::json::array()}};
    for (const TruncationReport& report : *reports) {
      entry["ranks"].push_back(report.rank);
      entry["kept"].push_back(report.kept_energy);
    }
    index.push_back(entry);
    WriteFloats(folder.path() / (std::to_string(i) + ".deltas"), all);
    WriteFloats(folder.path() / (std::to_string(i) + ".merged"), merged);
  }
  std::ofstream(folder.path() / "index.json") << index.dump();
  EXPECT_TRUE(RunPython("mono_soup_oracle.py", {folder.path().string()}));
}

TEST(MonoSoupMatrixTest, ZeroDeltasAndFullRankAreExact) {
  std::mt19937_64 random(TestSeed());
  const std::vector<float> zero(12 * 7), noise = Noise(random, 12 * 7, 1);
  std::vector<float> merged(12 * 7, 3.0f);
  const float* zeros[] = {zero.data()};
  auto reports = MonoSoupMatrix(12, 7, zeros, {}, merged.data());
  ASSERT_OK(reports);
  EXPECT_EQ((*reports)[0].rank, 0);
  EXPECT_EQ((*reports)[0].kept_energy, 1);
  EXPECT_EQ(merged, zero);
  const float* one[] = {noise.data()};
  for (const MonoSoupOptions& options :
       {MonoSoupOptions{.energy = 1}, MonoSoupOptions{.energy = 0.5, .rank = 7},
        MonoSoupOptions{.energy = 0.95, .rank = 1000}}) {
    reports = MonoSoupMatrix(12, 7, one, options, merged.data());
    ASSERT_OK(reports);
    EXPECT_EQ((*reports)[0].rank, 7);
    EXPECT_EQ(merged, noise);
  }
  const float* both[] = {zero.data(), noise.data()};
  ASSERT_OK(MonoSoupMatrix(12, 7, both, {.energy = 1}, merged.data()));
  for (size_t i = 0; i < merged.size(); ++i) EXPECT_EQ(merged[i], noise[i] / 2);
}

TEST(MonoSoupMatrixTest, Refuses) {
  std::mt19937_64 random(TestSeed());
  std::vector<float> noise = Noise(random, 64 * 64, 1), merged(64 * 64);
  const float* deltas[] = {noise.data()};
  const auto code = [&](const MonoSoupOptions& options) {
    return MonoSoupMatrix(64, 64, deltas, options, merged.data()).status().code();
  };
  EXPECT_EQ(code({.energy = 0}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.energy = 1.01}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.energy = std::nan("")}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.rank = -1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.energy = 0.95, .rank = 4}),
            StatusCode::kInvalidArgument);  // noise: below the floor
  EXPECT_EQ(code({.energy = 0.95, .rank = 4, .force = true}), StatusCode::kOk);
  EXPECT_EQ(MonoSoupMatrix(0, 4, deltas, {}, merged.data()).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(MonoSoupMatrix(4, 4, {}, {}, merged.data()).status().code(),
            StatusCode::kInvalidArgument);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    noise[77] = bad;
    EXPECT_EQ(code({}), StatusCode::kInvalidArgument);
  }
}

class MonoSoupTest : public ::testing::Test {
 protected:
  Digest Checkpoint(const TensorSource& model) {
    return StoreModel(*store_, model, ArtifactKind::kCheckpoint, base_, "run", step_++);
  }
  Result<Manifest> Merge(const std::vector<Digest>& parents, const MonoSoupOptions& options = {}) {
    return BuildMonoSoup(*store_, parents, "run", 100, options, nullptr);
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
                     const MonoSoupOptions& options = {}) {
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

TEST_F(MonoSoupTest, WhatMustBeExact) {
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

TEST_F(MonoSoupTest, TablesNormsAndBiasesAreMeansAndFilesAreTheFirsts) {
  TestModel a = model_, b = model_;
  a.PerturbAll(random_, 0.01);
  b.PerturbAll(random_, 0.01);
  a.config_files["config.json"].insert(1, "\"rope_theta\": 1e4, ");
  std::vector<double> shares;
  const auto merged = BuildMonoSoup(*store_, std::vector{Checkpoint(a), Checkpoint(b)}, "run", 100,
                                    {}, [&](double share) {
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

TEST_F(MonoSoupTest, TiesHoldOrBreak) {
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

TEST_F(MonoSoupTest, Refuses) {
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
  const auto stopped = BuildMonoSoup(*store_, std::vector{good}, "run", 1, {},
                                     [](double) { return Unavailable("stop"); });
  EXPECT_EQ(stopped.status().code(), StatusCode::kUnavailable);
}

TEST_F(MonoSoupTest, WholeModelsAgreeWithNumpy) {
  std::vector<Digest> parents;
  for (const std::string name : {"a", "b", "c"}) {
    TestModel tuned = model_;
    tuned.PerturbAll(random_, 0.01);
    parents.push_back(Checkpoint(tuned));
    ASSERT_OK(WriteModelFolder(tuned, temporary_.path() / name));
  }
  ASSERT_OK(WriteModelFolder(model_, temporary_.path() / "base"));
  const auto merged = Merge(parents, {.energy = 0.9});
  ASSERT_OK(merged);
  ASSERT_OK(WriteModelFolder(*Open(*merged), temporary_.path() / "merged"));
  EXPECT_TRUE(RunPython("mono_soup_oracle.py", {temporary_.path().string(), "0.9"}));
}

}  // namespace
}  // namespace stockpot
