#include "store/pool_work.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <utility>

#include "store/job_arguments.h"
#include "store/names.h"

namespace stockpot {
namespace {

constexpr std::string_view kPoolAuthor = "pool";
constexpr int64_t kFollowMs = 30'000;  // that the endpoint may take to answer by the new routes
constexpr int64_t kFollowPollMs = 20;

std::string Joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ",") + name;
  return text;
}

// The routes from one record to the next, with an event each.
void MoveRoutes(const PoolRecord& before, const PoolRecord& after, Commit& commit) {
  const auto move = [&](const std::string& task, const Digest& was, const Digest& to) {
    if (was == to) return;
    const std::string route = PoolRoute(after.name, task);
    commit.routes.push_back(
        {.name = route, .to = to, .expected = was, .by = std::string(kPoolAuthor)});
    commit.events.push_back({.type = "route",
                             .subject = route,
                             .fields = {{"variant", to.IsZero() ? "" : to.Hex()},
                                        {"was", was.IsZero() ? "" : was.Hex()}}});
  };
  for (const PoolTask& task : after.tasks) {
    const PoolTask* old = before.FindTask(task.name);
    move(task.name, old != nullptr ? old->member : Digest{}, task.member);
  }
  for (const PoolTask& task : before.tasks) {
    if (after.FindTask(task.name) == nullptr) move(task.name, task.member, Digest{});
  }
}

}  // namespace

Result<std::optional<PoolWork::Refusal>> PoolWork::Do(const Job& job, Job finished,
                                                      const ProgressFunction& progress) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string pool, Argument(job, "pool"));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string op, Argument(job, "op"));
  STOCKPOT_RETURN_IF_ERROR(Settle(pool, progress));
  const ChunkGuard guard = parts_.store.GuardChunks();
  if (op == "add") return Add(job, std::move(finished), progress);
  if (op == "remove" || op == "evict") return Remove(job, std::move(finished));
  if (op == "delete") {
    STOCKPOT_RETURN_IF_ERROR(DeletePool(job, std::move(finished), progress));
    return std::optional<Refusal>();
  }
  return InvalidArgument("job " + job.key + ": unknown operation '" + op + "'");
}

Result<PoolWork::Incoming> PoolWork::Read(const PoolRecord& pool, PoolAddRequest request,
                                          const ProgressFunction& progress) const {
  Incoming incoming{.pool = pool, .request = std::move(request)};
  for (const std::string& task : incoming.request.tasks) {
    if (!IsValidRunName(task)) {
      return InvalidArgument("'" + task.substr(0, 128) +
                             "' is no name of a task: letters, digits, '.', '_', '-', at most "
                             "128, the first a letter or digit");
    }
    if (const PoolTask* known = pool.FindTask(task)) {
      return AlreadyExists("task '" + task + "' of pool '" + pool.name + "' came with adapter " +
                           known->own.ShortHex() + ": remove it first (`stockpot pool remove " +
                           pool.name + " " + task + "`)");
    }
  }
  for (const std::string& task : incoming.request.tasks) {
    const std::string route = PoolRoute(pool.name, task);
    if (!parts_.store.GetRoute(route)) continue;
    return AlreadyExists("'" + route + "' serves what was published under that name: `stockpot " +
                         "unpublish " + route + "`, or give the task another name");
  }
  if (incoming.request.tasks.empty()) return InvalidArgument("an adapter comes for a task");
  STOCKPOT_ASSIGN_OR_RETURN(incoming.manifest, parts_.store.GetManifest(incoming.request.artifact));
  if (incoming.manifest.kind != ArtifactKind::kAdapter) {
    return InvalidArgument("artifact " + incoming.request.artifact.ShortHex() + " is a " +
                           std::string(ArtifactKindName(incoming.manifest.kind)) +
                           ": a pool takes adapters");
  }
  if (*incoming.manifest.base != pool.config.base) {
    return InvalidArgument("adapter " + incoming.request.artifact.ShortHex() +
                           " was trained over base " + incoming.manifest.base->ShortHex() +
                           ", pool '" + pool.name + "' is over " + pool.config.base.ShortHex());
  }
  STOCKPOT_ASSIGN_OR_RETURN(incoming.base, parts_.store.GetManifest(pool.config.base));
  STOCKPOT_ASSIGN_OR_RETURN(incoming.loaded,
                            LoadAdapterDelta(parts_.store, incoming.manifest, incoming.base));
  STOCKPOT_ASSIGN_OR_RETURN(incoming.state, FreshState(incoming.loaded.delta));
  if (incoming.request.adopt) {
    const double own_norm = incoming.state.norm_sum;
    incoming.state = *incoming.request.adopt;
    if (incoming.state.norm_sum == 0) incoming.state.norm_sum = own_norm;
  }
  if (incoming.request.texts.empty() || parts_.score == nullptr) return incoming;
  STOCKPOT_ASSIGN_OR_RETURN(const double loss,
                            Loss(incoming.request.texts, incoming.manifest, progress));
  if (!std::isfinite(loss)) {
    return InvalidArgument("adapter " + incoming.request.artifact.ShortHex() +
                           ": its loss on the probe texts is not finite");
  }
  incoming.own_loss = loss;
  return incoming;
}

Result<std::optional<PoolWork::Refusal>> PoolWork::Add(const Job& job, Job finished,
                                                       const ProgressFunction& progress) {
  STOCKPOT_ASSIGN_OR_RETURN(PoolAddRequest request, ParsePoolAdd(job));
  STOCKPOT_ASSIGN_OR_RETURN(const PoolRecord before, parts_.store.GetPool(request.pool));
  STOCKPOT_ASSIGN_OR_RETURN(Incoming incoming, Read(before, std::move(request), progress));
  Fields fields = {{"op", incoming.request.adopt ? "adopt" : "add"},
                   {"tasks", Joined(incoming.request.tasks)},
                   {"own", incoming.request.artifact.Hex()}};
  if (!incoming.own_loss) fields["unmeasured"] = fields["tasks"];
  STOCKPOT_ASSIGN_OR_RETURN(std::optional<Change> change, Decide(incoming, fields, progress));
  if (!incoming.path.empty()) fields["path"] = incoming.path;
  if (change) {
    STOCKPOT_RETURN_IF_ERROR(Apply(before, *std::move(change), std::move(finished), fields));
    return std::optional<Refusal>();
  }
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t bytes, PoolBytes(parts_.store, before));
  int64_t leaving = 0;
  for (const PoolLeaving& gone : before.leaving) leaving += gone.bytes;
  std::string why = "adapter " + incoming.request.artifact.ShortHex() + " (" +
                    std::to_string(AdapterBytesOf(incoming.manifest).total()) +
                    " bytes) does not fit pool '" + before.name + "', which has " +
                    std::to_string(bytes) + " of " + std::to_string(before.config.budget_bytes) +
                    " bytes";
  if (leaving > 0) {
    why += ", " + std::to_string(leaving) + " of them of former members that wait for a " +
           "collection of garbage" + (uncollected_.empty() ? "" : " (" + uncollected_ + ")");
  }
  why += ". Tried: " + incoming.path + ". Remove a task, or make a pool with a larger budget";
  return std::optional(Refusal{ResourceExhausted(std::move(why)), std::move(fields)});
}

Result<std::optional<PoolWork::Refusal>> PoolWork::Remove(const Job& job, Job finished) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string name, Argument(job, "pool"));
  STOCKPOT_ASSIGN_OR_RETURN(const PoolRecord before, parts_.store.GetPool(name));
  Change change{.pool = before, .made = {}, .parents = {}, .member = {}, .outcome = "removed"};
  std::string tasks;
  if (job.args.at("op") == "remove") {
    STOCKPOT_ASSIGN_OR_RETURN(tasks, Argument(job, "tasks"));
    const PoolTask* task = before.FindTask(tasks);
    if (task == nullptr) return NotFound("pool '" + name + "' has no task '" + tasks + "'");
    change.member = task->member;
    std::erase_if(change.pool.tasks, [&](const PoolTask& t) { return t.name == tasks; });
  } else {
    const PoolMember* victim = LeastRequested(before, parts_.requests);
    if (victim == nullptr) return NotFound("pool '" + name + "' has no members");
    change.member = victim->artifact;
    change.outcome = "evicted";
    std::erase_if(change.pool.tasks, [&](const PoolTask& t) {
      if (t.member != change.member) return false;
      tasks += (tasks.empty() ? "" : ",") + t.name;
      return true;
    });
  }
  const bool used = std::any_of(change.pool.tasks.begin(), change.pool.tasks.end(),
                                [&](const PoolTask& t) { return t.member == change.member; });
  if (!used) LeaveMember(parts_.store, change.pool, *before.FindMember(change.member));
  STOCKPOT_RETURN_IF_ERROR(Apply(before, std::move(change), std::move(finished),
                                 {{"op", job.args.at("op")}, {"tasks", tasks}}));
  return std::optional<Refusal>();
}

// First the routes go and the members leave, then what they took, and the record last: killed in
// between, the job goes on with what is left.
Status PoolWork::DeletePool(const Job& job, Job finished, const ProgressFunction& progress) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string name, Argument(job, "pool"));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string force, Argument(job, "force"));
  STOCKPOT_ASSIGN_OR_RETURN(PoolRecord pool, parts_.store.GetPool(name));
  STOCKPOT_RETURN_IF_ERROR(MayDeletePool(pool, force == "true"));
  std::string tasks;
  for (const PoolTask& task : pool.tasks) tasks += (tasks.empty() ? "" : ",") + task.name;
  if (!pool.tasks.empty()) {
    PoolRecord emptied = pool;
    emptied.tasks.clear();
    for (const PoolMember& member : pool.members) LeaveMember(parts_.store, emptied, member);
    ++emptied.version;
    Commit commit;
    MoveRoutes(pool, emptied, commit);
    commit.pools.push_back({std::move(emptied), pool.version});
    STOCKPOT_RETURN_IF_ERROR(parts_.store.Apply(std::move(commit)).status());
    STOCKPOT_RETURN_IF_ERROR(Settle(name, progress));
    STOCKPOT_ASSIGN_OR_RETURN(pool, parts_.store.GetPool(name));
  }
  for (const PoolLeaving& gone : pool.leaving) {
    if (Delete(gone.artifact)) continue;  // it goes with the next collection of garbage
    return Unavailable("adapter " + gone.artifact.ShortHex() + " of pool '" + name +
                       "' cannot be deleted yet: " + uncollected_);
  }
  Commit commit;
  commit.events.push_back({.type = "pool",
                           .subject = name,
                           .fields = {{"op", "delete"},
                                      {"pool", name},
                                      {"outcome", "deleted"},
                                      {"tasks", tasks},
                                      {"job", finished.key}}});
  commit.jobs.push_back(std::move(finished));
  const int64_t version = std::exchange(pool.version, 0);
  commit.pools.push_back({.pool = std::move(pool), .expected = version});
  return parts_.store.Apply(std::move(commit)).status();
}

Status PoolWork::Apply(const PoolRecord& before, Change change, Job finished, Fields fields) {
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(change));
  PoolRecord& after = change.pool;
  ++after.version;
  Commit commit;
  if (change.made) {
    STOCKPOT_RETURN_IF_ERROR(PutAdapter(parts_.store, *change.made));
    commit.artifacts.push_back(change.made->manifest);
    commit.edges.push_back({EdgeType::kAdapterOf, change.member, after.config.base});
    for (const Digest& parent : change.parents) {
      if (parent == change.member) continue;
      commit.edges.push_back({EdgeType::kPooledFrom, change.member, parent});
    }
  } else if (after.FindMember(change.member) != nullptr &&
             parts_.store.GetTombstone(change.member)) {
    commit.undeletions.push_back(change.member);
  }
  finished.result = change.member.Hex();
  finished.args.erase("texts");
  fields["pool"] = after.name;
  fields["outcome"] = change.outcome;
  fields["member"] = change.member.Hex();
  fields["bytes"] = std::to_string(bytes);
  fields["budget_bytes"] = std::to_string(after.config.budget_bytes);
  fields["job"] = finished.key;
  MoveRoutes(before, after, commit);
  commit.events.push_back({.type = "pool", .subject = after.name, .fields = std::move(fields)});
  commit.jobs.push_back(std::move(finished));
  commit.pools.push_back({std::move(after), before.version});
  return parts_.store.Apply(std::move(commit)).status();
}

bool PoolWork::StillStands(const Job& job) const {
  const auto op = job.args.find("op");
  if (op == job.args.end() || op->second != "add") return false;
  const Result<PoolAddRequest> request = ParsePoolAdd(job);
  if (!request.ok()) return false;
  const Result<PoolRecord> pool = parts_.store.GetPool(request->pool);
  if (!pool.ok()) return false;
  return std::all_of(request->tasks.begin(), request->tasks.end(), [&](const std::string& name) {
    const PoolTask* task = pool->FindTask(name);
    return task != nullptr && task->own == request->artifact;
  });
}

// --- what left ---

Status PoolWork::WaitForEndpoint(const ProgressFunction& progress) const {
  if (parts_.followed == nullptr) return OkStatus();
  const int64_t event = parts_.store.LastEvent();
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kFollowMs);
  while (!parts_.followed(event)) {
    if (progress) STOCKPOT_RETURN_IF_ERROR(progress(0));
    if (std::chrono::steady_clock::now() > end) {
      return Unavailable("the endpoint still answers by the old members");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(kFollowPollMs));
  }
  return OkStatus();
}

// True if it is gone or will go with the next collection.
bool PoolWork::Delete(const Digest& artifact) {
  if (!parts_.store.HasArtifact(artifact)) return true;
  const std::optional<Tombstone> tombstone = parts_.store.GetTombstone(artifact);
  if (tombstone && tombstone->purge_ms <= parts_.clock()) return true;
  Commit commit;
  commit.deletions.push_back({.artifact = artifact,
                              .purge_ms = parts_.clock(),
                              .by = std::string(kPoolAuthor),
                              .why = "not in the pool any more"});
  const Status status = parts_.store.Apply(std::move(commit)).status();
  if (!status.ok()) uncollected_ = status.message();
  return status.ok();
}

Status PoolWork::Settle(const std::string& name, const ProgressFunction& progress) {
  const Result<PoolRecord> pool = parts_.store.GetPool(name);
  if (!pool.ok() || pool->leaving.empty()) return OkStatus();
  const Status followed = WaitForEndpoint(progress);
  if (progress) STOCKPOT_RETURN_IF_ERROR(progress(0));  // the pipeline stops
  uncollected_ = followed.message();
  if (!followed.ok()) return OkStatus();
  for (const PoolLeaving& gone : pool->leaving) Delete(gone.artifact);
  const Status collected = parts_.store.CollectGarbage(parts_.garbage).status();
  if (!collected.ok()) {
    uncollected_ = collected.message();
    return OkStatus();
  }
  PoolRecord after = *pool;
  ++after.version;
  std::erase_if(after.leaving,
                [&](const PoolLeaving& gone) { return !parts_.store.HasArtifact(gone.artifact); });
  if (after.leaving.size() == pool->leaving.size()) return OkStatus();
  Commit commit;
  commit.pools.push_back({std::move(after), pool->version});
  return parts_.store.Apply(std::move(commit)).status();
}

Status PoolWork::DiscardCandidate(const Job& job) {
  if (!job.args.contains("owned") || job.args.at("owned") != "true") return OkStatus();
  const Result<PoolAddRequest> request = ParsePoolAdd(job);
  if (!request.ok() || !parts_.store.HasArtifact(request->artifact)) return OkStatus();
  for (const PoolRecord& pool : parts_.store.ListPools()) {
    if (pool.FindMember(request->artifact) != nullptr) return OkStatus();
    for (const PoolLeaving& gone : pool.leaving) {
      if (gone.artifact == request->artifact) return OkStatus();
    }
  }
  if (Delete(request->artifact)) leftovers_ = true;
  return OkStatus();
}

void PoolWork::Discard(const Job& job) {
  static_cast<void>(DiscardCandidate(job));
  if (std::exchange(leftovers_, false)) {
    static_cast<void>(parts_.store.CollectGarbage(parts_.garbage));
  }
}

Status PoolWork::Clean(const Job& job, const ProgressFunction& progress) {
  const auto pool = job.args.find("pool");
  if (pool == job.args.end()) return OkStatus();
  STOCKPOT_RETURN_IF_ERROR(DiscardCandidate(job));
  STOCKPOT_RETURN_IF_ERROR(Settle(pool->second, progress));
  if (!std::exchange(leftovers_, false)) return OkStatus();
  // What cannot be collected now goes with the next collection.
  static_cast<void>(parts_.store.CollectGarbage(parts_.garbage));
  return OkStatus();
}

Status PoolWork::CleanAll(const ProgressFunction& progress) {
  const std::vector<PoolRecord> pools = parts_.store.ListPools();
  if (pools.empty()) return OkStatus();
  for (const Job& job : parts_.store.ListJobs()) {
    const bool ended = job.state == JobState::kDone || job.state == JobState::kFailed;
    if (job.kind == JobKind::kPool && ended) STOCKPOT_RETURN_IF_ERROR(DiscardCandidate(job));
  }
  for (const PoolRecord& pool : pools) STOCKPOT_RETURN_IF_ERROR(Settle(pool.name, progress));
  if (std::exchange(leftovers_, false)) {
    static_cast<void>(parts_.store.CollectGarbage(parts_.garbage));
  }
  return OkStatus();
}

}  // namespace stockpot
