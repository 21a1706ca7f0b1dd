// A checkpoint that ranks sent in pieces against the same one sent whole: what is made of it, read
// from it and kept of it is the same.
#include <gmock/gmock.h>

#include <fstream>

#include "kernels/base/threads.h"
#include "store/artifact_source.h"
#include "store/bitdelta_codec.h"
#include "store/merge.h"
#include "store/safetensors.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using ::testing::HasSubstr;

// `model` as `world` ranks would send it: matrices by rows or, every second one, by columns.
Manifest PutCut(CheckpointStore& store, const TensorSource& model, const Digest& base, int64_t step,
                int64_t world) {
  Manifest manifest = PutModel(store, model, ArtifactKind::kCheckpoint, base, "r", step);
  size_t matrices = 0;
  for (TensorEntry& entry : manifest.tensors) {
    if (!entry.alias_of.empty() || entry.shape.empty()) continue;
    const size_t dim = entry.shape.size() == 2 && ++matrices % 2 == 0 ? 1 : 0;
    const int64_t each = (entry.shape[dim] + world - 1) / world;
    std::vector<TensorBox> pieces;
    for (int64_t at = 0; at < entry.shape[dim]; at += each) {
      TensorBox box = WholeBox(entry.shape);
      box.offsets[dim] = at;
      box.shape[dim] = std::min(each, entry.shape[dim] - at);
      pieces.push_back(box);
    }
    if (pieces.size() < 2) continue;
    entry.parts.clear();
    entry.pieces = pieces;
    for (size_t i = 0; i < pieces.size(); ++i) {
      std::vector<std::byte> bytes(
          static_cast<size_t>(pieces[i].elements() * DTypeSize(entry.dtype)));
      EXPECT_OK(model.ReadBox(entry.name, pieces[i], bytes));
      entry.parts[PieceRole(i)] = store.PutBytes(bytes).value();
    }
  }
  return manifest;
}

std::string FileText(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class ShardedModelTest : public ::testing::Test {
 protected:
  ShardedModelTest() {
    store_ = OpenStore(folder_.path() / "data");
    base_model_ = TinyLlama(random_);
    base_ = StoreModel(*store_, base_model_, ArtifactKind::kBase);
    Commit commit;
    commit.runs.push_back({.name = "r", .base = base_});
    EXPECT_OK(store_->Apply(std::move(commit)));
  }

  Digest Store(Manifest manifest) {
    const Digest digest = manifest.digest();
    Commit commit;
    commit.artifacts.push_back(std::move(manifest));
    const auto applied = store_->Apply(std::move(commit));
    EXPECT_OK(applied);
    return digest;
  }
  // A fine-tuned model, a tensor of which did not change.
  TestModel Tuned(double sigma) {
    TestModel model = base_model_;
    model.PerturbAll(random_, sigma);
    const std::string kept = "model.layers.1.mlp.up_proj.weight";
    model.SetBytes(kept, DType::kBF16, base_model_.Find(kept)->shape,
                   base_model_.ReadAll(kept).value());
    return model;
  }
  Digest StoreWhole(const TestModel& model, int64_t step) {
    return StoreModel(*store_, model, ArtifactKind::kCheckpoint, base_, "r", step);
  }
  Digest StoreCut(const TestModel& model, int64_t step, int64_t world) {
    return Store(PutCut(*store_, model, base_, step, world));
  }
  std::unique_ptr<TensorSource> Source(const Digest& artifact) {
    auto source = OpenArtifact(*store_, artifact);
    EXPECT_OK(source);
    return *std::move(source);
  }

  // Signs, scales, and what is the base's: the same bytes in the store. The rest: the same values.
  void ExpectSameVariant(const Digest& a, const Digest& b) {
    const Manifest of_a = store_->GetManifest(a).value();
    const Manifest of_b = store_->GetManifest(b).value();
    ASSERT_EQ(of_a.tensors.size(), of_b.tensors.size());
    for (size_t i = 0; i < of_a.tensors.size(); ++i) {
      const TensorEntry& x = of_a.tensors[i];
      const TensorEntry& y = of_b.tensors[i];
      ASSERT_EQ(x.name, y.name);
      EXPECT_EQ(x.codec, y.codec) << x.name;
      EXPECT_EQ(x.alias_of, y.alias_of) << x.name;
      EXPECT_EQ(x.content, y.content) << x.name;
      if (x.codec == Codec::kBitDelta) {
        ASSERT_EQ(x.parts.size(), y.parts.size()) << x.name;
        for (const auto& [role, part] : x.parts) {
          EXPECT_EQ(part.chunks, y.parts.at(role).chunks) << x.name << " " << role;
        }
      }
    }
    for (const char* name : {"codec", "bytes", "bytes_full", "coverage"}) {
      EXPECT_EQ(of_a.attributes.at(name), of_b.attributes.at(name)) << name;
    }
    EXPECT_TRUE(SameTensors(*Source(a), *Source(b)));
  }

  TemporaryFolder folder_;
  std::mt19937_64 random_{TestSeed()};
  std::unique_ptr<CheckpointStore> store_;
  TestModel base_model_;
  Digest base_;
  ThreadPool threads_{1};
};

TEST_F(ShardedModelTest, C11_ReadsExportsAndPublishesBitIdentically) {
  const TestModel tuned = Tuned(0.01);
  const Digest whole = StoreWhole(tuned, 1);
  EXPECT_TRUE(SameTensors(*Source(whole), tuned));
  int64_t step = 1;
  for (const int64_t world : {2, 3, 5}) {
    const Digest cut = StoreCut(tuned, ++step, world);
    ASSERT_NE(cut, whole);
    EXPECT_TRUE(SameTensors(*Source(cut), tuned));
    // No byte more is stored than was sent.
    const Manifest manifest = store_->GetManifest(cut).value();
    EXPECT_EQ(manifest.stored_bytes(), store_->GetManifest(whole)->stored_bytes());
    EXPECT_EQ(manifest.logical_bytes(), store_->GetManifest(whole)->logical_bytes());
    const auto folder = folder_.path() / std::to_string(world);
    ASSERT_OK(WriteModelFolder(*Source(whole), folder / "whole"));
    ASSERT_OK(WriteModelFolder(*Source(cut), folder / "cut"));
    EXPECT_EQ(FileText(folder / "whole" / "model.safetensors"),
              FileText(folder / "cut" / "model.safetensors"));
    for (const PublishCodec codec : {PublishCodec::kBitDelta, PublishCodec::kDense,
                                     PublishCodec::kAuto, PublishCodec::kSparse}) {
      auto of_whole = BuildVariant(*store_, whole, codec, threads_, nullptr);
      auto of_cut = BuildVariant(*store_, cut, codec, threads_, nullptr);
      ASSERT_OK(of_whole);
      ASSERT_OK(of_cut);
      ExpectSameVariant(Store(*std::move(of_whole)), Store(*std::move(of_cut)));
    }
  }
}

TEST_F(ShardedModelTest, C11_MergesBitIdenticallyHoweverTheParentsAreCut) {
  const TestModel one = Tuned(0.01);
  const TestModel two = Tuned(0.01);
  const MergeOptions options{.energy = 0.9};
  const std::vector<Digest> whole = {StoreWhole(one, 1), StoreWhole(two, 2)};
  auto of_whole = BuildMerge(*store_, whole, "r", 2, options, nullptr);
  ASSERT_OK(of_whole);
  const Digest expected = Store(*std::move(of_whole));
  int64_t step = 2;
  for (const auto& [n, m] : {std::pair{2, 2}, std::pair{3, 5}, std::pair{1, 4}}) {
    const Digest first = n == 1 ? whole[0] : StoreCut(one, ++step, n);
    const std::vector<Digest> cut = {first, StoreCut(two, ++step, m)};
    auto merged = BuildMerge(*store_, cut, "r", 2, options, nullptr);
    ASSERT_OK(merged);
    EXPECT_EQ(merged->attributes.at("matrices"),
              store_->GetManifest(expected)->attributes.at("matrices"));
    EXPECT_EQ(merged->attributes.at("kept_energy_min"),
              store_->GetManifest(expected)->attributes.at("kept_energy_min"));
    EXPECT_TRUE(SameTensors(*Source(Store(*std::move(merged))), *Source(expected)));
  }
}

// Garbage collection, scrub and backup find the pieces as they find whole tensors.
TEST_F(ShardedModelTest, PiecesAreKeptScrubbedAndBackedUp) {
  const TestModel tuned = Tuned(0.01);
  const Digest cut = StoreCut(tuned, 1, 3);
  Commit commit;
  commit.steps.push_back(
      {.run = "r", .step = 1, .kind = ArtifactKind::kCheckpoint, .artifact = cut});
  commit.edges.push_back({EdgeType::kTrainedFrom, cut, base_});
  ASSERT_OK(store_->Apply(std::move(commit)));
  const auto collected = store_->CollectGarbage({});
  ASSERT_OK(collected);
  EXPECT_TRUE(SameTensors(*Source(cut), tuned));
  const auto scrubbed = store_->Scrub(nullptr);
  ASSERT_OK(scrubbed);
  EXPECT_TRUE(scrubbed->damaged.empty());
  ASSERT_OK(store_->BackupTo(folder_.path() / "backup", nullptr));
  ASSERT_OK(
      RestoreStore(folder_.path() / "backup", folder_.path() / "restored", SystemClock(), nullptr));
  const auto restored = OpenStore(folder_.path() / "restored");
  const auto source = OpenArtifact(*restored, cut);
  ASSERT_OK(source);
  EXPECT_TRUE(SameTensors(**source, tuned));
}

TEST_F(ShardedModelTest, BoxesOfVariantsAreTheirDecodedValues) {
  const Digest cut = StoreCut(Tuned(0.01), 1, 3);
  auto variant = BuildVariant(*store_, cut, PublishCodec::kBitDelta, threads_, nullptr);
  ASSERT_OK(variant);
  const auto source = Source(Store(*std::move(variant)));
  for (const TensorInfo& info : source->tensors()) {
    const std::vector<std::byte> all = source->ReadAll(info.name).value();
    const int64_t rows = info.shape[0];
    const int64_t row_bytes = info.bytes() / rows;
    TensorBox box = WholeBox(info.shape);
    box.offsets[0] = rows / 3;
    box.shape[0] = rows - rows / 3 - 1;
    std::vector<std::byte> out(static_cast<size_t>(box.shape[0] * row_bytes));
    ASSERT_OK(source->ReadBox(info.name, box, out));
    EXPECT_TRUE(std::equal(out.begin(), out.end(), all.begin() + box.offsets[0] * row_bytes))
        << info.name;
    box.shape[0] = rows;
    EXPECT_EQ(source->ReadBox(info.name, box, out).code(), StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace stockpot
