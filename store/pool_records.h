// A pool of LoRA adapters over one base that never takes more than its budget of bytes
// (store/adapter_pool.h): the record that the catalogue keeps of it, and its JSON.
// Thread promise: values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "store/adapter_merge_state.h"
#include "store/digest.h"
#include "store/records.h"

namespace stockpot {

// --- limits ---
inline constexpr size_t kMaxPoolTasks = 256;
inline constexpr size_t kMaxPoolProbeBytes = size_t{64} << 10;  // of one task
inline constexpr size_t kMaxPoolLeaving = 4096;
inline constexpr size_t kMaxPoolSimilarities = 128;

struct PoolConfig {
  Digest base;
  int64_t budget_bytes = 0;
  PoolMethod method = PoolMethod::kOpcm;
  double projection = 0.5;  // opcm's a, [0, 1)
  double scale = 0.5;       // of task arithmetic, (0, 10]
  // Cosine from which on a new adapter is merged although it would fit, 1: none; null: the
  // `quantile` of the similarities of all pairs, at least kLeastPoolSimilarity, once there are three
  // adapters. (Defaults as measured: examples/adapter_pool/README.md.)
  std::optional<double> threshold = 1.0;
  double quantile = 0.5;  // [0, 1]
  // exp(own loss - loss of the member) on a task's probe texts that a merge must keep, for each
  // task of the member. (0, 1]
  double quality = 0.75;
  int64_t rank = 0;   // of a merged member; 0: the larger one of its two
  bool evict = true;  // the least requested member may go for a new one
  bool operator==(const PoolConfig&) const = default;
};

struct PoolMember {
  Digest artifact;
  bool owned = false;  // the pool's alone: its bytes go when it leaves
  AdapterMergeState state;
  bool operator==(const PoolMember&) const = default;
};

struct PoolTask {
  std::string name;
  Digest member;                      // that answers for it: what the route POOL/TASK leads to
  Digest own;                         // the adapter that came with it; it may be gone
  std::vector<ProbeSet::Text> texts;  // held out; none: quality is not known
  std::optional<double> own_loss;     // nats a token, of its own adapter on the texts
  std::optional<double> loss;         // likewise, of its member
  int64_t added_ms = 0;
  bool operator==(const PoolTask&) const = default;
};

// Out of the pool; its bytes count until a collection of garbage has taken them.
struct PoolLeaving {
  Digest artifact;
  int64_t bytes = 0;
  bool operator==(const PoolLeaving&) const = default;
};

struct PoolRecord {
  std::string name;
  PoolConfig config;
  int64_t version = 1;  // one more with each change
  std::vector<PoolMember> members;
  std::vector<PoolTask> tasks;  // sorted by name
  std::vector<PoolLeaving> leaving;
  int64_t created_ms = 0;
  // Between each adapter that came and the members that were there: what the quantile is taken of.
  // The newest kMaxPoolSimilarities.
  std::vector<double> similarities;

  const PoolTask* FindTask(std::string_view task) const;
  const PoolMember* FindMember(const Digest& artifact) const;
  bool operator==(const PoolRecord&) const = default;
};

// "POOL/TASK": the name that the endpoint answers to.
std::string PoolRoute(std::string_view pool, std::string_view task);
// Its two halves. Null: not two names of runs with a '/' between.
std::optional<std::pair<std::string, std::string>> SplitPoolRoute(std::string_view name);

// How well a member does a task beside the task's own adapter: exp(own loss - loss), 1 as well,
// less is worse; 0 for a loss that is not finite.
double PoolQuality(double own_loss, double loss);

// InvalidArgument names what is wrong: names, ranges, a task without a member, a member without a
// task, the limits.
Status CheckPool(const PoolRecord& pool);

std::string EncodePool(const PoolRecord& pool);
Result<PoolRecord> DecodePool(std::string_view json);  // Corruption

}  // namespace stockpot
