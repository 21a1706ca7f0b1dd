#include "store/best_model.h"

#include <algorithm>
#include <optional>

#include "store/policy.h"

namespace stockpot {
namespace {

struct WantedEval {
  std::string task;
  std::string metric;
  std::string by;  // empty: anybody's
};

// Null: evaluations cannot have the run's metric.
Result<std::optional<WantedEval>> Wanted(const CheckpointStore& store, const Run& run) {
  const std::string& metric = run.config.best_metric;
  const size_t slash = metric.rfind('/');
  if (slash == std::string::npos) return std::optional<WantedEval>();
  WantedEval wanted{.task = metric.substr(0, slash), .metric = metric.substr(slash + 1), .by = ""};
  if (wanted.task == kProbeTask) {
    STOCKPOT_ASSIGN_OR_RETURN(const auto probe, store.GetProbe(run.name));
    if (!probe) return std::optional<WantedEval>();
    wanted.by = ProbeAuthor(probe->digest());
  }
  return std::optional(std::move(wanted));
}

bool Matches(const Eval& eval, const WantedEval& wanted) {
  return eval.task == wanted.task && eval.metric == wanted.metric &&
         (wanted.by.empty() || eval.by == wanted.by);
}

std::optional<double> Newest(const std::vector<Eval>& evals, const WantedEval& wanted) {
  const Eval* newest = nullptr;
  for (const Eval& eval : evals) {
    if (!Matches(eval, wanted)) continue;
    if (newest == nullptr || eval.time_ms >= newest->time_ms) newest = &eval;
  }
  return newest == nullptr ? std::nullopt : std::optional(newest->value);
}

// The job by which the route RUN@best follows; null: the run leaves that to a person, a refusal
// stands, or the job is on its way anyway.
std::optional<Job> PublishOfBest(const CheckpointStore& store, const RunConfig& config,
                                 const StepRecord& best) {
  const bool publishes =
      config.publish == PublishPolicy::kEvery || config.publish == PublishPolicy::kBest ||
      (config.publish == PublishPolicy::kMerges && best.kind == ArtifactKind::kMerge);
  if (!publishes) return std::nullopt;
  Job job = MakePublishJob(best.artifact, config.publish_codec, "", config.publish_options);
  const std::optional<Job> known = store.GetJob(job.key);
  if (known && known->state != JobState::kDone) return std::nullopt;
  return job;
}

}  // namespace

Status AddEvaluatedMetric(const CheckpointStore& store, const Run& run,
                          std::span<const Eval> pending, std::vector<StepRecord>& steps) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::optional<WantedEval> wanted, Wanted(store, run));
  if (!wanted) return OkStatus();
  for (StepRecord& step : steps) {
    const bool is_model =
        step.kind == ArtifactKind::kCheckpoint || step.kind == ArtifactKind::kMerge;
    if (!is_model || step.deleted || step.metrics.contains(run.config.best_metric)) continue;
    std::optional<double> value = Newest(store.ListEvals(step.artifact), *wanted);
    for (const Eval& eval : pending) {
      if (eval.artifact == step.artifact && Matches(eval, *wanted)) value = eval.value;
    }
    if (value) step.metrics[run.config.best_metric] = *value;
  }
  return OkStatus();
}

Status FollowBest(const CheckpointStore& store, const Run& run, const std::string& by,
                  Commit& commit) {
  if (run.config.best_metric.find('/') == std::string::npos) return OkStatus();
  // Read before the evaluations: one that comes after them moves the name, and this commit loses.
  const std::string name = run.name + "@best";
  const std::optional<Alias> now = store.GetAlias(name);
  STOCKPOT_ASSIGN_OR_RETURN(std::vector<StepRecord> steps, store.ReadSteps(run.name));
  for (const StepRecord& step : commit.steps) {
    if (step.run == run.name) steps.push_back(step);
  }
  STOCKPOT_RETURN_IF_ERROR(AddEvaluatedMetric(store, run, commit.evals, steps));
  const StepRecord* best = BestModel(run.config, steps);
  if (best == nullptr) return OkStatus();
  if (now && now->artifact == best->artifact) return OkStatus();
  const Digest from = now ? now->artifact : Digest{};
  commit.aliases.push_back({name, best->artifact, from, by});
  commit.events.push_back(
      {.type = "alias",
       .subject = name,
       .fields = {
           {"to", best->artifact.Hex()}, {"from", now ? from.Hex() : std::string()}, {"by", by}}});
  if (std::optional<Job> job = PublishOfBest(store, run.config, *best)) {
    const bool there = std::any_of(commit.jobs.begin(), commit.jobs.end(),
                                   [&](const Job& other) { return other.key == job->key; });
    if (!there) commit.jobs.push_back(*std::move(job));
  }
  return OkStatus();
}

std::optional<double> HeldOutLoss(const CheckpointStore& store, const Digest& artifact,
                                  const Digest& probe) {
  return Newest(store.ListEvals(artifact), {std::string(kProbeTask), "loss", ProbeAuthor(probe)});
}

}  // namespace stockpot
