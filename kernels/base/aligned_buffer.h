// A growing array of plain values on a cache-line boundary, for packed weights and scratch memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

namespace stockpot {

inline constexpr size_t kCacheLineBytes = 64;

// Owns its memory; move-only. Thread promise: none, the owner's.
template <typename T>
class AlignedBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  // Makes room for `count` values and returns the first. Contents are undefined after growth; a
  // call that fits allocates nothing.
  T* Reserve(int64_t count) {
    if (count > capacity_) {
      const int64_t grown = std::max(count, capacity_ + capacity_ / 2);
      data_.reset();  // the old contents are not kept: do not hold both
      capacity_ = 0;
      data_.reset(static_cast<T*>(::operator new (static_cast<size_t>(grown) * sizeof(T),
                                                  std::align_val_t{kCacheLineBytes})));
      capacity_ = grown;
    }
    return data_.get();
  }

  T* data() const { return data_.get(); }
  int64_t capacity() const { return capacity_; }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete (p, std::align_val_t{kCacheLineBytes}); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t capacity_ = 0;
};

}  // namespace stockpot
