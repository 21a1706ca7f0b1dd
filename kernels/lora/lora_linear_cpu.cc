// lora_linear on the CPU: two parallel loops over the batch sorted by adapter.
//
//   shrink   h[t, k] = sum_i A[k, i] x[t, i]          tasks: an adapter's tokens x ranks
//   expand   y[t, o] += sum_k B[o, k] h[t, k]         tasks: an adapter's blocks of outputs
//
// Shrink: each (t, k) has ONE vector accumulator that walks the columns in order and is folded in a
// fixed tree. Expand: each (t, o) is one lane of one accumulator that walks the ranks in order. So
// no sum depends on the tile it was computed in: batch invariance costs nothing.
//
// Tiles of shrink: 8 ranks x 1 token, 4 x 3 where neighbours share the adapter: 8 or 12 chains hide
// the latency of the FMA and leave registers for A. Tiles of expand: 4 blocks of outputs x 1 token,
// 1 block (2 with 16 lanes) x 4 tokens.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/row_groups.h"
#include "kernels/lora/lora_layout.h"
#include "kernels/lora/lora_linear.h"

// Included once per SIMD target below: what they share must be declared once.
#ifndef STOCKPOT_LORA_LINEAR_CPU_ROW
#define STOCKPOT_LORA_LINEAR_CPU_ROW
namespace stockpot {

// One row of the batch.
struct LoraRow {
  const float* x = nullptr;  // [d_in]
  float* hidden = nullptr;   // [rank]
  float* y = nullptr;        // [d_out]
};

// [begin, end) of ranks or of blocks of outputs.
struct LoraRange {
  int64_t begin = 0;
  int64_t end = 0;
};

}  // namespace stockpot
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/lora/lora_linear_cpu.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/bitdelta/weight_load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// No target has more lanes than a block has outputs.
using LoraTag = hn::CappedTag<float, kLoraBlockRows>;
using LoraVec = hn::Vec<LoraTag>;
inline constexpr int kLoraLanes = hn::MaxLanes(LoraTag());
inline constexpr int kLoraBlockVectors = kLoraBlockRows / kLoraLanes;
inline constexpr int kShrinkTokens = 3;
inline constexpr int kExpandTokens = 4;
inline constexpr int kExpandBlocks = 4;                            // for one token
inline constexpr int kSharedBlocks = HWY_MAX_BYTES >= 64 ? 2 : 1;  // for kExpandTokens

// Adds one step of columns: a[r][c ...] meets x[t][...].
template <int kRanks, int kTokens, class T>
HWY_INLINE void ShrinkStep(const T* const (&a)[kRanks], int64_t c, const float* const (&x)[kTokens],
                           int64_t x_column, LoraVec (&sums)[kRanks][kTokens]) {
  LoraVec xs[kTokens];
#pragma GCC unroll 3
  for (int t = 0; t < kTokens; ++t) xs[t] = hn::LoadU(LoraTag(), x[t] + x_column);
#pragma GCC unroll 8
  for (int r = 0; r < kRanks; ++r) {
    const LoraVec weight = LoadAsFloat(LoraTag(), a[r] + c);
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) sums[r][t] = hn::MulAdd(weight, xs[t], sums[r][t]);
  }
}

// hidden[t][k .. k + height) of kTokens rows. Ranks past the height repeat the last and are
// dropped.
template <int kRanks, int kTokens, class T>
HWY_NOINLINE void ShrinkTile(const LoraDelta::Layout& delta, const LoraRow* rows, int64_t k,
                             int64_t height) {
  const T* a[kRanks];
  const float* x[kTokens];
  for (int r = 0; r < kRanks; ++r) {
    a[r] = reinterpret_cast<const T*>(delta.a.data()) +
           (k + std::min<int64_t>(r, height - 1)) * delta.a_stride;
  }
  for (int t = 0; t < kTokens; ++t) x[t] = rows[t].x;
  LoraVec sums[kRanks][kTokens];
#pragma GCC unroll 8
  for (int r = 0; r < kRanks; ++r) {
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) sums[r][t] = hn::Zero(LoraTag());
  }
  int64_t c = 0;
  for (; c + kLoraLanes <= delta.d_in; c += kLoraLanes) ShrinkStep(a, c, x, c, sums);
  if (c < delta.d_in) {  // x must not be read past its end; A is padded
    float tail[kTokens][kLoraLanes] = {};
    const float* tail_x[kTokens];
    for (int t = 0; t < kTokens; ++t) {
      std::memcpy(tail[t], x[t] + c, static_cast<size_t>(delta.d_in - c) * sizeof(float));
      tail_x[t] = tail[t];
    }
    ShrinkStep(a, c, tail_x, 0, sums);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRanks; ++r) {
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) {
      const float sum = hn::GetLane(hn::SumOfLanes(LoraTag(), sums[r][t]));
      if (r < height) rows[t].hidden[k + r] = sum;
    }
  }
}

template <int kTokens, class T>
void ShrinkRanks(const LoraDelta::Layout& delta, const LoraRow* rows, LoraRange ranks) {
  constexpr int kTall = kTokens == 1 ? 8 : 4;
  for (int64_t k = ranks.begin; k < ranks.end;) {
    const int64_t left = ranks.end - k;
    if (kTokens == 1 && left > 4) {
      ShrinkTile<kTall, kTokens, T>(delta, rows, k, std::min<int64_t>(left, kTall));
      k += kTall;
    } else {
      ShrinkTile<4, kTokens, T>(delta, rows, k, std::min<int64_t>(left, 4));
      k += 4;
    }
  }
}

// The ranks' hidden values for rows of one adapter.
void Shrink(const LoraDelta::Layout& delta, std::span<const LoraRow> rows, LoraRange ranks) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    size_t t = 0;
    for (; t + kShrinkTokens <= rows.size(); t += kShrinkTokens) {
      ShrinkRanks<kShrinkTokens, T>(delta, &rows[t], ranks);
    }
    for (; t < rows.size(); ++t) ShrinkRanks<1, T>(delta, &rows[t], ranks);
  };
  if (delta.a_dtype == DType::kBF16) return run(BF16{});
  run(float{});
}

// y = y + sum for the lanes of one register of outputs that exist.
HWY_INLINE void AddTo(LoraVec sum, float* y, int64_t left) {
  if (left >= kLoraLanes) {
    hn::StoreU(hn::Add(hn::LoadU(LoraTag(), y), sum), LoraTag(), y);
    return;
  }
  HWY_ALIGN float lanes[kLoraLanes];
  hn::Store(sum, LoraTag(), lanes);
  for (int64_t i = 0; i < left; ++i) y[i] += lanes[i];
}

// Blocks [block, block + kBlocks) of outputs for kTokens rows.
template <int kBlocks, int kTokens, class T>
HWY_NOINLINE void ExpandTile(const LoraDelta::Layout& delta, const LoraRow* rows, int64_t block) {
  constexpr int kVectors = kBlocks * kLoraBlockVectors;
  const T* b[kBlocks];
  const float* hidden[kTokens];
  for (int i = 0; i < kBlocks; ++i) {
    b[i] = reinterpret_cast<const T*>(delta.b.data()) + (block + i) * delta.rank * kLoraBlockRows;
  }
  for (int t = 0; t < kTokens; ++t) hidden[t] = rows[t].hidden;
  LoraVec sums[kVectors][kTokens];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) sums[v][t] = hn::Zero(LoraTag());
  }
  for (int64_t k = 0; k < delta.rank; ++k) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const LoraVec weight = LoadAsFloat(LoraTag(), b[v / kLoraBlockVectors] + k * kLoraBlockRows +
                                                        v % kLoraBlockVectors * kLoraLanes);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        sums[v][t] = hn::MulAdd(weight, hn::Set(LoraTag(), hidden[t][k]), sums[v][t]);
      }
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const int64_t o = block * kLoraBlockRows + v * kLoraLanes;
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) AddTo(sums[v][t], rows[t].y + o, delta.d_out - o);
  }
}

template <int kBlocks, int kTokens, class T>
void ExpandBlocks(const LoraDelta::Layout& delta, const LoraRow* rows, LoraRange blocks) {
  int64_t block = blocks.begin;
  for (; block + kBlocks <= blocks.end; block += kBlocks) {
    ExpandTile<kBlocks, kTokens, T>(delta, rows, block);
  }
  for (; block < blocks.end; ++block) ExpandTile<1, kTokens, T>(delta, rows, block);
}

// The blocks' outputs for rows of one adapter.
void Expand(const LoraDelta::Layout& delta, std::span<const LoraRow> rows, LoraRange blocks) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    size_t t = 0;
    for (; t + kExpandTokens <= rows.size(); t += kExpandTokens) {
      ExpandBlocks<kSharedBlocks, kExpandTokens, T>(delta, &rows[t], blocks);
    }
    for (; t < rows.size(); ++t) ExpandBlocks<kExpandBlocks, 1, T>(delta, &rows[t], blocks);
  };
  if (delta.b_dtype == DType::kBF16) return run(BF16{});
  run(float{});
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {
namespace {

HWY_EXPORT(Shrink);
HWY_EXPORT(Expand);

// Work handed to a thread at a time.
constexpr int64_t kShrinkRanks = 8;
constexpr int64_t kShrinkRows = 48;             // a multiple of the tile's tokens
constexpr int64_t kExpandProducts = 64 * 1024;  // B elements of a range, times its tokens' tiles
constexpr int64_t kExpandAlign = 4;             // blocks: whole tiles

int64_t CeilDiv(int64_t n, int64_t by) { return (n + by - 1) / by; }

// The rows of one adapter, [begin, end) of the sorted ones, and its tasks in either loop.
struct LoraGroup {
  const LoraDelta::Layout* delta = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t first_shrink = 0;
  int64_t first_expand = 0;
  int64_t range_blocks = 0;  // outputs of an expand task

  int64_t rank_ranges() const { return CeilDiv(delta->rank, kShrinkRanks); }
  int64_t shrink_tasks() const { return rank_ranges() * CeilDiv(end - begin, kShrinkRows); }
  int64_t expand_tasks() const { return CeilDiv(delta->blocks(), range_blocks); }
};

}  // namespace

struct LoraScratch::State {
  RowGroups rows;
  std::vector<LoraRow> sorted;  // rows.order()
  std::vector<LoraGroup> groups;
  AlignedBuffer<float> hidden;
};

LoraScratch::LoraScratch() : state_(std::make_unique<State>()) {}
LoraScratch::~LoraScratch() = default;

namespace {

// One call: the plan and its loops. The loops' lambdas capture `this` alone, so they allocate
// nothing.
class LoraCall {
 public:
  LoraCall(const LoraLinearArgs& args, LoraScratch::State& scratch, ThreadPool& threads)
      : args_(args), scratch_(scratch), threads_(threads) {
    scratch_.rows.Plan(args.delta_of_row);
    scratch_.sorted.clear();
    scratch_.groups.clear();
    scratch_.groups.reserve(static_cast<size_t>(args.x.rows));
    for (const int64_t t : scratch_.rows.order()) {
      scratch_.sorted.push_back({.x = args.x.row(t), .y = args.y.row(t)});
    }
    int64_t hidden_floats = 0;
    for (const RowGroup& rows : scratch_.rows.groups()) hidden_floats += PlanGroup(rows);
    float* hidden = scratch_.hidden.Reserve(hidden_floats);
    for (const LoraGroup& group : scratch_.groups) {
      for (int64_t i = group.begin; i < group.end; ++i) {
        scratch_.sorted[i].hidden = hidden;
        hidden += group.delta->rank;
      }
    }
  }

  void Run() {
    threads_.ParallelFor(shrink_tasks_, 1, [this](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) RunShrink(task);
    });
    threads_.ParallelFor(expand_tasks_, 1, [this](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) RunExpand(task);
    });
  }

 private:
  // Returns the hidden values that the rows need.
  int64_t PlanGroup(const RowGroup& rows) {
    const LoraDelta* delta = args_.deltas[rows.delta];
    if (delta == nullptr || delta->rank() == 0 || delta->d_out() == 0) return 0;
    LoraGroup group{.delta = &delta->layout(),
                    .begin = rows.begin,
                    .end = rows.end,
                    .first_shrink = shrink_tasks_,
                    .first_expand = expand_tasks_};
    const int64_t block_products = delta->rank() * kLoraBlockRows * CeilDiv(rows.size(), 4);
    group.range_blocks =
        CeilDiv(CeilDiv(kExpandProducts, block_products), kExpandAlign) * kExpandAlign;
    shrink_tasks_ += group.shrink_tasks();
    expand_tasks_ += group.expand_tasks();
    scratch_.groups.push_back(group);
    return delta->rank() * rows.size();
  }

  template <int64_t LoraGroup::*first>
  const LoraGroup& GroupOfTask(int64_t task) const {
    const auto after = std::upper_bound(
        scratch_.groups.begin(), scratch_.groups.end(), task,
        [](int64_t wanted, const LoraGroup& group) { return wanted < group.*first; });
    return *(after - 1);
  }

  std::span<const LoraRow> Rows(int64_t begin, int64_t end) const {
    return std::span<const LoraRow>(scratch_.sorted)
        .subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  }

  void RunShrink(int64_t task) const {
    const LoraGroup& group = GroupOfTask<&LoraGroup::first_shrink>(task);
    const int64_t index = task - group.first_shrink;
    const int64_t k = index % group.rank_ranges() * kShrinkRanks;
    const int64_t begin = group.begin + index / group.rank_ranges() * kShrinkRows;
    HWY_DYNAMIC_DISPATCH(Shrink)
    (*group.delta, Rows(begin, std::min(begin + kShrinkRows, group.end)),
     LoraRange{k, std::min(k + kShrinkRanks, group.delta->rank)});
  }

  void RunExpand(int64_t task) const {
    const LoraGroup& group = GroupOfTask<&LoraGroup::first_expand>(task);
    const int64_t begin = (task - group.first_expand) * group.range_blocks;
    HWY_DYNAMIC_DISPATCH(Expand)
    (*group.delta, Rows(group.begin, group.end),
     LoraRange{begin, std::min(begin + group.range_blocks, group.delta->blocks())});
  }

  const LoraLinearArgs& args_;
  LoraScratch::State& scratch_;
  ThreadPool& threads_;
  int64_t shrink_tasks_ = 0;
  int64_t expand_tasks_ = 0;
};

}  // namespace

Status LoraLinearCpu(const LoraLinearArgs& args, LoraScratch& scratch, ThreadPool& threads) {
  STOCKPOT_RETURN_IF_ERROR(CheckLoraArgs(args));
  LoraCall(args, scratch.state(), threads).Run();
  return OkStatus();
}

}  // namespace stockpot
#endif  // HWY_ONCE
