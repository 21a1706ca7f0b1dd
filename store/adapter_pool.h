// A pool of LoRA adapters over one base that never takes more than its budget (K-Merge): each task
// has an adapter that answers for it, several tasks share one where there is no room for all.
//
//   POOL/TASK (a route) -> member (an adapter) ; the record (store/pool_records.h) says the same
//
// What counts against the budget, at any moment: chunks and manifests of the members, the record of
// the pool with its probe texts and routes, and all of a former member until a collection of
// garbage has taken it (`leaving`). Sizes are rounded up (kPool...Bytes). What does not count: an
// adapter that was sent for the pool and is not in it yet, and what any collection leaves in
// half-empty packs (store/README.md).
//
// A merged member is written before its parts go: both count for a moment. So an adapter is kept
// apart only while there stays room for the largest member a second time, but for the only one.
//
// An add, in one commit, or a refusal that changes nothing:
//   1. the adapter is a member already: the task joins it
//   2. similar to its nearest member (cosine >= threshold): merged with it, if each of their tasks
//      keeps its quality; where one is not measured, only if it does not fit apart
//   3. it fits: apart
//   4. likewise merged with its nearest member, though it is not similar
//   5. apart with less rank, if it keeps its quality
//   6. apart in place of the member that was asked for least (PoolConfig::evict)
//   7. ResourceExhausted, with the numbers
// Quality: exp(own loss - loss) on the task's probe texts, measured as the endpoint computes. Where
// a task has no texts, or the process has no endpoint, similarity alone decides (2 but not 4), and
// of 5 the share of energy that stays; the event says so. Texts for a base that is not the one that
// is served fail the job.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "store/adapter_delta.h"
#include "store/checkpoint_store.h"
#include "store/pool_records.h"
#include "store/scoring.h"

namespace stockpot {

inline constexpr int64_t kPoolChunkBytes = 128;    // beside a chunk: its record's header, its index
inline constexpr int64_t kPoolMemberBytes = 1024;  // beside a manifest: its entry, its edges
inline constexpr int64_t kPoolTaskBytes = 512;     // the route
// No quantile is below it: adapters that share less are as good as independent. (Medians of real
// ones: 0.020 and 0.028, K-Merge's experiments on two models; two random ones of a small model
// reach 0.007.)
inline constexpr double kLeastPoolSimilarity = 0.01;
inline constexpr int64_t kPoolSwapBytes = 2048;  // that the record may grow by while members change

// What one adapter takes.
struct AdapterBytes {
  int64_t manifest = 0;              // with kPoolMemberBytes
  std::map<Digest, int64_t> chunks;  // with kPoolChunkBytes each
  int64_t total() const;
};
AdapterBytes AdapterBytesOf(const Manifest& manifest);

// All that counts against the budget. `more`: manifests that are not stored yet.
Result<int64_t> PoolBytes(const CheckpointStore& store, const PoolRecord& pool,
                          const std::map<Digest, const Manifest*>& more = {});
// The largest member's, 0 without members.
Result<int64_t> LargestMember(const CheckpointStore& store, const PoolRecord& pool,
                              const std::map<Digest, const Manifest*>& more = {});

// The similarity from which on adapters are merged; null: there is none yet.
std::optional<double> PoolThreshold(const PoolConfig& config, std::vector<double> similarities);

// Requests of the last window by route.
using RequestCounts = std::function<int64_t(const std::string& route)>;
// The member whose tasks were asked for least, of equals the one whose newest task is oldest. Null:
// there are no members.
const PoolMember* LeastRequested(const PoolRecord& pool, const RequestCounts& requests);

// Takes a member out; what the pool alone owns counts as leaving. Its tasks are the caller's.
void LeaveMember(const CheckpointStore& store, PoolRecord& pool, const PoolMember& member);

// Makes an empty pool. AlreadyExists; InvalidArgument: see CheckPool, or the budget does not even
// hold the record.
Result<PoolRecord> CreatePool(CheckpointStore& store, const std::string& name,
                              const PoolConfig& config, int64_t now_ms);

// The jobs of a pool. Keys "pool/<pool>/<op>/<12 hex digits of the rest>"; one is done at a time.
struct PoolAddRequest {
  std::string pool;
  std::vector<std::string> tasks;  // one; several where `adopt` is set
  Digest artifact;
  std::vector<ProbeSet::Text> texts;
  bool owned = false;
  std::optional<AdapterMergeState> adopt;  // take it as it is, as a member that remembers this
};
Job MakePoolAddJob(const PoolAddRequest& request);
Job MakePoolRemoveJob(const std::string& pool, const std::string& task);
Job MakePoolEvictJob(const std::string& pool);
// With `force` also a pool that has tasks, which then answer no more.
Job MakePoolDeleteJob(const std::string& pool, bool force);
// InvalidArgument: it has tasks and `force` is not set.
Status MayDeletePool(const PoolRecord& pool, bool force);
Result<PoolAddRequest> ParsePoolAdd(const Job& job);

}  // namespace stockpot
