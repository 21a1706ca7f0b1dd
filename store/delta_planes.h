// The rule of kernels/bitdelta/signs.h, applied k times: each plane to what the planes before it
// leave of the delta, in float32,
//
//   d_0 = W - W_base,   d_p = d_0 - (alpha_0 sign_0 + ... + alpha_{p-1} sign_{p-1})
//
// (the sum from left to right), and what remains in low rank. Rows are independent, so memory is a
// block of rows beside the packed planes; a residual of low rank takes two float32 matrices.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/base/threads.h"
#include "kernels/base/view.h"
#include "kernels/bitdelta/compress.h"

namespace stockpot {

struct SignPlane {
  std::vector<uint8_t> signs;  // canonical
  std::vector<float> alpha;    // [d_out]
  double left = 0;             // squared norm of what this and the planes before it leave
};

struct DeltaPlanes {
  DeltaStats stats;  // of the delta itself
  std::vector<SignPlane> planes;
};

// `base` and `tuned` [d_out, d_in], any weight dtypes; planes >= 1. Bits and scales do not depend
// on the number of threads, nor on how many planes follow. Non-finite values are counted in `stats`
// and make what follows meaningless. InvalidArgument: shapes that do not fit.
Result<DeltaPlanes> MakePlanes(const WeightMatrix& base, const WeightMatrix& tuned, int64_t planes,
                               ThreadPool& threads);

// b [d_out, r] and a [r, d_in] in BF16, and what b a leaves, for each rank asked for.
struct DeltaResidual {
  std::vector<uint16_t> a;
  std::vector<uint16_t> b;
  std::vector<double> left;  // of the ranks asked for, measured with the rounded factors
  // The first `rank` of `full` columns of b.
  static std::vector<uint16_t> FirstColumns(const std::vector<uint16_t>& b, int64_t full,
                                            int64_t rank);
};

// Of what the first `planes` leave. `ranks` ascend, the last is r <= min(d_out, d_in); `name` picks
// the sketch (kernels/svd/low_rank.h). A part of low rank begins with the parts of lower rank.
DeltaResidual MakeResidual(const WeightMatrix& base, const WeightMatrix& tuned,
                           std::span<const SignPlane> planes, std::span<const int64_t> ranks,
                           std::string_view name, ThreadPool& threads);

}  // namespace stockpot
