#include "kernels/bitdelta/linear.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/bitdelta/packed_signs.h"
#include "kernels/bitdelta/signs.h"

namespace stockpot {
namespace {

constexpr int64_t kMaxDimension = int64_t{1} << 31;

// Inverts the lower three bits of every group of four whose last bit is 1; its own inverse.
uint32_t FoldGroups(uint32_t word) {
  const uint32_t last = (word >> 3) & 0x11111111u;
  return word ^ (last * 7u);
}

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

}  // namespace

PackedSigns::PackedSigns(std::unique_ptr<Layout> layout) : layout_(std::move(layout)) {}
PackedSigns::PackedSigns(PackedSigns&&) noexcept = default;
PackedSigns& PackedSigns::operator=(PackedSigns&&) noexcept = default;
PackedSigns::~PackedSigns() = default;

int64_t PackedSigns::d_out() const { return layout_->d_out; }
int64_t PackedSigns::d_in() const { return layout_->d_in; }
int64_t PackedSigns::bytes() const {
  const int64_t rows = layout_->row_blocks * kSignBlockRows;
  return rows * (layout_->column_words + 1) * static_cast<int64_t>(sizeof(uint32_t));
}

float PackedSigns::Layout::SignAt(int64_t row, int64_t col) const {
  const uint32_t folded =
      block(row / kSignBlockRows)[col / kSignWordColumns * kSignBlockRows + row % kSignBlockRows];
  return (FoldGroups(folded) >> (col % kSignWordColumns)) & 1 ? 1.0f : -1.0f;
}

Result<PackedSigns> PackedSigns::Pack(int64_t d_out, int64_t d_in, std::span<const uint8_t> signs,
                                      std::span<const float> alpha) {
  if (d_out < 0 || d_in < 0 || d_out > kMaxDimension || d_in > kMaxDimension) {
    return InvalidArgument("signs: shape " + ShapeText(d_out, d_in));
  }
  if (static_cast<int64_t>(signs.size()) != SignBytes(d_out, d_in)) {
    return InvalidArgument("signs: " + std::to_string(signs.size()) + " bytes, need " +
                           std::to_string(SignBytes(d_out, d_in)));
  }
  const int64_t scales = static_cast<int64_t>(alpha.size());
  if (scales != d_out && scales != 1) {
    return InvalidArgument("alpha: " + std::to_string(scales) + " values, need " +
                           std::to_string(d_out) + " or 1");
  }
  auto layout = std::make_unique<Layout>();
  layout->d_out = d_out;
  layout->d_in = d_in;
  layout->row_blocks = (d_out + kSignBlockRows - 1) / kSignBlockRows;
  layout->column_words = (d_in + kSignWordColumns - 1) / kSignWordColumns;
  const int64_t padded_rows = layout->row_blocks * kSignBlockRows;
  uint32_t* words = layout->words.Reserve(padded_rows * layout->column_words);
  float* row_alpha = layout->alpha.Reserve(padded_rows);
  const int64_t row_bytes = SignRowBytes(d_in);
  for (int64_t row = 0; row < padded_rows; ++row) {
    row_alpha[row] = row < d_out ? alpha[scales == 1 ? 0 : row] : 0.0f;
    for (int64_t word = 0; word < layout->column_words; ++word) {
      uint32_t bits = 0;
      if (row < d_out) {
        const int64_t first = word * (kSignWordColumns / 8);
        std::memcpy(&bits, signs.data() + row * row_bytes + first,
                    std::min<int64_t>(sizeof bits, row_bytes - first));
      }
      const int64_t block = row / kSignBlockRows * layout->column_words + word;
      words[block * kSignBlockRows + row % kSignBlockRows] = FoldGroups(bits);
    }
  }
  return PackedSigns(std::move(layout));
}

Status CheckLinearArgs(const LinearArgs& args) {
  const int64_t rows = args.x.rows;
  const int64_t d_out = args.base.rows;
  const int64_t d_in = args.base.cols;
  if (d_out < 0 || d_in < 0) return InvalidArgument("base: shape " + ShapeText(d_out, d_in));
  const Status base = CheckWeight(args.base, d_out, d_in);
  if (!base.ok()) return base.WithContext("base");
  if (rows < 0 || args.x.cols != d_in || (rows > 1 && args.x.stride < d_in) ||
      (args.x.data == nullptr && rows * d_in > 0)) {
    return InvalidArgument("x: shape " + ShapeText(rows, args.x.cols) + ", the base takes " +
                           std::to_string(d_in) + " columns");
  }
  if (args.y.rows != rows || args.y.cols != d_out || (rows > 1 && args.y.stride < d_out) ||
      (args.y.data == nullptr && rows * d_out > 0)) {
    return InvalidArgument("y: shape " + ShapeText(args.y.rows, args.y.cols) + ", need " +
                           ShapeText(rows, d_out));
  }
  for (size_t v = 0; v < args.variants.size(); ++v) {
    const Status variant = CheckVariant(args.variants[v], d_out, d_in);
    if (!variant.ok()) return variant.WithContext("variants[" + std::to_string(v) + "]");
  }
  if (args.variant_of_row.empty()) return OkStatus();
  if (static_cast<int64_t>(args.variant_of_row.size()) != rows) {
    return InvalidArgument("variant_of_row: " + std::to_string(args.variant_of_row.size()) +
                           " entries for " + std::to_string(rows) + " rows");
  }
  for (const int32_t v : args.variant_of_row) {
    if (v < -1 || v >= static_cast<int64_t>(args.variants.size())) {
      return InvalidArgument("variant_of_row: index " + std::to_string(v) + " of " +
                             std::to_string(args.variants.size()) + " variants");
    }
  }
  return OkStatus();
}

}  // namespace stockpot
