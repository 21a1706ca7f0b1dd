// RmsNorm, Rope, SiluMul, Attention and LogSoftmaxAt on the CPU (ops.h holds the formulas).
//
// Attention: one task is a sequence, a query head and a tile of query rows. Keys are taken in
// blocks of 32 positions, counted from position 0, with the running maximum and sum of the online
// softmax (Milakov & Gimelshein, arXiv 1805.02867), so memory does not grow with the context and a
// row's arithmetic depends on its position alone. Scores come four keys at a time: four
// accumulators fold into one register.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/transformer/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/transformer/ops_cpu.cc"
// foreach_target.h must come first, highway.h before math-inl.h.
// clang-format off
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include "kernels/bitdelta/linear_base-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stockpot {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kKeyBlock = 32;      // positions a step of the online softmax
constexpr float kLargestExp = 88.0f;   // e^88 is finite in float32
constexpr float kExpIsZero = -200.0f;  // Exp gives exactly 0 here, and is defined

void RmsNormRow(const float* x, const float* weight, float epsilon, int64_t cols, float* y) {
  const FloatTag f;
  FloatVec sum = hn::Zero(f);
  int64_t c = 0;
  for (; c + kFloatLanes <= cols; c += kFloatLanes) {
    const FloatVec v = hn::LoadU(f, x + c);
    sum = hn::MulAdd(v, v, sum);
  }
  float squares = hn::GetLane(FoldFour(sum, sum, sum, sum));
  for (; c < cols; ++c) squares += x[c] * x[c];
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(cols) + epsilon);
  const FloatVec scales = hn::Set(f, scale);
  for (c = 0; c + kFloatLanes <= cols; c += kFloatLanes) {
    const FloatVec v = hn::Mul(hn::LoadU(f, x + c), scales);
    hn::StoreU(hn::Mul(v, hn::LoadU(f, weight + c)), f, y + c);
  }
  for (; c < cols; ++c) y[c] = x[c] * scale * weight[c];
}

HWY_INLINE FloatVec Silu(FloatVec gate) {
  const FloatTag f;
  const FloatVec one = hn::Set(f, 1.0f);
  const FloatVec power = hn::Min(hn::Neg(gate), hn::Set(f, kLargestExp));
  return hn::Div(gate, hn::Add(one, hn::Exp(f, power)));
}

void SiluMulRow(const float* gate, const float* up, int64_t cols, float* y) {
  const FloatTag f;
  int64_t c = 0;
  for (; c + kFloatLanes <= cols; c += kFloatLanes) {
    hn::StoreU(hn::Mul(Silu(hn::LoadU(f, gate + c)), hn::LoadU(f, up + c)), f, y + c);
  }
  if (c == cols) return;
  HWY_ALIGN float gate_tail[kFloatLanes] = {};
  HWY_ALIGN float y_tail[kFloatLanes];
  std::copy(gate + c, gate + cols, gate_tail);
  hn::Store(Silu(hn::Load(f, gate_tail)), f, y_tail);
  for (int64_t i = 0; c + i < cols; ++i) y[c + i] = y_tail[i] * up[c + i];
}

// The state of one query row of one head.
struct RunningRow {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0;
};

// scores[j] = q . key row j * scale, for `count` keys of one page.
void Scores(const float* q, const float* keys, int64_t key_stride, int64_t count, int64_t head_dim,
            float scale, float* scores) {
  const FloatTag f;
  const hn::FixedTag<float, 4> four;
  for (int64_t j = 0; j < count; j += 4) {
    const float* k[4];
    for (int64_t i = 0; i < 4; ++i) k[i] = keys + std::min(j + i, count - 1) * key_stride;
    FloatVec sums[4] = {hn::Zero(f), hn::Zero(f), hn::Zero(f), hn::Zero(f)};
    int64_t c = 0;
    for (; c + kFloatLanes <= head_dim; c += kFloatLanes) {
      const FloatVec qs = hn::LoadU(f, q + c);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[i] = hn::MulAdd(qs, hn::LoadU(f, k[i] + c), sums[i]);
    }
    HWY_ALIGN float folded[4];
    hn::Store(FoldFour(sums[0], sums[1], sums[2], sums[3]), four, folded);
    for (int64_t i = 0; i < 4 && j + i < count; ++i) {
      float dot = folded[i];
      for (int64_t e = c; e < head_dim; ++e) dot += q[e] * k[i][e];
      scores[j + i] = dot * scale;
    }
  }
}

// out = out * keep + sum over `count` values weighted by p.
void AddValues(const float* p, const float* values, int64_t value_stride, int64_t count,
               int64_t head_dim, float keep, float* out) {
  const FloatTag f;
  int64_t c = 0;
  const auto columns = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    for (; c + kVectors * kFloatLanes <= head_dim; c += kVectors * kFloatLanes) {
      FloatVec sums[kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        sums[i] = hn::Mul(hn::LoadU(f, out + c + i * kFloatLanes), hn::Set(f, keep));
      }
      for (int64_t j = 0; j < count; ++j) {
        const FloatVec weight = hn::Set(f, p[j]);
        const float* value = values + j * value_stride + c;
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          sums[i] = hn::MulAdd(weight, hn::LoadU(f, value + i * kFloatLanes), sums[i]);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) hn::StoreU(sums[i], f, out + c + i * kFloatLanes);
    }
  };
  columns(std::integral_constant<int, 4>());
  columns(std::integral_constant<int, 1>());
  for (; c < head_dim; ++c) {
    float sum = out[c] * keep;
    for (int64_t j = 0; j < count; ++j) sum += p[j] * values[j * value_stride + c];
    out[c] = sum;
  }
}

// Turns scores into weights exp(score - max), updates the running sums; returns what the earlier
// output is multiplied with.
float Soften(float* scores, int64_t count, RunningRow* running) {
  const FloatTag f;
  float max = running->max;
  for (int64_t j = 0; j < count; ++j) max = std::max(max, scores[j]);
  const float keep = std::exp(running->max - max);  // 0 for the first block
  // Lanes past `count` hold -inf and become 0.
  std::fill(scores + count, scores + kKeyBlock, -std::numeric_limits<float>::infinity());
  FloatVec sum = hn::Zero(f);
  for (int64_t j = 0; j < kKeyBlock; j += kFloatLanes) {
    const FloatVec shifted = hn::Sub(hn::Load(f, scores + j), hn::Set(f, max));
    const FloatVec p = hn::Exp(f, hn::Max(shifted, hn::Set(f, kExpIsZero)));
    hn::Store(p, f, scores + j);
    sum = hn::Add(sum, p);
  }
  running->sum = running->sum * keep + hn::GetLane(FoldFour(sum, sum, sum, sum));
  running->max = max;
  return keep;
}

// Query rows [begin, end) of one head of one sequence.
void AttentionHead(const AttentionArgs& a, int64_t head, int64_t begin, int64_t end) {
  const int64_t width = a.kv_heads * a.head_dim;
  const int64_t kv_column = head / (a.heads / a.kv_heads) * a.head_dim;
  const int64_t page_tokens = a.kv.page_tokens;
  HWY_ALIGN float scores[kKeyBlock];
  for (int64_t t = begin; t < end; ++t) {
    const float* q = a.q.row(t) + head * a.head_dim;
    float* out = a.out.row(t) + head * a.head_dim;
    const int64_t visible = a.start + t + 1;
    RunningRow running;
    HWY_ALIGN float sums[kMaxHeadDim] = {};
    for (int64_t block = 0; block < visible; block += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, visible - block);
      for (int64_t j = 0; j < count;) {  // a block may span pages
        const int64_t offset = (block + j) % page_tokens;
        const int64_t here = std::min(count - j, page_tokens - offset);
        const float* keys = a.kv.key_pages[(block + j) / page_tokens] + offset * width + kv_column;
        Scores(q, keys, width, here, a.head_dim, a.scale, scores + j);
        j += here;
      }
      float keep = Soften(scores, count, &running);  // scores are weights from here on
      for (int64_t j = 0; j < count;) {
        const int64_t offset = (block + j) % page_tokens;
        const int64_t here = std::min(count - j, page_tokens - offset);
        const float* values =
            a.kv.value_pages[(block + j) / page_tokens] + offset * width + kv_column;
        AddValues(scores + j, values, width, here, a.head_dim, keep, sums);
        keep = 1.0f;
        j += here;
      }
    }
    const float scale = 1.0f / running.sum;
    for (int64_t i = 0; i < a.head_dim; ++i) out[i] = sums[i] * scale;
  }
}

// sum exp(logits - max) in float64.
double SumExp(const float* logits, int64_t count, float max) {
  const FloatTag f;
  const hn::ScalableTag<double> d;
  const hn::Half<FloatTag> half;
  auto low = hn::Zero(d);
  auto high = hn::Zero(d);
  int64_t i = 0;
  const FloatVec shift = hn::Set(f, max);
  for (; i + kFloatLanes <= count; i += kFloatLanes) {
    const FloatVec e =
        hn::Exp(f, hn::Max(hn::Sub(hn::LoadU(f, logits + i), shift), hn::Set(f, kExpIsZero)));
    low = hn::Add(low, hn::PromoteTo(d, hn::LowerHalf(half, e)));
    high = hn::Add(high, hn::PromoteTo(d, hn::UpperHalf(half, e)));
  }
  double sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(low, high)));
  for (; i < count; ++i) sum += std::exp(static_cast<double>(logits[i]) - max);
  return sum;
}

float MaxOf(const float* values, int64_t count) {
  const FloatTag f;
  FloatVec max = hn::Set(f, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kFloatLanes <= count; i += kFloatLanes) max = hn::Max(max, hn::LoadU(f, values + i));
  float result = hn::GetLane(hn::MaxOfLanes(f, max));
  for (; i < count; ++i) result = std::max(result, values[i]);
  return result;
}

}  // namespace HWY_NAMESPACE
}  // namespace stockpot
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stockpot {
namespace {

HWY_EXPORT(RmsNormRow);
HWY_EXPORT(SiluMulRow);
HWY_EXPORT(AttentionHead);
HWY_EXPORT(SumExp);
HWY_EXPORT(MaxOf);

constexpr int64_t kQueryTile = 16;  // query rows of one task

// Better first: higher log probability, then the lower token id.
bool IsBetter(const TokenLogprob& a, const TokenLogprob& b) {
  return a.logprob != b.logprob ? a.logprob > b.logprob : a.token < b.token;
}

}  // namespace

void RmsNorm(ConstFloatMatrix x, std::span<const float* const> weight_of_row, float epsilon,
             FloatMatrix y) {
  STOCKPOT_CHECK(static_cast<int64_t>(weight_of_row.size()) == x.rows, weight_of_row.size(),
                 x.rows);
  STOCKPOT_CHECK(y.rows == x.rows && y.cols == x.cols, y.rows, y.cols);
  for (int64_t t = 0; t < x.rows; ++t) {
    HWY_DYNAMIC_DISPATCH(RmsNormRow)(x.row(t), weight_of_row[t], epsilon, x.cols, y.row(t));
  }
}

void Rope(FloatMatrix qk, int64_t heads, int64_t head_dim, std::span<const int64_t> positions,
          std::span<const float> inv_freq) {
  const int64_t half = head_dim / 2;
  STOCKPOT_CHECK(qk.cols == heads * head_dim, qk.cols, heads, head_dim);
  STOCKPOT_CHECK(static_cast<int64_t>(positions.size()) == qk.rows, positions.size(), qk.rows);
  STOCKPOT_CHECK(static_cast<int64_t>(inv_freq.size()) == half, inv_freq.size(), half);
  for (int64_t t = 0; t < qk.rows; ++t) {
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(positions[t]) * inv_freq[i];
      const float cosine = std::cos(angle);
      const float sine = std::sin(angle);
      for (int64_t h = 0; h < heads; ++h) {
        float* x = qk.row(t) + h * head_dim;
        const float low = x[i];
        const float high = x[i + half];
        x[i] = low * cosine - high * sine;
        x[i + half] = high * cosine + low * sine;
      }
    }
  }
}

void SiluMul(ConstFloatMatrix gate, ConstFloatMatrix up, FloatMatrix y) {
  STOCKPOT_CHECK(gate.rows == up.rows && gate.cols == up.cols, up.rows, up.cols);
  STOCKPOT_CHECK(gate.rows == y.rows && gate.cols == y.cols, y.rows, y.cols);
  for (int64_t t = 0; t < gate.rows; ++t) {
    HWY_DYNAMIC_DISPATCH(SiluMulRow)(gate.row(t), up.row(t), gate.cols, y.row(t));
  }
}

void Attention(std::span<const AttentionArgs> sequences, ThreadPool& threads) {
  int64_t tasks = 0;
  for (const AttentionArgs& a : sequences) {
    STOCKPOT_CHECK(a.kv_heads > 0 && a.heads % a.kv_heads == 0, a.heads, a.kv_heads);
    STOCKPOT_CHECK(a.head_dim <= kMaxHeadDim, a.head_dim, kMaxHeadDim);
    STOCKPOT_CHECK(a.q.cols == a.heads * a.head_dim && a.out.cols == a.q.cols, a.q.cols,
                   a.out.cols);
    STOCKPOT_CHECK(a.out.rows == a.q.rows, a.out.rows, a.q.rows);
    tasks += a.heads * ((a.q.rows + kQueryTile - 1) / kQueryTile);
  }
  threads.ParallelFor(tasks, 1, [&sequences](int64_t begin, int64_t end) {
    int64_t first = 0;  // task of the sequence's first tile
    for (const AttentionArgs& a : sequences) {
      const int64_t tiles = (a.q.rows + kQueryTile - 1) / kQueryTile;
      const int64_t last = first + a.heads * tiles;
      for (int64_t task = std::max(begin, first); task < std::min(end, last); ++task) {
        const int64_t row = (task - first) % tiles * kQueryTile;
        HWY_DYNAMIC_DISPATCH(AttentionHead)
        (a, (task - first) / tiles, row, std::min(row + kQueryTile, a.q.rows));
      }
      first = last;
    }
  });
}

float LogSoftmaxAt(std::span<const float> logits, int32_t token, std::span<TokenLogprob> top) {
  const int64_t count = static_cast<int64_t>(logits.size());
  STOCKPOT_CHECK(token >= 0 && token < count, token, count);
  const float max = HWY_DYNAMIC_DISPATCH(MaxOf)(logits.data(), count);
  const double log_sum = std::log(HWY_DYNAMIC_DISPATCH(SumExp)(logits.data(), count, max));
  const auto logprob = [&](int64_t i) {
    return static_cast<float>(static_cast<double>(logits[i]) - max - log_sum);
  };
  std::fill(top.begin(), top.end(), TokenLogprob{-1, -std::numeric_limits<float>::infinity()});
  if (!top.empty()) {
    size_t filled = 0;
    for (int64_t i = 0; i < count; ++i) {
      // Cheap refusal first: nearly every token loses against the worst kept one.
      if (filled == top.size() && logits[i] < logits[top.back().token]) continue;
      const TokenLogprob candidate{static_cast<int32_t>(i), logprob(i)};
      if (filled == top.size() && !IsBetter(candidate, top.back())) continue;
      size_t at = filled < top.size() ? filled++ : top.size() - 1;
      for (; at > 0 && IsBetter(candidate, top[at - 1]); --at) top[at] = top[at - 1];
      top[at] = candidate;
    }
  }
  return logprob(token);
}

}  // namespace stockpot
#endif  // HWY_ONCE
