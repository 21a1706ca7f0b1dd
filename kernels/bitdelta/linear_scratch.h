// The temporaries of the CPU kernel of bitdelta_linear, kept between calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/linear_columns.h"
#include "kernels/bitdelta/linear_plan.h"

namespace stockpot {

// Working memory of the threads that are at work: as many as the pool has threads.
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

struct LinearScratch::State {
  std::vector<int64_t> order;    // rows of x, as the kernel walks them
  std::vector<PlannedRow> rows;  // [outputs, rows of a pass]
  AlignedBuffer<float> widened;  // [rows of a pass, d_in]: x, where it is bfloat16
  AlignedBuffer<float> ordered;  // x in every order that is asked for, one after another
  AlignedBuffer<float> tables;   // [rows of a group, table_floats]
  PanelPool panels;
  std::vector<ColumnRun> runs;      // of a pass
  AlignedBuffer<uint32_t> columns;  // x of the runs, one after another
  PanelPool column_chunks;
};

}  // namespace stockpot
