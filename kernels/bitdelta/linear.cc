// The checks of bitdelta_linear's arguments, the same for every backend.
#include "kernels/bitdelta/linear.h"

#include <string>

#include "kernels/bitdelta/packed_signs.h"

namespace stockpot {
namespace {

std::string ShapeText(int64_t rows, int64_t cols) {
  return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

// The checks leave naming to WithContext: a message is built only where one is needed, so that a
// decode step allocates nothing.
Status CheckWeight(const WeightMatrix& w, int64_t d_out, int64_t d_in) {
  if (!IsWeightDType(w.dtype)) {
    return InvalidArgument("dtype " + std::string(DTypeName(w.dtype)) + " is not F32, F16 or BF16");
  }
  if (w.rows != d_out || w.cols != d_in || (w.rows > 1 && w.stride < w.cols)) {
    return InvalidArgument("shape " + ShapeText(w.rows, w.cols) + " with row stride " +
                           std::to_string(w.stride) + ", need " + ShapeText(d_out, d_in));
  }
  if (w.data == nullptr && d_out * d_in > 0) return InvalidArgument("no data");
  return OkStatus();
}

Status CheckVariant(const LayerDelta& variant, int64_t d_out, int64_t d_in) {
  if (variant.signs != nullptr && variant.dense != nullptr) {
    return InvalidArgument("both signs and a dense weight");
  }
  if (variant.signs != nullptr &&
      (variant.signs->d_out() != d_out || variant.signs->d_in() != d_in)) {
    return InvalidArgument("signs of shape " +
                           ShapeText(variant.signs->d_out(), variant.signs->d_in()) + ", need " +
                           ShapeText(d_out, d_in));
  }
  if (variant.dense == nullptr) return OkStatus();
  const Status status = CheckWeight(*variant.dense, d_out, d_in);
  return status.ok() ? status : status.WithContext("dense");
}

Status CheckOutput(const LinearArgs& args, const LinearOutput& output) {
  const int64_t rows = args.x.rows;
  const int64_t d_in = args.x.cols;
  const int64_t d_out = output.base.rows;
  if (d_out < 0) return InvalidArgument("base: shape " + ShapeText(d_out, output.base.cols));
  if (output.base.cols != d_in) {
    return InvalidArgument("x: " + std::to_string(d_in) + " columns, the base takes " +
                           std::to_string(output.base.cols));
  }
  const Status base = CheckWeight(output.base, d_out, d_in);
  if (!base.ok()) return base.WithContext("base");
  if (output.y.rows != rows || output.y.cols != d_out || (rows > 1 && output.y.stride < d_out) ||
      (output.y.data == nullptr && rows * d_out > 0)) {
    return InvalidArgument("y: shape " + ShapeText(output.y.rows, output.y.cols) + ", need " +
                           ShapeText(rows, d_out));
  }
  for (size_t v = 0; v < output.variants.size(); ++v) {
    const Status variant = CheckVariant(output.variants[v], d_out, d_in);
    if (!variant.ok()) return variant.WithContext("variants[" + std::to_string(v) + "]");
  }
  if (args.variant_of_row.empty()) return OkStatus();
  for (const int32_t v : args.variant_of_row) {
    if (v < -1 || v >= static_cast<int64_t>(output.variants.size())) {
      return InvalidArgument("variant_of_row: index " + std::to_string(v) + " of " +
                             std::to_string(output.variants.size()) + " variants");
    }
  }
  return OkStatus();
}

template <class T>
Status CheckPerRow(const char* name, std::span<const T> values, int64_t rows) {
  if (values.empty() || static_cast<int64_t>(values.size()) == rows) return OkStatus();
  return InvalidArgument(std::string(name) + ": " + std::to_string(values.size()) +
                         " entries for " + std::to_string(rows) + " rows");
}

}  // namespace

Status CheckLinearArgs(const LinearArgs& args) {
  const LinearInput& x = args.x;
  if (x.dtype != DType::kF32 && x.dtype != DType::kBF16) {
    return InvalidArgument("x: dtype " + std::string(DTypeName(x.dtype)) + " is not F32 or BF16");
  }
  if (x.rows < 0 || x.cols < 0 || (x.rows > 1 && x.stride < x.cols) ||
      (x.data == nullptr && x.rows * x.cols > 0)) {
    return InvalidArgument("x: shape " + ShapeText(x.rows, x.cols) + " with row stride " +
                           std::to_string(x.stride));
  }
  if (args.outputs.empty()) return InvalidArgument("outputs: none, need one or more weights");
  STOCKPOT_RETURN_IF_ERROR(CheckPerRow("variant_of_row", args.variant_of_row, x.rows));
  STOCKPOT_RETURN_IF_ERROR(CheckPerRow("sum_of_row", args.sum_of_row, x.rows));
  for (size_t i = 0; i < args.outputs.size(); ++i) {
    const Status status = CheckOutput(args, args.outputs[i]);
    if (status.ok()) continue;
    return args.outputs.size() == 1 ? status
                                    : status.WithContext("outputs[" + std::to_string(i) + "]");
  }
  return OkStatus();
}

}  // namespace stockpot
