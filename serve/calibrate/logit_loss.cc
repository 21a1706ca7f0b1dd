#include "serve/calibrate/logit_loss.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/check.h"
#include "kernels/bitdelta/sign_row.h"
#include "kernels/bitdelta/unpack_signs.h"

namespace stockpot {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr int64_t kBlockRows = 512;  // rows of a weight that exist in float32 at a time

// One linear layer: y = x W^T + bias.
struct Linear {
  const WeightMatrix* base = nullptr;
  const LinearView* layer = nullptr;
  const float* bias = nullptr;
  const LayerScales* scales = nullptr;  // in place of the layer's own; null: those
  LayerScales* gradient = nullptr;      // out, of the scales; null: not wanted
  AlignedBuffer<float>* memory = nullptr;
  ThreadPool* threads = nullptr;

  at::Tensor Rows(int64_t first, int64_t rows) const {
    static const LayerScales kOwn;
    float* const out = memory->Reserve(rows * base->cols);
    FillWeightRows(*base, *layer, scales == nullptr ? kOwn : *scales, first, rows, out, *threads);
    return at::from_blob(out, {rows, base->cols});
  }

  at::Tensor Forward(const at::Tensor& x) const {
    at::Tensor y = at::empty({x.size(0), base->rows}, x.options());
    for (int64_t first = 0; first < base->rows; first += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, base->rows - first);
      y.narrow(1, first, rows).copy_(at::mm(x, Rows(first, rows).t()));
    }
    if (bias != nullptr) y.add_(at::from_blob(const_cast<float*>(bias), {base->rows}));
    return y;
  }

  at::Tensor Backward(const at::Tensor& grad, const at::Tensor& x) const {
    at::Tensor grad_x = at::zeros_like(x);
    for (int64_t first = 0; first < base->rows; first += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, base->rows - first);
      const at::Tensor part = grad.narrow(1, first, rows).contiguous();
      grad_x.addmm_(part, Rows(first, rows));
      if (gradient == nullptr) continue;
      const at::Tensor products = at::mm(part.t(), x).contiguous();
      const PackedSigns& signs = *layer->delta.signs;
      for (int64_t plane = 0; plane < signs.planes(); ++plane) {
        SignedRowSums(signs, plane, first, rows, products.const_data_ptr<float>(),
                      (*gradient)[static_cast<size_t>(plane)].data() + first, *threads);
      }
    }
    return grad_x;
  }
};

// `linear`: the address of a Linear that outlives the backward pass.
class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t linear) {
    context->save_for_backward({x});
    context->saved_data["linear"] = linear;
    return reinterpret_cast<const Linear*>(linear)->Forward(x);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto* linear = reinterpret_cast<const Linear*>(context->saved_data["linear"].toInt());
    const at::NoGradGuard no_grad;
    return {linear->Backward(grads[0].contiguous(), context->get_saved_variables()[0]), Variable()};
  }
};

at::Tensor Apply(const Linear& linear, const at::Tensor& x) {
  return LinearFunction::apply(x.contiguous(), reinterpret_cast<int64_t>(&linear));
}

at::Tensor RmsNorm(const at::Tensor& x, const float* weight, float epsilon) {
  const at::Tensor scale = at::rsqrt(x.square().mean(-1, /*keepdim=*/true).add(epsilon));
  return x * scale * at::from_blob(const_cast<float*>(weight), {x.size(-1)});
}

// Rotates the halves of [batch, heads, length, head_dim] (kernels/transformer/ops.h).
at::Tensor Rotated(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine) {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor low = x.narrow(-1, 0, half);
  const at::Tensor high = x.narrow(-1, half, half);
  return at::cat({low * cosine - high * sine, high * cosine + low * sine}, -1);
}

}  // namespace

struct LogitLoss::State {
  // One of the two models, with the scales of this call.
  struct Model {
    const DecoderView* view = nullptr;
    const ModelScales* scales = nullptr;
    ModelScales* gradient = nullptr;
  };

  const CalibratedModels& models;
  ThreadPool& threads;
  const ModelConfig& config;
  const BaseModel::Tensors& base;
  AlignedBuffer<float> memory;
  AlignedBuffer<float> other_memory;
  int64_t batch = 0;
  int64_t length = 0;

  Linear LinearOf(const Model& model, size_t layer, Projection projection) {
    const auto p = static_cast<size_t>(projection);
    const LinearView& view = model.view->layers[layer].linear[p];
    Linear linear{.base = &base.layers[layer].weight[p],
                  .layer = &view,
                  .bias = view.delta.bias != nullptr ? view.delta.bias : base.layers[layer].bias[p],
                  .memory = &memory,
                  .threads = &threads};
    if (view.delta.signs == nullptr || model.scales == nullptr) return linear;
    const std::string name = ProjectionName(static_cast<int64_t>(layer), projection, "weight");
    linear.scales = &model.scales->at(name);
    if (model.gradient != nullptr) linear.gradient = &model.gradient->at(name);
    return linear;
  }

  at::Tensor Embed(const Model& model, Sequences sequences) const {
    at::Tensor x = at::empty({batch * length, config.hidden_size});
    float* row = x.mutable_data_ptr<float>();
    const DecoderView& view = *model.view;
    for (const std::span<const int32_t> sequence : sequences) {
      for (const int32_t token : sequence) {
        const void* const from = view.embeddings.row(token);
        for (int64_t c = 0; c < config.hidden_size; ++c) {
          row[c] = LoadWeight(from, view.embeddings.dtype, c);
        }
        if (view.embedding_signs != nullptr) {
          AddSignRow(*view.embedding_signs, token, {row, static_cast<size_t>(config.hidden_size)});
        }
        row += config.hidden_size;
      }
    }
    return x;
  }

  at::Tensor Heads(const at::Tensor& x, int64_t heads) const {
    return x.view({batch, length, heads, config.head_dim}).transpose(1, 2);
  }

  at::Tensor Attend(const Model& model, at::Tensor q, at::Tensor k, at::Tensor v) const {
    const at::Tensor frequencies =
        at::from_blob(const_cast<float*>(model.view->inv_freq.data()), {config.head_dim / 2});
    const at::Tensor angles = at::outer(at::arange(length, frequencies.options()), frequencies);
    const at::Tensor cosine = angles.cos();
    const at::Tensor sine = angles.sin();
    q = Rotated(Heads(q, config.heads), cosine, sine);
    k = Rotated(Heads(k, config.kv_heads), cosine, sine);
    v = Heads(v, config.kv_heads);
    const int64_t shared = config.heads / config.kv_heads;
    if (shared > 1) {
      k = k.repeat_interleave(shared, 1);
      v = v.repeat_interleave(shared, 1);
    }
    const at::Tensor mixed = at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
    return mixed.transpose(1, 2).reshape({batch * length, config.heads * config.head_dim});
  }

  // `linears` live until the backward pass is done.
  using LayerLinears = std::array<Linear, kProjections>;
  LayerLinears LinearsOf(const Model& model, size_t layer) {
    LayerLinears linears;
    for (size_t p = 0; p < kProjections; ++p) {
      linears[p] = LinearOf(model, layer, static_cast<Projection>(p));
    }
    return linears;
  }

  at::Tensor Layer(const Model& model, size_t layer, const LayerLinears& linears,
                   const at::Tensor& x) const {
    const auto apply = [&](Projection projection, const at::Tensor& input) {
      return Apply(linears[static_cast<size_t>(projection)], input);
    };
    const DecoderLayerView& view = model.view->layers[layer];
    const at::Tensor normed = RmsNorm(x, view.input_norm, model.view->rms_epsilon);
    const at::Tensor mixed =
        Attend(model, apply(Projection::kQuery, normed), apply(Projection::kKey, normed),
               apply(Projection::kValue, normed));
    const at::Tensor middle = x + apply(Projection::kOutput, mixed);
    const at::Tensor again = RmsNorm(middle, view.post_norm, model.view->rms_epsilon);
    const at::Tensor gate = apply(Projection::kGate, again);
    const at::Tensor up = apply(Projection::kUp, again);
    return middle + apply(Projection::kDown, at::silu(gate) * up);
  }

  // Of all layers: their inputs, and at the end the output of the last.
  Result<std::vector<at::Tensor>> Forward(const Model& model, Sequences sequences, bool keep,
                                          const ProgressFunction& progress) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> states = {Embed(model, sequences)};
    for (size_t layer = 0; layer < model.view->layers.size(); ++layer) {
      if (progress) STOCKPOT_RETURN_IF_ERROR(progress(0));
      at::Tensor next = Layer(model, layer, LinearsOf(model, layer), states.back());
      if (!keep) states.clear();
      states.push_back(std::move(next));
    }
    return states;
  }

  // Mean squared difference of the logits; `grad` (may be null): of the student's hidden states.
  double Head(const Model& model, const at::Tensor& student, const at::Tensor& teacher,
              at::Tensor* grad) {
    const DecoderView& full = models.full->tensors().view;
    const Linear ours{
        .base = &base.head, .layer = &model.view->head, .memory = &memory, .threads = &threads};
    const Linear theirs{
        .base = &base.head, .layer = &full.head, .memory = &other_memory, .threads = &threads};
    const double count = static_cast<double>(student.size(0)) * static_cast<double>(base.head.rows);
    if (grad != nullptr) *grad = at::zeros_like(student);
    double loss = 0;
    for (int64_t first = 0; first < base.head.rows; first += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, base.head.rows - first);
      const at::Tensor weight = ours.Rows(first, rows);
      const at::Tensor difference =
          at::mm(student, weight.t()) - at::mm(teacher, theirs.Rows(first, rows).t());
      loss += difference.square().sum(at::kDouble).item<double>();
      if (grad != nullptr) grad->addmm_(difference, weight, 1, 2 / count);
    }
    return loss / count;
  }

  void SetShape(Sequences sequences) {
    STOCKPOT_CHECK(!sequences.empty() && !sequences[0].empty(), sequences.size());
    batch = static_cast<int64_t>(sequences.size());
    length = static_cast<int64_t>(sequences[0].size());
    for (const std::span<const int32_t> sequence : sequences) {
      STOCKPOT_CHECK(static_cast<int64_t>(sequence.size()) == length, sequence.size(), length);
    }
  }
};

ModelScales ScalesOf(const VariantModel& variant) {
  ModelScales scales;
  const std::vector<DecoderLayerView>& layers = variant.tensors().view.layers;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (size_t p = 0; p < kProjections; ++p) {
      const PackedSigns* const signs = layers[layer].linear[p].delta.signs;
      if (signs == nullptr) continue;
      LayerScales& of_layer =
          scales[ProjectionName(static_cast<int64_t>(layer), static_cast<Projection>(p), "weight")];
      for (int64_t plane = 0; plane < signs->planes(); ++plane) {
        of_layer.push_back(ScalesOf(*signs, plane));
      }
    }
  }
  return scales;
}

LogitLoss::LogitLoss(const CalibratedModels& models, ThreadPool& threads)
    : state_(new State{.models = models,
                       .threads = threads,
                       .config = models.base->config(),
                       .base = models.base->tensors()}) {}
LogitLoss::~LogitLoss() = default;

Result<std::vector<float>> LogitLoss::Teacher(Sequences sequences,
                                              const ProgressFunction& progress) {
  State& s = *state_;
  s.SetShape(sequences);
  const State::Model model{.view = &s.models.full->tensors().view};
  STOCKPOT_ASSIGN_OR_RETURN(const auto states, s.Forward(model, sequences, false, progress));
  const at::NoGradGuard no_grad;
  const at::Tensor hidden =
      RmsNorm(states.back(), model.view->final_norm, model.view->rms_epsilon).contiguous();
  const float* const data = hidden.const_data_ptr<float>();
  return std::vector<float>(data, data + hidden.numel());
}

Result<double> LogitLoss::Student(Sequences sequences, std::span<const float> teacher,
                                  const ModelScales& scales, ModelScales* gradient,
                                  const ProgressFunction& progress) {
  State& s = *state_;
  s.SetShape(sequences);
  const at::Tensor wanted =
      at::from_blob(const_cast<float*>(teacher.data()), {s.batch * s.length, s.config.hidden_size});
  STOCKPOT_CHECK(static_cast<int64_t>(teacher.size()) == wanted.numel(), teacher.size());
  if (gradient != nullptr) *gradient = scales;  // its shape
  const State::Model model{
      .view = &s.models.draft->tensors().view, .scales = &scales, .gradient = gradient};
  STOCKPOT_ASSIGN_OR_RETURN(auto states,
                            s.Forward(model, sequences, gradient != nullptr, progress));
  at::Tensor last = states.back().detach().requires_grad_(gradient != nullptr);
  const at::Tensor hidden = RmsNorm(last, model.view->final_norm, model.view->rms_epsilon);
  at::Tensor grad;
  double loss = 0;
  {
    const at::NoGradGuard no_grad;
    loss = s.Head(model, hidden.detach(), wanted, gradient == nullptr ? nullptr : &grad);
  }
  if (gradient == nullptr) return loss;
  grad = torch::autograd::grad({hidden}, {last}, {grad})[0];
  states.pop_back();
  for (size_t layer = model.view->layers.size(); layer-- > 0;) {
    if (progress) STOCKPOT_RETURN_IF_ERROR(progress(0));
    const State::LayerLinears linears = s.LinearsOf(model, layer);
    const at::Tensor x = states.back().detach().requires_grad_(true);
    states.pop_back();
    const at::Tensor y = s.Layer(model, layer, linears, x);
    grad = torch::autograd::grad({y}, {x}, {grad})[0];
  }
  return loss;
}

}  // namespace stockpot
