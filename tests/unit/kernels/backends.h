// Running a test once on every SIMD target that was compiled and that this CPU has.
#pragma once

#include <hwy/highway.h>

#include <ostream>
#include <string>
#include <vector>

namespace stockpot {

struct SimdTarget {
  int64_t bit = 0;
  std::string name;
};

inline void PrintTo(const SimdTarget& target, std::ostream* out) { *out << target.name; }

// Best first. Empty never.
inline std::vector<SimdTarget> SimdTargets() {
  std::vector<SimdTarget> targets;
  for (const int64_t bit : hwy::SupportedAndGeneratedTargets()) {
    targets.push_back({bit, hwy::TargetName(bit)});
  }
  return targets;
}

// Binds the kernels to one target while it lives.
class ScopedSimdTarget {
 public:
  explicit ScopedSimdTarget(const SimdTarget& target) {
    hwy::SetSupportedTargetsForTest(target.bit);
    hwy::GetChosenTarget().Update(target.bit);
  }
  ~ScopedSimdTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
  ScopedSimdTarget(const ScopedSimdTarget&) = delete;
  ScopedSimdTarget& operator=(const ScopedSimdTarget&) = delete;
};

}  // namespace stockpot
