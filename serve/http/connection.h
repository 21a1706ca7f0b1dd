// One client's connection: reads requests one after another, hands each to the handler as an
// Exchange, writes the reply. Beast parses; everything runs on the connection's strand and never
// waits.
//
//   reading -> dispatched (watching for the client's leaving) -> replying -> reading ...
//
// While a reply is made one small read stays open: it sees the client go. Bytes that arrive in it
// belong to the next request (pipelining) and are kept, up to kMaxPipelinedBytes.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "serve/http/exchange.h"

namespace stockpot {

// What connections share. Outlives them.
struct ConnectionContext {
  HttpHandler handler;
  std::function<void(const HttpRequest& request, int status)> observer;
  int64_t idle_timeout_ms = 75'000;    // between requests
  int64_t read_timeout_ms = 60'000;    // from a request's first byte to its last
  int64_t write_timeout_ms = 60'000;   // of one write without progress
  std::atomic<int64_t>& open;          // connections
  std::atomic<int64_t> body_bytes{0};  // of requests being read or handled
  std::atomic<bool> closing{false};    // no keep-alive any more
};

// Handle to a connection for the server; the connection lives as long as somebody needs it.
class ConnectionHandle {
 public:
  virtual ~ConnectionHandle() = default;
  virtual void Close() = 0;        // any thread: as if the client had gone
  virtual void CloseIfIdle() = 0;  // any thread: if no request is being handled
};

// Starts serving `socket`, whose executor must be a strand. `refuse`: reply 503 and close.
std::shared_ptr<ConnectionHandle> StartConnection(boost::asio::ip::tcp::socket socket,
                                                  ConnectionContext& context, bool refuse);

}  // namespace stockpot
