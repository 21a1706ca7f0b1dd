// sparse_delta_linear on the CPU: plans the batch, then walks chunks of stored rows in parallel.
//
//   y[t, o] += sum_k values[k] * x[t, columns[k]]                             (sparse_delta.h)
//
// A sum of one (t, o) has four accumulators, element k of its row goes to the (k mod 4)-th, and
// they are folded as (0 + 1) + (2 + 3): always the same order, whatever the tile.
//
// Tiles: 1, 4, 8 or 16 rows of the batch that share a delta, one lane each, over a transposed copy
// of their x: one index then serves up to 16 tokens, and their 16 values are one cache line. A
// single row reads x where it lies: three loads and one FMA an element, about one element a cycle,
// which keeps up with memory; gathers are no faster on the CPUs at hand. The copy costs d_in values
// a token, so a delta with fewer elements than that goes without.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/row_groups.h"
#include "kernels/sparse/sparse_delta.h"
#include "kernels/sparse/sparse_layout.h"

// Included once per SIMD target below: what they share must be declared once.
#ifndef STOCKPOT_SPARSE_DELTA_CPU_TILE
#define STOCKPOT_SPARSE_DELTA_CPU_TILE
namespace stockpot {

// Rows of the batch that a pass over a chunk serves.
struct SparseTile {
  const float* x = nullptr;      // width 1: the row; else [d_in, width], missing rows 0
  float* const* y = nullptr;     // [count]
  const int64_t* row = nullptr;  // [count] rows of args.x
  int64_t count = 0;
  int64_t width = 1;  // 1, 4, 8, 16
};

// Chunks [begin, end).
struct SparseRange {
  int64_t begin = 0;
  int64_t end = 0;
};

}  // namespace stockpot
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sparse/sparse_delta_cpu.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int kChains = 4;

// The sums of one stored row for kWidth tokens.
template <int kWidth, class Column>
struct RowSums {
  using Tag = hn::CappedTag<float, kWidth>;
  static constexpr int kLanes = hn::MaxLanes(Tag());
  static constexpr int kVectors = kWidth / kLanes;
  hn::Vec<Tag> sums[kChains][kVectors];

  HWY_INLINE void Clear() {
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[chain][v] = hn::Zero(Tag());
    }
  }

  HWY_INLINE void AddElement(int chain, Column column, float value, const float* x) {
    const float* p = x + static_cast<int64_t>(column) * kWidth;
    const auto values = hn::Set(Tag(), value);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[chain][v] = hn::MulAdd(values, hn::LoadU(Tag(), p + v * kLanes), sums[chain][v]);
    }
  }

  HWY_INLINE void AddRow(const Column* columns, const float* values, int64_t count,
                         const float* x) {
    int64_t k = 0;
    for (; k + kChains <= count; k += kChains) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) {
        AddElement(chain, columns[k + chain], values[k + chain], x);
      }
    }
#pragma GCC unroll 3
    for (int chain = 0; chain < kChains - 1; ++chain) {
      if (k + chain < count) AddElement(chain, columns[k + chain], values[k + chain], x);
    }
  }

  HWY_INLINE void Store(float* to) const {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(hn::Add(hn::Add(sums[0][v], sums[1][v]), hn::Add(sums[2][v], sums[3][v])), Tag(),
                 to + v * kLanes);
    }
  }
};

// Stored rows [begin, end) of a delta for one tile.
template <int kWidth, class Column>
HWY_NOINLINE void TileRows(const SparseDelta::Layout& delta, const Column* columns, int64_t begin,
                           int64_t end, const SparseTile& tile) {
  const uint32_t* starts = delta.starts.data();
  const float* values = delta.values.data();
  for (int64_t i = begin; i < end; ++i) {
    RowSums<kWidth, Column> row;
    row.Clear();
    const int64_t first = starts[i];
    row.AddRow(columns + first, values + first, starts[i + 1] - first, tile.x);
    HWY_ALIGN float sums[kWidth];
    row.Store(sums);
    const int64_t o = delta.outputs.data()[i];
    if constexpr (kWidth == 1) {
      tile.y[0][o] += sums[0];
    } else {
      for (int64_t t = 0; t < tile.count; ++t) tile.y[t][o] += sums[t];
    }
  }
}

template <class Column>
void TileChunks(const SparseDelta::Layout& delta, const Column* columns, SparseRange chunks,
                const SparseTile& tile) {
  const int64_t begin = delta.chunks[chunks.begin];
  const int64_t end = delta.chunks[chunks.end];
  if (tile.width == 1) {
    TileRows<1>(delta, columns, begin, end, tile);
  } else if (tile.width == 4) {
    TileRows<4>(delta, columns, begin, end, tile);
  } else if (tile.width == 8) {
    TileRows<8>(delta, columns, begin, end, tile);
  } else {
    TileRows<16>(delta, columns, begin, end, tile);
  }
}

// A range of chunks of a delta for one tile.
void RunChunks(const SparseDelta::Layout& delta, SparseRange chunks, const SparseTile& tile) {
  if (delta.narrow()) {
    TileChunks(delta, delta.narrow_columns.data(), chunks, tile);
  } else {
    TileChunks(delta, delta.wide_columns.data(), chunks, tile);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {
namespace {

HWY_EXPORT(RunChunks);

// The rows of one delta: tiles [tile_begin, tile_end). Task first_task + i is range i / tiles of
// its chunks for tile i % tiles.
struct SparseGroup {
  const SparseDelta::Layout* delta = nullptr;
  int64_t tile_begin = 0;
  int64_t tile_end = 0;
  int64_t range_chunks = 1;
  int64_t first_task = 0;

  int64_t tiles() const { return tile_end - tile_begin; }
  int64_t tasks() const {
    return (delta->chunk_count() + range_chunks - 1) / range_chunks * tiles();
  }
};

}  // namespace

struct SparseScratch::State {
  RowGroups rows;
  std::vector<float*> y;  // of rows.order()
  std::vector<SparseTile> tiles;
  std::vector<SparseGroup> groups;
  AlignedBuffer<float> transposed;
};

SparseScratch::SparseScratch() : state_(std::make_unique<State>()) {}
SparseScratch::~SparseScratch() = default;

namespace {

constexpr int64_t kMaxWidth = 16;
constexpr int64_t kTasksPerThread = 8;
// A tile's copy of x comes into the L2 cache once a task: enough elements must share that.
constexpr int64_t kMaxRangeChunks = 16;

int64_t WidthFor(int64_t rows) { return rows > 8 ? 16 : rows > 4 ? 8 : rows > 1 ? 4 : 1; }

// One call: the plan and its loops. The loops' lambdas capture `this` alone, so they allocate
// nothing.
class SparseCall {
 public:
  SparseCall(const SparseDeltaArgs& args, SparseScratch::State& scratch, ThreadPool& threads)
      : args_(args), scratch_(scratch), threads_(threads) {
    scratch_.rows.Plan(args.delta_of_row);
    scratch_.y.clear();
    for (const int64_t t : scratch_.rows.order()) scratch_.y.push_back(args.y.row(t));
    scratch_.tiles.clear();
    scratch_.groups.clear();
    scratch_.tiles.reserve(static_cast<size_t>(args.x.rows));
    scratch_.groups.reserve(static_cast<size_t>(args.x.rows));
    for (const RowGroup& group : scratch_.rows.groups()) PlanGroup(group);
  }

  void Run() {
    if (tasks_ == 0) return;
    TransposeTiles();
    threads_.ParallelFor(tasks_, 1, [this](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) RunTask(task);
    });
  }

 private:
  void PlanGroup(const RowGroup& rows) {
    const SparseDelta* delta = args_.deltas[rows.delta];
    if (delta == nullptr || delta->changed() == 0) return;
    SparseGroup group{.delta = &delta->layout(),
                      .tile_begin = static_cast<int64_t>(scratch_.tiles.size()),
                      .first_task = tasks_};
    const bool transpose = delta->changed() >= delta->d_in();
    for (int64_t i = rows.begin; i < rows.end;) {
      const int64_t width = transpose ? WidthFor(rows.end - i) : 1;
      const int64_t* row = scratch_.rows.order().data() + i;
      SparseTile tile{.x = args_.x.row(row[0]),
                      .y = scratch_.y.data() + i,
                      .row = row,
                      .count = std::min(width, rows.end - i),
                      .width = width};
      if (width > 1) transposed_floats_ += width * args_.x.cols;
      scratch_.tiles.push_back(tile);
      i += tile.count;
    }
    group.tile_end = static_cast<int64_t>(scratch_.tiles.size());
    const int64_t even =
        group.delta->chunk_count() * group.tiles() / (kTasksPerThread * threads_.size());
    group.range_chunks = std::clamp(even, int64_t{1}, kMaxRangeChunks);
    tasks_ += group.tasks();
    scratch_.groups.push_back(group);
  }

  void TransposeTiles() {
    if (transposed_floats_ == 0) return;
    float* to = scratch_.transposed.Reserve(transposed_floats_);
    for (SparseTile& tile : scratch_.tiles) {
      if (tile.width == 1) continue;
      tile.x = to;
      to += tile.width * args_.x.cols;
    }
    const int64_t tiles = static_cast<int64_t>(scratch_.tiles.size());
    threads_.ParallelFor(tiles, 1, [this](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) Transpose(scratch_.tiles[i]);
    });
  }

  // Fills the tile's copy, a few columns at a time so that they stay in the cache.
  void Transpose(const SparseTile& tile) const {
    if (tile.width == 1) return;
    constexpr int64_t kBlock = 64;  // columns
    float* to = const_cast<float*>(tile.x);
    for (int64_t begin = 0; begin < args_.x.cols; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, args_.x.cols);
      for (int64_t t = 0; t < tile.width; ++t) {
        const float* x = t < tile.count ? args_.x.row(tile.row[t]) : nullptr;
        for (int64_t c = begin; c < end; ++c) to[c * tile.width + t] = x != nullptr ? x[c] : 0.0f;
      }
    }
  }

  void RunTask(int64_t task) const {
    const SparseGroup& group = GroupOfTask(task);
    const int64_t index = task - group.first_task;
    const int64_t first = index / group.tiles() * group.range_chunks;
    HWY_DYNAMIC_DISPATCH(RunChunks)
    (*group.delta,
     SparseRange{first, std::min(first + group.range_chunks, group.delta->chunk_count())},
     scratch_.tiles[group.tile_begin + index % group.tiles()]);
  }

  const SparseGroup& GroupOfTask(int64_t task) const {
    const auto after = std::upper_bound(
        scratch_.groups.begin(), scratch_.groups.end(), task,
        [](int64_t wanted, const SparseGroup& group) { return wanted < group.first_task; });
    return *(after - 1);
  }

  const SparseDeltaArgs& args_;
  SparseScratch::State& scratch_;
  ThreadPool& threads_;
  int64_t tasks_ = 0;
  int64_t transposed_floats_ = 0;
};

static_assert(kMaxWidth * sizeof(float) == kCacheLineBytes);

}  // namespace

Status SparseDeltaLinearCpu(const SparseDeltaArgs& args, SparseScratch& scratch,
                            ThreadPool& threads) {
  STOCKPOT_RETURN_IF_ERROR(CheckSparseArgs(args));
  SparseCall(args, scratch.state(), threads).Run();
  return OkStatus();
}

}  // namespace stockpot
#endif  // HWY_ONCE
