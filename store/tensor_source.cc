#include "store/tensor_source.h"

#include <algorithm>

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

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace stockpot
