// bitdelta_linear on the CPU: plans the batch, then walks blocks of output rows in parallel.
//
//   y = x W^T + sum_p alpha_p * (x S_p^T) + bias                                     (linear.h)
//
// A block of W is read from memory once and serves all rows of the batch while it is in the cache.
// Few tokens read it as it lies (linear_base-inl.h), many widen it first (linear_panel-inl.h); the
// signs of the variants that are summed apart follow in the same pass (linear_delta-inl.h). Tables
// of the tokens must stay in the L2 cache, so long batches take the 1-bit half in groups of tokens;
// the dense half takes all rows of a pass with the first group. A pass holds at most kPassRows
// rows: their x stays in the last cache, and scratch memory is bounded. Folded rows of bf16 are
// multiplied before the walk, where the processor multiplies pairs (linear_columns.h).
#include <algorithm>
#include <array>
#include <atomic>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/linear_columns.h"
#include "kernels/bitdelta/linear_plan.h"
#include "kernels/bitdelta/linear_scratch.h"
#include "kernels/bitdelta/packed_signs.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bitdelta/linear_cpu.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/bitdelta/linear_base-inl.h"
#include "kernels/bitdelta/linear_delta-inl.h"
#include "kernels/bitdelta/linear_panel-inl.h"
#include "kernels/bitdelta/linear_walk-inl.h"

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

void WidenRowOfX(const void* row, int64_t columns, float* wide) {
  const BF16* x = static_cast<const BF16*>(row);
  const FloatTag f;
  int64_t c = 0;
  for (; c + kFloatLanes <= columns; c += kFloatLanes) {
    hn::StoreU(LoadAsFloat(f, x + c), f, wide + c);
  }
  for (; c < columns; ++c) wide[c] = FloatFromBF16(x[c].bits);
}

bool ProcessorMultipliesPairs() { return MultipliesPairs(); }

void TableOfRow(const float* x, int64_t columns, float* table) {
  BuildTable(x, columns, (columns + kSignWordColumns - 1) / kSignWordColumns, table);
}

int64_t PanelMemoryFloats(int64_t d_in) { return PanelFloats(d_in); }
int64_t PartialMemoryFloats(int64_t d_in, int64_t tokens) { return PartialFloats(d_in, tokens); }

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {

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
constexpr int64_t kChunkRows = 3072;  // of W that share a table: 6 MiB of sums of 512 tokens

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
      if (multiplies_pairs_) MultiplyByColumns();
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
        order = tiles ? (multiplies_pairs_ ? XOrder::kPairTiles : XOrder::kSplitTiles)
                      : (multiplies_pairs_ ? XOrder::kPairRows : XOrder::kSplitRows);
        // A folded weight is no bf16 any more: its signs are summed beside it.
        if (folded && order == XOrder::kPairTiles) order = XOrder::kColumns;
      }
      if (order != XOrder::kColumns) asked_[static_cast<size_t>(order)] = true;
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
        if (row.order != XOrder::kColumns) row.x = OrderedRow(row.order, r);
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

  // Whether row r of the pass is read as float32: in an order, or for its table.
  bool NeedsFloats(int64_t r) const {
    bool needs = apart_.begin <= r && r < apart_.end;
    for (int k = 0; k < kXOrders; ++k) needs |= asked_[k] && !IsPair(static_cast<XOrder>(k));
    return needs;
  }

  // Copies row r of the pass into every order.
  void OrderRowOfX(int64_t r) const {
    const void* x = args_.x.row(scratch_.order[pass_.begin + r]);
    if (args_.x.dtype == DType::kBF16 && NeedsFloats(r)) {
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

  bool ByColumns(int64_t r) const {
    for (size_t i = 0; i < args_.outputs.size(); ++i) {
      if (RowsOf(static_cast<int64_t>(i))[r].order == XOrder::kColumns) return true;
    }
    return false;
  }

  // Rows of the pass that some weight takes by columns, by variant.
  void PlanRuns() {
    scratch_.runs.clear();
    const int64_t* order = scratch_.order.data() + pass_.begin;
    const int64_t blocks = RoundUp(d_in_, kRunColumns) / kRunColumns;
    int64_t words = 0;
    for (int64_t r = 0, end = 0; r < PassRows(); r = end) {
      end = r + 1;
      if (!ByColumns(r)) continue;
      while (end < PassRows() && ByColumns(end) &&
             args_.variant_of_row[order[end]] == args_.variant_of_row[order[r]]) {
        ++end;
      }
      const int64_t vectors = RoundUp(end - r, kRunTokens) / kRunTokens;
      scratch_.runs.push_back({.input = &args_.x,
                               .order = order + r,
                               .begin = r,
                               .count = end - r,
                               .vectors = vectors});
      words += blocks * vectors * kRunTokens * kRunColumns / 2;
    }
    uint32_t* x = scratch_.columns.Reserve(words);
    for (ColumnRun& run : scratch_.runs) {
      run.x = x;
      x += blocks * run.vectors * kRunTokens * kRunColumns / 2;
    }
  }

  // Every run through every weight that takes it by columns (linear_columns.h).
  void MultiplyByColumns() {
    PlanRuns();
    for (const ColumnRun& run : scratch_.runs) {
      run_ = &run;
      const int64_t blocks = RoundUp(d_in_, kRunColumns) / kRunColumns;
      threads_.ParallelFor(blocks, 1, [this](int64_t begin, int64_t end) {
        OrderColumns(*run_, d_in_, begin, end);
      });
      for (size_t i = 0; i < args_.outputs.size(); ++i) {
        run_rows_ = RowsOf(static_cast<int64_t>(i)).subspan(run.begin, run.count);
        if (run_rows_[0].order == XOrder::kColumns) MultiplyRun();
      }
    }
  }

  // The same number of chunks for every thread.
  void MultiplyRun() {
    const int64_t d_out = run_rows_[0].weight->rows;
    const int64_t share = (d_out + threads_.size() - 1) / threads_.size();
    const int64_t chunks = std::max<int64_t>(1, (share + kChunkRows - 1) / kChunkRows);
    grain_ = std::max(kSignBlockRows, RoundUp((share + chunks - 1) / chunks, kSignBlockRows));
    scratch_.column_chunks.Prepare(threads_.size(), ColumnFloats(run_->vectors, grain_), 0);
    threads_.ParallelFor((d_out + grain_ - 1) / grain_, 1, [this](int64_t begin, int64_t end) {
      const int64_t slot = scratch_.column_chunks.Take();
      for (; begin < end; ++begin) {
        MultiplyColumns({.run = run_,
                         .rows = run_rows_.data(),
                         .begin = begin * grain_,
                         .end = std::min((begin + 1) * grain_, run_rows_[0].weight->rows)},
                        scratch_.column_chunks.at(slot).panel);
      }
      scratch_.column_chunks.Return(slot);
    });
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
  const ColumnRun* run_ = nullptr;
  std::span<const PlannedRow> run_rows_;  // of run_, for one weight
  bool first_ = false;
  int64_t grain_ = 1;  // row blocks of a range, rows of a chunk
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
