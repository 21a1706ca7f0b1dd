// bitdelta_linear on a GPU: y = x W^T + bias + sum_p alpha_p * (x S_p^T). The contract of linear.h;
// the bits of y may differ from the CPU's, whose sums run in another order.
//
// Four kernels (CudaLinearPath), chosen by a pure function of sizes and dtypes that callers can
// ask:
//   kDecode         bf16 base, tensor cores. Reads the base once for up to 64 rows of any variants.
//   kPrefillExact   bf16 base, tensor cores, tiles of 64 rows of one variant: one product with W,
//   one
//                   with each sign plane, which share the fragments of x.
//   kPrefillFolded  likewise one product, with W + sum_p alpha_p S_p made in registers and rounded
//   to
//                   bf16 there: about half the work, 2^-9 of each weight lost. Only where asked
//                   for.
//   kCudaCores      any weight dtype, no tensor cores.
// No path forms W_eff in memory.
//
// Exactness. x is float32; a tensor core takes bf16. Each x is cut into three bf16 terms whose sum
// is x exactly, and each is multiplied: products are exact, sums float32. Where a warp finds that
// its values of x are bf16 already, as the activations of a bf16 model are, it skips the two terms
// that are zero: the same bits at a third of the work. Base and planes have sums of their own,
// alpha is applied once. Sums of a tensor core are cut, not rounded: at most 2^-23 of the partial
// sum a step of 8 columns; four quarters of the columns are summed apart and added as IEEE does.
//
// Batch invariance: kDecode and kPrefillExact give the same bits. Which of the kernels computes a
// row is settled by the base's dtype, by what its own variant stores and by allow_folded, never by
// the other rows; kPrefillFolded is the exception that the caller asks for.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/base/view.h"

namespace stockpot {

// Limits, and where one kernel takes over from another.
inline constexpr int kCudaMaxPlanes = 8;      // sign planes of a variant
inline constexpr int kCudaTensorPlanes = 4;   // of a variant whose rows go to tensor cores
inline constexpr int kCudaDecodeRows = 64;    // rows that share one read of the base
inline constexpr int kCudaPrefillRows = 64;   // rows of a prefill tile
inline constexpr int kCudaSegmentRows = 16;   // mean rows a variant from which prefill tiles pay
inline constexpr int kCudaComputeRows = 206;  // rows above which an H200 waits for arithmetic

// One entry of the variants' pointer table; all pointers are device memory, null where absent.
struct CudaLayerDelta {
  const uint32_t* signs = nullptr;  // sign_tiles_cuda.h, [planes, d_out, d_in]; 16-byte aligned
  const float* alpha = nullptr;     // [planes, d_out]
  int32_t planes = 1;               // 1 .. kCudaMaxPlanes; counts where signs is not null
  WeightMatrix dense;               // [d_out, d_in]; data null: reads the base
  const float* bias = nullptr;      // [d_out], replaces the base's
};

// Rows [first, first + count) of a plan's order; all of them use `variant`.
struct CudaRowTile {
  int32_t variant = -1;
  int32_t first = 0;
  int32_t count = 0;  // 1 .. kCudaPrefillRows
};

// The rows of a batch sorted by variant: made on the host once for a step, used by every layer.
struct CudaRowPlan {
  std::vector<int32_t> order;      // [rows]: a permutation; rows of a variant keep their order
  std::vector<CudaRowTile> tiles;  // cover `order`
  int64_t segments = 0;            // distinct variants, base only being one
};

// All pointers are device memory. Only shapes, dtypes, counts and the marked facts about the tables
// are read by the host.
struct CudaLinearArgs {
  ConstFloatMatrix x;                        // [rows, d_in]
  WeightMatrix base;                         // [d_out, d_in]
  const float* bias = nullptr;               // [d_out] or null
  const CudaLayerDelta* variants = nullptr;  // [variant_count]
  int64_t variant_count = 0;
  const int32_t* variant_of_row = nullptr;  // [rows]: index, or -1 = base only; null: all base only
  const int32_t* order = nullptr;           // CudaRowPlan::order; null: as they come
  const CudaRowTile* tiles = nullptr;       // CudaRowPlan::tiles; null: never prefill
  int64_t tile_count = 0;
  int64_t segments = 0;       // CudaRowPlan::segments
  int32_t max_planes = 1;     // the most planes of any variant here; rows that have more become NaN
  bool other_dense = false;   // some variant's dense weight is not BF16
  bool allow_folded = false;  // kPrefillFolded may be chosen
  FloatMatrix y;              // out: [rows, d_out]
};

enum class CudaLinearPath : uint8_t { kCudaCores, kDecode, kPrefillExact, kPrefillFolded };
std::string_view CudaLinearPathName(CudaLinearPath path);  // "decode", ...

// What a launch with these arguments uses. Beside tensor cores, kCudaCores computes the rows whose
// variant has a dense weight that is not BF16 or more than kCudaTensorPlanes planes, in the same
// stream. Thread promise: pure function of the host's facts in `args`.
//   base not BF16                                           -> kCudaCores
//   no tiles, at most kCudaDecodeRows rows, or fewer than
//   kCudaSegmentRows rows a variant on average              -> kDecode
//   allow_folded and more than kCudaComputeRows rows        -> kPrefillFolded
//   else                                                    -> kPrefillExact
CudaLinearPath ChooseCudaLinearPath(const CudaLinearArgs& args);

// `variant_of_row`: [rows], or empty = all base only. REQUIRES: rows < 2^31.
CudaRowPlan PlanCudaRows(int64_t rows, std::span<const int32_t> variant_of_row);

// InvalidArgument names the field whose shape, dtype or count does not fit.
Status CheckCudaLinearArgs(const CudaLinearArgs& args);

// Enqueues the kernels of the path on `stream` (a cudaStream_t) and returns: no allocation on the
// device, no wait. The arguments are borrowed until the stream has passed them. InvalidArgument as
// above, nothing is enqueued then. Indices live on the device and cannot be checked here: one
// outside [-1, variant_count) counts as -1. Unavailable without a CUDA backend.
Status LaunchBitDeltaLinearCuda(const CudaLinearArgs& args, void* stream);

}  // namespace stockpot
