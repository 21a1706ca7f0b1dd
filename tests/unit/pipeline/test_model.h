// Small models in memory, and their way into folders and stores, for the tests of the pipeline.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "store/checkpoint_store.h"
#include "store/tensor_source.h"

namespace stockpot {

// A fresh folder that is removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// A mutable model in memory. Tensors are kept sorted by name.
class TestModel : public TensorSource {
 public:
  void Set(const std::string& name, DType dtype, std::vector<int64_t> shape,
           const std::vector<double>& values);
  void SetBytes(const std::string& name, DType dtype, std::vector<int64_t> shape,
                std::vector<std::byte> bytes);
  void SetRandom(const std::string& name, DType dtype, std::vector<int64_t> shape,
                 std::mt19937_64& random, double sigma);
  void Tie(const std::string& name, const std::string& target);
  void Remove(const std::string& name);
  // Adds normal noise, rounded to the tensor's dtype.
  void Perturb(const std::string& name, std::mt19937_64& random, double sigma);
  void PerturbAll(std::mt19937_64& random, double sigma);  // but aliases
  void SetElement(const std::string& name, int64_t index, double value);
  // The same values in another dtype.
  void Cast(const std::string& name, DType dtype);
  std::vector<float> Values(const std::string& name) const;  // of the target, for an alias

  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override;
  Result<std::string> ReadFile(std::string_view name) const override;
  std::vector<std::string> files() const override;

  std::map<std::string, std::string> config_files;

 private:
  std::vector<TensorInfo> infos_;
  std::map<std::string, std::vector<std::byte>, std::less<>> bytes_;
};

struct TinyLlamaShape {
  int64_t vocab = 40;
  int64_t hidden = 24;
  int64_t kv = 8;             // rows of k_proj and v_proj (GQA)
  int64_t intermediate = 52;  // no multiple of 8: padding bits
  int64_t layers = 2;
  bool tied = true;  // lm_head left out
  DType dtype = DType::kBF16;
};
// A Llama with the names and shapes of transformers'.
TestModel TinyLlama(std::mt19937_64& random, const TinyLlamaShape& shape = {});

// A manifest of raw tensors, its chunks put; not committed.
Manifest PutModel(CheckpointStore& store, const TensorSource& model, ArtifactKind kind,
                  std::optional<Digest> base, const std::string& run, int64_t step);
// PutModel, and commits the artifact alone.
Digest StoreModel(CheckpointStore& store, const TensorSource& model, ArtifactKind kind,
                  std::optional<Digest> base = {}, const std::string& run = "", int64_t step = -1);
std::unique_ptr<CheckpointStore> OpenStore(const std::filesystem::path& folder);

// Same names, dtypes, shapes and bytes; aliases are compared by value.
::testing::AssertionResult SameTensors(const TensorSource& a, const TensorSource& b);

// Runs `script` of this folder with the interpreter of the build. A failure shows its output.
::testing::AssertionResult RunPython(const std::string& script,
                                     const std::vector<std::string>& args);

uint64_t TestSeed();  // STOCKPOT_TEST_SEED, or a fixed one; prints it

// EXPECT_OK / ASSERT_OK: a Status or a Result.
inline Status AsStatus(const Status& status) { return status; }
template <typename T>
Status AsStatus(const Result<T>& result) {
  return result.status();
}
#define ASSERT_OK(expression)                                                  \
  do {                                                                         \
    const auto& ok_outcome = (expression);                                     \
    ASSERT_TRUE(AsStatus(ok_outcome).ok()) << AsStatus(ok_outcome).ToString(); \
  } while (0)
#define EXPECT_OK(expression)                                                  \
  do {                                                                         \
    const auto& ok_outcome = (expression);                                     \
    EXPECT_TRUE(AsStatus(ok_outcome).ok()) << AsStatus(ok_outcome).ToString(); \
  } while (0)

}  // namespace stockpot
