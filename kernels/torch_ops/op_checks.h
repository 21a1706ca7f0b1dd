// Shared by the files of torch.ops.stockpot.*: what the operators accept, checked alike for real
// tensors and for those of torch.compile that have shapes only.
//
// A bad argument raises ValueError (a dtype: TypeError) whose text starts with "OPERATOR:
// ARGUMENT:".
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/base/status.h"
#include "kernels/base/view.h"

namespace stockpot {

using OptionalTensor = std::optional<at::Tensor>;

// Sizes of a bitdelta_linear; symbolic where the caller's are.
struct BitDeltaSizes {
  c10::SymInt rows, d_out, d_in, variants, planes;
};

// signs [d_out, B], [planes, d_out, B] or [variants, planes, d_out, B], B = ceil(d_in / 8); alpha
// the same without the last dimension; variant_of_row [rows].
BitDeltaSizes CheckBitDeltaLinear(const at::Tensor& x, const at::Tensor& base,
                                  const at::Tensor& signs, const at::Tensor& alpha,
                                  const OptionalTensor& variant_of_row, const OptionalTensor& bias);

void CheckBitDeltaCompress(const at::Tensor& base, const at::Tensor& fine_tuned);

struct DeltaSizes {
  c10::SymInt rows, d_out, d_in, deltas;
};

// row_offsets [d_out + 1] or [deltas, d_out + 1], columns and values [changed].
DeltaSizes CheckSparseDelta(const at::Tensor& x, const at::Tensor& row_offsets,
                            const at::Tensor& columns, const at::Tensor& values,
                            const OptionalTensor& delta_of_row);

// a [r, d_in] or [deltas, r, d_in], b [d_out, r] or [deltas, d_out, r].
DeltaSizes CheckLora(const at::Tensor& x, const at::Tensor& a, const at::Tensor& b,
                     const OptionalTensor& delta_of_row);

void CheckTruncatedSvd(const at::Tensor& fine_tuned, const OptionalTensor& base, int64_t rank);

// x's shape with the last size replaced by d_out.
std::vector<c10::SymInt> OutputShape(const at::Tensor& x, c10::SymInt d_out);

// Raises ValueError (InvalidArgument), OutOfMemoryError-like RuntimeError and so on, "OPERATOR:
// ...".
void RaiseUnlessOk(const char* op, const Status& status);

DType DTypeOf(const at::Tensor& weight);  // REQUIRES: float32, float16 or bfloat16
// A view of a 2-D weight whose last stride is 1.
WeightMatrix WeightView(const at::Tensor& weight);

// `t` itself if its last dimension is dense, else a contiguous copy.
at::Tensor DenseRows(const at::Tensor& t);

}  // namespace stockpot
