// bitdelta_compress: two weights of one shape -> canonical sign bits, a float32 scale per row, and
// the statistics that tell whether one bit is enough, in one pass over both.
//
// Source: BitDelta (arXiv 2402.10193) section 3.1; the row scale and the sign(0) rule are ours
// (signs.h). Arithmetic: delta in float32 (exact for bf16/fp16 inputs of similar size; sign is
// exact always), sums in float64 in a fixed order that does not depend on the thread count, so that
// every backend gives identical bits and identical alphas.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/base/status.h"
#include "kernels/base/threads.h"
#include "kernels/base/view.h"

namespace stockpot {

// What one tensor's delta looks like. Sums run over all elements of [d_out, d_in].
struct DeltaStats {
  int64_t elements = 0;
  int64_t changed = 0;     // delta != 0, those that are not finite included
  int64_t non_finite = 0;  // delta is NaN or infinite: a value of either weight, or an overflow
  double sum_abs = 0;      // sum |delta|
  double sum_square = 0;   // sum delta^2
  float max_abs = 0;       // max |delta|

  // Relative squared error of sign + one scale for the matrix: 1 - (E|d|)^2 / E[d^2]; 0 if no
  // delta.
  double OneBitError() const;
};

struct CompressArgs {
  WeightMatrix base;         // [d_out, d_in]
  WeightMatrix fine_tuned;   // [d_out, d_in], any weight dtype, need not equal the base's
  std::span<uint8_t> signs;  // out: SignBytes(d_out, d_in), canonical
  std::span<float> alpha;    // out: [d_out]
};

// InvalidArgument if shapes or sizes do not fit. Deltas that are not finite are counted, not
// refused: the caller decides. Their sign bit is that of delta >= 0 (0 for NaN); alpha and the sums
// leave them out, and alpha still divides by d_in.
Result<DeltaStats> BitDeltaCompressReference(const CompressArgs& args);
Result<DeltaStats> BitDeltaCompressCpu(const CompressArgs& args, ThreadPool& threads);

}  // namespace stockpot
