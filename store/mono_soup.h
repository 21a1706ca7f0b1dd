// MonoSoup: merge of k checkpoints of one base (the customer's form; references/merging.md 1.1).
//
//   delta_i  = W_i - W_base
//   tau_i    = truncated_SVD(delta_i, r_i)
//   W_merged = W_base + (1 / k) * sum_i tau_i
//
// r_i is the smallest rank that keeps at least `energy` of ||delta_i||_F^2 (or `rank`, if > 0).
// Tensors that are not 2-D, embeddings and the head (store/model_structure.h) are averaged plainly.
// The kept energy of every matrix is recorded in the merge's attributes; with a fixed rank a matrix
// below `energy` refuses the merge unless `force`.
//
// Where every delta keeps its full rank (energy 1, or a rank >= min(rows, cols)) tau is delta, and
// the merged weight is the mean of the W_i, exact in float64 and rounded once: one checkpoint comes
// back bit for bit.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "store/checkpoint_store.h"
#include "store/progress.h"

namespace stockpot {

// Rank and kept share of ||delta||_F^2 of one truncated delta; a zero delta has rank 0 and keeps 1.
struct TruncationReport {
  int64_t rank = 0;
  double kept_energy = 1;
};

// One matrix [rows, cols], row-major float32. `merged_delta` [rows, cols] receives the mean of the
// truncated deltas. Spectrum and vectors come from the eigenvalues of the Gram matrix of the
// smaller side, in float64; so does the projection. InvalidArgument: a value is not finite, or a
// fixed rank keeps less than the floor; `merged_delta` is unspecified then. Thread promise: any
// thread; LibTorch's own threads do the work.
Result<std::vector<TruncationReport>> MonoSoupMatrix(int64_t rows, int64_t cols,
                                                     std::span<const float* const> deltas,
                                                     const MonoSoupOptions& options,
                                                     float* merged_delta);

// Builds the merged artifact of `parents` (>= 1, same base, same tensor names and shapes) and puts
// its chunks; does not commit. dtype, ties and config files: the first parent's. Memory: a few
// tensors. `progress` may be null. InvalidArgument names the tensor: missing, shape, non-finite,
// below the floor; or the option that is out of range.
//
// Attributes: "method" = "monosoup", "energy", "rank", "force", "parents" (hex, by comma),
// "matrices", "kept_energy_min", and per truncated matrix "tensor/<name>" -> JSON
// {"rank": [r_i], "kept_energy": [...]} in the order of the parents.
Result<Manifest> BuildMonoSoup(CheckpointStore& store, std::span<const Digest> parents,
                               const std::string& run, int64_t step, const MonoSoupOptions& options,
                               const ProgressFunction& progress);

}  // namespace stockpot
