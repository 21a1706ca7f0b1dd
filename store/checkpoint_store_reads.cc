// The reading half of CheckpointStore: records out of the catalogue.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <system_error>

#include "store/catalog_keys.h"
#include "store/checkpoint_store_impl.h"
#include "store/record_codec.h"

namespace stockpot {
namespace {

namespace keys = catalog_keys;

constexpr size_t kMinPrefixDigits = 6;

// Every record, or the first error.
template <typename T, typename Decode>
Result<std::vector<T>> ReadRecords(const Catalog& catalog, std::string_view prefix, Decode decode) {
  std::vector<T> records;
  Status damage;
  STOCKPOT_RETURN_IF_ERROR(
      catalog.Scan(Column::kRecords, prefix, "", [&](std::string_view key, std::string_view value) {
        Result<T> record = decode(key.substr(prefix.size()), value);
        if (record.ok()) {
          records.push_back(*std::move(record));
        } else {
          damage = record.status().WithContext("record " + std::string(prefix));
        }
        return damage.ok();
      }));
  STOCKPOT_RETURN_IF_ERROR(damage);
  return records;
}

// What decodes; a damaged record is left out.
template <typename T, typename Decode>
std::vector<T> ScanRecords(const Catalog& catalog, std::string_view prefix, Decode decode) {
  std::vector<T> records;
  const Status status =
      catalog.Scan(Column::kRecords, prefix, "", [&](std::string_view key, std::string_view value) {
        Result<T> record = decode(key.substr(prefix.size()), value);
        if (record.ok()) records.push_back(*std::move(record));
        return true;
      });
  static_cast<void>(status);
  return records;
}

template <typename T, typename Decode>
std::optional<T> FindRecord(const Catalog& catalog, std::string_view prefix, std::string_view name,
                            Decode decode) {
  const auto raw = catalog.Get(Column::kRecords, keys::Named(prefix, name));
  if (!raw.ok() || !raw->has_value()) return std::nullopt;
  Result<T> record = decode(name, **raw);
  if (!record.ok()) return std::nullopt;
  return *std::move(record);
}

Result<Route> DecodeRoute(std::string_view name, std::string_view json) {
  STOCKPOT_ASSIGN_OR_RETURN(Alias alias, DecodeAlias(name, json));
  return Route{std::move(alias.name), alias.artifact, alias.moved_ms, std::move(alias.moved_by)};
}

// The other end of an edge's key, after its prefix: type, digest.
std::optional<std::pair<EdgeType, Digest>> DecodeEdge(std::string_view rest) {
  if (rest.size() != 33) return std::nullopt;
  const Result<Digest> other = Digest::FromRaw(rest.substr(1));
  if (!other.ok()) return std::nullopt;
  return std::pair(static_cast<EdgeType>(rest[0]), *other);
}

// "RUN@STEP" or "RUN@STEP.merge"; null: of another form.
struct StepName {
  std::string_view run;
  int64_t step = 0;
  ArtifactKind kind = ArtifactKind::kCheckpoint;
};
std::optional<StepName> ParseStepName(std::string_view name) {
  constexpr std::string_view kMerge = ".merge";
  const size_t at = name.rfind('@');
  if (at == std::string_view::npos) return std::nullopt;
  StepName parsed{.run = name.substr(0, at)};
  std::string_view digits = name.substr(at + 1);
  if (digits.ends_with(kMerge)) {
    digits.remove_suffix(kMerge.size());
    parsed.kind = ArtifactKind::kMerge;
  }
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), parsed.step);
  if (error != std::errc() || end != digits.data() + digits.size() || parsed.step < 0) {
    return std::nullopt;
  }
  return parsed;
}

// The one artifact whose digest starts with these hex digits. Null: none, or not hex digits.
Result<std::optional<Digest>> ResolvePrefix(const Catalog& catalog, std::string_view hex) {
  const bool is_hex = std::all_of(hex.begin(), hex.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
  });
  if (hex.size() < kMinPrefixDigits || hex.size() > 64 || !is_hex) return std::optional<Digest>();
  STOCKPOT_ASSIGN_OR_RETURN(const Digest lowest,
                            Digest::FromHex(std::string(hex) + std::string(64 - hex.size(), '0')));
  std::vector<Digest> found;
  STOCKPOT_RETURN_IF_ERROR(catalog.Scan(Column::kRecords, keys::kArtifacts, keys::Artifact(lowest),
                                        [&](std::string_view key, std::string_view) {
                                          const Result<Digest> digest =
                                              Digest::FromRaw(key.substr(keys::kArtifacts.size()));
                                          if (!digest.ok() || !digest->Hex().starts_with(hex))
                                            return false;
                                          found.push_back(*digest);
                                          return found.size() < 2;
                                        }));
  if (found.size() > 1) {
    return InvalidArgument("'" + std::string(hex) + "' begins several artifacts: give more digits");
  }
  return found.empty() ? std::optional<Digest>() : std::optional<Digest>(found[0]);
}

}  // namespace

Result<Manifest> CheckpointStore::GetManifest(const Digest& artifact) const {
  return impl_->ReadManifest(artifact);
}

Result<Manifest> CheckpointStore::Impl::ReadManifest(const Digest& artifact) const {
  STOCKPOT_ASSIGN_OR_RETURN(const auto json, catalog->Get(Column::kManifests, artifact.raw()));
  if (!json) {
    STOCKPOT_ASSIGN_OR_RETURN(const auto record,
                              catalog->Get(Column::kRecords, keys::Artifact(artifact)));
    if (!record) return NotFound("artifact " + artifact.Hex());
    // Read again: it may have been purged between the two.
    STOCKPOT_ASSIGN_OR_RETURN(const auto again, catalog->Get(Column::kManifests, artifact.raw()));
    if (again) return ReadManifest(artifact);
    STOCKPOT_ASSIGN_OR_RETURN(const auto still,
                              catalog->Get(Column::kRecords, keys::Artifact(artifact)));
    if (!still) return NotFound("artifact " + artifact.Hex());
    return Corruption("the manifest of artifact " + artifact.Hex() + " is missing");
  }
  if (Sha256(*json) != artifact) {
    return Corruption("the manifest of artifact " + artifact.Hex() + " is damaged");
  }
  return Manifest::FromJson(*json);
}

bool CheckpointStore::HasArtifact(const Digest& artifact) const {
  return impl_->catalog->Has(Column::kRecords, keys::Artifact(artifact));
}

bool CheckpointStore::WasPurged(const Digest& artifact) const {
  return impl_->catalog->Has(Column::kRecords, keys::PurgedOf(artifact));
}

std::optional<StepRecord> CheckpointStore::GetStep(std::string_view run, int64_t step,
                                                   ArtifactKind kind,
                                                   std::string_view group) const {
  if (run.empty() || step < 0) return std::nullopt;
  const auto raw = impl_->catalog->Get(Column::kRecords, keys::Step(run, step, kind, group));
  if (!raw.ok() || !raw->has_value()) return std::nullopt;
  Result<StepRecord> record = DecodeStep(**raw);
  if (!record.ok()) return std::nullopt;
  record->deleted = impl_->catalog->Has(Column::kRecords, keys::DeletedOf(record->artifact));
  return *std::move(record);
}

// Any form of a name but that of a state. Null: nothing is called so.
Result<std::optional<Digest>> CheckpointStore::ResolvePlain(std::string_view name) const {
  if (const Result<Digest> full = Digest::FromHex(name); full.ok() && HasArtifact(*full)) {
    return std::optional(*full);
  }
  if (const auto alias = GetAlias(name)) return std::optional(alias->artifact);
  if (const auto step = ParseStepName(name)) {
    if (const auto record = GetStep(step->run, step->step, step->kind)) {
      return std::optional(record->artifact);
    }
  }
  if (const auto route = GetRoute(name)) {
    // Not the variant: who asks for a step's weights must not get their 1-bit image unawares.
    if (ParseStepName(name)) {
      return NotFound("'" + std::string(name) +
                      "': its weights are no longer kept; what is served" +
                      " under this name is the variant " + route->variant.Hex());
    }
    return std::optional(route->variant);
  }
  return ResolvePrefix(*impl_->catalog, name);
}

// "NAME.GROUP", where NAME is a checkpoint: its state of the group. Null: of another form.
Result<std::optional<Digest>> CheckpointStore::ResolveState(std::string_view name) const {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos || !IsValidGroupName(name.substr(dot + 1))) {
    return std::optional<Digest>();
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto checkpoint, ResolvePlain(name.substr(0, dot)));
  if (!checkpoint) return std::optional<Digest>();
  STOCKPOT_ASSIGN_OR_RETURN(const ManifestFacts facts, impl_->FactsOfArtifact(*checkpoint));
  const std::optional<StepRecord> state =
      GetStep(facts.run, facts.step, ArtifactKind::kState, name.substr(dot + 1));
  if (!state) return std::optional<Digest>();
  const std::vector<Edge> parents = Parents(state->artifact);
  const bool of_it = std::any_of(parents.begin(), parents.end(), [&](const Edge& edge) {
    return edge.type == EdgeType::kStateOf && edge.parent == *checkpoint;
  });
  return of_it ? std::optional(state->artifact) : std::nullopt;
}

Result<Digest> CheckpointStore::ResolveName(std::string_view name) const {
  STOCKPOT_ASSIGN_OR_RETURN(const auto plain, ResolvePlain(name));
  if (plain) return *plain;
  STOCKPOT_ASSIGN_OR_RETURN(const auto state, ResolveState(name));
  if (state) return *state;
  return NotFound("no artifact, alias, step or route is called '" +
                  std::string(name.substr(0, 256)) + "'");
}

std::vector<Digest> CheckpointStore::ListArtifacts() const {
  return ScanRecords<Digest>(
      *impl_->catalog, keys::kArtifacts,
      [](std::string_view rest, std::string_view) { return Digest::FromRaw(rest); });
}

Result<std::vector<Digest>> CheckpointStore::Impl::ReadArtifacts() const {
  return ReadRecords<Digest>(
      *catalog, keys::kArtifacts,
      [](std::string_view rest, std::string_view) { return Digest::FromRaw(rest); });
}

std::vector<Run> CheckpointStore::ListRuns() const {
  return ScanRecords<Run>(
      *impl_->catalog, keys::kRuns,
      [](std::string_view, std::string_view value) { return DecodeRun(value); });
}

Result<Run> CheckpointStore::GetRun(std::string_view name) const {
  STOCKPOT_ASSIGN_OR_RETURN(const auto raw,
                            impl_->catalog->Get(Column::kRecords, keys::Named(keys::kRuns, name)));
  if (!raw) return NotFound("there is no run '" + std::string(name.substr(0, 256)) + "'");
  return DecodeRun(*raw);
}

std::vector<StepRecord> CheckpointStore::ListSteps(std::string_view run) const {
  return ScanRecords<StepRecord>(
      *impl_->catalog, keys::StepsOf(run),
      [this](std::string_view, std::string_view value) -> Result<StepRecord> {
        STOCKPOT_ASSIGN_OR_RETURN(StepRecord step, DecodeStep(value));
        step.deleted = impl_->catalog->Has(Column::kRecords, keys::DeletedOf(step.artifact));
        return step;
      });
}

std::vector<ResumeDecision> CheckpointStore::ListResumeDecisions(std::string_view run) const {
  return ScanRecords<ResumeDecision>(
      *impl_->catalog, keys::ResumesOf(run),
      [](std::string_view, std::string_view value) { return DecodeResume(value); });
}

Result<std::vector<StepRecord>> CheckpointStore::ReadSteps(std::string_view run) const {
  return ReadRecords<StepRecord>(
      *impl_->catalog, keys::StepsOf(run),
      [this](std::string_view, std::string_view value) -> Result<StepRecord> {
        STOCKPOT_ASSIGN_OR_RETURN(StepRecord step, DecodeStep(value));
        STOCKPOT_ASSIGN_OR_RETURN(
            const auto tombstone,
            impl_->catalog->Get(Column::kRecords, keys::DeletedOf(step.artifact)));
        step.deleted = tombstone.has_value();
        return step;
      });
}

std::vector<Edge> CheckpointStore::Parents(const Digest& child) const {
  return ScanRecords<Edge>(*impl_->catalog, keys::ParentsOf(child),
                           [&](std::string_view rest, std::string_view) -> Result<Edge> {
                             const auto edge = DecodeEdge(rest);
                             if (!edge) return Corruption("edge");
                             return Edge{edge->first, child, edge->second};
                           });
}

std::vector<Edge> CheckpointStore::Children(const Digest& parent) const {
  return ScanRecords<Edge>(*impl_->catalog, keys::ChildrenOf(parent),
                           [&](std::string_view rest, std::string_view) -> Result<Edge> {
                             const auto edge = DecodeEdge(rest);
                             if (!edge) return Corruption("edge");
                             return Edge{edge->first, edge->second, parent};
                           });
}

std::optional<Alias> CheckpointStore::GetAlias(std::string_view name) const {
  return FindRecord<Alias>(*impl_->catalog, keys::kAliases, name, DecodeAlias);
}
std::vector<Alias> CheckpointStore::ListAliases() const {
  return ScanRecords<Alias>(*impl_->catalog, keys::kAliases, DecodeAlias);
}
std::optional<Route> CheckpointStore::GetRoute(std::string_view name) const {
  return FindRecord<Route>(*impl_->catalog, keys::kRoutes, name, DecodeRoute);
}
std::vector<Route> CheckpointStore::ListRoutes() const {
  return ScanRecords<Route>(*impl_->catalog, keys::kRoutes, DecodeRoute);
}

std::vector<Job> CheckpointStore::ListJobs() const {
  std::vector<Job> jobs =
      ScanRecords<Job>(*impl_->catalog, keys::kJobs,
                       [](std::string_view, std::string_view value) { return DecodeJob(value); });
  std::sort(jobs.begin(), jobs.end(),
            [](const Job& a, const Job& b) { return a.sequence < b.sequence; });
  return jobs;
}
std::vector<Job> CheckpointStore::ListOpenJobs() const {
  // Read again where one ended between the two reads, or moved to another number: what its commit
  // queued is in the next list.
  for (std::vector<std::string> before;;) {
    std::vector<std::string> names =
        ScanRecords<std::string>(*impl_->catalog, keys::kOpenJobs,
                                 [](std::string_view, std::string_view key) -> Result<std::string> {
                                   return std::string(key);
                                 });
    std::vector<Job> jobs;
    for (const std::string& name : names) {
      std::optional<Job> job = GetJob(name);
      if (job && (job->state == JobState::kQueued || job->state == JobState::kRunning)) {
        jobs.push_back(*std::move(job));
      }
    }
    if (jobs.size() == names.size() || names == before) return jobs;
    before = std::move(names);
  }
}
std::optional<Job> CheckpointStore::GetJob(std::string_view key) const {
  return FindRecord<Job>(*impl_->catalog, keys::kJobs, key,
                         [](std::string_view, std::string_view value) { return DecodeJob(value); });
}

std::vector<Eval> CheckpointStore::ListEvals(const Digest& artifact) const {
  return ScanRecords<Eval>(
      *impl_->catalog, keys::EvalsOf(artifact),
      [](std::string_view, std::string_view value) { return DecodeEval(value); });
}

RetentionPolicy CheckpointStore::GetRetention(std::string_view run) const {
  const auto policy = FindRecord<RetentionPolicy>(
      *impl_->catalog, keys::kRetention, run,
      [](std::string_view, std::string_view value) { return DecodeRetention(value); });
  return policy.value_or(RetentionPolicy{});
}

namespace {

Result<std::optional<ProbeSet>> ReadTexts(const Catalog& catalog, const std::string& key) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto raw, catalog.Get(Column::kRecords, key));
  if (!raw) return std::optional<ProbeSet>();
  STOCKPOT_ASSIGN_OR_RETURN(ProbeSet texts, DecodeProbe(*raw));
  return std::optional(std::move(texts));
}

}  // namespace

Result<std::optional<ProbeSet>> CheckpointStore::GetProbe(std::string_view run) const {
  return ReadTexts(*impl_->catalog, keys::Named(keys::kProbes, run));
}

Result<std::optional<ProbeSet>> CheckpointStore::GetCalibration(std::string_view run) const {
  return ReadTexts(*impl_->catalog, keys::Named(keys::kCalibrations, run));
}

std::optional<Manifest> CheckpointStore::GetDraft(std::string_view job) const {
  const auto raw = impl_->catalog->Get(Column::kRecords, keys::Named(keys::kDrafts, job));
  if (!raw.ok() || !raw->has_value()) return std::nullopt;
  Result<Manifest> made = Manifest::FromJson(**raw);
  return made.ok() ? std::optional(*std::move(made)) : std::nullopt;
}

Result<GateConfig> CheckpointStore::GetGate(std::string_view run) const {
  STOCKPOT_ASSIGN_OR_RETURN(const auto raw,
                            impl_->catalog->Get(Column::kRecords, keys::Named(keys::kGates, run)));
  return raw ? DecodeGate(*raw) : GateConfig{};
}

Result<PoolRecord> CheckpointStore::GetPool(std::string_view name) const {
  STOCKPOT_ASSIGN_OR_RETURN(const auto raw,
                            impl_->catalog->Get(Column::kRecords, keys::Named(keys::kPools, name)));
  if (!raw) return NotFound("there is no pool '" + std::string(name.substr(0, 128)) + "'");
  return DecodePool(*raw);
}

std::vector<PoolRecord> CheckpointStore::ListPools() const {
  return ScanRecords<PoolRecord>(
      *impl_->catalog, keys::kPools,
      [](std::string_view, std::string_view value) { return DecodePool(value); });
}

std::optional<Pin> CheckpointStore::GetPin(const Digest& artifact) const {
  return FindRecord<Pin>(
      *impl_->catalog, keys::kPins, artifact.raw(),
      [&](std::string_view, std::string_view value) { return DecodePin(artifact, value); });
}

std::optional<Tombstone> CheckpointStore::GetTombstone(const Digest& artifact) const {
  return FindRecord<Tombstone>(
      *impl_->catalog, keys::kDeleted, artifact.raw(),
      [&](std::string_view, std::string_view value) { return DecodeTombstone(artifact, value); });
}

std::vector<Event> CheckpointStore::EventsSince(int64_t since, int64_t limit) const {
  std::vector<Event> events;
  if (limit <= 0) return events;
  const std::string first = keys::BigEndian(static_cast<uint64_t>(std::max<int64_t>(since, 0) + 1));
  const Status status = impl_->catalog->Scan(Column::kEvents, "", first,
                                             [&](std::string_view, std::string_view value) {
                                               Result<Event> event = DecodeEvent(value);
                                               if (event.ok()) events.push_back(*std::move(event));
                                               return static_cast<int64_t>(events.size()) < limit;
                                             });
  static_cast<void>(status);
  return events;
}

int64_t CheckpointStore::LastEvent() const { return impl_->LastEvent(); }

bool CheckpointStore::WaitForEvents(int64_t since, int64_t timeout_ms) const {
  std::unique_lock lock(impl_->event_mutex);
  impl_->event_added.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                              [&] { return impl_->last_event > since || impl_->shut_down; });
  return impl_->last_event > since;
}

StoreUsage CheckpointStore::Usage() const {
  StoreUsage usage;
  Status status =
      impl_->catalog->Scan(Column::kChunks, "", "", [&](std::string_view, std::string_view value) {
        const Result<ChunkLocation> location = ChunkLocation::Decode(value);
        if (!location.ok()) return true;
        ++usage.chunks;
        usage.chunk_bytes += location->length;
        usage.stored_bytes += location->stored_length();
        return true;
      });
  status = impl_->catalog->Scan(Column::kRecords, keys::kArtifacts, "",
                                [&](std::string_view, std::string_view) {
                                  ++usage.artifacts;
                                  return true;
                                });
  usage.pack_bytes = impl_->PackBytes();
  usage.events = LastEvent();
  return usage;
}

}  // namespace stockpot
