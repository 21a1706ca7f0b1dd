// One HTTP request and its reply, as handlers see it; the transport is connection.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace stockpot {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;  // "GET"
  std::string path;    // percent-decoded, without the query
  std::string query;   // as sent, without '?'
  std::string body;
  std::chrono::steady_clock::time_point arrival;  // when its header was read
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  HttpHeaders headers;  // beyond content-type and content-length
};

// Exactly one of: Respond() once; or BeginStream(), any number of Write(), EndStream(). An exchange
// that is dropped before its reply is complete closes the connection. Nothing happens, and nothing
// fails, when the client is gone.
// Thread promise: every method may be called from any thread; calls take effect in order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  virtual const HttpRequest& request() const = 0;

  virtual void Respond(HttpResponse response) = 0;

  // Sends status 200 and the headers; the body follows in pieces as they are written.
  virtual void BeginStream(std::string content_type, HttpHeaders headers) = 0;
  // A client that does not read is disconnected when more than kMaxUnsentBytes wait for it.
  virtual void Write(std::string piece) = 0;
  virtual void EndStream() = 0;

  // Calls `callback` once if the client goes away before the reply is complete (also when it is
  // gone already). It runs on the connection's strand.
  virtual void OnDisconnect(std::function<void()> callback) = 0;

  // Runs `task` on the connection's strand, after the tasks posted before it.
  virtual void Post(std::function<void()> task) = 0;
};

using HttpHandler = std::function<void(std::shared_ptr<Exchange>)>;

}  // namespace stockpot
