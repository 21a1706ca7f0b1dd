// The host's share of bitdelta_linear on a GPU: sign tiles, the plan of rows, the choice of a path.
#include <algorithm>
#include <numeric>
#include <string>

#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/linear_cuda.h"
#include "kernels/bitdelta/sign_tiles_cuda.h"
#include "kernels/bitdelta/signs.h"

namespace stockpot {
namespace {

static_assert(kCudaMaxPlanes == kMaxSignPlanes);

constexpr int64_t kMaxDimension = int64_t{1} << 31;
constexpr int64_t kMaxBlocks = int64_t{1} << 31;  // of a grid, with 8 rows and 8 outputs a block

std::string ShapeText(int64_t rows, int64_t cols) {
  return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

Status CheckSignShape(int64_t planes, int64_t d_out, int64_t d_in) {
  if (planes < 1 || planes > kCudaMaxPlanes) {
    return InvalidArgument("planes: " + std::to_string(planes) + ", need 1 .. " +
                           std::to_string(kCudaMaxPlanes));
  }
  if (d_out < 0 || d_in < 0 || d_out > kMaxDimension || d_in > kMaxDimension) {
    return InvalidArgument("signs: shape " + ShapeText(d_out, d_in));
  }
  return OkStatus();
}

}  // namespace

Status PackSignTiles(int64_t planes, int64_t d_out, int64_t d_in, std::span<const uint8_t> signs,
                     std::span<uint32_t> words) {
  STOCKPOT_RETURN_IF_ERROR(CheckSignShape(planes, d_out, d_in));
  const int64_t plane_bytes = SignBytes(d_out, d_in);
  const int64_t plane_words = SignTileWords(d_out, d_in);
  if (static_cast<int64_t>(signs.size()) != planes * plane_bytes) {
    return InvalidArgument("signs: " + std::to_string(signs.size()) + " bytes, need " +
                           std::to_string(planes * plane_bytes));
  }
  if (static_cast<int64_t>(words.size()) != planes * plane_words) {
    return InvalidArgument("words: " + std::to_string(words.size()) + ", need " +
                           std::to_string(planes * plane_words));
  }
  std::fill(words.begin(), words.end(), 0u);
  for (int64_t plane = 0; plane < planes; ++plane) {
    const uint8_t* canonical = signs.data() + plane * plane_bytes;
    uint32_t* tiles = words.data() + plane * plane_words;
    for (int64_t output = 0; output < d_out; ++output) {
      for (int64_t column = 0; column < d_in; ++column) {
        if (SignAt(canonical, d_in, output, column) > 0) continue;
        const SignTilePlace place = PlaceInSignTiles(d_in, output, column);
        tiles[place.word] |= uint32_t{1} << place.bit;
      }
    }
  }
  return OkStatus();
}

Status CheckCudaSignTilesArgs(const CudaSignTilesArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckSignShape(args.planes, args.d_out, args.d_in));
  if (args.planes * SignTileWords(args.d_out, args.d_in) >= kMaxBlocks * 64) {
    return InvalidArgument("signs: shape " + ShapeText(args.d_out, args.d_in) + " is too large");
  }
  if (args.d_out * args.d_in == 0) return OkStatus();
  if (args.signs == nullptr) return InvalidArgument("signs: no data");
  if (args.words == nullptr) return InvalidArgument("words: no data");
  return OkStatus();
}

std::string_view CudaLinearPathName(CudaLinearPath path) {
  switch (path) {
    case CudaLinearPath::kCudaCores:
      return "CUDA cores";
    case CudaLinearPath::kDecode:
      return "decode";
    case CudaLinearPath::kPrefillExact:
      return "prefill, exact";
    case CudaLinearPath::kPrefillFolded:
      return "prefill, folded";
  }
  return "unknown";
}

CudaLinearPath ChooseCudaLinearPath(const CudaLinearArgs& args) {
  const int64_t rows = args.x.rows;
  if (args.base.dtype != DType::kBF16) return CudaLinearPath::kCudaCores;
  const bool long_segments = rows >= kCudaSegmentRows * std::max<int64_t>(1, args.segments);
  if (args.tiles == nullptr || rows <= kCudaDecodeRows || !long_segments) {
    return CudaLinearPath::kDecode;
  }
  const bool folded = args.allow_folded && rows > kCudaComputeRows;
  return folded ? CudaLinearPath::kPrefillFolded : CudaLinearPath::kPrefillExact;
}

CudaRowPlan PlanCudaRows(int64_t rows, std::span<const int32_t> variant_of_row) {
  const auto variant = [&](int32_t row) {
    return variant_of_row.empty() ? -1 : std::max(-1, variant_of_row[static_cast<size_t>(row)]);
  };
  CudaRowPlan plan;
  plan.order.resize(static_cast<size_t>(rows));
  std::iota(plan.order.begin(), plan.order.end(), 0);
  std::stable_sort(plan.order.begin(), plan.order.end(),
                   [&](int32_t a, int32_t b) { return variant(a) < variant(b); });
  for (int32_t i = 0; i < static_cast<int32_t>(rows); ++i) {
    const int32_t own = variant(plan.order[static_cast<size_t>(i)]);
    const bool same = !plan.tiles.empty() && plan.tiles.back().variant == own;
    if (!same) ++plan.segments;
    if (same && plan.tiles.back().count < kCudaPrefillRows) {
      ++plan.tiles.back().count;
    } else {
      plan.tiles.push_back({own, i, 1});
    }
  }
  return plan;
}

Status CheckCudaLinearArgs(const CudaLinearArgs& args) {
  const int64_t rows = args.x.rows;
  const int64_t d_out = args.base.rows;
  const int64_t d_in = args.base.cols;
  if (!IsWeightDType(args.base.dtype)) return InvalidArgument("base: not F32, F16 or BF16");
  if (d_out < 0 || d_in < 0 || d_out > kMaxDimension || d_in > kMaxDimension ||
      (d_out > 1 && args.base.stride < d_in)) {
    return InvalidArgument("base: shape " + ShapeText(d_out, d_in) + " with row stride " +
                           std::to_string(args.base.stride));
  }
  if (args.base.data == nullptr && d_out * d_in > 0) return InvalidArgument("base: no data");
  if (rows < 0 || rows >= kMaxDimension || args.x.cols != d_in ||
      (rows > 1 && args.x.stride < d_in) || (args.x.data == nullptr && rows * d_in > 0)) {
    return InvalidArgument("x: shape " + ShapeText(rows, args.x.cols) + ", the base takes " +
                           std::to_string(d_in) + " columns");
  }
  if ((rows / 8 + 1) * (d_out / 8 + 1) >= kMaxBlocks) {
    return InvalidArgument("x: " + std::to_string(rows) + " rows are too many for one launch");
  }
  if (args.y.rows != rows || args.y.cols != d_out || (rows > 1 && args.y.stride < d_out) ||
      (args.y.data == nullptr && rows * d_out > 0)) {
    return InvalidArgument("y: shape " + ShapeText(args.y.rows, args.y.cols) + ", need " +
                           ShapeText(rows, d_out));
  }
  if (args.variant_count < 0 || (args.variants == nullptr && args.variant_count > 0)) {
    return InvalidArgument("variants: no table of " + std::to_string(args.variant_count));
  }
  if (args.max_planes < 1 || args.max_planes > kCudaMaxPlanes) {
    return InvalidArgument("max_planes: " + std::to_string(args.max_planes) + ", need 1 .. " +
                           std::to_string(kCudaMaxPlanes));
  }
  if (args.tiles != nullptr && (args.tile_count < 0 || args.tile_count > rows ||
                                (args.tile_count == 0) != (rows == 0) || args.order == nullptr)) {
    return InvalidArgument("tiles: " + std::to_string(args.tile_count) + " for " +
                           std::to_string(rows) + " rows, and they need an order");
  }
  return OkStatus();
}

}  // namespace stockpot
