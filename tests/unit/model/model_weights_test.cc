// What loading refuses, by name, and what it accepts although it looks odd.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "serve/model/transformer.h"
#include "serve/model/weights.h"
#include "store/artifact_source.h"
#include "tests/unit/model/run_model.h"
#include "tests/unit/model/world.h"

namespace stockpot {
namespace {

using test::World;

constexpr char kEmbedding[] = "model.embed_tokens.weight";
constexpr char kHead[] = "lm_head.weight";
constexpr char kQuery[] = "model.layers.1.self_attn.q_proj.weight";
constexpr char kNorm[] = "model.layers.0.input_layernorm.weight";

Result<std::shared_ptr<const BaseModel>> LoadBase(const TestModel& model) {
  return BaseModel::Load(Digest{}, model);
}

void ExpectRefused(const Status& status, const std::vector<std::string>& words,
                   StatusCode code = StatusCode::kInvalidArgument) {
  EXPECT_EQ(status.code(), code) << status.ToString();
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << "'" << word << "' is not in: " << status.ToString();
  }
}

TEST(BaseModel, RefusesTensorsThatDoNotFit) {
  const TestModel good = test::RandomBase(1);
  ASSERT_OK(LoadBase(good));
  for (const TensorInfo& tensor : good.tensors()) {
    TestModel missing = good;
    missing.Remove(tensor.name);
    ExpectRefused(LoadBase(missing).status(), {"'" + tensor.name + "'", "missing"});

    TestModel wrong_shape = good;
    std::vector<int64_t> shape = tensor.shape;
    ++shape[0];
    std::mt19937_64 random(1);
    wrong_shape.SetRandom(tensor.name, DType::kBF16, shape, random, 0.1);
    ExpectRefused(LoadBase(wrong_shape).status(), {"'" + tensor.name + "'", ShapeText(shape)});

    for (const double value :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      TestModel not_finite = good;
      not_finite.SetElement(tensor.name, tensor.elements() - 1, value);
      ExpectRefused(LoadBase(not_finite).status(), {"'" + tensor.name + "'", "NaN"});
    }
  }
}

TEST(BaseModel, RefusesWhatIsNotOfTheArchitecture) {
  std::mt19937_64 random(1);
  for (const std::string name :
       {"model.layers.2.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight", "score.weight"}) {
    TestModel extra = test::RandomBase(1);
    extra.SetRandom(name, DType::kBF16, {24}, random, 0.1);
    ExpectRefused(LoadBase(extra).status(), {"'" + name + "'", "not part of"});
  }
  TestModel rotary = test::RandomBase(1);
  rotary.SetRandom("model.layers.0.self_attn.rotary_emb.inv_freq", DType::kF32, {4}, random, 0.1);
  EXPECT_OK(LoadBase(rotary));  // old checkpoints carry it; it is computed from the config

  TestModel integers = test::RandomBase(1);
  integers.SetBytes(kNorm, DType::kI16, {24}, std::vector<std::byte>(48));
  ExpectRefused(LoadBase(integers).status(), {kNorm, "I16"});

  TestModel no_config = test::RandomBase(1);
  no_config.config_files.clear();
  EXPECT_EQ(LoadBase(no_config).status().code(), StatusCode::kNotFound);
}

TEST(BaseModel, HeadAndTheConfigMustAgree) {
  std::mt19937_64 random(1);
  TestModel model = test::RandomBase(1, {.tied = true});
  model.Tie(kHead, kEmbedding);
  EXPECT_OK(LoadBase(model));
  const std::vector<float> embeddings = model.Values(kEmbedding);
  model.Remove(kHead);
  model.Set(kHead, DType::kBF16, {40, 24}, {embeddings.begin(), embeddings.end()});
  const auto copied = LoadBase(model);  // the same values written out
  ASSERT_OK(copied);
  EXPECT_EQ((*copied)->resident_bytes(), (*LoadBase(test::RandomBase(1)))->resident_bytes());
  model.SetElement(kHead, 17, 3.0);
  ExpectRefused(LoadBase(model).status(), {kHead, kEmbedding, "ties"});

  TestModel untied = test::RandomBase(1, {.tied = false});
  EXPECT_OK(LoadBase(untied));
  untied.Remove(kHead);
  ExpectRefused(LoadBase(untied).status(), {kHead, "missing"});
}

class VariantModelTest : public ::testing::Test {
 protected:
  Status LoadStatus(Manifest manifest) {
    return VariantModel::Load(world_.base, *world_.store, world_.Add(std::move(manifest))).status();
  }
  std::vector<float> Logits(const VariantModel* variant) {
    ThreadPool threads(1);
    Transformer transformer(world_.base, threads);
    KvPool pool(world_.base->config(), int64_t{1} << 20);
    const std::vector<int32_t> prompt = {3, 1, 4, 1, 5, 9, 2, 6};
    return test::PromptLogits(transformer, pool, variant, prompt);
  }
  // The last token's logits of a prompt for each, in one batch and alone.
  void ExpectSameInOneBatch(const std::vector<const VariantModel*>& variants) {
    ThreadPool threads(2);
    Transformer transformer(world_.base, threads);
    KvPool pool(world_.base->config(), int64_t{1} << 22);
    const std::vector<int32_t> prompt = {3, 1, 4, 1, 5, 9, 2, 36};  // each has these
    std::vector<KvSequence> caches;
    std::vector<BatchSegment> segments;
    caches.reserve(variants.size());
    for (const VariantModel* variant : variants) {
      ASSERT_OK(caches.emplace_back(pool.NewSequence()).Reserve(8));
      segments.push_back({.kv = &caches.back(),
                          .tokens = prompt,
                          .variant = variant,
                          .logits_from = 0,
                          .prompt_rows = 8});
    }
    std::vector<std::vector<float>> logits(variants.size());
    ASSERT_OK(transformer.Forward(segments, [&](int64_t s, int64_t, std::span<const float> row) {
      logits[static_cast<size_t>(s)].insert(logits[static_cast<size_t>(s)].end(), row.begin(),
                                            row.end());
    }));
    for (size_t i = 0; i < variants.size(); ++i) {
      const int64_t vocab = variants[i] == nullptr ? world_.base->config().vocab_size
                                                   : variants[i]->config().vocab_size;
      ASSERT_EQ(std::ssize(logits[i]), 8 * vocab);
      EXPECT_EQ(logits[i], test::PromptLogits(transformer, pool, variants[i], prompt)) << i;
    }
    const std::vector<int32_t> past = {static_cast<int32_t>(variants[1]->config().vocab_size)};
    KvSequence cache = pool.NewSequence();
    ASSERT_OK(cache.Reserve(1));
    const BatchSegment bad{.kv = &cache, .tokens = past, .variant = variants[1]};
    EXPECT_EQ(transformer.Forward({&bad, 1}, {}).code(), StatusCode::kInvalidArgument);
  }
  // Logits of `model` loaded as a base of its own.
  static std::vector<float> LogitsOf(const TestModel& model) {
    const auto base = LoadBase(model).value();
    ThreadPool threads(1);
    Transformer transformer(base, threads);
    KvPool pool(base->config(), int64_t{1} << 20);
    const std::vector<int32_t> prompt = {3, 1, 4, 1, 5, 9, 2, 6};
    return test::PromptLogits(transformer, pool, nullptr, prompt);
  }
  // The variant of a config.json with one field replaced.
  Manifest WithConfig(Manifest manifest, const std::string& from, const std::string& to) {
    std::string text = base_model_.config_files.at("config.json");
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    manifest.files["config.json"] = world_.store->PutBytes(std::as_bytes(std::span(text))).value();
    return manifest;
  }

  TestModel base_model_ = test::RandomBase(1);
  TestModel tuned_ = test::TunedFrom(base_model_, 2);
  World world_{base_model_};
  std::mt19937_64 random_{3};
};

TEST_F(VariantModelTest, ReadsWhatDiffersAndNothingElse) {
  const Digest digest = world_.Publish(tuned_);
  const auto variant = world_.Load(digest);
  ASSERT_NE(variant, nullptr);
  int64_t stored = 0;
  for (const TensorEntry& tensor : world_.ManifestOf(digest).tensors) {
    stored += tensor.stored_bytes();
  }
  EXPECT_EQ(variant->read_bytes(), stored);
  EXPECT_EQ(variant->digest(), digest);

  const auto unchanged = world_.Load(world_.Publish(base_model_));
  ASSERT_NE(unchanged, nullptr);
  EXPECT_EQ(unchanged->read_bytes(), 0);
  EXPECT_EQ(unchanged->resident_bytes(), 0);
  EXPECT_EQ(Logits(unchanged.get()), Logits(nullptr));
}

TEST_F(VariantModelTest, DenseVariantHasTheBitsOfTheFineTunedModel) {
  const auto variant = world_.Load(world_.Publish(tuned_, PublishCodec::kDense));
  ASSERT_NE(variant, nullptr);
  EXPECT_EQ(Logits(variant.get()), LogitsOf(tuned_));
}

TEST_F(VariantModelTest, RefusesAnotherBaseAndOtherKinds) {
  World other(test::RandomBase(7));
  const Digest foreign = other.Publish(test::TunedFrom(test::RandomBase(7), 8));
  const auto status = VariantModel::Load(world_.base, *other.store, foreign).status();
  ExpectRefused(status,
                {"base " + other.base_digest.ShortHex(), "not " + world_.base_digest.ShortHex()});

  const Digest checkpoint =
      StoreModel(*world_.store, tuned_, ArtifactKind::kCheckpoint, world_.base_digest, "run", 99);
  ExpectRefused(VariantModel::Load(world_.base, *world_.store, checkpoint).status(),
                {"checkpoint", "not a variant"});
  ExpectRefused(VariantModel::Load(world_.base, *world_.store, Sha256("nothing")).status(), {},
                StatusCode::kNotFound);
}

TEST_F(VariantModelTest, NeverFallsBackToTheBase) {
  const Manifest good = world_.ManifestOf(world_.Publish(tuned_));
  for (size_t i = 0; i < good.tensors.size(); ++i) {
    Manifest missing = good;
    missing.tensors.erase(missing.tensors.begin() + static_cast<long>(i));
    ExpectRefused(LoadStatus(missing), {"'" + good.tensors[i].name + "'", "missing"});
  }
  Manifest extra = good;
  TensorEntry more = *extra.Find(kNorm);
  more.name = "model.layers.7.input_layernorm.weight";
  extra.tensors.push_back(more);
  std::sort(extra.tensors.begin(), extra.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  ExpectRefused(LoadStatus(extra), {more.name, "not part of"});
}

TEST_F(VariantModelTest, ConfigOverridesAreAppliedOrRefused) {
  const Manifest good = world_.ManifestOf(world_.Publish(tuned_, PublishCodec::kDense));
  TestModel with_theta = tuned_;
  std::string& config = with_theta.config_files["config.json"];
  config.replace(config.find("\"head_dim\""), 0, "\"rope_theta\": 500.0, \"rms_norm_eps\": 0.01, ");
  const auto variant = world_.Load(world_.Add(WithConfig(
      good, "\"head_dim\"", "\"rope_theta\": 500.0, \"rms_norm_eps\": 0.01, \"head_dim\"")));
  ASSERT_NE(variant, nullptr);
  EXPECT_EQ(variant->config().rope_theta, 500.0);
  EXPECT_EQ(Logits(variant.get()), LogitsOf(with_theta));
  EXPECT_NE(Logits(variant.get()), LogitsOf(tuned_));

  const auto own_eos = world_.Load(
      world_.Add(WithConfig(good, "\"head_dim\"", "\"eos_token_id\": 5, \"head_dim\"")));
  ASSERT_NE(own_eos, nullptr);
  EXPECT_EQ(own_eos->config().eos_tokens, std::vector<int32_t>{5});

  ExpectRefused(LoadStatus(WithConfig(good, "\"vocab_size\": 40", "\"vocab_size\": 41")),
                {"model.embed_tokens.weight", "[40, 24]", "[41, 24]"});
  ExpectRefused(
      LoadStatus(WithConfig(good, "\"num_attention_heads\": 3", "\"num_attention_heads\": 2")),
      {"num_attention_heads"});
  ExpectRefused(LoadStatus(WithConfig(good, "LlamaForCausalLM", "Qwen2ForCausalLM")),
                {"Qwen2ForCausalLM"});
  ExpectRefused(
      LoadStatus(WithConfig(good, "\"head_dim\"", "\"hidden_act\": \"gelu\", \"head_dim\"")),
      {"gelu"});
}

// A vocabulary of its own: the logits are those of the model loaded alone, bit for bit, with as
// many of them as it has tokens, also in one batch with the base and with variants of the base's
// size.
TEST_F(VariantModelTest, AVocabularyOfItsOwnIsServedBesideTheBases) {
  const std::string embed = "model.embed_tokens.weight", head = "lm_head.weight";
  const int64_t hidden = base_model_.Find(embed)->shape[1];
  for (const int64_t vocab : {43, 37}) {
    for (const bool tied : {true, false}) {
      TestModel model = tuned_;
      model.SetBytes(embed, DType::kBF16, base_model_.Find(embed)->shape,
                     *base_model_.ReadAll(embed));  // so that the rows of both are stored sparse
      TestModel grown = model;
      grown.SetRandom(embed, DType::kBF16, {vocab, hidden}, random_, 0.05);
      std::vector<std::byte> rows = *grown.ReadAll(embed);
      const std::vector<std::byte> old = *base_model_.ReadAll(embed);
      std::copy_n(old.begin(), std::min(old.size(), rows.size()), rows.begin());
      model.SetBytes(embed, DType::kBF16, {vocab, hidden}, rows);
      if (!tied) model.SetRandom(head, DType::kBF16, {vocab, hidden}, random_, 0.05);
      std::string& config = model.config_files["config.json"];
      const std::string was = "\"vocab_size\": 40";
      config.replace(config.find(was), was.size(), "\"vocab_size\": " + std::to_string(vocab));
      if (!tied) {
        const std::string ties = "\"tie_word_embeddings\": true";
        config.replace(config.find(ties), ties.size(), "\"tie_word_embeddings\": false");
      }
      const auto dense = world_.Load(world_.Publish(model, PublishCodec::kDense));
      ASSERT_NE(dense, nullptr);
      EXPECT_EQ(dense->config().vocab_size, vocab);
      EXPECT_EQ(Logits(dense.get()), LogitsOf(model));
      const Digest digest = world_.Publish(model);
      EXPECT_EQ(world_.ManifestOf(digest).Find(embed)->codec, Codec::kSparse);
      const auto variant = world_.Load(digest);
      ASSERT_NE(variant, nullptr);
      const auto plain = world_.Load(world_.Publish(tuned_));
      ExpectSameInOneBatch({nullptr, variant.get(), plain.get(), dense.get(), variant.get()});
    }
  }
}

TEST_F(VariantModelTest, RefusesNonFiniteValuesOfItsOwn) {
  Manifest manifest = world_.ManifestOf(world_.Publish(tuned_));
  std::vector<float> alpha(24, 0.1f);
  alpha[5] = std::numeric_limits<float>::infinity();
  auto entry = std::find_if(manifest.tensors.begin(), manifest.tensors.end(),
                            [](const TensorEntry& tensor) { return tensor.name == kQuery; });
  ASSERT_EQ(entry->codec, Codec::kBitDelta);
  entry->parts["alpha"] = world_.store->PutBytes(std::as_bytes(std::span(alpha))).value();
  ExpectRefused(LoadStatus(manifest), {kQuery, "alpha"});
}

// Every way in which the head and the embeddings of base and variant may hang together.
TEST_F(VariantModelTest, TiesAreTheVariantsOwn) {
  std::mt19937_64 random(11);
  for (const bool base_tied : {true, false}) {
    const TestModel base_model = test::RandomBase(3, {.tied = base_tied});
    World world(base_model);
    for (const bool tuned_tied : {true, false}) {
      for (const bool embeddings_move : {true, false}) {
        SCOPED_TRACE(::testing::Message() << "base tied " << base_tied << ", tuned tied "
                                          << tuned_tied << ", embeddings move " << embeddings_move);
        TestModel tuned = base_model;
        if (embeddings_move) tuned.Perturb(kEmbedding, random, 0.1);
        tuned.Perturb(kQuery, random, 0.1);
        if (!base_tied) tuned.Remove(kHead);
        if (!tuned_tied) tuned.SetRandom(kHead, DType::kBF16, {40, 24}, random, 0.05);
        std::string& config = tuned.config_files["config.json"];
        const std::string key = "\"tie_word_embeddings\": ";
        const size_t at = config.find(key) + key.size();
        config.replace(at, config.find(',', at) - at, tuned_tied ? "true" : "false");

        const auto variant = world.Load(world.Publish(tuned, PublishCodec::kDense));
        ASSERT_NE(variant, nullptr);
        ThreadPool threads(1);
        Transformer transformer(world.base, threads);
        KvPool pool(world.base->config(), int64_t{1} << 20);
        const std::vector<int32_t> prompt = {3, 1, 4, 1, 5, 9, 2, 6};
        EXPECT_EQ(test::PromptLogits(transformer, pool, variant.get(), prompt), LogitsOf(tuned));
      }
    }
  }
}

TEST_F(VariantModelTest, TiedConfigWithAHeadOfItsOwnIsRefused) {
  Manifest manifest = world_.ManifestOf(world_.Publish(tuned_));
  TensorEntry head = *manifest.Resolve(kEmbedding);
  head.name = kHead;
  std::vector<uint16_t> values(40 * 24, BF16FromFloat(0.5f));
  head.codec = Codec::kRaw;
  head.parts = {{"data", world_.store->PutBytes(std::as_bytes(std::span(values))).value()}};
  std::erase_if(manifest.tensors, [](const TensorEntry& tensor) { return tensor.name == kHead; });
  manifest.tensors.insert(manifest.tensors.begin(), head);  // "lm_head" sorts before "model"
  ExpectRefused(LoadStatus(manifest), {kHead, "ties"});
}

// Planes and residuals beside the resident base against a model of the decoded weights, in every
// tie of head and embeddings, which have planes too.
TEST_F(VariantModelTest, PlanesAndResidualsAreTheDecodedWeights) {
  const std::pair<PublishCodec, PublishOptions> ways[] = {
      {PublishCodec::kBitDelta, {.planes = 3}},
      {PublishCodec::kBitDelta, {.planes = 2, .residual_rank = 5}},
      {PublishCodec::kAuto, {}},
      {PublishCodec::kAuto, {.residual_rank = 4, .max_error = 0.1}}};
  for (const bool base_tied : {true, false}) {
    const TestModel base_model = test::RandomBase(3, {.tied = base_tied});
    World world(base_model);
    for (const bool tuned_tied : {true, false}) {
      TestModel tuned = test::TunedFrom(base_model, 12);
      if (tuned_tied && !base_tied) tuned.Remove(kHead);
      std::mt19937_64 random(4);
      if (!tuned_tied && base_tied) tuned.SetRandom(kHead, DType::kBF16, {40, 24}, random, 0.05);
      std::string& config = tuned.config_files["config.json"];
      const std::string key = "\"tie_word_embeddings\": ";
      const size_t at = config.find(key) + key.size();
      config.replace(at, config.find(',', at) - at, tuned_tied ? "true" : "false");
      for (const auto& [codec, options] : ways) {
        SCOPED_TRACE(::testing::Message()
                     << "base tied " << base_tied << ", tuned tied " << tuned_tied << ", "
                     << PublishCodecName(codec) << ", planes " << options.planes);
        const Digest digest = world.Publish(tuned, codec, options);
        const Manifest manifest = world.ManifestOf(digest);
        EXPECT_EQ(manifest.Find(kEmbedding)->codec,
                  codec == PublishCodec::kAuto ? Codec::kBitDelta : Codec::kRaw);
        const auto variant = world.Load(digest);
        ASSERT_NE(variant, nullptr);
        ThreadPool threads(1);
        Transformer transformer(world.base, threads);
        KvPool pool(world.base->config(), int64_t{1} << 20);
        const std::vector<int32_t> prompt = {3, 1, 4, 1, 5, 9, 2, 6};
        const auto decoded = OpenArtifact(*world.store, digest, /*decode_f32=*/true);
        ASSERT_OK(decoded);
        const auto whole = BaseModel::Load(Digest{}, **decoded);
        ASSERT_OK(whole);
        Transformer of_whole(*whole, threads);
        KvPool its_pool((*whole)->config(), int64_t{1} << 20);
        const std::vector<float> want = test::PromptLogits(of_whole, its_pool, nullptr, prompt);
        double norm = 0;
        for (const float logit : want) norm = std::max<double>(norm, std::fabs(logit));
        for (const int64_t prompt_rows : {0, 8}) {  // apart, and folded
          const std::vector<float> got =
              test::PromptLogits(transformer, pool, variant.get(), prompt, prompt_rows);
          ASSERT_EQ(got.size(), want.size());
          for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-5 * norm);
        }
        const std::vector<float> base_logits =
            test::PromptLogits(transformer, pool, nullptr, prompt);
        EXPECT_GT(std::fabs(base_logits[0] - want[0]), 1e-3 * norm);  // not the base's by mistake
      }
    }
  }
}

}  // namespace
}  // namespace stockpot
