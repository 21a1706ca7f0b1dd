#include "serve/model/transformer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/check.h"
#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/sign_row.h"
#include "kernels/lora/lora_linear.h"
#include "kernels/sparse/sparse_delta.h"
#include "kernels/transformer/ops.h"
#include "serve/model/weights_internal.h"

namespace stockpot {
namespace {

// Rows of the vocabulary projection at once: bounds its memory to this x vocabulary x 4 bytes.
constexpr int64_t kHeadRows = 64;
// Elements of a row-wise operation that are worth a second thread.
constexpr int64_t kRowGrainElements = 16 * 1024;
// Projections of one input that are computed in one call: query, key and value.
constexpr size_t kMaxShared = 3;

// Rows [begin, end) of the batch that share what does not go through a table: RoPE and epsilon.
struct RowRun {
  int64_t begin = 0;
  int64_t end = 0;
  const DecoderView* view = nullptr;
};

// A row that wants logits.
struct WantedRow {
  int64_t segment = 0;
  int64_t row_in_segment = 0;
  int64_t row = 0;  // of the batch
};

ConstFloatMatrix Const(const FloatMatrix& m) {
  return {.data = m.data, .rows = m.rows, .cols = m.cols, .stride = m.stride};
}

FloatMatrix Columns(const FloatMatrix& m, int64_t first, int64_t count) {
  return {.data = m.data + first, .rows = m.rows, .cols = count, .stride = m.stride};
}

FloatMatrix Rows(const FloatMatrix& m, int64_t begin, int64_t end) {
  return {.data = m.row(begin), .rows = end - begin, .cols = m.cols, .stride = m.stride};
}

template <typename Delta>
bool AnySet(const std::vector<const Delta*>& table) {
  return std::any_of(table.begin(), table.end(), [](const Delta* d) { return d != nullptr; });
}

void EmbedRow(const DecoderView& view, int32_t token, float* out) {
  const WeightMatrix& embeddings = view.embeddings;
  const void* row = embeddings.row(token);
  switch (embeddings.dtype) {
    case DType::kBF16:
      for (int64_t i = 0; i < embeddings.cols; ++i) {
        out[i] = FloatFromBF16(static_cast<const uint16_t*>(row)[i]);
      }
      break;
    case DType::kF16:
      for (int64_t i = 0; i < embeddings.cols; ++i) {
        out[i] = FloatFromF16(static_cast<const uint16_t*>(row)[i]);
      }
      break;
    default:
      std::memcpy(out, row, static_cast<size_t>(embeddings.cols) * sizeof(float));
  }
  if (view.embedding_signs == nullptr) return;
  AddSignRow(*view.embedding_signs, token, {out, static_cast<size_t>(embeddings.cols)});
}

}  // namespace

struct Transformer::State {
  State(std::shared_ptr<const BaseModel> model, ThreadPool& pool)
      : base(std::move(model)), weights(base->tensors()), config(base->config()), threads(pool) {}

  // --- constant ---
  std::shared_ptr<const BaseModel> base;
  const BaseModel::Tensors& weights;
  const ModelConfig& config;
  ThreadPool& threads;

  // --- the batch of the running call; kept for its memory ---
  std::span<const BatchSegment> segments;
  const LinearObserver* observer = nullptr;
  int64_t rows = 0;
  std::vector<const VariantModel*> variants;  // distinct ones
  std::vector<const DecoderView*> views;      // [variants]
  std::vector<int32_t> variant_of_row;        // [rows]; -1: base
  std::vector<DeltaSum> sum_of_row;           // [rows]
  std::vector<const DecoderView*> view_of_row;
  std::vector<int64_t> positions;  // [rows]
  std::vector<RowRun> runs;
  std::vector<WantedRow> wanted;
  std::vector<AttentionArgs> attention;
  // [projections of one input][variants]: the deltas of the running call.
  std::array<std::vector<LayerDelta>, kMaxShared> tables;
  std::array<std::vector<const SparseDelta*>, kMaxShared> sparse;
  std::array<std::vector<const LoraDelta*>, kMaxShared> loras;
  std::vector<const float*> norms;  // [rows], of the current norm

  // --- activations ---
  LinearScratch scratch;
  SparseScratch sparse_scratch;
  LoraScratch lora_scratch;
  AlignedBuffer<float> memory;
  AlignedBuffer<float> logits_memory;
  FloatMatrix hidden;  // [rows, hidden]: the residual stream
  FloatMatrix update;  // [rows, hidden]: what the next norm adds to it first
  FloatMatrix normed;  // [rows, hidden]
  FloatMatrix qkv;     // [rows, (heads + 2 kv_heads) * head_dim]
  FloatMatrix mixed;   // [rows, heads * head_dim]: attention's output
  FloatMatrix gate;    // [rows, intermediate]
  FloatMatrix up;      // [rows, intermediate]

  Status Plan(std::span<const BatchSegment> batch);
  Status CheckSegment(const BatchSegment& segment, const DecoderView& view, size_t index) const;
  int32_t IndexOf(const VariantModel* variant);
  void LayOut();
  void Embed();
  void Layer(size_t layer);
  void Attend(size_t layer);
  void Deliver(const LogitsSink& sink);

  template <typename Body>
  void ForRows(int64_t cols, const Body& body);
  void AddUpdateAndNorm(const float* DecoderLayerView::*norm, size_t layer);
  void Linear(ConstFloatMatrix x, std::span<LinearOutput> outputs,
              std::span<const int32_t> variant_rows, std::span<const DeltaSum> sum_rows);
  template <typename GetView>
  void FillTables(size_t i, const GetView& get);
  void Project(size_t layer, const FloatMatrix& x,
               std::initializer_list<std::pair<Projection, FloatMatrix>> projections);
};

// Calls body(begin, end) over ranges of rows, on several threads where there is enough work.
// std::function keeps a reference_wrapper without allocating.
template <typename Body>
void Transformer::State::ForRows(int64_t cols, const Body& body) {
  threads.ParallelFor(rows, std::max<int64_t>(1, kRowGrainElements / cols), std::ref(body));
}

int32_t Transformer::State::IndexOf(const VariantModel* variant) {
  if (variant == nullptr) return -1;
  for (size_t i = 0; i < variants.size(); ++i) {
    if (variants[i] == variant) return static_cast<int32_t>(i);
  }
  STOCKPOT_CHECK(&variant->base() == base.get(), variant->digest().ShortHex(),
                 base->digest().ShortHex());
  variants.push_back(variant);
  views.push_back(&variant->tensors().view);
  return static_cast<int32_t>(variants.size()) - 1;
}

Status Transformer::State::CheckSegment(const BatchSegment& segment, const DecoderView& view,
                                        size_t index) const {
  const int64_t count = static_cast<int64_t>(segment.tokens.size());
  STOCKPOT_CHECK(segment.kv != nullptr && segment.logits_from >= 0, index, segment.logits_from);
  const int64_t end = segment.kv->length() + count;
  STOCKPOT_CHECK(end <= segment.kv->capacity(), index, end, segment.kv->capacity());
  if (end > view.max_positions) {
    return InvalidArgument("segment " + std::to_string(index) + " reaches position " +
                           std::to_string(end) + ", the model has " +
                           std::to_string(view.max_positions));
  }
  for (const int32_t token : segment.tokens) {
    if (token < 0 || token >= view.embeddings.rows) {
      return InvalidArgument("segment " + std::to_string(index) + ": token id " +
                             std::to_string(token) + " is not in 0.." +
                             std::to_string(view.embeddings.rows - 1));
    }
  }
  return OkStatus();
}

Status Transformer::State::Plan(std::span<const BatchSegment> batch) {
  segments = batch;
  variants.clear();
  views.clear();
  variant_of_row.clear();
  sum_of_row.clear();
  view_of_row.clear();
  positions.clear();
  runs.clear();
  wanted.clear();
  for (size_t s = 0; s < batch.size(); ++s) {
    const BatchSegment& segment = batch[s];
    const int32_t variant = IndexOf(segment.variant);
    const DecoderView* view = variant < 0 ? &weights.view : views[static_cast<size_t>(variant)];
    STOCKPOT_RETURN_IF_ERROR(CheckSegment(segment, *view, s));
    const int64_t first = static_cast<int64_t>(positions.size());
    const int64_t count = static_cast<int64_t>(segment.tokens.size());
    for (int64_t i = 0; i < count; ++i) positions.push_back(segment.kv->length() + i);
    variant_of_row.insert(variant_of_row.end(), segment.tokens.size(), variant);
    view_of_row.insert(view_of_row.end(), segment.tokens.size(), view);
    for (int64_t i = 0; i < count; ++i) {
      sum_of_row.push_back(i < segment.prompt_rows ? DeltaSum::kFolded : DeltaSum::kApart);
    }
    for (int64_t i = segment.logits_from; i < count; ++i) {
      wanted.push_back({static_cast<int64_t>(s), i, first + i});
    }
    if (!runs.empty() && runs.back().view == view) {
      runs.back().end = first + count;
    } else if (count > 0) {
      runs.push_back({first, first + count, view});
    }
  }
  rows = static_cast<int64_t>(positions.size());
  return OkStatus();
}

void Transformer::State::LayOut() {
  const int64_t heads_size = config.heads * config.head_dim;
  const int64_t qkv_size = heads_size + 2 * config.kv_heads * config.head_dim;
  const std::array<std::pair<FloatMatrix*, int64_t>, 7> matrices = {{
      {&hidden, config.hidden_size},
      {&update, config.hidden_size},
      {&normed, config.hidden_size},
      {&qkv, qkv_size},
      {&mixed, heads_size},
      {&gate, config.intermediate_size},
      {&up, config.intermediate_size},
  }};
  constexpr int64_t kLineFloats = static_cast<int64_t>(kCacheLineBytes / sizeof(float));
  int64_t total = 0;
  for (const auto& [matrix, cols] : matrices) {
    const int64_t stride = (cols + kLineFloats - 1) / kLineFloats * kLineFloats;
    *matrix = {.data = nullptr, .rows = rows, .cols = cols, .stride = stride};
    total += rows * stride;
  }
  float* next = memory.Reserve(total);
  for (const auto& [matrix, cols] : matrices) {
    matrix->data = next;
    next += rows * matrix->stride;
  }
  norms.resize(static_cast<size_t>(rows));
}

void Transformer::State::Embed() {
  int64_t row = 0;
  for (const BatchSegment& segment : segments) {
    for (const int32_t token : segment.tokens) {
      EmbedRow(*view_of_row[static_cast<size_t>(row)], token, hidden.row(row));
      std::fill_n(update.row(row), update.cols, 0.0f);
      ++row;
    }
  }
}

// hidden += update; normed = RmsNorm(hidden).
void Transformer::State::AddUpdateAndNorm(const float* DecoderLayerView::*norm, size_t layer) {
  for (size_t row = 0; row < norms.size(); ++row)
    norms[row] = view_of_row[row]->layers[layer].*norm;
  const auto body = [this](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* const x = hidden.row(row);
      const float* const add = update.row(row);
      for (int64_t i = 0; i < hidden.cols; ++i) x[i] += add[i];
    }
    for (const RowRun& run : runs) {
      const int64_t first = std::max(begin, run.begin);
      const int64_t last = std::min(end, run.end);
      if (first >= last) continue;
      RmsNorm(
          Const(Rows(hidden, first, last)),
          std::span(norms).subspan(static_cast<size_t>(first), static_cast<size_t>(last - first)),
          run.view->rms_epsilon, Rows(normed, first, last));
    }
  };
  ForRows(hidden.cols, body);
}

// Computes x through every weight of `outputs`; the tables hold their deltas.
void Transformer::State::Linear(ConstFloatMatrix x, std::span<LinearOutput> outputs,
                                std::span<const int32_t> variant_rows,
                                std::span<const DeltaSum> sum_rows) {
  bool base_only = true;
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i].variants = tables[i];
    for (const LayerDelta& delta : tables[i]) {
      base_only &= delta.signs == nullptr && delta.dense == nullptr && delta.bias == nullptr;
    }
  }
  const LinearArgs args{
      .x = x,
      .outputs = outputs,
      .variant_of_row = base_only ? std::span<const int32_t>() : variant_rows,
      .sum_of_row = sum_rows,
  };
  // Shapes were checked when the models were loaded.
  const Status status = BitDeltaLinearCpu(args, scratch, threads);
  STOCKPOT_CHECK(status.ok(), status.ToString());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const FloatMatrix& y = outputs[i].y;
    if (AnySet(sparse[i])) {
      const Status added = SparseDeltaLinearCpu(
          {.x = x, .deltas = sparse[i], .delta_of_row = variant_rows, .y = y}, sparse_scratch,
          threads);
      STOCKPOT_CHECK(added.ok(), added.ToString());
    }
    if (AnySet(loras[i])) {
      const Status added = LoraLinearCpu(
          {.x = x, .deltas = loras[i], .delta_of_row = variant_rows, .y = y}, lora_scratch, threads);
      STOCKPOT_CHECK(added.ok(), added.ToString());
    }
  }
}

// Fills the tables of output `i` with what every variant of the batch has there.
template <typename GetView>
void Transformer::State::FillTables(size_t i, const GetView& get) {
  tables[i].clear();
  sparse[i].clear();
  loras[i].clear();
  for (const DecoderView* view : views) {
    const LinearView& linear = get(*view);
    tables[i].push_back(linear.delta);
    sparse[i].push_back(linear.sparse);
    loras[i].push_back(linear.lora);
  }
}

// The projections of one input in one call.
void Transformer::State::Project(
    size_t layer, const FloatMatrix& x,
    std::initializer_list<std::pair<Projection, FloatMatrix>> projections) {
  std::array<LinearOutput, kMaxShared> outputs;
  size_t count = 0;
  for (const auto& [projection, y] : projections) {
    if (observer != nullptr) (*observer)(static_cast<int64_t>(layer), projection, Const(x));
    const size_t p = static_cast<size_t>(projection);
    outputs[count] = {.base = weights.layers[layer].weight[p],
                      .bias = weights.layers[layer].bias[p],
                      .variants = {},
                      .y = y};
    FillTables(count, [&](const DecoderView& view) -> const LinearView& {
      return view.layers[layer].linear[p];
    });
    ++count;
  }
  Linear(Const(x), std::span(outputs).first(count), variant_of_row, sum_of_row);
}

// Rotates queries and keys, stores keys and values, and attends.
void Transformer::State::Attend(size_t layer) {
  const int64_t q_size = config.heads * config.head_dim;
  const int64_t kv_size = config.kv_heads * config.head_dim;
  const FloatMatrix queries_and_keys = Columns(qkv, 0, q_size + kv_size);
  const auto rotate = [&](int64_t begin, int64_t end) {
    for (const RowRun& run : runs) {
      const int64_t first = std::max(begin, run.begin);
      const int64_t last = std::min(end, run.end);
      if (first >= last) continue;
      Rope(Rows(queries_and_keys, first, last), config.heads + config.kv_heads, config.head_dim,
           std::span(positions).subspan(static_cast<size_t>(first),
                                        static_cast<size_t>(last - first)),
           run.view->inv_freq);
    }
  };
  ForRows(queries_and_keys.cols, rotate);

  attention.clear();
  const int64_t index = static_cast<int64_t>(layer);
  const size_t kv_bytes = static_cast<size_t>(kv_size) * sizeof(float);
  int64_t row = 0;
  for (const BatchSegment& segment : segments) {
    const int64_t count = static_cast<int64_t>(segment.tokens.size());
    if (count == 0) continue;
    const int64_t start = segment.kv->length();
    for (int64_t i = 0; i < count; ++i) {
      const float* const key = qkv.row(row + i) + q_size;
      std::memcpy(segment.kv->KeyRow(index, start + i), key, kv_bytes);
      std::memcpy(segment.kv->ValueRow(index, start + i), key + kv_size, kv_bytes);
    }
    attention.push_back({
        .q = Const(Rows(Columns(qkv, 0, q_size), row, row + count)),
        .kv = segment.kv->Layer(index),
        .start = start,
        .heads = config.heads,
        .kv_heads = config.kv_heads,
        .head_dim = config.head_dim,
        .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim))),
        .out = Rows(mixed, row, row + count),
    });
    row += count;
  }
  Attention(attention, threads);
}

void Transformer::State::Layer(size_t layer) {
  const int64_t q_size = config.heads * config.head_dim;
  const int64_t kv_size = config.kv_heads * config.head_dim;
  AddUpdateAndNorm(&DecoderLayerView::input_norm, layer);
  Project(layer, normed,
          {{Projection::kQuery, Columns(qkv, 0, q_size)},
           {Projection::kKey, Columns(qkv, q_size, kv_size)},
           {Projection::kValue, Columns(qkv, q_size + kv_size, kv_size)}});
  Attend(layer);
  Project(layer, mixed, {{Projection::kOutput, update}});

  AddUpdateAndNorm(&DecoderLayerView::post_norm, layer);
  Project(layer, normed, {{Projection::kGate, gate}, {Projection::kUp, up}});
  const auto activate = [this](int64_t begin, int64_t end) {
    SiluMul(Const(Rows(gate, begin, end)), Const(Rows(up, begin, end)), Rows(gate, begin, end));
  };
  ForRows(gate.cols, activate);
  Project(layer, gate, {{Projection::kDown, update}});
}

// Final norm and vocabulary projection of the wanted rows, block by block.
void Transformer::State::Deliver(const LogitsSink& sink) {
  const size_t block = static_cast<size_t>(kHeadRows);
  FillTables(0, [](const DecoderView& view) -> const LinearView& { return view.head; });
  const auto own_head = [this](const WantedRow& row) {
    return view_of_row[static_cast<size_t>(row.row)]->own_head;
  };
  size_t end = 0;
  for (size_t begin = 0; begin < wanted.size(); begin = end) {
    // A block is over one head: the base's, or that of a variant with a vocabulary of its own.
    const WeightMatrix* const own = own_head(wanted[begin]);
    end = begin + 1;
    while (end < wanted.size() && end - begin < block && own_head(wanted[end]) == own) ++end;
    const std::span<const WantedRow> some = std::span(wanted).subspan(begin, end - begin);
    const int64_t count = static_cast<int64_t>(some.size());
    // `normed` is free again, and holds at least as many rows as want logits.
    std::array<int32_t, kHeadRows> variant_rows;
    std::array<DeltaSum, kHeadRows> sum_rows;
    for (int64_t i = 0; i < count; ++i) {
      const size_t row = static_cast<size_t>(some[static_cast<size_t>(i)].row);
      float* const x = hidden.row(static_cast<int64_t>(row));
      const float* const add = update.row(static_cast<int64_t>(row));
      for (int64_t c = 0; c < hidden.cols; ++c) x[c] += add[c];
      const DecoderView& view = *view_of_row[row];
      variant_rows[static_cast<size_t>(i)] = variant_of_row[row];
      sum_rows[static_cast<size_t>(i)] = sum_of_row[row];
      RmsNorm(Const(Rows(hidden, static_cast<int64_t>(row), static_cast<int64_t>(row) + 1)),
              std::span(&view.final_norm, 1), view.rms_epsilon, Rows(normed, i, i + 1));
    }
    const WeightMatrix& head = own != nullptr ? *own : weights.head;
    const FloatMatrix logits{.data = logits_memory.Reserve(count * head.rows),
                             .rows = count,
                             .cols = head.rows,
                             .stride = head.rows};
    LinearOutput output{.base = head, .variants = {}, .y = logits};
    const ConstFloatMatrix x = Const(Rows(normed, 0, count));
    const auto sums = std::span<const DeltaSum>(sum_rows).first(some.size());
    if (own == nullptr) {
      Linear(x, {&output, 1}, std::span<const int32_t>(variant_rows).first(some.size()), sums);
    } else {
      const Status status = BitDeltaLinearCpu(
          {.x = x, .outputs = {&output, 1}, .variant_of_row = {}, .sum_of_row = sums}, scratch,
          threads);
      STOCKPOT_CHECK(status.ok(), status.ToString());
    }
    for (int64_t i = 0; i < count; ++i) {
      const WantedRow& row = some[static_cast<size_t>(i)];
      sink(row.segment, row.row_in_segment, {logits.row(i), static_cast<size_t>(head.rows)});
    }
  }
}

Transformer::Transformer(std::shared_ptr<const BaseModel> base, ThreadPool& threads)
    : state_(std::make_unique<State>(std::move(base), threads)) {}
Transformer::~Transformer() = default;

Status Transformer::Forward(std::span<const BatchSegment> segments, const LogitsSink& sink,
                            const LinearObserver* observer) {
  State& s = *state_;
  s.observer = observer;
  STOCKPOT_RETURN_IF_ERROR(s.Plan(segments));
  if (s.rows == 0) return OkStatus();
  s.LayOut();
  s.Embed();
  for (size_t layer = 0; layer < s.weights.layers.size(); ++layer) s.Layer(layer);
  for (const BatchSegment& segment : segments) {
    segment.kv->Advance(static_cast<int64_t>(segment.tokens.size()));
  }
  s.Deliver(sink);
  return OkStatus();
}

}  // namespace stockpot
