// sparse_delta_linear: y[t] += D x[t], D the exactly stored changed elements of one weight, chosen
// per row of the batch. For fine-tunes that touch few weights: a short RL or SFT step changes 1-10
// % of the bf16 values, where one bit loses most of the delta and this loses nothing.
//
// Work and bytes are proportional to the number of changed elements.
//
// Accumulation: float32, one sum for each (t, o), added to y once at the end: one rounding. Outputs
// whose row has no changed element are not touched.
// Batch invariance (a promise, tested): the bits of y[t, o] depend on x[t], on y[t, o] before, on
// the delta and on the SIMD target alone; never on the other rows, on their number, order or deltas
// or on the thread count.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/base/threads.h"
#include "kernels/base/view.h"

namespace stockpot {

// Limits, in elements.
inline constexpr int64_t kMaxSparseDimension = int64_t{1} << 31;  // of d_out and of d_in
inline constexpr int64_t kMaxSparseChanges = int64_t{1} << 31;    // of one matrix

// Changed elements in canonical order: row by row, columns strictly ascending. Equal deltas have
// equal arrays.
struct SparseElements {
  std::vector<int64_t> row_offsets;  // [d_out + 1]: row o is elements [row_offsets[o], [o + 1])
  std::vector<uint32_t> columns;     // [changed], < d_in
  std::vector<float> values;         // [changed], finite, not 0: fine-tuned value - base value
};

// The elements where `fine_tuned` differs from `base` in value (-0 equals 0), both [d_out, d_in] of
// F32, F16 or BF16. The difference is rounded to float32 once: exact wherever the two values lie
// within 16 binary orders of each other in bf16, within 13 in fp16.
// InvalidArgument: shapes that differ, a value or a difference that is not finite.
// ResourceExhausted: more than kMaxSparseChanges.
Result<SparseElements> FindChangedElements(const WeightMatrix& base,
                                           const WeightMatrix& fine_tuned);

// The changed elements of one [d_out, d_in] weight in the layout that the kernels read
// (sparse_layout.h). Made once when a variant is loaded; immutable afterwards, so any number of
// threads may read it.
class SparseDelta {
 public:
  // Arrays as in SparseElements, from anywhere: every property is checked, and the memory taken is
  // proportional to what was handed in. InvalidArgument names the array and the place.
  static Result<SparseDelta> FromElements(int64_t d_out, int64_t d_in,
                                          std::span<const int64_t> row_offsets,
                                          std::span<const uint32_t> columns,
                                          std::span<const float> values);
  static Result<SparseDelta> FromElements(int64_t d_out, int64_t d_in,
                                          const SparseElements& elements) {
    return FromElements(d_out, d_in, elements.row_offsets, elements.columns, elements.values);
  }
  // FindChangedElements, packed.
  static Result<SparseDelta> FromWeights(const WeightMatrix& base, const WeightMatrix& fine_tuned);

  SparseDelta(SparseDelta&&) noexcept;
  SparseDelta& operator=(SparseDelta&&) noexcept;
  ~SparseDelta();

  SparseElements Elements() const;  // a copy in canonical order

  int64_t d_out() const;
  int64_t d_in() const;
  int64_t changed() const;  // elements
  int64_t bytes() const;    // resident: 6 an element (8 where d_in > 65536) and 8 a changed row

  struct Layout;
  const Layout& layout() const { return *layout_; }  // for the kernels only

 private:
  explicit SparseDelta(std::unique_ptr<Layout> layout);
  std::unique_ptr<Layout> layout_;
};

struct SparseDeltaArgs {
  ConstFloatMatrix x;                          // [rows, d_in]
  std::span<const SparseDelta* const> deltas;  // pointer table, one entry per distinct variant of
                                               // the batch, each [d_out, d_in]; null: nothing
  std::span<const int32_t> delta_of_row;       // [rows]: index into deltas, or -1 = none; in any
                                               // order; empty: none at all
  FloatMatrix y;                               // in/out: [rows, d_out]; must not overlap x
};

// Memory for the kernel's temporaries, kept by the caller so that a decode step allocates nothing
// after the first of its size. One per calling thread.
class SparseScratch {
 public:
  SparseScratch();
  ~SparseScratch();
  struct State;
  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

// InvalidArgument names the field whose shape or index does not fit; y is untouched then.
Status SparseDeltaLinearReference(const SparseDeltaArgs& args);  // double precision, loops
Status SparseDeltaLinearCpu(const SparseDeltaArgs& args, SparseScratch& scratch,
                            ThreadPool& threads);

}  // namespace stockpot
