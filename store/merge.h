// Merges of k >= 1 checkpoints of one base (references: the brief; arXiv 2602.09689, 2403.19522).
// Matrices are weights of two dimensions; delta_i = W_i - W_base.
//
//   monosoup            W_base + (1/k) sum_i tau_i, tau_i = U S V^T of delta_i cut at rank r_i: the
//                       smallest that keeps `energy` of ||delta_i||_F^2, or `rank`, if > 0. With a
//                       fixed rank a matrix below `energy` refuses the merge unless `force`.
//   monosoup-spectral   W_base + high * delta_k + low * (delta - delta_k), delta the mean of the
//                       delta_i, delta_k its first k singular directions (merge_matrix.h). Weights
//                       of more dimensions are taken as [first, rest].
//   mean                sum_i weight_i W_i / sum_i weight_i
//   model-stock         t mean_i(W_i) + (1 - t) W_base, t = k c / (1 + (k - 1) c) in [0, 1], c the
//                       mean cosine of the pairs of deltas; c <= 0 stays at the base, a delta of
//                       zero has cosine 0 with all. Of every tensor of two dimensions or more.
//
// Every other tensor is a plain mean: of fewer or more dimensions, and with the two that need
// singular values also embeddings and heads (store/model_structure.h).
//
// Where nothing is dropped or reweighted (energy 1, rank >= min(rows, cols), k = full rank) a
// tensor is the mean of the W_i, exact in float64 and rounded once: one checkpoint comes back bit
// for bit. The same parents and options give the same bytes, on one machine with as many threads.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "store/checkpoint_store.h"
#include "store/progress.h"
#include "store/records.h"

namespace stockpot {

// Builds the merged artifact of `parents` (>= 1, same base, same tensor names and shapes) and puts
// its chunks; does not commit. dtype, ties and config files: the first parent's. `progress` may be
// null; it is called from several threads, one at a time.
// Memory: tensor at a time; kMergeBytes, or what one larger matrix takes (merge_tensor.h), and
// kMergeIdleBytes.
// InvalidArgument names the tensor: missing, shape, non-finite, below the floor; or the option that
// is out of range.
//
// Attributes: "method", "parents" (hex, by comma), "energy", "rank", "force", "weights" (by comma),
// "spectral": those that the method uses; "matrices" (how many were decomposed), "kept_energy_min"
// (monosoup), and "tensor/<name>" -> JSON:
//   monosoup            {"rank": [r_i], "kept_energy": [...]} in the order of the parents
//   monosoup-spectral   {"rank": [k], "kept_energy": [P], "low": low, "high": high}
//   model-stock         {"cosine": c, "t": t}
Result<Manifest> BuildMerge(CheckpointStore& store, std::span<const Digest> parents,
                            const std::string& run, int64_t step, const MergeOptions& options,
                            const ProgressFunction& progress);

// Tensors are merged side by side while they take so much together.
inline constexpr int64_t kMergeBytes = int64_t{160} << 20;
// What tensors that are done leave to the next ones, beside that.
inline constexpr int64_t kMergeIdleBytes = int64_t{64} << 20;

}  // namespace stockpot
