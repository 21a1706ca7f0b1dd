#include "store/ingest.h"

#include <sys/random.h>

#include <array>

#include "store/ingest_commit.h"
#include "store/ingest_state.h"

namespace stockpot {
namespace {

// --- limits ---
constexpr int64_t kLooksPerIdle = 64;    // for idle sessions, in the time one of them may be idle
constexpr size_t kEndedSessions = 4096;  // that a repeated commit finds again
constexpr size_t kMostRefused = 1024;    // names whose refusal was said

// 128 random bits: a session id cannot be guessed by another client.
Result<std::string> NewSessionId() {
  std::array<uint8_t, 16> random;
  if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    return Internal("no random numbers for a session id");
  }
  std::string id;
  for (const uint8_t byte : random) {
    constexpr char kDigits[] = "0123456789abcdef";
    id += kDigits[byte >> 4];
    id += kDigits[byte & 15];
  }
  return id;
}

Status CheckRequest(const CheckpointStore& store, const SessionRequest& request) {
  if (request.world < 1 || request.world > kMaxWorld || request.rank < 0 ||
      request.rank >= request.world) {
    return InvalidArgument("rank " + std::to_string(request.rank) + " of a world of " +
                           std::to_string(request.world) + ": a world has 1 to " +
                           std::to_string(kMaxWorld) + " ranks, counted from 0");
  }
  const auto of_pool =
      request.kind == ArtifactKind::kAdapter ? SplitPoolRoute(request.run) : std::nullopt;
  if (!of_pool && !IsValidRunName(request.run)) {
    return InvalidArgument("'" + request.run.substr(0, 128) +
                           "' is no name of a run, base, pool or task: letters, digits, '.', '_', "
                           "'-', at most 128, the first a letter or digit");
  }
  if (!request.attempt.empty() && !IsPrintableName(request.attempt, kMaxAttemptBytes)) {
    return InvalidArgument("the attempt's name is over " + std::to_string(kMaxAttemptBytes) +
                           " bytes, or not printable");
  }
  if (request.kind == ArtifactKind::kCheckpoint) {
    if (request.step < 0) return InvalidArgument("a checkpoint has a step of at least 0");
    if (request.world > 1 && request.attempt.empty()) {
      return InvalidArgument(
          "several ranks need the name of their attempt, the same on each of "
          "them and another one after a restart of the job");
    }
    STOCKPOT_RETURN_IF_ERROR(store.GetRun(request.run).status());
  } else if (request.kind != ArtifactKind::kBase && request.kind != ArtifactKind::kAdapter &&
             request.kind != ArtifactKind::kVariant) {
    return InvalidArgument("a session takes a checkpoint, a base, an adapter or a variant, not a " +
                           std::string(ArtifactKindName(request.kind)));
  } else if (request.step != -1 || request.resumed_from || request.world > 1) {
    return InvalidArgument("a " + std::string(ArtifactKindName(request.kind)) +
                           " is of no step, has one rank, and resumes from nothing");
  }
  if (request.kind == ArtifactKind::kAdapter) {
    STOCKPOT_ASSIGN_OR_RETURN(const Digest base, ResolveBase(store, request.base));
    if (of_pool) {
      STOCKPOT_ASSIGN_OR_RETURN(const PoolRecord pool, store.GetPool(of_pool->first));
      if (pool.config.base != base) {
        return InvalidArgument("pool '" + pool.name + "' is over another base, " +
                               pool.config.base.ShortHex());
      }
    }
  } else if (!request.base.empty()) {
    return InvalidArgument(
        "only an adapter says its base: a checkpoint has its run's, a variant "
        "its manifest's");
  }
  if (request.resumed_from && !store.HasArtifact(*request.resumed_from) &&
      !store.WasPurged(*request.resumed_from)) {
    return NotFound("resumed_from: artifact " + request.resumed_from->ShortHex());
  }
  return OkStatus();
}

}  // namespace

std::string SubjectOf(const SessionRequest& request) {
  if (request.kind == ArtifactKind::kCheckpoint) {
    return request.run + "@" + std::to_string(request.step);
  }
  return std::string(ArtifactKindName(request.kind)) + " " + request.run;
}

Result<Digest> ResolveBase(const CheckpointStore& store, const std::string& name) {
  STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store.ResolveName(name));
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store.GetManifest(digest));
  if (manifest.kind != ArtifactKind::kBase) {
    return InvalidArgument("'" + name.substr(0, 128) + "' is a " +
                           std::string(ArtifactKindName(manifest.kind)) + ", not a base");
  }
  return digest;
}

Result<Ingest::State::Call> Ingest::State::Enter(const std::string& id, bool commit) {
  std::lock_guard lock(mutex);
  ExpireLocked();
  const auto it = sessions.find(id);
  if (it == sessions.end()) {
    return NotFound("no such session: it ended, expired after " +
                    std::to_string(limits.session_idle_ms / 1000) +
                    " s without a call, or the "
                    "daemon restarted");
  }
  Session& session = it->second;
  if (session.gathering != nullptr && session.gathering->state == GatherState::kFailed) {
    const Status failure = session.gathering->failure;
    sessions.erase(it);
    return failure;
  }
  if (session.committing) return Unavailable("the session is being committed");
  session.committing = commit;
  ++session.calls;
  if (session.gathering != nullptr) ++session.gathering->calls;
  return Call{session.request, session.gathering};
}

// A session that puts without end would fill the disk with what nobody committed.
Result<Ingest::State::Call> Ingest::State::EnterPut(const std::string& id, int64_t bytes) {
  STOCKPOT_ASSIGN_OR_RETURN(Call call, Enter(id, /*commit=*/false));
  std::lock_guard lock(mutex);
  const auto it = sessions.find(id);
  if (it == sessions.end()) return NotFound("the session was aborted");
  Session& session = it->second;
  if (bytes <= limits.session_bytes - session.put_bytes) {
    session.put_bytes += bytes;
    return call;
  }
  LeaveLocked(session);
  return InvalidArgument("a session takes " + std::to_string(limits.session_bytes) +
                         " bytes, this one of " + SubjectOf(session.request) + " has put " +
                         std::to_string(session.put_bytes) +
                         ": start the daemon with a larger --session-mib");
}

void Ingest::State::NoteRefusal(const SessionRequest& request, const Status& status) {
  if (status.code() != StatusCode::kResourceExhausted) return;
  {
    const std::lock_guard lock(mutex);
    if (refused.size() >= kMostRefused) refused.clear();
    if (!refused.insert(request.run).second) return;
  }
  Commit commit;
  commit.events.push_back({.type = "push_refused",
                           .subject = request.run,
                           .fields = {{"run", request.run},
                                      {"step", std::to_string(request.step)},
                                      {"reason", status.message()}}});
  if (store.Apply(std::move(commit)).ok()) return;
  const std::lock_guard lock(mutex);
  refused.erase(request.run);  // no room even for that: the next one may find some
}

void Ingest::State::LeaveLocked(Session& session) {
  session.committing = false;
  --session.calls;
  session.last_used_ms = clock();
  if (session.gathering == nullptr) return;
  --session.gathering->calls;
  session.gathering->last_used_ms = session.last_used_ms;
}

void Ingest::State::Leave(const std::string& id) {
  std::lock_guard lock(mutex);
  const auto it = sessions.find(id);
  if (it != sessions.end()) LeaveLocked(it->second);  // not aborted meanwhile
}

void Ingest::State::LeaveCommit(const std::string& id, const Digest& shard,
                                const Result<CommitReply>& reply) {
  std::lock_guard lock(mutex);
  const auto it = sessions.find(id);
  if (it == sessions.end()) return;
  LeaveLocked(it->second);
  const std::shared_ptr<Gathering> gathering = it->second.gathering;
  const int32_t rank = it->second.request.rank;
  if (!reply.ok() && gathering != nullptr && gathering->shards.DigestOf(rank) == nullptr) {
    gathering->refusals[rank] = reply.status().message();
  }
  if (!reply.ok() && IsRetryable(reply.status().code())) return;
  if (reply.ok()) {
    refused.erase(it->second.request.run);
    ended_sessions[id] = {shard, *reply, gathering};
    ended_order.push_back(id);
    if (ended_order.size() > kEndedSessions) {
      ended_sessions.erase(ended_order.front());
      ended_order.pop_front();
    }
  }
  sessions.erase(it);
  DropIfUnusedLocked(gathering);
}

Result<CommitReply> Ingest::State::AnswerAgain(const std::string& id, const ShardCommit& shard,
                                               const Status& otherwise) {
  if (otherwise.code() != StatusCode::kNotFound || !CheckShard(shard).ok()) return otherwise;
  const Digest digest = ShardDigest(shard);
  std::lock_guard lock(mutex);
  const auto it = ended_sessions.find(id);
  if (it == ended_sessions.end() || it->second.shard != digest) return otherwise;
  if (it->second.gathering != nullptr) return ReplyLocked(*it->second.gathering);
  CommitReply reply = it->second.reply;
  reply.existed = true;
  return reply;
}

int64_t Ingest::State::ExpireLocked() {
  const int64_t now_ms = clock();
  if (now_ms - expired_ms < limits.session_idle_ms / kLooksPerIdle) return 0;
  expired_ms = now_ms;
  const int64_t oldest_ms = now_ms - limits.session_idle_ms;
  ExpireGatheringsLocked(oldest_ms);
  return static_cast<int64_t>(std::erase_if(sessions, [&](const auto& entry) {
    return entry.second.calls == 0 && entry.second.last_used_ms < oldest_ms;
  }));
}

Ingest::Ingest(CheckpointStore& store, IngestLimits limits, Clock clock)
    : state_(std::make_unique<State>(store, limits, std::move(clock))) {}
Ingest::~Ingest() = default;

Result<Run> Ingest::CreateRun(const std::string& name, const std::string& base,
                              const RunConfig& config,
                              const std::map<std::string, std::string>& tags, bool keep_config) {
  if (!IsValidRunName(name)) {
    return InvalidArgument("'" + name.substr(0, 128) +
                           "' is no run name: letters, digits, '.', "
                           "'_', '-', at most 128, the first a letter or digit");
  }
  CheckpointStore& store = state_->store;
  const Result<Digest> digest = ResolveBase(store, base);
  if (!digest.ok()) return digest.status().WithContext("base of run '" + name + "'");
  std::lock_guard lock(state_->RunLock(name));
  Run run{.name = name, .base = *digest, .config = config, .tags = tags};
  run.created_ms = state_->clock();
  Event event{.type = "run", .subject = name, .fields = {{"change", "created"}}};
  const Result<Run> stored = store.GetRun(name);
  if (!stored.ok() && stored.status().code() != StatusCode::kNotFound) return stored.status();
  if (stored.ok()) {
    if (stored->base != *digest) {
      return AlreadyExists("run '" + name + "' has another base, " + stored->base.ShortHex());
    }
    if (run.tags.empty()) run.tags = stored->tags;
    if (keep_config) run.config = stored->config;
    run.created_ms = stored->created_ms;
    if (stored->config == run.config && stored->tags == run.tags) return *stored;
    event.fields["change"] = "config";
  }
  event.fields["base"] = digest->Hex();
  Commit commit;
  commit.runs.push_back(run);
  commit.events.push_back(std::move(event));
  STOCKPOT_RETURN_IF_ERROR(store.Apply(std::move(commit)).status());
  return run;
}

Result<std::string> Ingest::OpenSession(const SessionRequest& request) {
  STOCKPOT_RETURN_IF_ERROR(CheckRequest(state_->store, request));
  STOCKPOT_ASSIGN_OR_RETURN(std::string id, NewSessionId());
  std::lock_guard lock(state_->mutex);
  state_->ExpireLocked();
  if (static_cast<int64_t>(state_->sessions.size()) >= state_->limits.sessions) {
    return ResourceExhausted(std::to_string(state_->limits.sessions) +
                             " sessions are open: commit or abort one, or wait for one to expire");
  }
  State::Session session{.request = request, .last_used_ms = state_->clock()};
  if (request.world > 1) {
    STOCKPOT_ASSIGN_OR_RETURN(session.gathering, state_->JoinLocked(request));
  }
  session.guard = state_->store.GuardChunks();
  state_->sessions[id] = std::move(session);
  return id;
}

Result<std::vector<bool>> Ingest::HaveChunks(const std::string& session,
                                             std::span<const Digest> digests) {
  if (static_cast<int64_t>(digests.size()) > state_->limits.chunks_per_query) {
    return InvalidArgument("at most " + std::to_string(state_->limits.chunks_per_query) +
                           " chunks a query");
  }
  STOCKPOT_RETURN_IF_ERROR(state_->Enter(session, /*commit=*/false).status());
  std::vector<bool> have = state_->store.HaveChunks(digests);
  state_->Leave(session);
  return have;
}

Status Ingest::PutChunk(const std::string& session, const Digest& digest,
                        std::span<const std::byte> data) {
  STOCKPOT_ASSIGN_OR_RETURN(const State::Call call, state_->EnterPut(session, std::ssize(data)));
  const Status status = state_->store.PutChunk(digest, data);
  if (!status.ok()) state_->NoteRefusal(call.request, status);
  state_->Leave(session);
  return status;
}

Result<CommitReply> Ingest::CommitShard(const std::string& session, ShardCommit shard) {
  const Result<State::Call> call = state_->Enter(session, /*commit=*/true);
  if (!call.ok()) return state_->AnswerAgain(session, shard, call.status());
  Digest digest;
  Result<CommitReply> reply = Internal("not committed");
  if (const Status status = CheckShard(shard); status.ok()) {
    digest = ShardDigest(shard);
    reply = call->gathering == nullptr
                ? state_->CommitAlone(call->request, std::move(shard))
                : state_->CommitOfRank(session, *call, digest, std::move(shard));
  } else {
    reply = status;
  }
  if (!reply.ok()) {
    reply = reply.status().WithContext(SubjectOf(call->request));
    state_->NoteRefusal(call->request, reply.status());
  }
  state_->LeaveCommit(session, digest, reply);
  return reply;
}

Status Ingest::Abort(const std::string& session) {
  std::lock_guard lock(state_->mutex);
  const auto it = state_->sessions.find(session);
  if (it == state_->sessions.end()) return NotFound("no such session");
  if (it->second.committing) return Unavailable("the session is being committed");
  const std::shared_ptr<Gathering> gathering = it->second.gathering;
  if (gathering != nullptr) gathering->calls -= it->second.calls;  // they find no session to leave
  state_->sessions.erase(it);
  state_->DropIfUnusedLocked(gathering);
  return OkStatus();
}

int64_t Ingest::ExpireIdle() {
  std::lock_guard lock(state_->mutex);
  return state_->ExpireLocked();
}

std::vector<OpenGathering> Ingest::OpenGatherings() const {
  std::lock_guard lock(state_->mutex);
  std::vector<OpenGathering> open;
  for (const auto& [key, gathering] : state_->gatherings) {
    open.push_back({key, gathering->shards.Missing(), gathering->opened_ms,
                    gathering->last_used_ms + state_->limits.session_idle_ms});
  }
  return open;
}

int64_t Ingest::open_sessions() const {
  std::lock_guard lock(state_->mutex);
  return static_cast<int64_t>(state_->sessions.size());
}

}  // namespace stockpot
