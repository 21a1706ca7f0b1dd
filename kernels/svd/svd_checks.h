// Shared by the backends of svd.h, not for others: checks, lifting to float32, the fixed signs.
#pragma once

#include "kernels/svd/svd.h"

namespace stockpot {

// "tensor 'NAME': " before the message; nothing where there is no name.
Status NameTensor(const SvdArgs& args, const Status& status);
// InvalidArgument of NameTensor.
Status SvdError(const SvdArgs& args, const std::string& what);

// Shapes, dtypes, strides; not the values.
Status CheckSvdArgs(const SvdArgs& args);
Status CheckTruncatedSvd(const SvdArgs& args, const TruncatedSvdOptions& options);
// ResourceExhausted if `bytes` is over args.max_bytes.
Status CheckSvdBytes(const SvdArgs& args, int64_t bytes);

// Row r of the delta as float32 into out[0, n), and the sum of its squares into *energy, added in
// order. InvalidArgument names the first value that is not finite. REQUIRES: CheckSvdArgs.
Status LiftSvdRow(const SvdArgs& args, int64_t r, float* out, double* energy);

// InvalidArgument if sqrt(energy) is over kMaxSvdNorm.
Status CheckSvdEnergy(const SvdArgs& args, double energy);

// r + p, cut at min(m, n).
int64_t SketchColumns(int64_t rows, int64_t cols, const TruncatedSvdOptions& options);

// Applies the sign convention, and derives `captured` from s and energy.
void FinishSvd(Svd& svd);

}  // namespace stockpot
