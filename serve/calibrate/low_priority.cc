#include "serve/calibrate/low_priority.h"

#include <sys/resource.h>
#include <unistd.h>

#include <thread>

namespace stockpot {

void RunAtLowPriority(int nice, const std::function<void()>& work) {
  std::thread([&] {
    if (nice > 0) ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), nice);
    work();
  }).join();
}

}  // namespace stockpot
