// Owned device memory and the translation of CUDA's errors. For .cu files.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <utility>

#include "kernels/base/status.h"

namespace stockpot {

// OK, ResourceExhausted (out of memory), Unavailable (no device answers) or Internal.
inline Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return OkStatus();
  StatusCode code = StatusCode::kInternal;
  if (error == cudaErrorMemoryAllocation) code = StatusCode::kResourceExhausted;
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
      error == cudaErrorInitializationError) {
    code = StatusCode::kUnavailable;
  }
  return {code, std::string(what) + ": " + cudaGetErrorString(error)};
}

// Move-only. Freed on the device that was current when it was made.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceBuffer() { cudaFree(data_); }

  static Result<DeviceBuffer> Make(int64_t bytes) {
    DeviceBuffer buffer;
    STOCKPOT_RETURN_IF_ERROR(
        CudaStatus(cudaMalloc(&buffer.data_, static_cast<size_t>(bytes)), "cudaMalloc"));
    return Result<DeviceBuffer>(std::move(buffer));
  }

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

}  // namespace stockpot
