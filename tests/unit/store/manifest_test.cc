// Manifests: what is accepted, what is refused and with which words, and that no input does worse.
#include "store/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <random>

#include "kernels/bitdelta/signs.h"
#include "store/names.h"

namespace stockpot {
namespace {

using ::testing::HasSubstr;

Part MakePart(int64_t bytes) {
  Part part{.bytes = bytes};
  for (int64_t i = 0; i < ChunkCount(bytes); ++i) part.chunks.push_back(Sha256(std::to_string(i)));
  return part;
}

TensorEntry RawTensor(const std::string& name, DType dtype, std::vector<int64_t> shape) {
  TensorEntry tensor{.name = name, .dtype = dtype, .shape = std::move(shape)};
  tensor.parts["data"] = MakePart(tensor.logical_bytes());
  return tensor;
}

// One tensor of every codec, an alias, a scalar, an empty one, and one of several chunks.
Manifest FullManifest() {
  Manifest m;
  m.kind = ArtifactKind::kVariant;
  m.base = Sha256("base");
  m.run = "demo-1.5_x";
  m.step = 40;
  m.tensors.push_back(RawTensor("a.empty", DType::kF32, {0, 7}));
  m.tensors.push_back({.name = "b.same", .dtype = DType::kBF16, .shape = {3, 5}});
  m.tensors.back().codec = Codec::kBase;
  m.tensors.back().content = Sha256("content");
  m.tensors.push_back({.name = "c.delta", .dtype = DType::kBF16, .shape = {3, 13}});
  m.tensors.back().codec = Codec::kBitDelta;
  m.tensors.back().parts["signs"] = MakePart(SignBytes(3, 13));
  m.tensors.back().parts["alpha"] = MakePart(12);
  m.tensors.push_back({.name = "c.planes", .dtype = DType::kF16, .shape = {3, 13}});
  m.tensors.back().codec = Codec::kBitDelta;
  for (const char* plane : {"", "/1", "/2"}) {
    m.tensors.back().parts[std::string("signs") + plane] = MakePart(SignBytes(3, 13));
    m.tensors.back().parts[std::string("alpha") + plane] = MakePart(12);
  }
  m.tensors.back().parts["residual_a"] = MakePart(2 * 2 * 13);  // of rank 2
  m.tensors.back().parts["residual_b"] = MakePart(2 * 2 * 3);
  m.tensors.push_back(RawTensor("d.large", DType::kF64, {3, 500'000}));
  m.tensors.push_back(
      {.name = "e.tied", .dtype = DType::kF64, .shape = {3, 500'000}, .alias_of = "d.large"});
  m.tensors.push_back(RawTensor("f.scalar", DType::kI64, {}));
  m.tensors.push_back(RawTensor("g.\xc3\xa4\xf0\x9f\x8d\xb2\"\\", DType::kU8, {1}));
  m.files["config.json"] = MakePart(704);
  m.files["tokenizer.json"] = MakePart(kChunkBytes + 1);
  m.attributes["note"] = "line\nbreak, \"quote\", \x01";
  m.attributes["tensor/c.delta"] = "{\"error\":0.5}";
  return m;
}

TEST(ManifestTest, RoundTripsAndIsCanonical) {
  const Manifest m = FullManifest();
  ASSERT_TRUE(m.Validate().ok()) << m.Validate().ToString();
  const std::string json = m.ToJson();
  const Result<Manifest> read = Manifest::FromJson(json);
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  EXPECT_EQ(read->ToJson(), json);
  EXPECT_EQ(read->digest(), m.digest());
  EXPECT_EQ(read->Resolve("e.tied")->name, "d.large");
  EXPECT_EQ(read->Find("nothing"), nullptr);
  EXPECT_EQ(m.logical_bytes(), 30 + 2 * 78 + 12'000'000 + 8 + 1);  // e.tied is d.large
  EXPECT_EQ(m.stored_bytes(), 6 + 12 + 3 * (6 + 12) + 52 + 12 + 12'000'000 + 8 + 1 + 704 + kChunkBytes + 1);
}

// A checkpoint with a tensor of 3 x 5 in three pieces.
Manifest CutManifest() {
  Manifest m;
  m.base = Sha256("base");
  m.run = "demo";
  m.step = 1;
  TensorEntry tensor{.name = "w", .dtype = DType::kBF16, .shape = {3, 5}};
  tensor.pieces = {{{0, 0}, {1, 5}}, {{1, 0}, {2, 2}}, {{1, 2}, {2, 3}}};
  for (size_t i = 0; i < 3; ++i) {
    tensor.parts[PieceRole(i)] = MakePart(tensor.pieces[i].elements() * 2);
  }
  m.tensors.push_back(tensor);
  return m;
}

TEST(ManifestTest, PiecesRoundTripInTheirOneSpelling) {
  const Manifest m = CutManifest();
  ASSERT_TRUE(m.Validate().ok()) << m.Validate().ToString();
  const std::string json = m.ToJson();
  EXPECT_THAT(json, HasSubstr("\"pieces\":[{\"offsets\":[0,0],\"shape\":[1,5]},"
                              "{\"offsets\":[1,0],\"shape\":[2,2]},"
                              "{\"offsets\":[1,2],\"shape\":[2,3]}],\"shape\":[3,5]}"));
  const Result<Manifest> read = Manifest::FromJson(json);
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  EXPECT_EQ(read->ToJson(), json);
  EXPECT_EQ(read->tensors[0].pieces, m.tensors[0].pieces);
  EXPECT_EQ(m.stored_bytes(), 30);
  EXPECT_EQ(m.logical_bytes(), 30);
}

TEST(ManifestTest, RefusesPiecesThatAreNotTheTensor) {
  struct Case {
    const char* words;
    std::function<void(Manifest&)> spoil;
  };
  const std::vector<Case> cases = {
      {"[1:3, 4:5] is in no piece",
       [](Manifest& m) {
         m.tensors[0].pieces[2].shape[1] = 2;
         m.tensors[0].parts["data/2"] = MakePart(8);
       }},
      {"[1:2, 0:2] is in two pieces",
       [](Manifest& m) {
         m.tensors[0].pieces[0].shape = {2, 5};
         m.tensors[0].parts["data/0"] = MakePart(20);
       }},
      {"out of order",
       [](Manifest& m) {
         std::swap(m.tensors[0].pieces[1], m.tensors[0].pieces[2]);
         std::swap(m.tensors[0].parts["data/1"], m.tensors[0].parts["data/2"]);
       }},
      {"out of order", [](Manifest& m) { m.tensors[0].pieces[1] = m.tensors[0].pieces[0]; }},
      {"1 pieces",
       [](Manifest& m) {
         m.tensors[0].pieces = {WholeBox({3, 5})};
         m.tensors[0].parts = {{"data/0", MakePart(30)}};
       }},
      {"3 pieces with 2 parts", [](Manifest& m) { m.tensors[0].parts.erase("data/1"); }},
      {"'data/1' is missing",
       [](Manifest& m) {
         m.tensors[0].parts["data"] = m.tensors[0].parts["data/1"];
         m.tensors[0].parts.erase("data/1");
       }},
      {"shape and dtype make", [](Manifest& m) { m.tensors[0].parts["data/1"] = MakePart(7); }},
      {"without elements", [](Manifest& m) { m.tensors[0].pieces[0].shape[0] = 0; }},
      {"the tensor has 3", [](Manifest& m) { m.tensors[0].pieces[0].shape[0] = 4; }},
      {"from -1", [](Manifest& m) { m.tensors[0].pieces[0].offsets[0] = -1; }},
      {"another rank", [](Manifest& m) { m.tensors[0].pieces[0].shape.push_back(1); }},
      {"rank 2 with offsets of rank 1",
       [](Manifest& m) { m.tensors[0].pieces[0].offsets.pop_back(); }},
      {"stored whole",
       [](Manifest& m) {
         m.kind = ArtifactKind::kBase;
         m.base.reset();
         m.run.clear();
         m.step = -1;
       }},
      {"not raw",
       [](Manifest& m) {
         m.tensors[0].codec = Codec::kBase;
         m.tensors[0].content = Sha256("x");
       }},
      {"an alias has no parts",
       [](Manifest& m) {
         m.tensors[0].alias_of = "v";
         m.tensors[0].parts.clear();
       }},
      {"cut in too many dimensions",
       [](Manifest& m) {
         m.tensors[0].shape.assign(8, 4);
         m.tensors[0].pieces.assign(20'000, {std::vector<int64_t>(8), std::vector<int64_t>(8, 1)});
       }},
  };
  for (const Case& one : cases) {
    Manifest m = CutManifest();
    one.spoil(m);
    const Status status = m.Validate();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << one.words;
    EXPECT_THAT(status.message(), HasSubstr(one.words));
    EXPECT_FALSE(Manifest::FromJson(m.ToJson()).ok()) << one.words;
  }
}

// The spelling is the format: a change of it changes every digest.
TEST(ManifestTest, TheCanonicalFormIsFixed) {
  Manifest m;
  m.kind = ArtifactKind::kBase;
  m.tensors.push_back(RawTensor("w", DType::kBF16, {2, 3}));
  m.files["config.json"] = MakePart(2);
  const std::string chunk = Sha256("0").Hex();
  EXPECT_EQ(
      m.ToJson(),
      "{\"attributes\":{},\"files\":{\"config.json\":{\"bytes\":2,\"chunks\":[\"" + chunk +
          "\"]}},\"format\":1,\"kind\":\"base\",\"tensors\":[{\"codec\":\"raw\","
          "\"dtype\":\"BF16\",\"name\":\"w\",\"parts\":{\"data\":{\"bytes\":12,\"chunks\":[\"" +
          chunk + "\"]}},\"shape\":[2,3]}]}");
}

TEST(ManifestTest, RefusesWhatIsInvalidAndNamesTheRule) {
  struct Case {
    const char* words;  // of the message
    std::function<void(Manifest&)> spoil;
  };
  const auto tensor = [](Manifest& m, std::string_view name) -> TensorEntry& {
    return const_cast<TensorEntry&>(*m.Find(name));
  };
  const std::vector<Case> cases = {
      {"no base", [](Manifest& m) { m.base.reset(); }},
      {"zero base", [](Manifest& m) { m.base = Digest{}; }},
      {"no base, has a base", [](Manifest& m) { m.kind = ArtifactKind::kBase; }},
      {"run and step", [](Manifest& m) { m.step = -1; }},
      {"run and step", [](Manifest& m) { m.run.clear(); }},
      {"run and step", [](Manifest& m) { m.step = -2; }},
      {"has a run",
       [](Manifest& m) {
         m.kind = ArtifactKind::kMerge;
         m.run.clear();
         m.step = -1;
       }},
      {"run name", [](Manifest& m) { m.run = "a@b"; }},
      {"twice or out of order", [](Manifest& m) { std::swap(m.tensors[0], m.tensors[1]); }},
      {"twice or out of order", [](Manifest& m) { m.tensors.push_back(m.tensors.back()); }},
      {"name of tensor 0", [](Manifest& m) { m.tensors[0].name = ""; }},
      {"name of tensor 0", [](Manifest& m) { m.tensors[0].name = std::string(513, 'a'); }},
      {"name of tensor 0", [](Manifest& m) { m.tensors[0].name = "a\xff"; }},
      {"name of tensor 0", [](Manifest& m) { m.tensors[0].name = std::string("a\0b", 3); }},
      {"'a.empty'",
       [](Manifest& m) {
         m.tensors[0].shape = {0, -1};
       }},
      {"larger than 4 TiB",
       [](Manifest& m) {
         m.tensors[0].shape = {0, int64_t{1} << 40, int64_t{1} << 40};
       }},
      {"rank", [](Manifest& m) { m.tensors[0].shape.assign(9, 1); }},
      {"shape and dtype make", [&](Manifest& m) { tensor(m, "d.large").shape[0] = 4; }},
      {"is missing",
       [&](Manifest& m) {
         auto& parts = tensor(m, "f.scalar").parts;
         parts["dota"] = parts["data"];
         parts.erase("data");
       }},
      {"1 parts, not 2", [&](Manifest& m) { tensor(m, "f.scalar").parts["more"] = MakePart(1); }},
      {"chunks, not", [&](Manifest& m) { tensor(m, "d.large").parts["data"].chunks.pop_back(); }},
      {"chunks, not",
       [&](Manifest& m) { tensor(m, "f.scalar").parts["data"].chunks.push_back(Sha256("x")); }},
      {"zero chunk",
       [&](Manifest& m) { tensor(m, "f.scalar").parts["data"].chunks[0] = Digest{}; }},
      {"'content'", [&](Manifest& m) { tensor(m, "b.same").content = Digest{}; }},
      {"'content'", [&](Manifest& m) { tensor(m, "f.scalar").content = Sha256("x"); }},
      {"0 parts", [&](Manifest& m) { tensor(m, "b.same").parts["data"] = MakePart(30); }},
      {"not 2-D", [&](Manifest& m) { tensor(m, "c.delta").shape = {39}; }},
      {"not float", [&](Manifest& m) { tensor(m, "c.delta").dtype = DType::kI32; }},
      {"'signs'", [&](Manifest& m) { tensor(m, "c.delta").parts["signs"] = MakePart(7); }},
      {"'alpha'", [&](Manifest& m) { tensor(m, "c.delta").parts["alpha"] = MakePart(16); }},
      {"'alpha/1' is missing", [&](Manifest& m) { tensor(m, "c.planes").parts.erase("alpha/1"); }},
      {"7 parts, of which 4",
       [&](Manifest& m) { tensor(m, "c.planes").parts.erase("signs/1"); }},
      {"'signs/2'", [&](Manifest& m) { tensor(m, "c.planes").parts["signs/2"] = MakePart(7); }},
      {"parts, of which",
       [&](Manifest& m) {
         for (int plane = 1; plane < 10; ++plane) {  // over kMaxSignPlanes
           tensor(m, "c.delta").parts["signs/" + std::to_string(plane)] = MakePart(6);
           tensor(m, "c.delta").parts["alpha/" + std::to_string(plane)] = MakePart(12);
         }
       }},
      {"'residual_b'", [&](Manifest& m) { tensor(m, "c.planes").parts.erase("residual_b"); }},
      {"rank 0", [&](Manifest& m) { tensor(m, "c.planes").parts.erase("residual_a"); }},
      {"'residual_a'",
       [&](Manifest& m) { tensor(m, "c.planes").parts["residual_a"] = MakePart(53); }},
      {"rank 4",
       [&](Manifest& m) { tensor(m, "c.planes").parts["residual_a"] = MakePart(2 * 4 * 13); }},
      {"zero chunk",
       [&](Manifest& m) { tensor(m, "c.planes").parts["alpha/2"].chunks[0] = Digest{}; }},
      {"chunks, not",
       [&](Manifest& m) { tensor(m, "c.planes").parts["residual_a"].chunks.clear(); }},
      {"unknown tensor", [&](Manifest& m) { tensor(m, "e.tied").alias_of = "zzz"; }},
      {"alias of an alias", [&](Manifest& m) { tensor(m, "e.tied").alias_of = "e.tied"; }},
      {"another dtype or shape", [&](Manifest& m) { tensor(m, "e.tied").alias_of = "f.scalar"; }},
      {"an alias has no parts",
       [&](Manifest& m) { tensor(m, "e.tied").parts["data"] = MakePart(1); }},
      {"file name", [](Manifest& m) { m.files["../x"] = MakePart(1); }},
      {"file name", [](Manifest& m) { m.files[".."] = MakePart(1); }},
      {"file name", [](Manifest& m) { m.files["a/b"] = MakePart(1); }},
      {"over the limit", [](Manifest& m) { m.files["big"] = MakePart(kMaxConfigFileBytes + 1); }},
      {"files",
       [](Manifest& m) {
         for (int i = 0; i < 64; ++i) m.files["f" + std::to_string(i)] = MakePart(1);
       }},
      {"attribute", [](Manifest& m) { m.attributes[""] = "x"; }},
      {"attribute", [](Manifest& m) { m.attributes["k"] = "\xc0\x80"; }},
      {"attribute", [](Manifest& m) { m.attributes["k"] = std::string(65537, 'x'); }},
  };
  for (const Case& one : cases) {
    Manifest m = FullManifest();
    one.spoil(m);
    const Status status = m.Validate();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << one.words;
    EXPECT_THAT(status.message(), HasSubstr(one.words));
    // JSON cannot carry some of these (bytes that are not UTF-8): then it spells another manifest.
    const Result<Manifest> read = Manifest::FromJson(m.ToJson());
    EXPECT_TRUE(!read.ok() || read->Validate().ok()) << one.words;
  }
  Manifest without_base = FullManifest();
  without_base.kind = ArtifactKind::kBase;
  without_base.base.reset();
  without_base.run.clear();
  without_base.step = -1;
  EXPECT_THAT(without_base.Validate().message(), HasSubstr("needs an artifact with a base"));
}

std::string Replace(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

// A vocabulary that grew: the rows behind the base's are a part of their own.
TEST(ManifestTest, RowsBehindTheBasesAreWholeAndTheTensors) {
  const auto grown = [](int64_t behind_bytes) {
    Manifest m;
    m.kind = ArtifactKind::kVariant;
    m.base = Sha256("base");
    TensorEntry table{.name = "t", .dtype = DType::kBF16, .shape = {10, 3}};
    table.codec = Codec::kSparse;
    table.parts["rows"] = MakePart(behind_bytes);
    table.parts["counts"] = MakePart(4 * 8);
    table.parts["columns"] = MakePart(2 * 5);
    table.parts["values"] = MakePart(2 * 5);
    m.tensors.push_back(table);
    return m;
  };
  const Manifest m = grown(12);
  ASSERT_TRUE(m.Validate().ok()) << m.Validate().ToString();
  EXPECT_EQ(Manifest::FromJson(m.ToJson())->ToJson(), m.ToJson());
  EXPECT_EQ(m.tensors[0].overlap_rows(), 8);
  EXPECT_EQ(m.logical_bytes(), 60);
  for (const int64_t wrong : {0, 6, 13, 18, 60, 66}) {
    EXPECT_THAT(grown(wrong).Validate().message(), HasSubstr("tensor 't'")) << wrong;
  }
  Manifest wide = m;
  wide.tensors[0].shape = {10, 0};
  EXPECT_THAT(wide.Validate().message(), HasSubstr("'rows'"));
  Manifest dense = m;
  dense.tensors[0].parts["columns"] = dense.tensors[0].parts["values"] = MakePart(2 * 25);
  EXPECT_THAT(dense.Validate().message(), HasSubstr("more changed elements"));
  TensorEntry base{.name = "t", .dtype = DType::kBF16, .shape = {8, 3}};
  EXPECT_TRUE(FitsOver(m.tensors[0], base));
  base.shape = {9, 3};
  EXPECT_FALSE(FitsOver(m.tensors[0], base)) << "a row of the base's would be nowhere";
  base.shape = {8, 4};
  EXPECT_FALSE(FitsOver(m.tensors[0], base));
}

TEST(ManifestTest, RefusesEveryOtherSpelling) {
  const std::string json = FullManifest().ToJson();
  const std::vector<std::string> cases = {
      "",
      "null",
      "[]",
      "{}",
      "7",
      "\"x\"",
      json + " ",
      json + "{}",
      " " + json,
      json.substr(0, json.size() - 1),
      Replace(json, "\"format\":1", "\"format\":2"),
      Replace(json, "\"format\":1", "\"format\":1.0"),
      Replace(json, "\"format\":1", "\"format\":1e0"),
      Replace(json, "\"format\":1", "\"format\":18446744073709551617"),
      Replace(json, "\"format\":1", "\"format\":9223372036854775808"),
      Replace(json, "\"format\":1", "\"format\":\"1\""),
      Replace(json, "\"format\":1", "\"format\":true"),
      Replace(json, "\"format\":1", "\"format\":null"),
      Replace(json, "\"format\":1,", "\"format\":1,\"format\":1,"),
      Replace(json, "\"format\":1,", ""),
      Replace(json, "\"format\":1,", "\"format\":1,\"other\":1,"),
      Replace(json, "\"format\":1,", "\"format\":1, "),
      Replace(json, "\"kind\":\"variant\"", "\"kind\":\"Variant\""),
      Replace(json, "\"kind\":\"variant\"", "\"kind\":{}"),
      Replace(json, "\"codec\":\"raw\"", "\"codec\":\"zip\""),
      Replace(json, "\"dtype\":\"F32\"", "\"dtype\":\"F31\""),
      Replace(json, "\"shape\":[0,7]", "\"shape\":[0,7,[]]"),
      Replace(json, "\"shape\":[0,7]", "\"shape\":[00,7]"),
      Replace(json, "\"shape\":[0,7]", "\"shape\":[-0,7]"),
      Replace(json, "\"shape\":[0,7]", "\"shape\":{}"),
      Replace(json, "\"tensors\":[", "\"tensors\":[{},"),
      Replace(json, "\"shape\":[0,7]", "\"pieces\":[],\"shape\":[0,7]"),
      Replace(json, "\"shape\":[0,7]", "\"pieces\":[[]],\"shape\":[0,7]"),
      Replace(json, "\"shape\":[0,7]", "\"pieces\":[{\"offsets\":[[0]]}],\"shape\":[0,7]"),
      Replace(json, "\"shape\":[0,7]", "\"pieces\":[{\"size\":[0]}],\"shape\":[0,7]"),
      Replace(json, "\"shape\":[0,7]", "\"pieces\":[{\"shape\":[0]}],\"shape\":[0,7]"),
      Replace(json, "\"tensors\":[", "\"tensors\":[1,"),
      Replace(json, "\"files\":{", "\"files\":{\"x\":1,"),
      Replace(json, "\"bytes\":704", "\"bytes\":-704"),
      Replace(json, "\"step\":40", "\"step\":040"),
      Replace(json, "\"run\":\"demo-1.5_x\"", "\"run\":\"demo-1.5\\u005fx\""),
      Replace(json, Sha256("base").Hex(), "A" + Sha256("base").Hex().substr(1)),
      Replace(json, Sha256("base").Hex(), Sha256("base").Hex().substr(1)),
      std::string(100'000, '['),
      "{\"attributes\":" + std::string(100'000, '{'),
      "{\"tensors\":" + std::string(100'000, '['),
      std::string("{\"a\":\"\xff\"}"),
  };
  for (const std::string& text : cases) {
    const Result<Manifest> read = Manifest::FromJson(text);
    EXPECT_EQ(read.status().code(), StatusCode::kInvalidArgument) << text.substr(0, 200);
  }
}

// Random edits of a valid manifest: either refused, or a manifest whose canonical form is the
// input.
TEST(ManifestTest, MutationsNeverDoWorseThanRefusal) {
  const char* given = std::getenv("STOCKPOT_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 20240607;
  RecordProperty("seed", std::to_string(seed));
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  std::mt19937_64 random(seed);
  const std::string inputs[] = {FullManifest().ToJson(), CutManifest().ToJson()};
  constexpr std::string_view kAlphabet = "{}[]\",:0123456789-.eE\\untrfalse \xff\xc3\x01";
  int accepted = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text = inputs[i % 2];
    const int edits = 1 + static_cast<int>(random() % 4);
    for (int e = 0; e < edits; ++e) {
      const size_t at = random() % text.size();
      switch (random() % 5) {
        case 0:
          text[at] = kAlphabet[random() % kAlphabet.size()];
          break;
        case 1:
          text.erase(at, 1 + random() % 40);
          break;
        case 2:
          text.insert(at, 1, kAlphabet[random() % kAlphabet.size()]);
          break;
        case 3:
          text.insert(at, text.substr(random() % text.size(), random() % 200));
          break;
        case 4:
          text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
          break;
      }
      if (text.empty()) text = "x";
    }
    const Result<Manifest> read = Manifest::FromJson(text);
    if (!read.ok()) {
      ASSERT_EQ(read.status().code(), StatusCode::kInvalidArgument);
      continue;
    }
    ++accepted;
    ASSERT_TRUE(read->Validate().ok());
    ASSERT_EQ(read->ToJson(), text);
  }
  std::printf("%d of 20000 mutations were valid manifests\n", accepted);
}

TEST(NamesTest, Utf8AndNames) {
  EXPECT_TRUE(IsUtf8("plain \xc3\xa4 \xe2\x82\xac \xf0\x9f\x8d\xb2 \xf4\x8f\xbf\xbf"));
  for (const std::string_view bad :
       {"\x80", "\xc3", "\xc0\x80", "\xc1\xbf", "\xe0\x80\x80", "\xe0\x9f\xbf", "\xed\xa0\x80",
        "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xe2\x82", "\xff"}) {
    EXPECT_FALSE(IsUtf8(bad));
  }
  for (const std::string_view good : {"a", "0", "run-1.5_x", "A.b"}) {
    EXPECT_TRUE(IsValidRunName(good)) << good;
  }
  EXPECT_TRUE(IsValidRunName(std::string(128, 'a')));
  EXPECT_FALSE(IsValidRunName(std::string(129, 'a')));
  for (const std::string_view bad : {"", ".a", "-a", "_a", "a b", "a@b", "a/b", "\xc3\xa4", ".."}) {
    EXPECT_FALSE(IsValidRunName(bad)) << bad;
  }
  EXPECT_TRUE(IsValidRouteName("demo@latest"));
  EXPECT_TRUE(IsValidRouteName("\xc3\xa4 b"));
  EXPECT_FALSE(IsValidRouteName("a\nb"));
  EXPECT_FALSE(IsValidRouteName("a\x7f"));
  EXPECT_FALSE(IsValidRouteName(std::string(257, 'a')));
}

}  // namespace
}  // namespace stockpot
