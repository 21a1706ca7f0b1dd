// MonoSoup: merge of k checkpoints of one base (the customer's form; references/merging.md 1.1).
//
//   delta_i  = W_i - W_base
//   tau_i    = truncated_SVD(delta_i, r_i)
//   W_merged = W_base + (1 / k) * sum_i tau_i
//
// r_i is the smallest rank that keeps at least `energy` of ||delta_i||_F^2 (or `rank`, if > 0). Tensors
// that are not 2-D, embeddings and the head are averaged plainly. The kept energy of every matrix is
// recorded in the merge's attributes; with a fixed rank a matrix below `energy` refuses the merge unless
// `force`.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "store/checkpoint_store.h"

namespace stockpot {

// One matrix [rows, cols], all in float32; the arithmetic of the SVD is float64 where the spectrum is
// taken from the Gram matrix. `deltas` are replaced by nothing; `merged_delta` receives the mean of the
// truncated deltas. Returns rank and kept energy of each delta.
struct TruncationReport {
  int64_t rank = 0;
  double kept_energy = 1;  // share of ||delta||_F^2; 1 for a zero delta
};
Result<std::vector<TruncationReport>> MonoSoupMatrix(
    int64_t rows, int64_t cols, std::span<const float* const> deltas, const MonoSoupOptions& options,
    float* merged_delta);

// Builds the merged artifact of `parents` (>= 1, same base, same tensor names and shapes) and puts its
// chunks; does not commit. dtype of each tensor: the first parent's. Memory: a few tensors.
// InvalidArgument names the tensor: missing, shape, non-finite, below the energy floor.
Result<Manifest> BuildMonoSoup(CheckpointStore& store, std::span<const Digest> parents,
                               const std::string& run, int64_t step,
                               const MonoSoupOptions& options,
                               const std::function<void(double share)>& progress);

}  // namespace stockpot
