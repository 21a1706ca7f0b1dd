// Shared by the files of torch.ops.stockpot.*: what the operators accept, checked alike for real
// tensors and for those of torch.compile that have shapes only.
//
// A bad argument raises ValueError (a dtype: TypeError) whose text starts with "OPERATOR:
// ARGUMENT:".
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/base/view.h"

namespace stockpot {

using OptionalTensor = std::optional<at::Tensor>;

// Sizes of a bitdelta_linear; symbolic where the caller's are.
struct BitDeltaSizes {
  c10::SymInt rows, d_out, d_in, variants, planes;
};

// signs [d_out, B], [planes, d_out, B] or [variants, planes, d_out, B], B = ceil(d_in / 8), planes
// in [1, kMaxSignPlanes]; alpha the same without the last dimension; variant_of_row [rows].
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

struct SvdNumbers {
  int64_t rank, oversampling, iterations;
};
void CheckTruncatedSvd(const at::Tensor& fine_tuned, const OptionalTensor& base,
                       const SvdNumbers& numbers);

// Which operator's index of rows is meant, and what -1 stands for.
struct RowIndexName {
  const char* op;
  const char* argument;
  const char* minus_one;
};
inline constexpr RowIndexName kVariantOfRow{"bitdelta_linear", "variant_of_row", "the base alone"};
inline constexpr RowIndexName kSparseDeltaOfRow{"sparse_delta_linear", "delta_of_row", "no delta"};
inline constexpr RowIndexName kLoraDeltaOfRow{"lora_linear", "delta_of_row", "no delta"};

// The delta of each row, all in [-1, deltas); absent: 0 everywhere. ValueError names the first row
// whose index is not. Waits for a device that holds it.
std::vector<int32_t> IndexOfRows(const RowIndexName& name, const OptionalTensor& index,
                                 int64_t rows, int64_t deltas);

// ValueError: the elements of delta `v` are not a part of `columns`, or one of its columns is
// negative. `offsets` [d_out + 1] are the delta's own. What SparseDelta checks, it does not.
void CheckSparseParts(int64_t v, std::span<const int64_t> offsets, std::span<const int32_t> columns,
                      int64_t d_in);

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
