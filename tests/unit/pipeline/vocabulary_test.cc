// Checkpoints whose vocabulary has another size than the base's: what both have is a delta, what is
// more is exact, and what does not fit together is refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "store/artifact_source.h"
#include "store/bitdelta_codec.h"
#include "store/merge.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using ::testing::HasSubstr;

const std::string kQ = "model.layers.0.self_attn.q_proj.weight";
const std::string kEmbed = "model.embed_tokens.weight";
const std::string kHead = "lm_head.weight";
constexpr int64_t kVocabulary = 40;  // the base's
constexpr int64_t kHidden = 24;

class VocabularyTest : public ::testing::TestWithParam<bool> {
 protected:
  VocabularyTest() { base_digest_ = StoreModel(*store_, base_, ArtifactKind::kBase); }

  // The rows that both have are the base's; the others are random. config.json says so.
  TestModel Resized(int64_t rows) {
    TestModel model = base_;
    for (const std::string& name : {kEmbed, kHead}) {
      if (base_.Find(name) == nullptr) continue;
      std::vector<std::byte> bytes = *base_.ReadAll(name);
      TestModel other = base_;
      other.SetRandom(name, DType::kBF16, {rows, kHidden}, random_, 0.05);
      const std::vector<std::byte> fresh = *other.ReadAll(name);
      const size_t kept = std::min(bytes.size(), fresh.size());
      bytes.resize(kept);
      bytes.insert(bytes.end(), fresh.begin() + static_cast<long>(kept), fresh.end());
      model.SetBytes(name, DType::kBF16, {rows, kHidden}, bytes);
    }
    auto config = nlohmann::json::parse(base_.config_files.at("config.json"));
    config["vocab_size"] = rows;
    model.config_files["config.json"] = config.dump();
    return model;
  }

  Result<Manifest> Build(const TestModel& model) {
    return BuildVariant(
        *store_,
        StoreModel(*store_, model, ArtifactKind::kCheckpoint, base_digest_, "run", step_++),
        PublishCodec::kBitDelta, threads_, nullptr);
  }

  void ExpectExact(const Manifest& variant, const TestModel& model) {
    Commit commit;
    commit.artifacts.push_back(variant);
    ASSERT_OK(store_->Apply(std::move(commit)));
    const auto source = OpenArtifact(*store_, variant.digest());
    ASSERT_OK(source);
    for (const std::string& name : {kEmbed, kHead}) {
      if (model.Find(name) == nullptr) continue;
      EXPECT_EQ((*source)->Find(name)->shape, model.Find(name)->shape);
      EXPECT_EQ(*(*source)->ReadAll(name), *model.ReadAll(name)) << name;
    }
    EXPECT_EQ(*(*source)->ReadFile("config.json"), *model.ReadFile("config.json"));
  }

  TemporaryFolder temporary_;
  std::unique_ptr<CheckpointStore> store_ = OpenStore(temporary_.path() / "store");
  std::mt19937_64 random_{TestSeed()};
  ThreadPool threads_{2};
  const bool tied_ = GetParam();
  TestModel base_ = TinyLlama(random_, {.vocab = kVocabulary, .hidden = kHidden, .tied = tied_});
  Digest base_digest_;
  int64_t step_ = 1;
};

INSTANTIATE_TEST_SUITE_P(Ties, VocabularyTest, ::testing::Bool());

TEST_P(VocabularyTest, RowsThatBothHaveCostNothingAndOthersAreExact) {
  for (const int64_t rows : {41, 47, 400, 39, 1}) {
    TestModel model = Resized(rows);
    model.Perturb(kQ, random_, 0.01);
    const auto variant = Build(model);
    ASSERT_OK(variant);
    const TensorEntry& table = *variant->Find(kEmbed);
    EXPECT_EQ(table.codec, Codec::kSparse) << rows;
    EXPECT_EQ(table.overlap_rows(), std::min(rows, kVocabulary));
    EXPECT_EQ(table.stored_bytes(), 4 * std::min(rows, kVocabulary) +
                                        2 * kHidden * std::max<int64_t>(0, rows - kVocabulary));
    EXPECT_EQ(variant->Find(kQ)->codec, Codec::kBitDelta);
    if (!tied_) {
      EXPECT_EQ(variant->Find(kHead)->codec, Codec::kSparse);
    }
    ExpectExact(*variant, model);
  }
}

TEST_P(VocabularyTest, ChangedRowsAreSparseAndAChangedTableRaw) {
  TestModel model = Resized(45);
  model.SetElement(kEmbed, 7, 0.25);
  model.SetElement(kEmbed, 42 * kHidden, 0.25);  // behind the base's
  const auto variant = Build(model);
  ASSERT_OK(variant);
  EXPECT_EQ(variant->Find(kEmbed)->codec, Codec::kSparse);
  EXPECT_EQ(variant->Find(kEmbed)->parts.at("values").bytes, 2);
  ExpectExact(*variant, model);
  model.Perturb(kEmbed, random_, 0.01);
  const auto moved = Build(model);
  ASSERT_OK(moved);
  EXPECT_EQ(moved->Find(kEmbed)->codec, Codec::kRaw);
  ExpectExact(*moved, model);
}

TEST_P(VocabularyTest, ATieIsTheCheckpointsOwn) {
  TestModel untied = Resized(44);
  untied.Remove(kHead);
  untied.SetRandom(kHead, DType::kBF16, {44, kHidden}, random_, 0.05);
  const auto apart = Build(untied);
  ASSERT_OK(apart);
  EXPECT_EQ(apart->Find(kHead)->shape, (std::vector<int64_t>{44, kHidden}));
  EXPECT_NE(apart->Find(kHead)->codec, Codec::kBase);
  TestModel tied = Resized(44);
  tied.Tie(kHead, kEmbed);
  const auto alias = Build(tied);
  ASSERT_OK(alias);
  EXPECT_EQ(alias->Find(kHead)->alias_of, kEmbed);
  EXPECT_EQ(alias->Find(kHead)->shape, (std::vector<int64_t>{44, kHidden}));
}

TEST_P(VocabularyTest, WhatDoesNotFitIsRefusedByName) {
  const auto refused = [&](const TestModel& model, const std::vector<std::string>& words) {
    const Status status = Build(model).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    for (const std::string& word : words) EXPECT_THAT(status.message(), HasSubstr(word));
  };
  TestModel config = Resized(48);
  config.config_files["config.json"] = base_.config_files.at("config.json");
  refused(config, {tied_ ? kEmbed : kHead, "[48, 24]", "[40, 24]", "vocab_size 40"});
  TestModel wide = Resized(48);
  wide.SetRandom(kEmbed, DType::kBF16, {48, 25}, random_, 0.05);
  refused(wide, {kEmbed, "[48, 25]"});
  TestModel nan = Resized(48);
  nan.SetElement(kEmbed, 47 * kHidden, std::nan(""));
  refused(nan, {kEmbed, "behind the base's last", "not finite"});
  TestModel overlap_nan = Resized(48);
  overlap_nan.SetElement(kEmbed, 3, std::nan(""));
  refused(overlap_nan, {kEmbed, "NaN or infinite"});
}

// A merge of parents that agree is a mean of their tables, whatever the base's; it is published
// like a checkpoint. Parents that do not agree are refused, and so is what would need the base.
TEST_P(VocabularyTest, MergesAreMeansOrRefused) {
  TestModel a = Resized(45);
  TestModel b = a;
  b.SetElement(kEmbed, 44 * kHidden + 1, 2);
  a.SetElement(kEmbed, 44 * kHidden + 1, 1);
  a.Perturb(kQ, random_, 0.01);
  const auto put = [&](const TestModel& model) {
    return StoreModel(*store_, model, ArtifactKind::kCheckpoint, base_digest_, "run", step_++);
  };
  const std::vector<Digest> parents = {put(a), put(b)};
  for (const MergeMethod method : {MergeMethod::kMonoSoup, MergeMethod::kMean}) {
    const auto merged =
        BuildMerge(*store_, parents, "run", 100 + step_, {.method = method}, nullptr);
    ASSERT_OK(merged);
    Commit commit;
    commit.artifacts.push_back(*merged);
    ASSERT_OK(store_->Apply(std::move(commit)));
    const auto source = OpenArtifact(*store_, merged->digest());
    const auto table = (*source)->ReadAll(kEmbed);
    ASSERT_OK(table);
    EXPECT_EQ(LoadWeight(table->data(), DType::kBF16, 44 * kHidden + 1), 1.5f);
    EXPECT_EQ(*(*source)->ReadFile("config.json"), *a.ReadFile("config.json"));
    const auto variant =
        BuildVariant(*store_, merged->digest(), PublishCodec::kBitDelta, threads_, nullptr);
    ASSERT_OK(variant);
    EXPECT_EQ(variant->Find(kEmbed)->codec, Codec::kSparse);
  }
  const std::vector<Digest> apart = {parents[0], put(Resized(46))};
  EXPECT_THAT(BuildMerge(*store_, apart, "run", 7, {}, nullptr).status().message(),
              HasSubstr("tensor '" + (tied_ ? kEmbed : kHead) + "' has shape [45, 24]"));
  EXPECT_THAT(BuildMerge(*store_, parents, "run", 7, {.method = MergeMethod::kModelStock}, nullptr)
                  .status()
                  .message(),
              HasSubstr("shape [45, 24], the base's is [40, 24]"));
}

}  // namespace
}  // namespace stockpot
