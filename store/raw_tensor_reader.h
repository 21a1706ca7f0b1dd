// The one way to the logical bytes of a raw tensor, whether it is stored whole or in the pieces
// that ranks sent: publish, merge, export, serving and fetching on any number of ranks read here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/base/status.h"
#include "store/manifest.h"
#include "store/tensor_box.h"

namespace stockpot {

// Fills `out` with the bytes [offset, offset + out.size()) of a part.
using PartReader =
    std::function<Status(const Part& part, int64_t offset, std::span<std::byte> out)>;

// Thread promise: as the PartReader's. Memory: up to 16 MiB for a read that is not one run of the
// stored bytes.
class RawTensorReader {
 public:
  // `entry` must outlive the reader. REQUIRES: codec raw, no alias, of a valid manifest.
  RawTensorReader(const TensorEntry& entry, PartReader read);

  // The bytes [offset, offset + out.size()) of the tensor, row-major. InvalidArgument: past the
  // end.
  Status Read(int64_t offset, std::span<std::byte> out) const;
  // A box of it, row-major. Reads little but the chunks that hold elements of the box.
  // InvalidArgument: past the tensor's end, or `out` is not of the box's size.
  Status ReadBox(const TensorBox& box, std::span<std::byte> out) const;

 private:
  // In bytes: the innermost dimension times the size of an element; a scalar is [size].
  struct Piece {
    TensorBox bytes;
    const Part* part = nullptr;
  };

  Status ReadBytes(const TensorBox& target, std::span<std::byte> out) const;

  const TensorEntry& entry_;
  const PartReader read_;
  std::vector<int64_t> byte_shape_;
  std::vector<Piece> pieces_;
};

// A box out of something that is stored row-major and whole: `read(offset, out)` gives its bytes.
// `box` and `shape` are in bytes in the innermost dimension.
using ByteReader = std::function<Status(int64_t offset, std::span<std::byte> out)>;
Status ReadByteBox(const std::vector<int64_t>& shape, const ByteReader& read, const TensorBox& box,
                   std::span<std::byte> out);

// With the innermost dimension in bytes.
TensorBox ByteBox(const TensorBox& box, int64_t element_bytes);

}  // namespace stockpot
