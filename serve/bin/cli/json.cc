#include "serve/bin/cli/json.h"

#include <cstdio>

#include "serve/bin/cli/output.h"

namespace stockpot::cli {
namespace {

Json Names(const std::vector<rpc::Alias>& aliases) {
  Json out = Json::array();
  for (const rpc::Alias& alias : aliases) out.push_back(alias.name);
  return out;
}

Json StepOrNull(int64_t step) { return step < 0 ? Json(nullptr) : Json(step); }

}  // namespace

const char* KindName(rpc::Kind kind) {
  switch (kind) {
    case rpc::Kind::BASE:
      return "base";
    case rpc::Kind::CHECKPOINT:
      return "checkpoint";
    case rpc::Kind::MERGE:
      return "merge";
    case rpc::Kind::VARIANT:
      return "variant";
    case rpc::Kind::ADAPTER:
      return "adapter";
    case rpc::Kind::STATE:
      return "state";
  }
  return "unknown";
}

Json ToJson(const rpc::Run& run) {
  return {{"name", run.name},
          {"base", HexDigest(run.base)},
          {"created_ms", run.created_ms},
          {"config",
           {{"merge_every", run.config.merge_every},
            {"publish", run.config.publish},
            {"best_metric", run.config.best_metric},
            {"best_is_lower", run.config.best_is_lower},
            {"merge_energy", run.config.merge_energy},
            {"merge_rank", run.config.merge_rank},
            {"compress_history", run.config.compress_history},
            {"quota_bytes", run.config.quota_bytes},
            {"merge_method", run.config.merge_method},
            {"merge_spectral", run.config.merge_spectral},
            {"publish_codec", run.config.publish_codec},
            {"publish_alpha", run.config.publish_alpha},
            {"publish_planes", run.config.publish_planes},
            {"publish_residual_rank", run.config.publish_residual_rank},
            {"publish_max_bytes", run.config.publish_max_bytes},
            {"publish_max_share", run.config.publish_max_share},
            {"publish_max_error", run.config.publish_max_error}}},
          {"tags", run.tags}};
}

Json ToJson(const rpc::Eval& eval) {
  return {{"task", eval.task},
          {"metric", eval.metric},
          {"value", eval.value},
          {"time_ms", eval.time_ms},
          {"by", eval.by}};
}

Json ToJson(const rpc::ArtifactInfo& artifact) {
  Json parents = Json::array();
  for (const rpc::Edge& edge : artifact.parents) {
    parents.push_back({{"type", edge.type}, {"digest", HexDigest(edge.parent)}});
  }
  Json children = Json::array();
  for (const rpc::Edge& edge : artifact.children) {
    children.push_back({{"type", edge.type}, {"digest", HexDigest(edge.child)}});
  }
  Json refusals = Json::array();
  for (const rpc::Refusal& refusal : artifact.refusals) {
    refusals.push_back({{"job", refusal.job},
                        {"codec", refusal.codec},
                        {"name", refusal.name},
                        {"reason", refusal.reason},
                        {"time_ms", refusal.time_ms}});
  }
  return {{"digest", HexDigest(artifact.digest)},
          {"kind", KindName(artifact.kind)},
          {"run", artifact.run},
          {"group", artifact.group},
          {"step", StepOrNull(artifact.step)},
          {"tensors", artifact.tensors},
          {"logical_bytes", artifact.logical_bytes},
          {"stored_bytes", artifact.stored_bytes},
          {"parents", parents},
          {"children", children},
          {"aliases", Names(artifact.aliases)},
          {"routes", Names(artifact.routes)},
          {"metrics", artifact.metrics},
          {"evals", ToJsonArray(artifact.evals)},
          {"attributes", artifact.attributes},
          {"purge_ms", artifact.purge_ms},
          {"pinned", artifact.pinned},
          {"compressed", artifact.compressed},
          {"refusals", refusals}};
}

Json ToJson(const rpc::LogEntry& entry) {
  return {{"step", entry.step.step},
          {"kind", KindName(entry.step.kind)},
          {"committed_ms", entry.step.committed_ms},
          {"metrics", entry.step.metrics},
          {"artifact", ToJson(entry.artifact)},
          {"variants", ToJsonArray(entry.variants)},
          {"states", ToJsonArray(entry.states)}};
}

Json ToJson(const rpc::Job& job) {
  return {{"key", job.key},
          {"kind", job.kind},
          {"state", job.state},
          {"share", job.share},
          {"attempts", job.attempts},
          {"error", job.error},
          {"result", job.result},
          {"arguments", job.arguments},
          {"created_ms", job.created_ms},
          {"finished_ms", job.finished_ms}};
}

Json ToJson(const rpc::Event& event) {
  return {{"sequence", event.sequence},
          {"time_ms", event.time_ms},
          {"type", event.type},
          {"subject", event.subject},
          {"fields", event.fields}};
}

Json ToJson(const rpc::DaemonStatus& status) {
  Json served = Json::array();
  for (const rpc::ServedModel& model : status.served) {
    served.push_back({{"name", model.name},
                      {"digest", model.digest},
                      {"state", model.state},
                      {"resident_bytes", model.resident_bytes}});
  }
  Json gatherings = Json::array();
  for (const rpc::Gathering& gathering : status.gatherings) {
    gatherings.push_back({{"run", gathering.key.run},
                          {"step", gathering.key.step},
                          {"world", gathering.key.world},
                          {"attempt", gathering.key.attempt},
                          {"missing", gathering.missing},
                          {"opened_ms", gathering.opened_ms},
                          {"expires_ms", gathering.expires_ms}});
  }
  return {{"version", status.version},
          {"uptime_ms", status.uptime_ms},
          {"base", status.base},
          {"base_state", status.base_state},
          {"runs", status.runs},
          {"artifacts", status.artifacts},
          {"chunks", status.chunks},
          {"chunk_bytes", status.chunk_bytes},
          {"stored_chunk_bytes", status.stored_chunk_bytes},
          {"quota_bytes", status.quota_bytes},
          {"pack_bytes", status.pack_bytes},
          {"open_sessions", status.open_sessions},
          {"gatherings", gatherings},
          {"jobs", ToJsonArray(status.jobs)},
          {"served", served},
          {"devices", status.devices},
          {"http_address", status.http_address},
          {"thrift_address", status.thrift_address}};
}

Json ToJson(const rpc::ScrubReply& reply) {
  Json damaged = Json::array();
  for (const rpc::Damage& damage : reply.damaged) {
    damaged.push_back({{"chunk", HexDigest(damage.chunk)},
                       {"error", damage.error},
                       {"needed_by", damage.needed_by},
                       {"repaired", damage.repaired}});
  }
  return {{"chunks", reply.chunks}, {"bytes", reply.bytes}, {"damaged", damaged}};
}

Json ToJson(const rpc::RetentionReport& report) {
  Json best = Json::array();
  for (const rpc::BestRule& rule : report.policy.best) {
    best.push_back({{"metric", rule.metric}, {"lower", rule.lower}, {"keep", rule.keep}});
  }
  Json groups = Json::array();
  for (const rpc::GroupRule& rule : report.policy.groups) {
    groups.push_back({{"group", rule.group}, {"keep_last", rule.keep_last}, {"every", rule.every}});
  }
  Json fates = Json::array();
  for (const rpc::Fate& fate : report.fates) {
    fates.push_back({{"artifact", HexDigest(fate.artifact)},
                     {"kind", KindName(fate.kind)},
                     {"step", StepOrNull(fate.step)},
                     {"group", fate.group},
                     {"reasons", fate.reasons},
                     {"purge_ms", fate.purge_ms},
                     {"stored_bytes", fate.stored_bytes}});
  }
  return {{"policy",
           {{"keep_last", report.policy.keep_last},
            {"best", best},
            {"every", report.policy.every},
            {"groups", groups},
            {"grace_ms", report.policy.grace_ms}}},
          {"artifacts", fates}};
}

Json ToJson(const rpc::ProbeSet& probe) {
  Json texts = Json::array();
  for (const rpc::ProbeText& text : probe.texts) {
    texts.push_back({{"name", text.name}, {"bytes", text.text.size()}, {"text", text.text}});
  }
  return {{"run", probe.run},
          {"digest", HexDigest(probe.digest)},
          {"time_ms", probe.time_ms},
          {"by", probe.by},
          {"texts", texts}};
}

Json ToJson(const rpc::Gate& gate) {
  return {{"max_kl", gate.max_kl},           {"min_top1", gate.min_top1},
          {"max_loss_rise", gate.max_loss_rise}, {"max_update", gate.max_update},
          {"min_update", gate.min_update},   {"max_error", gate.max_error}};
}

Json ToJson(const rpc::GcReply& reply) {
  const auto digests = [](const std::vector<std::string>& raw) {
    Json out = Json::array();
    for (const std::string& digest : raw) out.push_back(HexDigest(digest));
    return out;
  };
  Json purged = Json::array();
  for (const rpc::GoneArtifact& gone : reply.purged) {
    purged.push_back({{"artifact", HexDigest(gone.artifact)},
                      {"purge_ms", gone.purge_ms},
                      {"kind", KindName(gone.kind)},
                      {"run", gone.run},
                      {"step", StepOrNull(gone.step)},
                      {"group", gone.group},
                      {"bytes", gone.bytes}});
  }
  return {{"deleted", digests(reply.deleted)},
          {"undeleted", digests(reply.undeleted)},
          {"purged", purged},
          {"chunks", reply.chunks},
          {"chunk_bytes", reply.chunk_bytes},
          {"packs_compacted", reply.packs_compacted},
          {"packs_removed", reply.packs_removed},
          {"copied_bytes", reply.copied_bytes},
          {"pack_bytes_before", reply.pack_bytes_before},
          {"pack_bytes_after", reply.pack_bytes_after}};
}

Json ToJson(const rpc::BackupReply& reply) {
  return {{"artifacts", reply.artifacts},
          {"total_chunks", reply.total_chunks},
          {"copied_chunks", reply.copied_chunks},
          {"copied_bytes", reply.copied_bytes},
          {"event", reply.event}};
}

Json ToJson(const UploadReport& report) {
  return {{"artifact", HexDigest(report.commit.artifact)},
          {"existed", report.commit.existed},
          {"event_sequence", report.commit.event_sequence},
          {"total_bytes", report.bytes.total_bytes},
          {"sent_bytes", report.bytes.sent_bytes}};
}

Json ToJson(const rpc::Alias& alias, const char* target) {
  return {{"name", alias.name},
          {target, HexDigest(alias.target)},
          {"moved_ms", alias.moved_ms},
          {"moved_by", alias.moved_by}};
}

void PrintJson(const Json& json, bool compact) {
  const std::string text =
      json.dump(compact ? -1 : 2, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

}  // namespace stockpot::cli
