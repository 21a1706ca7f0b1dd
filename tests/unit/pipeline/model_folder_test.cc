// Folders: what is opened, what is refused, and the round trip with Python's safetensors and
// transformers as the judges.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "store/safetensors.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

namespace fs = std::filesystem;

void WriteText(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string ReadText(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

class ModelFolderTest : public ::testing::Test {
 protected:
  fs::path Folder(const std::string& name) const { return temporary_.path() / name; }

  // A valid folder with two shards.
  fs::path Sharded(const std::string& name) {
    EXPECT_OK(WriteModelFolder(model_, Folder(name), 8000));
    EXPECT_TRUE(fs::exists(Folder(name) / "model.safetensors.index.json"));
    return Folder(name);
  }

  void ExpectRefused(const fs::path& folder, const std::string& message) {
    const auto source = OpenModelFolder(folder);
    ASSERT_FALSE(source.ok()) << message;
    EXPECT_NE(source.status().message().find(message), std::string::npos)
        << source.status().ToString();
    EXPECT_NE(source.status().message().find(folder.string()), std::string::npos)
        << "names no file: " << source.status().ToString();
  }

  TemporaryFolder temporary_;
  std::mt19937_64 random_{TestSeed()};
  TestModel model_ = TinyLlama(random_);
};

TEST_F(ModelFolderTest, SingleFileRoundTrip) {
  model_.config_files["tokenizer.json"] = "{\"version\": \"1.0\"}";
  ASSERT_OK(WriteModelFolder(model_, Folder("a")));
  const auto source = OpenModelFolder(Folder("a"));
  ASSERT_OK(source);
  EXPECT_TRUE(SameTensors(model_, **source));
  EXPECT_EQ((*source)->files(), (std::vector<std::string>{"config.json", "tokenizer.json"}));
  EXPECT_EQ(*(*source)->ReadFile("tokenizer.json"), "{\"version\": \"1.0\"}");
  EXPECT_EQ((*source)->ReadFile("absent.json").status().code(), StatusCode::kNotFound);
  for (const auto& entry : fs::directory_iterator(Folder("a"))) {
    EXPECT_NE(entry.path().extension(), ".partial");
  }
}

TEST_F(ModelFolderTest, ShardedRoundTrip) {
  const auto source = OpenModelFolder(Sharded("a"));
  ASSERT_OK(source);
  EXPECT_TRUE(SameTensors(model_, **source));
}

TEST_F(ModelFolderTest, ReadsAnyRangeAndRefusesMore) {
  ASSERT_OK(WriteModelFolder(model_, Folder("a")));
  const auto source = OpenModelFolder(Folder("a"));
  ASSERT_OK(source);
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  const auto all = *model_.ReadAll(name);
  for (int i = 0; i < 200; ++i) {
    const auto offset = static_cast<int64_t>(random_() % (all.size() + 1));
    std::vector<std::byte> out(random_() % (all.size() + 1 - static_cast<size_t>(offset)));
    ASSERT_OK((*source)->Read(name, offset, out));
    ASSERT_TRUE(std::equal(out.begin(), out.end(), all.begin() + offset));
  }
  std::vector<std::byte> one(1);
  const auto size = static_cast<int64_t>(all.size());
  EXPECT_EQ((*source)->Read(name, size, one).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ((*source)->Read(name, -1, one).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ((*source)->Read("no.such", 0, one).code(), StatusCode::kNotFound);
}

TEST_F(ModelFolderTest, AFileCutOffAfterOpeningIsAnErrorThatNamesFileAndTensor) {
  ASSERT_OK(WriteModelFolder(model_, Folder("a")));
  const auto source = OpenModelFolder(Folder("a"));
  ASSERT_OK(source);
  fs::resize_file(Folder("a") / "model.safetensors", 4000);
  const auto bytes = (*source)->ReadAll("model.norm.weight");
  ASSERT_EQ(bytes.status().code(), StatusCode::kCorruption);
  EXPECT_NE(bytes.status().message().find("model.safetensors: tensor 'model.norm.weight'"),
            std::string::npos)
      << bytes.status().ToString();
}

TEST_F(ModelFolderTest, RefusesBrokenFolders) {
  EXPECT_EQ(OpenModelFolder(Folder("none")).status().code(), StatusCode::kNotFound);

  fs::create_directory(Folder("empty"));
  ExpectRefused(Folder("empty"), "no config.json");
  WriteText(Folder("empty") / "config.json", "[1]");
  ExpectRefused(Folder("empty"), "not a JSON object");
  WriteText(Folder("empty") / "config.json", "{\"a\":");
  ExpectRefused(Folder("empty"), "not a JSON object");
  WriteText(Folder("empty") / "config.json", "{}");
  ExpectRefused(Folder("empty"), "neither model.safetensors");
  fs::create_directory(Folder("empty") / "model.safetensors");
  ExpectRefused(Folder("empty"), "not a regular file");

  ASSERT_OK(WriteModelFolder(model_, Folder("cut")));
  const auto size = fs::file_size(Folder("cut") / "model.safetensors");
  for (const uintmax_t cut : {size - 1, size / 2, uintmax_t{20}, uintmax_t{7}, uintmax_t{0}}) {
    fs::resize_file(Folder("cut") / "model.safetensors", cut);
    ExpectRefused(Folder("cut"), "model.safetensors");
  }
}

TEST_F(ModelFolderTest, RefusesBrokenIndexes) {
  const std::string first = "model-00001-of-";
  const fs::path folder = Sharded("a");
  const fs::path index = folder / "model.safetensors.index.json";
  const std::string valid = ReadText(index);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = valid;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    WriteText(index, text.replace(at, from.size(), to));
  };
  const auto shard =
      valid.substr(valid.find(first), valid.find(".safetensors\"") - valid.find(first)) +
      ".safetensors";
  with(shard, "../a/" + shard);
  ExpectRefused(folder, "no file of the folder");
  with(shard, "/etc/passwd");
  ExpectRefused(folder, "no file of the folder");
  with(shard, "..");
  ExpectRefused(folder, "no file of the folder");
  with(shard, "");
  ExpectRefused(folder, "no file of the folder");
  with(shard, "absent.safetensors");
  ExpectRefused(folder, "absent.safetensors");
  with("\"model.norm.weight\"", "\"model.nrom.weight\"");
  ExpectRefused(folder, "tensor 'model.norm.weight' is here, but not by the index");
  with("\"weight_map\": {", "\"weight_map\": {\"extra\": \"" + shard + "\",");
  ExpectRefused(folder, "tensor 'extra' is not here");
  with("\"weight_map\"", "\"weightmap\"");
  ExpectRefused(folder, "no weight_map");
  with("\"weight_map\": {", "\"weight_map\": {\"a\": 3,");
  ExpectRefused(folder, "'a' names no file");
  with("\"weight_map\": {", "\"weight_map\": {\"a\": {},");
  ExpectRefused(folder, "nested");
  with("\"model.norm.weight\"", "\"model.norm.weight\": \"x\", \"model.norm.weight\"");
  ExpectRefused(folder, "appears twice");
  WriteText(index, valid.substr(0, valid.size() / 2));
  ExpectRefused(folder, "not valid JSON");
  WriteText(index, "{\"metadata\":" + std::string(1'000'000, '['));
  ExpectRefused(folder, "array");
  WriteText(index, "7");
  ExpectRefused(folder, "no JSON object");
  WriteText(index, valid);
  EXPECT_OK(OpenModelFolder(folder));
}

TEST_F(ModelFolderTest, WritingRefusesAModelThatIsThereAndLeavesNothingOnFailure) {
  ASSERT_OK(WriteModelFolder(model_, Folder("a")));
  const std::string before = ReadText(Folder("a") / "model.safetensors");
  const Status again = WriteModelFolder(model_, Folder("a"));
  EXPECT_EQ(again.code(), StatusCode::kInvalidArgument) << again.ToString();
  EXPECT_EQ(ReadText(Folder("a") / "model.safetensors"), before);

  for (const std::string name : {"../evil", "x/y", "..", "a.safetensors"}) {
    TestModel hostile = model_;
    hostile.config_files[name] = "x";
    EXPECT_EQ(WriteModelFolder(hostile, Folder("b")).code(), StatusCode::kInvalidArgument) << name;
    EXPECT_TRUE(fs::is_empty(Folder("b"))) << name;
  }
  EXPECT_FALSE(fs::exists(temporary_.path() / "evil"));
}

TEST_F(ModelFolderTest, AliasesAreLeftOutWhereTheConfigTiesAndWrittenElsewhere) {
  model_.Tie("lm_head.weight", "model.embed_tokens.weight");
  ASSERT_OK(WriteModelFolder(model_, Folder("tied")));
  const auto tied = OpenModelFolder(Folder("tied"));
  ASSERT_OK(tied);
  EXPECT_EQ((*tied)->Find("lm_head.weight"), nullptr);
  EXPECT_EQ((*tied)->tensors().size() + 1, model_.tensors().size());

  model_.config_files["config.json"] = "{\"model_type\": \"llama\"}";
  ASSERT_OK(WriteModelFolder(model_, Folder("untied")));
  const auto untied = OpenModelFolder(Folder("untied"));
  ASSERT_OK(untied);
  EXPECT_TRUE(SameTensors(model_, **untied));
}

// Python writes, we read; we write, Python and transformers read.
TEST_F(ModelFolderTest, PythonAgrees) {
  model_.SetRandom("extra.f32", DType::kF32, {3, 1, 2}, random_, 1);
  model_.SetRandom("extra.scalar", DType::kF16, {}, random_, 1);
  model_.Set("extra.empty", DType::kF32, {0, 4}, {});
  ASSERT_OK(WriteModelFolder(model_, Folder("single")));
  ASSERT_OK(WriteModelFolder(model_, Folder("sharded"), 8000));
  ASSERT_TRUE(RunPython("safetensors_oracle.py",
                        {"copy", Folder("single").string(), Folder("sharded").string(),
                         Folder("by_python").string()}));
  const auto source = OpenModelFolder(Folder("by_python"));
  ASSERT_OK(source);
  EXPECT_TRUE(SameTensors(model_, **source));
}

TEST_F(ModelFolderTest, TransformersLoads) {
  ASSERT_OK(WriteModelFolder(model_, Folder("single")));
  ASSERT_OK(WriteModelFolder(model_, Folder("sharded"), 8000));
  EXPECT_TRUE(RunPython("safetensors_oracle.py",
                        {"load", Folder("single").string(), Folder("sharded").string()}));
}

}  // namespace
}  // namespace stockpot
