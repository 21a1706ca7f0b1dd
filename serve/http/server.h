// The HTTP server: Boost.Beast on a few io threads, a worker pool for what takes time, the API on
// top.
//
//   HttpServer server({.port = 8000, .version = "0.1.0"});
//   server.AddRoute("GET", "/api/status", handler);      // before Start
//   server.Start();                                      // answers /health; the rest 503
//   server.SetModel(model);                              // when a base is loaded
//   ...
//   server.BeginDrain();  engine.Drain(30'000);  server.Stop();
//
// Thread promise: AddRoute, Start and Stop from one thread; the rest from any. Nothing blocks an io
// thread, so /health and /metrics answer while everything else is busy.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/base/status.h"
#include "serve/http/exchange.h"
#include "serve/http/serving_model.h"

namespace stockpot {

struct HttpServerOptions {
  std::string address = "127.0.0.1";
  uint16_t port = 8000;  // 0: any free one, see port()
  std::string version;   // what /version says
  int io_threads = 2;
  int worker_threads = 2;
  int64_t max_connections = 1024;  // over it: 503 and closed
  int64_t idle_timeout_ms = 75'000;
  int64_t read_timeout_ms = 60'000;
  int64_t write_timeout_ms = 60'000;
};

class HttpServer {
 public:
  explicit HttpServer(HttpServerOptions options);
  ~HttpServer();  // Stop()
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // A whole path, or with a final '/' everything below it. The handler runs on the worker pool.
  void AddRoute(std::string method, std::string path, HttpHandler handler);

  // Unavailable: the address is taken. InvalidArgument: it is no address.
  Status Start();
  uint16_t port() const;  // after Start

  // Once. Everything it refers to must outlive the server, or at least Stop().
  void SetModel(std::shared_ptr<const ServingModel> model);

  // New generation requests and /ready are 503 from now on; what runs goes on.
  void BeginDrain();
  // Closes every connection (cancelling what they wait for) and waits until nothing of them is
  // left.
  void Stop();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
