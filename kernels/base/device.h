// Which accelerators answer, asked once at start. One binary serves machines with and without a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stockpot {

struct CudaDevice {
  int index = 0;
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int64_t memory_bytes = 0;
};

struct DeviceReport {
  bool cuda_compiled = false;        // the CUDA backend is in this binary
  std::vector<CudaDevice> cuda;      // empty: the CPU does everything
  std::string cuda_reason;           // why `cuda` is empty, for a person ("no driver", ...)
  std::string simd_target;           // the SIMD target chosen on this CPU, "AVX2", "AVX3_DL", ...
};

// Never fails, never throws, never starts a driver twice. Thread promise: any thread.
DeviceReport ProbeDevices();

}  // namespace stockpot
