// What device code needs beside the CUDA language, in forms that a host emulation can provide too.
//
// The kernels of *_cuda.cuh compile twice: by nvcc, with this file, and by the host compiler in
// tests, where tests/unit/kernels/cuda_emulation/cuda_emulation.h stands in for it and for the
// language. Restrictions they obey for that:
//   - shared memory is declared with STOCKPOT_SHARED(type, name, [extent]...)
//   - fp16 is read through FloatFromHalfBits
//   - no inline PTX outside a named function of this file
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define STOCKPOT_SHARED(type, name, ...) __shared__ type name __VA_ARGS__

namespace stockpot {

__device__ __forceinline__ float FloatFromHalfBits(uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}

}  // namespace stockpot
