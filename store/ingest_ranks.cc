// Sessions of several ranks: how shards gather into one checkpoint, and what a step or a resuming
// job is told.
#include <algorithm>
#include <chrono>
#include <set>
#include <tuple>

#include "store/ingest_commit.h"
#include "store/ingest_state.h"

namespace stockpot {
namespace {

// --- limits ---
constexpr size_t kEndedGatherings = 256;  // whose outcome is remembered
constexpr size_t kMaxWhyBytes = 4096;     // of what a failed gathering says
constexpr int64_t kWaitSliceMs = 100;     // between two looks at the clock while waiting
constexpr int kMaxDecisions = 8;          // when a checkpoint is deleted between read and commit

StepKey KeyOf(const SessionRequest& request) {
  return {request.run, request.step, request.world, request.attempt};
}

std::string AttemptText(const StepKey& key) {
  return "attempt '" + key.attempt + "' of " + std::to_string(key.world) + " ranks at " + key.run +
         "@" + std::to_string(key.step);
}

std::vector<Digest> ChunksOf(const ShardCommit& shard) {
  std::set<Digest> chunks;
  const auto add = [&](const std::vector<TensorEntry>& entries) {
    for (const TensorEntry& entry : entries) {
      for (const auto& [role, part] : entry.parts) {
        chunks.insert(part.chunks.begin(), part.chunks.end());
      }
    }
  };
  add(shard.tensors);
  for (const auto& [group, entries] : shard.states) add(entries);
  for (const auto& [name, part] : shard.files) {
    chunks.insert(part.chunks.begin(), part.chunks.end());
  }
  return {chunks.begin(), chunks.end()};
}

// Whether a stored tensor holds what an entry of a shard says, cut as it says.
bool Holds(const TensorEntry& stored, const TensorEntry& entry) {
  if (stored.dtype != entry.dtype || stored.shape != entry.shape ||
      stored.alias_of != entry.alias_of) {
    return false;
  }
  if (!entry.alias_of.empty()) return true;
  const TensorBox box = entry.pieces.empty() ? WholeBox(entry.shape) : entry.pieces[0];
  if (box.elements() == 0) return true;
  std::string role = "data";
  if (!stored.pieces.empty()) {
    const auto piece = std::lower_bound(stored.pieces.begin(), stored.pieces.end(), box);
    if (piece == stored.pieces.end() || *piece != box) return false;
    role = PieceRole(static_cast<size_t>(piece - stored.pieces.begin()));
  } else if (box != WholeBox(stored.shape)) {
    return false;
  }
  return stored.parts.at(role).chunks == entry.parts.begin()->second.chunks;
}

// Where an artifact that is there is not what a rank sends: the first thing that differs.
std::string FindDifference(const Manifest& manifest, const std::vector<TensorEntry>& entries) {
  for (const TensorEntry& entry : entries) {
    const TensorEntry* stored = manifest.Find(entry.name);
    if (stored == nullptr || !Holds(*stored, entry)) return "tensor '" + entry.name + "'";
  }
  return "";
}

// A step that has its checkpoint and all groups that a rank sends: the answer to it, if its shard
// is part of them.
Result<CommitReply> AnswerFromStep(const CheckpointStore& store, const SessionRequest& request,
                                   const StepRecord& step, const ShardCommit& shard) {
  CommitReply reply{.artifact = step.artifact, .existed = true};
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store.GetManifest(step.artifact));
  std::string difference = FindDifference(manifest, shard.tensors);
  for (const auto& [name, part] : shard.files) {
    const auto file = manifest.files.find(name);
    const bool same = file != manifest.files.end() && file->second.chunks == part.chunks;
    if (!same && difference.empty()) difference = "file " + name;
  }
  for (const auto& [group, entries] : shard.states) {
    const auto state = store.GetStep(request.run, request.step, ArtifactKind::kState, group);
    if (!state) return Unavailable("group '" + group + "' was purged just now");
    reply.states[group] = state->artifact;
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest stored, store.GetManifest(state->artifact));
    const std::string of_state = FindDifference(stored, entries);
    if (!of_state.empty() && difference.empty()) difference = of_state + " of group " + group;
  }
  if (!difference.empty()) {
    return AlreadyExists("is artifact " + step.artifact.ShortHex() + " already, and its " +
                         difference + " is not what rank " + std::to_string(request.rank) +
                         " sends");
  }
  reply.event_sequence = store.LastEvent();
  return reply;
}

// Whether the step has its checkpoint and all groups of `shard`, none of them deleted.
bool IsMade(const CheckpointStore& store, const SessionRequest& request,
            const std::optional<StepRecord>& step, const ShardCommit& shard) {
  if (!step || step->deleted) return false;
  return std::all_of(shard.states.begin(), shard.states.end(), [&](const auto& state) {
    const auto there =
        store.GetStep(request.run, request.step, ArtifactKind::kState, state.first);
    return there && !there->deleted;
  });
}

}  // namespace

Result<CommitReply> Ingest::State::CommitAlone(const SessionRequest& request, ShardCommit shard) {
  ShardSet alone(1);
  alone.Add(0, Digest{}, std::move(shard));
  STOCKPOT_ASSIGN_OR_RETURN(const ShardCommit all, alone.Assemble());
  std::lock_guard lock(RunLock(request.run));
  return CommitSession(store, request, all);
}

Result<std::shared_ptr<Gathering>> Ingest::State::JoinLocked(const SessionRequest& request) {
  std::shared_ptr<Gathering>& gathering = gatherings[KeyOf(request)];
  if (gathering == nullptr) {
    if (static_cast<int64_t>(gatherings.size()) > limits.gatherings) {
      gatherings.erase(KeyOf(request));
      return ResourceExhausted(std::to_string(limits.gatherings) +
                               " checkpoints of several ranks are being gathered already");
    }
    gathering = std::make_shared<Gathering>(KeyOf(request), clock());
  }
  gathering->last_used_ms = clock();
  if (!request.resumed_from) return gathering;
  if (gathering->resumed_from && gathering->resumed_from != request.resumed_from) {
    return InvalidArgument("rank " + std::to_string(request.rank) + " resumed from artifact " +
                           request.resumed_from->ShortHex() + ", rank " +
                           std::to_string(gathering->resumed_rank) + " from " +
                           gathering->resumed_from->ShortHex() +
                           ": ask resume_point, which says the same to all of them");
  }
  if (!gathering->resumed_from) gathering->resumed_rank = request.rank;
  gathering->resumed_from = request.resumed_from;
  return gathering;
}

Status Ingest::State::MakeDurable(const ShardCommit& shard) const {
  // A commit of nothing: what was put is synced, and indexed.
  STOCKPOT_RETURN_IF_ERROR(store.Apply({}).status());
  const std::vector<Digest> chunks = ChunksOf(shard);
  const std::vector<bool> have = store.HaveChunks(chunks);
  const auto missing = std::find(have.begin(), have.end(), false);
  if (missing == have.end()) return OkStatus();
  return Unavailable("chunk " + chunks[static_cast<size_t>(missing - have.begin())].Hex() +
                     " is not stored: send what have_chunks says is missing, and commit again");
}

Result<CommitReply> Ingest::State::CommitOfRank(const std::string& session, const Call& call,
                                                const Digest& digest, ShardCommit shard) {
  SessionRequest request = call.request;
  STOCKPOT_RETURN_IF_ERROR(MakeDurable(shard));
  const auto step = store.GetStep(request.run, request.step, ArtifactKind::kCheckpoint);
  const bool is_made = IsMade(store, request, step, shard);
  std::unique_lock lock(mutex);
  Gathering& gathering = *call.gathering;
  if (gathering.state == GatherState::kFailed) return gathering.failure;
  // Where shards are gathering already, it shows when the last of them is here.
  if (is_made && gathering.shards.is_empty()) {
    lock.unlock();
    return AnswerFromStep(store, request, *step, shard);
  }
  STOCKPOT_ASSIGN_OR_RETURN(const bool completes,
                            AddShardLocked(session, call, digest, std::move(shard)));
  if (!completes) return ReplyLocked(gathering);
  request.resumed_from = gathering.resumed_from;
  lock.unlock();
  return MakeCheckpoint(gathering, request);
}

Result<bool> Ingest::State::AddShardLocked(const std::string& session, const Call& call,
                                           const Digest& digest, ShardCommit shard) {
  Gathering& gathering = *call.gathering;
  const int32_t rank = call.request.rank;
  if (gathering.state == GatherState::kComplete) return false;
  if (const Digest* known = gathering.shards.DigestOf(rank)) {
    if (*known == digest) return false;
    const Status differs = AlreadyExists(
        "rank " + std::to_string(rank) + " committed two different shards in " +
        AttemptText(gathering.key) + ": a restarted job needs an attempt of another name");
    if (gathering.state == GatherState::kOpen && !gathering.committing) {
      FailLocked(gathering, differs);
    }
    return differs;
  }
  int64_t waiting = 0;
  for (const auto& [key, other] : gatherings) waiting += other->shards.memory_bytes();
  if (waiting > limits.gathered_bytes) {
    return ResourceExhausted("the shards that wait for other ranks fill " +
                             std::to_string(limits.gathered_bytes >> 20) + " MiB of memory");
  }
  gathering.shards.Add(rank, digest, std::move(shard));
  gathering.refusals.erase(rank);
  if (const auto it = sessions.find(session); it != sessions.end()) {
    gathering.guards.push_back(it->second.guard);
  }
  gathering.committing = gathering.shards.Missing().empty();
  return gathering.committing;
}

Result<CommitReply> Ingest::State::MakeCheckpoint(Gathering& gathering,
                                                  const SessionRequest& request) {
  Result<CommitReply> reply = Internal("not committed");
  if (const Result<ShardCommit> all = gathering.shards.Assemble(); all.ok()) {
    std::lock_guard lock(RunLock(request.run));
    reply = CommitSession(store, request, *all);
  } else {
    reply = all.status();
  }
  std::lock_guard lock(mutex);
  gathering.committing = false;
  if (reply.ok()) {
    gathering.made = *reply;
    EndGatheringLocked(gathering, GatherState::kComplete);
  } else if (IsRetryable(reply.status().code())) {
    // This rank comes again; the others' chunks are durable already.
    gathering.shards.Remove(request.rank);
  } else {
    FailLocked(gathering, reply.status().WithContext(AttemptText(gathering.key)));
  }
  return reply;
}

Result<CommitReply> Ingest::State::ReplyLocked(const Gathering& gathering) const {
  if (gathering.state == GatherState::kFailed) return gathering.failure;
  if (gathering.state == GatherState::kOpen) {
    return CommitReply{.complete = false, .missing = gathering.shards.Missing()};
  }
  CommitReply reply = gathering.made;
  reply.existed = true;
  return reply;
}

void Ingest::State::FailLocked(Gathering& gathering, Status why) {
  gathering.failure = std::move(why);
  gathering.missing = gathering.shards.Missing();
  EndGatheringLocked(gathering, GatherState::kFailed);
}

// What it held is let go; its sessions find out at their next call.
void Ingest::State::EndGatheringLocked(Gathering& gathering, GatherState state) {
  gathering.state = state;
  gathering.shards = ShardSet(gathering.key.world);
  gathering.guards.clear();
  gathering.refusals.clear();
  const auto it = gatherings.find(gathering.key);
  ended_gatherings.push_back(it->second);
  if (ended_gatherings.size() > kEndedGatherings) ended_gatherings.pop_front();
  gatherings.erase(it);
  const int64_t now_ms = clock();
  for (auto& [id, session] : sessions) {
    if (session.gathering.get() == &gathering) session.last_used_ms = now_ms;
  }
  gathering_changed.notify_all();
}

// Nobody has committed and nobody is about to: then it never was.
void Ingest::State::DropIfUnusedLocked(const std::shared_ptr<Gathering>& gathering) {
  if (gathering == nullptr || gathering->state != GatherState::kOpen ||
      !gathering->shards.is_empty()) {
    return;
  }
  const bool is_used = std::any_of(sessions.begin(), sessions.end(), [&](const auto& session) {
    return session.second.gathering == gathering;
  });
  if (!is_used) gatherings.erase(gathering->key);
}

void Ingest::State::ExpireGatheringsLocked(int64_t oldest_ms) {
  for (auto it = gatherings.begin(); it != gatherings.end();) {
    Gathering& gathering = *(it++)->second;  // may be erased below
    if (gathering.calls > 0 || gathering.last_used_ms >= oldest_ms) continue;
    std::string why = AttemptText(gathering.key) + " expired after " +
                      std::to_string(limits.session_idle_ms / 1000) +
                      " s without a call: " + RanksText(gathering.shards.Missing()) +
                      " never committed";
    for (const auto& [rank, refusal] : gathering.refusals) {
      why += "; rank " + std::to_string(rank) + " was refused: " + refusal;
      if (why.size() > kMaxWhyBytes) break;
    }
    FailLocked(gathering, NotFound(why));
  }
}

std::shared_ptr<const Gathering> Ingest::State::FindGatheringLocked(const StepKey& key) const {
  if (const auto it = gatherings.find(key); it != gatherings.end()) return it->second;
  const auto ended = std::find_if(ended_gatherings.rbegin(), ended_gatherings.rend(),
                                  [&](const auto& gathering) { return gathering->key == key; });
  return ended == ended_gatherings.rend() ? nullptr : *ended;
}

Result<StepState> Ingest::GetStepState(const StepKey& key, int64_t timeout_ms) {
  using std::chrono::milliseconds;
  if (!IsValidRunName(key.run)) return InvalidArgument("not the name of a run");
  const auto made = state_->store.GetStep(key.run, key.step, ArtifactKind::kCheckpoint);
  if (made && !made->deleted && made->world == key.world && made->attempt == key.attempt) {
    return StepState{.state = GatherState::kComplete,
                     .artifact = made->artifact,
                     .event_sequence = state_->store.LastEvent()};
  }
  const auto deadline = std::chrono::steady_clock::now() +
                        milliseconds(std::clamp<int64_t>(timeout_ms, 0, kMaxStepWaitMs));
  std::unique_lock lock(state_->mutex);
  while (true) {
    state_->ExpireLocked();
    const std::shared_ptr<const Gathering> gathering = state_->FindGatheringLocked(key);
    if (gathering == nullptr) {
      return NotFound("no " + AttemptText(key) +
                      " is known: no rank of it came since the daemon "
                      "started, or it ended long ago; open a session and commit again");
    }
    StepState state{.state = gathering->state};
    switch (gathering->state) {
      case GatherState::kComplete:
        state.artifact = gathering->made.artifact;
        state.event_sequence = gathering->made.event_sequence;
        return state;
      case GatherState::kFailed:
        state.missing = gathering->missing;
        state.why = gathering->failure.message();
        return state;
      case GatherState::kOpen:
        break;
    }
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) {
      state.missing = gathering->shards.Missing();
      return state;
    }
    state_->gathering_changed.wait_until(lock,
                                         std::min(deadline, now + milliseconds(kWaitSliceMs)));
  }
}

Result<ResumeDecision> Ingest::ResumePoint(const std::string& run, const std::string& key) {
  if (!IsPrintableName(key, kMaxAttemptBytes)) {
    return InvalidArgument("the key of a resuming job is empty, over " +
                           std::to_string(kMaxAttemptBytes) + " bytes, or not printable");
  }
  CheckpointStore& store = state_->store;
  STOCKPOT_RETURN_IF_ERROR(store.GetRun(run).status());
  std::lock_guard lock(state_->RunLock(run));
  Result<int64_t> applied = Unavailable("not tried");
  for (int attempt = 0; attempt < kMaxDecisions; ++attempt) {
    std::vector<ResumeDecision> decisions = store.ListResumeDecisions(run);
    for (const ResumeDecision& decision : decisions) {
      if (decision.key == key) return decision;
    }
    ResumeDecision decision{.run = run, .key = key, .decided_ms = state_->clock()};
    for (const StepRecord& step : store.ListSteps(run)) {
      if (step.kind != ArtifactKind::kCheckpoint || step.deleted) continue;
      if (step.step <= decision.step) continue;
      decision.step = step.step;
      decision.artifact = step.artifact;
    }
    Commit commit;
    commit.resumes.push_back({decision});
    std::sort(decisions.begin(), decisions.end(), [](const auto& a, const auto& b) {
      return std::tie(a.decided_ms, a.key) < std::tie(b.decided_ms, b.key);
    });
    for (size_t i = 0; i + kMaxResumeDecisions <= decisions.size(); ++i) {
      commit.resumes.push_back({decisions[i], /*forget=*/true});
    }
    commit.events.push_back(
        {.type = "resume",
         .subject = run,
         .fields = {{"key", key},
                    {"artifact", decision.step < 0 ? std::string() : decision.artifact.Hex()},
                    {"step", std::to_string(decision.step)}}});
    applied = store.Apply(std::move(commit));
    if (applied.ok()) return decision;
    // The checkpoint was deleted meanwhile: decide anew.
    if (applied.status().code() != StatusCode::kAlreadyExists) break;
  }
  return applied.status().WithContext("resume point of " + run);
}

}  // namespace stockpot
