#include "store/tensor_source.h"

#include <algorithm>

#include "store/digest.h"
#include "store/raw_tensor_reader.h"

namespace stockpot {

const TensorInfo* TensorSource::Find(std::string_view name) const {
  const std::vector<TensorInfo>& all = tensors();
  const auto it = std::lower_bound(
      all.begin(), all.end(), name,
      [](const TensorInfo& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return it != all.end() && it->name == name ? &*it : nullptr;
}

Result<std::vector<std::byte>> TensorSource::ReadAll(std::string_view name) const {
  const TensorInfo* info = Find(name);
  if (info == nullptr) return NotFound("no tensor '" + std::string(name) + "'");
  std::vector<std::byte> bytes(static_cast<size_t>(info->bytes()));
  STOCKPOT_RETURN_IF_ERROR(Read(name, 0, bytes));
  return bytes;
}

Status TensorSource::ReadBox(std::string_view name, const TensorBox& box,
                             std::span<std::byte> out) const {
  const TensorInfo* info = Find(name);
  if (info == nullptr) return NotFound("no tensor '" + std::string(name) + "'");
  const int64_t width = DTypeSize(info->dtype);
  Status status = CheckBox(info->shape, box);
  if (status.ok() && box.elements() * width != static_cast<int64_t>(out.size())) {
    status = InvalidArgument(BoxText(box) + " has " + std::to_string(box.elements() * width) +
                             " bytes, not " + std::to_string(out.size()));
  }
  if (!status.ok()) return status.WithContext("tensor '" + std::string(name) + "'");
  const auto read = [&](int64_t offset, std::span<std::byte> bytes) {
    return Read(name, offset, bytes);
  };
  return ReadByteBox(ByteBox(WholeBox(info->shape), width).shape, read, ByteBox(box, width), out);
}

Result<bool> SameBytes(const TensorSource& a, std::string_view name_in_a, const TensorSource& b,
                       std::string_view name_in_b) {
  const int64_t bytes = a.Find(name_in_a)->bytes();
  if (b.Find(name_in_b)->bytes() != bytes) return false;
  std::vector<std::byte> of_a(static_cast<size_t>(std::min(bytes, kChunkBytes)));
  std::vector<std::byte> of_b(of_a.size());
  for (int64_t offset = 0; offset < bytes; offset += kChunkBytes) {
    const auto n = static_cast<size_t>(std::min(kChunkBytes, bytes - offset));
    STOCKPOT_RETURN_IF_ERROR(a.Read(name_in_a, offset, std::span(of_a).first(n)));
    STOCKPOT_RETURN_IF_ERROR(b.Read(name_in_b, offset, std::span(of_b).first(n)));
    if (!std::equal(of_a.begin(), of_a.begin() + static_cast<ptrdiff_t>(n), of_b.begin())) {
      return false;
    }
  }
  return true;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace stockpot
