// Which waiting sequence runs next.
//
// Sequences wait in one queue a variant. The next one is the head of the variant with the fewest
// running sequences (oldest first among equals), so a flood for one variant does not shut out the
// others. Three rules bound every wait:
//   - a head that kMaxOvertakes later arrivals passed comes before all that are younger;
//   - if such a head needs a place among the distinct variants, the running variant with the fewest
//     sequences takes no new ones until it has run out (the others go on);
//   - the chosen sequence waits for KV pages and nobody passes it meanwhile.
// A preempted sequence counts as overtaken from the start. The work of a call grows with the number
// of variants that wait now, never with those that were ever loaded.
// Thread promise: one thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "serve/engine/sequence.h"

namespace stockpot {

inline constexpr int64_t kMaxOvertakes = 16;

// Running sequences by variant (null: the base). Few entries: at most the cap on distinct variants.
class RunningVariants {
 public:
  void Add(const VariantModel* variant);
  void Remove(const VariantModel* variant);
  int64_t count(const VariantModel* variant) const;  // 0: not running
  int64_t distinct() const { return static_cast<int64_t>(entries_.size()); }
  // The one with the fewest sequences. REQUIRES: distinct() > 0.
  const VariantModel* fewest() const;

 private:
  std::vector<std::pair<const VariantModel*, int64_t>> entries_;
};

class AdmissionQueue {
 public:
  explicit AdmissionQueue(int64_t max_distinct_variants)
      : max_distinct_variants_(max_distinct_variants) {}

  void Push(std::unique_ptr<Sequence> sequence);
  // Puts a preempted sequence back, before everybody who arrived later.
  void PushPreempted(std::unique_ptr<Sequence> sequence);
  // Takes the sequence out, or null.
  std::unique_ptr<Sequence> Remove(uint64_t id);
  // Takes the next one out, or null if none may run now. `free_pages`: what it may use of the pool
  // for its tokens so far and one more.
  std::unique_ptr<Sequence> Next(const RunningVariants& running, int64_t free_pages);

  int64_t size() const { return size_; }

 private:
  using Queue = std::deque<std::unique_ptr<Sequence>>;
  std::vector<Sequence*> HeadsInOrder(const RunningVariants& running) const;
  std::unique_ptr<Sequence> TakeHead(const VariantModel* variant);

  const int64_t max_distinct_variants_;
  std::unordered_map<const VariantModel*, Queue> queues_;  // none is empty
  int64_t size_ = 0;
};

}  // namespace stockpot
