// Launchers of bitdelta_compress on a GPU (compress_cuda.h); the kernel is in compress_cuda.cuh.
#include <algorithm>
#include <vector>

#include "kernels/base/cuda_memory.h"
#include "kernels/base/cuda_platform.cuh"
#include "kernels/bitdelta/compress_cuda.cuh"

namespace stockpot {
namespace {

// Rows [begin, begin + rows) of a host weight to a dense [rows, cols] on the device.
Status CopyRows(const WeightMatrix& host, int64_t begin, int64_t rows, const DeviceBuffer& device) {
  const size_t size = static_cast<size_t>(DTypeSize(host.dtype));
  const size_t row_bytes = static_cast<size_t>(host.cols) * size;
  if (row_bytes == 0) return OkStatus();
  return CudaStatus(cudaMemcpy2D(device.data(), row_bytes, host.row(begin),
                                 std::max(row_bytes, static_cast<size_t>(host.stride) * size),
                                 row_bytes, static_cast<size_t>(rows), cudaMemcpyHostToDevice),
                    "copying a weight to the device");
}

WeightMatrix OnDevice(const DeviceBuffer& buffer, const WeightMatrix& host, int64_t rows) {
  return {buffer.data(), host.dtype, rows, host.cols, host.cols};
}

}  // namespace

Status LaunchBitDeltaCompressCuda(const CudaCompressArgs& args, void* stream) {
  const bool same_shape =
      args.base.rows == args.fine_tuned.rows && args.base.cols == args.fine_tuned.cols;
  if (!same_shape) return InvalidArgument("fine_tuned: shape differs from the base's");
  if (!IsWeightDType(args.base.dtype)) return InvalidArgument("base: not F32, F16 or BF16");
  if (!IsWeightDType(args.fine_tuned.dtype)) {
    return InvalidArgument("fine_tuned: not F32, F16 or BF16");
  }
  if (args.base.rows == 0) return OkStatus();
  const dim3 grid(static_cast<unsigned>(CompressBlocks(args.base.rows)));
  const dim3 block(kCompressWarps * kWarpLanes);
  CompressKernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return CudaStatus(cudaGetLastError(), "launching bitdelta_compress");
}

Result<DeltaStats> BitDeltaCompressCuda(const CompressArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckCompressArgs(args));
  const int64_t d_out = args.base.rows;
  const int64_t d_in = args.base.cols;
  const int64_t widest = std::max(DTypeSize(args.base.dtype), DTypeSize(args.fine_tuned.dtype));
  const int64_t slice_rows = std::clamp<int64_t>(
      kCudaSliceBytes / std::max<int64_t>(1, d_in * widest), 1, std::max<int64_t>(1, d_out));
  STOCKPOT_ASSIGN_OR_RETURN(DeviceBuffer base, DeviceBuffer::Make(slice_rows * d_in * widest + 1));
  STOCKPOT_ASSIGN_OR_RETURN(DeviceBuffer tuned, DeviceBuffer::Make(slice_rows * d_in * widest + 1));
  STOCKPOT_ASSIGN_OR_RETURN(DeviceBuffer signs,
                            DeviceBuffer::Make(SignBytes(slice_rows, d_in) + 1));
  STOCKPOT_ASSIGN_OR_RETURN(
      DeviceBuffer device_rows,
      DeviceBuffer::Make(slice_rows * static_cast<int64_t>(sizeof(CompressedRow))));
  std::vector<CompressedRow> rows(static_cast<size_t>(d_out));
  for (int64_t begin = 0; begin < d_out; begin += slice_rows) {
    const int64_t count = std::min(slice_rows, d_out - begin);
    STOCKPOT_RETURN_IF_ERROR(CopyRows(args.base, begin, count, base));
    STOCKPOT_RETURN_IF_ERROR(CopyRows(args.fine_tuned, begin, count, tuned));
    STOCKPOT_RETURN_IF_ERROR(LaunchBitDeltaCompressCuda(
        {OnDevice(base, args.base, count), OnDevice(tuned, args.fine_tuned, count),
         signs.as<uint8_t>(), device_rows.as<CompressedRow>()},
        nullptr));
    STOCKPOT_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpy(args.signs.data() + SignBytes(begin, d_in), signs.data(),
                              static_cast<size_t>(SignBytes(count, d_in)), cudaMemcpyDeviceToHost),
                   "copying signs from the device"));
    STOCKPOT_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpy(rows.data() + begin, device_rows.data(),
                   static_cast<size_t>(count) * sizeof(CompressedRow), cudaMemcpyDeviceToHost),
        "copying row sums from the device"));
  }
  return FinishCompress(rows, d_in, args.alpha);
}

}  // namespace stockpot
