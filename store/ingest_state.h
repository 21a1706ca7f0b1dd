// What is behind Ingest. Private to store/: ingest.cc (sessions), ingest_ranks.cc (several ranks).
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "store/ingest.h"

namespace stockpot {

// The ranks of one attempt at one checkpoint. Guarded by Ingest::State::mutex, but for the shards
// while `committing` is set: then nobody changes them.
struct Gathering {
  Gathering(const StepKey& k, int64_t now_ms)
      : key(k), shards(k.world), opened_ms(now_ms), last_used_ms(now_ms) {}

  const StepKey key;
  ShardSet shards;
  std::vector<ChunkGuard> guards;  // of the sessions that have committed
  std::optional<Digest> resumed_from;
  int32_t resumed_rank = -1;                // who said so first
  std::map<int32_t, std::string> refusals;  // the last of each rank that has not committed
  const int64_t opened_ms;
  int64_t last_used_ms;
  int calls = 0;            // in progress
  bool committing = false;  // all shards are here, and one of the ranks makes the checkpoint

  GatherState state = GatherState::kOpen;
  CommitReply made;              // complete
  Status failure;                // failed
  std::vector<int32_t> missing;  // when it failed
};

struct Ingest::State {
  State(CheckpointStore& s, IngestLimits l, Clock c) : store(s), limits(l), clock(std::move(c)) {}

  struct Session {
    SessionRequest request;
    int64_t last_used_ms = 0;
    int calls = 0;  // in progress: such a session does not expire
    int64_t put_bytes = 0;
    bool committing = false;
    ChunkGuard guard;                      // of what it has put or was told is there
    std::shared_ptr<Gathering> gathering;  // null: it is the only rank
  };

  // A session that a commit ended, for whoever asks again because the answer was lost.
  struct EndedSession {
    Digest shard;
    CommitReply reply;
    std::shared_ptr<Gathering> gathering;
  };

  // One call of a session.
  struct Call {
    SessionRequest request;
    std::shared_ptr<Gathering> gathering;
  };

  CheckpointStore& store;
  const IngestLimits limits;
  const Clock clock;

  mutable std::mutex mutex;
  int64_t expired_ms = 0;  // guarded by mutex; the last look for idle sessions
  std::condition_variable gathering_changed;
  std::unordered_map<std::string, Session> sessions;              // guarded by mutex
  std::unordered_map<std::string, EndedSession> ended_sessions;   // guarded by mutex
  std::deque<std::string> ended_order;                            // guarded by mutex
  std::map<StepKey, std::shared_ptr<Gathering>> gatherings;       // guarded by mutex; open ones
  std::deque<std::shared_ptr<const Gathering>> ended_gatherings;  // guarded by mutex; oldest first
  // Guarded by mutex: what has been refused for want of room since its last commit, by its name.
  std::unordered_set<std::string> refused;

  // One commit of a run at a time: what is latest and best is read, decided and written under it.
  std::array<std::mutex, 16> run_locks;

  std::mutex& RunLock(const std::string& run) {
    return run_locks[std::hash<std::string>()(run) % run_locks.size()];
  }

  // Begins and ends one call of a session.
  Result<Call> Enter(const std::string& id, bool commit);
  Result<Call> EnterPut(const std::string& id, int64_t bytes);
  void Leave(const std::string& id);
  // After a commit: the session ends, unless the reply is a retryable status.
  void LeaveCommit(const std::string& id, const Digest& shard, const Result<CommitReply>& reply);
  void LeaveLocked(Session& session);
  // The answer to a commit through a session that a commit of the same content ended; else
  // `otherwise`.
  Result<CommitReply> AnswerAgain(const std::string& id, const ShardCommit& shard,
                                  const Status& otherwise);
  int64_t ExpireLocked();
  // A refusal for want of room (a quota, the disk) is an event "push_refused", one until something
  // of that name is committed: a trainer tries again for minutes, and only its log would know.
  void NoteRefusal(const SessionRequest& request, const Status& status);

  Result<CommitReply> CommitAlone(const SessionRequest& request, ShardCommit shard);

  // --- several ranks. Those that end in Locked REQUIRE mutex. ---
  Result<std::shared_ptr<Gathering>> JoinLocked(const SessionRequest& request);
  Result<CommitReply> CommitOfRank(const std::string& session, const Call& call,
                                   const Digest& digest, ShardCommit shard);
  // Syncs the chunks of a shard. Unavailable or InvalidArgument: one of them is not stored.
  Status MakeDurable(const ShardCommit& shard) const;
  // Takes the shard, or finds that it is there. True: this call completes the set, and is the one
  // to make the checkpoint.
  Result<bool> AddShardLocked(const std::string& session, const Call& call, const Digest& digest,
                              ShardCommit shard);
  Result<CommitReply> MakeCheckpoint(Gathering& gathering, const SessionRequest& request);
  // What a rank is told that has committed.
  Result<CommitReply> ReplyLocked(const Gathering& gathering) const;
  void FailLocked(Gathering& gathering, Status why);
  void EndGatheringLocked(Gathering& gathering, GatherState state);
  void DropIfUnusedLocked(const std::shared_ptr<Gathering>& gathering);
  void ExpireGatheringsLocked(int64_t oldest_ms);
  std::shared_ptr<const Gathering> FindGatheringLocked(const StepKey& key) const;
};

// "demo@300", "base smollm2": what a session is about.
std::string SubjectOf(const SessionRequest& request);

}  // namespace stockpot
