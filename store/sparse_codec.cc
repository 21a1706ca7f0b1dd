#include "store/sparse_codec.h"

#include <cstring>
#include <string>

namespace stockpot {
namespace {

bool Differs(const std::byte* a, const std::byte* b, int64_t index, int64_t element_bytes) {
  return std::memcmp(a + index * element_bytes, b + index * element_bytes,
                     static_cast<size_t>(element_bytes)) != 0;
}

void AppendColumn(uint32_t column, int64_t bytes, std::vector<std::byte>& out) {
  for (int64_t i = 0; i < bytes; ++i) out.push_back(static_cast<std::byte>(column >> (8 * i)));
}

}  // namespace

int64_t CountChanged(const std::byte* base, const std::byte* tuned, const SparseShape& shape) {
  const int64_t elements = shape.d_out * shape.d_in;
  int64_t changed = 0;
  for (int64_t i = 0; i < elements; ++i) changed += Differs(base, tuned, i, shape.element_bytes);
  return changed;
}

SparseParts EncodeSparse(const std::byte* base, const std::byte* tuned, const SparseShape& shape) {
  SparseParts parts;
  parts.counts.resize(static_cast<size_t>(shape.d_out));
  for (int64_t row = 0; row < shape.d_out; ++row) {
    for (int64_t column = 0; column < shape.d_in; ++column) {
      const int64_t i = row * shape.d_in + column;
      if (!Differs(base, tuned, i, shape.element_bytes)) continue;
      ++parts.counts[static_cast<size_t>(row)];
      AppendColumn(static_cast<uint32_t>(column), SparseColumnBytes(shape.d_in), parts.columns);
      const std::byte* value = tuned + i * shape.element_bytes;
      parts.values.insert(parts.values.end(), value, value + shape.element_bytes);
    }
  }
  return parts;
}

Result<std::vector<int64_t>> SparseOffsets(std::span<const uint32_t> counts, int64_t d_in,
                                           int64_t changed) {
  std::vector<int64_t> offsets = {0};
  offsets.reserve(counts.size() + 1);
  for (size_t row = 0; row < counts.size(); ++row) {
    if (counts[row] > d_in) {
      return Corruption("row " + std::to_string(row) + " has " + std::to_string(counts[row]) +
                        " changed elements of " + std::to_string(d_in));
    }
    offsets.push_back(offsets.back() + counts[row]);
  }
  if (offsets.back() != changed) {
    return Corruption("the rows have " + std::to_string(offsets.back()) +
                      " changed elements together, " + std::to_string(changed) + " are stored");
  }
  return offsets;
}

Result<std::vector<uint32_t>> SparseColumns(std::span<const int64_t> offsets,
                                            std::span<const std::byte> columns, int64_t d_in) {
  const int64_t width = SparseColumnBytes(d_in);
  const int64_t count = offsets.back() - offsets.front();
  if (static_cast<int64_t>(columns.size()) != count * width) {
    return Corruption("bytes of columns for another number of elements");
  }
  std::vector<uint32_t> out(static_cast<size_t>(count));
  for (size_t row = 0; row + 1 < offsets.size(); ++row) {
    int64_t least = 0;
    for (int64_t i = offsets[row] - offsets[0]; i < offsets[row + 1] - offsets[0]; ++i) {
      uint32_t column = 0;
      for (int64_t b = 0; b < width; ++b) {
        column |= std::to_integer<uint32_t>(columns[static_cast<size_t>(i * width + b)]) << (8 * b);
      }
      if (column < least || column >= d_in) {
        return Corruption("column " + std::to_string(column) + " of changed element " +
                          std::to_string(i) + " is out of range or order");
      }
      least = int64_t{column} + 1;
      out[static_cast<size_t>(i)] = column;
    }
  }
  return out;
}

}  // namespace stockpot
