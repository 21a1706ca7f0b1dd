#include <algorithm>

#include "store/adapter_pool.h"
#include "thrift/conversions.h"
#include "thrift/handlers.h"

namespace stockpot {
namespace {

Result<PoolConfig> ConfigFromRpc(const rpc::PoolConfig& in, const Digest& base) {
  PoolConfig config{.base = base, .budget_bytes = in.budget_bytes};
  STOCKPOT_ASSIGN_OR_RETURN(config.method, PoolMethodFromName(in.method));
  config.projection = in.projection;
  config.scale = in.scale;
  config.threshold = in.threshold;
  if (in.__isset.quantile) {
    config.threshold.reset();
    config.quantile = in.quantile;
  }
  config.quality = in.quality;
  config.rank = in.rank;
  config.evict = in.evict;
  return config;
}

rpc::PoolConfig ConfigToRpc(const PoolConfig& in) {
  rpc::PoolConfig config;
  config.budget_bytes = in.budget_bytes;
  config.method = PoolMethodName(in.method);
  config.projection = in.projection;
  config.scale = in.scale;
  if (in.threshold) {
    config.threshold = *in.threshold;
  } else {
    config.__set_quantile(in.quantile);
  }
  config.quality = in.quality;
  config.rank = in.rank;
  config.evict = in.evict;
  return config;
}

class PoolHandler : public rpc::PoolServiceIf {
 public:
  explicit PoolHandler(const RpcServerParts& parts)
      : store_(parts.store), pipeline_(parts.pipeline), requests_(parts.control.requests) {}

  void create(rpc::Pool& reply, const std::string& name, const std::string& base,
              const rpc::PoolConfig& config) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(name, "the pool's name"));
      STOCKPOT_RETURN_IF_ERROR(CheckLength(base, "the base's name"));
      STOCKPOT_RETURN_IF_ERROR(CheckLength(config.method, "the method"));
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store_.ResolveName(base));
      STOCKPOT_ASSIGN_OR_RETURN(const PoolConfig made, ConfigFromRpc(config, digest));
      STOCKPOT_ASSIGN_OR_RETURN(const PoolRecord pool,
                                CreatePool(store_, name, made, SystemClock()()));
      return Fill(reply, pool);
    });
  }

  void pools(std::vector<rpc::Pool>& reply) override {
    Answer([&]() -> Status {
      for (const PoolRecord& pool : store_.ListPools()) {
        STOCKPOT_RETURN_IF_ERROR(Fill(reply.emplace_back(), pool));
      }
      return OkStatus();
    });
  }

  void pool(rpc::Pool& reply, const std::string& name) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(name, "the pool's name"));
      STOCKPOT_ASSIGN_OR_RETURN(const PoolRecord pool, store_.GetPool(name));
      return Fill(reply, pool);
    });
  }

  void add(rpc::Job& reply, const rpc::PoolAdd& in) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(in.pool, "the pool's name"));
      STOCKPOT_RETURN_IF_ERROR(CheckLength(in.id, "the id"));
      STOCKPOT_ASSIGN_OR_RETURN(const PoolRecord pool, store_.GetPool(in.pool));
      PoolAddRequest request{.pool = in.pool, .tasks = in.tasks, .owned = in.owned};
      if (in.tasks.empty() || in.tasks.size() > kMaxPoolTasks ||
          (in.tasks.size() > 1 && !in.adopt)) {
        return InvalidArgument("an adapter is added for one task");
      }
      for (const rpc::ProbeText& text : in.probe) request.texts.push_back({text.name, text.text});
      STOCKPOT_ASSIGN_OR_RETURN(request.artifact, store_.ResolveName(in.id));
      // What the job would find wrong with it is said at once.
      PoolRecord asked = pool;
      asked.members = {{.artifact = request.artifact, .owned = in.owned, .state = {}}};
      asked.tasks.clear();
      for (const std::string& task : in.tasks) {
        STOCKPOT_RETURN_IF_ERROR(CheckLength(task, "a task's name"));
        asked.tasks.push_back({.name = task, .member = request.artifact, .texts = request.texts});
      }
      asked.leaving.clear();
      std::sort(asked.tasks.begin(), asked.tasks.end(),
                [](const PoolTask& a, const PoolTask& b) { return a.name < b.name; });
      if (in.adopt) {
        request.adopt = AdapterMergeState{in.merged, in.opcm_lambda, in.norm_sum};
        asked.members[0].state = *request.adopt;
      }
      STOCKPOT_RETURN_IF_ERROR(CheckPool(asked));
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(request.artifact));
      if (manifest.kind != ArtifactKind::kAdapter) {
        return InvalidArgument("'" + in.id + "' is a " +
                               std::string(ArtifactKindName(manifest.kind)) +
                               ": a pool takes adapters");
      }
      return Submit(reply, MakePoolAddJob(request));
    });
  }

  void remove(rpc::Job& reply, const std::string& name, const std::string& task) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(name, "the pool's name"));
      STOCKPOT_RETURN_IF_ERROR(CheckLength(task, "the task's name"));
      STOCKPOT_ASSIGN_OR_RETURN(const PoolRecord pool, store_.GetPool(name));
      if (pool.FindTask(task) == nullptr) {
        return NotFound("pool '" + name + "' has no task '" + task + "': `stockpot pool show " +
                        name + "` lists them");
      }
      return Submit(reply, MakePoolRemoveJob(name, task));
    });
  }

  void evict(rpc::Job& reply, const std::string& name) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(name, "the pool's name"));
      STOCKPOT_RETURN_IF_ERROR(store_.GetPool(name).status());
      return Submit(reply, MakePoolEvictJob(name));
    });
  }

  void delete_pool(rpc::Job& reply, const std::string& name, bool force) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(name, "the pool's name"));
      STOCKPOT_ASSIGN_OR_RETURN(const PoolRecord pool, store_.GetPool(name));
      STOCKPOT_RETURN_IF_ERROR(MayDeletePool(pool, force));
      return Submit(reply, MakePoolDeleteJob(name, force));
    });
  }

 private:
  Status Submit(rpc::Job& reply, Job job) {
    STOCKPOT_ASSIGN_OR_RETURN(const Job queued, pipeline_.Submit(std::move(job)));
    reply = ToRpc(queued);
    reply.arguments.erase("texts");
    return OkStatus();
  }

  Status Fill(rpc::Pool& reply, const PoolRecord& pool) const {
    reply.name = pool.name;
    reply.base = pool.config.base.raw();
    reply.config = ConfigToRpc(pool.config);
    for (const PoolMember& member : pool.members) {
      rpc::PoolMember& out = reply.members.emplace_back();
      out.artifact = member.artifact.raw();
      for (const PoolTask& task : pool.tasks) {
        if (task.member == member.artifact) out.tasks.push_back(task.name);
      }
      out.merged = member.state.count;
      out.opcm_lambda = member.state.lambda;
      out.norm_sum = member.state.norm_sum;
      out.owned = member.owned;
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(member.artifact));
      out.bytes = AdapterBytesOf(manifest).total();
    }
    for (const PoolTask& task : pool.tasks) {
      rpc::PoolTask& out = reply.tasks.emplace_back();
      out.task = task.name;
      out.member = task.member.raw();
      out.own = task.own.raw();
      out.probe_texts = static_cast<int64_t>(task.texts.size());
      if (task.own_loss) out.__set_own_loss(*task.own_loss);
      if (task.loss) out.__set_loss(*task.loss);
      if (requests_) out.requests = requests_(PoolRoute(pool.name, task.name));
      out.added_ms = task.added_ms;
    }
    STOCKPOT_ASSIGN_OR_RETURN(reply.bytes, PoolBytes(store_, pool));
    for (const PoolLeaving& gone : pool.leaving) reply.leaving_bytes += gone.bytes;
    if (const auto threshold = PoolThreshold(pool.config, pool.similarities)) {
      reply.__set_threshold(*threshold);
    }
    return OkStatus();
  }

  CheckpointStore& store_;
  Pipeline& pipeline_;
  const RequestCounts requests_;
};

}  // namespace

std::shared_ptr<rpc::PoolServiceIf> MakePoolHandler(const RpcServerParts& parts) {
  return std::make_shared<PoolHandler>(parts);
}

}  // namespace stockpot
