// Merging LoRA adapters in their factors: no d_out x d_in matrix is ever made. An adapter is its
// task vectors tau = scale * B A, one for each adapted layer; what only one of two adapters has is
// zero in the other.
//
//   similarity  <B1 A1, B2 A2> = sum((B1^T B2) o (A1 A2^T)); the cosine of each layer, mean over
//   all
//               layers that either has
//   mean        tau_m <- (1 - 1/n) tau_m + 1/n tau_t: the running mean of n adapters
//   arithmetic  tau_m <- s * (tau_1 + ... + tau_n), s of the options
//   opcm        tau_m = U S V^T;  r = the first index with cumsum(S)[r] / sum(S) > a
//               P = U^T tau_t V, of which D is P[0:r, 0:r] and the diagonal;  tau' = tau_t - U D
//               V^T tau_m <- (lambda tau_m + tau') / lambda', lambda' = ||lambda tau_m + tau'|| /
//               mean_{i <= t} ||tau_i||, over all layers together
//
// A result of rank r_m + r_t is cut to the rank that is asked for: thin QR of both sides, SVD of
// the small core. All in double precision. Every layer of an input must be finite
// (InvalidArgument).
//
// Source: Tang et al., OPCM (arXiv 2501.09522) and fusion_bench; K-Merge (arXiv 2510.13537).
// Thread promise: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "store/adapter_merge_state.h"

namespace stockpot {

// The task vector of one linear layer, with the adapter's scale in B.
struct AdapterLayer {
  std::string weight;  // the base's: "model.layers.0.self_attn.q_proj.weight"
  int64_t d_out = 0;
  int64_t d_in = 0;
  int64_t rank = 0;
  std::vector<double> b;  // [d_out, rank], row-major
  std::vector<double> a;  // [rank, d_in], row-major
};

struct AdapterDelta {
  std::vector<AdapterLayer> layers;  // sorted by weight, each once
};

struct AdapterMergeOptions {
  PoolMethod method = PoolMethod::kOpcm;
  double projection = 0.5;  // opcm's a, [0, 1)
  double scale = 0.5;       // task arithmetic's s, > 0
  int64_t rank = 0;         // of each layer at most; 0: whatever it takes
};

struct AdapterMerge {
  AdapterDelta merged;
  AdapterMergeState state;
  double kept_energy = 1;  // share of ||.||_F^2 that the cut to the rank kept, all layers together
  double kept_energy_min = 1;  // likewise, of the layer that lost most
};

// Sum over layers of <a, b>, the elements' products.
Result<double> AdapterDot(const AdapterDelta& a, const AdapterDelta& b);
// sqrt of the dot with itself.
Result<double> AdapterNorm(const AdapterDelta& delta);
// In [-1, 1]. A layer that only one has, or that is zero, counts as 0; no layer at all: 0.
// InvalidArgument: a layer has other sizes in the other adapter.
Result<double> AdapterSimilarity(const AdapterDelta& a, const AdapterDelta& b);

// sum_i weights[i] * deltas[i]. One delta of weight 1 whose layers have no more than `rank` comes
// back exactly as it is.
Result<AdapterMerge> WeightedSum(const std::vector<const AdapterDelta*>& deltas,
                                 const std::vector<double>& weights, int64_t rank);

// The state of an adapter that nothing was merged into.
Result<AdapterMergeState> FreshState(const AdapterDelta& delta);

// `added` merged into `member`. InvalidArgument names an option that is out of range.
Result<AdapterMerge> MergeAdapter(const AdapterDelta& member, const AdapterMergeState& state,
                                  const AdapterDelta& added, const AdapterMergeOptions& options);

}  // namespace stockpot
