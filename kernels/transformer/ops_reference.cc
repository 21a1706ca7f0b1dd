// Attention by its definition, in double precision.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/transformer/ops.h"

namespace stockpot {

void AttentionReference(const AttentionArgs& a) {
  const auto row = [&](std::span<float* const> pages, int64_t position, int64_t head) {
    const int64_t width = a.kv_heads * a.head_dim;
    return pages[position / a.kv.page_tokens] + position % a.kv.page_tokens * width +
           head * a.head_dim;
  };
  for (int64_t t = 0; t < a.q.rows; ++t) {
    const int64_t visible = a.start + t + 1;
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t g = h / (a.heads / a.kv_heads);
      const float* q = a.q.row(t) + h * a.head_dim;
      std::vector<double> weights(visible);
      for (int64_t p = 0; p < visible; ++p) {
        double dot = 0;
        for (int64_t i = 0; i < a.head_dim; ++i) {
          dot += static_cast<double>(q[i]) * row(a.kv.key_pages, p, g)[i];
        }
        weights[p] = dot * a.scale;
      }
      const double max = *std::max_element(weights.begin(), weights.end());
      double total = 0;
      for (double& w : weights) total += w = std::exp(w - max);
      for (int64_t i = 0; i < a.head_dim; ++i) {
        double sum = 0;
        for (int64_t p = 0; p < visible; ++p) {
          sum += weights[p] * row(a.kv.value_pages, p, g)[i];
        }
        a.out.row(t)[h * a.head_dim + i] = static_cast<float>(sum / total);
      }
    }
  }
}

}  // namespace stockpot
