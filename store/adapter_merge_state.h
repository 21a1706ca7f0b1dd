// How adapters of a pool merge, and what a merged one remembers (store/adapter_merge.h).
// Thread promise: values and pure functions.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/base/status.h"

namespace stockpot {

enum class PoolMethod : uint8_t { kOpcm, kMean, kTaskArithmetic };
std::string_view PoolMethodName(PoolMethod method);  // "opcm", "mean", "task-arithmetic"
Result<PoolMethod> PoolMethodFromName(std::string_view name);

// What a merged adapter must remember of those that went into it.
struct AdapterMergeState {
  int64_t count = 1;
  double lambda = 1;    // opcm's
  double norm_sum = 0;  // of ||tau_i||, over all layers together
  bool operator==(const AdapterMergeState&) const = default;
};

}  // namespace stockpot
