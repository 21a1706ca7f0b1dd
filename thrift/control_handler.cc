#include <algorithm>
#include <chrono>
#include <limits>
#include <span>

#include "store/policy.h"
#include "thrift/conversions.h"
#include "thrift/handlers.h"

namespace stockpot {
namespace {

constexpr size_t kFailedJobsInStatus = 20;
constexpr int64_t kWatchSliceMs = 200;  // how long a stopping server waits for a watcher

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

class ControlHandler : public rpc::ControlServiceIf {
 public:
  ControlHandler(const RpcServerParts& parts, const ServerFacts& server)
      : store_(parts.store),
        ingest_(parts.ingest),
        pipeline_(parts.pipeline),
        control_(parts.control),
        server_(server),
        started_ms_(NowMs()) {}

  void merge(rpc::Job& reply, const std::vector<std::string>& ids, const std::string& run,
             int64_t step, double energy, int64_t rank, bool force,
             const rpc::MergeOptions& options) override {
    Answer([&]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(MergeOptions asked, MergeOptionsFromRpc(options));
      asked.energy = energy;
      asked.rank = rank;
      asked.force = force;
      STOCKPOT_ASSIGN_OR_RETURN(const std::vector<std::string> names, MergedNames(ids, options.last));
      std::vector<Digest> parents;
      std::string target_run = run;
      int64_t target_step = step;
      STOCKPOT_RETURN_IF_ERROR(ResolveParents(names, parents, target_run, target_step));
      STOCKPOT_RETURN_IF_ERROR(CheckMergeOptions(asked, parents.size()));
      STOCKPOT_RETURN_IF_ERROR(store_.GetRun(target_run).status());
      STOCKPOT_ASSIGN_OR_RETURN(const Job job, pipeline_.Submit(MakeMergeJob(
                                                   target_run, target_step, parents, asked)));
      reply = WithProgress(job);
      return OkStatus();
    });
  }

  void publish(rpc::Job& reply, const std::string& id, const std::string& codec,
               const std::string& name, const rpc::PublishOptions& options) override {
    Answer([&]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, CheckPublish(id, name));
      STOCKPOT_ASSIGN_OR_RETURN(const PublishHow how, HowOf(digest, codec, options));
      STOCKPOT_ASSIGN_OR_RETURN(
          const Job job, pipeline_.Submit(MakePublishJob(digest, how.codec, name, how.options)));
      reply = WithProgress(job);
      return OkStatus();
    });
  }

  void publish_forced(rpc::Job& reply, const std::string& id, const std::string& codec,
                      const std::string& name, const std::string& why,
                      const std::string& by, const rpc::PublishOptions& options) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(why, "the reason"));
      STOCKPOT_RETURN_IF_ERROR(CheckLength(by, "'by'"));
      if (why.empty()) return InvalidArgument("say why the gate does not count");
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, CheckPublish(id, name));
      STOCKPOT_ASSIGN_OR_RETURN(const PublishHow how, HowOf(digest, codec, options));
      STOCKPOT_ASSIGN_OR_RETURN(const Job job,
                                pipeline_.Submit(MakeForcedPublishJob(digest, how.codec, name, why,
                                                                      by, how.options)));
      reply = WithProgress(job);
      return OkStatus();
    });
  }

  void compress(rpc::Job& reply, const std::string& id) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(id, "the id"));
      Job asked;
      if (store_.GetRun(id).ok()) {
        asked = MakeCompressJob(id);
      } else {
        STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store_.ResolveName(id));
        STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(digest));
        if (manifest.kind != ArtifactKind::kCheckpoint && manifest.kind != ArtifactKind::kState) {
          return InvalidArgument("'" + id + "' is a " +
                                 std::string(ArtifactKindName(manifest.kind)) +
                                 ": runs, checkpoints and states are compressed");
        }
        asked = MakeCompressJob(manifest.run, digest);
      }
      STOCKPOT_ASSIGN_OR_RETURN(const Job job, pipeline_.Submit(std::move(asked)));
      reply = WithProgress(job);
      return OkStatus();
    });
  }

  void score(rpc::Job& reply, const std::string& id) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(id, "the id"));
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store_.ResolveName(id));
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(digest));
      if (manifest.run.empty() || manifest.kind == ArtifactKind::kState) {
        return InvalidArgument("'" + id + "' is no checkpoint, merge or variant of a run");
      }
      STOCKPOT_ASSIGN_OR_RETURN(const auto probe, store_.GetProbe(manifest.run));
      if (!probe) {
        return InvalidArgument("run '" + manifest.run + "' has no probe texts: give it some with " +
                               "`stockpot probe set " + manifest.run + " FILE...`");
      }
      STOCKPOT_ASSIGN_OR_RETURN(const Job job,
                                pipeline_.Submit(MakeScoreJob(digest, probe->digest())));
      reply = WithProgress(job);
      return OkStatus();
    });
  }

  void job(rpc::Job& reply, const std::string& key) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(key, "the job's key"));
      const std::optional<Job> job = store_.GetJob(key);
      if (!job) return NotFound("there is no job '" + key + "'");
      reply = WithProgress(*job);
      return OkStatus();
    });
  }

  void jobs(std::vector<rpc::Job>& reply) override {
    Answer([&]() -> Status {
      for (const Job& job : store_.ListJobs()) reply.push_back(WithProgress(job));
      return OkStatus();
    });
  }

  void unpublish(const std::string& name) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(name, "the route's name"));
      const std::optional<Route> route = store_.GetRoute(name);
      STOCKPOT_RETURN_IF_ERROR(NotOfAPool(name));
      if (!route) return NotFound("there is no route '" + name + "': `stockpot routes` lists them");
      Commit commit;
      commit.routes.push_back(
          {.name = name, .to = {}, .expected = route->variant, .by = "operator"});
      commit.events.push_back({.type = "route",
                               .subject = name,
                               .fields = {{"variant", ""}, {"was", route->variant.Hex()}}});
      return store_.Apply(std::move(commit)).status();
    });
  }

  void routes(std::vector<rpc::Alias>& reply) override {
    Answer([&]() -> Status {
      for (const Route& route : store_.ListRoutes()) reply.push_back(ToRpc(route));
      return OkStatus();
    });
  }

  void status(rpc::DaemonStatus& reply) override {
    Answer([&]() -> Status {
      reply.version = control_.version;
      reply.uptime_ms = NowMs() - started_ms_;
      reply.thrift_address = server_.addresses();
      const StoreUsage usage = store_.Usage();
      reply.runs = static_cast<int64_t>(store_.ListRuns().size());
      reply.artifacts = usage.artifacts;
      reply.chunks = usage.chunks;
      reply.chunk_bytes = usage.chunk_bytes;
      reply.stored_chunk_bytes = usage.stored_bytes;
      reply.quota_bytes = store_.quota_bytes();
      reply.pack_bytes = usage.pack_bytes;
      reply.open_sessions = ingest_.open_sessions();
      for (const OpenGathering& gathering : ingest_.OpenGatherings()) {
        reply.gatherings.push_back(ToRpc(gathering));
      }
      AddJobs(reply.jobs);
      if (control_.describe) control_.describe(reply);
      return OkStatus();
    });
  }

  void watch(std::vector<rpc::Event>& reply, int64_t since, int32_t limit,
             int32_t timeout_ms) override {
    Answer([&]() -> Status {
      if (since < 0) return InvalidArgument("since is negative: 0 starts at the first event");
      if (limit < 1 || limit > rpc_limits::kMaxWatchEvents) {
        return InvalidArgument("limit must be 1.." + std::to_string(rpc_limits::kMaxWatchEvents));
      }
      int64_t left_ms = std::clamp(timeout_ms, 0, rpc_limits::kMaxWatchMs);
      while (left_ms > 0 && !server_.stopping()) {
        const int64_t slice_ms = std::min(left_ms, kWatchSliceMs);
        if (store_.WaitForEvents(since, slice_ms)) break;
        left_ms -= slice_ms;
      }
      for (const Event& event : store_.EventsSince(since, limit)) reply.push_back(ToRpc(event));
      return OkStatus();
    });
  }

  void scrub(rpc::ScrubReply& reply, const std::string& repair_from) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(repair_from, "the folder"));
      STOCKPOT_ASSIGN_OR_RETURN(
          const ScrubReport report,
          repair_from.empty() ? store_.Scrub(nullptr) : store_.Repair(repair_from, nullptr));
      reply = ToRpc(report);
      return OkStatus();
    });
  }

  void backup(rpc::BackupReply& reply, const std::string& directory) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(directory, "the folder"));
      STOCKPOT_ASSIGN_OR_RETURN(const BackupReport report, store_.BackupTo(directory, nullptr));
      reply.artifacts = report.artifacts;
      reply.total_chunks = report.total_chunks;
      reply.copied_chunks = report.copied_chunks;
      reply.copied_bytes = report.copied_bytes;
      reply.event = report.event;
      return OkStatus();
    });
  }

 private:
  // What a merge is asked of: `ids`, or the newest `last` checkpoints of the run that they name, up to
  // the checkpoint that they name.
  Result<std::vector<std::string>> MergedNames(const std::vector<std::string>& ids,
                                               int64_t last) const {
    const int64_t count = last == 0 ? static_cast<int64_t>(ids.size()) : last;
    if (count < 1 || count > rpc_limits::kMaxMergeParents) {
      return InvalidArgument("a merge has 1.." + std::to_string(rpc_limits::kMaxMergeParents) +
                             " parents");
    }
    if (last == 0) return ids;
    if (ids.size() != 1) return InvalidArgument("the last checkpoints are of one run: name it");
    STOCKPOT_RETURN_IF_ERROR(CheckLength(ids[0], "a run's name"));
    std::string run = ids[0];
    int64_t newest = std::numeric_limits<int64_t>::max();
    if (!store_.GetRun(run).ok()) {
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store_.ResolveName(ids[0]));
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(digest));
      run = manifest.run;
      newest = manifest.step;
    }
    STOCKPOT_ASSIGN_OR_RETURN(std::vector<StepRecord> steps, store_.ReadSteps(run));
    std::erase_if(steps, [&](const StepRecord& step) {
      return step.kind != ArtifactKind::kCheckpoint || step.deleted || step.step > newest;
    });
    if (static_cast<int64_t>(steps.size()) < last) {
      return InvalidArgument("'" + ids[0] + "' has " + std::to_string(steps.size()) +
                             " checkpoints, not " + std::to_string(last));
    }
    std::vector<std::string> names;
    for (const StepRecord& step : std::span(steps).last(static_cast<size_t>(last))) {
      names.push_back(step.artifact.Hex());
    }
    return names;
  }

  // Names of a pool's tasks move with the pool.
  Status NotOfAPool(const std::string& name) const {
    const auto of_pool = SplitPoolRoute(name);
    if (!of_pool || !store_.GetPool(of_pool->first).ok()) return OkStatus();
    return InvalidArgument("'" + name + "' belongs to pool '" + of_pool->first +
                           "': `stockpot pool remove " + of_pool->first + " " + of_pool->second +
                           "` takes it out");
  }

  // What is to be published, if it can be, under a name that can be given.
  Result<Digest> CheckPublish(const std::string& id, const std::string& name) const {
    STOCKPOT_RETURN_IF_ERROR(CheckLength(id, "the id"));
    if (!name.empty() && !IsValidRouteName(name)) {
      return InvalidArgument("'" + name.substr(0, 64) +
                             "' cannot be a route: 1..256 bytes, no control characters");
    }
    STOCKPOT_RETURN_IF_ERROR(NotOfAPool(name));
    // RUN@... belongs to the runs: a name that says "step 7" must never answer as another step.
    if (name.find('@') != std::string::npos) {
      return InvalidArgument("'" + name + "' cannot be given: names with '@' follow the runs' " +
                             "own steps; choose one without, or none for the default names");
    }
    STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store_.ResolveName(id));
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(digest));
    if (manifest.kind != ArtifactKind::kCheckpoint && manifest.kind != ArtifactKind::kMerge) {
      return InvalidArgument("'" + id + "' is a " + std::string(ArtifactKindName(manifest.kind)) +
                             ": checkpoints and merges are published");
    }
    return digest;
  }

  // How an artifact is published, by the caller or by its run.
  Result<PublishHow> HowOf(const Digest& artifact, const std::string& codec,
                           const rpc::PublishOptions& options) const {
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(artifact));
    STOCKPOT_ASSIGN_OR_RETURN(const Run run, store_.GetRun(manifest.run));
    return PublishHowFromRpc(codec, options, run.config);
  }

  // `run` and `step` are filled in from the parents where the caller left them open.
  Status ResolveParents(const std::vector<std::string>& ids, std::vector<Digest>& parents,
                        std::string& run, int64_t& step) const {
    const bool step_is_open = step < 0;
    for (const std::string& id : ids) {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(id, "an id"));
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store_.ResolveName(id));
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(digest));
      if (manifest.kind != ArtifactKind::kCheckpoint && manifest.kind != ArtifactKind::kMerge) {
        return InvalidArgument("'" + id + "' is a " + std::string(ArtifactKindName(manifest.kind)) +
                               ": checkpoints and merges are merged");
      }
      if (std::find(parents.begin(), parents.end(), digest) != parents.end()) {
        return InvalidArgument("'" + id + "' is named twice");
      }
      parents.push_back(digest);
      if (run.empty()) run = manifest.run;
      if (step_is_open) step = std::max(step, manifest.step);
    }
    return OkStatus();
  }

  rpc::Job WithProgress(const Job& job) const {
    rpc::Job out = ToRpc(job);
    const Pipeline::Progress progress = pipeline_.progress();
    if (job.state == JobState::kRunning && progress.key == job.key) out.share = progress.share;
    return out;
  }

  void AddJobs(std::vector<rpc::Job>& out) const {
    std::vector<Job> jobs = store_.ListJobs();
    size_t failed = std::count_if(jobs.begin(), jobs.end(),
                                  [](const Job& job) { return job.state == JobState::kFailed; });
    for (const Job& job : jobs) {
      if (job.state == JobState::kDone) continue;
      if (job.state == JobState::kFailed && failed-- > kFailedJobsInStatus) continue;
      out.push_back(WithProgress(job));
    }
  }

  CheckpointStore& store_;
  Ingest& ingest_;
  Pipeline& pipeline_;
  const DaemonControl control_;
  const ServerFacts& server_;
  const int64_t started_ms_;
};

}  // namespace

std::shared_ptr<rpc::ControlServiceIf> MakeControlHandler(const RpcServerParts& parts,
                                                          const ServerFacts& server) {
  return std::make_shared<ControlHandler>(parts, server);
}

}  // namespace stockpot
