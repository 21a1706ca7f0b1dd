// The checks of a commit that need no turn: manifests, names, values, and the fit to the base.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "store/commit_writer.h"
#include "store/names.h"
#include "store/publish_options.h"
#include "store/variant_gate.h"

namespace stockpot {
namespace {

constexpr size_t kMaxLabelBytes = 256;  // tasks, metrics, authors
constexpr size_t kMaxJobKeyBytes = 1024;

// A tensor that is stored as a difference to the base, or as "the same".
Status CheckAgainstBase(const TensorEntry& tensor, const Manifest& base) {
  const TensorEntry* origin = base.Resolve(tensor.name);
  if (origin == nullptr) return InvalidArgument("the base has no such tensor");
  if (!FitsOver(tensor, *origin)) return InvalidArgument("the base's tensor has another shape");
  if (tensor.codec != Codec::kBase) return OkStatus();
  if (origin->dtype != tensor.dtype) return InvalidArgument("the base's tensor has another dtype");
  const auto data = origin->parts.find("data");
  if (data == origin->parts.end() || data->second.digest() != tensor.content) {
    return InvalidArgument("'content' is not that of the base's tensor");
  }
  return OkStatus();
}

Status CheckFit(const Manifest& manifest, const Manifest& base) {
  if (base.kind != ArtifactKind::kBase) {
    return InvalidArgument("its base " + manifest.base->ShortHex() + " is not a base");
  }
  for (const TensorEntry& tensor : manifest.tensors) {
    if (tensor.codec == Codec::kRaw) continue;
    const Status status = CheckAgainstBase(tensor, base);
    if (!status.ok()) return status.WithContext("tensor '" + tensor.name + "'");
  }
  return OkStatus();
}

Status PrepareArtifacts(PreparedCommit& prepared, const LoadManifest& load) {
  std::map<Digest, const Manifest*> own;
  for (const Manifest& manifest : prepared.commit.artifacts) {
    STOCKPOT_RETURN_IF_ERROR(manifest.Validate());
    std::string json = manifest.ToJson();
    if (static_cast<int64_t>(json.size()) > kMaxManifestBytes) {
      return InvalidArgument("the manifest is over " + std::to_string(kMaxManifestBytes) +
                             " bytes");
    }
    const Digest digest = Sha256(json);
    own[digest] = &manifest;
    prepared.artifacts.push_back({digest, std::move(json)});
  }
  for (size_t i = 0; i < prepared.artifacts.size(); ++i) {
    const Manifest& manifest = prepared.commit.artifacts[i];
    if (!manifest.base) continue;
    const std::string context = "artifact " + prepared.artifacts[i].digest.ShortHex();
    if (const auto it = own.find(*manifest.base); it != own.end()) {
      STOCKPOT_RETURN_IF_ERROR(CheckFit(manifest, *it->second).WithContext(context));
      continue;
    }
    const Result<Manifest> base = load(*manifest.base);
    if (base.status().code() == StatusCode::kNotFound) {
      return InvalidArgument(context + ": its base " + manifest.base->ShortHex() +
                             " is not stored");
    }
    if (!base.ok()) return base.status().WithContext("the base of " + context);
    STOCKPOT_RETURN_IF_ERROR(CheckFit(manifest, *base).WithContext(context));
  }
  return OkStatus();
}

Status CheckRun(const Run& run) {
  const RunConfig& c = run.config;
  if (!IsValidRunName(run.name)) return InvalidArgument("not a run name");
  if (c.merge_every < 0) return InvalidArgument("merge_every is negative");
  if (!(c.merge_energy > 0 && c.merge_energy <= 1)) {
    return InvalidArgument("merge_energy is not in (0, 1]");
  }
  if (c.merge_rank < 0) return InvalidArgument("merge_rank is negative");
  if (!(c.merge_spectral >= 0 && c.merge_spectral <= 1)) {
    return InvalidArgument("merge_spectral is not in [0, 1]");
  }
  STOCKPOT_RETURN_IF_ERROR(CheckPublishOptions(c.publish_codec, c.publish_options)
                               .WithContext("what the run publishes"));
  if (c.quota_bytes < 0) return InvalidArgument("quota_bytes is negative");
  if (!IsPrintableName(c.best_metric, kMaxLabelBytes)) {
    return InvalidArgument("best_metric is empty, too long or not printable");
  }
  return OkStatus();
}

Status CheckStep(const StepRecord& step) {
  if (step.step < 0) return InvalidArgument("a negative step");
  const bool is_state = step.kind == ArtifactKind::kState;
  if (step.kind != ArtifactKind::kCheckpoint && step.kind != ArtifactKind::kMerge && !is_state) {
    return InvalidArgument("a step holds a checkpoint, a merge or a state");
  }
  if (is_state ? !IsValidGroupName(step.group) : !step.group.empty()) {
    return InvalidArgument("a state has the name of a group, and nothing else has");
  }
  for (const auto& [name, value] : step.metrics) {
    if (!IsPrintableName(name, kMaxLabelBytes)) return InvalidArgument("a metric without a name");
    if (!std::isfinite(value)) return InvalidArgument("metric '" + name + "' is not finite");
  }
  return OkStatus();
}

Status CheckMoveNames(const std::vector<AliasMove>& moves, std::string_view what) {
  std::set<std::string_view> seen;
  for (const AliasMove& move : moves) {
    if (!IsValidRouteName(move.name)) {
      return InvalidArgument(std::string(what) + ": not a name (1..256 printable bytes)");
    }
    if (!seen.insert(move.name).second) {
      return InvalidArgument(std::string(what) + " '" + move.name + "' is moved twice");
    }
  }
  return OkStatus();
}

Status CheckEval(const Eval& eval) {
  if (!IsPrintableName(eval.task, kMaxLabelBytes) ||
      !IsPrintableName(eval.metric, kMaxLabelBytes)) {
    return InvalidArgument("eval: task and metric are 1..256 printable bytes");
  }
  if (!eval.by.empty() && !IsPrintableName(eval.by, kMaxLabelBytes)) {
    return InvalidArgument("eval: 'by' is too long or not printable");
  }
  if (!std::isfinite(eval.value)) {
    return InvalidArgument("eval " + eval.task + "/" + eval.metric + ": the value is not finite");
  }
  if (eval.time_ms < 0) return InvalidArgument("eval: a negative time");
  return OkStatus();
}

Status CheckText(const std::string& text, const char* what) {
  if (text.empty() || IsPrintableName(text, kMaxLabelBytes)) return OkStatus();
  return InvalidArgument(std::string(what) + " is over 256 bytes or not printable");
}

// `what`: "probe" or "calibration".
Status CheckTexts(const ProbeSet& probe, const std::string& what) {
  if (static_cast<int64_t>(probe.texts.size()) > kMaxProbeTexts) {
    return InvalidArgument("a run has at most " + std::to_string(kMaxProbeTexts) + " " + what +
                           " texts");
  }
  STOCKPOT_RETURN_IF_ERROR(CheckText(probe.by, "texts: 'by'"));
  int64_t bytes = 0;
  for (const ProbeSet::Text& text : probe.texts) {
    if (!IsPrintableName(text.name, kMaxLabelBytes)) {
      return InvalidArgument("the name of a " + what + " text has 1..256 printable bytes");
    }
    if (text.text.empty() || !IsUtf8(text.text)) {
      return InvalidArgument("the " + what + " text '" + text.name + "' is empty or not UTF-8");
    }
    bytes += static_cast<int64_t>(text.text.size());
  }
  if (bytes <= kMaxProbeBytes) return OkStatus();
  return InvalidArgument("the " + what + " texts have " + std::to_string(bytes) +
                         " bytes, at most " + std::to_string(kMaxProbeBytes) + " are kept");
}

Status CheckRetentionParts(const Commit& commit) {
  for (const RetentionChange& change : commit.retention) {
    STOCKPOT_RETURN_IF_ERROR(CheckRetention(change.policy).WithContext("retention"));
  }
  std::set<Digest> seen;
  const auto once = [&](const Digest& artifact) {
    if (seen.insert(artifact).second) return OkStatus();
    return InvalidArgument("artifact " + artifact.ShortHex() + " is changed twice");
  };
  for (const PinChange& change : commit.pins) {
    STOCKPOT_RETURN_IF_ERROR(once(change.pin.artifact));
    STOCKPOT_RETURN_IF_ERROR(CheckText(change.pin.by, "pin: 'by'"));
    STOCKPOT_RETURN_IF_ERROR(CheckText(change.pin.why, "pin: 'why'"));
  }
  for (const Tombstone& tombstone : commit.deletions) {
    STOCKPOT_RETURN_IF_ERROR(once(tombstone.artifact));
    STOCKPOT_RETURN_IF_ERROR(CheckText(tombstone.by, "delete: 'by'"));
    STOCKPOT_RETURN_IF_ERROR(CheckText(tombstone.why, "delete: 'why'"));
    if (tombstone.purge_ms < 0) return InvalidArgument("delete: a negative time");
  }
  for (const Digest& artifact : commit.undeletions) STOCKPOT_RETURN_IF_ERROR(once(artifact));
  for (const Digest& artifact : commit.purges) STOCKPOT_RETURN_IF_ERROR(once(artifact));
  return OkStatus();
}

}  // namespace

Result<PreparedCommit> PrepareCommit(Commit commit, const LoadManifest& load) {
  PreparedCommit prepared;
  prepared.commit = std::move(commit);
  const Commit& c = prepared.commit;
  STOCKPOT_RETURN_IF_ERROR(PrepareArtifacts(prepared, load));
  for (const Run& run : c.runs) {
    STOCKPOT_RETURN_IF_ERROR(CheckRun(run).WithContext("run '" + run.name.substr(0, 128) + "'"));
  }
  std::set<std::tuple<std::string_view, int64_t, ArtifactKind, std::string_view>> steps;
  for (const StepRecord& step : c.steps) {
    Status status = CheckStep(step);
    if (status.ok() && !steps.insert({step.run, step.step, step.kind, step.group}).second) {
      status = InvalidArgument("is there twice");
    }
    if (!status.ok()) return status.WithContext(step.run + "@" + std::to_string(step.step));
  }
  STOCKPOT_RETURN_IF_ERROR(CheckMoveNames(c.aliases, "alias"));
  STOCKPOT_RETURN_IF_ERROR(CheckMoveNames(c.routes, "route"));
  std::set<std::string_view> jobs;
  for (const Job& job : c.jobs) {
    if (!IsPrintableName(job.key, kMaxJobKeyBytes)) return InvalidArgument("a job without a key");
    if (!jobs.insert(job.key).second) return InvalidArgument("job " + job.key + " is there twice");
  }
  for (const DraftChange& draft : c.drafts) {
    const Status status = draft.made.Validate();
    if (!status.ok()) return status.WithContext("draft of job " + draft.job);
  }
  for (const Eval& eval : c.evals) STOCKPOT_RETURN_IF_ERROR(CheckEval(eval));
  STOCKPOT_RETURN_IF_ERROR(CheckRetentionParts(c));
  for (const ProbeSet& texts : c.probes) STOCKPOT_RETURN_IF_ERROR(CheckTexts(texts, "probe"));
  for (const ProbeSet& texts : c.calibrations) {
    STOCKPOT_RETURN_IF_ERROR(CheckTexts(texts, "calibration"));
  }
  for (const PoolChange& change : c.pools) {
    STOCKPOT_RETURN_IF_ERROR(
        CheckPool(change.pool).WithContext("pool '" + change.pool.name.substr(0, 128) + "'"));
    const bool goes = change.pool.version == 0 && change.expected > 0;
    if (!goes && change.pool.version <= change.expected) {
      return InvalidArgument("a pool's version grows");
    }
  }
  for (const GateChange& gate : c.gates) STOCKPOT_RETURN_IF_ERROR(CheckGate(gate.config));
  for (const Event& event : c.events) {
    if (event.type.empty()) return InvalidArgument("an event without a type");
  }
  return prepared;
}

}  // namespace stockpot
