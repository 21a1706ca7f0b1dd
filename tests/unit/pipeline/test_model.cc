#include "tests/unit/pipeline/test_model.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include "store/weight_rounding.h"

namespace stockpot {

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "stockpot-test-XXXXXX").string();
  EXPECT_NE(::mkdtemp(pattern.data()), nullptr) << pattern;
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void TestModel::SetBytes(const std::string& name, DType dtype, std::vector<int64_t> shape,
                         std::vector<std::byte> bytes) {
  Remove(name);
  TensorInfo info{name, dtype, std::move(shape), ""};
  EXPECT_EQ(info.bytes(), static_cast<int64_t>(bytes.size())) << name;
  infos_.insert(std::lower_bound(infos_.begin(), infos_.end(), info,
                                 [](const auto& a, const auto& b) { return a.name < b.name; }),
                info);
  bytes_[name] = std::move(bytes);
}

void TestModel::Set(const std::string& name, DType dtype, std::vector<int64_t> shape,
                    const std::vector<double>& values) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(DTypeSize(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    StoreWeight(values[i], dtype, bytes.data(), static_cast<int64_t>(i));
  }
  SetBytes(name, dtype, std::move(shape), std::move(bytes));
}

void TestModel::SetRandom(const std::string& name, DType dtype, std::vector<int64_t> shape,
                          std::mt19937_64& random, double sigma) {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  std::normal_distribution<double> normal(0, sigma);
  std::vector<double> values(static_cast<size_t>(n));
  for (double& value : values) value = normal(random);
  Set(name, dtype, std::move(shape), values);
}

void TestModel::Tie(const std::string& name, const std::string& target) {
  const TensorInfo tied = *Find(target);
  SetBytes(name, tied.dtype, tied.shape, std::vector<std::byte>(bytes_.at(target).size()));
  bytes_.erase(name);
  const_cast<TensorInfo*>(Find(name))->alias_of = target;
}

void TestModel::Remove(const std::string& name) {
  std::erase_if(infos_, [&](const TensorInfo& info) { return info.name == name; });
  bytes_.erase(name);
}

void TestModel::Perturb(const std::string& name, std::mt19937_64& random, double sigma) {
  const TensorInfo info = *Find(name);
  std::normal_distribution<double> normal(0, sigma);
  for (int64_t i = 0; i < info.elements(); ++i) {
    void* data = bytes_.at(name).data();
    StoreWeight(LoadWeight(data, info.dtype, i) + normal(random), info.dtype, data, i);
  }
}

void TestModel::PerturbAll(std::mt19937_64& random, double sigma) {
  for (const TensorInfo& info : infos_) {
    if (info.alias_of.empty()) Perturb(info.name, random, sigma);
  }
}

void TestModel::SetElement(const std::string& name, int64_t index, double value) {
  StoreWeight(value, Find(name)->dtype, bytes_.at(name).data(), index);
}

void TestModel::Cast(const std::string& name, DType dtype) {
  const std::vector<float> values = Values(name);
  Set(name, dtype, std::vector<int64_t>(Find(name)->shape), {values.begin(), values.end()});
}

std::vector<float> TestModel::Values(const std::string& name) const {
  const TensorInfo* info = Find(name);
  const auto& bytes = bytes_.at(info->alias_of.empty() ? name : info->alias_of);
  std::vector<float> values;
  for (int64_t i = 0; i < info->elements(); ++i) {
    values.push_back(LoadWeight(bytes.data(), info->dtype, i));
  }
  return values;
}

Status TestModel::Read(std::string_view name, int64_t offset, std::span<std::byte> out) const {
  const TensorInfo* info = Find(name);
  if (info == nullptr) return NotFound(std::string(name));
  const auto& bytes = bytes_.find(info->alias_of.empty() ? name : info->alias_of)->second;
  std::memcpy(out.data(), bytes.data() + offset, out.size());
  return OkStatus();
}

Result<std::string> TestModel::ReadFile(std::string_view name) const {
  const auto it = config_files.find(std::string(name));
  if (it == config_files.end()) return NotFound(std::string(name));
  return it->second;
}

std::vector<std::string> TestModel::files() const {
  std::vector<std::string> names;
  for (const auto& [name, text] : config_files) names.push_back(name);
  return names;
}

TestModel TinyLlama(std::mt19937_64& random, const TinyLlamaShape& s) {
  TestModel model;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, double sigma = 0.05) {
    model.SetRandom(name, s.dtype, std::move(shape), random, sigma);
  };
  add("model.embed_tokens.weight", {s.vocab, s.hidden});
  add("model.norm.weight", {s.hidden}, 1.0);
  if (!s.tied) add("lm_head.weight", {s.vocab, s.hidden});
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    add(at + "self_attn.q_proj.weight", {s.hidden, s.hidden});
    add(at + "self_attn.k_proj.weight", {s.kv, s.hidden});
    add(at + "self_attn.v_proj.weight", {s.kv, s.hidden});
    add(at + "self_attn.o_proj.weight", {s.hidden, s.hidden});
    add(at + "mlp.gate_proj.weight", {s.intermediate, s.hidden});
    add(at + "mlp.up_proj.weight", {s.intermediate, s.hidden});
    add(at + "mlp.down_proj.weight", {s.hidden, s.intermediate});
    add(at + "input_layernorm.weight", {s.hidden}, 1.0);
    add(at + "post_attention_layernorm.weight", {s.hidden}, 1.0);
  }
  model.config_files["config.json"] =
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": )" +
      std::to_string(s.hidden) + R"(, "intermediate_size": )" + std::to_string(s.intermediate) +
      R"(, "num_hidden_layers": )" + std::to_string(s.layers) + R"(, "num_attention_heads": )" +
      std::to_string(s.hidden / 8) + R"(, "num_key_value_heads": )" + std::to_string(s.kv / 8) +
      R"(, "head_dim": 8, "vocab_size": )" + std::to_string(s.vocab) +
      R"(, "tie_word_embeddings": )" + (s.tied ? "true" : "false") +
      R"(, "torch_dtype": "bfloat16"})";
  return model;
}

Manifest PutModel(CheckpointStore& store, const TensorSource& model, ArtifactKind kind,
                  std::optional<Digest> base, const std::string& run, int64_t step) {
  Manifest manifest{.kind = kind, .base = base, .run = run, .step = step};
  for (const TensorInfo& info : model.tensors()) {
    TensorEntry entry{.name = info.name, .dtype = info.dtype, .shape = info.shape};
    entry.alias_of = info.alias_of;
    if (info.alias_of.empty()) {
      const Result<Part> part = store.PutBytes(model.ReadAll(info.name).value());
      EXPECT_TRUE(part.ok()) << part.status().ToString();
      entry.parts["data"] = *part;
    }
    manifest.tensors.push_back(std::move(entry));
  }
  for (const std::string& name : model.files()) {
    const std::string text = model.ReadFile(name).value();
    manifest.files[name] = store.PutBytes(std::as_bytes(std::span(text))).value();
  }
  return manifest;
}

Digest StoreModel(CheckpointStore& store, const TensorSource& model, ArtifactKind kind,
                  std::optional<Digest> base, const std::string& run, int64_t step) {
  Commit commit;
  commit.artifacts.push_back(PutModel(store, model, kind, base, run, step));
  const Digest digest = commit.artifacts[0].digest();
  const Result<int64_t> applied = store.Apply(std::move(commit));
  EXPECT_TRUE(applied.ok()) << applied.status().ToString();
  return digest;
}

std::unique_ptr<CheckpointStore> OpenStore(const std::filesystem::path& folder) {
  Result<std::unique_ptr<CheckpointStore>> store =
      CheckpointStore::Open({.directory = folder, .clock = SystemClock(), .free_bytes_reserve = 0});
  EXPECT_TRUE(store.ok()) << store.status().ToString();
  return std::move(*store);
}

::testing::AssertionResult SameTensors(const TensorSource& a, const TensorSource& b) {
  if (a.tensors().size() != b.tensors().size()) {
    return ::testing::AssertionFailure() << a.tensors().size() << " and " << b.tensors().size();
  }
  for (const TensorInfo& info : a.tensors()) {
    const TensorInfo* other = b.Find(info.name);
    if (other == nullptr || other->dtype != info.dtype || other->shape != info.shape) {
      return ::testing::AssertionFailure() << info.name << ": another dtype or shape, or missing";
    }
    const auto left = a.ReadAll(info.name);
    const auto right = b.ReadAll(info.name);
    if (!left.ok() || !right.ok()) {
      return ::testing::AssertionFailure() << left.status().ToString() << right.status().ToString();
    }
    if (*left != *right) return ::testing::AssertionFailure() << info.name << ": other bytes";
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult RunPython(const std::string& script,
                                     const std::vector<std::string>& args) {
  std::string command =
      std::string(STOCKPOT_PYTHON_EXECUTABLE) + " " + STOCKPOT_TEST_SOURCE_DIR + "/" + script;
  for (const std::string& arg : args) command += " '" + arg + "'";
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return ::testing::AssertionFailure() << "popen: " << command;
  std::string output;
  std::array<char, 4096> buffer;
  while (const size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    output.append(buffer.data(), n);
  }
  const int status = ::pclose(pipe);
  if (status == 0) return ::testing::AssertionSuccess() << output;
  return ::testing::AssertionFailure() << command << "\nended with " << status << ":\n" << output;
}

uint64_t TestSeed() {
  const char* given = std::getenv("STOCKPOT_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 20240917;
  std::cout << "STOCKPOT_TEST_SEED=" << seed << "\n";
  return seed;
}

}  // namespace stockpot
