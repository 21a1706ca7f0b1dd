#include "store/commit_writer.h"

#include <algorithm>
#include <set>

#include "store/catalog_keys.h"
#include "store/pack_format.h"
#include "store/record_codec.h"
#include "store/text_overlap.h"

namespace stockpot {
namespace {

namespace keys = catalog_keys;

std::string StepName(const StepRecord& step) {
  return step.run + "@" + std::to_string(step.step) +
         (step.kind == ArtifactKind::kMerge ? ".merge" : "") +
         (step.group.empty() ? "" : "." + step.group);
}

std::string KeyOf(const StepRecord& step) {
  return keys::Step(step.run, step.step, step.kind, step.group);
}

bool IsOpen(const Job& job) {
  return job.state == JobState::kQueued || job.state == JobState::kRunning;
}

}  // namespace

CommitWriter::CommitWriter(CatalogBatch& batch, int64_t now_ms, int64_t last_event,
                           int64_t last_job, Ask ask)
    : batch_(batch),
      now_ms_(now_ms),
      last_event_(last_event),
      last_job_(last_job),
      ask_(std::move(ask)) {}

Result<int64_t> CommitWriter::Add(const PreparedCommit& prepared) {
  const Commit& commit = prepared.commit;
  if (commit.last_event && *commit.last_event != last_event_) {
    return AlreadyExists("event " + std::to_string(last_event_) + " came meanwhile");
  }
  own_artifacts_.clear();
  for (size_t i = 0; i < prepared.artifacts.size(); ++i) {
    own_artifacts_[prepared.artifacts[i].digest] = commit.artifacts[i].kind;
  }
  STOCKPOT_RETURN_IF_ERROR(CheckArtifacts(prepared));
  STOCKPOT_RETURN_IF_ERROR(CheckDrafts(commit));
  STOCKPOT_RETURN_IF_ERROR(CheckRuns(commit));
  STOCKPOT_RETURN_IF_ERROR(CheckSteps(commit));
  STOCKPOT_RETURN_IF_ERROR(CheckReferences(commit));
  STOCKPOT_RETURN_IF_ERROR(CheckMoves(commit.aliases, keys::kAliases, commit));
  STOCKPOT_RETURN_IF_ERROR(CheckMoves(commit.routes, keys::kRoutes, commit));
  STOCKPOT_RETURN_IF_ERROR(CheckResumes(commit));
  STOCKPOT_RETURN_IF_ERROR(CheckRetentionChanges(commit));
  STOCKPOT_RETURN_IF_ERROR(CheckPools(commit));
  STOCKPOT_RETURN_IF_ERROR(CheckRemovals(commit));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<Job> jobs, NumberJobs(commit.jobs));

  WriteArtifacts(prepared);
  for (const DraftChange& draft : commit.drafts) {
    batch_.Put(Column::kRecords, keys::Named(keys::kDrafts, draft.job), draft.made.ToJson());
  }
  WriteJobs(jobs);
  WriteRecords(commit);
  WriteMoves(commit.aliases, keys::kAliases);
  WriteMoves(commit.routes, keys::kRoutes);
  WriteEvents(commit.events);
  WriteRetention(commit);
  return last_event_;
}

// --- checks ---

Status CommitWriter::CheckArtifacts(const PreparedCommit& prepared) {
  for (size_t i = 0; i < prepared.artifacts.size(); ++i) {
    const Digest& digest = prepared.artifacts[i].digest;
    STOCKPOT_ASSIGN_OR_RETURN(const auto stored,
                              batch_.Get(Column::kRecords, keys::Artifact(digest)));
    if (stored) continue;  // its chunks were checked when it came
    STOCKPOT_RETURN_IF_ERROR(
        CheckChunks(prepared.commit.artifacts[i]).WithContext("artifact " + digest.ShortHex()));
  }
  return OkStatus();
}

Status CommitWriter::CheckDrafts(const Commit& commit) {
  for (const DraftChange& draft : commit.drafts) {
    STOCKPOT_RETURN_IF_ERROR(CheckChunks(draft.made).WithContext("draft of job " + draft.job));
  }
  return OkStatus();
}

Status CommitWriter::CheckChunks(const Manifest& manifest) {
  for (const TensorEntry& tensor : manifest.tensors) {
    for (const auto& [role, part] : tensor.parts) {
      const Status status = CheckPart(part);
      if (!status.ok()) return status.WithContext("tensor '" + tensor.name + "'");
    }
  }
  for (const auto& [name, part] : manifest.files) {
    STOCKPOT_RETURN_IF_ERROR(CheckPart(part).WithContext("file " + name));
  }
  return OkStatus();
}

Status CommitWriter::CheckPart(const Part& part) {
  for (size_t i = 0; i < part.chunks.size(); ++i) {
    const Digest& chunk = part.chunks[i];
    ask_.claim(chunk);
    STOCKPOT_ASSIGN_OR_RETURN(const auto raw, batch_.Get(Column::kChunks, chunk.raw()));
    if (!raw) {
      STOCKPOT_RETURN_IF_ERROR(ask_.lost(chunk));
      return InvalidArgument("chunk " + chunk.Hex() + " is not stored");
    }
    STOCKPOT_ASSIGN_OR_RETURN(const ChunkLocation location, ChunkLocation::Decode(*raw));
    const int64_t length =
        std::min(kChunkBytes, part.bytes - static_cast<int64_t>(i) * kChunkBytes);
    if (location.length != length) {
      return InvalidArgument("chunk " + chunk.Hex() + " has " + std::to_string(location.length) +
                             " bytes, the part needs " + std::to_string(length));
    }
  }
  return OkStatus();
}

Result<ArtifactKind> CommitWriter::KindOf(const Digest& digest) const {
  if (const auto it = own_artifacts_.find(digest); it != own_artifacts_.end()) return it->second;
  STOCKPOT_ASSIGN_OR_RETURN(const auto kind, batch_.Get(Column::kRecords, keys::Artifact(digest)));
  if (!kind) return InvalidArgument("artifact " + digest.ShortHex() + " is not stored");
  return ArtifactKindFromName(*kind);
}

Status CommitWriter::RequireArtifact(const Digest& digest) const { return KindOf(digest).status(); }

Status CommitWriter::RequireLive(const Digest& digest, const Commit& commit) const {
  STOCKPOT_RETURN_IF_ERROR(RequireArtifact(digest));
  if (own_artifacts_.contains(digest)) return OkStatus();  // undeleted by the commit
  const auto& undeleted = commit.undeletions;
  if (std::find(undeleted.begin(), undeleted.end(), digest) != undeleted.end()) return OkStatus();
  STOCKPOT_ASSIGN_OR_RETURN(const auto tombstone,
                            batch_.Get(Column::kRecords, keys::DeletedOf(digest)));
  if (!tombstone) return OkStatus();
  return AlreadyExists("artifact " + digest.ShortHex() + " is deleted: undelete it first");
}

Status CommitWriter::CheckRuns(const Commit& commit) {
  for (const Run& run : commit.runs) {
    STOCKPOT_RETURN_IF_ERROR(
        RequireArtifact(run.base).WithContext("the base of run '" + run.name + "'"));
    STOCKPOT_ASSIGN_OR_RETURN(const auto raw,
                              batch_.Get(Column::kRecords, keys::Named(keys::kRuns, run.name)));
    if (!raw) continue;
    STOCKPOT_ASSIGN_OR_RETURN(const Run stored, DecodeRun(*raw));
    if (stored.base != run.base) {
      return AlreadyExists("run '" + run.name + "' has another base, " + stored.base.ShortHex());
    }
  }
  return OkStatus();
}

Status CommitWriter::CheckSteps(const Commit& commit) {
  for (const StepRecord& step : commit.steps) {
    const bool own_run = std::any_of(commit.runs.begin(), commit.runs.end(),
                                     [&](const Run& run) { return run.name == step.run; });
    if (!own_run) {
      STOCKPOT_ASSIGN_OR_RETURN(const auto run,
                                batch_.Get(Column::kRecords, keys::Named(keys::kRuns, step.run)));
      if (!run) return InvalidArgument("run '" + step.run + "' does not exist");
    }
    const Result<ArtifactKind> kind = KindOf(step.artifact);
    if (!kind.ok()) return kind.status().WithContext("step " + StepName(step));
    if (*kind != step.kind)
      return InvalidArgument(StepName(step) + ": the artifact's kind differs");
    STOCKPOT_ASSIGN_OR_RETURN(const auto raw, batch_.Get(Column::kRecords, KeyOf(step)));
    if (!raw) continue;
    STOCKPOT_ASSIGN_OR_RETURN(const StepRecord stored, DecodeStep(*raw));
    if (stored.artifact != step.artifact) {
      return AlreadyExists(StepName(step) + " is artifact " + stored.artifact.ShortHex() +
                           " already, not " + step.artifact.ShortHex());
    }
  }
  return OkStatus();
}

Status CommitWriter::CheckReferences(const Commit& commit) {
  for (const Edge& edge : commit.edges) {
    const std::string context = std::string("edge ") + std::string(EdgeTypeName(edge.type));
    STOCKPOT_RETURN_IF_ERROR(RequireArtifact(edge.child).WithContext(context));
    // Lineage is history: it may name what was purged since.
    STOCKPOT_ASSIGN_OR_RETURN(const auto purged,
                              batch_.Get(Column::kRecords, keys::PurgedOf(edge.parent)));
    if (!purged) STOCKPOT_RETURN_IF_ERROR(RequireArtifact(edge.parent).WithContext(context));
    if (edge.child == edge.parent) return InvalidArgument(context + " from an artifact to itself");
  }
  for (const Eval& eval : commit.evals) {
    STOCKPOT_RETURN_IF_ERROR(RequireArtifact(eval.artifact).WithContext("eval " + eval.task));
  }
  return OkStatus();
}

Status CommitWriter::CheckMoves(const std::vector<AliasMove>& moves, std::string_view prefix,
                                const Commit& commit) {
  const std::string what(prefix.substr(0, prefix.size() - 1));  // "alias", "route"
  for (const AliasMove& move : moves) {
    if (!move.to.IsZero()) {
      STOCKPOT_RETURN_IF_ERROR(
          RequireLive(move.to, commit).WithContext(what + " '" + move.name + "'"));
    }
    if (!move.expected) continue;
    STOCKPOT_ASSIGN_OR_RETURN(const auto raw,
                              batch_.Get(Column::kRecords, keys::Named(prefix, move.name)));
    Digest now;
    if (raw) {
      STOCKPOT_ASSIGN_OR_RETURN(const Alias stored, DecodeAlias(move.name, *raw));
      now = stored.artifact;
    }
    if (now != *move.expected) {
      return AlreadyExists(what + " '" + move.name + "' moved meanwhile: it is " +
                           (now.IsZero() ? "gone" : now.ShortHex()));
    }
  }
  return OkStatus();
}

// The jobs as they will be stored: a known one keeps its place in the order.
Result<std::vector<Job>> CommitWriter::NumberJobs(const std::vector<Job>& jobs) const {
  std::vector<Job> numbered = jobs;
  int64_t last = last_job_;
  for (Job& job : numbered) {
    STOCKPOT_ASSIGN_OR_RETURN(const auto raw,
                              batch_.Get(Column::kRecords, keys::Named(keys::kJobs, job.key)));
    if (raw) {
      STOCKPOT_ASSIGN_OR_RETURN(const Job stored, DecodeJob(*raw));
      job.sequence = stored.sequence;
      job.created_ms = stored.created_ms;
    } else {
      job.sequence = ++last;
      if (job.created_ms == 0) job.created_ms = now_ms_;
    }
  }
  return numbered;
}

Status CommitWriter::CheckResumes(const Commit& commit) const {
  for (const ResumeChange& change : commit.resumes) {
    if (change.forget) continue;
    const ResumeDecision& decision = change.decision;
    STOCKPOT_ASSIGN_OR_RETURN(
        const auto made, batch_.Get(Column::kRecords, keys::Resume(decision.run, decision.key)));
    if (made) return AlreadyExists("resume key '" + decision.key + "' has its decision");
    if (decision.artifact.IsZero()) continue;
    STOCKPOT_RETURN_IF_ERROR(RequireLive(decision.artifact, commit).WithContext("resume"));
  }
  return OkStatus();
}

Status CommitWriter::CheckRetentionChanges(const Commit& commit) const {
  for (const RetentionChange& change : commit.retention) {
    STOCKPOT_ASSIGN_OR_RETURN(const auto run,
                              batch_.Get(Column::kRecords, keys::Named(keys::kRuns, change.run)));
    if (!run) return NotFound("there is no run '" + change.run + "'");
  }
  std::vector<std::string_view> runs;
  for (const ProbeSet& probe : commit.probes) runs.push_back(probe.run);
  for (const ProbeSet& texts : commit.calibrations) runs.push_back(texts.run);
  for (const GateChange& gate : commit.gates) runs.push_back(gate.run);
  for (const std::string_view name : runs) {
    STOCKPOT_ASSIGN_OR_RETURN(const auto run,
                              batch_.Get(Column::kRecords, keys::Named(keys::kRuns, name)));
    if (!run) return NotFound("there is no run '" + std::string(name) + "'");
  }
  STOCKPOT_RETURN_IF_ERROR(CheckTextsApart(commit));
  for (const PinChange& change : commit.pins) {
    const Status status =
        change.on ? RequireLive(change.pin.artifact, commit) : RequireArtifact(change.pin.artifact);
    STOCKPOT_RETURN_IF_ERROR(status.WithContext("pin"));
  }
  for (const Digest& artifact : commit.undeletions) {
    STOCKPOT_RETURN_IF_ERROR(RequireArtifact(artifact).WithContext("undelete"));
  }
  return OkStatus();
}

Status CommitWriter::CheckPools(const Commit& commit) const {
  for (const PoolChange& change : commit.pools) {
    const PoolRecord& pool = change.pool;
    STOCKPOT_ASSIGN_OR_RETURN(const auto raw,
                              batch_.Get(Column::kRecords, keys::Named(keys::kPools, pool.name)));
    int64_t version = 0;
    if (raw) {
      STOCKPOT_ASSIGN_OR_RETURN(const PoolRecord stored, DecodePool(*raw));
      version = stored.version;
    }
    if (version != change.expected) {
      return AlreadyExists("pool '" + pool.name + "' " +
                           (change.expected == 0 ? "exists" : "changed meanwhile"));
    }
    if (pool.version == 0 && !(pool.tasks.empty() && pool.members.empty())) {
      return InvalidArgument("pool '" + pool.name + "' has tasks: it cannot go");
    }
    STOCKPOT_ASSIGN_OR_RETURN(const ArtifactKind base, KindOf(pool.config.base));
    if (base != ArtifactKind::kBase) {
      return InvalidArgument("pool '" + pool.name + "': its base is none");
    }
    for (const PoolMember& member : pool.members) {
      STOCKPOT_RETURN_IF_ERROR(
          RequireLive(member.artifact, commit).WithContext("pool '" + pool.name + "'"));
      STOCKPOT_ASSIGN_OR_RETURN(const ArtifactKind kind, KindOf(member.artifact));
      if (kind == ArtifactKind::kAdapter) continue;
      return InvalidArgument("pool '" + pool.name + "': artifact " + member.artifact.ShortHex() +
                             " is no adapter");
    }
  }
  return OkStatus();
}

// A calibration on the texts that the gate measures on would flatter it.
Status CommitWriter::CheckTextsApart(const Commit& commit) const {
  const auto set_of = [&](std::span<const ProbeSet> changes, std::string_view prefix,
                          const std::string& run) -> Result<ProbeSet> {
    for (const ProbeSet& change : changes) {
      if (change.run == run) return change;
    }
    STOCKPOT_ASSIGN_OR_RETURN(const auto raw,
                              batch_.Get(Column::kRecords, keys::Named(prefix, run)));
    return raw ? DecodeProbe(*raw) : ProbeSet{.run = run};
  };
  std::set<std::string> runs;
  for (const ProbeSet& change : commit.probes) runs.insert(change.run);
  for (const ProbeSet& change : commit.calibrations) runs.insert(change.run);
  for (const std::string& run : runs) {
    STOCKPOT_ASSIGN_OR_RETURN(const ProbeSet probe, set_of(commit.probes, keys::kProbes, run));
    STOCKPOT_ASSIGN_OR_RETURN(const ProbeSet calibration,
                              set_of(commit.calibrations, keys::kCalibrations, run));
    STOCKPOT_RETURN_IF_ERROR(CheckApart(probe, calibration));
  }
  return OkStatus();
}

Status CommitWriter::CheckRemovals(const Commit& commit) {
  if (commit.deletions.empty() && commit.purges.empty()) return OkStatus();
  STOCKPOT_ASSIGN_OR_RETURN(retention_, ask_.retention());
  removable_.clear();
  for (size_t i = 0; i < retention_.fates.size(); ++i) {
    removable_[retention_.fates[i].artifact] = i;
  }
  for (const Tombstone& tombstone : commit.deletions) {
    STOCKPOT_RETURN_IF_ERROR(
        CheckDeletion(tombstone).WithContext("artifact " + tombstone.artifact.ShortHex()));
  }
  for (const Digest& artifact : commit.purges) {
    STOCKPOT_RETURN_IF_ERROR(CheckPurge(artifact).WithContext("artifact " + artifact.ShortHex()));
  }
  return OkStatus();
}

Status CommitWriter::CheckDeletion(const Tombstone& tombstone) const {
  const auto it = removable_.find(tombstone.artifact);
  if (it == removable_.end()) return NotFound("is not stored");
  const Fate& fate = retention_.fates[it->second];
  const bool by_policy = tombstone.by == kRetentionAuthor;
  std::string reasons;
  for (const Keep& keep : fate.keeps) {
    if (!by_policy && !IsFirm(keep.reason)) continue;
    reasons += (reasons.empty() ? "" : ", ") + KeepText(keep);
  }
  if (reasons.empty()) return OkStatus();
  if (by_policy) return AlreadyExists("stays now: " + reasons);
  return InvalidArgument("cannot be deleted: " + reasons);
}

Status CommitWriter::CheckPurge(const Digest& artifact) const {
  const auto it = removable_.find(artifact);
  if (it == removable_.end()) return AlreadyExists("is not stored any more");
  const auto& tombstone = retention_.inputs.artifacts[it->second].tombstone;
  if (!tombstone) return AlreadyExists("is not deleted");
  if (tombstone->purge_ms > now_ms_) return AlreadyExists("can still be undeleted");
  for (const Keep& keep : retention_.fates[it->second].keeps) {
    if (IsFirm(keep.reason)) return AlreadyExists("stays for now: " + KeepText(keep));
  }
  return OkStatus();
}

// --- writes ---

void CommitWriter::WriteArtifacts(const PreparedCommit& prepared) {
  for (size_t i = 0; i < prepared.artifacts.size(); ++i) {
    const auto& artifact = prepared.artifacts[i];
    batch_.Put(Column::kManifests, artifact.digest.raw(), artifact.json);
    batch_.Put(Column::kRecords, keys::Artifact(artifact.digest),
               ArtifactKindName(prepared.commit.artifacts[i].kind));
    batch_.Delete(Column::kRecords, keys::PurgedOf(artifact.digest));
    Undelete(artifact.digest);
  }
}

void CommitWriter::Undelete(const Digest& artifact) {
  const auto tombstone = batch_.Get(Column::kRecords, keys::DeletedOf(artifact));
  if (tombstone.ok() && !tombstone->has_value()) return;
  batch_.Delete(Column::kRecords, keys::DeletedOf(artifact));
  WriteEvents(
      {{.type = "undelete", .subject = artifact.Hex(), .fields = {{"artifact", artifact.Hex()}}}});
}

void CommitWriter::WriteRetention(const Commit& commit) {
  for (const RetentionChange& change : commit.retention) {
    batch_.Put(Column::kRecords, keys::Named(keys::kRetention, change.run),
               EncodeRetention(change.policy));
  }
  for (const PinChange& change : commit.pins) {
    const std::string key = keys::PinOf(change.pin.artifact);
    if (change.on) {
      Pin pin = change.pin;
      pin.time_ms = now_ms_;
      batch_.Put(Column::kRecords, key, EncodePin(pin));
    } else {
      batch_.Delete(Column::kRecords, key);
    }
  }
  for (const Digest& artifact : commit.undeletions) Undelete(artifact);
  for (const Tombstone& deletion : commit.deletions) {
    Tombstone tombstone = deletion;
    tombstone.deleted_ms = now_ms_;
    batch_.Put(Column::kRecords, keys::DeletedOf(tombstone.artifact), EncodeTombstone(tombstone));
    WriteEvents({{.type = "delete",
                  .subject = tombstone.artifact.Hex(),
                  .fields = {{"artifact", tombstone.artifact.Hex()},
                             {"by", tombstone.by},
                             {"why", tombstone.why},
                             {"purge_ms", std::to_string(tombstone.purge_ms)}}}});
  }
  for (const Digest& artifact : commit.purges) Purge(artifact);
}

// Edges down stay: they are the history of children that stay.
void CommitWriter::Purge(const Digest& artifact) {
  const RetentionArtifact& known = retention_.inputs.artifacts[removable_.at(artifact)];
  batch_.Delete(Column::kManifests, artifact.raw());
  batch_.Delete(Column::kRecords, keys::Artifact(artifact));
  batch_.Delete(Column::kRecords, keys::DeletedOf(artifact));
  batch_.Delete(Column::kRecords, keys::PinOf(artifact));
  batch_.Delete(Column::kRecords, keys::HistoryOf(artifact));
  if (known.has_step) {
    batch_.Delete(Column::kRecords, keys::Step(known.run, known.step, known.kind, known.group));
  }
  for (const Edge& edge : known.edges) {
    batch_.Delete(Column::kRecords, keys::Up(edge));
    batch_.Delete(Column::kRecords, keys::Down(edge));
  }
  for (const Eval& eval : known.evals) batch_.Delete(Column::kRecords, keys::EvalKey(eval));
  batch_.Put(Column::kRecords, keys::PurgedOf(artifact), std::to_string(now_ms_));
  WriteEvents({{.type = "purge",
                .subject = artifact.Hex(),
                .fields = {{"artifact", artifact.Hex()},
                           {"kind", std::string(ArtifactKindName(known.kind))},
                           {"run", known.run},
                           {"step", std::to_string(known.step)}}}});
}

void CommitWriter::WriteJobs(const std::vector<Job>& jobs) {
  for (const Job& job : jobs) {
    last_job_ = std::max(last_job_, job.sequence);
    batch_.Put(Column::kRecords, keys::Named(keys::kJobs, job.key), EncodeJob(job));
    const std::string open = keys::OpenJob(job.sequence);
    if (IsOpen(job)) {
      batch_.Put(Column::kRecords, open, job.key);
    } else {
      batch_.Delete(Column::kRecords, open);
      batch_.Delete(Column::kRecords, keys::Named(keys::kDrafts, job.key));
    }
  }
  if (!jobs.empty()) {
    batch_.Put(Column::kRecords, keys::kLastJob, std::to_string(last_job_));
  }
}

void CommitWriter::WriteRecords(const Commit& commit) {
  for (const Run& run : commit.runs) {
    Run record = run;
    if (record.created_ms == 0) record.created_ms = now_ms_;
    batch_.Put(Column::kRecords, keys::Named(keys::kRuns, run.name), EncodeRun(record));
  }
  for (const StepRecord& step : commit.steps) {
    StepRecord record = step;
    if (record.committed_ms == 0) record.committed_ms = now_ms_;
    batch_.Put(Column::kRecords, KeyOf(step), EncodeStep(record));
  }
  for (const GateChange& gate : commit.gates) {
    batch_.Put(Column::kRecords, keys::Named(keys::kGates, gate.run), EncodeGate(gate.config));
  }
  for (const PoolChange& change : commit.pools) {
    const std::string key = keys::Named(keys::kPools, change.pool.name);
    if (change.pool.version == 0) {
      batch_.Delete(Column::kRecords, key);
    } else {
      batch_.Put(Column::kRecords, key, EncodePool(change.pool));
    }
  }
  const auto write_texts = [this](std::string_view column, const ProbeSet& texts) {
    const std::string key = keys::Named(column, texts.run);
    ProbeSet record = texts;
    record.time_ms = now_ms_;
    if (texts.texts.empty()) {
      batch_.Delete(Column::kRecords, key);
    } else {
      batch_.Put(Column::kRecords, key, EncodeProbe(record));
    }
  };
  for (const ProbeSet& texts : commit.probes) write_texts(keys::kProbes, texts);
  for (const ProbeSet& texts : commit.calibrations) write_texts(keys::kCalibrations, texts);
  for (const ResumeChange& change : commit.resumes) {
    const std::string key = keys::Resume(change.decision.run, change.decision.key);
    if (change.forget) {
      batch_.Delete(Column::kRecords, key);
    } else {
      batch_.Put(Column::kRecords, key, EncodeResume(change.decision));
    }
  }
  for (const Edge& edge : commit.edges) {
    batch_.Put(Column::kRecords, keys::Up(edge), "");
    batch_.Put(Column::kRecords, keys::Down(edge), "");
  }
  for (const Eval& eval : commit.evals) {
    Eval record = eval;
    if (record.time_ms == 0) record.time_ms = now_ms_;
    batch_.Put(Column::kRecords, keys::EvalKey(record), EncodeEval(record));
  }
}

void CommitWriter::WriteMoves(const std::vector<AliasMove>& moves, std::string_view prefix) {
  for (const AliasMove& move : moves) {
    const std::string key = keys::Named(prefix, move.name);
    if (move.to.IsZero()) {
      batch_.Delete(Column::kRecords, key);
    } else {
      batch_.Put(Column::kRecords, key, EncodeAlias({move.name, move.to, now_ms_, move.by}));
    }
  }
}

void CommitWriter::WriteEvents(const std::vector<Event>& events) {
  for (const Event& event : events) {
    Event record = event;
    record.sequence = ++last_event_;
    record.time_ms = now_ms_;
    batch_.Put(Column::kEvents, keys::BigEndian(static_cast<uint64_t>(record.sequence)),
               EncodeEvent(record));
  }
}

}  // namespace stockpot
