// An artifact by its logical values: any range of any codec, one rounding, damage that is named.
#include "store/artifact_source.h"

#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "store/bitdelta_codec.h"
#include "store/weight_rounding.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

class ArtifactSourceTest : public ::testing::Test {
 protected:
  Digest CommitVariant(const Digest& checkpoint) {
    const auto variant =
        BuildVariant(*store_, checkpoint, PublishCodec::kBitDelta, threads_, nullptr);
    EXPECT_OK(variant);
    Commit commit;
    commit.artifacts.push_back(*variant);
    EXPECT_OK(store_->Apply(std::move(commit)));
    return variant->digest();
  }

  TemporaryFolder temporary_;
  std::unique_ptr<CheckpointStore> store_ = OpenStore(temporary_.path() / "store");
  std::mt19937_64 random_{TestSeed()};
  ThreadPool threads_{1};
};

TEST_F(ArtifactSourceTest, ACheckpointComesBackBitForBit) {
  TestModel base = TinyLlama(random_);
  const Digest base_digest = StoreModel(*store_, base, ArtifactKind::kBase);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  tuned.Tie("lm_head.weight", "model.embed_tokens.weight");
  const auto source = OpenArtifact(
      *store_, StoreModel(*store_, tuned, ArtifactKind::kCheckpoint, base_digest, "r", 1));
  ASSERT_OK(source);
  EXPECT_TRUE(SameTensors(tuned, **source));
  EXPECT_EQ((*source)->Find("lm_head.weight")->alias_of, "model.embed_tokens.weight");
  EXPECT_EQ(OpenArtifact(*store_, Sha256("no")).status().code(), StatusCode::kNotFound);
}

// Any byte range equals that of the whole tensor, also where rows are cut in the middle of an
// element and where a tensor has more rows than are decoded at once.
TEST_F(ArtifactSourceTest, ReadsAnyRangeOfADecodedTensor) {
  TestModel base = TinyLlama(random_);
  const std::string large = "model.layers.0.large.weight";
  base.SetRandom(large, DType::kBF16, {2111, 1999}, random_, 0.05);  // 8.4 MB, prime sizes
  const Digest base_digest = StoreModel(*store_, base, ArtifactKind::kBase);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  const Digest variant =
      CommitVariant(StoreModel(*store_, tuned, ArtifactKind::kCheckpoint, base_digest, "r", 1));
  for (const bool decode_f32 : {false, true}) {
    const auto source = OpenArtifact(*store_, variant, decode_f32);
    ASSERT_OK(source);
    for (const std::string& name : {large, std::string("model.layers.1.mlp.down_proj.weight")}) {
      EXPECT_EQ((*source)->Find(name)->dtype, decode_f32 ? DType::kF32 : DType::kBF16);
      const auto all = (*source)->ReadAll(name);
      ASSERT_OK(all);
      const auto size = static_cast<int64_t>(all->size());
      for (int i = 0; i < 30; ++i) {
        const auto offset = static_cast<int64_t>(random_() % static_cast<uint64_t>(size + 1));
        const int64_t limit = std::min<int64_t>(size - offset, 100'000);
        std::vector<std::byte> out(random_() % static_cast<uint64_t>(limit + 1));
        ASSERT_OK((*source)->Read(name, offset, out));
        ASSERT_TRUE(std::equal(out.begin(), out.end(), all->begin() + offset)) << name << offset;
      }
      std::vector<std::byte> one(1);
      EXPECT_EQ((*source)->Read(name, size, one).code(), StatusCode::kInvalidArgument);
    }
  }
}

TEST_F(ArtifactSourceTest, AFlippedBitOfAPackIsFoundAndTheTensorNamed) {
  TestModel base = TinyLlama(random_);
  const std::string large = "model.layers.0.large.weight";
  base.SetRandom(large, DType::kBF16, {300, 400}, random_, 0.05);  // over 64 KiB: in a pack
  const Digest base_digest = StoreModel(*store_, base, ArtifactKind::kBase);
  store_.reset();
  int flipped = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(temporary_.path())) {
    if (entry.path().extension() != ".pack") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    const auto middle = static_cast<std::streamoff>(std::filesystem::file_size(entry.path()) / 2);
    file.seekg(middle);
    const char byte = static_cast<char>(file.get());
    file.seekp(middle);
    file.put(static_cast<char>(byte ^ 0x10));
    ++flipped;
  }
  ASSERT_EQ(flipped, 1);
  store_ = OpenStore(temporary_.path() / "store");
  const auto source = OpenArtifact(*store_, base_digest);
  ASSERT_OK(source);
  const auto bytes = (*source)->ReadAll(large);
  ASSERT_EQ(bytes.status().code(), StatusCode::kCorruption);
  EXPECT_NE(bytes.status().message().find(large), std::string::npos) << bytes.status().ToString();
}

// Against the definition: the neighbour that is nearest, ties to even.
TEST(WeightRoundingTest, RoundsOnce) {
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < 200'000; ++i) {
    const auto bits = static_cast<uint16_t>(random() & 0x7fff);
    const double low = FloatFromBF16(bits);
    const double high = FloatFromBF16(static_cast<uint16_t>(bits + 1));
    if (!(low < high && high < 3e38)) continue;
    const double middle = low + (high - low) / 2;
    const double nudge = (high - low) * 0x1p-40;
    uint16_t got = 0;
    StoreWeight(middle, DType::kBF16, &got, 0);
    ASSERT_EQ(got, bits % 2 == 0 ? bits : bits + 1) << low;
    StoreWeight(middle + nudge, DType::kBF16, &got, 0);  // float32 would call this a tie
    ASSERT_EQ(got, bits + 1) << low;
    StoreWeight(middle - nudge, DType::kBF16, &got, 0);
    ASSERT_EQ(got, bits) << low;
    StoreWeight(-(middle - nudge), DType::kBF16, &got, 0);
    ASSERT_EQ(got, bits | 0x8000) << low;
  }
}

}  // namespace
}  // namespace stockpot
