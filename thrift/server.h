// The daemon's side of stockpot.thrift: four services over the store, on TCP and unix sockets at
// once.
//
//   STOCKPOT_ASSIGN_OR_RETURN(auto server, RpcServer::Start(
//       {.store = *store, .ingest = ingest, .pipeline = pipeline}, {.addresses =
//       {"127.0.0.1:7070"}}));
//   ...
//   store->Shutdown();   // wakes those who wait for events
//   server->Stop();
//
// One thread per connection (thrift/limits.h: how many). Input is untrusted: what is no call of
// ours closes its connection and nothing else; every length is bounded before it is believed,
// memory follows what has arrived, and what has begun must go on. Who may connect: whom the address
// lets (loopback, or a unix socket of mode 0600), whose certificate `tls` accepts, who knows
// `token` (thrift/security.h).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "stockpot_rpc/stockpot_types.h"
#include "store/checkpoint_store.h"
#include "store/ingest.h"
#include "store/pipeline.h"
#include "thrift/address.h"
#include "thrift/limits.h"
#include "thrift/security.h"

namespace stockpot {

// What only the composition root knows.
struct DaemonControl {
  std::string version;
  // Adds to a status what is not in the store: base, base_state, served, devices, http_address.
  // Called from connection threads, several at once. Null: nothing to add.
  std::function<void(rpc::DaemonStatus& status)> describe;
  // Requests of the last window by route. Likewise; null: nobody counts.
  std::function<int64_t(const std::string& route)> requests;
};

struct RpcServerParts {  // all must outlive the server
  CheckpointStore& store;
  Ingest& ingest;
  Pipeline& pipeline;
  DaemonControl control = {};
};

struct RpcServerOptions {
  std::vector<std::string> addresses;                     // thrift/address.h; port 0: any free one
  int64_t max_connections = rpc_limits::kMaxConnections;  // each address
  int message_timeout_ms = rpc_limits::kMessageTimeoutMs;
  int idle_timeout_ms = rpc_limits::kIdleTimeoutMs;
  int32_t max_message_bytes = rpc_limits::kMaxMessageBytes;  // of one call
  ServerTls tls;                                             // of TCP addresses; none by default
  std::string token;  // of all addresses; empty: none is asked for
};

class RpcServer {
 public:
  // Listens when it returns. InvalidArgument: an address, a TLS file, or a token without TLS on an
  // address of other machines. Unavailable: it is taken by somebody who
  // answers; the socket file of a dead daemon is replaced. Nothing listens after a failure.
  static Result<std::unique_ptr<RpcServer>> Start(RpcServerParts parts, RpcServerOptions options);
  ~RpcServer();  // Stop()
  RpcServer(const RpcServer&) = delete;
  RpcServer& operator=(const RpcServer&) = delete;

  // With the real ports, in the order of the options.
  const std::vector<RpcAddress>& addresses() const { return addresses_; }

  // Takes no more calls, cuts every connection, waits for the calls that are being executed (long
  // ones end at CheckpointStore::Shutdown), removes the socket files. Idempotent; one thread at a
  // time.
  void Stop();

 private:
  struct State;
  explicit RpcServer(RpcServerOptions options);
  std::unique_ptr<State> state_;
  std::vector<RpcAddress> addresses_;
};

}  // namespace stockpot
