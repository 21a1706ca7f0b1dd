#include "serve/engine/admission.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "kernels/base/check.h"

namespace stockpot {

void RunningVariants::Add(const VariantModel* variant) {
  for (auto& [key, count] : entries_) {
    if (key == variant) {
      ++count;
      return;
    }
  }
  entries_.emplace_back(variant, 1);
}

void RunningVariants::Remove(const VariantModel* variant) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].first != variant) continue;
    if (--entries_[i].second == 0) entries_.erase(entries_.begin() + static_cast<int64_t>(i));
    return;
  }
  STOCKPOT_CHECK(false, "a sequence left whose variant was not running");
}

int64_t RunningVariants::count(const VariantModel* variant) const {
  for (const auto& [key, count] : entries_) {
    if (key == variant) return count;
  }
  return 0;
}

const VariantModel* RunningVariants::fewest() const {
  return std::min_element(entries_.begin(), entries_.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

void AdmissionQueue::Push(std::unique_ptr<Sequence> sequence) {
  queues_[sequence->variant()].push_back(std::move(sequence));
  ++size_;
}

void AdmissionQueue::PushPreempted(std::unique_ptr<Sequence> sequence) {
  sequence->overtaken = kMaxOvertakes;
  Queue& queue = queues_[sequence->variant()];
  const auto later = std::find_if(queue.begin(), queue.end(),
                                  [&](const auto& other) { return other->id > sequence->id; });
  queue.insert(later, std::move(sequence));
  ++size_;
}

std::unique_ptr<Sequence> AdmissionQueue::Remove(uint64_t id) {
  for (auto it = queues_.begin(); it != queues_.end(); ++it) {
    Queue& queue = it->second;
    const auto found =
        std::find_if(queue.begin(), queue.end(), [&](const auto& s) { return s->id == id; });
    if (found == queue.end()) continue;
    std::unique_ptr<Sequence> sequence = std::move(*found);
    queue.erase(found);
    --size_;
    if (queue.empty()) queues_.erase(it);
    return sequence;
  }
  return nullptr;
}

std::vector<Sequence*> AdmissionQueue::HeadsInOrder(const RunningVariants& running) const {
  std::vector<Sequence*> heads;
  heads.reserve(queues_.size());
  for (const auto& [variant, queue] : queues_) heads.push_back(queue.front().get());
  const auto rank = [&](const Sequence* s) {
    const bool overdue = s->overtaken >= kMaxOvertakes;
    return std::tuple(!overdue, overdue ? 0 : running.count(s->variant()), s->id);
  };
  std::sort(heads.begin(), heads.end(),
            [&](const Sequence* a, const Sequence* b) { return rank(a) < rank(b); });
  return heads;
}

std::unique_ptr<Sequence> AdmissionQueue::TakeHead(const VariantModel* variant) {
  const auto it = queues_.find(variant);
  std::unique_ptr<Sequence> sequence = std::move(it->second.front());
  it->second.pop_front();
  --size_;
  if (it->second.empty()) queues_.erase(it);
  for (auto& [other, queue] : queues_) {
    if (queue.front()->id < sequence->id) ++queue.front()->overtaken;
  }
  return sequence;
}

std::unique_ptr<Sequence> AdmissionQueue::Next(const RunningVariants& running, int64_t free_pages) {
  if (size_ == 0) return nullptr;
  std::optional<const VariantModel*>
      barred;  // takes no new sequences: an overdue one needs its place
  for (Sequence* head : HeadsInOrder(running)) {
    const VariantModel* variant = head->variant();
    if (barred == variant) continue;
    if (running.count(variant) == 0 && running.distinct() >= max_distinct_variants_) {
      if (head->overtaken >= kMaxOvertakes && !barred) barred = running.fewest();
      continue;
    }
    if (head->pages_to_start() > free_pages) return nullptr;
    return TakeHead(variant);
  }
  return nullptr;
}

}  // namespace stockpot
