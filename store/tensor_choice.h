// Which of several ways each tensor of a variant is stored in: the rate-distortion problem
//
//   minimise sum left_i   subject to   sum bytes_i <= budget        (a byte budget)
//   minimise sum bytes_i  subject to   sum left_i <= target         (a fidelity)
//
// greedily by error removed per byte, over the lower convex hull of each tensor's candidates, which
// is the Lagrangian's answer: no other choice is better in both sums, and what a single step on a
// hull is worth is all that is lost against the optimum. Source: Shoham, Gersho, "Efficient bit
// allocation for an arbitrary set of quantizers" (1988). Ties go to the earlier tensor, so the same
// candidates give the same choice. Thread promise: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/base/status.h"
#include "store/manifest.h"

namespace stockpot {

// One way to store one tensor, measured.
struct Candidate {
  Codec codec = Codec::kRaw;
  int64_t planes = 0;  // bitdelta
  int64_t rank = 0;    // bitdelta, of the residual; 0: none
  int64_t bytes = 0;
  double left = 0;  // ||W - W'||_F^2 that it misses
  bool operator==(const Candidate&) const = default;
};

// What no mixture of two others beats: bytes ascend, left falls, and so does what a byte removes.
std::vector<Candidate> LowerHull(std::vector<Candidate> candidates);

struct ChoiceLimits {
  std::optional<int64_t> bytes;  // of all tensors together, and of
  int64_t fixed_bytes = 0;       // what is beside them, >= 0
  std::optional<double> left;    // of all tensors together
};

// For each tensor an index into its hull. With a target for `left` the fewest bytes that meet it;
// else the least `left` within the bytes. InvalidArgument, with the number that it would take: the
// smallest of each is over the bytes, or what meets the target is. The target is always met by
// hulls that end with left = 0.
// REQUIRES: LowerHull() of one candidate at least each; a limit.
Result<std::vector<size_t>> ChooseCandidates(std::span<const std::vector<Candidate>> hulls,
                                             const ChoiceLimits& limits);

}  // namespace stockpot
