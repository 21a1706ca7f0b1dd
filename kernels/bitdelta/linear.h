// bitdelta_linear: y = x W^T + bias + alpha * (x S^T), the base weight shared by all rows of the
// batch, the 1-bit delta chosen per row. W_eff = W + alpha * S never exists in memory.
//
// Accumulation: base and delta sums apart, in float32; alpha applied once, one rounding to y.
// Batch invariance (a promise, tested): the bits of y[t, o] depend on x[t], the weights and the
// SIMD target alone; never on the other rows, on their number, on their variants or on the thread
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
  // `signs` canonical (signs.h), `alpha` [d_out] (or [1]: one scale for the matrix).
  static Result<PackedSigns> Pack(int64_t d_out, int64_t d_in, std::span<const uint8_t> signs,
                                  std::span<const float> alpha);
  PackedSigns(PackedSigns&&) noexcept;
  PackedSigns& operator=(PackedSigns&&) noexcept;
  ~PackedSigns();

  int64_t d_out() const;
  int64_t d_in() const;
  int64_t bytes() const;  // resident bytes, padding included

  struct Layout;
  const Layout& layout() const { return *layout_; }  // for the kernels only

 private:
  explicit PackedSigns(std::unique_ptr<Layout> layout);
  std::unique_ptr<Layout> layout_;
};

// What one row of the batch uses of this layer: exactly one of nothing (base only), a 1-bit delta,
// or a dense weight of its own that replaces the base (a variant whose tensor was stored exactly).
struct LayerDelta {
  const PackedSigns* signs = nullptr;   // [d_out, d_in]
  const WeightMatrix* dense = nullptr;  // [d_out, d_in]
  const float* bias = nullptr;          // [d_out], replaces the base's bias; null: keeps it
};

struct LinearArgs {
  ConstFloatMatrix x;           // [rows, d_in]
  WeightMatrix base;            // [d_out, d_in]
  const float* bias = nullptr;  // [d_out] or null
  std::span<const LayerDelta>
      variants;  // pointer table, one entry per distinct variant in the batch
  std::span<const int32_t> variant_of_row;  // [rows]: index into variants, or -1 = base only;
                                            // empty = all base only. Equal neighbours share work.
  FloatMatrix y;                            // out: [rows, d_out]
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

// InvalidArgument names the field whose shape or index does not fit; y is untouched then.
Status BitDeltaLinearReference(const LinearArgs& args);  // double precision, loops
Status BitDeltaLinearCpu(const LinearArgs& args, LinearScratch& scratch, ThreadPool& threads);

}  // namespace stockpot
