#include "tests/unit/engine/endpoint.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>
#include <utility>

namespace stockpot::test {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);

void Poll(const char* what, const std::function<bool()>& ready) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!ready()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << what;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

Endpoint::Endpoint(EndpointOptions options)
    : model_(TinyChatModel(1, options.hidden, options.layers)), world_(model_) {
  text_ = std::make_unique<TextAssetsCache>(*world_.store);
  cache_ = std::make_unique<VariantCache>(world_.base, *world_.store, VariantCache::Options());
  router_ = std::make_unique<Router>(kBaseName, world_.base, *world_.store, *cache_);
  engine_ = std::make_unique<Engine>(world_.base, options.engine, 1);
  server_ = std::make_unique<HttpServer>(options.http);
  EXPECT_OK(server_->Start());
  if (options.with_model) SetModel();
}

Endpoint::~Endpoint() { server_->Stop(); }

void Endpoint::SetModel() {
  server_->SetModel(std::make_shared<ServingModel>(
      ServingModel{kBaseName, world_.base, *engine_, *router_, *cache_, *text_}));
}

Digest Endpoint::Publish(const std::string& name, uint64_t seed,
                         const std::map<std::string, std::string>& files) {
  TestModel tuned = TunedFrom(model_, seed);
  for (const auto& [file, text] : files) tuned.config_files[file] = text;
  const Digest variant = world_.Publish(tuned);
  const int64_t sequence = world_.Route(name, variant);
  Poll("the router follows", [&] { return router_->followed_sequence() >= sequence; });
  return variant;
}

void Endpoint::WaitUntilIdle() {
  Poll("the engine is idle", [&] {
    const EngineStats stats = engine_->stats();
    return stats.running + stats.waiting == 0;
  });
}

double Endpoint::Metric(const std::string& name) {
  const std::string text = Get("/metrics").body;
  const size_t at = text.find("\n" + name + " ");
  return at == std::string::npos ? -1 : std::atof(text.c_str() + at + name.size() + 2);
}

}  // namespace stockpot::test
