// A peer between a client and the server that hangs up on its first connection: after a number of
// answers, when the next call arrives. Later connections it leaves alone.
#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "thrift/address.h"

namespace stockpot {

class FickleProxy {
 public:
  FickleProxy(const RpcAddress& server, int answers_first);
  ~FickleProxy();
  FickleProxy(const FickleProxy&) = delete;

  std::string address() const { return address_; }
  int connections() const { return connections_; }

 private:
  void Serve();
  // Calls go one at a time, each and its answer in one piece: they are short.
  void Forward(int client, int answers);

  const RpcAddress server_;
  const int answers_first_;
  int listener_ = -1;
  std::string address_;
  std::atomic<int> connections_{0};
  std::thread thread_;
};

}  // namespace stockpot
