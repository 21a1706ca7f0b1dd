// A small Llama in LibTorch with Hugging Face's parameter names, so that its checkpoints are models
// that Stockpot's endpoint and transformers load as they are: RMSNorm, rotary positions,
// grouped-query attention, SwiGLU, tied embeddings.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "examples/train_cpp/model_files.h"

namespace stockpot::train_cpp {

// x / rms(x) * weight
class RmsNorm : public torch::nn::Module {
 public:
  RmsNorm(int64_t size, double epsilon) : epsilon_(epsilon) {
    weight_ = register_parameter("weight", torch::ones({size}));
  }
  torch::Tensor forward(const torch::Tensor& x) const {
    return x * torch::rsqrt(x.square().mean(-1, /*keepdim=*/true) + epsilon_) * weight_;
  }

 private:
  const double epsilon_;
  torch::Tensor weight_;
};

// cos and sin of position * theta^(-2i / head_dim), [length, head_dim] each, both halves alike.
struct Rotary {
  torch::Tensor cos, sin;

  Rotary(const ModelShape& shape, int64_t length) {
    const torch::Tensor exponents =
        torch::arange(0, shape.head_dim(), 2) / double(shape.head_dim());
    const torch::Tensor angles = torch::outer(torch::arange(length).to(torch::kFloat32),
                                              torch::pow(shape.rope_theta, -exponents));
    const torch::Tensor both = torch::cat({angles, angles}, -1);
    cos = both.cos();
    sin = both.sin();
  }
  // x [batch, heads, length, head_dim]
  torch::Tensor Apply(const torch::Tensor& x) const {
    const auto halves = x.chunk(2, -1);
    return x * cos + torch::cat({-halves[1], halves[0]}, -1) * sin;
  }
};

inline torch::nn::Linear MakeLinear(int64_t in, int64_t out) {
  torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(false));
  torch::nn::init::normal_(linear->weight, 0.0, 0.02);
  return linear;
}

class Attention : public torch::nn::Module {
 public:
  explicit Attention(const ModelShape& shape) : shape_(shape) {
    const int64_t kv = shape.kv_heads * shape.head_dim();
    q_ = register_module("q_proj", MakeLinear(shape.hidden, shape.hidden));
    k_ = register_module("k_proj", MakeLinear(shape.hidden, kv));
    v_ = register_module("v_proj", MakeLinear(shape.hidden, kv));
    o_ = register_module("o_proj", MakeLinear(shape.hidden, shape.hidden));
  }
  torch::Tensor forward(const torch::Tensor& x, const Rotary& rotary) {
    const int64_t batch = x.size(0), length = x.size(1);
    const auto heads = [&](const torch::Tensor& y, int64_t count) {
      return y.view({batch, length, count, shape_.head_dim()}).transpose(1, 2);
    };
    const int64_t group = shape_.heads / shape_.kv_heads;
    const torch::Tensor q = rotary.Apply(heads(q_(x), shape_.heads));
    const torch::Tensor k = rotary.Apply(heads(k_(x), shape_.kv_heads)).repeat_interleave(group, 1);
    const torch::Tensor v = heads(v_(x), shape_.kv_heads).repeat_interleave(group, 1);
    const torch::Tensor mixed =
        torch::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
    return o_(mixed.transpose(1, 2).reshape({batch, length, shape_.hidden}));
  }

 private:
  const ModelShape shape_;
  torch::nn::Linear q_{nullptr}, k_{nullptr}, v_{nullptr}, o_{nullptr};
};

class Mlp : public torch::nn::Module {
 public:
  explicit Mlp(const ModelShape& shape) {
    gate_ = register_module("gate_proj", MakeLinear(shape.hidden, shape.intermediate));
    up_ = register_module("up_proj", MakeLinear(shape.hidden, shape.intermediate));
    down_ = register_module("down_proj", MakeLinear(shape.intermediate, shape.hidden));
  }
  torch::Tensor forward(const torch::Tensor& x) { return down_(torch::silu(gate_(x)) * up_(x)); }

 private:
  torch::nn::Linear gate_{nullptr}, up_{nullptr}, down_{nullptr};
};

class Layer : public torch::nn::Module {
 public:
  explicit Layer(const ModelShape& shape) {
    attention_ = register_module("self_attn", std::make_shared<Attention>(shape));
    mlp_ = register_module("mlp", std::make_shared<Mlp>(shape));
    before_ = register_module("input_layernorm",
                              std::make_shared<RmsNorm>(shape.hidden, shape.norm_epsilon));
    after_ = register_module("post_attention_layernorm",
                             std::make_shared<RmsNorm>(shape.hidden, shape.norm_epsilon));
  }
  torch::Tensor forward(torch::Tensor x, const Rotary& rotary) {
    x = x + attention_->forward(before_->forward(x), rotary);
    return x + mlp_->forward(after_->forward(x));
  }

 private:
  std::shared_ptr<Attention> attention_;
  std::shared_ptr<Mlp> mlp_;
  std::shared_ptr<RmsNorm> before_, after_;
};

// What Hugging Face calls `model`; the head is the embedding's transpose.
class Decoder : public torch::nn::Module {
 public:
  explicit Decoder(const ModelShape& shape) : shape_(shape) {
    embedding_ =
        register_module("embed_tokens", torch::nn::Embedding(shape.vocabulary, shape.hidden));
    torch::nn::init::normal_(embedding_->weight, 0.0, 0.02);
    layers_ = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < shape.layers; ++i) layers_->push_back(std::make_shared<Layer>(shape));
    norm_ = register_module("norm", std::make_shared<RmsNorm>(shape.hidden, shape.norm_epsilon));
  }
  // tokens [batch, length] -> logits [batch, length, vocabulary]
  torch::Tensor forward(const torch::Tensor& tokens) {
    const Rotary rotary(shape_, tokens.size(1));
    torch::Tensor x = embedding_(tokens);
    for (const auto& layer : *layers_) x = layer->as<Layer>()->forward(x, rotary);
    return torch::matmul(norm_->forward(x), embedding_->weight.t());
  }

 private:
  const ModelShape shape_;
  torch::nn::Embedding embedding_{nullptr};
  torch::nn::ModuleList layers_{nullptr};
  std::shared_ptr<RmsNorm> norm_;
};

class Llama : public torch::nn::Module {
 public:
  explicit Llama(const ModelShape& shape) {
    model_ = register_module("model", std::make_shared<Decoder>(shape));
  }
  torch::Tensor forward(const torch::Tensor& tokens) { return model_->forward(tokens); }

 private:
  std::shared_ptr<Decoder> model_;
};

}  // namespace stockpot::train_cpp
