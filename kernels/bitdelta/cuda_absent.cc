// The CUDA launchers of a binary that was built without CUDA.
#include "kernels/bitdelta/compress_cuda.h"
#include "kernels/bitdelta/linear_cuda.h"
#include "kernels/bitdelta/sign_tiles_cuda.h"

namespace stockpot {
namespace {

Status Absent() { return Unavailable("this binary was built without CUDA"); }

}  // namespace

Status LaunchBitDeltaCompressCuda(const CudaCompressArgs&, void*) { return Absent(); }
Result<DeltaStats> BitDeltaCompressCuda(const CompressArgs&) { return Absent(); }
Status LaunchBitDeltaLinearCuda(const CudaLinearArgs&, void*) { return Absent(); }
Status LaunchPackSignTilesCuda(const CudaSignTilesArgs&, void*) { return Absent(); }

}  // namespace stockpot
