// Work that may take long beside requests that must not.
#pragma once

#include <functional>

namespace stockpot {

// Runs `work` on a thread of its own with this nice value (0..19; threads that it starts inherit
// it) and returns when it is done. A thread of its own, since a nice value that went up does not
// come down again. Thread promise: any thread.
void RunAtLowPriority(int nice, const std::function<void()>& work);

}  // namespace stockpot
