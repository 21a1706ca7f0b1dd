#include "store/tensor_choice.h"

#include <algorithm>
#include <limits>
#include <string>

namespace stockpot {
namespace {

// From one point of a tensor's hull to the next.
struct Step {
  size_t tensor = 0;
  size_t to = 0;  // index in the hull
  int64_t bytes = 0;
  double removed = 0;
  double worth() const { return removed / static_cast<double>(bytes); }
};

std::vector<Step> StepsByWorth(std::span<const std::vector<Candidate>> hulls) {
  std::vector<Step> steps;
  for (size_t tensor = 0; tensor < hulls.size(); ++tensor) {
    const std::vector<Candidate>& hull = hulls[tensor];
    for (size_t to = 1; to < hull.size(); ++to) {
      steps.push_back(
          {tensor, to, hull[to].bytes - hull[to - 1].bytes, hull[to - 1].left - hull[to].left});
    }
  }
  std::stable_sort(steps.begin(), steps.end(),
                   [](const Step& a, const Step& b) { return a.worth() > b.worth(); });
  return steps;
}

class Chooser {
 public:
  Chooser(std::span<const std::vector<Candidate>> hulls, int64_t fixed_bytes)
      : hulls_(hulls),
        fixed_bytes_(fixed_bytes),
        chosen_(hulls.size(), 0),
        steps_(StepsByWorth(hulls)) {
    TakeFirst(0);
  }

  int64_t bytes() const { return bytes_; }
  std::vector<size_t> TakeChosen() { return std::move(chosen_); }

  // A sum of its own each time: what steps add and take away would leave its rounding behind.
  double Left() const {
    double left = 0;
    for (size_t i = 0; i < hulls_.size(); ++i) left += hulls_[i][chosen_[i]].left;
    return left;
  }

  void MeetTarget(double target) {
    // How many of the steps it takes, by bisection over their sums.
    size_t low = 0, high = steps_.size();
    while (low < high) {
      const size_t middle = (low + high) / 2;
      TakeFirst(middle);
      if (Left() <= target) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    TakeFirst(low);
    // The last step may have removed more than was asked for: give up what is not needed.
    for (size_t i = low; i-- > 0;) {
      const Step& step = steps_[i];
      if (chosen_[step.tensor] != step.to) continue;
      chosen_[step.tensor] = step.to - 1;
      if (Left() <= target) {
        bytes_ -= step.bytes;
      } else {
        chosen_[step.tensor] = step.to;
        if (++refused_ == kMostRefused) break;
      }
    }
  }

  void FillBudget(int64_t budget) {
    std::vector<bool> full(hulls_.size(), false);
    for (const Step& step : steps_) {
      if (full[step.tensor]) continue;
      if (step.bytes > budget - bytes_) {
        full[step.tensor] = true;  // its further steps are behind this one
        continue;
      }
      bytes_ += step.bytes;
      chosen_[step.tensor] = step.to;
    }
  }

 private:
  static constexpr int kMostRefused = 1000;  // each costs a sum over all tensors

  void TakeFirst(size_t count) {
    std::fill(chosen_.begin(), chosen_.end(), 0);
    for (size_t i = 0; i < count; ++i) chosen_[steps_[i].tensor] = steps_[i].to;
    bytes_ = fixed_bytes_;
    for (size_t i = 0; i < hulls_.size(); ++i) bytes_ += hulls_[i][chosen_[i]].bytes;
  }

  const std::span<const std::vector<Candidate>> hulls_;
  const int64_t fixed_bytes_;
  std::vector<size_t> chosen_;
  const std::vector<Step> steps_;
  int64_t bytes_ = 0;
  int refused_ = 0;
};

Status OverBudget(const std::string& what, int64_t needed, int64_t budget) {
  return InvalidArgument(what + " makes a variant of " + std::to_string(needed) +
                         " bytes, over the budget of " + std::to_string(budget));
}

}  // namespace

std::vector<Candidate> LowerHull(std::vector<Candidate> candidates) {
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.left < b.left;
  });
  std::vector<Candidate> hull;
  for (const Candidate& next : candidates) {
    if (!hull.empty() && !(next.left < hull.back().left)) continue;  // more bytes, no better
    while (hull.size() >= 2) {
      const Candidate& before = hull[hull.size() - 2];
      const Candidate& last = hull.back();
      // Is `last` above the line from `before` to `next`?
      const double slope_last =
          (before.left - last.left) / static_cast<double>(last.bytes - before.bytes);
      const double slope_next =
          (last.left - next.left) / static_cast<double>(next.bytes - last.bytes);
      if (slope_next < slope_last) break;
      hull.pop_back();
    }
    hull.push_back(next);
  }
  return hull;
}

Result<std::vector<size_t>> ChooseCandidates(std::span<const std::vector<Candidate>> hulls,
                                             const ChoiceLimits& limits) {
  Chooser chooser(hulls, limits.fixed_bytes);
  const int64_t budget = limits.bytes.value_or(std::numeric_limits<int64_t>::max());
  if (chooser.bytes() > budget) {
    return OverBudget("the smallest form of every tensor", chooser.bytes(), budget);
  }
  if (limits.left) {
    chooser.MeetTarget(*limits.left);
    if (chooser.bytes() > budget) {
      return OverBudget("what meets the error that was asked for", chooser.bytes(), budget);
    }
  } else {
    chooser.FillBudget(budget);
  }
  return chooser.TakeChosen();
}

}  // namespace stockpot
