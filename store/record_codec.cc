#include "store/record_codec.h"

#include <exception>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "store/json_integer.h"
#include "store/run_config_json.h"

namespace stockpot {
namespace {

using nlohmann::json;

// Texts of events and jobs may quote anything; bytes that are not UTF-8 become U+FFFD.
std::string Dump(const json& j) { return j.dump(-1, ' ', false, json::error_handler_t::replace); }

// Runs `fill` over the parsed object; whatever it throws is damage, since we wrote the record.
template <typename T, typename Fill>
Result<T> Decode(std::string_view text, std::string_view what, Fill fill) {
  T record;
  try {
    const json j = json::parse(text);
    fill(j, record);
  } catch (const std::exception& e) {
    return Corruption(std::string(what) + " record: " + e.what());
  }
  return record;
}

template <typename T>
void Read(const json& j, const char* key, T& value) {
  const auto it = j.find(key);
  if (it == j.end()) return;
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    value = IntegerOrThrow<T>(*it);
  } else {
    it->get_to(value);
  }
}

// The helpers below throw the Status of a bad name as text: Decode turns it into Corruption.
template <typename T>
T ValueOrThrow(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().message());
  return std::move(result).value();
}

Digest ReadDigest(const json& j, const char* key) {
  return ValueOrThrow(Digest::FromHex(j.at(key).get<std::string>()));
}

std::string ReadName(const json& j, const char* key) { return j.at(key).get<std::string>(); }

}  // namespace

std::string EncodeRun(const Run& run) {
  json j = ToJson(run.config);
  j.update({{"name", run.name},
            {"base", run.base.Hex()},
            {"tags", run.tags},
            {"created_ms", run.created_ms}});
  return Dump(j);
}

Result<Run> DecodeRun(std::string_view text) {
  return Decode<Run>(text, "run", [](const json& j, Run& run) {
    run.name = ReadName(j, "name");
    run.base = ReadDigest(j, "base");
    Read(j, "tags", run.tags);
    Read(j, "created_ms", run.created_ms);
    run.config = ValueOrThrow(RunConfigFromJson(j));
  });
}

std::string EncodeStep(const StepRecord& step) {
  json j = {{"run", step.run},
            {"step", step.step},
            {"kind", ArtifactKindName(step.kind)},
            {"group", step.group},
            {"artifact", step.artifact.Hex()},
            {"metrics", step.metrics},
            {"committed_ms", step.committed_ms}};
  if (step.world > 1) {
    j["world"] = step.world;
    j["attempt"] = step.attempt;
  }
  return Dump(j);
}

Result<StepRecord> DecodeStep(std::string_view text) {
  return Decode<StepRecord>(text, "step", [](const json& j, StepRecord& step) {
    step.run = ReadName(j, "run");
    step.step = IntegerOrThrow<int64_t>(j.at("step"));
    step.kind = ValueOrThrow(ArtifactKindFromName(ReadName(j, "kind")));
    Read(j, "group", step.group);
    step.artifact = ReadDigest(j, "artifact");
    Read(j, "metrics", step.metrics);
    Read(j, "committed_ms", step.committed_ms);
    Read(j, "world", step.world);
    Read(j, "attempt", step.attempt);
  });
}

std::string EncodeResume(const ResumeDecision& decision) {
  return Dump({{"run", decision.run},
               {"key", decision.key},
               {"artifact", decision.artifact.IsZero() ? "" : decision.artifact.Hex()},
               {"step", decision.step},
               {"decided_ms", decision.decided_ms}});
}

Result<ResumeDecision> DecodeResume(std::string_view text) {
  return Decode<ResumeDecision>(text, "resume", [](const json& j, ResumeDecision& decision) {
    decision.run = ReadName(j, "run");
    decision.key = ReadName(j, "key");
    if (!ReadName(j, "artifact").empty()) decision.artifact = ReadDigest(j, "artifact");
    decision.step = IntegerOrThrow<int64_t>(j.at("step"));
    decision.decided_ms = IntegerOrThrow<int64_t>(j.at("decided_ms"));
  });
}

std::string EncodeAlias(const Alias& alias) {
  return Dump({{"artifact", alias.artifact.Hex()},
               {"moved_ms", alias.moved_ms},
               {"moved_by", alias.moved_by}});
}

Result<Alias> DecodeAlias(std::string_view name, std::string_view text) {
  return Decode<Alias>(text, "alias", [&](const json& j, Alias& alias) {
    alias.name = name;
    alias.artifact = ReadDigest(j, "artifact");
    Read(j, "moved_ms", alias.moved_ms);
    Read(j, "moved_by", alias.moved_by);
  });
}

std::string EncodeEvent(const Event& event) {
  return Dump({{"sequence", event.sequence},
               {"time_ms", event.time_ms},
               {"type", event.type},
               {"subject", event.subject},
               {"fields", event.fields}});
}

Result<Event> DecodeEvent(std::string_view text) {
  return Decode<Event>(text, "event", [](const json& j, Event& event) {
    event.sequence = IntegerOrThrow<int64_t>(j.at("sequence"));
    Read(j, "time_ms", event.time_ms);
    Read(j, "type", event.type);
    Read(j, "subject", event.subject);
    Read(j, "fields", event.fields);
  });
}

std::string EncodeJob(const Job& job) {
  return Dump({{"key", job.key},
               {"kind", JobKindName(job.kind)},
               {"args", job.args},
               {"state", JobStateName(job.state)},
               {"sequence", job.sequence},
               {"attempts", job.attempts},
               {"error", job.error},
               {"result", job.result},
               {"created_ms", job.created_ms},
               {"finished_ms", job.finished_ms}});
}

Result<Job> DecodeJob(std::string_view text) {
  return Decode<Job>(text, "job", [](const json& j, Job& job) {
    job.key = ReadName(j, "key");
    job.kind = ValueOrThrow(JobKindFromName(ReadName(j, "kind")));
    job.state = ValueOrThrow(JobStateFromName(ReadName(j, "state")));
    Read(j, "args", job.args);
    Read(j, "sequence", job.sequence);
    Read(j, "attempts", job.attempts);
    Read(j, "error", job.error);
    Read(j, "result", job.result);
    Read(j, "created_ms", job.created_ms);
    Read(j, "finished_ms", job.finished_ms);
  });
}

std::string EncodeEval(const Eval& eval) {
  return Dump({{"artifact", eval.artifact.Hex()},
               {"task", eval.task},
               {"metric", eval.metric},
               {"value", eval.value},
               {"time_ms", eval.time_ms},
               {"by", eval.by}});
}

Result<Eval> DecodeEval(std::string_view text) {
  return Decode<Eval>(text, "eval", [](const json& j, Eval& eval) {
    eval.artifact = ReadDigest(j, "artifact");
    eval.task = ReadName(j, "task");
    eval.metric = ReadName(j, "metric");
    eval.value = j.at("value").get<double>();
    Read(j, "time_ms", eval.time_ms);
    Read(j, "by", eval.by);
  });
}

std::string EncodeRetention(const RetentionPolicy& policy) {
  json best = json::array();
  for (const RetentionPolicy::Best& rule : policy.best) {
    best.push_back({{"metric", rule.metric}, {"lower", rule.lower}, {"keep", rule.keep}});
  }
  json groups = json::array();
  for (const RetentionPolicy::Group& rule : policy.groups) {
    groups.push_back({{"group", rule.group}, {"keep_last", rule.keep_last}, {"every", rule.every}});
  }
  return Dump({{"keep_last", policy.keep_last},
               {"best", best},
               {"every", policy.every},
               {"groups", groups},
               {"grace_ms", policy.grace_ms}});
}

Result<RetentionPolicy> DecodeRetention(std::string_view text) {
  return Decode<RetentionPolicy>(text, "retention", [](const json& j, RetentionPolicy& policy) {
    // No key may be missing here: a rule that is not read would delete what it keeps.
    policy.keep_last = IntegerOrThrow<int64_t>(j.at("keep_last"));
    policy.every = IntegerOrThrow<int64_t>(j.at("every"));
    policy.grace_ms = IntegerOrThrow<int64_t>(j.at("grace_ms"));
    for (const json& rule : j.at("best")) {
      policy.best.push_back({.metric = ReadName(rule, "metric"),
                             .lower = rule.at("lower").get<bool>(),
                             .keep = IntegerOrThrow<int64_t>(rule.at("keep"))});
    }
    // Policies of before there were groups have none.
    for (const json& rule : j.value("groups", json::array())) {
      policy.groups.push_back({.group = ReadName(rule, "group"),
                               .keep_last = IntegerOrThrow<int64_t>(rule.at("keep_last")),
                               .every = IntegerOrThrow<int64_t>(rule.at("every"))});
    }
  });
}

std::string EncodeGate(const GateConfig& gate) {
  return Dump({{"max_kl", gate.max_kl},
               {"min_top1", gate.min_top1},
               {"max_loss_rise", gate.max_loss_rise},
               {"max_update", gate.max_update},
               {"min_update", gate.min_update},
               {"max_error", gate.max_error}});
}

Result<GateConfig> DecodeGate(std::string_view text) {
  return Decode<GateConfig>(text, "gate", [](const json& j, GateConfig& gate) {
    // No key may be missing here: a limit that is not read would let through what it refuses.
    gate.max_kl = j.at("max_kl").get<double>();
    gate.min_top1 = j.at("min_top1").get<double>();
    gate.max_loss_rise = j.at("max_loss_rise").get<double>();
    gate.max_update = j.at("max_update").get<double>();
    gate.min_update = j.at("min_update").get<double>();
    gate.max_error = j.at("max_error").get<double>();
  });
}

std::string EncodeProbe(const ProbeSet& probe) {
  json texts = json::array();
  for (const ProbeSet::Text& text : probe.texts) {
    texts.push_back({{"name", text.name}, {"text", text.text}});
  }
  return Dump({{"run", probe.run}, {"texts", texts}, {"time_ms", probe.time_ms}, {"by", probe.by}});
}

Result<ProbeSet> DecodeProbe(std::string_view text) {
  return Decode<ProbeSet>(text, "probe", [](const json& j, ProbeSet& probe) {
    probe.run = ReadName(j, "run");
    for (const json& entry : j.at("texts")) {
      probe.texts.push_back({.name = ReadName(entry, "name"), .text = ReadName(entry, "text")});
    }
    Read(j, "time_ms", probe.time_ms);
    Read(j, "by", probe.by);
  });
}

std::string EncodePin(const Pin& pin) {
  return Dump({{"time_ms", pin.time_ms}, {"by", pin.by}, {"why", pin.why}});
}

Result<Pin> DecodePin(const Digest& artifact, std::string_view text) {
  return Decode<Pin>(text, "pin", [&](const json& j, Pin& pin) {
    pin.artifact = artifact;
    Read(j, "time_ms", pin.time_ms);
    Read(j, "by", pin.by);
    Read(j, "why", pin.why);
  });
}

std::string EncodeTombstone(const Tombstone& tombstone) {
  return Dump({{"deleted_ms", tombstone.deleted_ms},
               {"purge_ms", tombstone.purge_ms},
               {"by", tombstone.by},
               {"why", tombstone.why}});
}

Result<Tombstone> DecodeTombstone(const Digest& artifact, std::string_view text) {
  return Decode<Tombstone>(text, "tombstone", [&](const json& j, Tombstone& tombstone) {
    tombstone.artifact = artifact;
    tombstone.deleted_ms = IntegerOrThrow<int64_t>(j.at("deleted_ms"));
    tombstone.purge_ms = IntegerOrThrow<int64_t>(j.at("purge_ms"));
    Read(j, "by", tombstone.by);
    Read(j, "why", tombstone.why);
  });
}

}  // namespace stockpot
