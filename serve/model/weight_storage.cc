#include <cstring>
#include <new>

#include "kernels/bitdelta/signs.h"
#include "serve/model/weights_internal.h"

namespace stockpot {
namespace {

constexpr int64_t kCheckBlock = 256;  // elements; a fixed length lets the compiler vectorise

// True if one of `count` values has all exponent bits set. The order of magnitudes is that of
// integers.
template <typename Bits>
bool HasNonFinite(const Bits* values, int64_t count, Bits exponent_mask) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  int64_t i = 0;
  for (; i + kCheckBlock <= count; i += kCheckBlock) {
    Bits bad = 0;
    for (int64_t j = 0; j < kCheckBlock; ++j) {
      bad |= static_cast<Bits>((values[i + j] & kMagnitude) >= exponent_mask);
    }
    if (bad != 0) return true;
  }
  for (; i < count; ++i) {
    if ((values[i] & kMagnitude) >= exponent_mask) return true;
  }
  return false;
}

bool HasNonFinite(DType dtype, const void* data, int64_t count) {
  switch (dtype) {
    case DType::kBF16:
      return HasNonFinite<uint16_t>(static_cast<const uint16_t*>(data), count, 0x7f80);
    case DType::kF16:
      return HasNonFinite<uint16_t>(static_cast<const uint16_t*>(data), count, 0x7c00);
    default:
      return HasNonFinite<uint32_t>(static_cast<const uint32_t*>(data), count, 0x7f800000);
  }
}

Status NonFinite() { return InvalidArgument("holds a NaN or an infinity"); }

void FreeBlock(std::byte* block) { ::operator delete (block, std::align_val_t{kCacheLineBytes}); }

// One kind of memory for all temporaries of loading; nothrow, since sizes come from a checkpoint.
Result<std::unique_ptr<std::byte[]>> Temporary(int64_t bytes) {
  std::unique_ptr<std::byte[]> block(new (std::nothrow) std::byte[static_cast<size_t>(bytes)]);
  if (block == nullptr) {
    return ResourceExhausted("no memory for " + std::to_string(bytes) + " bytes");
  }
  return block;
}

}  // namespace

Result<std::byte*> WeightStorage::Allocate(int64_t bytes) {
  std::unique_ptr<std::byte, void (*)(std::byte*)> block(
      static_cast<std::byte*>(::operator new (static_cast<size_t>(bytes),
                                              std::align_val_t{kCacheLineBytes}, std::nothrow)),
      &FreeBlock);
  if (block == nullptr) {
    return ResourceExhausted("no memory for " + std::to_string(bytes) + " bytes");
  }
  bytes_ += bytes;
  blocks_.push_back(std::move(block));
  return blocks_.back().get();
}

Result<WeightMatrix> WeightStorage::ReadMatrix(DType dtype, int64_t rows, int64_t cols,
                                               const Reader& read) {
  const int64_t size = DTypeSize(dtype);
  const int64_t per_line = static_cast<int64_t>(kCacheLineBytes) / size;
  WeightMatrix matrix{.dtype = dtype, .rows = rows, .cols = cols};
  matrix.stride = (cols + per_line - 1) / per_line * per_line;
  STOCKPOT_ASSIGN_OR_RETURN(std::byte* const data, Allocate(rows * matrix.stride * size));
  matrix.data = data;
  if (matrix.stride == cols) {
    const int64_t bytes = rows * cols * size;
    STOCKPOT_RETURN_IF_ERROR(read(0, {data, static_cast<size_t>(bytes)}));
    if (HasNonFinite(dtype, data, rows * cols)) return NonFinite();
    return matrix;
  }
  const size_t row_bytes = static_cast<size_t>(cols * size);
  const size_t stride_bytes = static_cast<size_t>(matrix.stride * size);
  STOCKPOT_ASSIGN_OR_RETURN(const auto packed, Temporary(rows * cols * size));
  STOCKPOT_RETURN_IF_ERROR(read(0, {packed.get(), static_cast<size_t>(rows) * row_bytes}));
  if (HasNonFinite(dtype, packed.get(), rows * cols)) return NonFinite();
  for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
    std::byte* const to = data + row * stride_bytes;
    std::memcpy(to, packed.get() + row * row_bytes, row_bytes);
    std::memset(to + row_bytes, 0, stride_bytes - row_bytes);
  }
  return matrix;
}

Result<const float*> WeightStorage::ReadVector(DType dtype, int64_t size, const Reader& read) {
  const int64_t bytes = size * DTypeSize(dtype);
  STOCKPOT_ASSIGN_OR_RETURN(const auto raw, Temporary(bytes));
  STOCKPOT_RETURN_IF_ERROR(read(0, {raw.get(), static_cast<size_t>(bytes)}));
  if (HasNonFinite(dtype, raw.get(), size)) return NonFinite();
  STOCKPOT_ASSIGN_OR_RETURN(std::byte* const data,
                            Allocate(size * static_cast<int64_t>(sizeof(float))));
  float* const values = reinterpret_cast<float*>(data);
  for (int64_t i = 0; i < size; ++i) values[i] = LoadWeight(raw.get(), dtype, i);
  return values;
}

Result<const PackedSigns*> WeightStorage::ReadSigns(int64_t d_out, int64_t d_in,
                                                    std::span<const SignPlane> planes) {
  const auto count = static_cast<int64_t>(planes.size());
  const int64_t plane_bytes = SignBytes(d_out, d_in);
  STOCKPOT_ASSIGN_OR_RETURN(const auto bits, Temporary(count * plane_bytes));
  const std::span<std::byte> all_bits(bits.get(), static_cast<size_t>(count * plane_bytes));
  std::vector<float> scales(static_cast<size_t>(count * d_out));
  for (size_t plane = 0; plane < planes.size(); ++plane) {
    const size_t bytes = static_cast<size_t>(plane_bytes), rows = static_cast<size_t>(d_out);
    STOCKPOT_RETURN_IF_ERROR(planes[plane].signs(0, all_bits.subspan(plane * bytes, bytes)));
    STOCKPOT_RETURN_IF_ERROR(planes[plane].alpha(
        0, std::as_writable_bytes(std::span(scales).subspan(plane * rows, rows))));
  }
  if (HasNonFinite(DType::kF32, scales.data(), count * d_out)) {
    return InvalidArgument("has an alpha that is NaN or infinite");
  }
  STOCKPOT_ASSIGN_OR_RETURN(
      PackedSigns packed,
      PackedSigns::Pack(d_out, d_in,
                        {reinterpret_cast<const uint8_t*>(all_bits.data()), all_bits.size()},
                        scales, count));
  bytes_ += packed.bytes();
  signs_.push_back(std::move(packed));
  return &signs_.back();
}

const LoraDelta* WeightStorage::Keep(LoraDelta delta) {
  bytes_ += delta.bytes();
  loras_.push_back(std::move(delta));
  return &loras_.back();
}

const SparseDelta* WeightStorage::Keep(SparseDelta delta) {
  bytes_ += delta.bytes();
  sparse_.push_back(std::move(delta));
  return &sparse_.back();
}

const WeightMatrix* WeightStorage::Keep(const WeightMatrix& view) {
  views_.push_back(view);
  return &views_.back();
}

}  // namespace stockpot
