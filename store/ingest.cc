#include "store/ingest.h"

#include <sys/random.h>

#include <array>
#include <mutex>
#include <unordered_map>

#include "store/ingest_commit.h"

namespace stockpot {
namespace {

constexpr size_t kRunLocks = 16;

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

}  // namespace

struct Ingest::State {
  State(CheckpointStore& s, IngestLimits l, Clock c) : store(s), limits(l), clock(std::move(c)) {}

  struct Session {
    SessionRequest request;
    int64_t last_used_ms = 0;
    int calls = 0;  // in progress: such a session does not expire
    bool committing = false;
    ChunkGuard guard;  // of what it has put or was told is there
  };

  CheckpointStore& store;
  const IngestLimits limits;
  const Clock clock;

  mutable std::mutex mutex;
  std::unordered_map<std::string, Session> sessions;  // guarded by mutex

  // One commit of a run at a time: what is latest and best is read, decided and written under it.
  std::array<std::mutex, kRunLocks> run_locks;

  std::mutex& RunLock(const std::string& run) {
    return run_locks[std::hash<std::string>()(run) % kRunLocks];
  }

  // Begins and ends one call of a session.
  Result<SessionRequest> Enter(const std::string& id, bool commit);
  void Leave(const std::string& id, bool end_session);
  int64_t ExpireLocked();
};

Result<SessionRequest> Ingest::State::Enter(const std::string& id, bool commit) {
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
  if (session.committing) return Unavailable("the session is being committed");
  session.committing = commit;
  ++session.calls;
  return session.request;
}

void Ingest::State::Leave(const std::string& id, bool end_session) {
  std::lock_guard lock(mutex);
  const auto it = sessions.find(id);
  if (it == sessions.end()) return;  // aborted meanwhile
  if (end_session) {
    sessions.erase(it);
    return;
  }
  it->second.committing = false;
  --it->second.calls;
  it->second.last_used_ms = clock();
}

int64_t Ingest::State::ExpireLocked() {
  const int64_t oldest_ms = clock() - limits.session_idle_ms;
  return static_cast<int64_t>(std::erase_if(sessions, [&](const auto& entry) {
    return entry.second.calls == 0 && entry.second.last_used_ms < oldest_ms;
  }));
}

Ingest::Ingest(CheckpointStore& store, IngestLimits limits, Clock clock)
    : state_(std::make_unique<State>(store, limits, std::move(clock))) {}
Ingest::~Ingest() = default;

Result<Run> Ingest::CreateRun(const std::string& name, const std::string& base,
                              const RunConfig& config,
                              const std::map<std::string, std::string>& tags) {
  if (!IsValidRunName(name)) {
    return InvalidArgument("'" + name.substr(0, 128) +
                           "' is no run name: letters, digits, '.', "
                           "'_', '-', at most 128, the first a letter or digit");
  }
  CheckpointStore& store = state_->store;
  const Result<Digest> digest = store.ResolveName(base);
  if (!digest.ok()) return digest.status().WithContext("base of run '" + name + "'");
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store.GetManifest(*digest));
  if (manifest.kind != ArtifactKind::kBase) {
    return InvalidArgument("'" + base.substr(0, 128) + "' is a " +
                           std::string(ArtifactKindName(manifest.kind)) + ", not a base");
  }
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
    run.created_ms = stored->created_ms;
    if (stored->config == config && stored->tags == run.tags) return *stored;
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
  if (request.world > 1) {
    return InvalidArgument("sessions of several ranks (world = " + std::to_string(request.world) +
                           ") are not supported by this version: gather the tensors on one rank "
                           "and send with rank = 0, world = 1");
  }
  if (request.world != 1 || request.rank != 0) {
    return InvalidArgument("rank " + std::to_string(request.rank) + " of a world of " +
                           std::to_string(request.world));
  }
  if (!IsValidRunName(request.run)) return InvalidArgument("not a name of a run or base");
  if (request.kind == ArtifactKind::kCheckpoint) {
    if (request.step < 0) return InvalidArgument("a checkpoint has a step of at least 0");
    STOCKPOT_RETURN_IF_ERROR(state_->store.GetRun(request.run).status());
  } else if (request.kind != ArtifactKind::kBase) {
    return InvalidArgument("a session takes a checkpoint or a base, not a " +
                           std::string(ArtifactKindName(request.kind)));
  } else if (request.step != -1 || request.resumed_from) {
    return InvalidArgument("a base has no step and resumes from nothing");
  }
  if (request.resumed_from && !state_->store.HasArtifact(*request.resumed_from) &&
      !state_->store.WasPurged(*request.resumed_from)) {
    return NotFound("resumed_from: artifact " + request.resumed_from->ShortHex());
  }
  STOCKPOT_ASSIGN_OR_RETURN(std::string id, NewSessionId());
  std::lock_guard lock(state_->mutex);
  state_->ExpireLocked();
  if (static_cast<int64_t>(state_->sessions.size()) >= state_->limits.sessions) {
    return ResourceExhausted(std::to_string(state_->limits.sessions) +
                             " sessions are open: commit or abort one, or wait for one to expire");
  }
  State::Session session{.request = request, .last_used_ms = state_->clock()};
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
  state_->Leave(session, /*end_session=*/false);
  return have;
}

Status Ingest::PutChunk(const std::string& session, const Digest& digest,
                        std::span<const std::byte> data) {
  STOCKPOT_RETURN_IF_ERROR(state_->Enter(session, /*commit=*/false).status());
  const Status status = state_->store.PutChunk(digest, data);
  state_->Leave(session, /*end_session=*/false);
  return status;
}

Result<CommitReply> Ingest::CommitShard(const std::string& session, ShardCommit shard) {
  STOCKPOT_ASSIGN_OR_RETURN(const SessionRequest request, state_->Enter(session, /*commit=*/true));
  Result<CommitReply> reply = Internal("not committed");
  {
    std::lock_guard lock(state_->RunLock(request.run));
    reply = CommitSession(state_->store, request, shard);
  }
  state_->Leave(session, reply.ok() || !IsRetryable(reply.status().code()));
  return reply;
}

Status Ingest::Abort(const std::string& session) {
  std::lock_guard lock(state_->mutex);
  const auto it = state_->sessions.find(session);
  if (it == state_->sessions.end()) return NotFound("no such session");
  if (it->second.committing) return Unavailable("the session is being committed");
  state_->sessions.erase(it);
  return OkStatus();
}

int64_t Ingest::ExpireIdle() {
  std::lock_guard lock(state_->mutex);
  return state_->ExpireLocked();
}

int64_t Ingest::open_sessions() const {
  std::lock_guard lock(state_->mutex);
  return static_cast<int64_t>(state_->sessions.size());
}

}  // namespace stockpot
