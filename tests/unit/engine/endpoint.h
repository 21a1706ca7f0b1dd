// The whole endpoint on loopback over a tiny model: store, variant cache, router, engine, server.
#pragma once

#include <memory>
#include <string>

#include "serve/engine/engine.h"
#include "serve/http/server.h"
#include "serve/http/text_assets.h"
#include "serve/variants/router.h"
#include "serve/variants/variant_cache.h"
#include "tests/unit/engine/http_client.h"
#include "tests/unit/engine/tiny_model.h"
#include "tests/unit/model/world.h"

namespace stockpot::test {

inline constexpr const char* kBaseName = "tiny";

struct EndpointOptions {
  EngineLimits engine = {.step_rows = 64, .kv_bytes = int64_t{16} << 20};
  HttpServerOptions http = {.port = 0, .version = "9.8.7"};
  bool with_model = true;
  int64_t hidden = 32;
  int64_t layers = 2;
};

class Endpoint {
 public:
  explicit Endpoint(EndpointOptions options = {});
  ~Endpoint();

  uint16_t port() const { return server_->port(); }
  HttpReply Get(const std::string& path) { return HttpClient(port()).Get(path); }
  HttpReply Post(const std::string& path, const Json& body) {
    return HttpClient(port()).Post(path, body);
  }
  HttpReply Complete(const Json& body) { return Post("/v1/completions", body); }
  HttpReply Chat(const Json& body) { return Post("/v1/chat/completions", body); }

  // Publishes a variant (the model with every weight moved, and perhaps other files) under a name
  // and waits until the router knows it.
  Digest Publish(const std::string& name, uint64_t seed,
                 const std::map<std::string, std::string>& files = {});

  void SetModel();
  Engine& engine() { return *engine_; }
  VariantCache& cache() { return *cache_; }
  World& world() { return world_; }
  HttpServer& server() { return *server_; }
  // Waits until nothing runs or waits in the engine.
  void WaitUntilIdle();
  // A value of /metrics, or -1.
  double Metric(const std::string& name);

 private:
  TestModel model_;
  World world_;
  std::unique_ptr<TextAssetsCache> text_;
  std::unique_ptr<VariantCache> cache_;
  std::unique_ptr<Router> router_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<HttpServer> server_;
};

}  // namespace stockpot::test
