// Boxes of a tensor: what a rank of a sharded model holds, and the proof that boxes put together
// are the tensor, every element once.
//
// The proof (FindCoverFault) is exact and needs no bitmap. A set of boxes is determined by the
// signs of its corners: a box of rank d has 2^d of them, +1 where an even number of its coordinates
// are upper ends and -1 elsewhere, and adding up these signs from the origin on gives back how
// often each element is held. So the boxes hold each element once if, and only if, the sum of their
// corner signs is that of the whole tensor's one box. Sorting the corners dimension by dimension
// finds the first difference in lexicographic order, and the corner where it is found is itself an
// element that is held not at all or more than once.
//
// Thread promise: values and pure functions.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/status.h"

namespace stockpot {

// --- limits ---
inline constexpr int64_t kMaxRank = 8;           // dimensions of a tensor
inline constexpr int64_t kMaxPieces = 65'536;    // of one tensor
inline constexpr int64_t kMaxCorners = 4 << 20;  // of all pieces of a manifest, see CoverCorners

// Elements [offsets[i], offsets[i] + shape[i]) in dimension i. Ordered by offsets.
struct TensorBox {
  std::vector<int64_t> offsets;
  std::vector<int64_t> shape;  // of the same length

  auto operator<=>(const TensorBox&) const = default;
  int64_t elements() const;  // 1 for rank 0. REQUIRES: inside a tensor
};

TensorBox WholeBox(const std::vector<int64_t>& shape);
// "[0:2, 4:8]"; "[]" for a scalar.
std::string BoxText(const TensorBox& box);
// InvalidArgument: another rank than the tensor's, a negative number, or past its end.
// REQUIRES: no number of `shape` is negative.
Status CheckBox(const std::vector<int64_t>& shape, const TensorBox& box);

// One counterexample: every element of `range` is held by no box, or by two at least.
struct CoverFault {
  bool is_overlap = false;
  TensorBox range;
  size_t first = 0;  // of an overlap: the indices of two boxes that hold `range`
  size_t second = 0;
};

// Null: `boxes` hold each element of a tensor of `shape` exactly once. Boxes without elements count
// for nothing, and a tensor without elements is always covered. Time O(c log c) and memory O(n) for
// n boxes with c = CoverCorners(). REQUIRES: CheckBox() of each.
std::optional<CoverFault> FindCoverFault(const std::vector<int64_t>& shape,
                                         std::span<const TensorBox> boxes);
// The number of corners that the proof looks at: boxes times 2 for each dimension that is cut.
int64_t CoverCorners(const std::vector<int64_t>& shape, std::span<const TensorBox> boxes);

}  // namespace stockpot
