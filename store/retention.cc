#include "store/retention.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <unordered_map>

#include "store/names.h"
#include "store/policy.h"

namespace stockpot {
namespace {

// --- limits ---
constexpr int64_t kMaxCount = 1'000'000;
constexpr size_t kMaxBestRules = 32;
constexpr size_t kMaxGroupRules = 32;
constexpr size_t kMaxMetricBytes = 256;
constexpr int64_t kMaxGraceMs = int64_t{10} * 366 * 24 * 3600 * 1000;

bool DeletedByPerson(const RetentionArtifact& artifact) {
  return artifact.tombstone && artifact.tombstone->by != kRetentionAuthor;
}

// Of two evaluations of one metric: the later one, and of two at one time the greater author and
// task, so that the choice does not depend on the order of listing.
bool IsNewer(const Eval& a, const Eval& b) {
  return std::tie(a.time_ms, a.by, a.task, a.value) > std::tie(b.time_ms, b.by, b.task, b.value);
}

class Decision {
 public:
  explicit Decision(const RetentionInputs& inputs) : inputs_(inputs) {
    fates_.reserve(inputs.artifacts.size());
    for (size_t i = 0; i < inputs.artifacts.size(); ++i) {
      index_[inputs.artifacts[i].digest] = i;
      fates_.push_back({inputs.artifacts[i].digest, {}});
    }
  }

  std::vector<Fate> Decide() {
    for (size_t i = 0; i < inputs_.artifacts.size(); ++i) {
      const RetentionArtifact& artifact = inputs_.artifacts[i];
      if (artifact.kind == ArtifactKind::kBase) Add(i, KeepReason::kBase, "");
      if (!artifact.has_step || artifact.run.empty()) continue;
      if (artifact.kind == ArtifactKind::kState) {
        states_[artifact.run][artifact.group].push_back(i);
      } else {
        steps_[artifact.run].push_back(i);
      }
    }
    for (const Hold& hold : inputs_.holds) AddTo(hold.artifact, hold.reason, hold.name);
    for (const Run& run : inputs_.runs) {
      KeepBest(run);
      KeepLastGood(run.name);
      ApplyRules(run.name);
      ApplyGroupRules(run.name);
    }
    KeepTheRest();
    KeepWhatStaysWithItsSource();
    KeepWhatIsNeeded();
    return std::move(fates_);
  }

 private:
  const RetentionArtifact& At(size_t i) const { return inputs_.artifacts[i]; }

  void Add(size_t i, KeepReason reason, std::string detail) {
    fates_[i].keeps.push_back({reason, std::move(detail)});
  }
  void AddTo(const Digest& digest, KeepReason reason, const std::string& detail) {
    if (const auto it = index_.find(digest); it != index_.end()) Add(it->second, reason, detail);
  }

  void KeepBest(const Run& run) {
    std::vector<StepRecord> steps;
    for (const size_t i : steps_[run.name]) {
      const RetentionArtifact& a = At(i);
      if (DeletedByPerson(a)) continue;
      steps.push_back({.run = a.run,
                       .step = a.step,
                       .kind = a.kind,
                       .artifact = a.digest,
                       .metrics = a.metrics});
    }
    if (const StepRecord* best = BestStep(run.config, steps)) {
      AddTo(best->artifact, KeepReason::kBest, run.config.best_metric);
    }
  }

  void KeepLastGood(const std::string& run) {
    const RetentionArtifact* newest = nullptr;
    const RetentionArtifact* good = nullptr;
    for (const size_t i : steps_[run]) {
      const RetentionArtifact& a = At(i);
      if (a.kind != ArtifactKind::kCheckpoint || DeletedByPerson(a)) continue;
      if (newest == nullptr || a.step > newest->step) newest = &a;
      if (!a.refused && (good == nullptr || a.step > good->step)) good = &a;
    }
    if (newest != nullptr) AddTo(newest->digest, KeepReason::kLastGood, run);
    if (good != nullptr && good != newest) AddTo(good->digest, KeepReason::kLastGood, run);
  }

  void ApplyRules(const std::string& run) {
    const RetentionPolicy policy = PolicyOf(run);
    std::vector<size_t> candidates;
    for (const size_t i : steps_[run]) {
      if (!DeletedByPerson(At(i))) candidates.push_back(i);
    }
    if (policy.KeepsEveryStep()) {
      for (const size_t i : candidates) Add(i, KeepReason::kNoRule, "");
      return;
    }
    for (const ArtifactKind kind : {ArtifactKind::kCheckpoint, ArtifactKind::kMerge}) {
      KeepNewest(candidates, kind, policy.keep_last);
    }
    for (const RetentionPolicy::Best& rule : policy.best) KeepBestBy(candidates, rule);
    for (const size_t i : candidates) {
      if (policy.every > 0 && At(i).step % policy.every == 0) {
        Add(i, KeepReason::kRuleEvery, std::to_string(policy.every));
      }
    }
  }

  void KeepNewest(const std::vector<size_t>& candidates, ArtifactKind kind, int64_t count) {
    std::vector<size_t> of_kind;
    for (const size_t i : candidates) {
      if (At(i).kind == kind) of_kind.push_back(i);
    }
    std::sort(of_kind.begin(), of_kind.end(),
              [&](size_t a, size_t b) { return At(a).step > At(b).step; });
    for (size_t n = 0; n < of_kind.size() && static_cast<int64_t>(n) < count; ++n) {
      Add(of_kind[n], KeepReason::kRuleLast, std::to_string(count));
    }
  }

  void KeepBestBy(const std::vector<size_t>& candidates, const RetentionPolicy::Best& rule) {
    std::vector<std::tuple<double, int64_t, ArtifactKind, size_t>> ranked;
    for (const size_t i : candidates) {
      const std::optional<double> value = MetricOf(At(i), rule.metric);
      if (value) ranked.emplace_back(rule.lower ? *value : -*value, At(i).step, At(i).kind, i);
    }
    std::sort(ranked.begin(), ranked.end());
    for (size_t n = 0; n < ranked.size() && static_cast<int64_t>(n) < rule.keep; ++n) {
      Add(std::get<3>(ranked[n]), KeepReason::kRuleBest,
          std::to_string(rule.keep) + " by " + rule.metric);
    }
  }

  RetentionPolicy PolicyOf(const std::string& run) const {
    const auto found = inputs_.policies.find(run);
    return found == inputs_.policies.end() ? RetentionPolicy{} : found->second;
  }

  // A state without its checkpoint resumes nothing.
  std::optional<size_t> CheckpointOf(size_t state) const {
    for (const Digest& source : At(state).sources) {
      const auto it = index_.find(source);
      if (it != index_.end() && !DeletedByPerson(At(it->second))) return it->second;
    }
    return std::nullopt;
  }

  void ApplyGroupRules(const std::string& run) {
    const RetentionPolicy policy = PolicyOf(run);
    for (const RetentionPolicy::Group& rule : policy.groups) {
      std::vector<size_t> candidates;
      for (const size_t i : states_[run][rule.group]) {
        ruled_states_.insert(i);
        if (!DeletedByPerson(At(i)) && CheckpointOf(i)) candidates.push_back(i);
      }
      const auto keep = [&](size_t i, KeepReason reason, int64_t detail) {
        Add(i, reason, std::to_string(detail));
        Add(*CheckpointOf(i), KeepReason::kState, rule.group);
      };
      std::sort(candidates.begin(), candidates.end(),
                [&](size_t a, size_t b) { return At(a).step > At(b).step; });
      const int64_t newest = std::max<int64_t>(rule.keep_last, 1);
      for (size_t n = 0; n < candidates.size() && static_cast<int64_t>(n) < newest; ++n) {
        keep(candidates[n], KeepReason::kRuleLast, newest);
      }
      for (const size_t i : candidates) {
        if (rule.every > 0 && At(i).step % rule.every == 0) {
          keep(i, KeepReason::kRuleEvery, rule.every);
        }
      }
    }
  }

  // What no rule speaks of: artifacts without a step that were made from nothing that is known.
  void KeepTheRest() {
    std::set<std::string> known;
    for (const Run& run : inputs_.runs) known.insert(run.name);
    for (size_t i = 0; i < fates_.size(); ++i) {
      const RetentionArtifact& a = At(i);
      if (a.kind == ArtifactKind::kBase || DeletedByPerson(a)) continue;
      const bool ruled = a.has_step && known.contains(a.run);
      if (!ruled && a.sources.empty()) Add(i, KeepReason::kNoRule, "");
    }
  }

  // Sources may have sources: until nothing changes. An artifact with a step follows its own rules.
  void KeepWhatStaysWithItsSource() {
    std::vector<size_t> followers;
    for (size_t i = 0; i < fates_.size(); ++i) {
      const bool of_own_rules = At(i).kind == ArtifactKind::kState
                                    ? ruled_states_.contains(i)
                                    : At(i).has_step;
      if (!of_own_rules && !At(i).sources.empty() && !DeletedByPerson(At(i))) {
        followers.push_back(i);
      }
    }
    std::set<size_t> done;
    for (bool changed = true; changed;) {
      changed = false;
      for (const size_t i : followers) {
        if (done.contains(i)) continue;
        for (const Digest& source : At(i).sources) {
          const auto it = index_.find(source);
          if (it == index_.end() || !fates_[it->second].stays()) continue;
          Add(i, KeepReason::kSource, source.ShortHex());
          done.insert(i);
          changed = true;
          break;
        }
      }
    }
  }

  void KeepWhatIsNeeded() {
    std::vector<size_t> open;
    for (size_t i = 0; i < fates_.size(); ++i) {
      if (fates_[i].stays() || At(i).tombstone) open.push_back(i);
    }
    std::set<size_t> seen(open.begin(), open.end());
    while (!open.empty()) {
      const size_t i = open.back();
      open.pop_back();
      for (const Digest& needed : At(i).needs) {
        const auto it = index_.find(needed);
        if (it == index_.end()) continue;
        Fate& fate = fates_[it->second];
        const bool known = std::any_of(fate.keeps.begin(), fate.keeps.end(), [](const Keep& k) {
          return k.reason == KeepReason::kNeeded;
        });
        // One witness is enough: a base has a child for every checkpoint.
        if (!known) Add(it->second, KeepReason::kNeeded, At(i).digest.ShortHex());
        if (seen.insert(it->second).second) open.push_back(it->second);
      }
    }
  }

  const RetentionInputs& inputs_;
  std::vector<Fate> fates_;
  std::unordered_map<Digest, size_t, DigestHash> index_;
  std::map<std::string, std::vector<size_t>> steps_;  // of each run, without states
  std::map<std::string, std::map<std::string, std::vector<size_t>>> states_;  // by run and group
  std::set<size_t> ruled_states_;  // whose group has a rule
};

}  // namespace

std::string KeepText(const Keep& keep) {
  switch (keep.reason) {
    case KeepReason::kBase:
      return "a base";
    case KeepReason::kPinned:
      return keep.detail.empty() ? "pinned" : "pinned: " + keep.detail;
    case KeepReason::kAlias:
      return "alias " + keep.detail;
    case KeepReason::kRoute:
      return "route " + keep.detail;
    case KeepReason::kBest:
      return "best of its run by " + keep.detail;
    case KeepReason::kLastGood:
      return "last good checkpoint of " + keep.detail;
    case KeepReason::kJob:
      return "job " + keep.detail;
    case KeepReason::kNeeded:
      return "needed by " + keep.detail;
    case KeepReason::kResume:
      return "resumed from by " + keep.detail;
    case KeepReason::kLeased:
      return "being read";
    case KeepReason::kNoRule:
      return "no rule";
    case KeepReason::kRuleLast:
      return "last " + keep.detail;
    case KeepReason::kRuleBest:
      return "best " + keep.detail;
    case KeepReason::kRuleEvery:
      return "every " + keep.detail;
    case KeepReason::kSource:
      return "its source " + keep.detail + " stays";
    case KeepReason::kState:
      return "its " + keep.detail + " stays";
  }
  return "";
}

bool Fate::firm() const {
  return std::any_of(keeps.begin(), keeps.end(), [](const Keep& k) { return IsFirm(k.reason); });
}

std::optional<double> MetricOf(const RetentionArtifact& artifact, const std::string& metric) {
  const bool of_task = metric.find('/') != std::string::npos;
  if (const auto it = artifact.metrics.find(metric); it != artifact.metrics.end()) {
    return it->second;
  }
  const Eval* newest = nullptr;
  for (const Eval& eval : artifact.evals) {
    if ((of_task ? eval.task + "/" + eval.metric : eval.metric) != metric) continue;
    if (newest == nullptr || IsNewer(eval, *newest)) newest = &eval;
  }
  return newest == nullptr ? std::nullopt : std::optional(newest->value);
}

std::vector<Fate> DecideRetention(const RetentionInputs& inputs) {
  return Decision(inputs).Decide();
}

Status CheckRetention(const RetentionPolicy& policy) {
  const auto check_count = [](int64_t count, const std::string& what, int64_t least) {
    if (count >= least && count <= kMaxCount) return OkStatus();
    return InvalidArgument(what + " must be " + std::to_string(least) + ".." +
                           std::to_string(kMaxCount));
  };
  STOCKPOT_RETURN_IF_ERROR(check_count(policy.keep_last, "keep_last", 0));
  STOCKPOT_RETURN_IF_ERROR(check_count(policy.every, "every", 0));
  if (policy.best.size() > kMaxBestRules) {
    return InvalidArgument("best: at most " + std::to_string(kMaxBestRules) + " metrics");
  }
  std::set<std::pair<std::string, bool>> seen;
  for (const RetentionPolicy::Best& rule : policy.best) {
    if (!IsPrintableName(rule.metric, kMaxMetricBytes)) {
      return InvalidArgument("best: a metric has 1..256 printable bytes");
    }
    STOCKPOT_RETURN_IF_ERROR(check_count(rule.keep, "best by " + rule.metric, 1));
    if (!seen.insert({rule.metric, rule.lower}).second) {
      return InvalidArgument("best: metric '" + rule.metric + "' is named twice");
    }
  }
  if (policy.groups.size() > kMaxGroupRules) {
    return InvalidArgument("groups: at most " + std::to_string(kMaxGroupRules) + " rules");
  }
  std::set<std::string> groups;
  for (const RetentionPolicy::Group& rule : policy.groups) {
    if (!IsValidGroupName(rule.group)) return InvalidArgument("groups: not a name of a group");
    const std::string what = "group " + rule.group + ": ";
    STOCKPOT_RETURN_IF_ERROR(check_count(rule.keep_last, what + "keep_last", 0));
    STOCKPOT_RETURN_IF_ERROR(check_count(rule.every, what + "every", 0));
    if (rule.keep_last == 0 && rule.every == 0) {
      return InvalidArgument(what + "the rule says nothing: give keep_last or every");
    }
    if (!groups.insert(rule.group).second) return InvalidArgument(what + "has two rules");
  }
  if (policy.grace_ms < 0 || policy.grace_ms > kMaxGraceMs) {
    return InvalidArgument("grace_ms must be 0.." + std::to_string(kMaxGraceMs));
  }
  return OkStatus();
}

}  // namespace stockpot
