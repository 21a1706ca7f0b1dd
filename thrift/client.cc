#include "thrift/client.h"

#include <poll.h>
#include <sys/socket.h>
#include <thrift/TApplicationException.h>
#include <thrift/protocol/TMultiplexedProtocol.h>
#include <thrift/protocol/TProtocolException.h>
#include <thrift/transport/TSSLSocket.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "kernels/base/check.h"
#include "stockpot_rpc/CheckpointService.h"
#include "stockpot_rpc/ControlService.h"
#include "stockpot_rpc/LineageService.h"
#include "stockpot_rpc/PoolService.h"
#include "stockpot_rpc/stockpot_constants.h"
#include "thrift/errors.h"
#include "thrift/limits.h"
#include "thrift/wire.h"

namespace stockpot {
namespace {

using apache::thrift::TApplicationException;
using apache::thrift::protocol::TMultiplexedProtocol;
using apache::thrift::protocol::TProtocol;
using apache::thrift::protocol::TProtocolException;
using apache::thrift::transport::TSocket;
using apache::thrift::transport::TTransportException;

constexpr int kHelloTimeoutMs = 10'000;      // a daemon that takes a connection and says nothing
constexpr int kDayMs = 24 * 60 * 60 * 1000;  // for calls that read the whole store

std::vector<std::string> RawDigests(std::span<const Digest> digests) {
  std::vector<std::string> raw;
  raw.reserve(digests.size());
  for (const Digest& digest : digests) raw.emplace_back(digest.raw());
  return raw;
}

std::shared_ptr<TSocket> MakeSocket(const RpcAddress& address, const TlsFactory& tls) {
  if (address.is_unix()) return std::make_shared<TSocket>(address.unix_path, WireConfiguration());
  if (tls == nullptr) {
    return std::make_shared<TSocket>(address.host, address.port, WireConfiguration());
  }
  return tls->createSocket(address.host, address.port);
}

// A caller of a dead daemon may get the daemon's port as its own, and then reaches itself and keeps
// the daemon from coming back.
bool IsItself(TSocket& socket) {
  sockaddr_storage here{}, there{};
  socklen_t here_size = sizeof here, there_size = sizeof there;
  const int fd = socket.getSocketFD();
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_size) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_size) == 0 &&
         here_size == there_size && std::memcmp(&here, &there, here_size) == 0;
}

// An idle connection on which bytes or an end wait cannot be used: nothing was asked.
bool IsStale(TSocket& socket) {
  pollfd poll_fd{.fd = socket.getSocketFD(), .events = POLLIN, .revents = 0};
  return ::poll(&poll_fd, 1, 0) != 0;
}

}  // namespace

struct Client::Connection {
  std::shared_ptr<TSocket> socket;
  std::shared_ptr<WireTransport> transport;
  std::shared_ptr<WireProtocol> protocol;
  std::unique_ptr<rpc::CheckpointServiceClient> checkpoint;
  std::unique_ptr<rpc::LineageServiceClient> lineage;
  std::unique_ptr<rpc::ControlServiceClient> control;
  std::unique_ptr<rpc::PoolServiceClient> pool;
  bool has_served = false;  // a call after hello

  Connection(const RpcAddress& address, const ClientOptions& options, const TlsFactory& tls) {
    SilenceThriftOutput();
    socket = MakeSocket(address, tls);
    socket->setConnTimeout(options.connect_timeout_ms);
    socket->setSendTimeout(options.send_timeout_ms);
    socket->setRecvTimeout(options.receive_timeout_ms);
    if (!address.is_unix()) socket->setNoDelay(true);
    transport = std::make_shared<WireTransport>(socket, WireOptions{});
    protocol = MakeWireProtocol(transport, rpc_limits::kClientMaxStringBytes);
    const auto service = [&](const char* name) -> std::shared_ptr<TProtocol> {
      return std::make_shared<TMultiplexedProtocol>(protocol, name);
    };
    checkpoint = std::make_unique<rpc::CheckpointServiceClient>(service("checkpoint"));
    lineage = std::make_unique<rpc::LineageServiceClient>(service("lineage"));
    control = std::make_unique<rpc::ControlServiceClient>(service("control"));
    pool = std::make_unique<rpc::PoolServiceClient>(service("pool"));
    transport->open();
    if (!address.is_unix() && IsItself(*socket)) {
      transport->close();
      throw TTransportException(TTransportException::NOT_OPEN, "connection refused");
    }
  }

  // The greeting that opens every connection. Throws what Guarded turns into a Status.
  void Greet(const ClientOptions& options) {
    socket->setRecvTimeout(std::min(options.receive_timeout_ms, kHelloTimeoutMs));
    rpc::HelloReply reply;
    checkpoint->hello(reply, rpc::g_stockpot_constants.PROTOCOL_VERSION, options.token);
    socket->setRecvTimeout(options.receive_timeout_ms);
  }

  // What the generated send_put_chunk does, without copying the data into a string first.
  void SendPutChunk(const std::string& session, const ChunkView& chunk) {
    WireProtocol& out = *protocol;
    out.writeMessageBegin("checkpoint:put_chunk", apache::thrift::protocol::T_CALL, 0);
    out.writeFieldBegin("session", apache::thrift::protocol::T_STRING, 1);
    out.writeString(session);
    out.writeFieldBegin("digest", apache::thrift::protocol::T_STRING, 2);
    out.writeString(chunk.digest.raw());
    out.writeFieldBegin("data", apache::thrift::protocol::T_STRING, 3);
    out.writeString(
        std::string_view(reinterpret_cast<const char*>(chunk.data.data()), chunk.data.size()));
    out.writeFieldStop();
    out.writeMessageEnd();
    transport->writeEnd();
    transport->flush();
  }
};

Client::Client(RpcAddress address, const ClientOptions& options, TlsFactory tls)
    : address_(std::move(address)), options_(options), tls_(std::move(tls)) {}

Client::~Client() { Disconnect(); }

Result<std::unique_ptr<Client>> Client::Create(std::string_view address,
                                               const ClientOptions& options) {
  STOCKPOT_CHECK(
      options.chunks_in_flight >= 1 && options.chunks_in_flight <= rpc_limits::kMaxChunksInFlight,
      options.chunks_in_flight);
  STOCKPOT_ASSIGN_OR_RETURN(RpcAddress parsed, ParseRpcAddress(address));
  STOCKPOT_RETURN_IF_ERROR(CheckTokenPath(parsed, !options.token.empty(), options.tls.enabled()));
  STOCKPOT_ASSIGN_OR_RETURN(TlsFactory tls, MakeTlsFactory(options.tls));
  return std::unique_ptr<Client>(new Client(std::move(parsed), options, std::move(tls)));
}

Result<std::unique_ptr<Client>> Client::Connect(std::string_view address,
                                                const ClientOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(auto client, Create(address, options));
  STOCKPOT_RETURN_IF_ERROR(client->Hello().status());
  return client;
}

const RpcAddress& Client::address() const { return address_; }

void Client::Shutdown() {
  const std::lock_guard lock(mutex_);
  shut_down_ = true;
  if (connection_) ::shutdown(connection_->socket->getSocketFD(), SHUT_RDWR);
}

void Client::Disconnect() {
  const std::lock_guard lock(mutex_);
  if (!connection_) return;
  const SigpipeBlock no_signal;  // TLS says goodbye
  try {
    connection_->transport->close();
  } catch (const std::exception&) {
    // It is gone either way.
  }
  connection_.reset();
}

Status Client::Ensure() {
  if (connection_ && IsStale(*connection_->socket)) Disconnect();
  {
    const std::lock_guard lock(mutex_);
    if (shut_down_) return Unavailable("the client is shut down");
  }
  if (connection_) return OkStatus();
  try {
    auto connection = std::make_unique<Connection>(address_, options_, tls_);
    const std::lock_guard lock(mutex_);
    if (shut_down_) return Unavailable("the client is shut down");
    connection_ = std::move(connection);
  } catch (const std::exception& error) {
    return Unavailable("no daemon answers at " + address_.ToString() + " (" + error.what() + ")");
  }
  bool hung_up = false;
  const Status greeted = Attempt(
      "hello", 0, [&] { connection_->Greet(options_); }, hung_up);
  if (!greeted.ok()) Disconnect();
  return greeted;
}

// The one place where Thrift's exceptions end. `receive_timeout_ms` 0: the client's own.
Status Client::Attempt(std::string_view call, int receive_timeout_ms,
                       const std::function<void()>& body, bool& hung_up) {
  const SigpipeBlock no_signal;
  const auto lost = [&](StatusCode code, const std::string& why) {
    Disconnect();
    return Status(code, std::string(call) + " at " + address_.ToString() + ": " + why);
  };
  try {
    if (receive_timeout_ms > 0) connection_->socket->setRecvTimeout(receive_timeout_ms);
    body();
    if (receive_timeout_ms > 0) connection_->socket->setRecvTimeout(options_.receive_timeout_ms);
    return OkStatus();
  } catch (const rpc::Error& error) {
    if (receive_timeout_ms > 0) connection_->socket->setRecvTimeout(options_.receive_timeout_ms);
    return FromRpcError(error);
  } catch (const TTransportException& error) {
    if (error.getType() == TTransportException::CORRUPTED_DATA) {
      return lost(StatusCode::kCorruption, error.what());
    }
    const bool timed_out = error.getType() == TTransportException::TIMED_OUT;
    hung_up = !timed_out;
    return lost(
        StatusCode::kUnavailable,
        timed_out ? "no answer in time" : "connection lost (" + std::string(error.what()) + ")");
  } catch (const TApplicationException& error) {
    return lost(StatusCode::kInternal, "refused by the daemon (" + std::string(error.what()) + ")");
  } catch (const TProtocolException& error) {
    return lost(StatusCode::kCorruption,
                "not an answer of stockpotd (" + std::string(error.what()) + ")");
  } catch (const std::exception& error) {
    return lost(StatusCode::kInternal, error.what());
  }
}

Status Client::Guarded(std::string_view call, int receive_timeout_ms,
                       const std::function<void()>& body) {
  STOCKPOT_RETURN_IF_ERROR(Ensure());
  const bool was_idle = connection_->has_served;
  bool hung_up = false;
  Status status = Attempt(call, receive_timeout_ms, body, hung_up);
  if (hung_up && was_idle) {
    STOCKPOT_RETURN_IF_ERROR(Ensure());
    status = Attempt(call, receive_timeout_ms, body, hung_up);
  }
  if (connection_) connection_->has_served = true;
  return status;
}

template <typename T, typename Body>
Result<T> Client::Call(std::string_view call, Body body) {
  T reply{};
  STOCKPOT_RETURN_IF_ERROR(Guarded(call, 0, [&] { body(*connection_, reply); }));
  return reply;
}

Result<rpc::HelloReply> Client::Hello() {
  STOCKPOT_ASSIGN_OR_RETURN(
      rpc::HelloReply reply,
      Call<rpc::HelloReply>("hello", [&](Connection& c, rpc::HelloReply& out) {
        c.checkpoint->hello(out, rpc::g_stockpot_constants.PROTOCOL_VERSION, options_.token);
      }));
  if (reply.chunk_bytes != kChunkBytes) {
    return InvalidArgument("the daemon at " + address_.ToString() + " cuts chunks of " +
                           std::to_string(reply.chunk_bytes) + " bytes, this client of " +
                           std::to_string(kChunkBytes) + ": use the same version on both sides");
  }
  return reply;
}

Result<rpc::Run> Client::CreateRun(const std::string& name, const std::string& base,
                                   const std::optional<rpc::RunConfig>& config,
                                   const std::map<std::string, std::string>& tags) {
  return Call<rpc::Run>("create_run", [&](Connection& c, rpc::Run& out) {
    c.checkpoint->create_run(out, name, base, config.value_or(rpc::RunConfig()), tags, !config);
  });
}

Result<std::string> Client::OpenSession(const rpc::SessionRequest& request) {
  return Call<std::string>("open_session", [&](Connection& c, std::string& out) {
    c.checkpoint->open_session(out, request);
  });
}

Result<std::vector<bool>> Client::HaveChunks(const std::string& session,
                                             std::span<const Digest> digests) {
  STOCKPOT_ASSIGN_OR_RETURN(
      std::vector<bool> have,
      Call<std::vector<bool>>("have_chunks", [&](Connection& c, std::vector<bool>& out) {
        c.checkpoint->have_chunks(out, session, RawDigests(digests));
      }));
  if (have.size() != digests.size()) {
    return Corruption("have_chunks: asked about " + std::to_string(digests.size()) +
                      " chunks, got " + std::to_string(have.size()) + " answers");
  }
  return have;
}

Status Client::PutChunks(const std::string& session, std::span<const ChunkView> chunks) {
  if (chunks.empty()) return OkStatus();
  Status refused;
  const Status sent = Guarded("put_chunk", 0, [&] {
    size_t in_flight = 0;
    const auto receive = [&] {
      --in_flight;
      try {
        connection_->checkpoint->recv_put_chunk();
      } catch (const rpc::Error& error) {
        // The answers behind it must still be read, or the next call would get them.
        if (refused.ok()) refused = FromRpcError(error);
      }
    };
    for (const ChunkView& chunk : chunks) {
      if (!refused.ok()) break;
      if (in_flight == static_cast<size_t>(options_.chunks_in_flight)) receive();
      connection_->SendPutChunk(session, chunk);
      ++in_flight;
    }
    while (in_flight > 0) receive();
  });
  return sent.ok() ? refused : sent;
}

Result<rpc::CommitReply> Client::CommitShard(const std::string& session, const rpc::Shard& shard) {
  return Call<rpc::CommitReply>("commit_shard", [&](Connection& c, rpc::CommitReply& out) {
    c.checkpoint->commit_shard(out, session, shard);
  });
}

Result<rpc::StepState> Client::StepState(const rpc::StepKey& key, int32_t timeout_ms) {
  rpc::StepState state;
  const int32_t wait_ms = std::clamp(timeout_ms, 0, rpc_limits::kMaxWatchMs);
  STOCKPOT_RETURN_IF_ERROR(Guarded("step_state", options_.receive_timeout_ms + wait_ms, [&] {
    connection_->checkpoint->step_state(state, key, wait_ms);
  }));
  return state;
}

Result<rpc::ResumePoint> Client::ResumePoint(const std::string& run, const std::string& key) {
  return Call<rpc::ResumePoint>("resume_point", [&](Connection& c, rpc::ResumePoint& out) {
    c.checkpoint->resume_point(out, run, key);
  });
}

Status Client::Abort(const std::string& session) {
  return Guarded("abort", 0, [&] { connection_->checkpoint->abort(session); });
}

Status Client::ReportEval(const std::string& id, const std::string& task, const std::string& metric,
                          double value, const std::string& by) {
  return Guarded("report_eval", 0,
                 [&] { connection_->checkpoint->report_eval(id, task, metric, value, by); });
}

Result<Manifest> Client::FetchManifest(const std::string& id) {
  STOCKPOT_ASSIGN_OR_RETURN(
      std::string json, Call<std::string>("fetch_manifest", [&](Connection& c, std::string& out) {
        c.checkpoint->fetch_manifest(out, id);
      }));
  const Result<Digest> asked = Digest::FromHex(id);
  if (asked.ok() && Sha256(json) != *asked) {
    return Corruption("fetch_manifest: the daemon's answer is not artifact " + id);
  }
  Result<Manifest> manifest = Manifest::FromJson(json);
  if (!manifest.ok()) return manifest.status().WithContext("fetch_manifest '" + id + "'");
  return manifest;
}

Status Client::FetchChunks(std::span<const Digest> digests,
                           const std::function<Status(size_t, std::string&&)>& sink) {
  Status refused;
  size_t done = 0;  // given to the sink: a second try goes on from here
  const Status fetched = Guarded("fetch_chunk", 0, [&] {
    size_t asked = done;
    const auto receive = [&](size_t index) {
      std::string data;
      try {
        connection_->checkpoint->recv_fetch_chunk(data);
      } catch (const rpc::Error& error) {
        if (refused.ok()) refused = FromRpcError(error);
      }
      if (!refused.ok()) return;  // only drains what was asked
      if (Sha256(data) != digests[index]) {
        refused = Corruption("chunk " + digests[index].ShortHex() + " arrived with other bytes");
        return;
      }
      refused = sink(index, std::move(data));
    };
    for (; done < digests.size(); ++done) {
      while (refused.ok() && asked < digests.size() &&
             asked - done < static_cast<size_t>(options_.chunks_in_flight)) {
        connection_->checkpoint->send_fetch_chunk(std::string(digests[asked++].raw()));
      }
      if (done == asked) break;  // refused, and everything that was asked has been read
      receive(done);
    }
  });
  return fetched.ok() ? refused : fetched;
}

Result<std::vector<rpc::Run>> Client::Runs() {
  return Call<std::vector<rpc::Run>>("runs",
                                     [](Connection& c, auto& out) { c.lineage->runs(out); });
}

Result<std::vector<rpc::LogEntry>> Client::Log(const std::string& run) {
  return Call<std::vector<rpc::LogEntry>>(
      "log", [&](Connection& c, auto& out) { c.lineage->log(out, run); });
}

Result<rpc::ArtifactInfo> Client::Show(const std::string& id) {
  return Call<rpc::ArtifactInfo>("show",
                                 [&](Connection& c, auto& out) { c.lineage->show(out, id); });
}

Result<std::vector<rpc::Alias>> Client::Aliases() {
  return Call<std::vector<rpc::Alias>>("aliases",
                                       [](Connection& c, auto& out) { c.lineage->aliases(out); });
}

Result<rpc::Alias> Client::MoveAlias(const std::string& name, const std::string& id,
                                     const std::string& by,
                                     const std::optional<std::string>& expected) {
  rpc::AliasMove move;
  move.name = name;
  move.id = id;
  move.by = by;
  if (expected) move.__set_expected(*expected);
  return Call<rpc::Alias>("move_alias",
                          [&](Connection& c, auto& out) { c.lineage->move_alias(out, move); });
}

Result<Digest> Client::Resolve(const std::string& id) {
  STOCKPOT_ASSIGN_OR_RETURN(
      std::string hex,
      Call<std::string>("resolve", [&](Connection& c, auto& out) { c.lineage->resolve(out, id); }));
  return Digest::FromHex(hex);
}

Result<rpc::RetentionPolicy> Client::SetRetention(const std::string& run,
                                                  const rpc::RetentionPolicy& policy) {
  return Call<rpc::RetentionPolicy>("set_retention", [&](Connection& c, auto& out) {
    c.lineage->set_retention(out, run, policy);
  });
}

Result<rpc::ProbeSet> Client::SetProbe(const std::string& run,
                                       const std::vector<rpc::ProbeText>& texts,
                                       const std::string& by) {
  return Call<rpc::ProbeSet>(
      "set_probe", [&](Connection& c, auto& out) { c.lineage->set_probe(out, run, texts, by); });
}

Result<rpc::ProbeSet> Client::SetCalibration(const std::string& run,
                                             const std::vector<rpc::ProbeText>& texts,
                                             const std::string& by) {
  return Call<rpc::ProbeSet>("set_calibration", [&](Connection& c, auto& out) {
    c.lineage->set_calibration(out, run, texts, by);
  });
}

Result<rpc::ProbeSet> Client::Calibration(const std::string& run) {
  return Call<rpc::ProbeSet>("calibration",
                             [&](Connection& c, auto& out) { c.lineage->calibration(out, run); });
}

Result<rpc::ProbeSet> Client::Probe(const std::string& run) {
  return Call<rpc::ProbeSet>("probe",
                             [&](Connection& c, auto& out) { c.lineage->probe(out, run); });
}

Result<rpc::Gate> Client::SetGate(const std::string& run, const rpc::Gate& gate) {
  return Call<rpc::Gate>("set_gate",
                         [&](Connection& c, auto& out) { c.lineage->set_gate(out, run, gate); });
}

Result<rpc::Gate> Client::GetGate(const std::string& run) {
  return Call<rpc::Gate>("gate", [&](Connection& c, auto& out) { c.lineage->gate(out, run); });
}

Result<rpc::RetentionReport> Client::Retention(const std::string& run) {
  return Call<rpc::RetentionReport>(
      "retention", [&](Connection& c, auto& out) { c.lineage->retention(out, run); });
}

Status Client::Pin(const std::string& id, const std::string& by, const std::string& why) {
  return Guarded("pin", 0, [&] { connection_->lineage->pin(id, by, why); });
}

Status Client::Unpin(const std::string& id) {
  return Guarded("unpin", 0, [&] { connection_->lineage->unpin(id); });
}

Status Client::Delete(const std::string& id, int64_t grace_ms, const std::string& by,
                      const std::string& why) {
  return Guarded("delete", 0,
                 [&] { connection_->lineage->delete_artifact(id, grace_ms, by, why); });
}

Status Client::Undelete(const std::string& id) {
  return Guarded("undelete", 0, [&] { connection_->lineage->undelete(id); });
}

Result<rpc::GcReply> Client::CollectGarbage(bool dry_run, int64_t bytes_per_second) {
  rpc::GcReply reply;
  STOCKPOT_RETURN_IF_ERROR(
      Guarded("gc", kDayMs, [&] { connection_->lineage->gc(reply, dry_run, bytes_per_second); }));
  return reply;
}

Result<rpc::Job> Client::Merge(const MergeRequest& request) {
  return Call<rpc::Job>("merge", [&](Connection& c, auto& out) {
    c.control->merge(out, request.ids, request.run, request.step, request.energy, request.rank,
                     request.force, request.options);
  });
}

Result<rpc::Job> Client::Publish(const std::string& id, const std::string& codec,
                                 const std::string& name, const rpc::PublishOptions& options) {
  return Call<rpc::Job>("publish", [&](Connection& c, auto& out) {
    c.control->publish(out, id, codec, name, options);
  });
}

Result<rpc::Job> Client::PublishForced(const std::string& id, const std::string& codec,
                                       const std::string& name, const std::string& why,
                                       const std::string& by, const rpc::PublishOptions& options) {
  return Call<rpc::Job>("publish_forced", [&](Connection& c, auto& out) {
    c.control->publish_forced(out, id, codec, name, why, by, options);
  });
}

Result<rpc::Job> Client::Compress(const std::string& id) {
  return Call<rpc::Job>("compress",
                        [&](Connection& c, auto& out) { c.control->compress(out, id); });
}

Result<rpc::Pool> Client::CreatePool(const std::string& name, const std::string& base,
                                     const rpc::PoolConfig& config) {
  return Call<rpc::Pool>(
      "create", [&](Connection& c, auto& out) { c.pool->create(out, name, base, config); });
}

Result<std::vector<rpc::Pool>> Client::Pools() {
  return Call<std::vector<rpc::Pool>>("pools",
                                      [](Connection& c, auto& out) { c.pool->pools(out); });
}

Result<rpc::Pool> Client::GetPool(const std::string& name) {
  return Call<rpc::Pool>("pool", [&](Connection& c, auto& out) { c.pool->pool(out, name); });
}

Result<rpc::Job> Client::AddToPool(const rpc::PoolAdd& request) {
  return Call<rpc::Job>("add", [&](Connection& c, auto& out) { c.pool->add(out, request); });
}

Result<rpc::Job> Client::RemoveFromPool(const std::string& pool, const std::string& task) {
  return Call<rpc::Job>("remove",
                        [&](Connection& c, auto& out) { c.pool->remove(out, pool, task); });
}

Result<rpc::Job> Client::EvictFromPool(const std::string& pool) {
  return Call<rpc::Job>("evict", [&](Connection& c, auto& out) { c.pool->evict(out, pool); });
}

Result<rpc::Job> Client::DeletePool(const std::string& pool, bool force) {
  return Call<rpc::Job>("delete_pool",
                        [&](Connection& c, auto& out) { c.pool->delete_pool(out, pool, force); });
}

Result<rpc::Job> Client::Score(const std::string& id) {
  return Call<rpc::Job>("score", [&](Connection& c, auto& out) { c.control->score(out, id); });
}

Result<rpc::Job> Client::GetJob(const std::string& key) {
  return Call<rpc::Job>("job", [&](Connection& c, auto& out) { c.control->job(out, key); });
}

Result<std::vector<rpc::Job>> Client::Jobs() {
  return Call<std::vector<rpc::Job>>("jobs",
                                     [](Connection& c, auto& out) { c.control->jobs(out); });
}

Status Client::Unpublish(const std::string& name) {
  return Guarded("unpublish", 0, [&] { connection_->control->unpublish(name); });
}

Result<std::vector<rpc::Alias>> Client::Routes() {
  return Call<std::vector<rpc::Alias>>("routes",
                                       [](Connection& c, auto& out) { c.control->routes(out); });
}

Result<rpc::DaemonStatus> Client::GetStatus() {
  return Call<rpc::DaemonStatus>("status",
                                 [](Connection& c, auto& out) { c.control->status(out); });
}

Result<std::vector<rpc::Event>> Client::Watch(int64_t since, int32_t limit, int32_t timeout_ms) {
  std::vector<rpc::Event> events;
  const int32_t wait_ms = std::clamp(timeout_ms, 0, rpc_limits::kMaxWatchMs);
  STOCKPOT_RETURN_IF_ERROR(Guarded("watch", options_.receive_timeout_ms + wait_ms, [&] {
    connection_->control->watch(events, since, limit, wait_ms);
  }));
  return events;
}

Result<rpc::ScrubReply> Client::Scrub(const std::string& repair_from) {
  rpc::ScrubReply reply;
  STOCKPOT_RETURN_IF_ERROR(
      Guarded("scrub", kDayMs, [&] { connection_->control->scrub(reply, repair_from); }));
  return reply;
}

Result<rpc::BackupReply> Client::Backup(const std::string& directory) {
  rpc::BackupReply reply;
  STOCKPOT_RETURN_IF_ERROR(
      Guarded("backup", kDayMs, [&] { connection_->control->backup(reply, directory); }));
  return reply;
}

}  // namespace stockpot
