#include "store/chunk_guards.h"

namespace stockpot {

std::shared_ptr<void> ChunkGuards::Open() {
  const std::lock_guard lock(mutex_);
  const uint64_t epoch = ++epoch_;
  open_.insert(epoch);
  ++open_count_;
  return {nullptr, [self = shared_from_this(), epoch](void*) { self->Close(epoch); }};
}

void ChunkGuards::Close(uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  const bool was_oldest = *open_.begin() == epoch;
  open_.erase(open_.find(epoch));
  --open_count_;
  if (open_.empty()) {
    touched_.clear();
  } else if (was_oldest) {
    std::erase_if(touched_, [&](const auto& entry) { return entry.second < *open_.begin(); });
  }
}

void ChunkGuards::Touch(const Digest& chunk) {
  if (open_count_ == 0) return;
  const std::lock_guard lock(mutex_);
  if (!open_.empty()) touched_[chunk] = epoch_;
}

bool ChunkGuards::Protects(const Digest& chunk) const {
  const std::lock_guard lock(mutex_);
  const auto it = touched_.find(chunk);
  return it != touched_.end() && !open_.empty() && it->second >= *open_.begin();
}

}  // namespace stockpot
