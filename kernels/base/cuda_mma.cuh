// The instructions of sm_80 and later that CUDA C++ has no name for, each as one function. Host
// twins of the same names: tests/unit/kernels/cuda_emulation/cuda_mma_emulation.h. For device code,
// beside cuda_platform.cuh.
//
// Fragments of MmaBF16 (PTX ISA, "Matrix Fragments for mma.m16n8k16", bf16), for lane l, g = l / 4,
// t = l % 4; the element of the lower column is in the lower half of a register:
//   A [16, 16]: a[0] = (g, 2t..2t+1)   a[1] = (g + 8, 2t..2t+1)   a[2], a[3] = the same, 8 columns
//   on B [16, 8]:  b0 = (2t..2t+1, g)     b1 = (2t + 8..2t + 9, g) D [16, 8]:  d[0], d[1] = (g,
//   2t..2t+1)                        d[2], d[3] = the same, 8 rows on
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

// A block's dynamic shared memory as `type* name`, 16-byte aligned; its size is the launch's.
#define STOCKPOT_DYNAMIC_SHARED(type, name)                      \
  extern __shared__ __align__(16) unsigned char name##_memory[]; \
  type* name = reinterpret_cast<type*>(name##_memory)

namespace stockpot {

// D += A B, by all 32 lanes of a warp. Products are exact; the sum is float32, rounded as the
// hardware does it (towards zero).
__device__ __forceinline__ void MmaBF16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Bit i of the result is bit (4 a_i + 2 b_i + c_i) of kTable.
template <uint8_t kTable>
__device__ __forceinline__ uint32_t Lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, %4;\n"
      : "=r"(result)
      : "r"(a), "r"(b), "r"(c), "n"(static_cast<int>(kTable)));
  return result;
}

// The upper halves of two registers: (high & 0xffff0000) | (low >> 16). Two floats cut to bf16.
__device__ __forceinline__ uint32_t PackHighHalves(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x7632);
}

// Two floats rounded to nearest even bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t PackBF16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

// Copies 16 bytes of global memory to shared memory, both 16-byte aligned, behind the thread's
// back. Only the first source_bytes (0 .. 16) are read; zeros take the others' place. The bytes are
// there for this thread once WaitForCopies has returned for their group, for others after a barrier
// then.
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global, int source_bytes) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(global),
               "r"(source_bytes)
               : "memory");
}

// Likewise 4 bytes, 4-byte aligned.
__device__ __forceinline__ void CopyAsync4(void* shared, const void* global) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(global) : "memory");
}

// Makes a group of the copies that this thread began since the last group.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most the kPending latest groups of this thread are under way.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace stockpot
