#include "kernels/base/dtype.h"

#include <array>
#include <utility>

namespace stockpot {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  int64_t size;
};

constexpr std::array<Row, 15> kTable{{
    {DType::kF64, "F64", 8},
    {DType::kF32, "F32", 4},
    {DType::kF16, "F16", 2},
    {DType::kBF16, "BF16", 2},
    {DType::kI64, "I64", 8},
    {DType::kI32, "I32", 4},
    {DType::kI16, "I16", 2},
    {DType::kI8, "I8", 1},
    {DType::kU64, "U64", 8},
    {DType::kU32, "U32", 4},
    {DType::kU16, "U16", 2},
    {DType::kU8, "U8", 1},
    {DType::kBool, "BOOL", 1},
    {DType::kF8E4M3, "F8_E4M3", 1},
    {DType::kF8E5M2, "F8_E5M2", 1},
}};

}  // namespace

std::string_view DTypeName(DType dtype) { return kTable[static_cast<size_t>(dtype)].name; }

std::optional<DType> DTypeFromName(std::string_view name) {
  for (const Row& row : kTable) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

int64_t DTypeSize(DType dtype) { return kTable[static_cast<size_t>(dtype)].size; }

}  // namespace stockpot
