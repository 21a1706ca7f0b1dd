#include "thrift/conversions.h"

#include <array>
#include <type_traits>

#include "store/names.h"
#include "store/publish_options.h"
#include "thrift/limits.h"

namespace stockpot {
namespace {

static_assert(static_cast<int>(GatherState::kOpen) == static_cast<int>(rpc::GatherState::OPEN) &&
              static_cast<int>(GatherState::kFailed) == static_cast<int>(rpc::GatherState::FAILED));

// Any number of the wire is one of their values (thrift/CMakeLists.txt).
static_assert(std::is_same_v<std::underlying_type_t<rpc::ErrorCode>, int32_t> &&
              std::is_same_v<std::underlying_type_t<rpc::Kind>, int32_t> &&
              std::is_same_v<std::underlying_type_t<rpc::GatherState>, int32_t>);

constexpr std::array kKinds = {ArtifactKind::kBase, ArtifactKind::kCheckpoint, ArtifactKind::kMerge,
                               ArtifactKind::kVariant, ArtifactKind::kAdapter, ArtifactKind::kState};

Result<TensorEntry> TensorFromRpc(const rpc::Tensor& tensor) {
  const std::string what = "tensor '" + tensor.name.substr(0, kMaxNameBytes) + "'";
  TensorEntry entry;
  entry.name = tensor.name;
  const std::optional<DType> dtype = DTypeFromName(tensor.dtype);
  if (!dtype) return InvalidArgument(what + ": unknown dtype '" + tensor.dtype.substr(0, 32) + "'");
  entry.dtype = *dtype;
  const bool is_piece = !tensor.global_shape.empty() || !tensor.offsets.empty();
  entry.shape = is_piece ? tensor.global_shape : tensor.shape;
  entry.alias_of = tensor.alias_of;
  STOCKPOT_ASSIGN_OR_RETURN(Part part, PartFromRpc(tensor.data, what));
  if (!entry.alias_of.empty()) {
    if (part.bytes == 0 && part.chunks.empty()) return entry;
    return InvalidArgument(what + ": an alias carries no data");
  }
  if (is_piece) entry.pieces.push_back({tensor.offsets, tensor.shape});
  entry.parts[is_piece ? PieceRole(0) : "data"] = std::move(part);
  return entry;
}

}  // namespace

Result<ArtifactKind> KindFromRpc(rpc::Kind kind) {
  const auto index = static_cast<size_t>(kind);
  if (index >= kKinds.size()) {
    return InvalidArgument("unknown kind " + std::to_string(static_cast<int>(kind)));
  }
  return kKinds[index];
}

Result<RunConfig> RunConfigFromRpc(const rpc::RunConfig& config) {
  RunConfig out;
  out.merge_every = config.merge_every;
  if (out.merge_every < 0) return InvalidArgument("merge_every is negative: 0 turns merges off");
  STOCKPOT_ASSIGN_OR_RETURN(out.publish, PublishPolicyFromName(config.publish));
  out.best_metric = config.best_metric;
  if (out.best_metric.empty() || out.best_metric.size() > kMaxNameBytes) {
    return InvalidArgument("best_metric must have 1..512 bytes");
  }
  out.best_is_lower = config.best_is_lower;
  out.merge_energy = config.merge_energy;
  if (!(out.merge_energy > 0 && out.merge_energy <= 1)) {
    return InvalidArgument("merge_energy must be in (0, 1]");
  }
  out.merge_rank = config.merge_rank;
  if (out.merge_rank < 0) return InvalidArgument("merge_rank is negative: 0 goes by energy");
  out.compress_history = config.compress_history;
  out.quota_bytes = config.quota_bytes;
  if (out.quota_bytes < 0) return InvalidArgument("quota_bytes is negative: 0 sets no quota");
  STOCKPOT_ASSIGN_OR_RETURN(out.merge_method, MergeMethodFromName(config.merge_method));
  out.merge_spectral = config.merge_spectral;
  if (!(out.merge_spectral >= 0 && out.merge_spectral <= 1)) {
    return InvalidArgument("merge_spectral must be in [0, 1]: 0 goes by the effective rank");
  }
  STOCKPOT_ASSIGN_OR_RETURN(out.publish_codec, PublishCodecFromName(config.publish_codec));
  out.publish_options = {.planes = config.publish_planes,
                         .residual_rank = config.publish_residual_rank,
                         .max_bytes = config.publish_max_bytes,
                         .max_share = config.publish_max_share,
                         .max_error = config.publish_max_error};
  STOCKPOT_ASSIGN_OR_RETURN(out.publish_options.alpha, AlphaMethodFromName(config.publish_alpha));
  STOCKPOT_RETURN_IF_ERROR(CheckPublishOptions(out.publish_codec, out.publish_options)
                               .WithContext("what the run publishes"));
  return out;
}

Result<PublishHow> PublishHowFromRpc(const std::string& codec, const rpc::PublishOptions& options,
                                     const RunConfig& of_run) {
  PublishHow how;
  if (codec.empty()) {
    how = {of_run.publish_codec, of_run.publish_options};
  } else {
    STOCKPOT_ASSIGN_OR_RETURN(how.codec, PublishCodecFromName(codec));
    if (UsesPlanes(how.codec)) how.options.alpha = of_run.publish_options.alpha;
  }
  if (!options.alpha.empty()) {
    STOCKPOT_ASSIGN_OR_RETURN(how.options.alpha, AlphaMethodFromName(options.alpha));
  }
  const PublishOptions defaults;
  const auto take = [](auto asked, auto none, auto& value) {
    if (asked != none) value = asked;
  };
  take(options.planes, defaults.planes, how.options.planes);
  take(options.residual_rank, defaults.residual_rank, how.options.residual_rank);
  take(options.max_bytes, defaults.max_bytes, how.options.max_bytes);
  take(options.max_share, defaults.max_share, how.options.max_share);
  take(options.max_error, defaults.max_error, how.options.max_error);
  STOCKPOT_RETURN_IF_ERROR(CheckPublishOptions(how.codec, how.options));
  return how;
}

Result<MergeOptions> MergeOptionsFromRpc(const rpc::MergeOptions& options) {
  MergeOptions out;
  STOCKPOT_ASSIGN_OR_RETURN(out.method, MergeMethodFromName(options.method));
  out.weights = options.weights;
  out.spectral = options.spectral;
  return out;
}

Result<SessionRequest> SessionRequestFromRpc(const rpc::SessionRequest& request) {
  SessionRequest out;
  STOCKPOT_ASSIGN_OR_RETURN(out.kind, KindFromRpc(request.kind));
  out.run = request.run;
  out.step = request.step;
  out.rank = request.rank;
  out.world = request.world;
  out.attempt = request.attempt;
  out.base = request.base;
  if (request.__isset.resumed_from) {
    STOCKPOT_ASSIGN_OR_RETURN(out.resumed_from, Digest::FromRaw(request.resumed_from));
  }
  return out;
}

Result<StepKey> StepKeyFromRpc(const rpc::StepKey& key) {
  for (const std::string* text : {&key.run, &key.attempt}) {
    if (text->size() <= kMaxAttemptBytes) continue;
    return InvalidArgument("the run's or the attempt's name is over " +
                           std::to_string(kMaxAttemptBytes) + " bytes");
  }
  return StepKey{key.run, key.step, key.world, key.attempt};
}

Result<std::vector<Digest>> DigestsFromRpc(const std::vector<std::string>& raw) {
  std::vector<Digest> digests;
  digests.reserve(raw.size());
  for (const std::string& bytes : raw) {
    STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, Digest::FromRaw(bytes));
    digests.push_back(digest);
  }
  return digests;
}

Result<Part> PartFromRpc(const rpc::Part& part, const std::string& what) {
  Part out;
  out.bytes = part.bytes;
  Result<std::vector<Digest>> chunks = DigestsFromRpc(part.chunks);
  if (!chunks.ok()) return chunks.status().WithContext(what);
  out.chunks = *std::move(chunks);
  if (out.bytes < 0 || out.bytes > kMaxTensorBytes ||
      ChunkCount(out.bytes) != static_cast<int64_t>(out.chunks.size())) {
    return InvalidArgument(what + ": " + std::to_string(out.bytes) + " bytes cannot be " +
                           std::to_string(out.chunks.size()) + " chunks");
  }
  return out;
}

Result<ShardCommit> ShardFromRpc(const rpc::Shard& shard) {
  ShardCommit out;
  for (const rpc::Tensor& tensor : shard.tensors) {
    if (!tensor.group.empty() && !IsValidGroupName(tensor.group)) {
      return InvalidArgument("tensor '" + tensor.name.substr(0, kMaxNameBytes) + "': '" +
                             tensor.group.substr(0, 64) + "' is no name of a group");
    }
  }
  out.tensors.reserve(shard.tensors.size());
  for (const rpc::Tensor& tensor : shard.tensors) {
    STOCKPOT_ASSIGN_OR_RETURN(TensorEntry entry, TensorFromRpc(tensor));
    (tensor.group.empty() ? out.tensors : out.states[tensor.group]).push_back(std::move(entry));
  }
  for (const auto& [name, part] : shard.files) {
    STOCKPOT_ASSIGN_OR_RETURN(out.files[name],
                              PartFromRpc(part, "file '" + name.substr(0, kMaxNameBytes) + "'"));
  }
  // Also those that are not finite: the sessions drop and name them (store/ingest.h), since a loss
  // of NaN must not cost the checkpoint.
  out.metrics.insert(shard.metrics.begin(), shard.metrics.end());
  return out;
}

Result<RetentionPolicy> RetentionPolicyFromRpc(const rpc::RetentionPolicy& policy) {
  RetentionPolicy out;
  out.keep_last = policy.keep_last;
  for (const rpc::BestRule& rule : policy.best) {
    out.best.push_back({rule.metric, rule.lower, rule.keep});
  }
  out.every = policy.every;
  out.grace_ms = policy.grace_ms;
  for (const rpc::GroupRule& rule : policy.groups) {
    out.groups.push_back({rule.group, rule.keep_last, rule.every});
  }
  return out;  // the store checks the values
}

rpc::Kind ToRpc(ArtifactKind kind) {
  switch (kind) {
    case ArtifactKind::kBase:
      return rpc::Kind::BASE;
    case ArtifactKind::kCheckpoint:
      return rpc::Kind::CHECKPOINT;
    case ArtifactKind::kMerge:
      return rpc::Kind::MERGE;
    case ArtifactKind::kVariant:
      return rpc::Kind::VARIANT;
    case ArtifactKind::kAdapter:
      return rpc::Kind::ADAPTER;
    case ArtifactKind::kState:
      return rpc::Kind::STATE;
  }
  return rpc::Kind::CHECKPOINT;
}

rpc::RunConfig ToRpc(const RunConfig& config) {
  rpc::RunConfig out;
  out.merge_every = config.merge_every;
  out.publish = PublishPolicyName(config.publish);
  out.best_metric = config.best_metric;
  out.best_is_lower = config.best_is_lower;
  out.merge_energy = config.merge_energy;
  out.merge_rank = config.merge_rank;
  out.compress_history = config.compress_history;
  out.quota_bytes = config.quota_bytes;
  out.merge_method = MergeMethodName(config.merge_method);
  out.merge_spectral = config.merge_spectral;
  out.publish_codec = PublishCodecName(config.publish_codec);
  out.publish_alpha = AlphaMethodName(config.publish_options.alpha);
  out.publish_planes = config.publish_options.planes;
  out.publish_residual_rank = config.publish_options.residual_rank;
  out.publish_max_bytes = config.publish_options.max_bytes;
  out.publish_max_share = config.publish_options.max_share;
  out.publish_max_error = config.publish_options.max_error;
  return out;
}

rpc::Run ToRpc(const Run& run) {
  rpc::Run out;
  out.name = run.name;
  out.base = RawBytes(run.base);
  out.config = ToRpc(run.config);
  out.tags = run.tags;
  out.created_ms = run.created_ms;
  return out;
}

rpc::Part ToRpc(const Part& part) {
  rpc::Part out;
  out.bytes = part.bytes;
  for (const Digest& chunk : part.chunks) out.chunks.push_back(RawBytes(chunk));
  return out;
}

rpc::Step ToRpc(const StepRecord& step) {
  rpc::Step out;
  out.run = step.run;
  out.step = step.step;
  out.kind = ToRpc(step.kind);
  out.artifact = RawBytes(step.artifact);
  out.metrics = step.metrics;
  out.committed_ms = step.committed_ms;
  out.group = step.group;
  return out;
}

rpc::Edge ToRpc(const Edge& edge) {
  rpc::Edge out;
  out.type = EdgeTypeName(edge.type);
  out.child = RawBytes(edge.child);
  out.parent = RawBytes(edge.parent);
  return out;
}

rpc::Alias ToRpc(const Alias& alias) {
  rpc::Alias out;
  out.name = alias.name;
  out.target = RawBytes(alias.artifact);
  out.moved_ms = alias.moved_ms;
  out.moved_by = alias.moved_by;
  return out;
}

rpc::Alias ToRpc(const Route& route) {
  rpc::Alias out;
  out.name = route.name;
  out.target = RawBytes(route.variant);
  out.moved_ms = route.moved_ms;
  out.moved_by = route.moved_by;
  return out;
}

rpc::Eval ToRpc(const Eval& eval) {
  rpc::Eval out;
  out.task = eval.task;
  out.metric = eval.metric;
  out.value = eval.value;
  out.time_ms = eval.time_ms;
  out.by = eval.by;
  return out;
}

rpc::Job ToRpc(const Job& job) {
  rpc::Job out;
  out.key = job.key;
  out.kind = JobKindName(job.kind);
  out.state = JobStateName(job.state);
  out.attempts = job.attempts;
  out.error = job.error;
  out.result = job.result;
  out.share = job.state == JobState::kDone ? 1 : 0;
  out.arguments = job.args;
  out.created_ms = job.created_ms;
  out.finished_ms = job.finished_ms;
  return out;
}

rpc::Event ToRpc(const Event& event) {
  rpc::Event out;
  out.sequence = event.sequence;
  out.time_ms = event.time_ms;
  out.type = event.type;
  out.subject = event.subject;
  out.fields = event.fields;
  return out;
}

rpc::ScrubReply ToRpc(const ScrubReport& report) {
  rpc::ScrubReply out;
  out.chunks = report.chunks;
  out.bytes = report.bytes;
  for (const ScrubReport::Damage& damage : report.damaged) {
    rpc::Damage& entry = out.damaged.emplace_back();
    entry.chunk = RawBytes(damage.chunk);
    entry.error = damage.error;
    entry.needed_by = damage.needed_by;
    entry.repaired = damage.repaired;
  }
  return out;
}

rpc::CommitReply ToRpc(const CommitReply& reply) {
  rpc::CommitReply out;
  if (reply.complete) out.artifact = RawBytes(reply.artifact);
  out.event_sequence = reply.event_sequence;
  out.existed = reply.existed;
  out.complete = reply.complete;
  out.missing = reply.missing;
  for (const auto& [group, artifact] : reply.states) out.states[group] = RawBytes(artifact);
  return out;
}

rpc::StepState ToRpc(const StepState& state) {
  rpc::StepState out;
  out.state = static_cast<rpc::GatherState>(state.state);
  if (state.state == GatherState::kComplete) out.artifact = RawBytes(state.artifact);
  out.event_sequence = state.event_sequence;
  out.missing = state.missing;
  out.why = state.why;
  return out;
}

rpc::Gathering ToRpc(const OpenGathering& gathering) {
  rpc::Gathering out;
  out.key.run = gathering.key.run;
  out.key.step = gathering.key.step;
  out.key.world = gathering.key.world;
  out.key.attempt = gathering.key.attempt;
  out.missing = gathering.missing;
  out.opened_ms = gathering.opened_ms;
  out.expires_ms = gathering.expires_ms;
  return out;
}

rpc::ResumePoint ToRpc(const ResumeDecision& decision) {
  rpc::ResumePoint out;
  if (!decision.artifact.IsZero()) out.artifact = RawBytes(decision.artifact);
  out.step = decision.step;
  out.decided_ms = decision.decided_ms;
  return out;
}

rpc::RetentionPolicy ToRpc(const RetentionPolicy& policy) {
  rpc::RetentionPolicy out;
  out.keep_last = policy.keep_last;
  for (const RetentionPolicy::Best& rule : policy.best) {
    rpc::BestRule& entry = out.best.emplace_back();
    entry.metric = rule.metric;
    entry.lower = rule.lower;
    entry.keep = rule.keep;
  }
  out.every = policy.every;
  out.grace_ms = policy.grace_ms;
  for (const RetentionPolicy::Group& rule : policy.groups) {
    rpc::GroupRule& entry = out.groups.emplace_back();
    entry.group = rule.group;
    entry.keep_last = rule.keep_last;
    entry.every = rule.every;
  }
  return out;
}

rpc::ProbeSet ToRpc(const ProbeSet& probe) {
  rpc::ProbeSet out;
  out.run = probe.run;
  for (const ProbeSet::Text& text : probe.texts) {
    rpc::ProbeText& entry = out.texts.emplace_back();
    entry.name = text.name;
    entry.text = text.text;
  }
  if (!probe.texts.empty()) out.digest = RawBytes(probe.digest());
  out.time_ms = probe.time_ms;
  out.by = probe.by;
  return out;
}

GateConfig GateFromRpc(const rpc::Gate& gate) {
  return {.max_kl = gate.max_kl,
          .min_top1 = gate.min_top1,
          .max_loss_rise = gate.max_loss_rise,
          .max_update = gate.max_update,
          .min_update = gate.min_update,
          .max_error = gate.max_error};
}

rpc::Gate ToRpc(const GateConfig& gate) {
  rpc::Gate out;
  out.max_kl = gate.max_kl;
  out.min_top1 = gate.min_top1;
  out.max_loss_rise = gate.max_loss_rise;
  out.max_update = gate.max_update;
  out.min_update = gate.min_update;
  out.max_error = gate.max_error;
  return out;
}

rpc::GcReply ToRpc(const RetentionChanges& changes, const GarbageReport& report) {
  rpc::GcReply out;
  for (const Digest& digest : changes.deleted) out.deleted.push_back(RawBytes(digest));
  for (const Digest& digest : changes.undeleted) out.undeleted.push_back(RawBytes(digest));
  for (const GarbageReport::Gone& gone : report.artifacts) {
    rpc::GoneArtifact& entry = out.purged.emplace_back();
    entry.artifact = RawBytes(gone.artifact);
    entry.kind = ToRpc(gone.kind);
    entry.run = gone.run;
    entry.step = gone.step;
    entry.group = gone.group;
    entry.bytes = gone.bytes;
    entry.purge_ms = gone.purge_ms;
  }
  out.chunks = report.chunks;
  out.chunk_bytes = report.chunk_bytes;
  out.packs_compacted = report.packs_compacted;
  out.packs_removed = report.packs_removed;
  out.copied_bytes = report.copied_bytes;
  out.pack_bytes_before = report.pack_bytes_before;
  out.pack_bytes_after = report.pack_bytes_after;
  return out;
}

}  // namespace stockpot
