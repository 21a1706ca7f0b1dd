#include "store/job_work.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <utility>

#include "store/best_model.h"
#include "store/bitdelta_codec.h"
#include "store/job_arguments.h"
#include "store/record_codec.h"

namespace stockpot {
namespace {

constexpr int kRouteAttempts = 5;            // of a commit whose routes somebody moved meanwhile
constexpr int64_t kEventsLookedAt = 10'000;  // of those that came during an expire job
constexpr std::string_view kMovedBy = "pipeline";
constexpr char kJudgedBy[] = "judged_by";  // argument of a publish that is done
constexpr size_t kJudgedByDigits = 16;

Result<std::optional<StepRecord>> FindStep(const CheckpointStore& store, const std::string& run,
                                           const std::function<bool(const StepRecord&)>& wanted) {
  if (run.empty()) return std::optional<StepRecord>();
  STOCKPOT_ASSIGN_OR_RETURN(std::vector<StepRecord> steps, store.ReadSteps(run));
  for (StepRecord& step : steps) {
    if (wanted(step)) return std::optional<StepRecord>(std::move(step));
  }
  return std::optional<StepRecord>();
}

// A merge that names no run belongs to its parents' run, at their last step.
Status DefaultRunAndStep(const CheckpointStore& store, MergeArguments& args) {
  if (!args.run.empty()) return OkStatus();
  for (const Digest& parent : args.parents) {
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store.GetManifest(parent));
    if (!args.run.empty() && manifest.run != args.run) {
      return InvalidArgument("the parents are of the runs '" + args.run + "' and '" + manifest.run +
                             "': name the run the merge belongs to");
    }
    args.run = manifest.run;
    args.step = std::max(args.step, manifest.step);
  }
  return OkStatus();
}

std::string AttributeOr(const Manifest& manifest, const std::string& key) {
  const auto it = manifest.attributes.find(key);
  return it == manifest.attributes.end() ? "" : it->second;
}

std::string CurrentVariantHex(const CheckpointStore& store, const std::string& route) {
  const std::optional<Route> current = store.GetRoute(route);
  return current ? current->variant.Hex() : "";
}

// To be done again, from the beginning.
Job Requeued(Job job) {
  job.state = JobState::kQueued;
  job.attempts = 0;
  return job;
}

// A commit that lost a race for a route may be made again; everything else is final.
bool LostRace(const Status& status) { return status.code() == StatusCode::kAlreadyExists; }

}  // namespace

Status JobWork::Do(const Job& job, const ProgressFunction& progress) {
  if (job.kind == JobKind::kExpire) return Expire(job);
  if (job.kind == JobKind::kCompress) return Compress(job, progress);
  if (job.kind == JobKind::kScore) return Score(job, progress);
  if (job.kind == JobKind::kPool) return Pool(job, progress);
  Status status;
  {
    // The outcome's chunks are committed long after they are put.
    const ChunkGuard guard = store_.GuardChunks();
    status = job.kind == JobKind::kMerge ? Merge(job, progress) : Publish(job, progress);
  }
  if (std::exchange(leftovers_, false)) {
    // What cannot be collected now goes with the next collection.
    GarbageOptions garbage = garbage_;
    garbage.purge = false;
    static_cast<void>(store_.CollectGarbage(garbage));
  }
  return status;
}

bool JobWork::StillStands(const Job& job) const {
  // There may be more to do each time.
  if (job.kind == JobKind::kExpire || job.kind == JobKind::kCompress) return false;
  if (job.kind == JobKind::kScore) return ScoreStands(job);
  if (job.kind == JobKind::kPool) return pool_.StillStands(job);
  if (job.kind != JobKind::kPublish) return true;
  const Result<PublishRequest> request = ReadPublish(job);
  if (!request.ok()) return false;
  // Other texts or limits: other scales perhaps, and another judgement.
  const auto judged = job.args.find(kJudgedBy);
  if ((judged == job.args.end() ? "" : judged->second) != JudgedBy(request->source.run)) {
    return false;
  }
  // Routes move while they are looked at: a name that fails only counts if it is still due.
  std::vector<std::string> failed;
  for (;;) {
    auto names = RouteNames(request->source, request->artifact, request->codec, request->name);
    if (!names.ok()) return false;
    std::erase_if(*names, [&](const std::string& name) {
      const std::optional<Route> route = store_.GetRoute(name);
      return route && route->variant.Hex() == job.result;
    });
    if (names->empty()) return true;
    if (*names == failed) return false;
    failed = std::move(*names);
  }
}

Status JobWork::Expire(const Job& job) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string run, Argument(job, "run"));
  const int64_t seen = store_.LastEvent();
  STOCKPOT_RETURN_IF_ERROR(store_.ApplyRetention(run).status());
  const Status collected = store_.CollectGarbage(garbage_).status();
  // Somebody scrubs or copies: the bytes come back with the next collection.
  if (!collected.ok() && collected.code() != StatusCode::kUnavailable) return collected;
  return Conclude(job, {}, [&] { return CheckpointSince(seen, run); });
}

// The outcome is committed with the job's state; what is cleaned after it may wait for the next
// one.
Status JobWork::Pool(const Job& job, const ProgressFunction& progress) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::optional<PoolWork::Refusal> refusal,
                            pool_.Do(job, Finished(job, Digest{}), progress));
  if (refusal) return Fail(job, refusal->why, refusal->fields);
  static_cast<void>(pool_.Clean(job, progress));
  return OkStatus();
}

Status JobWork::Conclude(const Job& job, Commit commit, const std::function<bool()>& again) {
  for (;;) {
    Commit attempt = commit;
    attempt.last_event = store_.LastEvent();
    attempt.jobs.push_back(again() ? Requeued(job) : Finished(job, Digest{}));
    const Status status = store_.Apply(std::move(attempt)).status();
    if (status.code() != StatusCode::kAlreadyExists) return status;
  }
}

bool JobWork::CheckpointSince(int64_t event, const std::string& run) const {
  const auto since = store_.EventsSince(event, kEventsLookedAt);
  return std::any_of(since.begin(), since.end(),
                     [&](const Event& e) { return e.type == "checkpoint" && e.subject == run; });
}

bool JobWork::WholeSince(int64_t event) const {
  const auto since = store_.EventsSince(event, kEventsLookedAt);
  return std::any_of(since.begin(), since.end(), [&](const Event& e) {
    const auto it = e.fields.find(e.type == "alias" ? "to" : "artifact");
    if ((e.type != "alias" && e.type != "pin") || it == e.fields.end()) return false;
    const Result<Digest> digest = Digest::FromHex(it->second);
    return digest.ok() && store_.IsCompressed(*digest);
  });
}

Status JobWork::Compress(const Job& job, const ProgressFunction& progress) {
  HistoryOptions options{.bytes_per_second = history_bytes_per_second_};
  STOCKPOT_ASSIGN_OR_RETURN(options.run, Argument(job, "run"));
  if (job.args.contains("artifact")) {
    STOCKPOT_ASSIGN_OR_RETURN(const std::string hex, Argument(job, "artifact"));
    STOCKPOT_ASSIGN_OR_RETURN(options.artifact, Digest::FromHex(hex));
  }
  const int64_t seen = store_.LastEvent();
  int64_t looked = seen;
  bool yields = false;
  options.progress = [&](double share) -> Status {
    STOCKPOT_RETURN_IF_ERROR(progress(share));
    // Whoever queues a job commits an event with it.
    if (const int64_t last = store_.LastEvent(); last == std::exchange(looked, last)) return {};
    for (const Job& open : store_.ListOpenJobs()) yields = yields || open.kind != job.kind;
    return yields ? Unavailable("another job comes first") : OkStatus();
  };
  const Result<HistoryReport> report = store_.CompressHistory(options);
  Commit commit;
  if (!report.ok() && yields) {
    commit.jobs.push_back(Requeued(job));
    return store_.Apply(std::move(commit)).status();
  }
  if (!report.ok()) return report.status();
  // The old forms go. Somebody scrubs or copies: with the next collection.
  GarbageOptions garbage = garbage_;
  garbage.purge = false;
  const Status collected = store_.CollectGarbage(garbage).status();
  if (!collected.ok() && collected.code() != StatusCode::kUnavailable) return collected;
  commit.events.push_back({.type = "compress",
                           .subject = options.run,
                           .fields = {{"run", options.run},
                                      {"artifacts", std::to_string(report->artifacts)},
                                      {"chunks", std::to_string(report->chunks)},
                                      {"chunk_bytes", std::to_string(report->chunk_bytes)},
                                      {"stored_bytes", std::to_string(report->stored_bytes)},
                                      {"whole_chunks", std::to_string(report->whole_chunks)},
                                      {"job", job.key}}});
  return Conclude(job, std::move(commit),
                  [&] { return CheckpointSince(seen, options.run) || WholeSince(seen); });
}

Job JobWork::Finished(Job job, const Digest& result) const {
  job.state = JobState::kDone;
  job.error.clear();
  job.result = result.IsZero() ? "" : result.Hex();
  job.finished_ms = clock_();
  return job;
}

Result<JobWork::PublishRequest> JobWork::ReadPublish(const Job& job) const {
  STOCKPOT_ASSIGN_OR_RETURN(const PublishArguments args, ParsePublishArguments(job));
  PublishRequest request{.artifact = args.artifact,
                         .source = {},
                         .codec = args.codec,
                         .options = args.options,
                         .name = args.name,
                         .force = args.force,
                         .by = args.by};
  STOCKPOT_ASSIGN_OR_RETURN(request.source, store_.GetManifest(request.artifact));
  return request;
}

std::string JobWork::JudgedBy(const std::string& run) const {
  if (run.empty()) return "";
  const auto digest = [](const Result<std::optional<ProbeSet>>& texts) {
    return texts.ok() && *texts ? (*texts)->digest().Hex() : std::string();
  };
  const std::string probe = digest(store_.GetProbe(run));
  const std::string calibration = digest(store_.GetCalibration(run));
  const Result<GateConfig> kept = store_.GetGate(run);
  const GateConfig gate = kept.ok() ? *kept : GateConfig{};
  if (probe.empty() && calibration.empty() && gate == GateConfig{}) return "";
  const std::string all = probe + "/" + calibration + "/" + EncodeGate(gate);
  return Sha256(all).Hex().substr(0, kJudgedByDigits);
}

Status JobWork::Publish(const Job& given, const ProgressFunction& progress) {
  STOCKPOT_ASSIGN_OR_RETURN(const PublishRequest request, ReadPublish(given));
  Job job = given;
  job.args.erase(kJudgedBy);
  // Before they are read: what changes meanwhile makes it a publish of something else.
  if (std::string by = JudgedBy(request.source.run); !by.empty()) job.args[kJudgedBy] = by;
  // Before the work: a name that cannot be served is refused at once.
  STOCKPOT_RETURN_IF_ERROR(
      RouteNames(request.source, request.artifact, request.codec, request.name).status());
  const auto third = [&](int index) {
    return [&progress, index](double share) { return progress((index + share) / 3); };
  };
  STOCKPOT_ASSIGN_OR_RETURN(
      Manifest draft, BuildVariant(store_, request.artifact, request.codec, threads_, third(0),
                                   request.options, {.job = job.key}));
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest variant,
                            Calibrate(job, request, std::move(draft), third(1)));
  STOCKPOT_ASSIGN_OR_RETURN(const GateOutcome gate, PassGate(request, variant, third(2)));
  if (gate.probe && std::isfinite(gate.probe->full_loss)) {
    STOCKPOT_RETURN_IF_ERROR(
        KeepLoss(request.source, request.artifact, gate.probe->texts, gate.probe->full_loss));
  }
  if (gate.refusal && request.force.empty()) return Refuse(job, request, gate);
  Status status;
  for (int attempt = 0; attempt < kRouteAttempts; ++attempt) {
    STOCKPOT_ASSIGN_OR_RETURN(Commit commit, PublishCommit(job, request, variant, gate));
    status = store_.Apply(std::move(commit)).status();
    if (!LostRace(status)) return status;
  }
  return Unavailable("the routes keep moving: " + status.message());
}

Result<std::vector<std::string>> JobWork::RouteNames(const Manifest& source,
                                                     const Digest& source_digest,
                                                     PublishCodec codec,
                                                     const std::string& name) const {
  if (!name.empty()) {
    if (!IsValidRouteName(name))
      return InvalidArgument("'" + name.substr(0, 64) + "' is no route name");
    const auto of_pool = SplitPoolRoute(name);
    if (of_pool && store_.GetPool(of_pool->first).ok()) {
      return InvalidArgument("'" + name + "' is a name of pool '" + of_pool->first +
                             "': choose one without its prefix");
    }
    const std::optional<Alias> alias = store_.GetAlias(name);
    if (alias) {
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest target, store_.GetManifest(alias->artifact));
      if (target.kind == ArtifactKind::kBase) {
        return InvalidArgument("'" + name + "' is the name of a base, which answers to it");
      }
    }
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::optional<StepRecord> step,
                            FindStep(store_, source.run, [&](const StepRecord& s) {
                              return s.artifact == source_digest;
                            }));
  if (!step) {
    if (name.empty()) {
      return InvalidArgument("artifact " + source_digest.ShortHex() +
                             " is no step of a run: give a name to serve it under");
    }
    return std::vector<std::string>{name};
  }
  int64_t latest_step = -1;
  if (const std::optional<Route> latest = store_.GetRoute(source.run + "@latest")) {
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest served, store_.GetManifest(latest->variant));
    latest_step = served.step;
  }
  const std::optional<Alias> best = store_.GetAlias(source.run + "@best");
  return RouteNamesFor(*step, codec, name, latest_step, best && best->artifact == source_digest);
}

Result<Commit> JobWork::PublishCommit(const Job& job, const PublishRequest& request,
                                      const Manifest& variant, const GateOutcome& gate) const {
  const Manifest& source = request.source;
  const Digest& source_digest = request.artifact;
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            RouteNames(source, source_digest, request.codec, request.name));
  const Digest made = variant.digest();
  Commit commit;
  commit.artifacts.push_back(variant);
  commit.edges.push_back({EdgeType::kCompressedFrom, made, source_digest});
  commit.jobs.push_back(Finished(job, made));
  std::string lines;
  for (const std::string& name : names) lines += (lines.empty() ? "" : "\n") + name;
  commit.events.push_back({.type = "variant",
                           .subject = made.Hex(),
                           .fields = {{"variant", made.Hex()},
                                      {"source", source_digest.Hex()},
                                      {"base", source.base->Hex()},
                                      {"codec", std::string(PublishCodecName(request.codec))},
                                      {"run", source.run},
                                      {"step", std::to_string(source.step)},
                                      {"bytes", AttributeOr(variant, "bytes")},
                                      {"bytes_full", AttributeOr(variant, "bytes_full")},
                                      {"routes", lines},
                                      {"job", job.key}}});
  commit.events.back().fields.merge(AlphaFields(variant));
  AddGate(gate, made, commit);
  for (const std::string& name : names) {
    const std::string previous = CurrentVariantHex(store_, name);
    Digest expected;  // zero: must not exist
    if (!previous.empty()) {
      STOCKPOT_ASSIGN_OR_RETURN(expected, Digest::FromHex(previous));
    }
    commit.routes.push_back(
        {.name = name, .to = made, .expected = expected, .by = std::string(kMovedBy)});
    commit.events.push_back(
        {.type = "route",
         .subject = name,
         .fields = {{"variant", made.Hex()}, {"was", previous}, {"source", source_digest.Hex()}}});
  }
  return commit;
}

Status JobWork::Merge(const Job& job, const ProgressFunction& progress) {
  STOCKPOT_ASSIGN_OR_RETURN(MergeArguments args, ParseMergeArguments(job));
  STOCKPOT_RETURN_IF_ERROR(DefaultRunAndStep(store_, args));
  STOCKPOT_RETURN_IF_ERROR(store_.GetRun(args.run).status());
  const auto half = [&](double from) {
    return [&progress, from](double share) { return progress(from + share / 2); };
  };
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest merged, merge_(store_, args.parents, args.run, args.step,
                                                          args.options, half(0)));
  STOCKPOT_ASSIGN_OR_RETURN(const MergeScores scores, ScoreMerge(args, merged, half(0.5)));
  Status status;
  for (int attempt = 0; attempt < kRouteAttempts; ++attempt) {
    STOCKPOT_ASSIGN_OR_RETURN(Commit commit, MergeCommit(job, args, merged, scores));
    status = store_.Apply(std::move(commit)).status();
    if (!LostRace(status)) return status;
  }
  return Unavailable(args.run + "@best keeps moving: " + status.message());
}

Result<Commit> JobWork::MergeCommit(const Job& job, const MergeArguments& args,
                                    const Manifest& merged, const MergeScores& scores) const {
  STOCKPOT_ASSIGN_OR_RETURN(const Run run, store_.GetRun(args.run));
  const Digest made = merged.digest();
  Commit commit;
  commit.artifacts.push_back(merged);
  for (const Digest& parent : std::set<Digest>(args.parents.begin(), args.parents.end())) {
    commit.edges.push_back({EdgeType::kMergedFrom, made, parent});
  }
  STOCKPOT_ASSIGN_OR_RETURN(
      const std::optional<StepRecord> other, FindStep(store_, args.run, [&](const StepRecord& s) {
        return s.kind == ArtifactKind::kMerge && s.step == args.step && s.artifact != made;
      }));
  if (!other) {
    const StepRecord step{.run = args.run,
                          .step = args.step,
                          .kind = ArtifactKind::kMerge,
                          .artifact = made,
                          .committed_ms = clock_()};
    commit.steps.push_back(step);
    for (Job& follow_up : JobsForMerge(run, step)) {
      if (!store_.GetJob(follow_up.key)) commit.jobs.push_back(std::move(follow_up));
    }
  }
  commit.jobs.push_back(Finished(job, made));
  commit.evals = scores.evals;
  Event event{.type = "merge",
              .subject = made.Hex(),
              .fields = {{"artifact", made.Hex()},
                         {"run", args.run},
                         {"step", std::to_string(args.step)},
                         {"parents", job.args.at("parents")},
                         {"method", AttributeOr(merged, "method")},
                         {"kept_energy_min", AttributeOr(merged, "kept_energy_min")},
                         {"job", job.key}}};
  if (other)
    event.fields["step_is"] = other->artifact.Hex();  // of RUN@STEP.merge: this has no name
  event.fields.insert(scores.fields.begin(), scores.fields.end());
  commit.events.push_back(event);
  if (scores.worse) {
    event.type = "merge_worse";
    commit.events.push_back(std::move(event));
  }
  STOCKPOT_RETURN_IF_ERROR(FollowBest(store_, run, "merge", commit));
  return commit;
}

Status JobWork::Fail(Job job, const Status& why,
                     const std::map<std::string, std::string>& more_fields) {
  const bool refused =
      why.code() == StatusCode::kInvalidArgument || why.code() == StatusCode::kCorruption ||
      why.code() == StatusCode::kNotFound || why.code() == StatusCode::kAlreadyExists ||
      (job.kind == JobKind::kPool && why.code() == StatusCode::kResourceExhausted);
  const bool maintains = job.kind == JobKind::kExpire || job.kind == JobKind::kCompress;
  job.state = JobState::kFailed;
  job.error = why.ToString();
  job.finished_ms = clock_();
  if (job.kind == JobKind::kPool) job.args.erase("texts");  // up to 64 KiB
  Event event;
  event.type =
      std::string(JobKindName(job.kind)) + (refused && !maintains ? "_refused" : "_failed");
  event.fields = job.args;
  for (const auto& [name, value] : more_fields) event.fields[name] = value;
  event.fields["reason"] = why.message();
  event.fields["code"] = StatusCodeName(why.code());
  event.fields["job"] = job.key;
  switch (job.kind) {
    case JobKind::kMerge:
      event.subject = job.args["run"] + "@" + job.args["step"];
      break;
    case JobKind::kPublish:
    case JobKind::kScore:
      event.subject = job.args["artifact"];
      break;
    case JobKind::kPool:
      event.subject = job.args["pool"];
      break;
    case JobKind::kExpire:
    case JobKind::kCompress:
      event.subject = job.args["run"];
      break;
  }
  Commit commit;
  commit.jobs.push_back(job);
  commit.events.push_back(std::move(event));
  STOCKPOT_RETURN_IF_ERROR(store_.Apply(std::move(commit)).status());
  if (job.kind == JobKind::kPool) pool_.Discard(job);
  return OkStatus();
}

}  // namespace stockpot
