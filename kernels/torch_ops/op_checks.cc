#include "kernels/torch_ops/op_checks.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "kernels/bitdelta/linear.h"
#include "kernels/svd/svd.h"

namespace stockpot {
namespace {

bool IsWeightType(at::ScalarType t) {
  return t == at::kFloat || t == at::kHalf || t == at::kBFloat16;
}

// As Python writes it: "int8", "bfloat16".
std::string NameOf(at::ScalarType t) { return c10::getDtypeNames(t).first; }

// Where an argument may be float64.
enum class Doubles { kNever, kAlways, kWithX, kNotWithThisX };

// One argument under its operator's name.
struct Argument {
  const char* op;
  const char* name;
  const at::Tensor& t;

  const Argument& Weight(Doubles doubles = Doubles::kNever) const {
    const bool allow_double = doubles == Doubles::kAlways || doubles == Doubles::kWithX;
    TORCH_CHECK_TYPE(
        IsWeightType(t.scalar_type()) || (allow_double && t.scalar_type() == at::kDouble), op, ": ",
        name, ": has dtype ", NameOf(t.scalar_type()), ", takes float32, float16 or bfloat16",
        doubles == Doubles::kNever    ? ""
        : doubles == Doubles::kAlways ? ", or float64"
                                      : ", or float64 where x is float64");
    return *this;
  }
  const Argument& Type(at::ScalarType wanted) const {
    TORCH_CHECK_TYPE(t.scalar_type() == wanted, op, ": ", name, ": has dtype ",
                     NameOf(t.scalar_type()), ", takes ", NameOf(wanted));
    return *this;
  }
  const Argument& Index() const {
    TORCH_CHECK_TYPE(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, op, ": ", name,
                     ": has dtype ", NameOf(t.scalar_type()), ", takes int32 or int64");
    return *this;
  }
  const Argument& Dimensions(int64_t least, int64_t most) const {
    TORCH_CHECK_VALUE(t.dim() >= least && t.dim() <= most, op, ": ", name, ": has ", t.dim(),
                      t.dim() == 1 ? " dimension" : " dimensions", ", takes ", least,
                      least == most ? "" : " to " + std::to_string(most));
    return *this;
  }
  const Argument& Size(int64_t dimension, const c10::SymInt& wanted) const {
    TORCH_CHECK_VALUE(t.sym_size(dimension) == wanted, op, ": ", name, ": has shape ",
                      t.sym_sizes(), ", dimension ", dimension, " must be ", wanted);
    return *this;
  }
  const Argument& On(const at::Tensor& other) const {
    TORCH_CHECK_VALUE(t.device() == other.device(), op, ": ", name, ": is on ", t.device(),
                      ", the first tensor on ", other.device());
    TORCH_CHECK_VALUE(t.layout() == at::kStrided, op, ": ", name, ": is not a dense tensor");
    return *this;
  }
};

c10::SymInt Rows(const at::Tensor& x) {
  c10::SymInt rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows = rows * x.sym_size(i);
  return rows;
}

void CheckRowsIndex(const char* op, const char* name, const OptionalTensor& index,
                    const at::Tensor& x, const c10::SymInt& rows, const c10::SymInt& deltas) {
  if (index.has_value()) {
    Argument{op, name, *index}.Index().Dimensions(1, 1).Size(0, rows).On(x);
    return;
  }
  TORCH_CHECK_VALUE(deltas == 1, op, ": ", name, ": is needed, there are ", deltas, " deltas");
}

}  // namespace

BitDeltaSizes CheckBitDeltaLinear(const at::Tensor& x, const at::Tensor& base,
                                  const at::Tensor& signs, const at::Tensor& alpha,
                                  const OptionalTensor& variant_of_row,
                                  const OptionalTensor& bias) {
  const char* op = "bitdelta_linear";
  const Doubles doubles = x.scalar_type() == at::kDouble ? Doubles::kWithX : Doubles::kNotWithThisX;
  Argument{op, "x", x}.Weight(Doubles::kAlways).Dimensions(1, 64).On(x);
  Argument{op, "base", base}.Weight(doubles).Dimensions(2, 2).On(x);
  BitDeltaSizes sizes{.rows = Rows(x),
                      .d_out = base.sym_size(0),
                      .d_in = base.sym_size(1),
                      .variants = 1,
                      .planes = 1};
  Argument{op, "x", x}.Size(x.dim() - 1, sizes.d_in);
  Argument{op, "signs", signs}.Type(at::kByte).Dimensions(2, 4).On(x);
  Argument{op, "signs", signs}.Size(signs.dim() - 1, (sizes.d_in + 7) / 8);
  Argument{op, "signs", signs}.Size(signs.dim() - 2, sizes.d_out);
  if (signs.dim() >= 3) sizes.planes = signs.sym_size(signs.dim() - 3);
  if (signs.dim() == 4) sizes.variants = signs.sym_size(0);
  TORCH_CHECK_VALUE(sizes.planes >= 1 && sizes.planes <= kMaxSignPlanes, op, ": signs: has ",
                    sizes.planes, " planes, takes 1 to ", kMaxSignPlanes);
  const Argument scale{op, "alpha", alpha};
  scale.Weight(doubles).Dimensions(signs.dim() - 1, signs.dim() - 1).On(x);
  for (int64_t i = 0; i < alpha.dim(); ++i) scale.Size(i, signs.sym_size(i));
  if (bias.has_value()) {
    Argument{op, "bias", *bias}.Weight(doubles).Dimensions(1, 1).Size(0, sizes.d_out).On(x);
  }
  CheckRowsIndex(op, "variant_of_row", variant_of_row, x, sizes.rows, sizes.variants);
  return sizes;
}

void CheckBitDeltaCompress(const at::Tensor& base, const at::Tensor& fine_tuned) {
  const char* op = "bitdelta_compress";
  Argument{op, "base", base}.Weight().Dimensions(2, 2).On(base);
  const Argument tuned{op, "fine_tuned", fine_tuned};
  tuned.Weight().Dimensions(2, 2).Size(0, base.sym_size(0)).Size(1, base.sym_size(1)).On(base);
}

DeltaSizes CheckSparseDelta(const at::Tensor& x, const at::Tensor& row_offsets,
                            const at::Tensor& columns, const at::Tensor& values,
                            const OptionalTensor& delta_of_row) {
  const char* op = "sparse_delta_linear";
  Argument{op, "x", x}.Weight().Dimensions(1, 64).On(x);
  Argument{op, "row_offsets", row_offsets}.Type(at::kLong).Dimensions(1, 2).On(x);
  const c10::SymInt ends = row_offsets.sym_size(row_offsets.dim() - 1);
  TORCH_CHECK_VALUE(ends >= 1, op, ": row_offsets: has no elements, takes d_out + 1");
  Argument{op, "columns", columns}.Type(at::kInt).Dimensions(1, 1).On(x);
  Argument{op, "values", values}.Type(at::kFloat).Dimensions(1, 1).On(x);
  Argument{op, "values", values}.Size(0, columns.sym_size(0));
  DeltaSizes sizes{.rows = Rows(x),
                   .d_out = ends - 1,
                   .d_in = x.sym_size(x.dim() - 1),
                   .deltas = row_offsets.dim() == 2 ? row_offsets.sym_size(0) : c10::SymInt(1)};
  CheckRowsIndex(op, "delta_of_row", delta_of_row, x, sizes.rows, sizes.deltas);
  return sizes;
}

DeltaSizes CheckLora(const at::Tensor& x, const at::Tensor& a, const at::Tensor& b,
                     const OptionalTensor& delta_of_row) {
  const char* op = "lora_linear";
  Argument{op, "x", x}.Weight().Dimensions(1, 64).On(x);
  Argument{op, "a", a}.Weight().Dimensions(2, 3).On(x);
  Argument{op, "b", b}.Weight().Dimensions(a.dim(), a.dim()).On(x);
  Argument{op, "a", a}.Size(a.dim() - 1, x.sym_size(x.dim() - 1));
  Argument{op, "b", b}.Size(b.dim() - 1, a.sym_size(a.dim() - 2));
  if (a.dim() == 3) Argument{op, "b", b}.Size(0, a.sym_size(0));
  DeltaSizes sizes{.rows = Rows(x),
                   .d_out = b.sym_size(b.dim() - 2),
                   .d_in = x.sym_size(x.dim() - 1),
                   .deltas = a.dim() == 3 ? a.sym_size(0) : c10::SymInt(1)};
  CheckRowsIndex(op, "delta_of_row", delta_of_row, x, sizes.rows, sizes.deltas);
  return sizes;
}

void CheckTruncatedSvd(const at::Tensor& fine_tuned, const OptionalTensor& base,
                       const SvdNumbers& numbers) {
  const char* op = "truncated_svd";
  Argument{op, "fine_tuned", fine_tuned}.Weight().Dimensions(2, 2).On(fine_tuned);
  if (base.has_value()) {
    const Argument other{op, "base", *base};
    other.Weight().Dimensions(2, 2).On(fine_tuned);
    other.Size(0, fine_tuned.sym_size(0)).Size(1, fine_tuned.sym_size(1));
  }
  const auto [rank, oversampling, iterations] = numbers;
  TORCH_CHECK_VALUE(rank >= 0 && fine_tuned.sym_size(0) >= rank && fine_tuned.sym_size(1) >= rank,
                    op, ": rank: ", rank, " is not in [0, the smaller side of ",
                    fine_tuned.sym_sizes(), "]");
  TORCH_CHECK_VALUE(oversampling >= 0, op, ": oversampling: ", oversampling, " is negative");
  TORCH_CHECK_VALUE(iterations >= 1 && iterations <= kMaxSvdIterations, op,
                    ": iterations: ", iterations, " is not in [1, ", kMaxSvdIterations, "]");
}

std::vector<int32_t> IndexOfRows(const RowIndexName& name, const OptionalTensor& index,
                                 int64_t rows, int64_t deltas) {
  if (!index.has_value()) return std::vector<int32_t>(static_cast<size_t>(rows), 0);
  const at::Tensor wide = index->cpu().to(at::kLong).contiguous();
  const int64_t* data = wide.const_data_ptr<int64_t>();
  const std::string takes = deltas > 0 ? "0 to " + std::to_string(deltas - 1) + ", or " : "";
  std::vector<int32_t> out;
  for (int64_t t = 0; t < rows; ++t) {
    const bool fits = -1 <= data[t] && data[t] < deltas;
    TORCH_CHECK_VALUE(fits, name.op, ": ", name.argument, ": row ", t, " has index ", data[t],
                      ", takes ", takes, "-1 (", name.minus_one, ")");
    out.push_back(static_cast<int32_t>(data[t]));
  }
  return out;
}

void CheckSparseParts(int64_t v, std::span<const int64_t> offsets, std::span<const int32_t> columns,
                      int64_t d_in) {
  const int64_t first = offsets.front(), last = offsets.back();
  const auto count = static_cast<int64_t>(columns.size());
  TORCH_CHECK_VALUE(first >= 0 && first <= last && last <= count,
                    "sparse_delta_linear: row_offsets: delta ", v, " spans [", first, ", ", last,
                    ") of ", count, " elements");
  for (int64_t k = first; k < last; ++k) {
    const int32_t column = columns[static_cast<size_t>(k)];
    if (column >= 0) continue;
    const auto end = std::find_if(offsets.begin(), offsets.end(), [k](int64_t o) { return o > k; });
    TORCH_CHECK_VALUE(false, "sparse_delta_linear: columns: row ", end - offsets.begin() - 1,
                      " of delta ", v, " has column ", column, " of ", d_in);
  }
}

std::vector<c10::SymInt> OutputShape(const at::Tensor& x, c10::SymInt d_out) {
  std::vector<c10::SymInt> shape = x.sym_sizes().vec();
  shape.back() = std::move(d_out);
  return shape;
}

void RaiseUnlessOk(const char* op, const Status& status) {
  if (status.ok()) return;
  TORCH_CHECK_VALUE(status.code() != StatusCode::kInvalidArgument, op, ": ", status.message());
  TORCH_CHECK_NOT_IMPLEMENTED(status.code() != StatusCode::kUnavailable, op, ": ",
                              status.ToString());
  TORCH_CHECK(false, op, ": ", status.ToString());
}

DType DTypeOf(const at::Tensor& weight) {
  switch (weight.scalar_type()) {
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    default:
      return DType::kF32;
  }
}

WeightMatrix WeightView(const at::Tensor& weight) {
  // LibTorch gives sizes of 1 and 0 any stride.
  const int64_t stride = std::max(weight.stride(0), weight.size(1));
  return {weight.const_data_ptr(), DTypeOf(weight), weight.size(0), weight.size(1), stride};
}

at::Tensor DenseRows(const at::Tensor& t) {
  const int64_t last = t.dim() - 1;
  const bool dense = (t.size(last) <= 1 || t.stride(last) == 1) &&
                     (last == 0 || t.size(last - 1) <= 1 || t.stride(last - 1) >= t.size(last));
  return dense ? t : t.contiguous();
}

}  // namespace stockpot
