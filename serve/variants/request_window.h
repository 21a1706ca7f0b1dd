// How often each name was asked for lately: what a pool of adapters puts out by. In memory: a
// restart begins at zero.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace stockpot {

// Thread promise: any thread.
class RequestWindow {
 public:
  static constexpr int64_t kWindowMs = int64_t{24} * 3600 * 1000;
  static constexpr size_t kSlots = 24;  // the oldest goes as a whole
  static constexpr size_t kMaxNames = 10'000;

  void Count(std::string_view name, int64_t now_ms) {
    const std::lock_guard lock(mutex_);
    auto it = counts_.find(name);
    if (it == counts_.end()) {
      if (counts_.size() >= kMaxNames) Forget(SlotOf(now_ms));
      if (counts_.size() >= kMaxNames) return;
      it = counts_.emplace(name, Counts{}).first;
    }
    Slot& slot = it->second[static_cast<size_t>(SlotOf(now_ms)) % kSlots];
    if (slot.number != SlotOf(now_ms)) slot = {SlotOf(now_ms), 0};
    ++slot.requests;
  }

  // Of the last kWindowMs, to the next full slot.
  int64_t Requests(std::string_view name, int64_t now_ms) const {
    const std::lock_guard lock(mutex_);
    const auto it = counts_.find(name);
    return it == counts_.end() ? 0 : Sum(it->second, SlotOf(now_ms));
  }

 private:
  struct Slot {
    int64_t number = -1;  // of the slots since 1970
    int64_t requests = 0;
  };
  using Counts = std::array<Slot, kSlots>;

  static int64_t SlotOf(int64_t now_ms) {
    return now_ms / (kWindowMs / static_cast<int64_t>(kSlots));
  }
  static int64_t Sum(const Counts& counts, int64_t now) {
    int64_t sum = 0;
    for (const Slot& slot : counts) {
      if (slot.number > now - static_cast<int64_t>(kSlots) && slot.number <= now) {
        sum += slot.requests;
      }
    }
    return sum;
  }
  void Forget(int64_t now) {
    std::erase_if(counts_, [&](const auto& entry) { return Sum(entry.second, now) == 0; });
  }

  mutable std::mutex mutex_;
  std::map<std::string, Counts, std::less<>> counts_;  // guarded
};

}  // namespace stockpot
