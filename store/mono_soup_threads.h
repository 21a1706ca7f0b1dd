// Shared by the two files of MonoSoup (mono_soup.h), not for others.
#pragma once

#include <cstddef>
#include <functional>

#include "kernels/base/status.h"
#include "store/records.h"

namespace stockpot {

// InvalidArgument names the option that is out of range.
Status CheckMonoSoupOptions(const MonoSoupOptions& options);

// body(i) for i in [0, n), on LibTorch's threads: each takes the next i when it is done, and what
// LibTorch does inside `body` then stays on that thread. With n = 1, LibTorch's threads are body's
// own.
void RunSideBySide(size_t n, const std::function<void(size_t)>& body);

}  // namespace stockpot
