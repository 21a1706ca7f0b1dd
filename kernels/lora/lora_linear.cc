// Checking and packing adapters; nothing here is on the path of a request.
#include "kernels/lora/lora_linear.h"

#include <cmath>
#include <cstring>
#include <string>

#include "kernels/base/row_groups.h"
#include "kernels/lora/lora_layout.h"

namespace stockpot {
namespace {

Status CheckFactor(const WeightMatrix& w) {
  if (!IsWeightDType(w.dtype)) {
    return InvalidArgument("dtype " + std::string(DTypeName(w.dtype)) + " is not F32, F16 or BF16");
  }
  if (w.rows < 0 || w.cols < 0 || w.rows > kMaxLoraDimension || w.cols > kMaxLoraDimension ||
      (w.rows > 1 && w.stride < w.cols)) {
    return InvalidArgument("shape " + ShapeName(w.rows, w.cols) + " with row stride " +
                           std::to_string(w.stride));
  }
  if (w.data == nullptr && w.rows > 0 && w.cols > 0) return InvalidArgument("no data");
  for (int64_t r = 0; r < w.rows; ++r) {
    for (int64_t c = 0; c < w.cols; ++c) {
      if (!std::isfinite(w.at(r, c))) return InvalidArgument("not finite at " + ShapeName(r, c));
    }
  }
  return OkStatus();
}

Status CheckScaled(const WeightMatrix& b, float scale) {
  if (!std::isfinite(scale)) return InvalidArgument("scale: not finite");
  for (int64_t o = 0; o < b.rows; ++o) {
    for (int64_t k = 0; k < b.cols; ++k) {
      if (!std::isfinite(scale * b.at(o, k))) {
        return InvalidArgument("scale: scale * b overflows at " + ShapeName(o, k));
      }
    }
  }
  return OkStatus();
}

// True if scale * b loses nothing in bf16.
bool IsExactInBF16(const WeightMatrix& b, float scale) {
  for (int64_t o = 0; o < b.rows; ++o) {
    for (int64_t k = 0; k < b.cols; ++k) {
      // The product of a float and a bf16 value has up to 32 bits: exact in double alone.
      const double product = static_cast<double>(scale) * b.at(o, k);
      if (FloatFromBF16(BF16FromFloat(static_cast<float>(product))) != product) return false;
    }
  }
  return true;
}

void Put(unsigned char* data, DType dtype, int64_t index, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(data + index * 4, &value, sizeof value);
  } else {
    const uint16_t bits = BF16FromFloat(value);
    std::memcpy(data + index * 2, &bits, sizeof bits);
  }
}

void PackA(const WeightMatrix& a, LoraDelta::Layout& layout) {
  layout.a_dtype = a.dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
  layout.a_stride = (a.cols + kLoraPadding - 1) / kLoraPadding * kLoraPadding;
  unsigned char* to = layout.a.Reserve(a.rows * layout.a_stride * DTypeSize(layout.a_dtype));
  for (int64_t k = 0; k < a.rows; ++k) {
    for (int64_t i = 0; i < layout.a_stride; ++i) {
      Put(to, layout.a_dtype, k * layout.a_stride + i, i < a.cols ? a.at(k, i) : 0.0f);
    }
  }
}

void PackB(const WeightMatrix& b, float scale, LoraDelta::Layout& layout) {
  const bool keep = b.dtype == DType::kBF16 && IsExactInBF16(b, scale);
  layout.b_dtype = keep ? DType::kBF16 : DType::kF32;
  const int64_t padded_rows = layout.blocks() * kLoraBlockRows;
  unsigned char* to = layout.b.Reserve(padded_rows * layout.rank * DTypeSize(layout.b_dtype));
  for (int64_t o = 0; o < padded_rows; ++o) {
    for (int64_t k = 0; k < layout.rank; ++k) {
      Put(to, layout.b_dtype, layout.BIndex(o, k), o < b.rows ? scale * b.at(o, k) : 0.0f);
    }
  }
}

}  // namespace

LoraDelta::LoraDelta(std::unique_ptr<Layout> layout) : layout_(std::move(layout)) {}
LoraDelta::LoraDelta(LoraDelta&&) noexcept = default;
LoraDelta& LoraDelta::operator=(LoraDelta&&) noexcept = default;
LoraDelta::~LoraDelta() = default;

int64_t LoraDelta::d_out() const { return layout_->d_out; }
int64_t LoraDelta::d_in() const { return layout_->d_in; }
int64_t LoraDelta::rank() const { return layout_->rank; }
int64_t LoraDelta::bytes() const { return layout_->a.capacity() + layout_->b.capacity(); }

Result<LoraDelta> LoraDelta::Pack(const WeightMatrix& a, const WeightMatrix& b, float scale) {
  const Status a_status = CheckFactor(a);
  if (!a_status.ok()) return a_status.WithContext("a");
  const Status b_status = CheckFactor(b);
  if (!b_status.ok()) return b_status.WithContext("b");
  if (a.rows > kMaxLoraRank) {
    return InvalidArgument("a: rank " + std::to_string(a.rows) + ", at most " +
                           std::to_string(kMaxLoraRank));
  }
  if (b.cols != a.rows) {
    return InvalidArgument("b: shape " + ShapeName(b.rows, b.cols) + " for rank " +
                           std::to_string(a.rows));
  }
  STOCKPOT_RETURN_IF_ERROR(CheckScaled(b, scale));
  auto layout = std::make_unique<Layout>();
  layout->d_out = b.rows;
  layout->d_in = a.cols;
  layout->rank = a.rows;
  PackA(a, *layout);
  PackB(b, scale, *layout);
  return LoraDelta(std::move(layout));
}

Status CheckLoraArgs(const LoraLinearArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckDeltaBatch({.x = args.x,
                                            .delta_of_row = args.delta_of_row,
                                            .delta_count = static_cast<int64_t>(args.deltas.size()),
                                            .y = args.y}));
  for (size_t v = 0; v < args.deltas.size(); ++v) {
    const LoraDelta* delta = args.deltas[v];
    if (delta == nullptr) continue;
    if (delta->d_out() != args.y.cols || delta->d_in() != args.x.cols) {
      return InvalidArgument("deltas[" + std::to_string(v) + "]: shape " +
                             ShapeName(delta->d_out(), delta->d_in()) + ", x and y need " +
                             ShapeName(args.y.cols, args.x.cols));
    }
  }
  return OkStatus();
}

}  // namespace stockpot
