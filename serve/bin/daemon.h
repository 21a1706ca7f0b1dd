// The composition root: the one place that names concrete classes of every layer, makes them in order
// and takes them down in the opposite one.
//
//   store -> sessions -> HTTP server -> (base, engine, variants, router) -> job runner -> Thrift server
//
// The base may not be imported yet when the daemon starts: the HTTP server answers 503 with the reason
// until it is, and the model comes up by itself then.
#pragma once

#include <memory>

#include "kernels/base/status.h"
#include "serve/bin/daemon_options.h"

namespace stockpot {

class Daemon {
 public:
  // Opens the store and listens. On success DIR/addresses.json says where:
  //   {"http": "127.0.0.1:8080", "thrift": "127.0.0.1:7070", "unix": "/run/stockpot.sock"}
  // Unavailable: an address is taken, or another process has the store open.
  static Result<std::unique_ptr<Daemon>> Start(const DaemonOptions& options);
  // Stops at once what Drain did not end.
  ~Daemon();

  // Takes no new requests and waits for the running ones, at most the options' drain_seconds.
  void Drain();

 private:
  struct Parts;
  explicit Daemon(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace stockpot
