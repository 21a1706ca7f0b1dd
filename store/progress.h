// How long work reports how far it is, and learns that it should stop.
#pragma once

#include <functional>

#include "kernels/base/status.h"

namespace stockpot {

// Called between tensors with the share done, [0, 1]. An error stops the work, which returns it.
using ProgressFunction = std::function<Status(double share)>;

}  // namespace stockpot
