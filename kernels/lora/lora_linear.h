// lora_linear: y[t] += B (A x[t]), a low-rank adapter chosen per row of the batch. Adapters of
// different ranks mix freely; rows are sorted by adapter inside (shrink, then expand, as Punica's
// SGMV).
//
// Accumulation: float32, the hidden vector A x too; the sum of an output is added to y once at the
// end.
// Batch invariance (a promise, tested): the bits of y[t, o] depend on x[t], on y[t, o] before, on
// the adapter and on the SIMD target alone; never on the other rows, on their number, order or
// adapters or on the thread count.
//
// Source: Hu et al., LoRA (arXiv 2106.09685); Chen et al., Punica (arXiv 2310.18547).
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/status.h"
#include "kernels/base/threads.h"
#include "kernels/base/view.h"

namespace stockpot {

// Limits, in elements.
inline constexpr int64_t kMaxLoraDimension = int64_t{1} << 31;  // of d_out and of d_in
inline constexpr int64_t kMaxLoraRank = int64_t{1} << 16;

// One adapter in the layout that the kernels read (lora_layout.h), its scale folded into B. Made
// once when a variant is loaded; immutable afterwards, so any number of threads may read it.
class LoraDelta {
 public:
  // a [r, d_in], b [d_out, r] of F32, F16 or BF16; `scale` is alpha / r, or alpha / sqrt(r) of
  // rsLoRA. r = 0 is legal and adds nothing.
  // Kept: A as bf16 if it is, else float32 (fp16 is exact in it). scale * B as bf16 if B is bf16
  // and every product is exact in bf16 (a scale that is a power of two), else float32, one
  // rounding. InvalidArgument names what does not fit or is not finite.
  static Result<LoraDelta> Pack(const WeightMatrix& a, const WeightMatrix& b, float scale);

  LoraDelta(LoraDelta&&) noexcept;
  LoraDelta& operator=(LoraDelta&&) noexcept;
  ~LoraDelta();

  int64_t d_out() const;
  int64_t d_in() const;
  int64_t rank() const;
  int64_t bytes() const;  // resident, padding included

  struct Layout;
  const Layout& layout() const { return *layout_; }  // for the kernels only

 private:
  explicit LoraDelta(std::unique_ptr<Layout> layout);
  std::unique_ptr<Layout> layout_;
};

struct LoraLinearArgs {
  ConstFloatMatrix x;                        // [rows, d_in]
  std::span<const LoraDelta* const> deltas;  // pointer table, one entry per distinct adapter of the
                                             // batch, each [d_out, r] x [r, d_in]; null: nothing
  std::span<const int32_t> delta_of_row;     // [rows]: index into deltas, or -1 = none; in any
                                             // order; empty: none at all
  FloatMatrix y;                             // in/out: [rows, d_out]; must not overlap x
};

// Memory for the kernel's temporaries, kept by the caller so that a decode step allocates nothing
// after the first of its size. One per calling thread.
class LoraScratch {
 public:
  LoraScratch();
  ~LoraScratch();
  struct State;
  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

// InvalidArgument names the field whose shape or index does not fit; y is untouched then.
Status LoraLinearReference(const LoraLinearArgs& args);  // double precision, loops
Status LoraLinearCpu(const LoraLinearArgs& args, LoraScratch& scratch, ThreadPool& threads);

}  // namespace stockpot
