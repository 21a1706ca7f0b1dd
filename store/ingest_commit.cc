#include "store/ingest_commit.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "store/best_model.h"
#include "store/policy.h"

namespace stockpot {
namespace {

// --- limits ---
constexpr size_t kMaxMetrics = 1000;  // of one step
constexpr size_t kMaxGroups = 32;     // likewise, of tensors that are no weights
constexpr size_t kMaxMetricNameBytes = 256;
constexpr int kMaxAttempts = 8;  // when an alias is moved by somebody else between read and commit

struct Metrics {
  std::map<std::string, double> finite;
  std::string dropped;  // names, joined by ','
};

Result<Metrics> SplitMetrics(const std::map<std::string, double>& given) {
  if (given.size() > kMaxMetrics) {
    return InvalidArgument("more than " + std::to_string(kMaxMetrics) + " metrics");
  }
  Metrics metrics;
  for (const auto& [name, value] : given) {
    if (!IsPrintableName(name, kMaxMetricNameBytes)) {
      return InvalidArgument("the name of a metric is empty, over 256 bytes or not printable");
    }
    if (std::isfinite(value)) {
      metrics.finite[name] = value;
    } else {
      metrics.dropped += (metrics.dropped.empty() ? "" : ",") + name;
    }
  }
  return metrics;
}

Result<Manifest> BuildManifest(const SessionRequest& request, const ShardCommit& shard,
                               const std::optional<Digest>& base) {
  if (shard.tensors.empty()) return InvalidArgument("no tensors");
  Manifest manifest;
  manifest.kind = request.kind;
  manifest.base = base;
  if (request.kind == ArtifactKind::kCheckpoint) {
    manifest.run = request.run;
    manifest.step = request.step;
  } else if (!shard.files.contains("config.json")) {
    return InvalidArgument("a base needs its config.json");
  }
  manifest.tensors = shard.tensors;
  manifest.files = shard.files;
  STOCKPOT_RETURN_IF_ERROR(manifest.Validate());
  return manifest;
}

// The state of a group, as an artifact of its own.
Result<Manifest> BuildState(const SessionRequest& request, const std::string& group,
                            const std::vector<TensorEntry>& tensors, const Digest& base) {
  if (tensors.empty()) return InvalidArgument("no tensors");
  Manifest manifest{.kind = ArtifactKind::kState,
                    .base = base,
                    .run = request.run,
                    .step = request.step,
                    .group = group,
                    .tensors = tensors};
  std::sort(manifest.tensors.begin(), manifest.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  STOCKPOT_RETURN_IF_ERROR(manifest.Validate());
  return manifest;
}

Result<std::map<std::string, Manifest>> BuildStates(const SessionRequest& request,
                                                    const ShardCommit& shard, const Digest& base) {
  if (shard.states.size() > kMaxGroups) {
    return InvalidArgument("more than " + std::to_string(kMaxGroups) + " groups of tensors");
  }
  std::map<std::string, Manifest> states;
  for (const auto& [group, tensors] : shard.states) {
    Result<Manifest> state = BuildState(request, group, tensors, base);
    if (!state.ok()) return state.status().WithContext("group '" + group.substr(0, 64) + "'");
    states[group] = *std::move(state);
  }
  return states;
}

// Whether the step has this very artifact, not deleted. AlreadyExists: it has another one.
Result<bool> HasStep(const CheckpointStore& store, const StepRecord& step) {
  const std::optional<StepRecord> other =
      store.GetStep(step.run, step.step, step.kind, step.group);
  if (!other) return false;
  if (other->artifact == step.artifact) return !other->deleted;  // deleted: brought back
  return AlreadyExists(step.run + "@" + std::to_string(step.step) +
                       (step.group.empty() ? "" : "." + step.group) + " is artifact " +
                       other->artifact.ShortHex() + " already, not " + step.artifact.ShortHex() +
                       (other->deleted ? ": it is deleted, but not purged yet" : ""));
}

void AddState(const StepRecord& checkpoint, const std::string& group, const Manifest& state,
              Commit& commit) {
  StepRecord step{.run = checkpoint.run,
                  .step = checkpoint.step,
                  .kind = ArtifactKind::kState,
                  .group = group,
                  .artifact = state.digest()};
  commit.artifacts.push_back(state);
  commit.edges.push_back({EdgeType::kStateOf, step.artifact, checkpoint.artifact});
  commit.steps.push_back(std::move(step));
}

Event StatesEvent(const StepRecord& step, const std::map<std::string, Manifest>& states) {
  std::string groups;
  for (const auto& [group, state] : states) groups += (groups.empty() ? "" : ",") + group;
  return {.type = "states",
          .subject = step.run,
          .fields = {{"run", step.run},
                     {"step", std::to_string(step.step)},
                     {"artifact", step.artifact.Hex()},
                     {"groups", groups}}};
}

// Adds the move of a name that is `now`, and its event, unless it points there already.
void MoveAlias(const std::optional<Alias>& now, const std::string& name, const Digest& to,
               const std::string& by, Commit& commit) {
  if (now && now->artifact == to) return;
  const Digest from = now ? now->artifact : Digest{};
  commit.aliases.push_back({name, to, from, by});
  commit.events.push_back(
      {.type = "alias",
       .subject = name,
       .fields = {{"to", to.Hex()}, {"from", now ? from.Hex() : std::string()}, {"by", by}}});
}

Result<CommitReply> CommitBase(CheckpointStore& store, const SessionRequest& request,
                               const ShardCommit& shard) {
  if (!shard.states.empty()) return InvalidArgument("a base has weights only, no other groups");
  STOCKPOT_ASSIGN_OR_RETURN(Manifest manifest, BuildManifest(request, shard, std::nullopt));
  CommitReply reply{.artifact = manifest.digest()};
  if (const auto alias = store.GetAlias(request.run)) {
    if (alias->artifact != reply.artifact) {
      return AlreadyExists("the name '" + request.run + "' belongs to artifact " +
                           alias->artifact.ShortHex());
    }
    reply.existed = true;
    reply.event_sequence = store.LastEvent();
    return reply;
  }
  if (const auto route = store.GetRoute(request.run)) {
    return AlreadyExists("the name '" + request.run + "' is served already, by artifact " +
                         route->variant.ShortHex());
  }
  Commit commit;
  commit.artifacts.push_back(std::move(manifest));
  commit.events.push_back(
      {.type = "base", .subject = request.run, .fields = {{"artifact", reply.artifact.Hex()}}});
  MoveAlias(std::nullopt, request.run, reply.artifact, "import", commit);
  STOCKPOT_ASSIGN_OR_RETURN(reply.event_sequence, store.Apply(std::move(commit)));
  return reply;
}

Event CheckpointEvent(const StepRecord& step, const Metrics& metrics) {
  Event event{.type = "checkpoint", .subject = step.run};
  event.fields = {{"run", step.run},
                  {"step", std::to_string(step.step)},
                  {"artifact", step.artifact.Hex()},
                  {"metrics", nlohmann::json(metrics.finite).dump()}};
  if (step.world > 1) event.fields["world"] = std::to_string(step.world);
  if (!metrics.dropped.empty()) event.fields["dropped_metrics"] = metrics.dropped;
  return event;
}

// Everything that follows from a new checkpoint, as the store is now.
Result<Commit> CheckpointCommit(const CheckpointStore& store, const Run& run,
                                const StepRecord& step, const Metrics& metrics) {
  // Read before what decides: a name that moves meanwhile makes this commit lose.
  const std::string latest_name = run.name + "@latest";
  const std::string best_name = run.name + "@best";
  const std::optional<Alias> latest_now = store.GetAlias(latest_name);
  const std::optional<Alias> best_now = store.GetAlias(best_name);
  STOCKPOT_ASSIGN_OR_RETURN(std::vector<StepRecord> previous, store.ReadSteps(run.name));
  STOCKPOT_RETURN_IF_ERROR(AddEvaluatedMetric(store, run, {}, previous));
  STOCKPOT_ASSIGN_OR_RETURN(const std::optional<ProbeSet> probe, store.GetProbe(run.name));
  Commit commit;
  commit.steps.push_back(step);
  commit.edges.push_back({EdgeType::kTrainedFrom, step.artifact, run.base});
  commit.events.push_back(CheckpointEvent(step, metrics));
  const bool newest = std::none_of(previous.begin(), previous.end(), [&](const StepRecord& s) {
    return s.kind == ArtifactKind::kCheckpoint && !s.deleted && s.step > step.step;
  });
  if (newest) MoveAlias(latest_now, latest_name, step.artifact, "ingest", commit);
  std::vector<StepRecord> all = previous;
  all.push_back(step);
  if (const StepRecord* best = BestModel(run.config, all)) {
    MoveAlias(best_now, best_name, best->artifact, "ingest", commit);
  }
  commit.jobs = JobsForCheckpoint(run, step, previous,
                                  probe ? std::optional(probe->digest()) : std::nullopt);
  if (!store.GetRetention(run.name).KeepsEverything()) {
    commit.jobs.push_back(MakeExpireJob(run.name));
  }
  if (run.config.compress_history) commit.jobs.push_back(MakeCompressJob(run.name));
  return commit;
}

Result<CommitReply> CommitCheckpoint(CheckpointStore& store, const SessionRequest& request,
                                     const ShardCommit& shard) {
  STOCKPOT_ASSIGN_OR_RETURN(const Metrics metrics, SplitMetrics(shard.metrics));
  STOCKPOT_ASSIGN_OR_RETURN(const Run run, store.GetRun(request.run));
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, BuildManifest(request, shard, run.base));
  CommitReply reply{.artifact = manifest.digest()};
  StepRecord step{.run = run.name,
                  .step = request.step,
                  .kind = ArtifactKind::kCheckpoint,
                  .artifact = reply.artifact,
                  .metrics = metrics.finite,
                  .world = request.world,
                  .attempt = request.attempt};
  STOCKPOT_ASSIGN_OR_RETURN(const auto states, BuildStates(request, shard, run.base));
  STOCKPOT_ASSIGN_OR_RETURN(const bool has_checkpoint, HasStep(store, step));
  reply.existed = has_checkpoint;
  for (const auto& [group, state] : states) {
    reply.states[group] = state.digest();
    STOCKPOT_ASSIGN_OR_RETURN(const bool there, HasStep(store, {.run = run.name,
                                                                .step = request.step,
                                                                .kind = ArtifactKind::kState,
                                                                .group = group,
                                                                .artifact = reply.states[group]}));
    reply.existed = reply.existed && there;
  }
  if (reply.existed) {
    reply.event_sequence = store.LastEvent();
    return reply;
  }
  std::vector<Manifest> made = {manifest};
  for (const auto& [group, state] : states) made.push_back(state);
  STOCKPOT_RETURN_IF_ERROR(store.CheckRunQuota(run, made));
  Result<int64_t> sequence = Unavailable("not tried");
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    Commit commit;
    if (!has_checkpoint) {
      STOCKPOT_ASSIGN_OR_RETURN(commit, CheckpointCommit(store, run, step, metrics));
      commit.artifacts.push_back(manifest);
    }
    for (const auto& [group, state] : states) AddState(step, group, state, commit);
    if (!states.empty()) commit.events.push_back(StatesEvent(step, states));
    if (request.resumed_from) {
      commit.edges.push_back({EdgeType::kResumedFrom, step.artifact, *request.resumed_from});
    }
    sequence = store.Apply(std::move(commit));
    // Somebody moved RUN@latest or RUN@best, or deleted what they point at: decide anew.
    if (sequence.ok() || sequence.status().code() != StatusCode::kAlreadyExists) break;
  }
  if (!sequence.ok()) return sequence.status();
  reply.event_sequence = *sequence;
  return reply;
}

}  // namespace

Result<CommitReply> CommitSession(CheckpointStore& store, const SessionRequest& request,
                                  const ShardCommit& shard) {
  switch (request.kind) {
    case ArtifactKind::kBase:
      return CommitBase(store, request, shard);
    case ArtifactKind::kAdapter:
      return CommitAdapter(store, request, shard);
    case ArtifactKind::kVariant:
      return CommitVariant(store, request, shard);
    default:
      return CommitCheckpoint(store, request, shard);
  }
}

}  // namespace stockpot
