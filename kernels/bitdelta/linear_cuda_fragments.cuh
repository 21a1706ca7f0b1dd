// Tensor-core pieces of bitdelta_linear: fragments of W, S and x, and their sums.
//
// Order of columns: sign_tiles_cuda.h. A "half" is 32 columns: 16 bytes of W a lane and row, 8
// values of x a lane, two steps of mma.m16n8k16. A lane copies exactly the bytes it will feed to
// the tensor core, so no lane needs another's and shared memory has no bank conflicts.
//
// Order of sums, for every y: quarters of the column tiles, each in the order of columns, each step
// with the terms of x from the largest on; then ((q0 + q1) + q2) + q3. Both exact kernels keep it,
// and their bits agree.
//
// Include after kernels/base/cuda_platform.cuh and cuda_mma.cuh, or the emulation.
#pragma once

#include <cstdint>

#include "kernels/bitdelta/linear_cuda.cuh"

namespace stockpot {

inline constexpr int kHalfColumns = 32;
inline constexpr int kLaneColumns = 8;  // of a half
inline constexpr int kQuarters = 4;

// 16 bytes that are loaded and stored as one.
struct alignas(16) Bytes16 {
  uint32_t words[4];
};
struct alignas(16) Floats4 {
  float values[4];
};

// The first column tile of a quarter; kQuarters gives their end.
__device__ inline int64_t QuarterBegin(int64_t column_tiles, int quarter) {
  return column_tiles * quarter / kQuarters;
}

// Eight values of x as B fragments: term k of step s in term[k][2 s], term[k][2 s + 1]. The terms
// add up to x exactly. split: some lane of the warp has terms beyond the first.
struct Activations {
  uint32_t term[3][4];
  bool split;
};

// Value i is cut into three bf16. NaN and infinities go into the first term alone.
__device__ inline Activations SplitActivations(const float (&x)[kLaneColumns]) {
  Activations out;
  bool rest = false;
#pragma unroll
  for (int pair = 0; pair < kLaneColumns / 2; ++pair) {
    uint32_t terms[3][2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float value = x[2 * pair + e];
      const uint32_t bits = __float_as_uint(value);
      const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
      const bool is_nan = !finite && (bits & 0x007fffffu) != 0;
      terms[0][e] = is_nan ? 0x7fc00000u : bits & 0xffff0000u;
      const float second = finite ? value - __uint_as_float(terms[0][e]) : 0.0f;
      terms[1][e] = __float_as_uint(second) & 0xffff0000u;
      terms[2][e] = __float_as_uint(second - __uint_as_float(terms[1][e]));
      rest = rest || second != 0;
    }
#pragma unroll
    for (int k = 0; k < 3; ++k) out.term[k][pair] = PackHighHalves(terms[k][0], terms[k][1]);
  }
  out.split = __any_sync(kAllLanes, rest);
  return out;
}

// acc += A x over the two steps of a half; a[s] is the A fragment of step s.
__device__ inline void MultiplyHalf(float (&acc)[4], const uint32_t (&a)[2][4],
                                    const Activations& x) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    MmaBF16(acc, a[s], x.term[0][2 * s], x.term[0][2 * s + 1]);
    if (!x.split) continue;
    MmaBF16(acc, a[s], x.term[1][2 * s], x.term[1][2 * s + 1]);
    MmaBF16(acc, a[s], x.term[2][2 * s], x.term[2][2 * s + 1]);
  }
}

// The A fragments of a half of W: `low` of output g, `high` of output g + 8.
__device__ inline void WeightFragments(const Bytes16& low, const Bytes16& high,
                                       uint32_t (&a)[2][4]) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    a[s][0] = low.words[2 * s];
    a[s][1] = high.words[2 * s];
    a[s][2] = low.words[2 * s + 1];
    a[s][3] = high.words[2 * s + 1];
  }
}

// The A fragments of a half (0 or 1) of a sign word: (word << j) & signs | two bf16 ones.
__device__ inline void SignFragments(uint32_t word, int half, uint32_t (&a)[2][4]) {
  constexpr uint8_t kAndOr = (0xF0 & 0xCC) | 0xAA;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[s][i] = Lop3<kAndOr>(word << ((half * 2 + s) * 4 + i), 0x80008000u, 0x3F803F80u);
    }
  }
}

// A bf16 matrix as the copies see it.
struct WeightRows {
  const uint16_t* data;
  int64_t stride;
  bool aligned;  // every row begins on 16 bytes
};

__device__ inline WeightRows RowsOf(const WeightMatrix& w) {
  const bool aligned = reinterpret_cast<uintptr_t>(w.data) % 16 == 0 && w.stride % 8 == 0;
  return {static_cast<const uint16_t*>(w.data), w.stride, aligned};
}

// How many of `wanted` columns from `column` on exist.
__device__ inline int ColumnsLeft(int64_t d_in, int64_t column, int wanted) {
  const int64_t left = d_in - column;
  return left <= 0 ? 0 : left < wanted ? static_cast<int>(left) : wanted;
}

// Begins copying eight columns of a row to `to`, zeros where there are none; rows that are not
// aligned are copied at once. `exists`: the row does.
__device__ inline void CopyWeights(Bytes16* to, const WeightRows& w, int64_t row, bool exists,
                                   int64_t column, int64_t d_in) {
  const int count = exists ? ColumnsLeft(d_in, column, kLaneColumns) : 0;
  const uint16_t* from = count > 0 ? w.data + row * w.stride + column : w.data;
  if (w.aligned) {
    CopyAsync16(to, from, count * 2);
    return;
  }
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    if (i < count) words[i / 2] |= static_cast<uint32_t>(from[i]) << (i % 2 * 16);
  }
  *to = {{words[0], words[1], words[2], words[3]}};
}

}  // namespace stockpot
