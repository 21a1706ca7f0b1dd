// The OpenAI-compatible API over a serving model: which path does what.
//
//   POST /v1/completions, /v1/chat/completions     GET /v1/models, /v1/models/ID
//   POST /tokenize, /detokenize                    GET /tokenizer_info
//   GET  /health, /ready, /version, /metrics       and what AddRoute() added
//
// /health, /ready, /version and /metrics answer on the io thread and wait for nothing; everything
// else runs on the worker pool, and a request whose variant loads waits without a thread. Thread
// promise: AddRoute before the first Handle; the rest from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "serve/http/api_error.h"
#include "serve/http/exchange.h"
#include "serve/http/generation.h"
#include "serve/http/metrics.h"
#include "serve/http/request.h"
#include "serve/http/serving_model.h"

namespace stockpot {

class Api {
 public:
  // `version` is what /version says. `executor` runs slow work and must outlive what it was given.
  Api(std::string version, Executor executor);

  // Adds a route: a whole path, or with a final '/' everything below it. The handler runs on the
  // worker pool.
  void AddRoute(std::string method, std::string path, HttpHandler handler);

  // Once; before it, what needs a model is 503.
  void SetModel(std::shared_ptr<const ServingModel> model);
  // From now on generation is 503 and /ready is 503; what runs goes on.
  void BeginDrain() { draining_ = true; }

  void Handle(std::shared_ptr<Exchange> exchange);
  void Observe(const HttpRequest& request, int status);
  const std::shared_ptr<Metrics>& metrics() const { return metrics_; }

 private:
  struct Route {
    std::string method;
    std::string path;  // a final '/': everything below
    bool on_io_thread = false;
    HttpHandler handler;
  };
  struct Target {  // what a model name stands for
    std::shared_ptr<const ServingModel> model;
    std::shared_ptr<const TextAssets> text;
    Resolved resolved;
  };

  void AddBuiltInRoutes();
  static std::vector<std::string> RouteNames();
  const Route* FindRoute(const HttpRequest& request, std::string* allow) const;
  std::shared_ptr<const ServingModel> model() const;
  ApiResult<Target> FindTarget(const std::string& name) const;

  void Completions(std::shared_ptr<Exchange> exchange);
  void ChatCompletions(std::shared_ptr<Exchange> exchange);
  void Launch(std::shared_ptr<Exchange> exchange, Target target, GenerationPlan plan,
              std::unique_ptr<ReplyFormat> format);
  std::function<void()> FirstTokenObserver(const Target& target, const std::string& name);
  ReplyHead MakeHead(const char* prefix, const std::string& name, const Target& target);

  HttpResponse Models() const;
  HttpResponse ModelById(const std::string& id) const;
  HttpResponse Tokenize(const std::string& body) const;
  HttpResponse Detokenize(const std::string& body) const;
  HttpResponse TokenizerInfo(const std::string& query) const;
  HttpResponse Ready() const;

  const std::string version_;
  const Executor executor_;
  const int64_t started_s_;
  const std::shared_ptr<Metrics> metrics_;
  std::vector<Route> routes_;
  std::atomic<bool> draining_{false};
  std::atomic<uint64_t> next_id_;

  mutable std::mutex mutex_;
  std::shared_ptr<const ServingModel> model_;                 // guarded
  std::unordered_set<Digest, DigestHash> answered_variants_;  // guarded; bounded
};

}  // namespace stockpot
