#include "serve/model/kv_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "kernels/base/check.h"

namespace stockpot {

struct KvPool::State {
  int64_t layers = 0;
  int64_t row_floats = 0;    // kv_heads * head_dim
  int64_t block_floats = 0;  // of one page, all layers
  int64_t total = 0;
  void* memory = nullptr;
  size_t mapped_bytes = 0;
  std::vector<float*> free;  // last in, first out: pages that were touched are used again first
  std::atomic<int64_t> free_count{0};

  int64_t plane_floats() const { return kKvPageTokens * row_floats; }
};

KvPool::KvPool(const ModelConfig& config, int64_t bytes) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.layers = config.layers;
  s.row_floats = config.kv_heads * config.head_dim;
  s.block_floats = s.layers * 2 * s.plane_floats();
  const int64_t pages = std::max<int64_t>(0, bytes) / page_bytes();
  if (pages == 0) return;
  s.mapped_bytes = static_cast<size_t>(pages * page_bytes());
  void* memory = mmap(nullptr, s.mapped_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return;
  s.memory = memory;
  s.total = pages;
  s.free.reserve(static_cast<size_t>(pages));
  for (int64_t page = pages - 1; page >= 0; --page) {
    s.free.push_back(static_cast<float*>(memory) + page * s.block_floats);
  }
  s.free_count = pages;
}

KvPool::~KvPool() {
  State& s = *state_;
  STOCKPOT_CHECK(static_cast<int64_t>(s.free.size()) == s.total, s.free.size(), s.total);
  if (s.memory != nullptr) munmap(s.memory, s.mapped_bytes);
}

KvSequence KvPool::NewSequence() {
  KvSequence sequence;
  sequence.pool_ = this;
  sequence.key_pages_.resize(static_cast<size_t>(state_->layers));
  sequence.value_pages_.resize(static_cast<size_t>(state_->layers));
  return sequence;
}

int64_t KvPool::total_pages() const { return state_->total; }
int64_t KvPool::free_pages() const { return state_->free_count.load(); }
int64_t KvPool::page_bytes() const {
  return state_->block_floats * static_cast<int64_t>(sizeof(float));
}

KvSequence::KvSequence(KvSequence&& other) noexcept { *this = std::move(other); }

KvSequence& KvSequence::operator=(KvSequence&& other) noexcept {
  if (this == &other) return *this;
  ReturnPages();
  pool_ = std::exchange(other.pool_, nullptr);
  length_ = std::exchange(other.length_, 0);
  blocks_ = std::exchange(other.blocks_, {});
  key_pages_ = std::exchange(other.key_pages_, {});
  value_pages_ = std::exchange(other.value_pages_, {});
  return *this;
}

KvSequence::~KvSequence() { ReturnPages(); }

void KvSequence::ReturnPages() {
  if (pool_ == nullptr) return;
  KvPool::State& s = *pool_->state_;
  s.free.insert(s.free.end(), blocks_.rbegin(), blocks_.rend());
  s.free_count += static_cast<int64_t>(blocks_.size());
  blocks_.clear();
}

Status KvSequence::Reserve(int64_t tokens) {
  STOCKPOT_CHECK(pool_ != nullptr && tokens >= 0, tokens);
  KvPool::State& s = *pool_->state_;
  const int64_t needed = KvPool::PagesFor(length_ + tokens) - static_cast<int64_t>(blocks_.size());
  if (needed <= 0) return OkStatus();
  if (needed > static_cast<int64_t>(s.free.size())) {
    return ResourceExhausted("the key/value pool has " + std::to_string(s.free.size()) + " of " +
                             std::to_string(s.total) + " pages free, " + std::to_string(needed) +
                             " are needed");
  }
  for (int64_t i = 0; i < needed; ++i) {
    float* block = s.free.back();
    s.free.pop_back();
    blocks_.push_back(block);
    for (int64_t layer = 0; layer < s.layers; ++layer) {
      float* keys = block + 2 * layer * s.plane_floats();
      key_pages_[static_cast<size_t>(layer)].push_back(keys);
      value_pages_[static_cast<size_t>(layer)].push_back(keys + s.plane_floats());
    }
  }
  s.free_count -= needed;
  return OkStatus();
}

float* KvSequence::KeyRow(int64_t layer, int64_t position) {
  return key_pages_[static_cast<size_t>(layer)][static_cast<size_t>(position / kKvPageTokens)] +
         (position % kKvPageTokens) * pool_->state_->row_floats;
}

float* KvSequence::ValueRow(int64_t layer, int64_t position) {
  return value_pages_[static_cast<size_t>(layer)][static_cast<size_t>(position / kKvPageTokens)] +
         (position % kKvPageTokens) * pool_->state_->row_floats;
}

PagedKv KvSequence::Layer(int64_t layer) const {
  return {.key_pages = key_pages_[static_cast<size_t>(layer)],
          .value_pages = value_pages_[static_cast<size_t>(layer)],
          .page_tokens = kKvPageTokens};
}

void KvSequence::Advance(int64_t tokens) {
  STOCKPOT_CHECK(length_ + tokens <= capacity(), length_, tokens, capacity());
  length_ += tokens;
}

}  // namespace stockpot
