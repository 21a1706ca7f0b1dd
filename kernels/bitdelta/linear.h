// bitdelta_linear: y = x W^T + bias + sum_p alpha_p * (x S_p^T), the base weight shared by all rows
// of the batch, the 1-bit delta (one or several sign planes) chosen per row. W_eff = W + alpha * S
// never exists in memory.
//
// Several weights that take the same input (query, key and value; gate and up) are one call: x is
// prepared once for all of them, and the threads meet once.
//
// A row says how its two sums meet (DeltaSum): apart, as decoding needs it (the base is read once
// for all variants), or folded, as prefill needs it (one product a variant, at the cost of a plain
// one). Both accumulate in float32; y is rounded once a sum.
//
// Batch invariance (a promise, tested): the bits of y[t, o] depend on x[t] and its dtype, the
// weights, the row's DeltaSum and the processor (SIMD target, bf16 products) alone; never on the
// other rows, on their number, on their variants, on the other weights of the call or on the thread
// count. An evaluator who asks twice gets the same number.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/base/status.h"
#include "kernels/base/threads.h"
#include "kernels/base/view.h"

namespace stockpot {

// Sign bits of one [d_out, d_in] delta in the layout the CPU kernel reads, with its scales. Made
// once when a variant is loaded; immutable afterwards, so any number of threads may read it.
class PackedSigns {
 public:
  // `signs`: `planes` matrices one after another, each canonical (signs.h). `alpha`: [planes,
  // d_out] or [planes]: one scale for each matrix. InvalidArgument names what does not fit; 1 <=
  // planes <= kMaxSignPlanes. `threads`: null packs on the calling thread alone.
  static Result<PackedSigns> Pack(int64_t d_out, int64_t d_in, std::span<const uint8_t> signs,
                                  std::span<const float> alpha, int64_t planes = 1,
                                  ThreadPool* threads = nullptr);
  PackedSigns(PackedSigns&&) noexcept;
  PackedSigns& operator=(PackedSigns&&) noexcept;
  ~PackedSigns();

  int64_t d_out() const;
  int64_t d_in() const;
  int64_t planes() const;
  int64_t bytes() const;  // resident bytes, padding included

  struct Layout;
  const Layout& layout() const { return *layout_; }  // for the kernels only

 private:
  explicit PackedSigns(std::unique_ptr<Layout> layout);
  std::unique_ptr<Layout> layout_;
};

inline constexpr int64_t kMaxSignPlanes = 8;

// What one row of the batch uses of one weight: nothing (base only), 1-bit planes, or a dense
// weight of its own that replaces the base (a variant whose tensor was stored exactly).
struct LayerDelta {
  const PackedSigns* signs = nullptr;   // [d_out, d_in]
  const WeightMatrix* dense = nullptr;  // [d_out, d_in]; not together with signs
  const float* bias = nullptr;          // [d_out], replaces the base's bias; null: keeps it
};

// How the base's and the delta's share of one y[t, o] are summed.
enum class DeltaSum : uint8_t {
  // Two sums, alpha applied once to the second. Every variant of the batch shares the base's read
  // and product: a distinct variant costs its bits. For decoding.
  kApart,
  // One pass over the columns. For prefill: costs about one dense product a distinct variant. As a
  // rule one sum over float32 values of W + sum_p alpha_p * S_p, made for 16 outputs at a time in
  // the cache; the rounding of W + alpha * S to float32 loses 2^-24 of |W|: 1e-4 of an alpha of
  // 1e-4 |W|. Where pairs of bfloat16 are multiplied (LinearInput), in which W + alpha * S has no
  // place, two sums side by side; beside a large weight the signs' one is of 16 bits, dithered: its
  // error has the mean 0 and a standard deviation of at most 8e-4 alpha |x|, at most 2e-6 |W[o]|
  // |x|
  // (linear_columns_cpu.cc).
  kFolded,
};

// The activations of a call, [rows, cols]: float32, or bfloat16 as a bf16 model hands them. Row r
// at data + r * stride, in elements. bfloat16 stands for its float32 numbers: products are exact,
// sums are float32 (of folded signs DeltaSum tells), y is not rounded to it. Where the weight is
// bfloat16 too and the processor multiplies pairs of them (AVX512_BF16), the dense half does: twice
// the multiply-adds an instruction, another order of the sum, numbers below 2^-126 count as 0.
// Everywhere else y has the bits that the same numbers give as float32.
struct LinearInput {
  LinearInput() = default;
  LinearInput(const ConstFloatMatrix& x)  // NOLINT(google-explicit-constructor): a view of a view
      : LinearInput(x.data, x.rows, x.cols, x.stride) {}
  LinearInput(const float* x, int64_t x_rows, int64_t x_cols, int64_t x_stride)
      : LinearInput(x, DType::kF32, x_rows, x_cols, x_stride) {}
  LinearInput(const void* x, DType x_dtype, int64_t x_rows, int64_t x_cols, int64_t x_stride)
      : data(x), dtype(x_dtype), rows(x_rows), cols(x_cols), stride(x_stride) {}

  const void* row(int64_t r) const {
    return static_cast<const char*>(data) + r * stride * DTypeSize(dtype);
  }
  float at(int64_t r, int64_t c) const { return LoadWeight(row(r), dtype, c); }

  const void* data = nullptr;
  DType dtype = DType::kF32;  // or kBF16
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
};

// One weight of a call.
struct LinearOutput {
  WeightMatrix base;            // [d_out, d_in]
  const float* bias = nullptr;  // [d_out] or null
  std::span<const LayerDelta>
      variants;   // pointer table, one entry per distinct variant in the batch
  FloatMatrix y;  // out: [rows, d_out]
};

struct LinearArgs {
  LinearInput x;                            // [rows, d_in]
  std::span<const LinearOutput> outputs;    // one or more weights over the same x
  std::span<const int32_t> variant_of_row;  // [rows]: index into every `variants`, or -1 = base
                                            // only; empty = all base only. Equal ones share work.
  std::span<const DeltaSum> sum_of_row;     // [rows]; empty = all apart
};

// Memory for the kernel's temporaries, kept by the caller so that a decode step allocates nothing
// after the first of its size. One per calling thread.
class LinearScratch {
 public:
  LinearScratch();
  ~LinearScratch();
  struct State;
  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

// InvalidArgument names the field whose shape or index does not fit; no y is touched then.
Status BitDeltaLinearReference(const LinearArgs& args);  // double precision, loops
Status BitDeltaLinearCpu(const LinearArgs& args, LinearScratch& scratch, ThreadPool& threads);

}  // namespace stockpot
