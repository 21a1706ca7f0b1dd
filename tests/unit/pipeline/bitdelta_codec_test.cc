// Publish: which codec each tensor gets, the structure checklist of the references, the gate, and
// the bits and scales against a NumPy oracle.
#include "store/bitdelta_codec.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "kernels/bitdelta/signs.h"
#include "store/artifact_source.h"
#include "store/safetensors.h"
#include "store/variant_gate.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

const std::string kQ = "model.layers.0.self_attn.q_proj.weight";
const std::string kDown = "model.layers.1.mlp.down_proj.weight";
const std::string kEmbed = "model.embed_tokens.weight";
const std::string kHead = "lm_head.weight";
const std::string kNorm = "model.norm.weight";

class BitDeltaCodecTest : public ::testing::Test {
 protected:
  Digest StoreBase(const TestModel& model) {
    base_ = StoreModel(*store_, model, ArtifactKind::kBase);
    return base_;
  }
  Digest StoreCheckpoint(const TestModel& model) {
    return StoreModel(*store_, model, ArtifactKind::kCheckpoint, base_, "run", step_++);
  }
  Result<Manifest> Build(const TestModel& checkpoint, PublishCodec codec = PublishCodec::kBitDelta,
                         const PublishOptions& options = {}) {
    return BuildVariant(*store_, StoreCheckpoint(checkpoint), codec, threads_, nullptr, options);
  }
  Digest Commit1(const Manifest& manifest) {
    Commit commit;
    commit.artifacts.push_back(manifest);
    EXPECT_OK(store_->Apply(std::move(commit)));
    return manifest.digest();
  }
  void ExpectRefused(const TestModel& checkpoint, const std::vector<std::string>& words) {
    const Result<Manifest> variant = Build(checkpoint);
    ASSERT_EQ(variant.status().code(), StatusCode::kInvalidArgument) << words[0];
    for (const std::string& word : words) {
      EXPECT_NE(variant.status().message().find(word), std::string::npos)
          << word << " in " << variant.status().ToString();
    }
  }
  // The variant, decoded to float32, against base + alpha * sign from the checkpoint's own deltas.
  void ExpectDecodes(const Manifest& variant, const TestModel& base, const TestModel& checkpoint) {
    const auto source = OpenArtifact(*store_, Commit1(variant), /*decode_f32=*/true);
    ASSERT_OK(source);
    for (const TensorInfo& info : (*source)->tensors()) {
      const auto bytes = (*source)->ReadAll(info.name);
      ASSERT_OK(bytes);
      const TensorEntry* entry = variant.Resolve(info.name);
      const std::vector<float> tuned = checkpoint.Values(info.name);
      if (entry->codec != Codec::kBitDelta) {
        for (size_t i = 0; i < tuned.size(); ++i) {
          ASSERT_EQ(LoadWeight(bytes->data(), info.dtype, static_cast<int64_t>(i)), tuned[i])
              << info.name;
        }
        continue;
      }
      ASSERT_EQ(info.dtype, DType::kF32);
      const std::vector<float> origin = base.Values(info.name);
      const auto cols = static_cast<size_t>(info.shape[1]);
      for (size_t r = 0; r < static_cast<size_t>(info.shape[0]); ++r) {
        double sum = 0;
        for (size_t c = 0; c < cols; ++c)
          sum += std::fabs(tuned[r * cols + c] - origin[r * cols + c]);
        const double alpha = sum / static_cast<double>(cols);
        for (size_t c = 0; c < cols; ++c) {
          const size_t i = r * cols + c;
          const double want = origin[i] + (tuned[i] - origin[i] >= 0 ? alpha : -alpha);
          const float got = LoadWeight(bytes->data(), DType::kF32, static_cast<int64_t>(i));
          ASSERT_NEAR(got, want, 1e-6 * (std::fabs(want) + alpha)) << info.name << " " << i;
        }
      }
    }
  }

  TemporaryFolder temporary_;
  std::unique_ptr<CheckpointStore> store_ = OpenStore(temporary_.path() / "store");
  std::mt19937_64 random_{TestSeed()};
  ThreadPool threads_{2};
  Digest base_;
  int64_t step_ = 1;
};

TEST_F(BitDeltaCodecTest, EveryTensorGetsItsCodec) {
  const TestModel base = TinyLlama(random_);
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  tuned.SetBytes(kDown, DType::kBF16, base.Find(kDown)->shape, *base.ReadAll(kDown));  // frozen
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  EXPECT_EQ(variant->kind, ArtifactKind::kVariant);
  EXPECT_EQ(variant->run, "run");
  EXPECT_EQ(variant->base, base_);
  for (const TensorEntry& entry : variant->tensors) {
    const bool linear = entry.name.find("proj") != std::string::npos;
    const Codec want = entry.name == kDown ? Codec::kBase : linear ? Codec::kBitDelta : Codec::kRaw;
    EXPECT_EQ(entry.codec, want) << entry.name;
    EXPECT_EQ(variant->attributes.contains("tensor/" + entry.name), entry.name != kDown);
  }
  ExpectDecodes(*variant, base, tuned);
  EXPECT_EQ(variant->attributes.at("codec"), "bitdelta");
  EXPECT_EQ(variant->attributes.at("bytes"), std::to_string(variant->stored_bytes()));
  int64_t full = 0;
  for (const TensorInfo& info : tuned.tensors()) full += info.bytes();
  EXPECT_EQ(variant->attributes.at("bytes_full"), std::to_string(full));
  const auto facts = nlohmann::json::parse(variant->attributes.at("tensor/" + kQ));
  EXPECT_GT(facts.at("changed").get<double>(), 0.8);
  EXPECT_NEAR(facts.at("error").get<double>(), 1 - 2 / M_PI, 0.05);  // of a Gaussian update
  EXPECT_EQ(facts.at("bytes").get<int64_t>(), SignBytes(24, 24) + 4 * 24);
  const auto coverage = nlohmann::json::parse(variant->attributes.at("coverage"));
  EXPECT_EQ(coverage.at("block_elements"), coverage.at("block_compressed"));
}

// Where few elements changed they are stored themselves: smaller than one bit a weight, and exact.
TEST_F(BitDeltaCodecTest, FewChangedElementsAreStoredExactly) {
  const TestModel base = TinyLlama(random_);
  StoreBase(base);
  const auto changed = [&](const std::string& name, size_t count) {
    TestModel tuned = base;
    std::vector<std::byte> bytes = *base.ReadAll(name);
    for (size_t i = 0; i < count; ++i) bytes[i * (bytes.size() / 2 / count) * 2] ^= std::byte{1};
    tuned.SetBytes(name, DType::kBF16, base.Find(name)->shape, bytes);
    return tuned;
  };
  // 24 x 24: one bit costs 168 bytes, a changed element 4 beside 96 for the rows: up to 18 sparse is
  // smaller. With 57 one bit would still miss over 0.9 of the update, with 288 half of it.
  for (const auto& [name, count, codec] :
       {std::tuple(kQ, 1, Codec::kSparse), std::tuple(kQ, 18, Codec::kSparse),
        std::tuple(kQ, 19, Codec::kSparse), std::tuple(kQ, 57, Codec::kSparse),
        std::tuple(kQ, 288, Codec::kBitDelta), std::tuple(kEmbed, 3, Codec::kSparse)}) {
    SCOPED_TRACE(name + " " + std::to_string(count));
    const TestModel tuned = changed(name, static_cast<size_t>(count));
    const auto variant = Build(tuned);
    ASSERT_OK(variant);
    const TensorEntry* entry = variant->Find(name);
    EXPECT_EQ(entry->codec, codec);
    EXPECT_FALSE(Judge(GateConfig{}, *MeasuresOf(*variant)).has_value());  // it is served
    ExpectDecodes(*variant, base, tuned);
    if (codec != Codec::kSparse) continue;
    EXPECT_EQ(entry->stored_bytes(), 4 * entry->shape[0] + 4 * count);
    const auto facts = nlohmann::json::parse(variant->attributes.at("tensor/" + name));
    EXPECT_EQ(facts.at("codec"), "sparse");
    const auto dense = Build(tuned, PublishCodec::kDense);
    ASSERT_OK(dense);
    EXPECT_EQ(dense->Find(name)->codec, Codec::kRaw);
  }
}

TEST_F(BitDeltaCodecTest, AnUnchangedCheckpointCostsNothingAndSignOfZeroIsPlus) {
  const TestModel base = TinyLlama(random_);
  StoreBase(base);
  const auto variant = Build(base);
  ASSERT_OK(variant);
  EXPECT_EQ(variant->stored_bytes(), 0);
  TestModel one = base;
  // All of rows 1 to 12, so that one bit is smaller than the elements and misses half; the others'
  // deltas are 0.
  for (int64_t i = 24; i < 13 * 24; ++i) {
    one.SetElement(kQ, i, base.Values(kQ)[static_cast<size_t>(i)] + 1.0);
  }
  const auto row = Build(one);
  ASSERT_OK(row);
  const TensorEntry* entry = row->Find(kQ);
  ASSERT_EQ(entry->codec, Codec::kBitDelta);
  std::vector<std::byte> signs(static_cast<size_t>(SignBytes(24, 24)));
  ASSERT_OK(store_->ReadPart(entry->parts.at("signs"), 0, signs));
  for (const std::byte b : signs) EXPECT_EQ(b, std::byte{0xff});
  std::vector<float> alpha(24);
  ASSERT_OK(
      store_->ReadPart(entry->parts.at("alpha"), 0, std::as_writable_bytes(std::span(alpha))));
  EXPECT_EQ(alpha[0], 0.0f);
  EXPECT_GT(alpha[1], 0.0f);
}

TEST_F(BitDeltaCodecTest, IsDeterministicAndDenseTakesNoNewBytes) {
  const TestModel base = TinyLlama(random_);
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  const Digest checkpoint = StoreCheckpoint(tuned);
  ThreadPool one(1);
  const auto a = BuildVariant(*store_, checkpoint, PublishCodec::kBitDelta, threads_, nullptr);
  const auto b = BuildVariant(*store_, checkpoint, PublishCodec::kBitDelta, one, nullptr);
  ASSERT_OK(a);
  ASSERT_OK(b);
  EXPECT_EQ(a->digest(), b->digest());
  const StoreUsage before = store_->Usage();
  const auto dense = BuildVariant(*store_, checkpoint, PublishCodec::kDense, threads_, nullptr);
  ASSERT_OK(dense);
  const auto source = OpenArtifact(*store_, Commit1(*dense));
  ASSERT_OK(source);
  EXPECT_TRUE(SameTensors(tuned, **source));
  EXPECT_EQ(store_->Usage().chunks, before.chunks);
}

TEST_F(BitDeltaCodecTest, StopsBetweenTensors) {
  const TestModel base = TinyLlama(random_);
  StoreBase(base);
  int calls = 0;
  double last = -1;
  const auto variant = BuildVariant(*store_, StoreCheckpoint(base), PublishCodec::kBitDelta,
                                    threads_, [&](double share) {
                                      EXPECT_GE(share, last);
                                      last = share;
                                      return ++calls == 3 ? Unavailable("stop") : OkStatus();
                                    });
  EXPECT_EQ(variant.status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(calls, 3);
}

// --- structure checklist ---

TEST_F(BitDeltaCodecTest, FusedLayersBiasesAndOddWidths) {
  TestModel base = TinyLlama(random_, {.tied = false});
  const std::string fused = "model.layers.0.attn.qkv.weight";
  const std::string fc1 = "model.layers.0.mlp.fc1.weight";
  const std::string bias = "model.layers.0.attn.qkv.bias";
  base.SetRandom(fused, DType::kBF16, {72, 24}, random_, 0.05);
  base.SetRandom(bias, DType::kBF16, {72}, random_, 0.05);
  base.SetRandom(fc1, DType::kF16, {5, 37}, random_, 0.05);  // 37: prime, padding bits
  base.SetRandom("model.layers.0.thin.weight", DType::kF32, {3, 1}, random_, 0.05);
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  EXPECT_EQ(variant->Find(fused)->codec, Codec::kBitDelta);
  EXPECT_EQ(variant->Find(fc1)->codec, Codec::kBitDelta);
  EXPECT_EQ(variant->Find("model.layers.0.thin.weight")->codec, Codec::kBitDelta);
  EXPECT_EQ(variant->Find(bias)->codec, Codec::kRaw);
  ExpectDecodes(*variant, base, tuned);
}

TEST_F(BitDeltaCodecTest, TransposedExpertsRoutersAndTablesStayExact) {
  TestModel base = TinyLlama(random_);
  const std::string experts = "model.layers.0.mlp.experts.down";
  const std::string router = "model.layers.0.mlp.gate.weight";
  base.SetRandom(experts, DType::kBF16, {4, 8, 24}, random_, 0.05);
  base.SetRandom(router, DType::kBF16, {4, 24}, random_, 0.05);
  base.config_files["config.json"].insert(1, "\"num_local_experts\": 4, ");
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  for (const std::string& name : {experts, router, kEmbed, kNorm}) {
    EXPECT_EQ(variant->Find(name)->codec, Codec::kRaw) << name;
  }
  ExpectDecodes(*variant, base, tuned);
  const auto coverage = nlohmann::json::parse(variant->attributes.at("coverage"));
  EXPECT_GE(coverage.at("other_changed").get<int64_t>(), 4 * 8 * 24);

  TestModel gpt;
  gpt.SetRandom("wte.weight", DType::kF32, {40, 16}, random_, 0.05);
  gpt.SetRandom("h.0.attn.c_attn.weight", DType::kF32, {16, 48}, random_, 0.05);
  gpt.SetRandom("h.0.attn.c_attn.bias", DType::kF32, {48}, random_, 0.05);
  gpt.SetRandom("h.0.attn.c_proj.weight", DType::kF32, {16, 16}, random_, 0.05);
  StoreBase(gpt);
  TestModel tuned_gpt = gpt;
  tuned_gpt.PerturbAll(random_, 0.01);
  const auto exact = Build(tuned_gpt);
  ASSERT_OK(exact);
  for (const TensorEntry& entry : exact->tensors) EXPECT_EQ(entry.codec, Codec::kRaw) << entry.name;
}

TEST_F(BitDeltaCodecTest, AWidthEqualToTheVocabularyIsStillALayer) {
  const TestModel base = TinyLlama(random_, {.vocab = 52});  // = intermediate
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  EXPECT_EQ(variant->Find("model.layers.0.mlp.up_proj.weight")->codec, Codec::kBitDelta);
  EXPECT_EQ(variant->Find(kEmbed)->codec, Codec::kRaw);
}

TEST_F(BitDeltaCodecTest, TiesThatHold) {
  // The base leaves its head out; the trainer's state dict names it, in either direction.
  const TestModel base = TinyLlama(random_);
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  tuned.Tie(kHead, kEmbed);
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  EXPECT_EQ(variant->Find(kHead)->alias_of, kEmbed);
  EXPECT_EQ(variant->Find(kEmbed)->codec, Codec::kRaw);
  EXPECT_FALSE(variant->files.contains("config.json"));
  ExpectDecodes(*variant, base, tuned);

  TestModel turned = base;  // the bytes under the head's name
  turned.SetBytes(kHead, DType::kBF16, base.Find(kEmbed)->shape, *base.ReadAll(kEmbed));
  turned.Tie(kEmbed, kHead);
  const auto frozen = Build(turned);
  ASSERT_OK(frozen);
  EXPECT_EQ(frozen->Find(kEmbed)->codec, Codec::kBase);
  EXPECT_EQ(frozen->Find(kHead)->alias_of, kEmbed);
  EXPECT_EQ(frozen->stored_bytes(), 0);

  TestModel copied = tuned;  // two copies of equal bytes are one tensor
  copied.SetBytes(kHead, DType::kBF16, tuned.Find(kEmbed)->shape, *tuned.ReadAll(kEmbed));
  const auto same = Build(copied);
  ASSERT_OK(same);
  EXPECT_EQ(same->Find(kHead)->alias_of, kEmbed);
  ExpectDecodes(*same, base, copied);
}

TEST_F(BitDeltaCodecTest, TiesThatBreak) {
  for (const bool alias_in_base : {false, true}) {
    TestModel base = TinyLlama(random_);
    if (alias_in_base) base.Tie(kHead, kEmbed);
    StoreBase(base);
    TestModel tuned = base;
    tuned.Remove(kHead);
    tuned.SetRandom(kHead, DType::kBF16, base.Find(kEmbed)->shape, random_, 0.05);
    const auto variant = Build(tuned);
    ASSERT_OK(variant);
    EXPECT_EQ(variant->Find(kHead)->codec, Codec::kRaw);
    EXPECT_EQ(variant->Find(kHead)->alias_of, "");
    EXPECT_EQ(variant->Find(kEmbed)->codec, Codec::kBase);
    ExpectDecodes(*variant, base, tuned);
    // A reader of the config must not tie them again.
    const auto source = OpenArtifact(*store_, variant->digest());
    ASSERT_OK(source);
    const auto config = nlohmann::json::parse(*(*source)->ReadFile("config.json"));
    EXPECT_EQ(config.at("tie_word_embeddings"), false);
    EXPECT_EQ(config.at("vocab_size"), 40);
  }
}

TEST_F(BitDeltaCodecTest, TiesThatAreNew) {
  const TestModel base = TinyLlama(random_, {.tied = false});
  StoreBase(base);
  TestModel alias = base;
  alias.Perturb(kEmbed, random_, 0.01);
  alias.Tie(kHead, kEmbed);
  const auto by_alias = Build(alias);
  ASSERT_OK(by_alias);
  EXPECT_EQ(by_alias->Find(kHead)->alias_of, kEmbed);

  TestModel left_out = base;
  left_out.Remove(kHead);
  left_out.config_files["config.json"] = R"({"tie_word_embeddings": true, "vocab_size": 40})";
  const auto by_config = Build(left_out);
  ASSERT_OK(by_config);
  EXPECT_EQ(by_config->Find(kHead)->alias_of, kEmbed);
  EXPECT_TRUE(by_config->files.contains("config.json"));

  left_out.config_files = base.config_files;  // nothing says that it is tied
  ExpectRefused(left_out, {kHead, "missing"});
}

TEST_F(BitDeltaCodecTest, ConfigOverridesTravelAndEqualOnesDoNot) {
  TestModel base = TinyLlama(random_);
  base.config_files["tokenizer.json"] = "{}";
  StoreBase(base);
  TestModel tuned = base;
  tuned.config_files["config.json"].insert(1, "\"rope_theta\": 5e5, ");
  tuned.config_files["chat_template.jinja"] = "{{ messages }}";
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  EXPECT_EQ(variant->files.size(), 2u);
  const auto source = OpenArtifact(*store_, Commit1(*variant));
  ASSERT_OK(source);
  EXPECT_EQ(*(*source)->ReadFile("config.json"), tuned.config_files["config.json"]);
  EXPECT_EQ(*(*source)->ReadFile("chat_template.jinja"), "{{ messages }}");
  EXPECT_EQ(*(*source)->ReadFile("tokenizer.json"), "{}");  // the base's
}

TEST_F(BitDeltaCodecTest, AnotherFloatTypeThanTheBases) {
  const TestModel base = TinyLlama(random_);
  StoreBase(base);
  TestModel tuned = base;
  for (const TensorInfo& info : base.tensors()) tuned.Cast(info.name, DType::kF32);
  tuned.Perturb(kQ, random_, 0.001);
  tuned.Perturb(kNorm, random_, 0.001);
  const auto variant = Build(tuned);
  ASSERT_OK(variant);
  for (const TensorEntry& entry : variant->tensors) {
    const Codec want = entry.name == kQ      ? Codec::kBitDelta
                       : entry.name == kNorm ? Codec::kRaw
                                             : Codec::kBase;
    EXPECT_EQ(entry.codec, want) << entry.name;
    EXPECT_EQ(entry.dtype, want == Codec::kBase ? DType::kBF16 : DType::kF32) << entry.name;
  }
  ExpectDecodes(*variant, base, tuned);

  TestModel head = tuned;  // an alias follows the dtype its target got
  head.Tie(kHead, kEmbed);
  const auto tied = Build(head);
  ASSERT_OK(tied);
  EXPECT_EQ(tied->Find(kHead)->dtype, DType::kBF16);
}

// --- the gate ---

TEST_F(BitDeltaCodecTest, SaysWhatIsNotFinite) {
  TestModel base = TinyLlama(random_);
  base.SetElement(kQ, 5, std::numeric_limits<float>::infinity());
  base.SetElement(kDown, 7, -3e38);
  StoreBase(base);
  TestModel of_base = base;
  of_base.SetElement(kQ, 5, 0);
  ExpectRefused(of_base, {kQ, "the base's values are not all finite"});
  TestModel far = base;
  far.SetElement(kDown, 7, 3e38);
  ExpectRefused(far, {kDown, "1 of ", "further from the base's than float32 holds"});
}

TEST_F(BitDeltaCodecTest, Refuses) {
  TestModel base = TinyLlama(random_);
  base.SetBytes("model.layers.0.steps", DType::kI64, {2}, std::vector<std::byte>(16));
  StoreBase(base);
  const float inf = std::numeric_limits<float>::infinity();
  for (const std::string& name : {kQ, kNorm, kEmbed}) {
    for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
      TestModel tuned = base;
      tuned.SetElement(name, 5, bad);
      ExpectRefused(tuned, {name, "1 of ", "NaN or infinite"});
    }
  }
  TestModel missing = base;
  missing.Remove(kDown);
  ExpectRefused(missing, {kDown, "missing"});
  TestModel extra = base;
  extra.SetRandom("model.layers.2.mlp.down_proj.weight", DType::kBF16, {24, 52}, random_, 1);
  ExpectRefused(extra, {"model.layers.2.mlp.down_proj.weight", "not in the base"});
  TestModel shape = base;
  shape.SetRandom(kDown, DType::kBF16, {52, 24}, random_, 1);
  ExpectRefused(shape, {kDown, "[52, 24]", "[24, 52]"});
  TestModel integers = base;
  integers.SetBytes("model.layers.0.steps", DType::kI64, {2},
                    std::vector<std::byte>(16, std::byte{1}));
  ExpectRefused(integers, {"model.layers.0.steps", "I64"});
  EXPECT_OK(Build(base));  // unchanged integers are the base's

  const auto of_base = BuildVariant(*store_, base_, PublishCodec::kBitDelta, threads_, nullptr);
  EXPECT_EQ(of_base.status().code(), StatusCode::kInvalidArgument);
  const auto unknown =
      BuildVariant(*store_, Sha256("x"), PublishCodec::kBitDelta, threads_, nullptr);
  EXPECT_EQ(unknown.status().code(), StatusCode::kNotFound);
}

// --- the choice by measurement ---

TEST_F(BitDeltaCodecTest, AutoKeepsToABudgetOrSaysWhatItWouldTake) {
  for (int round = 0; round < 20; ++round) {
    const bool tied = random_() % 2 == 0;
    const TestModel base = TinyLlama(random_, {.vocab = 40 + static_cast<int64_t>(random_() % 60),
                                               .hidden = 24 + static_cast<int64_t>(random_() % 40),
                                               .tied = tied});
    StoreBase(base);
    TestModel tuned = base;
    int64_t full = 0;
    for (const TensorInfo& info : base.tensors()) {
      full += info.bytes();
      if (random_() % 4 != 0) tuned.Perturb(info.name, random_, 1e-3 * (1 + random_() % 20));
    }
    tuned.config_files["chat_template.jinja"] = std::string(random_() % 300, 'x');
    const Digest checkpoint = StoreCheckpoint(tuned);
    const auto build = [&](const PublishOptions& options) {
      return BuildVariant(*store_, checkpoint, PublishCodec::kAuto, threads_, nullptr, options);
    };
    const auto least = build({.residual_rank = 4, .max_bytes = 1});
    ASSERT_EQ(least.status().code(), StatusCode::kInvalidArgument) << least.status().ToString();
    const std::string message(least.status().message());
    const int64_t needed = std::stoll(message.substr(message.find("variant of ") + 11));
    ASSERT_GT(needed, 0) << message;
    EXPECT_FALSE(build({.residual_rank = 4, .max_bytes = needed - 1}).ok());
    double last = 2;
    for (const double share : {0.0, 0.05, 0.1, 0.3, 0.6, 1.0}) {
      const int64_t budget = needed + static_cast<int64_t>(share * static_cast<double>(full));
      const auto variant = build({.residual_rank = 4, .max_bytes = budget});
      ASSERT_OK(variant);
      EXPECT_LE(variant->stored_bytes(), budget);
      if (share == 0) {
        EXPECT_EQ(variant->stored_bytes(), needed);
      }
      const double error = std::stod(variant->attributes.at("update_error"));
      EXPECT_LE(error, last + 1e-9);
      last = error;
    }
    EXPECT_EQ(last, 0);  // a budget of everything loses nothing
  }
}

TEST_F(BitDeltaCodecTest, AutoMeetsAnError) {
  const TestModel base = TinyLlama(random_, {.hidden = 40, .intermediate = 109, .tied = false});
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  const Digest checkpoint = StoreCheckpoint(tuned);
  ThreadPool one(1);
  int64_t last = std::numeric_limits<int64_t>::max();
  for (const double error : {0.0, 0.01, 0.1, 0.3, 0.5, 1.0}) {
    const PublishOptions options{.residual_rank = 4, .max_error = error};
    const auto variant =
        BuildVariant(*store_, checkpoint, PublishCodec::kAuto, threads_, nullptr, options);
    ASSERT_OK(variant);
    EXPECT_LE(std::stod(variant->attributes.at("update_error")), error + 1e-5);
    EXPECT_LE(variant->stored_bytes(), last);
    last = variant->stored_bytes();
    if (error == 0) {
      EXPECT_TRUE(SameTensors(tuned, **OpenArtifact(*store_, Commit1(*variant))));
    }
    const auto again =
        BuildVariant(*store_, checkpoint, PublishCodec::kAuto, one, nullptr, options);
    ASSERT_OK(again);
    EXPECT_EQ(again->digest(), variant->digest());
    // Both limits: what meets the error, or a refusal.
    EXPECT_OK(BuildVariant(*store_, checkpoint, PublishCodec::kAuto, threads_, nullptr,
                           {.residual_rank = 4, .max_bytes = last, .max_error = error}));
    EXPECT_FALSE(BuildVariant(*store_, checkpoint, PublishCodec::kAuto, threads_, nullptr,
                              {.residual_rank = 4, .max_bytes = last - 1, .max_error = error})
                     .ok());
  }
  // Where nothing is asked for one bit is enough here, for embeddings and head too.
  const auto variant = Build(tuned, PublishCodec::kAuto);
  ASSERT_OK(variant);
  EXPECT_EQ(variant->Find(kEmbed)->codec, Codec::kBitDelta);
  EXPECT_EQ(variant->Find(kHead)->codec, Codec::kBitDelta);
  EXPECT_EQ(variant->Find(kNorm)->codec, Codec::kRaw);
  const auto facts = nlohmann::json::parse(variant->attributes.at("tensor/" + kQ));
  EXPECT_GT(facts.at("next").at("bytes"), facts.at("bytes"));
  EXPECT_FALSE(Judge(GateConfig{}, *MeasuresOf(*variant)).has_value());
}

TEST_F(BitDeltaCodecTest, AutoStoresFewChangesThemselves) {
  const TestModel base = TinyLlama(random_, {.hidden = 48, .intermediate = 96});
  StoreBase(base);
  TestModel tuned = base;
  for (const std::string& name : {kQ, kEmbed}) {
    for (int64_t i = 0; i < 40; ++i) tuned.SetElement(name, 37 * i, 0.5);
  }
  tuned.Perturb(kDown, random_, 0.01);
  const auto variant = Build(tuned, PublishCodec::kAuto);
  ASSERT_OK(variant);
  EXPECT_EQ(variant->Find(kQ)->codec, Codec::kSparse);
  EXPECT_EQ(variant->Find(kEmbed)->codec, Codec::kSparse);
  EXPECT_EQ(variant->Find(kDown)->codec, Codec::kBitDelta);
  EXPECT_EQ(variant->Find(kNorm)->codec, Codec::kBase);
}

TEST_F(BitDeltaCodecTest, SparseIsExactWhateverChanged) {
  const TestModel base = TinyLlama(random_);
  StoreBase(base);
  TestModel tuned = base;
  tuned.PerturbAll(random_, 0.01);
  tuned.SetBytes(kQ, DType::kBF16, base.Find(kQ)->shape, *base.ReadAll(kQ));
  for (int64_t i = 0; i < 200; ++i) tuned.SetElement(kQ, i, 1.0);
  const auto variant = Build(tuned, PublishCodec::kSparse);
  ASSERT_OK(variant);
  EXPECT_EQ(variant->Find(kQ)->codec, Codec::kSparse);
  EXPECT_TRUE(SameTensors(tuned, **OpenArtifact(*store_, Commit1(*variant))));
}

// --- an oracle outside our code ---

TEST_F(BitDeltaCodecTest, NumpyFindsTheSameBitsAndScales) {
  struct Case {
    DType base, tuned;
    double sigma;
    PublishCodec codec = PublishCodec::kBitDelta;
    PublishOptions options = {};
  };
  constexpr auto kBF16 = DType::kBF16;
  int index = 0;
  for (const Case& c :
       {Case{kBF16, kBF16, 1e-3}, Case{kBF16, DType::kF32, 1e-4},
        Case{DType::kF32, DType::kF32, 1e-5}, Case{DType::kF16, DType::kF16, 1e-3},
        Case{kBF16, kBF16, 1e-3, PublishCodec::kBitDelta, {.planes = 3}},
        Case{kBF16, DType::kF32, 1e-3, PublishCodec::kBitDelta, {.planes = 8}},
        Case{kBF16, kBF16, 1e-2, PublishCodec::kBitDelta, {.planes = 2, .residual_rank = 5}},
        Case{DType::kF32, DType::kF16, 1e-2, PublishCodec::kAuto,
             {.residual_rank = 8, .max_share = 0.4}},
        Case{kBF16, kBF16, 1e-2, PublishCodec::kAuto, {.max_error = 0.05}}}) {
    const std::filesystem::path folder = temporary_.path() / std::to_string(index++);
    const TestModel base = TinyLlama(random_, {.hidden = 40, .intermediate = 109, .dtype = c.base});
    StoreBase(base);
    TestModel tuned = base;
    for (const TensorInfo& info : base.tensors()) tuned.Cast(info.name, c.tuned);
    tuned.PerturbAll(random_, c.sigma);
    const auto variant = Build(tuned, c.codec, c.options);
    ASSERT_OK(variant);
    const Digest digest = Commit1(*variant);
    ASSERT_OK(WriteModelFolder(base, folder / "base"));
    ASSERT_OK(WriteModelFolder(tuned, folder / "tuned"));
    ASSERT_OK(WriteModelFolder(**OpenArtifact(*store_, digest, true), folder / "decoded_f32"));
    ASSERT_OK(WriteModelFolder(**OpenArtifact(*store_, digest, false), folder / "decoded"));
    nlohmann::json facts;
    for (const auto& [key, value] : variant->attributes) {
      facts[key] = nlohmann::json::parse(value, nullptr, false);
      if (facts[key].is_discarded()) facts[key] = value;
    }
    std::ofstream(folder / "facts.json") << facts;
    for (const TensorEntry& entry : variant->tensors) {
      if (entry.codec != Codec::kBitDelta) continue;
      for (const auto& [role, part] : entry.parts) {
        std::string bytes(static_cast<size_t>(part.bytes), '\0');
        ASSERT_OK(store_->ReadPart(part, 0, std::as_writable_bytes(std::span(bytes))));
        std::string file = entry.name + "." + role;
        std::replace(file.begin(), file.end(), '/', '-');
        std::ofstream(folder / file, std::ios::binary) << bytes;
      }
    }
    const bool anywhere = c.codec == PublishCodec::kAuto;
    EXPECT_TRUE(
        RunPython("bitdelta_oracle.py", {folder.string(), anywhere ? "anywhere" : "layers"}));
  }
}

}  // namespace
}  // namespace stockpot
