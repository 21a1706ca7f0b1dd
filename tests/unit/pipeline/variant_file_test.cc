// Variants as one file: out and in again, and no file that does worse than a refusal.
#include "store/variant_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "store/artifact_source.h"
#include "store/bitdelta_codec.h"
#include "store/ingest.h"
#include "store/variant_check.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

using ::testing::HasSubstr;

const std::string kQ = "model.layers.0.self_attn.q_proj.weight";
const std::string kK = "model.layers.0.self_attn.k_proj.weight";
const std::string kEmbed = "model.embed_tokens.weight";
const std::string kNorm = "model.norm.weight";

std::vector<char> ReadWhole(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteWhole(const std::filesystem::path& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
}

class VariantFileTest : public ::testing::Test {
 protected:
  VariantFileTest() {
    base_digest_ = StoreModel(*store_, base_, ArtifactKind::kBase);
    TestModel tuned = base_;
    tuned.PerturbAll(random_, 0.01);
    tuned.SetBytes(kK, DType::kBF16, base_.Find(kK)->shape, *base_.ReadAll(kK));
    tuned.SetBytes(kEmbed, DType::kBF16, base_.Find(kEmbed)->shape, *base_.ReadAll(kEmbed));
    tuned.SetElement(kEmbed, 5, 0.25);  // sparse
    tuned.config_files["config.json"] = R"({"rope_theta":7})";
    const Digest checkpoint =
        StoreModel(*store_, tuned, ArtifactKind::kCheckpoint, base_digest_, "run", 1);
    variant_ =
        BuildVariant(*store_, checkpoint, PublishCodec::kBitDelta, threads_, nullptr).value();
    base_manifest_ = store_->GetManifest(base_digest_).value();
    EXPECT_OK(Write(variant_, path_));
  }

  Status Write(const Manifest& variant, const std::filesystem::path& path) {
    const PartFetcher fetch = [&](const Part& part, const auto& sink) -> Status {
      for (const Digest& chunk : part.chunks) {
        STOCKPOT_ASSIGN_OR_RETURN(const auto data, store_->ReadChunk(chunk));
        STOCKPOT_RETURN_IF_ERROR(sink(data));
      }
      return OkStatus();
    };
    return WriteVariantFile(variant, base_manifest_, fetch, path);
  }

  // Through a session, as `stockpot import-variant` does it.
  Result<CommitReply> Import(CheckpointStore& store, const Manifest& manifest,
                             const std::string& name, const VariantFile* file) {
    Ingest ingest(store, {}, SystemClock());
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session,
                              ingest.OpenSession({.kind = ArtifactKind::kVariant, .run = name}));
    const auto put = [&](const Digest& digest, std::span<const std::byte> data) {
      return ingest.PutChunk(session, digest, data);
    };
    if (file != nullptr) STOCKPOT_RETURN_IF_ERROR(file->ForEachChunk(put));
    const std::string json = manifest.ToJson();
    const auto bytes = std::as_bytes(std::span(json));
    STOCKPOT_RETURN_IF_ERROR(put(Sha256(bytes), bytes));
    ShardCommit shard;
    shard.files["manifest.json"] = {std::ssize(json), {Sha256(bytes)}};
    return ingest.CommitShard(session, std::move(shard));
  }

  TemporaryFolder temporary_;
  std::unique_ptr<CheckpointStore> store_ = OpenStore(temporary_.path() / "store");
  std::mt19937_64 random_{TestSeed()};
  ThreadPool threads_{2};
  TestModel base_ = TinyLlama(random_);
  Digest base_digest_;
  Manifest base_manifest_;
  Manifest variant_;
  const std::filesystem::path path_ = temporary_.path() / "variant.safetensors";
};

TEST_F(VariantFileTest, ARoundTripIntoAnotherStoreHasTheSameDigestAndBytes) {
  const auto file = VariantFile::Open(path_);
  ASSERT_OK(file);
  EXPECT_EQ((*file)->manifest().digest(), variant_.digest());
  const auto other = OpenStore(temporary_.path() / "other");
  EXPECT_EQ(Import(*other, (*file)->manifest(), "taken", file->get()).status().code(),
            StatusCode::kNotFound)
      << "its base is not there";
  ASSERT_EQ(StoreModel(*other, base_, ArtifactKind::kBase), base_digest_);
  const auto reply = Import(*other, (*file)->manifest(), "taken", file->get());
  ASSERT_OK(reply);
  EXPECT_EQ(reply->artifact, variant_.digest());
  EXPECT_EQ(other->GetRoute("taken")->variant, variant_.digest());
  EXPECT_TRUE(Import(*other, (*file)->manifest(), "taken", file->get())->existed);
  Commit commit;
  commit.artifacts.push_back(variant_);
  ASSERT_OK(store_->Apply(std::move(commit)));
  const auto here = OpenArtifact(*store_, variant_.digest());
  const auto there = OpenArtifact(*other, variant_.digest());
  ASSERT_OK(here);
  ASSERT_OK(there);
  EXPECT_TRUE(SameTensors(**here, **there));
  EXPECT_EQ(*(*there)->ReadFile("config.json"), R"({"rope_theta":7})");
}

TEST_F(VariantFileTest, AnotherBaseIsRefusedByItsFirstTensor) {
  const auto file = VariantFile::Open(path_);
  ASSERT_OK(file);
  EXPECT_OK((*file)->CheckBase("tiny", base_digest_, base_manifest_));
  TestModel moved = base_;
  moved.SetElement(kQ, 3, 0.5);
  moved.SetElement(kNorm, 0, 0.5);  // raw in the variant: not over the base
  const Digest digest = StoreModel(*store_, moved, ArtifactKind::kBase);
  const Status status = (*file)->CheckBase("other", digest, *store_->GetManifest(digest));
  EXPECT_THAT(status.message(), HasSubstr("'other'"));
  EXPECT_THAT(status.message(), HasSubstr("tensor '" + kQ + "' differs"));
  TestModel files = base_;
  files.config_files["config.json"] = "{}";
  const Digest same_tensors = StoreModel(*store_, files, ArtifactKind::kBase);
  EXPECT_THAT(
      (*file)->CheckBase("files", same_tensors, *store_->GetManifest(same_tensors)).message(),
      HasSubstr("its files differ"));
}

TEST_F(VariantFileTest, OnlyAVariantBecomesAFileAndNoFileIsReplaced) {
  EXPECT_THAT(Write(base_manifest_, temporary_.path() / "base").message(), HasSubstr("is a base"));
  EXPECT_THAT(Write(variant_, path_).message(), HasSubstr("exists already"));
  Manifest clash = variant_;
  TensorEntry raw{.name = kQ + ".alpha", .dtype = DType::kU8, .shape = {0}};
  raw.parts["data"] = {};
  clash.tensors.push_back(raw);
  EXPECT_THAT(Write(clash, temporary_.path() / "clash").message(), HasSubstr("'" + kQ + ".alpha'"));
  EXPECT_FALSE(std::filesystem::exists(temporary_.path() / "clash"));
}

// A changed byte of the data is found by its chunk; whatever is done to the header is an error, or
// a file whose chunks are what its manifest says.
TEST_F(VariantFileTest, WhateverTheBytesAnErrorOrAVariant) {
  const std::vector<char> good = ReadWhole(path_);
  uint64_t header = 0;
  std::memcpy(&header, good.data(), 8);
  const auto path = temporary_.path() / "bad.safetensors";
  const auto ignore = [](const Digest&, std::span<const std::byte>) { return OkStatus(); };
  std::vector<char> flipped = good;
  flipped[flipped.size() - 3] ^= 1;
  WriteWhole(path, flipped);
  EXPECT_EQ((*VariantFile::Open(path))->ForEachChunk(ignore).code(), StatusCode::kCorruption);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::vector<char> bad = good;
    const size_t end = i % 3 == 0 ? bad.size() : 8 + header;
    for (int k = 0; k <= i % 2; ++k) bad[random_() % end] = static_cast<char>(random_());
    if (i % 5 == 0) bad.resize(random_() % bad.size());
    WriteWhole(path, bad);
    const auto file = VariantFile::Open(path);
    const Status status = file.ok() ? (*file)->ForEachChunk(ignore) : file.status();
    refused += !status.ok();
    if (status.ok()) {
      EXPECT_OK((*file)->manifest().Validate());
    } else {
      EXPECT_TRUE(status.code() == StatusCode::kCorruption ||
                  status.code() == StatusCode::kInvalidArgument)
          << status.ToString();
    }
  }
  EXPECT_GT(refused, 2000);
}

// What a manifest from outside may not be: each refused at the commit, by the tensor's name.
TEST_F(VariantFileTest, TheCommitRefusesWhatPublishWouldNotHaveMade) {
  const auto find = [](Manifest& m, const std::string& name) -> TensorEntry& {
    return const_cast<TensorEntry&>(*m.Find(name));
  };
  const auto put = [&](const std::vector<float>& values) {
    return *store_->PutBytes(std::as_bytes(std::span(values)));
  };
  const int64_t rows = base_.Find(kQ)->shape[0];
  struct Case {
    const char* words;
    std::function<void(Manifest&)> spoil;
  };
  const std::vector<Case> cases = {
      {"is missing",
       [&](Manifest& m) {
         std::erase_if(m.tensors, [](const TensorEntry& t) { return t.name == kQ; });
       }},
      {"element 0 is not finite",
       [&](Manifest& m) {
         find(m, kQ).parts["alpha"] = put(std::vector<float>(static_cast<size_t>(rows), NAN));
       }},
      {"the relative size of the update",
       [&](Manifest& m) {
         find(m, kQ).parts["alpha"] = put(std::vector<float>(static_cast<size_t>(rows), 1e6f));
       }},
      {"was not sent", [&](Manifest& m) { find(m, kQ).parts["alpha"].chunks[0] = Sha256("x"); }},
      {"not in the base",
       [&](Manifest& m) {
         TensorEntry more = find(m, kNorm);
         more.name = "model.norm2.weight";
         m.tensors.push_back(more);
         std::sort(m.tensors.begin(), m.tensors.end(),
                   [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
       }},
      {"has shape",
       [&](Manifest& m) {
         TensorEntry& norm = find(m, kNorm);
         norm.shape = {1, norm.shape[0]};
       }},
      {"is stored",
       [&](Manifest& m) { find(m, kK).content = Sha256("other bytes than the base's"); }},
  };
  for (const Case& one : cases) {
    Manifest bad = variant_;
    one.spoil(bad);
    const auto reply = Import(*store_, bad, "bad", nullptr);
    if (std::string_view(one.words) == "is stored") {  // the store's own check of every artifact
      EXPECT_THAT(reply.status().message(), HasSubstr("tensor '" + kK + "'"));
      continue;
    }
    EXPECT_THAT(reply.status().message(), HasSubstr(one.words));
    EXPECT_THAT(reply.status().message(), HasSubstr("variant bad"));
    EXPECT_FALSE(store_->GetRoute("bad"));
  }
  EXPECT_OK(Import(*store_, variant_, "good", nullptr));
  EXPECT_EQ(Import(*store_, base_manifest_, "base", nullptr).status().code(),
            StatusCode::kInvalidArgument);
}

// The measured size of the update is that of the definition.
TEST_F(VariantFileTest, TheUpdateIsMeasuredNotBelieved) {
  Manifest lies = variant_;
  lies.attributes["update"] = "0";
  const auto update =
      CheckVariant(lies, base_manifest_, base_.config_files["config.json"], PartReaderOf(*store_));
  ASSERT_OK(update);
  double moved = 0, origin = 0;
  Commit commit;
  commit.artifacts.push_back(variant_);
  ASSERT_OK(store_->Apply(std::move(commit)));
  const auto source = OpenArtifact(*store_, variant_.digest(), /*decode_f32=*/true);
  ASSERT_OK(source);
  for (const TensorEntry& entry : variant_.tensors) {
    if (entry.codec == Codec::kBase || !entry.alias_of.empty()) continue;
    const auto bytes = (*source)->ReadAll(entry.name);
    const std::vector<float> of_base = base_.Values(entry.name);
    for (size_t i = 0; i < of_base.size(); ++i) {
      const double d =
          LoadWeight(bytes->data(), (*source)->Find(entry.name)->dtype, static_cast<int64_t>(i)) -
          of_base[i];
      moved += d * d;
      origin += static_cast<double>(of_base[i]) * of_base[i];
    }
  }
  EXPECT_GT(*update, 0);
  EXPECT_NEAR(*update, std::sqrt(moved / origin), 1e-9);
}

}  // namespace
}  // namespace stockpot
