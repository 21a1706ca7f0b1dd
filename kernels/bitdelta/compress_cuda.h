// bitdelta_compress on a GPU: bits, alphas and statistics equal to those of compress.h, bit for
// bit.
#pragma once

#include <cstdint>

#include "kernels/base/status.h"
#include "kernels/bitdelta/compress.h"
#include "kernels/bitdelta/compress_row.h"

namespace stockpot {

// All pointers are device memory. One kernel over all rows; strides in elements.
struct CudaCompressArgs {
  WeightMatrix base;              // [d_out, d_in]
  WeightMatrix fine_tuned;        // [d_out, d_in]
  uint8_t* signs = nullptr;       // out: SignBytes(d_out, d_in), canonical
  CompressedRow* rows = nullptr;  // out: [d_out]; FinishCompress on the host makes alphas of them
};

// Enqueues the kernel on `stream` (a cudaStream_t) and returns; the arguments are borrowed until
// the stream has passed it. Unavailable where the binary has no CUDA backend or no device answers.
Status LaunchBitDeltaCompressCuda(const CudaCompressArgs& args, void* stream);

// The whole operation on HOST memory: stages rows through the current device in slices of at most
// kCudaSliceBytes, waits, and returns what BitDeltaCompressCpu returns. Thread promise: any thread.
inline constexpr int64_t kCudaSliceBytes = int64_t{64} << 20;  // device bytes of each input
Result<DeltaStats> BitDeltaCompressCuda(const CompressArgs& args);

}  // namespace stockpot
