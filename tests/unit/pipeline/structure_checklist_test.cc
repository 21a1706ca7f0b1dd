// The rows of the structure checklist (store/README.md) that no other test is about: nothing of a
// model is skipped, whatever it looks like, and a delta is only ever over an immutable base.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "store/artifact_source.h"
#include "store/bitdelta_codec.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using ::testing::HasSubstr;

class StructureChecklistTest : public ::testing::Test {
 protected:
  Digest StoreBase(const TestModel& model) {
    return base_ = StoreModel(*store_, model, ArtifactKind::kBase);
  }
  Result<Manifest> Build(const TestModel& checkpoint) {
    return BuildVariant(
        *store_, StoreModel(*store_, checkpoint, ArtifactKind::kCheckpoint, base_, "run", ++step_),
        PublishCodec::kBitDelta, threads_, nullptr);
  }
  Digest Commit1(const Manifest& manifest) {
    Commit commit;
    commit.artifacts.push_back(manifest);
    EXPECT_OK(store_->Apply(std::move(commit)));
    return manifest.digest();
  }

  TemporaryFolder temporary_;
  std::unique_ptr<CheckpointStore> store_ = OpenStore(temporary_.path() / "store");
  std::mt19937_64 random_{TestSeed()};
  ThreadPool threads_{2};
  Digest base_;
  int64_t step_ = 0;
};

// Experts [E, out, in], routers, fused layers, grouped queries, biases, tables: every element that
// changed is counted once, under what was done with it.
TEST_F(StructureChecklistTest, CoverageCountsEveryChangedElement) {
  TestModel base = TinyLlama(random_, {.hidden = 32, .kv = 8, .tied = false});
  const std::string experts = "model.layers.0.mlp.experts.gate_up_proj";
  base.SetRandom(experts, DType::kBF16, {4, 24, 32}, random_, 0.05);
  base.SetRandom("model.layers.0.mlp.gate.weight", DType::kBF16, {4, 32}, random_, 0.05);
  base.SetRandom("model.layers.0.attn.qkv.weight", DType::kBF16, {96, 32}, random_, 0.05);
  base.SetRandom("model.layers.0.attn.qkv.bias", DType::kBF16, {96}, random_, 0.05);
  base.config_files["config.json"].insert(1, "\"num_local_experts\": 4, ");
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  int64_t elements = 0, linear = 0;
  for (const TensorInfo& info : base.tensors()) {
    elements += info.elements();
    ASSERT_NE(variant->Find(info.name), nullptr) << info.name;
    ASSERT_NE(variant->Find(info.name)->codec, Codec::kBase) << info.name;
    if (variant->Find(info.name)->codec == Codec::kBitDelta) linear += info.elements();
  }
  const auto coverage = nlohmann::json::parse(variant->attributes.at("coverage"));
  EXPECT_EQ(
      coverage.at("block_elements").get<int64_t>() + coverage.at("other_changed").get<int64_t>(),
      elements);
  EXPECT_EQ(coverage.at("block_compressed").get<int64_t>(), linear);
  const auto facts = nlohmann::json::parse(variant->attributes.at("tensor/" + experts));
  EXPECT_EQ(facts.at("codec"), "raw") << "stored exactly, and it says so";
  EXPECT_EQ(variant->Find("model.layers.0.self_attn.k_proj.weight")->codec, Codec::kBitDelta);
}

TEST_F(StructureChecklistTest, TheOrientationOfConv1dIsRecorded) {
  TestModel gpt;
  gpt.SetRandom("wte.weight", DType::kF32, {40, 16}, random_, 0.05);
  gpt.SetRandom("h.0.attn.c_attn.weight", DType::kF32, {16, 48}, random_, 0.05);
  gpt.SetRandom("h.0.attn.c_attn.bias", DType::kF32, {48}, random_, 0.05);
  StoreBase(gpt);
  TestModel tuned = gpt;
  tuned.PerturbAll(random_, 0.01);
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  const auto facts = nlohmann::json::parse(variant->attributes.at("tensor/h.0.attn.c_attn.weight"));
  EXPECT_EQ(facts.at("role"), "transposed");
  EXPECT_EQ(facts.at("codec"), "raw");
}

// Input widths around every size that a kernel or a packing might divide by.
TEST_F(StructureChecklistTest, AnyWidthIsPackedWithDefinedPadding) {
  const std::vector<int64_t> widths = {1, 7, 8, 9, 31, 33, 63, 65, 127, 128, 129, 250};
  TestModel base;
  for (const int64_t width : widths) {
    base.SetRandom("model.layers.0.w" + std::to_string(width) + ".weight", DType::kF32, {3, width},
                   random_, 0.05);
  }
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  for (const int64_t width : widths) {
    const TensorEntry& entry =
        *variant->Find("model.layers.0.w" + std::to_string(width) + ".weight");
    ASSERT_EQ(entry.codec, Codec::kBitDelta) << width;
    std::vector<uint8_t> signs(static_cast<size_t>(entry.parts.at("signs").bytes));
    ASSERT_EQ(std::ssize(signs), 3 * ((width + 7) / 8));
    ASSERT_OK(
        store_->ReadPart(entry.parts.at("signs"), 0, std::as_writable_bytes(std::span(signs))));
    const std::vector<float> was = base.Values(entry.name), is = tuned.Values(entry.name);
    for (int64_t row = 0; row < 3; ++row) {
      for (int64_t bit = 0; bit < (width + 7) / 8 * 8; ++bit) {
        const size_t i = static_cast<size_t>(row * width + bit);
        const uint8_t byte = signs[static_cast<size_t>(row * ((width + 7) / 8) + bit / 8)];
        const bool want = bit < width && is[i] - was[i] >= 0;
        ASSERT_EQ((byte >> (bit % 8)) & 1, want) << width << " " << row << " " << bit;
      }
    }
  }
}

TEST_F(StructureChecklistTest, DeltasAreNeverChained) {
  const TestModel base = TinyLlama(random_);
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  const Digest digest = Commit1(*variant);
  EXPECT_THAT(
      BuildVariant(*store_, digest, PublishCodec::kBitDelta, threads_, nullptr).status().message(),
      HasSubstr("only checkpoints and merges are published"));
  // Neither does anything get a variant, or a checkpoint, for its base.
  Manifest on_top = *variant;
  on_top.base = digest;
  Commit commit;
  commit.artifacts.push_back(on_top);
  const Status status = store_->Apply(std::move(commit)).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("is not a base"));
  // A checkpoint that is stored as a delta itself is not taken for full weights.
  Manifest checkpoint = *variant;
  checkpoint.kind = ArtifactKind::kCheckpoint;
  checkpoint.attributes.clear();
  EXPECT_THAT(BuildVariant(*store_, Commit1(checkpoint), PublishCodec::kBitDelta, threads_, nullptr)
                  .status()
                  .message(),
              HasSubstr("is compressed already"));
}

}  // namespace
}  // namespace stockpot
