// bitdelta_linear on the CPU: plans the batch, then walks blocks of output rows in parallel.
//
//   y = x W^T + sum_p alpha_p * (x S_p^T) + bias                                     (linear.h)
//
// A block of W is read from memory once and serves all rows of the batch while it is in the cache.
// Few tokens read it as it lies (linear_base-inl.h), many widen it first (linear_panel-inl.h); the
// signs of the variants that are summed apart follow in the same pass (linear_delta-inl.h). Tables
// of the tokens must stay in the L2 cache, so long batches take the 1-bit half in groups of tokens;
// the dense half takes all rows of a pass with the first group. A pass holds at most kPassRows
// rows: their x stays in the last cache, and scratch memory is bounded.
#include <algorithm>
#include <array>
#include <atomic>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/linear_plan.h"
#include "kernels/bitdelta/packed_signs.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bitdelta/linear_cpu.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/bitdelta/linear_base-inl.h"
#include "kernels/bitdelta/linear_delta-inl.h"
#include "kernels/bitdelta/linear_panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {

XLayout LayoutOfX() {
  return {.tile_rows = kMaxTokens, .vector_floats = kFloatLanes, .panel_tokens = kLeastPanelTokens};
}

// `step`: floats from a vector of the copy to the next.
void OrderRow(const float* x, int64_t columns, bool split, int64_t step, float* ordered) {
  OrderX(x, columns, split, step, ordered);
}
void OrderRowOfPairs(const void* x, int64_t columns, int64_t step, float* ordered) {
  OrderPairs(static_cast<const BF16Pair*>(x), columns, step, ordered);
}

void WidenX(const BF16* x, int64_t columns, float* wide) {
  const FloatTag f;
  int64_t c = 0;
  for (; c + kFloatLanes <= columns; c += kFloatLanes)
    hn::StoreU(LoadAsFloat(f, x + c), f, wide + c);
  for (; c < columns; ++c) wide[c] = FloatFromBF16(x[c].bits);
}

void WidenRowOfX(const void* x, int64_t columns, float* wide) {
  WidenX(static_cast<const BF16*>(x), columns, wide);
}

bool ProcessorMultipliesPairs() { return MultipliesPairs(); }

void TableOfRow(const float* x, int64_t columns, float* table) {
  BuildTable(x, columns, (columns + kSignWordColumns - 1) / kSignWordColumns, table);
}

int64_t PanelMemoryFloats(int64_t d_in) { return PanelFloats(d_in); }
int64_t PartialMemoryFloats(int64_t d_in, int64_t tokens) { return PartialFloats(d_in, tokens); }

// Row blocks walked at a time: the 1-bit half follows the dense half while both are in the cache.
inline constexpr int64_t kWalkBlocks = 4;

OutputPath PathOf(const OutputRange& range) {
  return {.end = range.end * kSignBlockRows,
          .next = range.next < 0 ? -1 : range.next * kSignBlockRows,
          .d_out = range.d_out};
}

// The dense half of row blocks [begin, end) for all rows of the range.
void DotBlocks(const OutputRange& range, int64_t begin, int64_t end) {
  const int64_t first = begin * kSignBlockRows;
  const int64_t last = std::min(range.d_out, end * kSignBlockRows);
  const OutputPath path = PathOf(range);
  const std::span<const PlannedRow> rows = range.rows;
  for (size_t i = 0; i < rows.size();) {
    const WeightMatrix& weight = *rows[i].weight;
    size_t j = i;
    while (j < rows.size() && SameProduct(rows[i], rows[j])) ++j;
    const int64_t count = static_cast<int64_t>(j - i);
    const auto multiply = [&](auto type) {
      using T = decltype(type);
      if (IsTiles(rows[i].order)) {
        PanelRows<T>(weight, rows[i].folded_signs(), &rows[i], count, first, last, path,
                     range.memory);
      } else {
        DotRows<T>(weight, &rows[i], count, first, last, path);
      }
    };
#if STOCKPOT_LINEAR_PAIRS
    if (IsPair(rows[i].order)) {
      multiply(BF16Pair{});
    } else {
      WithWeightType(weight.dtype, multiply);
    }
#else
    WithWeightType(weight.dtype, multiply);
#endif
    i = j;
  }
}

// The words of a plane of `signs` that are read after plane p of row blocks [begin, end).
const uint32_t* WordsAfter(const OutputRange& range, size_t next_row,
                           const PackedSigns::Layout& signs, int64_t p, int64_t begin,
                           int64_t end) {
  if (p + 1 < signs.planes) return signs.block(p + 1, begin);
  const std::span<const PlannedRow> rows = range.apart;
  if (next_row < rows.size() && rows[next_row].apart_signs() != nullptr) {
    return rows[next_row].apart_signs()->block(0, begin);
  }
  const PackedSigns::Layout* first = rows[0].apart_signs();  // of the next row blocks
  const int64_t then = end < range.end ? end : range.next;
  if (first != nullptr && then >= 0 && then + kWalkBlocks <= first->row_blocks) {
    return first->block(0, then);
  }
  return signs.block(p, begin);
}

// What the 1-bit half of row blocks [begin, end) fetches of the weight: the rows after those that
// the dense half has fetched.
WeightAhead AheadOfSigns(const OutputRange& range, int64_t begin, int64_t end) {
  constexpr int64_t kRows = 8;
  if (!range.dense_half) return {};
  const int64_t fetched = range.rows.size() == 1 ? kRows : kDecodePanelRows;
  const int64_t steps = (end - begin) * kSignBlockRows + fetched;
  const int64_t then = PathOf(range).After(begin * kSignBlockRows, steps, kRows);
  if (then < 0) return {};
  return WeightAhead(*range.rows[0].weight, then, then + kRows);
}

// The 1-bit half of row blocks [begin, end).
void SignBlocks(const OutputRange& range, int64_t begin, int64_t end) {
  const std::span<const PlannedRow> rows = range.apart;
  WeightAhead ahead = AheadOfSigns(range, begin, end);
  for (size_t i = 0; i < rows.size();) {
    const PackedSigns::Layout* signs = rows[i].apart_signs();
    size_t j = i;
    while (j < rows.size() && rows[j].apart_signs() == signs) ++j;
    for (int64_t p = 0; signs != nullptr && p < signs->planes; ++p) {
      const uint32_t* then = WordsAfter(range, j, *signs, p, begin, end);
      DeltaRows(&rows[i], static_cast<int64_t>(j - i), p, begin, end, then, ahead);
    }
    i = j;
  }
}

void AddBias(const OutputRange& range) {
  const int64_t last = std::min(range.d_out, range.end * kSignBlockRows);
  for (const PlannedRow& row : range.rows) {
    if (row.bias == nullptr) continue;
    for (int64_t o = range.begin * kSignBlockRows; o < last; ++o) row.y[o] += row.bias[o];
  }
}

void WalkRange(const OutputRange& range) {
  for (int64_t b = range.begin; b < range.end; b += kWalkBlocks) {
    const int64_t end = std::min(b + kWalkBlocks, range.end);
    if (range.dense_half) DotBlocks(range, b, end);
    SignBlocks(range, b, end);
  }
  if (range.with_bias) AddBias(range);
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {
namespace {

// Panels of the threads that are at work: as many as the pool has threads.
class PanelPool {
 public:
  void Prepare(int64_t threads, int64_t panel_floats, int64_t partial_floats) {
    panel_floats_ = panel_floats;
    stride_ = panel_floats + partial_floats;
    memory_.Reserve(threads * stride_);
    if (threads > threads_) {
      busy_ = std::make_unique<std::atomic<bool>[]>(static_cast<size_t>(threads));
      threads_ = threads;
    }
  }

  // REQUIRES: fewer panels are out than Prepare was told of threads.
  int64_t Take() {
    for (int64_t i = 0;; i = (i + 1) % threads_) {
      if (!busy_[static_cast<size_t>(i)].exchange(true, std::memory_order_acquire)) return i;
    }
  }
  void Return(int64_t i) { busy_[static_cast<size_t>(i)].store(false, std::memory_order_release); }

  PanelMemory at(int64_t i) const {
    float* panel = memory_.data() + i * stride_;
    return {.panel = panel, .partials = panel + panel_floats_};
  }

 private:
  AlignedBuffer<float> memory_;
  std::unique_ptr<std::atomic<bool>[]> busy_;
  int64_t threads_ = 0;
  int64_t panel_floats_ = 0;
  int64_t stride_ = 0;
};

}  // namespace

struct LinearScratch::State {
  std::vector<int64_t> order;    // rows of x, as the kernel walks them
  std::vector<PlannedRow> rows;  // [outputs, rows of a pass]
  AlignedBuffer<float> widened;  // [rows of a pass, d_in]: x, where it is bfloat16
  AlignedBuffer<float> ordered;  // x in every order that is asked for, one after another
  AlignedBuffer<float> tables;   // [rows of a group, table_floats]
  PanelPool panels;
};

LinearScratch::LinearScratch() : state_(std::make_unique<State>()) {}
LinearScratch::~LinearScratch() = default;

namespace {

HWY_EXPORT(LayoutOfX);
HWY_EXPORT(OrderRow);
HWY_EXPORT(OrderRowOfPairs);
HWY_EXPORT(WidenRowOfX);
HWY_EXPORT(ProcessorMultipliesPairs);
HWY_EXPORT(TableOfRow);
HWY_EXPORT(WalkRange);
HWY_EXPORT(PanelMemoryFloats);
HWY_EXPORT(PartialMemoryFloats);

// Limits, in bytes, elements and rows.
constexpr int64_t kPassRows = 512;        // of the batch: 8 MiB of x at 4096 columns
constexpr int64_t kTableBytes = 1 << 20;  // tables of a group of tokens: half of a common L2
constexpr int64_t kRangeBytes = 1 << 19;  // of W handed to a thread at a time
constexpr int64_t kRangesPerThread = 4;
constexpr int64_t kTileBlocks = 4;               // row blocks that the 1-bit half takes together
constexpr int64_t kPrepareElements = 16 * 1024;  // of x handed to a thread at a time
constexpr int64_t kMaxTableEntries = 16;
constexpr int64_t kHalfPageFloats = 512;

int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The stride of a row of ordered x: an odd number of half pages, so that a block of 512 columns of
// several rows spreads over all sets of an L1 cache.
int64_t OrderedStride(int64_t d_in) {
  const int64_t halves = RoundUp(std::max<int64_t>(1, d_in), kHalfPageFloats) / kHalfPageFloats;
  return (halves | 1) * kHalfPageFloats;
}

// One call: the plan and its sizes.
class Call {
 public:
  Call(const LinearArgs& args, LinearScratch::State& scratch, ThreadPool& threads)
      : args_(args),
        scratch_(scratch),
        threads_(threads),
        d_in_(args.x.cols),
        multiplies_pairs_(args.x.dtype == DType::kBF16 &&
                          HWY_DYNAMIC_DISPATCH(ProcessorMultipliesPairs)()),
        x_layout_(HWY_DYNAMIC_DISPATCH(LayoutOfX)()) {
    x_stride_ = OrderedStride(d_in_);
    table_floats_ = RoundUp(d_in_, kSignWordColumns) / kSignGroupColumns * kMaxTableEntries;
    for (const LinearOutput& output : args_.outputs) {
      blocks_ += RoundUp(output.base.rows, kSignBlockRows) / kSignBlockRows;
    }
    const int64_t tokens = std::min(args.x.rows, kPassRows);
    scratch_.panels.Prepare(threads.size(), HWY_DYNAMIC_DISPATCH(PanelMemoryFloats)(d_in_),
                            HWY_DYNAMIC_DISPATCH(PartialMemoryFloats)(d_in_, tokens));
    SortRows();
  }

  void Run() {
    const int64_t table_bytes = std::max<int64_t>(1, table_floats_ * sizeof(float));
    const int64_t group = std::max<int64_t>(1, kTableBytes / table_bytes);
    for (int64_t begin = 0; begin < args_.x.rows; begin += kPassRows) {
      pass_ = {begin, std::min(begin + kPassRows, args_.x.rows)};
      PlanPass();
      OrderAll();
      RowRange tokens{apart_.begin, std::min(apart_.begin + group, apart_.end)};
      bool first = true;
      do {
        BuildTables(tokens);
        RunBlocks(tokens, first);
        first = false;
        tokens = {tokens.end, std::min(tokens.end + group, apart_.end)};
      } while (tokens.begin < tokens.end);
    }
  }

 private:
  // How the rows are walked: base only, then summed apart, then folded, then dense; each by
  // variant.
  enum class Kind { kBase, kApart, kFolded, kDense };

  Kind KindOf(int64_t t) const {
    bool signs = false;
    for (const LinearOutput& output : args_.outputs) {
      const LayerDelta* variant = VariantOfRow(args_, output, t);
      if (variant != nullptr && variant->dense != nullptr) return Kind::kDense;
      signs |= variant != nullptr && variant->signs != nullptr;
    }
    if (!signs) return Kind::kBase;
    return Folded(t) ? Kind::kFolded : Kind::kApart;
  }
  bool Folded(int64_t t) const {
    return !args_.sum_of_row.empty() && args_.sum_of_row[t] == DeltaSum::kFolded;
  }

  void SortRows() {
    scratch_.order.resize(args_.x.rows);
    for (int64_t t = 0; t < args_.x.rows; ++t) scratch_.order[t] = t;
    if (args_.variant_of_row.empty()) return;
    const auto key = [this](int64_t t) {
      return std::tuple(KindOf(t), args_.variant_of_row[t], t);
    };
    std::sort(scratch_.order.begin(), scratch_.order.end(),
              [&](int64_t a, int64_t b) { return key(a) < key(b); });
  }

  int64_t PassRows() const { return pass_.end - pass_.begin; }
  std::span<PlannedRow> RowsOf(int64_t output) const {
    return std::span(scratch_.rows).subspan(output * PassRows(), PassRows());
  }

  // Every weight's rows, in the same order; and which of them are summed apart.
  void PlanPass() {
    const int64_t outputs = static_cast<int64_t>(args_.outputs.size());
    scratch_.rows.assign(outputs * PassRows(), {});
    apart_ = {PassRows(), 0};
    asked_ = {};
    for (int64_t i = 0; i < outputs; ++i) {
      const std::span<PlannedRow> rows = RowsOf(i);
      for (int64_t r = 0; r < PassRows(); ++r) {
        rows[r] = PlanRow(args_.outputs[i], scratch_.order[pass_.begin + r]);
        rows[r].place = r;
        if (rows[r].apart_signs() == nullptr) continue;
        apart_ = {std::min(apart_.begin, r), std::max(apart_.end, r + 1)};
      }
      ChooseOrders(rows);
    }
    if (apart_.end == 0) apart_ = {};
  }

  // The order of x that each row asks for.
  void ChooseOrders(std::span<PlannedRow> rows) {
    for (size_t i = 0; i < rows.size();) {
      size_t j = i;
      while (j < rows.size() && SameProduct(rows[i], rows[j])) ++j;
      const bool folded = rows[i].folded;
      const bool tiles =
          d_in_ > 0 && (folded || static_cast<int64_t>(j - i) >= x_layout_.panel_tokens);
      XOrder order = tiles ? XOrder::kTiles : XOrder::kRows;
      if (rows[i].weight->dtype == DType::kBF16) {
        // A folded weight is no bf16 any more.
        const bool pairs = multiplies_pairs_ && !folded;
        order = tiles ? (pairs ? XOrder::kPairTiles : XOrder::kSplitTiles)
                      : (pairs ? XOrder::kPairRows : XOrder::kSplitRows);
      }
      asked_[static_cast<size_t>(order)] = true;
      for (; i < j; ++i) rows[i].order = order;
    }
  }

  PlannedRow PlanRow(const LinearOutput& output, int64_t t) const {
    const LayerDelta* variant = VariantOfRow(args_, output, t);
    PlannedRow row;
    row.y = output.y.row(t);
    row.bias = BiasOfRow(args_, output, t);
    row.weight = &output.base;
    if (variant == nullptr) return row;
    if (variant->dense != nullptr) row.weight = variant->dense;
    if (variant->signs != nullptr) row.signs = &variant->signs->layout();
    row.folded = row.signs != nullptr && Folded(t);
    return row;
  }

  int64_t PrepareGrain() const {
    return std::max<int64_t>(1, kPrepareElements / std::max<int64_t>(1, d_in_));
  }

  // Row r of the pass as float32.
  const float* FloatX(int64_t r) const {
    if (args_.x.dtype == DType::kBF16) return widened_ + r * d_in_;
    return static_cast<const float*>(args_.x.row(scratch_.order[pass_.begin + r]));
  }

  // Copies x into the orders that the rows ask for.
  void OrderAll() {
    int64_t floats = 0;
    for (int k = 0; k < kXOrders; ++k) {
      offset_of_order_[k] = floats;
      if (asked_[k]) floats += OrderFloats(static_cast<XOrder>(k));
    }
    ordered_ = scratch_.ordered.Reserve(floats);
    if (args_.x.dtype == DType::kBF16) widened_ = scratch_.widened.Reserve(PassRows() * d_in_);
    threads_.ParallelFor(PassRows(), PrepareGrain(), [this](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) OrderRowOfX(r);
    });
    const int64_t outputs = static_cast<int64_t>(args_.outputs.size());
    for (int64_t i = 0; i < outputs; ++i) {
      for (int64_t r = 0; r < PassRows(); ++r) {
        PlannedRow& row = RowsOf(i)[r];
        row.x = OrderedRow(row.order, r);
      }
    }
  }

  // Floats of a row in an order; two bf16 in one.
  int64_t RowFloats(XOrder order) const {
    return (IsTiles(order) ? RoundUp(d_in_, 2 * x_layout_.vector_floats) : x_stride_) /
           (IsPair(order) ? 2 : 1);
  }
  int64_t OrderFloats(XOrder order) const {
    return RoundUp(PassRows(), x_layout_.tile_rows) * RowFloats(order);
  }
  // Where row r of the pass begins.
  float* OrderedRow(XOrder order, int64_t r) const {
    float* all = ordered_ + offset_of_order_[static_cast<size_t>(order)];
    if (!IsTiles(order)) return all + r * RowFloats(order);
    const int64_t lane = r % x_layout_.tile_rows;
    return all + (r - lane) * RowFloats(order) + lane * x_layout_.vector_floats;
  }

  // Copies row r of the pass into every order.
  void OrderRowOfX(int64_t r) const {
    const void* x = args_.x.row(scratch_.order[pass_.begin + r]);
    if (args_.x.dtype == DType::kBF16) {
      HWY_DYNAMIC_DISPATCH(WidenRowOfX)(x, d_in_, widened_ + r * d_in_);
    }
    for (int k = 0; k < kXOrders; ++k) {
      const XOrder order = static_cast<XOrder>(k);
      if (!asked_[k]) continue;
      const int64_t step = x_layout_.vector_floats * (IsTiles(order) ? x_layout_.tile_rows : 1);
      if (IsPair(order)) {
        HWY_DYNAMIC_DISPATCH(OrderRowOfPairs)(x, d_in_, step, OrderedRow(order, r));
      } else {
        HWY_DYNAMIC_DISPATCH(OrderRow)
        (FloatX(r), d_in_, IsSplit(order), step, OrderedRow(order, r));
      }
    }
  }

  void BuildTables(RowRange tokens) {
    if (tokens.begin == tokens.end) return;
    tables_ = scratch_.tables.Reserve((tokens.end - tokens.begin) * table_floats_);
    tokens_ = tokens;
    threads_.ParallelFor(tokens.end - tokens.begin, PrepareGrain(),
                         [this](int64_t begin, int64_t end) {
                           for (int64_t i = begin; i < end; ++i) {
                             HWY_DYNAMIC_DISPATCH(TableOfRow)
                             (FloatX(tokens_.begin + i), d_in_, tables_ + i * table_floats_);
                           }
                         });
    const int64_t outputs = static_cast<int64_t>(args_.outputs.size());
    for (int64_t i = 0; i < outputs; ++i) {
      for (int64_t r = tokens.begin; r < tokens.end; ++r) {
        RowsOf(i)[r].table = tables_ + (r - tokens.begin) * table_floats_;
      }
    }
  }

  // Every thread claims ranges of row blocks until none is left, one ahead of the one it is at, so
  // that memory does not idle between two; near the end it claims none that another could take.
  void RunBlocks(RowRange tokens, bool first) {
    tokens_ = tokens;
    first_ = first;
    grain_ = BlockGrain();
    claimed_.store(0, std::memory_order_relaxed);
    const int64_t ranges = (blocks_ + grain_ - 1) / grain_;
    const int64_t threads = std::min<int64_t>(threads_.size(), ranges);
    threads_.ParallelFor(threads, 1, [this](int64_t begin, int64_t end) {
      const int64_t slot = scratch_.panels.Take();
      for (; begin < end; ++begin) RunRanges(scratch_.panels.at(slot));
      scratch_.panels.Return(slot);
    });
  }

  int64_t Claim() { return claimed_.fetch_add(grain_, std::memory_order_relaxed); }

  void RunRanges(const PanelMemory& memory) {
    int64_t begin = Claim();
    while (begin < blocks_) {
      const bool plenty = begin + 2 * grain_ * threads_.size() < blocks_;
      const int64_t next = plenty ? Claim() : -1;
      RunRange(begin, std::min(begin + grain_, blocks_), next, memory);
      begin = plenty ? next : Claim();
    }
  }

  // Row blocks [begin, end) of all weights; `next`: where this thread goes on, or -1.
  void RunRange(int64_t begin, int64_t end, int64_t next, const PanelMemory& memory) const {
    int64_t first = 0;  // row block of a weight
    for (size_t i = 0; i < args_.outputs.size() && first < end; ++i) {
      const int64_t d_out = args_.outputs[i].base.rows;
      const int64_t last = first + RoundUp(d_out, kSignBlockRows) / kSignBlockRows;
      if (begin < last && first < last) {
        const std::span<const PlannedRow> rows = RowsOf(static_cast<int64_t>(i));
        HWY_DYNAMIC_DISPATCH(WalkRange)
        ({.rows = rows,
          .apart = rows.subspan(tokens_.begin, tokens_.end - tokens_.begin),
          .dense_half = first_,
          .with_bias = tokens_.end == apart_.end,
          .d_out = d_out,
          .begin = std::max(begin, first) - first,
          .end = std::min(end, last) - first,
          .next = next < last ? std::max<int64_t>(-1, next - first) : -1,
          .memory = memory});
      }
      first = last;
    }
  }

  // Row blocks a range: whole tiles of the 1-bit half, half a megabyte of W, and several ranges a
  // thread where the layer is large enough.
  int64_t BlockGrain() const {
    const int64_t element = DTypeSize(args_.outputs[0].base.dtype);
    const int64_t block_bytes = std::max<int64_t>(1, kSignBlockRows * d_in_ * element);
    const int64_t even = blocks_ / (kRangesPerThread * threads_.size());
    const int64_t tile = std::min<int64_t>(kTileBlocks, blocks_ / threads_.size());
    const int64_t grain = std::max({int64_t{1}, tile, std::min(kRangeBytes / block_bytes, even)});
    return grain >= kTileBlocks ? grain / kTileBlocks * kTileBlocks : grain;
  }

  const LinearArgs& args_;
  LinearScratch::State& scratch_;
  ThreadPool& threads_;
  const int64_t d_in_;
  const bool multiplies_pairs_;
  const XLayout x_layout_;
  int64_t blocks_ = 0;        // of 16 outputs, over all weights
  int64_t x_stride_ = 0;      // of ordered x
  int64_t table_floats_ = 0;  // of a token
  // What the current pass and loop work on; a loop's lambda captures `this` alone, so it allocates
  // nothing.
  RowRange pass_;                          // of scratch_.order
  RowRange apart_;                         // rows of the pass that are summed apart
  RowRange tokens_;                        // the group of them whose tables are built
  std::array<bool, kXOrders> asked_ = {};  // orders of x
  std::array<int64_t, kXOrders> offset_of_order_ = {};
  float* ordered_ = nullptr;
  float* widened_ = nullptr;
  float* tables_ = nullptr;
  bool first_ = false;
  int64_t grain_ = 1;  // row blocks of a range
  std::atomic<int64_t> claimed_ = 0;
};

}  // namespace

Status BitDeltaLinearCpu(const LinearArgs& args, LinearScratch& scratch, ThreadPool& threads) {
  STOCKPOT_RETURN_IF_ERROR(CheckLinearArgs(args));
  Call(args, scratch.state(), threads).Run();
  return OkStatus();
}

}  // namespace stockpot
#endif  // HWY_ONCE
