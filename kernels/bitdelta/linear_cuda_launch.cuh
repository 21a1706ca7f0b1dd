// Which kernels one call of bitdelta_linear is made of, and their grids. Shared by the launcher
// (linear_cuda.cu) and by the tests' emulation, so that both run the same choice.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/bitdelta/linear_cuda_decode.cuh"
#include "kernels/bitdelta/linear_cuda_prefill.cuh"

namespace stockpot {

struct LinearLaunch {
  int64_t blocks = 0;
  int threads = 0;
  int64_t shared_bytes = 0;  // dynamic
};

// launch(LinearLaunch, kernel, arguments...) returns a Status.
template <typename Launch>
Status LaunchLinearCores(const CudaLinearArgs& args, bool only_rest, const Launch& launch) {
  const LinearLaunch shape{DivideUp(args.x.rows, kCoreRows) * DivideUp(args.base.rows, kCoreWarps),
                           kCoreWarps * kLinearLanes, 0};
  if (args.max_planes == 1) return launch(shape, LinearCoreKernel<1>, args, only_rest);
  return launch(shape, LinearCoreKernel<kCudaMaxPlanes>, args, only_rest);
}

template <int kTokenTiles, int kPlanes, typename Launch>
Status LaunchDecodeTiles(const CudaLinearArgs& args, const Launch& launch) {
  const int64_t row_tiles = DivideUp(args.x.rows, kTokenTiles * 8);
  return launch(LinearLaunch{row_tiles * DivideUp(args.base.rows, kDecodeOutputs), kDecodeThreads,
                             DecodeSharedBytes<kTokenTiles, kPlanes>()},
                LinearDecodeKernel<kTokenTiles, kPlanes>, args);
}

// Registers hold the sums: more planes leave room for fewer rows.
template <typename Launch>
Status LaunchLinearDecode(const CudaLinearArgs& args, const Launch& launch) {
  if (args.max_planes == 1) {
    if (args.x.rows <= 8) return LaunchDecodeTiles<1, 1>(args, launch);
    if (args.x.rows <= 16) return LaunchDecodeTiles<2, 1>(args, launch);
    return LaunchDecodeTiles<kCudaDecodeRows / 8, 1>(args, launch);
  }
  if (args.x.rows <= 8) return LaunchDecodeTiles<1, kCudaTensorPlanes>(args, launch);
  return LaunchDecodeTiles<2, kCudaTensorPlanes>(args, launch);
}

template <int kPlanes, bool kFolded, typename Launch>
Status LaunchLinearPrefill(const CudaLinearArgs& args, const Launch& launch) {
  return launch(LinearLaunch{args.tile_count * DivideUp(args.base.rows, kPrefillOutputs),
                             kPrefillThreads, PrefillSharedBytes<kPlanes, kFolded>()},
                LinearPrefillKernel<kPlanes, kFolded>, args);
}

template <typename Launch>
Status LaunchLinearTensor(const CudaLinearArgs& args, CudaLinearPath path, const Launch& launch) {
  const bool one = args.max_planes == 1;
  if (path == CudaLinearPath::kDecode) return LaunchLinearDecode(args, launch);
  if (path == CudaLinearPath::kPrefillFolded) {
    return one ? LaunchLinearPrefill<1, true>(args, launch)
               : LaunchLinearPrefill<kCudaTensorPlanes, true>(args, launch);
  }
  return one ? LaunchLinearPrefill<1, false>(args, launch)
             : LaunchLinearPrefill<kCudaTensorPlanes, false>(args, launch);
}

// One launch, or two where some rows are not for tensor cores.
template <typename Launch>
Status LaunchLinearPath(const CudaLinearArgs& args, CudaLinearPath path, const Launch& launch) {
  if (path == CudaLinearPath::kCudaCores) return LaunchLinearCores(args, false, launch);
  STOCKPOT_RETURN_IF_ERROR(LaunchLinearTensor(args, path, launch));
  const bool has_rest = args.other_dense || args.max_planes > kCudaTensorPlanes;
  return has_rest ? LaunchLinearCores(args, true, launch) : OkStatus();
}

// The whole call.
template <typename Launch>
Status LaunchLinear(const CudaLinearArgs& args, const Launch& launch) {
  STOCKPOT_RETURN_IF_ERROR(CheckCudaLinearArgs(args));
  if (args.x.rows == 0 || args.base.rows == 0) return OkStatus();
  return LaunchLinearPath(args, ChooseCudaLinearPath(args), launch);
}

}  // namespace stockpot
