// What one job of a pool does (store/adapter_pool.h): from its arguments to the commit that makes
// the outcome visible, and the collection of what left. Internal to the pipeline.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "store/adapter_pool.h"
#include "store/progress.h"

namespace stockpot {

class PoolWork {
 public:
  struct Parts {
    CheckpointStore& store;
    ScoreFunction score;     // null: no model is served here
    RequestCounts requests;  // null: nobody counts
    // Whether the endpoint answers by all routes of the store up to this event, so that nothing
    // that left them is read any more; null: there is no endpoint.
    std::function<bool(int64_t event)> followed;
    Clock clock;  // REQUIRES: set
    GarbageOptions garbage;
  };
  // Why the pool stays as it is.
  struct Refusal {
    Status why;
    std::map<std::string, std::string> fields;  // of the event
  };

  explicit PoolWork(Parts parts) : parts_(std::move(parts)) {}

  // Commits the outcome with `finished` (the job, done; its result is the member). A refusal:
  // nothing has changed.
  Result<std::optional<Refusal>> Do(const Job& job, Job finished, const ProgressFunction& progress);
  // After the job: collects what left the pool, and an adapter that came for the pool alone and is
  // not in it. What cannot go now goes with the next job of the pool.
  Status Clean(const Job& job, const ProgressFunction& progress);
  // Of a job that failed: deletes the adapter that came for the pool alone.
  void Discard(const Job& job);
  // Likewise for everything that a process which was killed left over.
  Status CleanAll(const ProgressFunction& progress);
  // Whether what a finished job made still stands.
  bool StillStands(const Job& job) const;

 private:
  // The adapter that came, beside the pool as it is.
  struct Incoming {
    PoolRecord pool;  // with the similarities to the adapter
    PoolAddRequest request;
    Manifest base;
    Manifest manifest;
    LoadedAdapter loaded;
    AdapterMergeState state;
    std::optional<double> own_loss;
    std::optional<double> threshold;
    const PoolMember* nearest = nullptr;  // of `pool`
    double similarity = 0;                // to it
    std::string path;                     // what was tried, for a person
  };
  // What the pool becomes.
  struct Change {
    PoolRecord pool;
    std::optional<BuiltAdapter> made;  // a member that is not stored yet
    std::vector<Digest> parents;       // of it: edges pooled_from
    Digest member;                     // that the new tasks have
    std::string outcome;               // "apart", "merged", ...
  };
  using Fields = std::map<std::string, std::string>;
  using Tried = Result<std::optional<Change>>;

  Result<Incoming> Read(const PoolRecord& pool, PoolAddRequest request,
                        const ProgressFunction& progress) const;
  Result<std::optional<Refusal>> Add(const Job& job, Job finished,
                                     const ProgressFunction& progress);
  Result<std::optional<Refusal>> Remove(const Job& job, Job finished);
  Status DeletePool(const Job& job, Job finished, const ProgressFunction& progress);
  Tried Decide(Incoming& incoming, Fields& fields, const ProgressFunction& progress);
  // Whether the quality of its tasks and of its nearest member's can be measured.
  static bool IsMeasured(const Incoming& incoming);
  Tried Merge(Incoming& incoming, Fields& fields, const ProgressFunction& progress);
  Tried Shrink(Incoming& incoming, Fields& fields, const ProgressFunction& progress);
  Tried Evict(Incoming& incoming, Fields& fields) const;
  Status FindNearest(Incoming& incoming) const;
  Result<bool> KeepsQuality(const Incoming& incoming, Change& change, Fields& fields,
                            const ProgressFunction& progress);
  Result<double> Loss(const std::vector<ProbeSet::Text>& texts, const Manifest& model,
                      const ProgressFunction& progress) const;
  Result<bool> FitsApart(const Change& change) const;
  Result<int64_t> BytesOf(const Change& change) const;
  Status Apply(const PoolRecord& before, Change change, Job finished, Fields fields);
  Status Settle(const std::string& pool, const ProgressFunction& progress);
  Status WaitForEndpoint(const ProgressFunction& progress) const;
  Status DiscardCandidate(const Job& job);
  bool Delete(const Digest& artifact);

  const Parts parts_;
  bool leftovers_ = false;   // chunks of an adapter that was made and not committed
  std::string uncollected_;  // why the last collection did not happen
};

}  // namespace stockpot
