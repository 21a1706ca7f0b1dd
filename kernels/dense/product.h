// Products of float32 matrices on the CPU:
//
//   c[i, j]  =, += or -=  sum_t a[i, t] b[t, j]       i < rows, j < cols, t < terms
//
// What LibTorch's at::mm does, without LibTorch, on the caller's thread and for matrices that are
// transposes or parts of others. On x86 at::mm is MKL, which takes AVX2 code on CPUs that are not
// Intel's: half of what a CPU with AVX-512 can.
//
// Every sum walks the terms in blocks of kProductTerms: one fused multiply and add after the other
// from zero within a block, then the block's sum is added to (taken from) c. That order depends on
// nothing else, neither on where an element stands nor on rows and cols. So a product may be cut
// into parts, for threads, and has the same bits. Between SIMD targets that fuse too.
//
// Thread promise: a scratch has one user at a time; everything else is the caller's.
#pragma once

#include <cstdint>

#include "kernels/base/aligned_buffer.h"

namespace stockpot {

inline constexpr int64_t kProductTerms = 192;
// Rows and columns of the blocks that ProductArgs::upper keeps.
inline constexpr int64_t kProductBlock = 16;

enum class ProductMode { kSet, kAdd, kSubtract };

struct ProductArgs {
  const float* a = nullptr;  // [rows, terms]: a[i, t] at a[i * a_row + t * a_term]
  int64_t a_row = 0;         // this or a_term should be 1: then it is read along that one
  int64_t a_term = 1;
  const float* b = nullptr;  // [terms, cols]: b[t, j] at b[t * b_term + j * b_column]
  int64_t b_term = 0;
  int64_t b_column = 1;  // likewise
  float* c = nullptr;    // [rows, cols]: c[i, j] at c[i * c_stride + j]; overlaps neither a nor b
  int64_t c_stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t terms = 0;  // 0: sums of nothing, which are 0
  ProductMode mode = ProductMode::kSet;
  // Of a symmetric c: only the elements with j >= i / kProductBlock * kProductBlock, the diagonal
  // blocks and what is right of them, are made. What the others hold afterwards is unspecified.
  bool upper = false;
};

// Copies of parts of A and B in the order in which they are read: at most kProductScratchBytes,
// allocated by the first products and kept.
struct ProductScratch {
  AlignedBuffer<float> a, b;
};
inline constexpr int64_t kProductScratchBytes = int64_t{2} << 20;

void DenseProduct(const ProductArgs& args, ProductScratch& scratch);

// In double, loops only, rounded once; with `upper` it makes what is asked for and leaves the rest.
void DenseProductReference(const ProductArgs& args);

}  // namespace stockpot
