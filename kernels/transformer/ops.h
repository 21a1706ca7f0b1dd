// The other operations of a decoder layer, on float32 activations: what the engine needs beside
// bitdelta_linear. All of them are batch-invariant in the sense of bitdelta/linear.h: a row's bits
// depend on that row's inputs alone.
//
// Shapes: T rows (tokens), H query heads, G key/value heads (H % G == 0), D elements a head.
// Thread promise: reentrant; the arguments are borrowed for the call.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/base/status.h"
#include "kernels/base/threads.h"
#include "kernels/base/view.h"

namespace stockpot {

// y[t] = x[t] / sqrt(mean(x[t]^2) + epsilon) * weight[t's row of the table]
// (Zhang & Sennrich, arXiv 1910.07467; HF LlamaRMSNorm).
// weights: one pointer [cols] per row of x, so that variants with their own norms mix in a batch.
void RmsNorm(ConstFloatMatrix x, std::span<const float* const> weight_of_row, float epsilon,
             FloatMatrix y);

// In place, half-split layout (HF): for i < D/2, (x[i], x[i + D/2]) rotated by position * freq[i].
// qk: [T, heads * D]; positions: [T]; inv_freq: [D / 2].
void Rope(FloatMatrix qk, int64_t heads, int64_t head_dim, std::span<const int64_t> positions,
          std::span<const float> inv_freq);

// y = silu(gate) * up, elementwise; all [T, cols]. y may be gate.
void SiluMul(ConstFloatMatrix gate, ConstFloatMatrix up, FloatMatrix y);

// One sequence's keys and values of one layer, in pages of `page_tokens` tokens:
// page p holds [page_tokens, G * D] floats, token i is row i % page_tokens of page i / page_tokens.
struct PagedKv {
  std::span<float* const> key_pages;
  std::span<float* const> value_pages;
  int64_t page_tokens = 0;
};

// Causal attention of T new tokens of one sequence over its cache, which already holds their keys and
// values: q row t stands at position `start + t` and sees positions 0 .. start + t.
// out[t, h] = softmax(q[t, h] . k[:, g(h)] * scale) v[:, g(h)],  g(h) = h / (H / G). All sums in fp32,
// in an order that depends on the position alone.
inline constexpr int64_t kMaxHeadDim = 256;  // elements; the caller refuses models with larger heads

struct AttentionArgs {
  ConstFloatMatrix q;  // [T, H * D]
  PagedKv kv;
  int64_t start = 0;   // position of q's first row
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  float scale = 1.0f;
  FloatMatrix out;     // [T, H * D]
};
// Several sequences at once, spread over the pool.
void Attention(std::span<const AttentionArgs> sequences, ThreadPool& threads);
void AttentionReference(const AttentionArgs& sequence);  // double precision, loops

// log softmax of one row of logits [vocab] at `token`, max-shifted, summed in float64.
// Writes the `top.size()` best (token, logprob) pairs, best first, ties by lower token id.
struct TokenLogprob {
  int32_t token = -1;
  float logprob = 0;
};
float LogSoftmaxAt(std::span<const float> logits, int32_t token, std::span<TokenLogprob> top);

}  // namespace stockpot
