#include "store/delta_reader.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/bitdelta/signs.h"
#include "store/bitdelta_parts.h"
#include "store/sparse_codec.h"
#include "store/tensor_source.h"
#include "store/weight_rounding.h"

namespace stockpot {
namespace {

constexpr int64_t kDecodeBytes = int64_t{2} << 20;  // of the base, decoded at a time

template <typename T>
std::span<std::byte> AsBytes(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

}  // namespace

Status DeltaReader::Check(const TensorEntry& entry, const TensorEntry& base) {
  if (base.codec != Codec::kRaw || !base.alias_of.empty() || !base.pieces.empty()) {
    return Corruption("the base's tensor is not stored whole");
  }
  if (!FitsOver(entry, base)) {
    return Corruption("shape " + ShapeText(entry.shape) + ", the base has " +
                      ShapeText(base.shape));
  }
  if (!IsWeightDType(base.dtype)) return Corruption("the base's is not float");
  if (entry.codec == Codec::kSparse && entry.dtype != base.dtype) {
    return Corruption("changed elements of another dtype than the base's");
  }
  return OkStatus();
}

DeltaReader::DeltaReader(const TensorEntry& entry, const TensorEntry& base, PartReader read,
                         bool as_f32)
    : entry_(entry),
      base_(base),
      read_(std::move(read)),
      dtype_(as_f32 && entry.codec == Codec::kBitDelta ? DType::kF32 : entry.dtype) {}

// Whole rows that cover the range, a few at a time; the range is cut out of them.
Status DeltaReader::Read(int64_t offset, std::span<std::byte> out) const {
  const int64_t size = static_cast<int64_t>(out.size());
  const int64_t bytes = entry_.elements() * DTypeSize(dtype_);
  if (offset < 0 || size > bytes || offset > bytes - size) {
    return InvalidArgument("read past the end");
  }
  const int64_t cols = entry_.shape[1];
  if (size == 0 || cols == 0) return OkStatus();
  const int64_t row_bytes = cols * DTypeSize(dtype_);
  const int64_t block_rows = std::max<int64_t>(1, kDecodeBytes / (cols * DTypeSize(base_.dtype)));
  const int64_t end = offset + size;
  const int64_t end_row = (end + row_bytes - 1) / row_bytes;
  std::vector<std::byte> decoded;
  const int64_t overlap = entry_.overlap_rows();
  for (int64_t row = offset / row_bytes, rows = 0; row < end_row; row += rows) {
    rows = std::min(block_rows, (row < overlap ? std::min(overlap, end_row) : end_row) - row);
    decoded.resize(static_cast<size_t>(rows * row_bytes));
    STOCKPOT_RETURN_IF_ERROR(DecodeRows(row, rows, decoded.data()));
    const int64_t from = std::max(offset, row * row_bytes);
    const int64_t to = std::min(end, (row + rows) * row_bytes);
    std::memcpy(out.data() + (from - offset), decoded.data() + (from - row * row_bytes),
                static_cast<size_t>(to - from));
  }
  return OkStatus();
}

Status DeltaReader::DecodeRows(int64_t row, int64_t rows, std::byte* out) const {
  if (row >= entry_.overlap_rows()) return ReadRowsBehind(row, rows, out);
  const int64_t base_row_bytes = base_.shape[1] * DTypeSize(base_.dtype);
  const Part& data = base_.parts.at("data");
  const size_t bytes = static_cast<size_t>(rows * base_row_bytes);
  if (entry_.codec == Codec::kSparse) {
    STOCKPOT_RETURN_IF_ERROR(read_(data, row * base_row_bytes, {out, bytes}));
    return Patch(row, rows, out);
  }
  std::vector<std::byte> base(bytes);
  STOCKPOT_RETURN_IF_ERROR(read_(data, row * base_row_bytes, base));
  return DecodeSigns(row, rows, base.data(), out);
}

Status DeltaReader::DecodeSigns(int64_t row, int64_t rows, const std::byte* base,
                                std::byte* out) const {
  const int64_t cols = entry_.shape[1];
  std::vector<double> weights(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows * cols; ++i) {
    weights[static_cast<size_t>(i)] = LoadWeight(base, base_.dtype, i);
  }
  STOCKPOT_RETURN_IF_ERROR(AddPlanes(row, rows, weights));
  STOCKPOT_RETURN_IF_ERROR(AddResidual(row, rows, weights));
  for (int64_t i = 0; i < rows * cols; ++i) {
    StoreWeight(weights[static_cast<size_t>(i)], dtype_, out, i);
  }
  return OkStatus();
}

Status DeltaReader::AddPlanes(int64_t row, int64_t rows, std::span<double> weights) const {
  const int64_t cols = entry_.shape[1];
  std::vector<uint8_t> signs(static_cast<size_t>(SignBytes(rows, cols)));
  std::vector<float> alpha(static_cast<size_t>(rows));
  for (int64_t plane = 0; plane < SignPlanes(entry_); ++plane) {
    STOCKPOT_RETURN_IF_ERROR(
        read_(entry_.parts.at(SignsRole(plane)), row * SignRowBytes(cols), AsBytes(signs)));
    STOCKPOT_RETURN_IF_ERROR(read_(entry_.parts.at(AlphaRole(plane)), row * 4, AsBytes(alpha)));
    for (int64_t r = 0; r < rows; ++r) {
      const double scale = alpha[static_cast<size_t>(r)];
      for (int64_t c = 0; c < cols; ++c) {
        weights[static_cast<size_t>(r * cols + c)] += scale * SignAt(signs.data(), cols, r, c);
      }
    }
  }
  return OkStatus();
}

Status DeltaReader::AddResidual(int64_t row, int64_t rows, std::span<double> weights) const {
  const int64_t rank = ResidualRank(entry_);
  if (rank == 0) return OkStatus();
  const int64_t cols = entry_.shape[1];
  std::vector<uint16_t> a(static_cast<size_t>(rank * cols));
  std::vector<uint16_t> b(static_cast<size_t>(rows * rank));
  STOCKPOT_RETURN_IF_ERROR(read_(entry_.parts.at(kResidualA), 0, AsBytes(a)));
  STOCKPOT_RETURN_IF_ERROR(read_(entry_.parts.at(kResidualB), row * rank * 2, AsBytes(b)));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < rank; ++k) {
      const double factor = FloatFromBF16(b[static_cast<size_t>(r * rank + k)]);
      for (int64_t c = 0; c < cols; ++c) {
        weights[static_cast<size_t>(r * cols + c)] +=
            factor * FloatFromBF16(a[static_cast<size_t>(k * cols + c)]);
      }
    }
  }
  return OkStatus();
}

Status DeltaReader::ReadRowsBehind(int64_t row, int64_t rows, std::byte* out) const {
  const int64_t row_bytes = entry_.shape[1] * DTypeSize(dtype_);
  return read_(entry_.parts.at("rows"), (row - entry_.overlap_rows()) * row_bytes,
               {out, static_cast<size_t>(rows * row_bytes)});
}

// Writes the changed elements over the base's.
Status DeltaReader::Patch(int64_t row, int64_t rows, std::byte* out) const {
  const int64_t cols = entry_.shape[1];
  const int64_t size = DTypeSize(dtype_);
  const Part& values_part = entry_.parts.at("values");
  std::vector<uint32_t> counts(static_cast<size_t>(entry_.overlap_rows()));
  STOCKPOT_RETURN_IF_ERROR(read_(entry_.parts.at("counts"), 0, AsBytes(counts)));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                            SparseOffsets(counts, cols, values_part.bytes / size));
  const std::span<const int64_t> offsets =
      std::span(all).subspan(static_cast<size_t>(row), static_cast<size_t>(rows) + 1);
  const int64_t first = offsets.front();
  const int64_t count = offsets.back() - first;
  const int64_t width = SparseColumnBytes(cols);
  std::vector<std::byte> stored(static_cast<size_t>(count * width));
  STOCKPOT_RETURN_IF_ERROR(read_(entry_.parts.at("columns"), first * width, stored));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<uint32_t> columns,
                            SparseColumns(offsets, stored, cols));
  std::vector<std::byte> values(static_cast<size_t>(count * size));
  STOCKPOT_RETURN_IF_ERROR(read_(values_part, first * size, values));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = offsets[static_cast<size_t>(r)] - first;
         i < offsets[static_cast<size_t>(r) + 1] - first; ++i) {
      std::memcpy(out + (r * cols + columns[static_cast<size_t>(i)]) * size,
                  values.data() + i * size, static_cast<size_t>(size));
    }
  }
  return OkStatus();
}

}  // namespace stockpot
