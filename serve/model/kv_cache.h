// Keys and values of running sequences, in pages taken from one pool of fixed size.
//
// A page holds kKvPageTokens tokens of ALL layers, so that a sequence grows by one allocation:
//   block = [layer][keys, values][kKvPageTokens][kv_heads * head_dim] float32
// Thread promise: the engine thread only, but for KvPool::free_pages and total_pages (any thread).
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

// The cache of one sequence. Move-only; gives its pages back when it goes, which must be before its
// pool does. A default-made one belongs to no pool: it may only be assigned to.
class KvSequence {
 public:
  KvSequence() = default;
  KvSequence(KvSequence&& other) noexcept;
  KvSequence& operator=(KvSequence&& other) noexcept;
  ~KvSequence();

  int64_t length() const { return length_; }
  // Tokens that fit into the pages it holds.
  int64_t capacity() const { return static_cast<int64_t>(blocks_.size()) * kKvPageTokens; }
  // Makes room for `tokens` more. ResourceExhausted: the pool has too few pages; nothing changes
  // then.
  Status Reserve(int64_t tokens);
  // For the transformer: a token's rows [kv_heads * head_dim] of one layer, and the layer's pages.
  // REQUIRES: position < capacity().
  float* KeyRow(int64_t layer, int64_t position);
  float* ValueRow(int64_t layer, int64_t position);
  PagedKv Layer(int64_t layer) const;
  // REQUIRES: length() + tokens <= capacity().
  void Advance(int64_t tokens);

 private:
  friend class KvPool;
  void ReturnPages();

  KvPool* pool_ = nullptr;
  int64_t length_ = 0;
  std::vector<float*> blocks_;
  std::vector<std::vector<float*>> key_pages_;    // [layer][page]
  std::vector<std::vector<float*>> value_pages_;  // [layer][page]
};

class KvPool {
 public:
  // Address space for as many pages as fit into `bytes`; memory is committed on first touch. If the
  // system refuses the address space the pool has no pages.
  KvPool(const ModelConfig& config, int64_t bytes);
  ~KvPool();  // REQUIRES: no sequence of it lives
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;

  KvSequence NewSequence();
  int64_t total_pages() const;
  int64_t free_pages() const;
  int64_t page_bytes() const;
  static int64_t PagesFor(int64_t tokens) { return (tokens + kKvPageTokens - 1) / kKvPageTokens; }

 private:
  friend class KvSequence;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
