// The cases that model_oracle.py wrote, read back, and the tolerance they are compared with.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "serve/model/weights.h"
#include "store/tensor_source.h"

namespace stockpot::test {

// What transformers computes with one model on the case's prompt.
struct Expected {
  int64_t rows = 0;
  int64_t vocab = 0;
  std::vector<float> logits;       // [rows, vocab], float32
  std::vector<double> logits64;    // [rows, vocab] or empty
  std::vector<float> hidden_norm;  // [rows]
  std::vector<float> head_norm;    // [vocab]
  std::vector<int32_t> greedy;
};

struct GoldenCase {
  std::string name;
  std::filesystem::path folder;
  std::vector<int32_t> prompt;

  Expected Read(const std::string& model) const;  // "base", "dense", "onebit"
  std::unique_ptr<TensorSource> Base() const;
  std::unique_ptr<TensorSource> Tuned() const;
};

// The cases under the folder that the environment variable names; none if it is not set. They are
// made by model_oracle.py, which ctest runs first (fixture model_goldens).
std::vector<GoldenCase> ReadCases(const char* environment_variable);

// Bound on |our logit - transformers' logit| of row t and token v, both in float32:
//
//   2 * lambda * u * sqrt(layers * n + hidden) * ||h_t||_2 * ||W_v||_2,   u = 2^-24, lambda = 1
//   n = sum of the inner dimensions of a block's products: 6 * hidden + heads * head_dim (o_proj)
//       + head_dim (scores) + rows (values) + intermediate (down)  [q, k, v, gate, up take hidden
//       each]
//
// A sum of n products has a relative error of about sqrt(n) * u against the norms of its factors
// (Higham & Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4, lambda their confidence factor),
// errors of the blocks are independent and add in squares, and the last product maps them to a
// logit by Cauchy- Schwarz. The factor 2: transformers has the same error as we.
double LogitBound(const ModelConfig& config, const Expected& expected, int64_t row, int64_t token);

// Largest |logits - expected| / LogitBound over all rows; at most 1 passes.
double WorstShare(const ModelConfig& config, const Expected& expected,
                  const std::vector<float>& logits);

}  // namespace stockpot::test
