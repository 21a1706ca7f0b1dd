#include "store/retention_state.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "store/catalog_keys.h"
#include "store/record_codec.h"

namespace stockpot {
namespace {

namespace keys = catalog_keys;

// Decodes every record with a prefix; the first that does not decode ends it. `decode` gets the key
// after the prefix.
template <typename T, typename Decode>
Result<std::vector<T>> ReadAll(const Catalog& catalog, std::string_view prefix, Decode decode) {
  std::vector<T> records;
  Status damage;
  const Status scanned =
      catalog.Scan(Column::kRecords, prefix, "", [&](std::string_view key, std::string_view value) {
        Result<T> record = decode(key.substr(prefix.size()), value);
        if (record.ok()) {
          records.push_back(*std::move(record));
        } else {
          damage = record.status().WithContext("record " + std::string(prefix));
        }
        return damage.ok();
      });
  STOCKPOT_RETURN_IF_ERROR(scanned);
  STOCKPOT_RETURN_IF_ERROR(damage);
  return records;
}

// Of the edges that say what an artifact was made from. A base is no source: it always stays.
bool IsSource(EdgeType type) {
  return type == EdgeType::kMergedFrom || type == EdgeType::kCompressedFrom ||
         type == EdgeType::kPooledFrom || type == EdgeType::kAdapterOf ||
         type == EdgeType::kStateOf;
}

Result<Edge> DecodeUpEdge(std::string_view rest) {
  if (rest.size() != 65) return Corruption("an edge's key has the wrong size");
  Edge edge;
  STOCKPOT_ASSIGN_OR_RETURN(edge.child, Digest::FromRaw(rest.substr(0, 32)));
  edge.type = static_cast<EdgeType>(rest[32]);
  STOCKPOT_ASSIGN_OR_RETURN(edge.parent, Digest::FromRaw(rest.substr(33)));
  return edge;
}

// The artifacts that an unfinished job names in its arguments.
void AddJobHolds(const Job& job, std::vector<Hold>& holds) {
  if (job.state != JobState::kQueued && job.state != JobState::kRunning) return;
  for (const auto& [name, text] : job.args) {
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      const Result<Digest> digest = Digest::FromHex(text.substr(begin, end - begin));
      if (digest.ok()) holds.push_back({KeepReason::kJob, job.key, *digest});
      begin = end + 1;
    }
  }
}

// A publish that failed for what the artifact is, not for what happened around it.
bool RefusedByGate(const Job& job) {
  if (job.kind != JobKind::kPublish || job.state != JobState::kFailed) return false;
  for (const StatusCode code :
       {StatusCode::kInternal, StatusCode::kUnavailable, StatusCode::kResourceExhausted}) {
    if (job.error.starts_with(StatusCodeName(code))) return false;
  }
  return true;
}

class StateReader {
 public:
  StateReader(const Catalog& catalog, const FactsOf& facts) : catalog_(catalog), facts_(facts) {}

  Result<RetentionInputs> Read(const std::vector<Digest>& leased) {
    STOCKPOT_RETURN_IF_ERROR(ReadArtifacts());
    STOCKPOT_RETURN_IF_ERROR(ReadRuns());
    STOCKPOT_RETURN_IF_ERROR(ReadHolds());
    STOCKPOT_RETURN_IF_ERROR(ReadJobs());
    for (const Digest& digest : leased) {
      inputs_.holds.push_back({KeepReason::kLeased, "", digest});
    }
    return std::move(inputs_);
  }

 private:
  RetentionArtifact* Find(const Digest& digest) {
    const auto it = index_.find(digest);
    return it == index_.end() ? nullptr : &inputs_.artifacts[it->second];
  }

  Status ReadArtifacts() {
    STOCKPOT_ASSIGN_OR_RETURN(
        inputs_.artifacts,
        ReadAll<RetentionArtifact>(
            catalog_, keys::kArtifacts,
            [](std::string_view rest, std::string_view value) -> Result<RetentionArtifact> {
              RetentionArtifact artifact;
              STOCKPOT_ASSIGN_OR_RETURN(artifact.digest, Digest::FromRaw(rest));
              STOCKPOT_ASSIGN_OR_RETURN(artifact.kind, ArtifactKindFromName(value));
              return artifact;
            }));
    for (size_t i = 0; i < inputs_.artifacts.size(); ++i) {
      RetentionArtifact& artifact = inputs_.artifacts[i];
      index_[artifact.digest] = i;
      Result<ManifestFacts> facts = facts_(artifact.digest);
      if (!facts.ok() && facts.status().code() != StatusCode::kCorruption) return facts.status();
      if (!facts.ok()) continue;
      artifact.run = facts->run;
      artifact.step = facts->step;
      artifact.group = std::move(facts->group);
      artifact.needs = std::move(facts->needs);
    }
    STOCKPOT_ASSIGN_OR_RETURN(const auto tombstones,
                              ReadAll<Tombstone>(catalog_, keys::kDeleted, DecodeDeleted));
    for (const Tombstone& tombstone : tombstones) {
      if (auto* artifact = Find(tombstone.artifact)) artifact->tombstone = tombstone;
    }
    STOCKPOT_ASSIGN_OR_RETURN(
        const auto edges,
        ReadAll<Edge>(catalog_, "up/",
                      [](std::string_view rest, std::string_view) { return DecodeUpEdge(rest); }));
    for (const Edge& edge : edges) {
      auto* artifact = Find(edge.child);
      if (artifact == nullptr) continue;
      artifact->edges.push_back(edge);
      if (IsSource(edge.type)) artifact->sources.push_back(edge.parent);
    }
    return OkStatus();
  }

  Status ReadRuns() {
    STOCKPOT_ASSIGN_OR_RETURN(
        inputs_.runs,
        ReadAll<Run>(catalog_, keys::kRuns,
                     [](std::string_view, std::string_view value) { return DecodeRun(value); }));
    for (const Run& run : inputs_.runs) {
      STOCKPOT_ASSIGN_OR_RETURN(
          const auto raw, catalog_.Get(Column::kRecords, keys::Named(keys::kRetention, run.name)));
      if (!raw) continue;
      STOCKPOT_ASSIGN_OR_RETURN(inputs_.policies[run.name], DecodeRetention(*raw));
    }
    STOCKPOT_ASSIGN_OR_RETURN(
        const auto steps,
        ReadAll<StepRecord>(catalog_, "step/", [](std::string_view, std::string_view value) {
          return DecodeStep(value);
        }));
    for (const StepRecord& step : steps) {
      auto* artifact = Find(step.artifact);
      if (artifact == nullptr) continue;
      artifact->has_step = true;
      artifact->run = step.run;
      artifact->step = step.step;
      artifact->metrics = step.metrics;
      artifact->committed_ms = step.committed_ms;
    }
    STOCKPOT_ASSIGN_OR_RETURN(
        const auto evals,
        ReadAll<Eval>(catalog_, "eval/",
                      [](std::string_view, std::string_view value) { return DecodeEval(value); }));
    for (const Eval& eval : evals) {
      if (auto* artifact = Find(eval.artifact)) artifact->evals.push_back(eval);
    }
    return OkStatus();
  }

  Status ReadHolds() {
    for (const auto& [prefix, reason] : {std::pair(keys::kAliases, KeepReason::kAlias),
                                         std::pair(keys::kRoutes, KeepReason::kRoute)}) {
      STOCKPOT_ASSIGN_OR_RETURN(const auto names, ReadAll<Alias>(catalog_, prefix, DecodeAlias));
      for (const Alias& alias : names)
        inputs_.holds.push_back({reason, alias.name, alias.artifact});
    }
    STOCKPOT_ASSIGN_OR_RETURN(
        const auto pins,
        ReadAll<Pin>(catalog_, keys::kPins,
                     [](std::string_view rest, std::string_view value) -> Result<Pin> {
                       STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, Digest::FromRaw(rest));
                       return DecodePin(digest, value);
                     }));
    for (const Pin& pin : pins) {
      inputs_.holds.push_back({KeepReason::kPinned, pin.why, pin.artifact});
    }
    return ReadResumes();
  }

  // Of each run the newest decision: whoever asks with its key is to find the checkpoint.
  Status ReadResumes() {
    STOCKPOT_ASSIGN_OR_RETURN(const auto decisions,
                              ReadAll<ResumeDecision>(catalog_, keys::kResumes,
                                                      [](std::string_view, std::string_view value) {
                                                        return DecodeResume(value);
                                                      }));
    std::map<std::string_view, const ResumeDecision*> newest;
    for (const ResumeDecision& decision : decisions) {
      const ResumeDecision*& known = newest[decision.run];
      if (known == nullptr || known->decided_ms < decision.decided_ms) known = &decision;
    }
    for (const auto& [run, decision] : newest) {
      if (decision->artifact.IsZero()) continue;
      inputs_.holds.push_back({KeepReason::kResume, decision->key, decision->artifact});
    }
    return OkStatus();
  }

  Status ReadJobs() {
    STOCKPOT_ASSIGN_OR_RETURN(
        const auto jobs,
        ReadAll<Job>(catalog_, keys::kJobs,
                     [](std::string_view, std::string_view value) { return DecodeJob(value); }));
    for (const Job& job : jobs) {
      AddJobHolds(job, inputs_.holds);
      if (!RefusedByGate(job)) continue;
      const auto it = job.args.find("artifact");
      if (it == job.args.end()) continue;
      const Result<Digest> digest = Digest::FromHex(it->second);
      if (!digest.ok()) continue;
      if (auto* artifact = Find(*digest)) artifact->refused = true;
    }
    return OkStatus();
  }

  static Result<Tombstone> DecodeDeleted(std::string_view rest, std::string_view value) {
    STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, Digest::FromRaw(rest));
    return DecodeTombstone(digest, value);
  }

  const Catalog& catalog_;
  const FactsOf& facts_;
  RetentionInputs inputs_;
  std::unordered_map<Digest, size_t, DigestHash> index_;
};

}  // namespace

Result<RetentionInputs> ReadRetention(const Catalog& catalog, const FactsOf& facts,
                                      const std::vector<Digest>& leased) {
  return StateReader(catalog, facts).Read(leased);
}

}  // namespace stockpot
