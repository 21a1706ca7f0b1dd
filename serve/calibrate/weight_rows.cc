#include "serve/calibrate/weight_rows.h"

#include <algorithm>

#include "kernels/bitdelta/packed_signs.h"
#include "kernels/lora/lora_layout.h"
#include "kernels/sparse/sparse_layout.h"

namespace stockpot {
namespace {

constexpr int64_t kGrainRows = 16;

// Calls body(column, sign) for every column of a row of signs.
template <typename Body>
void ForSigns(const PackedSigns::Layout& signs, int64_t plane, int64_t row, const Body& body) {
  const uint32_t* const words = signs.block(plane, row / kSignBlockRows) + row % kSignBlockRows;
  for (int64_t c = 0; c < signs.d_in; c += kSignWordColumns) {
    const uint32_t bits = FoldSignGroups(words[c / kSignWordColumns * kSignBlockRows]);
    const int64_t count = std::min(kSignWordColumns, signs.d_in - c);
    for (int64_t i = 0; i < count; ++i) body(c + i, (bits >> i) & 1);
  }
}

void AddSparse(const SparseDelta::Layout& sparse, int64_t first, int64_t rows, int64_t cols,
               float* out) {
  for (int64_t stored = 0; stored < sparse.stored_rows(); ++stored) {
    const int64_t row = static_cast<int64_t>(sparse.outputs.data()[stored]) - first;
    if (row < 0 || row >= rows) continue;
    for (int64_t k = sparse.starts.data()[stored]; k < sparse.starts.data()[stored + 1]; ++k) {
      out[row * cols + sparse.column(k)] += sparse.values.data()[k];
    }
  }
}

}  // namespace

void FillWeightRows(const WeightMatrix& base, const LinearView& layer, const LayerScales& scales,
                    int64_t first, int64_t rows, float* out, ThreadPool& threads) {
  const WeightMatrix& weight = layer.delta.dense == nullptr ? base : *layer.delta.dense;
  const int64_t cols = base.cols;
  threads.ParallelFor(rows, kGrainRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const row = out + r * cols;
      const void* const from = weight.row(first + r);
      for (int64_t c = 0; c < cols; ++c) row[c] = LoadWeight(from, weight.dtype, c);
      if (layer.delta.signs != nullptr) {
        const PackedSigns::Layout& signs = layer.delta.signs->layout();
        for (int64_t plane = 0; plane < signs.planes; ++plane) {
          const float alpha =
              scales.empty() ? signs.scales(plane)[first + r]
                             : scales[static_cast<size_t>(plane)][static_cast<size_t>(first + r)];
          ForSigns(signs, plane, first + r,
                   [&](int64_t c, bool positive) { row[c] += positive ? alpha : -alpha; });
        }
      }
      if (layer.lora == nullptr) continue;
      const LoraDelta::Layout& lora = layer.lora->layout();
      for (int64_t k = 0; k < lora.rank; ++k) {
        const float b = lora.B(first + r, k);
        for (int64_t c = 0; c < cols; ++c) row[c] += b * lora.A(k, c);
      }
    }
  });
  if (layer.sparse != nullptr) AddSparse(layer.sparse->layout(), first, rows, cols, out);
}

void SignedRowSums(const PackedSigns& signs, int64_t plane, int64_t first, int64_t rows,
                   const float* m, float* sums, ThreadPool& threads) {
  const PackedSigns::Layout& layout = signs.layout();
  threads.ParallelFor(rows, kGrainRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* const row = m + r * layout.d_in;
      double sum = 0;
      ForSigns(layout, plane, first + r,
               [&](int64_t c, bool positive) { sum += positive ? row[c] : -row[c]; });
      sums[r] = static_cast<float>(sum);
    }
  });
}

}  // namespace stockpot
