// The four services of stockpot.thrift over the store. Internal to thrift/: server.h starts them.
//
// A handler checks what came from the wire, calls the store, and turns every failure, an exception
// of a library included, into rpc::Error. Thread promise: any thread, every method.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "stockpot_rpc/CheckpointService.h"
#include "stockpot_rpc/ControlService.h"
#include "stockpot_rpc/LineageService.h"
#include "stockpot_rpc/PoolService.h"
#include "thrift/server.h"

namespace stockpot {

// What the handlers are told about the server they are in. Synchronises itself.
class ServerFacts {
 public:
  // `max_connections`: that an address takes at once.
  explicit ServerFacts(int64_t max_connections) : max_connections_(max_connections) {}
  int64_t max_connections() const { return max_connections_; }
  // Calls that wait return.
  void Stop() { stopping_ = true; }
  bool stopping() const { return stopping_; }
  // Where clients find it: known once it listens.
  void AddAddress(const std::string& address) {
    const std::lock_guard lock(mutex_);
    addresses_ += (addresses_.empty() ? "" : " ") + address;
  }
  std::string addresses() const {
    const std::lock_guard lock(mutex_);
    return addresses_;
  }

 private:
  const int64_t max_connections_;
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;
  std::string addresses_;  // guarded
};

std::shared_ptr<rpc::CheckpointServiceIf> MakeCheckpointHandler(const RpcServerParts& parts,
                                                                const ServerFacts& server);
std::shared_ptr<rpc::LineageServiceIf> MakeLineageHandler(const RpcServerParts& parts);
std::shared_ptr<rpc::PoolServiceIf> MakePoolHandler(const RpcServerParts& parts);
std::shared_ptr<rpc::ControlServiceIf> MakeControlHandler(const RpcServerParts& parts,
                                                          const ServerFacts& server);

// Runs `body` (returning Status) and throws rpc::Error unless it was OK.
template <typename Body>
void Answer(Body body);
void ThrowUnlessOk(const Status& status);

template <typename Body>
void Answer(Body body) {
  Status status;
  try {
    status = body();
  } catch (const std::exception& error) {
    status = Internal(error.what());
  }
  ThrowUnlessOk(status);
}

// InvalidArgument if a name, id or the like is longer than a request's strings may be.
Status CheckLength(const std::string& text, const char* what);

}  // namespace stockpot
