#include "thrift/handlers.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "stockpot_rpc/stockpot_constants.h"
#include "store/best_model.h"
#include "thrift/conversions.h"
#include "thrift/errors.h"

namespace stockpot {

void ThrowUnlessOk(const Status& status) {
  if (!status.ok()) throw ToRpcError(status);
}

Status CheckLength(const std::string& text, const char* what) {
  if (static_cast<int64_t>(text.size()) <= rpc_limits::kMaxRequestStringBytes) return OkStatus();
  return InvalidArgument(std::string(what) + " is over " +
                         std::to_string(rpc_limits::kMaxRequestStringBytes) + " bytes");
}

namespace {

constexpr int kEvalAttempts = 5;  // when somebody moves RUN@best meanwhile
constexpr int64_t kWaitSliceMs = 200;  // how long a stopping server waits for a waiting rank

std::span<const std::byte> AsBytes(const std::string& data) {
  return std::as_bytes(std::span(data));
}

class CheckpointHandler : public rpc::CheckpointServiceIf {
 public:
  CheckpointHandler(const RpcServerParts& parts, const ServerFacts& server)
      : store_(parts.store),
        ingest_(parts.ingest),
        server_(server),
        version_(parts.control.version) {}

  // The token is the server's to check (server.cc): a call that comes here was let in.
  void hello(rpc::HelloReply& reply, int32_t protocol, const std::string& /*token*/) override {
    Answer([&]() -> Status {
      const int32_t ours = rpc::g_stockpot_constants.PROTOCOL_VERSION;
      if (protocol != ours) {
        return InvalidArgument("this daemon speaks protocol " + std::to_string(ours) +
                               ", the client " + std::to_string(protocol) +
                               ": use the same version on both sides");
      }
      reply.protocol = ours;
      reply.version = version_;
      reply.chunk_bytes = static_cast<int32_t>(kChunkBytes);
      return OkStatus();
    });
  }

  void create_run(rpc::Run& reply, const std::string& name, const std::string& base,
                  const rpc::RunConfig& config,
                  const std::map<std::string, std::string>& tags, bool keep_config) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(name, "the run's name"));
      STOCKPOT_RETURN_IF_ERROR(CheckLength(base, "the base's name"));
      for (const auto& [key, value] : tags) {
        STOCKPOT_RETURN_IF_ERROR(CheckLength(key, "a tag's name"));
        STOCKPOT_RETURN_IF_ERROR(CheckLength(value, "a tag's value"));
      }
      STOCKPOT_ASSIGN_OR_RETURN(const RunConfig parsed, RunConfigFromRpc(config));
      STOCKPOT_ASSIGN_OR_RETURN(const Run run, ingest_.CreateRun(name, base, parsed, tags, keep_config));
      reply = ToRpc(run);
      return OkStatus();
    });
  }

  void open_session(std::string& reply, const rpc::SessionRequest& request) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(request.run, "the name"));
      STOCKPOT_ASSIGN_OR_RETURN(const SessionRequest parsed, SessionRequestFromRpc(request));
      STOCKPOT_RETURN_IF_ERROR(CheckWorldFits(parsed.world));
      STOCKPOT_ASSIGN_OR_RETURN(reply, ingest_.OpenSession(parsed));
      return OkStatus();
    });
  }

  void have_chunks(std::vector<bool>& reply, const std::string& session,
                   const std::vector<std::string>& digests) override {
    Answer([&]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(const std::vector<Digest> parsed, DigestsFromRpc(digests));
      STOCKPOT_ASSIGN_OR_RETURN(reply, ingest_.HaveChunks(session, parsed));
      return OkStatus();
    });
  }

  void put_chunk(const std::string& session, const std::string& digest,
                 const std::string& data) override {
    Answer([&]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(const Digest parsed, Digest::FromRaw(digest));
      return ingest_.PutChunk(session, parsed, AsBytes(data));
    });
  }

  void commit_shard(rpc::CommitReply& reply, const std::string& session,
                    const rpc::Shard& shard) override {
    Answer([&]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(ShardCommit parsed, ShardFromRpc(shard));
      STOCKPOT_ASSIGN_OR_RETURN(const CommitReply committed,
                                ingest_.CommitShard(session, std::move(parsed)));
      reply = ToRpc(committed);
      return OkStatus();
    });
  }

  void step_state(rpc::StepState& reply, const rpc::StepKey& key, int32_t timeout_ms) override {
    Answer([&]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(const StepKey parsed, StepKeyFromRpc(key));
      int64_t left_ms = std::clamp(timeout_ms, 0, rpc_limits::kMaxWatchMs);
      while (true) {
        const int64_t slice_ms = server_.stopping() ? 0 : std::min(left_ms, kWaitSliceMs);
        STOCKPOT_ASSIGN_OR_RETURN(const StepState state, ingest_.GetStepState(parsed, slice_ms));
        left_ms -= slice_ms;
        if (state.state != GatherState::kOpen || slice_ms == 0 || left_ms == 0) {
          reply = ToRpc(state);
          return OkStatus();
        }
      }
    });
  }

  void resume_point(rpc::ResumePoint& reply, const std::string& run,
                    const std::string& key) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(run, "the run's name"));
      STOCKPOT_ASSIGN_OR_RETURN(const ResumeDecision decision, ingest_.ResumePoint(run, key));
      reply = ToRpc(decision);
      return OkStatus();
    });
  }

  void abort(const std::string& session) override {
    Answer([&] { return ingest_.Abort(session); });
  }

  void fetch_manifest(std::string& reply, const std::string& id) override {
    Answer([&]() -> Status {
      STOCKPOT_RETURN_IF_ERROR(CheckLength(id, "the id"));
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store_.ResolveName(id));
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(digest));
      reply = manifest.ToJson();
      return OkStatus();
    });
  }

  void fetch_chunk(std::string& reply, const std::string& digest) override {
    Answer([&]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(const Digest parsed, Digest::FromRaw(digest));
      STOCKPOT_ASSIGN_OR_RETURN(const std::vector<std::byte> data, store_.ReadChunk(parsed));
      reply.assign(reinterpret_cast<const char*>(data.data()), data.size());
      return OkStatus();
    });
  }

  void report_eval(const std::string& id, const std::string& task, const std::string& metric,
                   double value, const std::string& by) override {
    Answer([&]() -> Status {
      for (const std::string* text : {&id, &task, &metric, &by}) {
        STOCKPOT_RETURN_IF_ERROR(CheckLength(*text, "a name of the evaluation"));
      }
      if (task.empty() || metric.empty()) return InvalidArgument("task and metric need a name");
      if (!std::isfinite(value))
        return InvalidArgument("the value of '" + metric + "' is not finite");
      STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, store_.ResolveName(id));
      const int64_t now_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                                 std::chrono::system_clock::now().time_since_epoch())
                                 .count();
      if (task == kProbeTask) {
        return InvalidArgument("evaluations of the task '" + task + "' are the daemon's own: " +
                               "`stockpot probe score` measures one");
      }
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(digest));
      Status status;
      for (int attempt = 0; attempt < kEvalAttempts; ++attempt) {
        Commit commit;
        commit.evals.push_back({digest, task, metric, value, now_ms, by});
        commit.events.push_back({.type = "eval",
                                 .subject = digest.Hex(),
                                 .fields = {{"task", task},
                                            {"metric", metric},
                                            {"value", std::to_string(value)},
                                            {"by", by}}});
        if (!manifest.run.empty()) {
          STOCKPOT_ASSIGN_OR_RETURN(const Run run, store_.GetRun(manifest.run));
          STOCKPOT_RETURN_IF_ERROR(FollowBest(store_, run, "eval", commit));
        }
        status = store_.Apply(std::move(commit)).status();
        if (status.code() != StatusCode::kAlreadyExists) return status;
      }
      return Unavailable(manifest.run + "@best keeps moving: " + status.message());
    });
  }

 private:
  // The ranks over the limit would wait for a connection until the others hang up.
  Status CheckWorldFits(int32_t world) const {
    const int64_t opens = world * rpc_limits::kConnectionsOfARank;
    if (world == 1 || opens <= server_.max_connections()) return OkStatus();
    return InvalidArgument("a world of " + std::to_string(world) + " ranks opens " +
                           std::to_string(opens) + " connections, and this daemon takes " +
                           std::to_string(server_.max_connections()) +
                           ": start it with --thrift-clients " + std::to_string(opens));
  }

  CheckpointStore& store_;
  Ingest& ingest_;
  const ServerFacts& server_;
  const std::string version_;
};

}  // namespace

std::shared_ptr<rpc::CheckpointServiceIf> MakeCheckpointHandler(const RpcServerParts& parts,
                                                                const ServerFacts& server) {
  return std::make_shared<CheckpointHandler>(parts, server);
}

}  // namespace stockpot
