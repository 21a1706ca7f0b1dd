#include "tests/unit/model/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "store/safetensors.h"

namespace stockpot::test {
namespace {

template <typename T>
std::vector<T> ReadTensor(const TensorSource& source, const std::string& name) {
  Result<std::vector<std::byte>> bytes = source.ReadAll(name);
  EXPECT_TRUE(bytes.ok()) << bytes.status().ToString();
  if (!bytes.ok()) return {};
  std::vector<T> values(bytes->size() / sizeof(T));
  std::memcpy(values.data(), bytes->data(), values.size() * sizeof(T));
  return values;
}

std::unique_ptr<TensorSource> OpenFolder(const std::filesystem::path& folder) {
  Result<std::unique_ptr<TensorSource>> source = OpenModelFolder(folder);
  EXPECT_TRUE(source.ok()) << source.status().ToString();
  return source.ok() ? *std::move(source) : nullptr;
}

}  // namespace

Expected GoldenCase::Read(const std::string& model) const {
  const auto source = OpenFolder(folder / "golden");
  Expected expected;
  expected.logits = ReadTensor<float>(*source, model + ".logits");
  if (source->Find(model + ".logits64") != nullptr) {
    expected.logits64 = ReadTensor<double>(*source, model + ".logits64");
  }
  expected.hidden_norm = ReadTensor<float>(*source, model + ".hidden_norm");
  expected.head_norm = ReadTensor<float>(*source, model + ".head_norm");
  expected.greedy = ReadTensor<int32_t>(*source, model + ".greedy");
  expected.rows = static_cast<int64_t>(expected.hidden_norm.size());
  expected.vocab = static_cast<int64_t>(expected.head_norm.size());
  return expected;
}

std::unique_ptr<TensorSource> GoldenCase::Base() const { return OpenFolder(folder / "base"); }
std::unique_ptr<TensorSource> GoldenCase::Tuned() const { return OpenFolder(folder / "tuned"); }

std::vector<GoldenCase> ReadCases(const char* environment_variable) {
  std::vector<GoldenCase> cases;
  const char* root = std::getenv(environment_variable);
  if (root == nullptr) return cases;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root, error)) {
    if (!std::filesystem::exists(entry.path() / "golden")) continue;
    GoldenCase found{.name = entry.path().filename().string(), .folder = entry.path()};
    found.prompt = ReadTensor<int32_t>(*OpenFolder(entry.path() / "golden"), "prompt");
    cases.push_back(std::move(found));
  }
  std::sort(cases.begin(), cases.end(),
            [](const GoldenCase& a, const GoldenCase& b) { return a.name < b.name; });
  return cases;
}

double LogitBound(const ModelConfig& config, const Expected& expected, int64_t row, int64_t token) {
  constexpr double kLambda = 1;
  constexpr double kRoundoff = 1.0 / (1 << 24);
  const double inner =
      static_cast<double>(6 * config.hidden_size + config.heads * config.head_dim +
                          config.head_dim + expected.rows + config.intermediate_size);
  const double sums = std::sqrt(static_cast<double>(config.layers) * inner +
                                static_cast<double>(config.hidden_size));
  return 2 * kLambda * kRoundoff * sums * expected.hidden_norm[static_cast<size_t>(row)] *
         expected.head_norm[static_cast<size_t>(token)];
}

double WorstShare(const ModelConfig& config, const Expected& expected,
                  const std::vector<float>& logits) {
  EXPECT_EQ(logits.size(), expected.logits.size());
  double worst = 0;
  for (int64_t row = 0; row < expected.rows; ++row) {
    for (int64_t token = 0; token < expected.vocab; ++token) {
      const size_t i = static_cast<size_t>(row * expected.vocab + token);
      const double error = std::abs(static_cast<double>(logits[i]) - expected.logits[i]);
      const double share = error / LogitBound(config, expected, row, token);
      if (!(share <= worst)) worst = share;  // NaN counts as worst
    }
  }
  return worst;
}

}  // namespace stockpot::test
