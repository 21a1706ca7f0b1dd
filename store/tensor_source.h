// Where the tensors of one model come from: a Hugging Face folder, an artifact of the store, or
// memory. The one interface that the model loader, the codecs and the exporter read from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/base/status.h"
#include "store/tensor_box.h"

namespace stockpot {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::string alias_of;  // not empty: tied to that tensor

  int64_t elements() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  int64_t bytes() const { return elements() * DTypeSize(dtype); }
};

// Immutable once made. Thread promise: any thread, unless an implementation says otherwise.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  // Sorted by name.
  virtual const std::vector<TensorInfo>& tensors() const = 0;
  // The verified logical bytes [offset, offset + out.size()) of a tensor (of its target, for an
  // alias).
  virtual Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const = 0;
  // A box of a tensor, row-major: what one of any number of ranks loads. InvalidArgument: past the
  // tensor's end, or `out` is not of the box's size.
  virtual Status ReadBox(std::string_view name, const TensorBox& box,
                         std::span<std::byte> out) const;
  // The contents of config.json and the like. NotFound: there is no such file.
  virtual Result<std::string> ReadFile(std::string_view name) const = 0;
  virtual std::vector<std::string> files() const = 0;

  // Null if there is none.
  const TensorInfo* Find(std::string_view name) const;
  // The whole tensor.
  Result<std::vector<std::byte>> ReadAll(std::string_view name) const;
};

// Whether two tensors, each of its own source, have the same bytes. Reads until they differ.
// REQUIRES: both exist.
Result<bool> SameBytes(const TensorSource& a, std::string_view name_in_a, const TensorSource& b,
                       std::string_view name_in_b);

// "[576, 1536]", for messages.
std::string ShapeText(const std::vector<int64_t>& shape);

}  // namespace stockpot
