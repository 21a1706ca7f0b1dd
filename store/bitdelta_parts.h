// The stored parts of codec bitdelta, for a weight [d_out, d_in]:
//
//   W ~ W_base + alpha sign  [+ alpha/1 signs/1 + ...]  [+ residual_b residual_a]
//
//   "signs", "alpha"      the first plane (kernels/bitdelta/signs.h): canonical bits, and [d_out]
//   F32 "signs/1", "alpha/1"  the rule applied again to what the planes before it leave; and so on,
//   up
//                         to kMaxSignPlanes planes
//   "residual_a"          [r, d_in] BF16, and
//   "residual_b"          [d_out, r] BF16: what the planes leave, in low rank. r follows from the
//   size
//
// Decoding sums planes in their order, then ranks in theirs, in float64, and rounds once
// (store/delta_reader.h). Thread promise: pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/base/status.h"
#include "kernels/bitdelta/linear.h"  // kMaxSignPlanes
#include "store/manifest.h"

namespace stockpot {

inline constexpr int64_t kMaxResidualRank = 1024;
inline constexpr const char* kResidualA = "residual_a";
inline constexpr const char* kResidualB = "residual_b";

// Roles of plane 0 .. kMaxSignPlanes - 1.
std::string SignsRole(int64_t plane);
std::string AlphaRole(int64_t plane);

// Of an entry that is valid: planes (1 at least), and the residual's rank (0: it has none).
int64_t SignPlanes(const TensorEntry& entry);
int64_t ResidualRank(const TensorEntry& entry);

// Bytes that are stored for so many planes and that rank.
int64_t BitDeltaBytes(int64_t d_out, int64_t d_in, int64_t planes, int64_t rank);

// That the roles are those of a bitdelta tensor, each of the size that shape and rank make.
// InvalidArgument names the role. REQUIRES: a shape of two dimensions that CheckTensorShape took.
Status CheckBitDeltaRoles(const TensorEntry& entry);

}  // namespace stockpot
