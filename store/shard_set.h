// The shards that the ranks of one checkpoint have committed, and what they make together. Knows
// neither the store nor sessions nor time (store/ingest.h has these).
//
// Thread promise: as a value; const methods from any number of threads.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "store/manifest.h"

namespace stockpot {

inline constexpr int32_t kMaxWorld = 1024;  // ranks of one checkpoint

// What one rank says its part of an artifact consists of (kind, base, run and step are set by the
// server from the session), and the metrics that came with the step.
struct ShardCommit {
  // Codec raw, or alias_of. `shape` is the whole tensor's. A tensor that is sent whole has its
  // bytes in the part "data"; one that is sent in pieces has an entry for each of them, with one
  // box in `pieces` and its bytes in "data/0". A piece may be empty.
  std::vector<TensorEntry> tensors;
  // What is no weight, likewise, by group (store/names.h): each becomes a state of its own.
  std::map<std::string, std::vector<TensorEntry>> states;
  std::map<std::string, Part> files;
  std::map<std::string, double> metrics;
};

// What can be said of a shard without knowing the others: names, shapes, boxes inside the tensor,
// parts of the right size. InvalidArgument names the tensor.
Status CheckShard(const ShardCommit& shard);

// The name of what a shard holds, in whatever order; metrics do not count. REQUIRES: CheckShard().
Digest ShardDigest(const ShardCommit& shard);

class ShardSet {
 public:
  // REQUIRES: 1 <= world <= kMaxWorld.
  explicit ShardSet(int32_t world);

  int32_t world() const { return static_cast<int32_t>(shards_.size()); }
  // Null: the rank has not committed. REQUIRES: 0 <= rank < world, here and below.
  const Digest* DigestOf(int32_t rank) const;
  // Replaces nothing. REQUIRES: CheckShard(shard); the rank has not committed.
  void Add(int32_t rank, const Digest& digest, ShardCommit shard);
  void Remove(int32_t rank);
  std::vector<int32_t> Missing() const;
  bool is_empty() const { return committed_ == 0; }       // no rank has committed
  int64_t memory_bytes() const { return memory_bytes_; }  // about

  // All shards as one, its tensors sorted by name, whole or in their one spelling of pieces
  // (store/manifest.h), every element of each proven to be there exactly once. InvalidArgument
  // names the tensor, the ranks and the range of indices: of a gap, of an overlap, of replicas that
  // differ, of another dtype or shape. Of a metric the lowest rank's value counts.
  // REQUIRES: Missing() is empty.
  Result<ShardCommit> Assemble() const;

 private:
  struct Shard {
    Digest digest;
    ShardCommit content;
    int64_t memory_bytes = 0;
  };
  std::vector<std::unique_ptr<const Shard>> shards_;  // by rank; null: has not committed
  int32_t committed_ = 0;
  int64_t memory_bytes_ = 0;
};

// "rank 3", "ranks 0, 1 and 3", "ranks 0, 1, 2 and 250 more": for messages.
std::string RanksText(const std::vector<int32_t>& ranks);

}  // namespace stockpot
