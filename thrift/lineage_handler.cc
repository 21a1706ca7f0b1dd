#include <algorithm>

#include "store/policy.h"
#include "store/retention.h"
#include "store/variant_gate.h"
#include "thrift/conversions.h"
#include "thrift/handlers.h"

namespace stockpot {
namespace {

// What a manifest says in short. Immutable, so it is read once.
struct Summary {
  ArtifactKind kind = ArtifactKind::kCheckpoint;
  std::string run;
  int64_t step = -1;
  std::string group;
  int64_t tensors = 0;
  int64_t logical_bytes = 0;
  int64_t stored_bytes = 0;
  std::map<std::string, std::string> attributes;  // without those of single tensors
};

constexpr std::string_view kTensorAttribute = "tensor/";
constexpr size_t kMaxSummaries = 65'536;

Summary Summarise(const Manifest& manifest) {
  Summary summary{manifest.kind,
                  manifest.run,
                  manifest.step,
                  manifest.group,
                  static_cast<int64_t>(manifest.tensors.size()),
                  manifest.logical_bytes(),
                  manifest.stored_bytes(),
                  {}};
  for (const auto& [key, value] : manifest.attributes) {
    if (std::string_view(key).substr(0, kTensorAttribute.size()) == kTensorAttribute) continue;
    summary.attributes.emplace(key, value);
  }
  return summary;
}

std::string HexOrEmpty(const Digest& digest) { return digest.IsZero() ? "" : digest.Hex(); }

// The names that point at artifacts, and what was refused a name; read once per call.
struct NameIndex {
  std::multimap<Digest, rpc::Alias> aliases;
  std::multimap<Digest, rpc::Alias> routes;
  std::multimap<Digest, rpc::Refusal> refusals;

  explicit NameIndex(const CheckpointStore& store) {
    for (const Alias& alias : store.ListAliases()) aliases.emplace(alias.artifact, ToRpc(alias));
    for (const Route& route : store.ListRoutes()) routes.emplace(route.variant, ToRpc(route));
    for (const Job& job : store.ListJobs()) AddRefusal(job);
  }

  // A publish that failed; another one that was queued since has the same job.
  void AddRefusal(const Job& job) {
    const auto artifact = job.args.find("artifact");
    if (job.kind != JobKind::kPublish || job.state != JobState::kFailed) return;
    if (artifact == job.args.end()) return;
    const Result<Digest> digest = Digest::FromHex(artifact->second);
    if (!digest.ok()) return;
    const auto argument = [&](const char* name) {
      const auto it = job.args.find(name);
      return it == job.args.end() ? std::string() : it->second;
    };
    rpc::Refusal refusal;
    refusal.job = job.key;
    refusal.codec = argument("codec");
    refusal.name = argument("name");
    refusal.reason = job.error;
    refusal.time_ms = job.finished_ms;
    refusals.emplace(*digest, std::move(refusal));
  }
};

class LineageHandler : public rpc::LineageServiceIf {
 public:
  explicit LineageHandler(const RpcServerParts& parts) : store_(parts.store) {}

  void runs(std::vector<rpc::Run>& reply) override {
    Answer([&]() -> Status {
      for (const Run& run : store_.ListRuns()) reply.push_back(ToRpc(run));
      return OkStatus();
    });
  }

  void log(std::vector<rpc::LogEntry>& reply, const std::string& run) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(run, "the run's name"));
      STOCKPOT_RETURN_IF_ERROR(store_.GetRun(run).status());
      const NameIndex names(store_);
      for (const StepRecord& step : store_.ListSteps(run)) {
        if (step.kind == ArtifactKind::kState) continue;   // with its checkpoint
        if (!store_.HasArtifact(step.artifact)) continue;  // purged since the listing
        rpc::LogEntry& entry = reply.emplace_back();
        entry.step = ToRpc(step);
        STOCKPOT_ASSIGN_OR_RETURN(entry.artifact, Info(step.artifact, names));
        entry.artifact.metrics = step.metrics;
        for (const Edge& edge : store_.Children(step.artifact)) {
          const bool is_state = edge.type == EdgeType::kStateOf;
          if (edge.type != EdgeType::kCompressedFrom && !is_state) continue;
          if (!store_.HasArtifact(edge.child)) continue;  // likewise
          STOCKPOT_ASSIGN_OR_RETURN(rpc::ArtifactInfo child, Info(edge.child, names));
          (is_state ? entry.states : entry.variants).push_back(std::move(child));
        }
      }
      return OkStatus();
    });
  }

  void show(rpc::ArtifactInfo& reply, const std::string& id) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(id, "the id"));
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store_.ResolveName(id));
      STOCKPOT_ASSIGN_OR_RETURN(reply, Info(digest, NameIndex(store_)));
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(digest));
      reply.attributes = manifest.attributes;
      const std::optional<StepRecord> step =
          store_.GetStep(reply.run, reply.step, manifest.kind, reply.group);
      if (step && step->artifact == digest) reply.metrics = step->metrics;
      return OkStatus();
    });
  }

  void aliases(std::vector<rpc::Alias>& reply) override {
    Answer([&]() -> Status {
      for (const Alias& alias : store_.ListAliases()) reply.push_back(ToRpc(alias));
      return OkStatus();
    });
  }

  void move_alias(rpc::Alias& reply, const rpc::AliasMove& request) override {
    Answer([&]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(const AliasMove move, CheckedMove(request));
      const std::optional<Alias> before = store_.GetAlias(move.name);
      Commit commit;
      commit.aliases.push_back(move);
      commit.events.push_back({.type = "alias",
                               .subject = move.name,
                               .fields = {{"to", HexOrEmpty(move.to)},
                                          {"from", before ? before->artifact.Hex() : ""},
                                          {"by", move.by}}});
      AddWholeJob(move.to, commit);
      STOCKPOT_RETURN_IF_ERROR(store_.Apply(std::move(commit)).status());
      const std::optional<Alias> now = store_.GetAlias(move.name);
      reply = ToRpc(now ? *now : Alias{.name = move.name, .moved_by = move.by});
      return OkStatus();
    });
  }

  void resolve(std::string& reply, const std::string& id) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(id, "the id"));
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store_.ResolveName(id));
      reply = digest.Hex();
      return OkStatus();
    });
  }

  void set_retention(rpc::RetentionPolicy& reply, const std::string& run,
                     const rpc::RetentionPolicy& policy) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(run, "the run's name"));
      STOCKPOT_ASSIGN_OR_RETURN(const RetentionPolicy parsed, RetentionPolicyFromRpc(policy));
      Commit commit;
      commit.retention.push_back({run, parsed});
      commit.events.push_back({.type = "retention",
                               .subject = run,
                               .fields = {{"keep_last", std::to_string(parsed.keep_last)},
                                          {"best", std::to_string(parsed.best.size())},
                                          {"every", std::to_string(parsed.every)},
                                          {"groups", std::to_string(parsed.groups.size())}}});
      STOCKPOT_RETURN_IF_ERROR(store_.Apply(std::move(commit)).status());
      reply = ToRpc(store_.GetRetention(run));
      return OkStatus();
    });
  }

  void retention(rpc::RetentionReport& reply, const std::string& run) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(run, "the run's name"));
      STOCKPOT_RETURN_IF_ERROR(store_.GetRun(run).status());
      reply.policy = ToRpc(store_.GetRetention(run));
      STOCKPOT_ASSIGN_OR_RETURN(const RetentionView view, store_.Retention());
      for (size_t i = 0; i < view.fates.size(); ++i) {
        const RetentionArtifact& artifact = view.inputs.artifacts[i];
        if (artifact.run != run) continue;
        rpc::Fate& fate = reply.fates.emplace_back();
        fate.artifact = RawBytes(artifact.digest);
        fate.kind = ToRpc(artifact.kind);
        fate.step = artifact.step;
        fate.group = artifact.group;
        for (const Keep& keep : view.fates[i].keeps) fate.reasons.push_back(KeepText(keep));
        if (artifact.tombstone) fate.purge_ms = std::max<int64_t>(artifact.tombstone->purge_ms, 1);
        const Result<Summary> summary = Summarised(artifact.digest);
        if (summary.ok()) fate.stored_bytes = summary->stored_bytes;
      }
      std::stable_sort(reply.fates.begin(), reply.fates.end(),
                       [](const auto& a, const auto& b) { return a.step < b.step; });
      return OkStatus();
    });
  }

  void pin(const std::string& id, const std::string& by, const std::string& why) override {
    Answer([&] { return SetPin(id, by, why, true); });
  }

  void unpin(const std::string& id) override {
    Answer([&] { return SetPin(id, "", "", false); });
  }

  void delete_artifact(const std::string& id, int64_t grace_ms, const std::string& by,
                       const std::string& why) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckRetention({.grace_ms = grace_ms}));
      if (by == kRetentionAuthor) return InvalidArgument("'by' is the name of the policies");
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, Resolved(id));
      Commit commit;
      commit.deletions.push_back(
          {.artifact = digest, .purge_ms = NowMs() + grace_ms, .by = by, .why = why});
      return store_.Apply(std::move(commit)).status();
    });
  }

  void undelete(const std::string& id) override {
    Answer([&]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, Resolved(id));
      Commit commit;
      commit.undeletions.push_back(digest);
      return store_.Apply(std::move(commit)).status();
    });
  }

  void set_probe(rpc::ProbeSet& reply, const std::string& run,
                 const std::vector<rpc::ProbeText>& texts, const std::string& by) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(SetTexts(run, texts, by, "probe", &Commit::probes));
      return ReadTexts(reply, run, &CheckpointStore::GetProbe);
    });
  }

  void probe(rpc::ProbeSet& reply, const std::string& run) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(run, "the run's name"));
      STOCKPOT_RETURN_IF_ERROR(store_.GetRun(run).status());
      return ReadTexts(reply, run, &CheckpointStore::GetProbe);
    });
  }

  void set_calibration(rpc::ProbeSet& reply, const std::string& run,
                       const std::vector<rpc::ProbeText>& texts, const std::string& by) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(SetTexts(run, texts, by, "calibration", &Commit::calibrations));
      return ReadTexts(reply, run, &CheckpointStore::GetCalibration);
    });
  }

  void calibration(rpc::ProbeSet& reply, const std::string& run) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(run, "the run's name"));
      STOCKPOT_RETURN_IF_ERROR(store_.GetRun(run).status());
      return ReadTexts(reply, run, &CheckpointStore::GetCalibration);
    });
  }

  void set_gate(rpc::Gate& reply, const std::string& run, const rpc::Gate& gate) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(run, "the run's name"));
      const GateConfig config = GateFromRpc(gate);
      Commit commit;
      commit.gates.push_back({run, config});
      commit.events.push_back({.type = "gate",
                               .subject = run,
                               .fields = {{"max_kl", ExactNumber(config.max_kl)},
                                          {"min_top1", ExactNumber(config.min_top1)},
                                          {"max_loss_rise", ExactNumber(config.max_loss_rise)},
                                          {"max_update", ExactNumber(config.max_update)},
                                          {"min_update", ExactNumber(config.min_update)},
                                          {"max_error", ExactNumber(config.max_error)}}});
      STOCKPOT_RETURN_IF_ERROR(store_.Apply(std::move(commit)).status());
      STOCKPOT_ASSIGN_OR_RETURN(const GateConfig now, store_.GetGate(run));
      reply = ToRpc(now);
      return OkStatus();
    });
  }

  void gate(rpc::Gate& reply, const std::string& run) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(run, "the run's name"));
      STOCKPOT_RETURN_IF_ERROR(store_.GetRun(run).status());
      STOCKPOT_ASSIGN_OR_RETURN(const GateConfig config, store_.GetGate(run));
      reply = ToRpc(config);
      return OkStatus();
    });
  }

  void gc(rpc::GcReply& reply, bool dry_run, int64_t bytes_per_second) override {
    Answer([&]() -> Status {
      const GarbageOptions options{
          .dry_run = dry_run, .retention = dry_run, .bytes_per_second = bytes_per_second};
      STOCKPOT_RETURN_IF_ERROR(CheckGarbageOptions(options));  // before anything is deleted
      STOCKPOT_ASSIGN_OR_RETURN(const RetentionChanges changes, store_.ApplyRetention("", dry_run));
      STOCKPOT_ASSIGN_OR_RETURN(const GarbageReport report, store_.CollectGarbage(options));
      reply = ToRpc(changes, report);
      return OkStatus();
    });
  }

 private:
  static int64_t NowMs() { return SystemClock()(); }

  Result<Digest> Resolved(const std::string& id) const {
    STOCKPOT_RETURN_IF_ERROR(CheckLength(id, "the id"));
    return store_.ResolveName(id);
  }

  // `kind`: type of the event, and its field with the digest of the texts.
  Status SetTexts(const std::string& run, const std::vector<rpc::ProbeText>& texts,
                  const std::string& by, const char* kind,
                  std::vector<ProbeSet> Commit::*sets) const {
    STOCKPOT_RETURN_IF_ERROR(CheckLength(run, "the run's name"));
    STOCKPOT_RETURN_IF_ERROR(CheckLength(by, "'by'"));
    ProbeSet set{.run = run, .by = by};
    for (const rpc::ProbeText& text : texts) set.texts.push_back({text.name, text.text});
    Commit commit;
    commit.events.push_back({.type = kind,
                             .subject = run,
                             .fields = {{"texts", std::to_string(set.texts.size())},
                                        {kind, set.texts.empty() ? "" : set.digest().ShortHex()},
                                        {"by", by}}});
    (commit.*sets).push_back(std::move(set));
    return store_.Apply(std::move(commit)).status();
  }

  Status ReadTexts(rpc::ProbeSet& reply, const std::string& run,
                   Result<std::optional<ProbeSet>> (CheckpointStore::*get)(std::string_view)
                       const) const {
    STOCKPOT_ASSIGN_OR_RETURN(const std::optional<ProbeSet> set, (store_.*get)(run));
    reply = ToRpc(set.value_or(ProbeSet{.run = run}));
    return OkStatus();
  }

  Status SetPin(const std::string& id, const std::string& by, const std::string& why, bool on) {
    STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, Resolved(id));
    Commit commit;
    commit.pins.push_back({{.artifact = digest, .by = by, .why = why}, on});
    commit.events.push_back({.type = on ? "pin" : "unpin",
                             .subject = digest.Hex(),
                             .fields = {{"artifact", digest.Hex()}, {"by", by}, {"why", why}}});
    if (on) AddWholeJob(digest, commit);
    return store_.Apply(std::move(commit)).status();
  }

  // What was compressed and must be whole now becomes so by a job.
  void AddWholeJob(const Digest& artifact, Commit& commit) const {
    if (!store_.IsCompressed(artifact)) return;
    const Result<Summary> summary = Summarised(artifact);
    if (summary.ok()) commit.jobs.push_back(MakeCompressJob(summary->run));
  }

  Result<AliasMove> CheckedMove(const rpc::AliasMove& request) const {
    STOCKPOT_RETURN_IF_ERROR(CheckLength(request.id, "the id"));
    STOCKPOT_RETURN_IF_ERROR(CheckLength(request.by, "'by'"));
    if (!IsValidRouteName(request.name) || request.name.find('@') != std::string::npos) {
      return InvalidArgument("'" + request.name.substr(0, 64) +
                             "' cannot be an alias: 1..256 bytes, no control characters, no '@'");
    }
    AliasMove move{.name = request.name, .by = request.by};
    if (const std::optional<Alias> now = store_.GetAlias(request.name)) {
      STOCKPOT_ASSIGN_OR_RETURN(const Summary summary, Summarised(now->artifact));
      if (summary.kind == ArtifactKind::kBase) {
        return InvalidArgument("'" + request.name + "' is the name of a base: it does not move");
      }
    } else if (request.id.empty()) {
      return NotFound("there is no alias '" + request.name + "'");
    }
    if (!request.id.empty()) {
      STOCKPOT_ASSIGN_OR_RETURN(move.to, store_.ResolveName(request.id));
    }
    if (request.__isset.expected) {
      move.expected = Digest{};
      if (!request.expected.empty()) {
        STOCKPOT_ASSIGN_OR_RETURN(move.expected, store_.ResolveName(request.expected));
      }
    }
    return move;
  }

  Result<Summary> Summarised(const Digest& digest) const {
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = summaries_.find(digest); found != summaries_.end()) {
        return found->second;
      }
    }
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(digest));
    Summary summary = Summarise(manifest);
    const std::lock_guard lock(mutex_);
    if (summaries_.size() >= kMaxSummaries) summaries_.clear();
    summaries_.emplace(digest, summary);
    return summary;
  }

  Result<rpc::ArtifactInfo> Info(const Digest& digest, const NameIndex& names) const {
    STOCKPOT_ASSIGN_OR_RETURN(Summary summary, Summarised(digest));
    rpc::ArtifactInfo info;
    info.digest = RawBytes(digest);
    info.kind = ToRpc(summary.kind);
    info.run = summary.run;
    info.step = summary.step;
    info.group = summary.group;
    info.compressed = store_.IsCompressed(digest);
    info.tensors = summary.tensors;
    info.logical_bytes = summary.logical_bytes;
    info.stored_bytes = summary.stored_bytes;
    info.attributes = std::move(summary.attributes);
    for (const Edge& edge : store_.Parents(digest)) info.parents.push_back(ToRpc(edge));
    // A base has a child for every checkpoint: they are the log's business.
    if (summary.kind != ArtifactKind::kBase) {
      for (const Edge& edge : store_.Children(digest)) info.children.push_back(ToRpc(edge));
    }
    for (auto [i, end] = names.aliases.equal_range(digest); i != end; ++i) {
      info.aliases.push_back(i->second);
    }
    for (auto [i, end] = names.routes.equal_range(digest); i != end; ++i) {
      info.routes.push_back(i->second);
    }
    for (auto [i, end] = names.refusals.equal_range(digest); i != end; ++i) {
      info.refusals.push_back(i->second);
    }
    for (const Eval& eval : store_.ListEvals(digest)) info.evals.push_back(ToRpc(eval));
    if (const auto tombstone = store_.GetTombstone(digest)) {
      info.purge_ms = std::max<int64_t>(tombstone->purge_ms, 1);
    }
    info.pinned = store_.GetPin(digest).has_value();
    return info;
  }

  CheckpointStore& store_;
  mutable std::mutex mutex_;
  mutable std::map<Digest, Summary> summaries_;  // guarded
};

}  // namespace

std::shared_ptr<rpc::LineageServiceIf> MakeLineageHandler(const RpcServerParts& parts) {
  return std::make_shared<LineageHandler>(parts);
}

}  // namespace stockpot
