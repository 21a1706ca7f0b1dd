// A store with a small base and LoRA adapters over it, for tests of pools.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "store/adapter_pool.h"
#include "store/checkpoint_store.h"
#include "store/scoring.h"

namespace stockpot::test {

struct PoolLayer {
  std::string weight;
  int64_t d_out, d_in;
};
inline const std::vector<PoolLayer> kPoolLayers = {{"model.layers.0.mlp.down_proj.weight", 24, 40},
                                                   {"model.layers.0.mlp.up_proj.weight", 40, 24},
                                                   {"model.layers.1.mlp.up_proj.weight", 40, 24}};

// The base "tiny", committed; its digest.
inline Result<Digest> CommitPoolBase(CheckpointStore& store) {
  Manifest base{.kind = ArtifactKind::kBase};
  for (const PoolLayer& layer : kPoolLayers) {
    TensorEntry entry{
        .name = layer.weight, .dtype = DType::kF32, .shape = {layer.d_out, layer.d_in}};
    const std::vector<std::byte> zeros(static_cast<size_t>(entry.logical_bytes()));
    STOCKPOT_ASSIGN_OR_RETURN(entry.parts["data"], store.PutBytes(zeros));
    base.tensors.push_back(std::move(entry));
  }
  STOCKPOT_ASSIGN_OR_RETURN(base.files["config.json"],
                            store.PutBytes(std::as_bytes(std::span("{}", 2))));
  Commit commit;
  commit.artifacts.push_back(base);
  commit.aliases.push_back({.name = "tiny", .to = base.digest(), .expected = {}, .by = "test"});
  STOCKPOT_RETURN_IF_ERROR(store.Apply(std::move(commit)).status());
  return base.digest();
}

// `direction`: adapters of one direction are alike, of different ones are not.
inline AdapterDelta PoolDelta(uint64_t direction, uint64_t seed, int64_t rank, double noise) {
  AdapterDelta delta;
  for (const PoolLayer& layer : kPoolLayers) {
    std::mt19937_64 common(direction * 977 + delta.layers.size());
    std::mt19937_64 own(seed * 7919 + delta.layers.size() + 1);
    std::normal_distribution<double> normal, normal_own;  // each keeps every second draw
    AdapterLayer made{layer.weight, layer.d_out, layer.d_in, rank, {}, {}};
    for (int64_t i = 0; i < layer.d_out * rank; ++i) {
      made.b.push_back(0.1 * (normal(common) + noise * normal_own(own)));
    }
    for (int64_t i = 0; i < rank * layer.d_in; ++i) {
      made.a.push_back(0.1 * (normal(common) + noise * normal_own(own)));
    }
    delta.layers.push_back(std::move(made));
  }
  return delta;
}

// Committed without a name, as a session of POOL/TASK does it.
inline Result<Digest> CommitPoolAdapter(CheckpointStore& store, const Digest& base,
                                        const AdapterDelta& delta, DType dtype) {
  STOCKPOT_ASSIGN_OR_RETURN(const BuiltAdapter built, BuildAdapter(delta, dtype, base, "", {}));
  const ChunkGuard guard = store.GuardChunks();
  STOCKPOT_RETURN_IF_ERROR(PutAdapter(store, built));
  Commit commit;
  commit.artifacts.push_back(built.manifest);
  commit.edges.push_back({EdgeType::kAdapterOf, built.manifest.digest(), base});
  STOCKPOT_RETURN_IF_ERROR(store.Apply(std::move(commit)).status());
  return built.manifest.digest();
}

// What a walk over the manifests finds: the pool's record, its members, and its former members as
// far as they are there; without the sizes that PoolBytes rounds up by.
inline Result<int64_t> WalkPool(const CheckpointStore& store, const PoolRecord& pool) {
  auto bytes = static_cast<int64_t>(EncodePool(pool).size());
  std::map<Digest, int64_t> chunks;
  std::vector<Digest> artifacts;
  for (const PoolMember& member : pool.members) artifacts.push_back(member.artifact);
  for (const PoolLeaving& gone : pool.leaving) {
    if (store.HasArtifact(gone.artifact)) artifacts.push_back(gone.artifact);
  }
  for (const Digest& artifact : artifacts) {
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store.GetManifest(artifact));
    bytes += static_cast<int64_t>(manifest.ToJson().size());
    const auto add = [&](const Part& part) -> Status {
      for (const Digest& chunk : part.chunks) {
        STOCKPOT_ASSIGN_OR_RETURN(const auto data, store.ReadChunk(chunk));
        chunks[chunk] = static_cast<int64_t>(data.size());
      }
      return OkStatus();
    };
    for (const TensorEntry& tensor : manifest.tensors) {
      for (const auto& [role, part] : tensor.parts) STOCKPOT_RETURN_IF_ERROR(add(part));
    }
    for (const auto& [name, part] : manifest.files) STOCKPOT_RETURN_IF_ERROR(add(part));
  }
  for (const auto& [chunk, size] : chunks) bytes += size;
  return bytes;
}

// That every pool is within its budget, and that each task, and nothing else, has its route to an
// adapter that can be read whole.
inline Status CheckPools(const CheckpointStore& store) {
  size_t tasks = 0;
  for (const PoolRecord& pool : store.ListPools()) {
    STOCKPOT_RETURN_IF_ERROR(CheckPool(pool));
    STOCKPOT_ASSIGN_OR_RETURN(const int64_t walked, WalkPool(store, pool));
    STOCKPOT_ASSIGN_OR_RETURN(const int64_t counted, PoolBytes(store, pool));
    if (walked > pool.config.budget_bytes || counted > pool.config.budget_bytes) {
      return Internal("pool " + pool.name + " has " + std::to_string(walked) + " bytes, counts " +
                      std::to_string(counted) + " of " + std::to_string(pool.config.budget_bytes));
    }
    if (walked > counted) return Internal("PoolBytes counts too little");
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest base, store.GetManifest(pool.config.base));
    for (const PoolTask& task : pool.tasks) {
      const auto route = store.GetRoute(PoolRoute(pool.name, task.name));
      if (!route || route->variant != task.member) {
        return Internal("task " + task.name + " does not resolve");
      }
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest member, store.GetManifest(task.member));
      STOCKPOT_RETURN_IF_ERROR(LoadAdapterDelta(store, member, base).status());
    }
    tasks += pool.tasks.size();
  }
  size_t routes = 0;
  for (const Route& route : store.ListRoutes()) routes += SplitPoolRoute(route.name) ? 1 : 0;
  return routes == tasks ? OkStatus() : Internal("a route of a pool without a task");
}

// A stand-in for the endpoint: what came has a loss of 2, what was merged or shrunk more, by as
// much as its digest says: 0, `worst` / 2 or `worst` nats.
inline ScoreFunction FakeScore(double worst) {
  return [worst](const ScoreRequest& request, const ProgressFunction&) -> Result<ProbeScores> {
    ProbeScores scores{.tokens = 10, .models = {}};
    for (const Manifest* model : request.models) {
      const bool made = model->attributes.contains("method");
      const int draw = static_cast<uint8_t>(model->digest().raw()[0]) % 3;
      scores.models.push_back({.loss = 2 + (made ? worst * draw / 2 : 0)});
    }
    return scores;
  };
}

}  // namespace stockpot::test
