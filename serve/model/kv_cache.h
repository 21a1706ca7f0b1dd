// Keys and values of running sequences, in pages taken from one pool of fixed size.
// Thread promise: the engine thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/transformer/ops.h"
#include "serve/model/config.h"

namespace stockpot {

inline constexpr int64_t kKvPageTokens = 16;

class KvPool;

// The cache of one sequence. Move-only; gives its pages back when it goes.
class KvSequence {
 public:
  KvSequence() = default;
  KvSequence(KvSequence&& other) noexcept;
  KvSequence& operator=(KvSequence&& other) noexcept;
  ~KvSequence();

  int64_t length() const { return length_; }
  // Makes room for `tokens` more. ResourceExhausted: the pool has too few pages; nothing changes then.
  Status Reserve(int64_t tokens);
  // For the transformer: a token's rows [kv_heads * head_dim] of one layer, and the layer's pages.
  float* KeyRow(int64_t layer, int64_t position);
  float* ValueRow(int64_t layer, int64_t position);
  PagedKv Layer(int64_t layer) const;
  void Advance(int64_t tokens) { length_ += tokens; }

 private:
  friend class KvPool;
  KvPool* pool_ = nullptr;
  int64_t length_ = 0;
  std::vector<float*> blocks_;  // one block a page: all layers, keys then values
  std::vector<std::vector<float*>> key_pages_;    // [layer][page]
  std::vector<std::vector<float*>> value_pages_;  // [layer][page]
};

class KvPool {
 public:
  // Memory is committed on first touch; `bytes` bounds it.
  KvPool(const ModelConfig& config, int64_t bytes);
  ~KvPool();
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;

  KvSequence NewSequence();
  int64_t total_pages() const;
  int64_t free_pages() const;
  static int64_t PagesFor(int64_t tokens) { return (tokens + kKvPageTokens - 1) / kKvPageTokens; }

 private:
  friend class KvSequence;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
