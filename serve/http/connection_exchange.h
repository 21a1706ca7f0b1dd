// A request's reply, bound to its connection.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "serve/http/exchange.h"

namespace stockpot {

class Connection;

// The reply to one request. Keeps the connection alive; tells it when it is dropped unanswered.
class ConnectionExchange final : public Exchange {
 public:
  // `number`: of the request on its connection.
  ConnectionExchange(std::shared_ptr<Connection> connection, HttpRequest request, uint64_t number)
      : connection_(std::move(connection)), request_(std::move(request)), number_(number) {}
  ~ConnectionExchange() override;

  const HttpRequest& request() const override { return request_; }
  void Respond(HttpResponse response) override;
  void BeginStream(std::string content_type, HttpHeaders headers) override;
  void Write(std::string piece) override;
  void EndStream() override;
  void OnDisconnect(std::function<void()> callback) override;
  void Post(std::function<void()> task) override;

 private:
  // Runs task(connection) on its strand, unless it has gone on to another request.
  template <typename Task>
  void OnStrand(Task task);
  HttpRequest Line() const { return {.method = request_.method, .path = request_.path}; }

  const std::shared_ptr<Connection> connection_;
  const HttpRequest request_;
  const uint64_t number_;
};

}  // namespace stockpot
