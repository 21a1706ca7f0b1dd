// bitdelta_linear on the CPU: plans the batch, then walks blocks of output rows in parallel.
//
//   y = x W^T + alpha * (x S^T) + bias                                               (linear.h)
//
// A block of W is read from memory once and serves all rows of the batch while it is in the cache;
// the signs of each variant follow in the same pass (linear_base-inl.h, linear_delta-inl.h). Tables
// of the tokens must stay in the L2 cache, so long batches take the 1-bit half in groups of tokens;
// the dense half always takes all of them with the first group.
#include <algorithm>
#include <span>
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

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {

void OrderRow(const float* x, int64_t columns, DType weight_dtype, float* ordered) {
  OrderX(x, columns, weight_dtype == DType::kBF16, ordered);
}

void TableOfRow(const float* x, int64_t columns, float* table) {
  BuildTable(x, columns, (columns + kSignWordColumns - 1) / kSignWordColumns, table);
}

// The dense half: outputs of row blocks [begin, end) for all rows, which are sorted by weight.
void DotBlocks(std::span<const PlannedRow> rows, int64_t d_out, int64_t begin, int64_t end) {
  const int64_t first = begin * kSignBlockRows;
  const int64_t last = std::min(d_out, end * kSignBlockRows);
  for (size_t i = 0; i < rows.size();) {
    size_t j = i;
    while (j < rows.size() && rows[j].weight == rows[i].weight) ++j;
    WithWeightType(rows[i].weight->dtype, [&](auto type) {
      DotRows<decltype(type)>(*rows[i].weight, &rows[i], static_cast<int64_t>(j - i), first, last);
    });
    i = j;
  }
}

// The 1-bit half for rows that all have signs, sorted by variant.
void SignBlocks(std::span<const PlannedRow> rows, int64_t begin, int64_t end) {
  for (size_t i = 0; i < rows.size();) {
    size_t j = i;
    while (j < rows.size() && rows[j].signs == rows[i].signs) ++j;
    const PackedSigns::Layout* after = j < rows.size() ? rows[j].signs : nullptr;
    DeltaRows(&rows[i], static_cast<int64_t>(j - i), begin, end, after);
    i = j;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {

struct LinearScratch::State {
  std::vector<PlannedRow> rows;
  AlignedBuffer<float> ordered;  // [rows, x_stride]
  AlignedBuffer<float> tables;   // [rows of a group, table_floats]
};

LinearScratch::LinearScratch() : state_(std::make_unique<State>()) {}
LinearScratch::~LinearScratch() = default;

namespace {

HWY_EXPORT(OrderRow);
HWY_EXPORT(TableOfRow);
HWY_EXPORT(DotBlocks);
HWY_EXPORT(SignBlocks);

// Limits, in bytes and elements.
constexpr int64_t kTableBytes = 1 << 20;  // tables of a group of tokens: half of a common L2
constexpr int64_t kRangeBytes = 1 << 20;  // of W handed to a thread at a time
constexpr int64_t kRangesPerThread = 4;
constexpr int64_t kTileBlocks = 4;               // row blocks that the 1-bit half takes together
constexpr int64_t kPrepareElements = 16 * 1024;  // of x handed to a thread at a time
constexpr int64_t kMaxTableEntries = 16;

int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// One call: the plan and its sizes.
class Call {
 public:
  Call(const LinearArgs& args, LinearScratch::State& scratch, ThreadPool& threads)
      : args_(args), scratch_(scratch), threads_(threads) {
    // A row more than the padding keeps the rows of x off one another's cache sets.
    x_stride_ = RoundUp(args.base.cols, kSignWordColumns) + 16;
    table_floats_ =
        RoundUp(args.base.cols, kSignWordColumns) / kSignGroupColumns * kMaxTableEntries;
    PlanRows();
  }

  void Run() {
    OrderAll();
    const int64_t table_bytes = std::max<int64_t>(1, table_floats_ * sizeof(float));
    const int64_t group = std::max<int64_t>(1, kTableBytes / table_bytes);
    RowRange tokens{signed_rows_.begin, std::min(signed_rows_.begin + group, signed_rows_.end)};
    bool first = true;
    do {
      BuildTables(tokens);
      RunBlocks(tokens, first);
      first = false;
      tokens = {tokens.end, std::min(tokens.end + group, signed_rows_.end)};
    } while (tokens.begin < tokens.end);
  }

 private:
  // Order: base only, then 1-bit by variant, then dense by variant.
  void PlanRows() {
    scratch_.rows.resize(args_.x.rows);
    for (int64_t t = 0; t < args_.x.rows; ++t) {
      PlannedRow& row = scratch_.rows[t];
      const LayerDelta* variant = VariantOfRow(args_, t);
      row = {};
      row.source = t;
      row.y = args_.y.row(t);
      row.bias = BiasOfRow(args_, t);
      row.weight = &args_.base;
      if (variant != nullptr && variant->dense != nullptr) row.weight = variant->dense;
      if (variant != nullptr && variant->signs != nullptr) row.signs = &variant->signs->layout();
    }
    const auto key = [this](const PlannedRow& r) {
      const int kind = r.weight != &args_.base ? 2 : r.signs != nullptr ? 1 : 0;
      const int64_t variant = args_.variant_of_row.empty() ? -1 : args_.variant_of_row[r.source];
      return std::tuple(kind, variant, r.source);
    };
    std::sort(scratch_.rows.begin(), scratch_.rows.end(),
              [&](const PlannedRow& a, const PlannedRow& b) { return key(a) < key(b); });
    while (signed_rows_.begin < args_.x.rows &&
           scratch_.rows[signed_rows_.begin].signs == nullptr) {
      ++signed_rows_.begin;
    }
    signed_rows_.end = signed_rows_.begin;
    while (signed_rows_.end < args_.x.rows && scratch_.rows[signed_rows_.end].signs != nullptr) {
      ++signed_rows_.end;
    }
  }

  int64_t PrepareGrain() const {
    return std::max<int64_t>(1, kPrepareElements / std::max<int64_t>(1, args_.base.cols));
  }

  void OrderAll() {
    float* ordered = scratch_.ordered.Reserve(args_.x.rows * x_stride_);
    for (int64_t i = 0; i < args_.x.rows; ++i) scratch_.rows[i].x = ordered + i * x_stride_;
    threads_.ParallelFor(args_.x.rows, PrepareGrain(), [this](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const PlannedRow& row = scratch_.rows[i];
        HWY_DYNAMIC_DISPATCH(OrderRow)
        (args_.x.row(row.source), args_.base.cols, row.weight->dtype, const_cast<float*>(row.x));
      }
    });
  }

  void BuildTables(RowRange tokens) {
    if (tokens.begin == tokens.end) return;
    tables_ = scratch_.tables.Reserve((tokens.end - tokens.begin) * table_floats_);
    first_token_ = tokens.begin;
    threads_.ParallelFor(
        tokens.end - tokens.begin, PrepareGrain(), [this](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            PlannedRow& row = scratch_.rows[first_token_ + i];
            float* table = tables_ + i * table_floats_;
            HWY_DYNAMIC_DISPATCH(TableOfRow)(args_.x.row(row.source), args_.base.cols, table);
            row.table = table;
          }
        });
  }

  void RunBlocks(RowRange tokens, bool first) {
    tokens_ = tokens;
    first_ = first;
    const int64_t blocks = RoundUp(args_.base.rows, kSignBlockRows) / kSignBlockRows;
    threads_.ParallelFor(blocks, BlockGrain(blocks), [this](int64_t begin, int64_t end) {
      const std::span<const PlannedRow> rows(scratch_.rows);
      if (first_) HWY_DYNAMIC_DISPATCH(DotBlocks)(rows, args_.base.rows, begin, end);
      HWY_DYNAMIC_DISPATCH(SignBlocks)
      (rows.subspan(tokens_.begin, tokens_.end - tokens_.begin), begin, end);
      if (tokens_.end == signed_rows_.end) AddBias(begin, end);
    });
  }

  void AddBias(int64_t begin, int64_t end) const {
    const int64_t last = std::min(args_.base.rows, end * kSignBlockRows);
    for (const PlannedRow& row : scratch_.rows) {
      if (row.bias == nullptr) continue;
      for (int64_t o = begin * kSignBlockRows; o < last; ++o) row.y[o] += row.bias[o];
    }
  }

  // Row blocks a range: as much of W as stays in the L2 cache, in whole tiles of the 1-bit half,
  // and several ranges a thread where the layer is large enough.
  int64_t BlockGrain(int64_t blocks) const {
    const int64_t block_bytes =
        std::max<int64_t>(1, kSignBlockRows * args_.base.cols * DTypeSize(args_.base.dtype));
    const int64_t even = blocks / (kRangesPerThread * threads_.size());
    const int64_t tile = std::min<int64_t>(kTileBlocks, blocks / threads_.size());
    const int64_t grain = std::max({int64_t{1}, tile, std::min(kRangeBytes / block_bytes, even)});
    return grain >= kTileBlocks ? grain / kTileBlocks * kTileBlocks : grain;
  }

  const LinearArgs& args_;
  LinearScratch::State& scratch_;
  ThreadPool& threads_;
  int64_t x_stride_ = 0;
  int64_t table_floats_ = 0;  // of a token
  RowRange signed_rows_;      // of the plan
  // What the current loop works on; a loop's lambda captures `this` alone, so it allocates nothing.
  float* tables_ = nullptr;
  int64_t first_token_ = 0;
  RowRange tokens_;
  bool first_ = false;
};

}  // namespace

Status BitDeltaLinearCpu(const LinearArgs& args, LinearScratch& scratch, ThreadPool& threads) {
  STOCKPOT_RETURN_IF_ERROR(CheckLinearArgs(args));
  if (args.x.rows == 0 || args.base.rows == 0) return OkStatus();
  Call(args, scratch.state(), threads).Run();
  return OkStatus();
}

}  // namespace stockpot
#endif  // HWY_ONCE
