#include "serve/http/api.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "serve/http/plan.h"
#include "serve/http/reply_json.h"
#include "serve/http/url.h"

namespace stockpot {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxAnsweredVariants = 4096;  // remembered for publish_to_first_token_seconds

int64_t UnixMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

HttpResponse JsonResponse(const Json& json) { return {.body = Dump(json)}; }

Json ModelJson(const ServedModel& served, const ServingModel& model, int64_t started_s) {
  return {{"id", served.name},
          {"object", "model"},
          {"created", served.moved_ms > 0 ? served.moved_ms / 1000 : started_s},
          {"owned_by", "stockpot"},
          {"root", served.digest.Hex()},
          {"parent", served.is_base ? Json(nullptr) : Json(model.base_name)},
          {"max_model_len", model.engine.max_context()},
          {"status", served.state}};
}

Json OrNull(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

}  // namespace

Api::Api(std::string version, Executor executor)
    : version_(std::move(version)),
      executor_(std::move(executor)),
      started_s_(UnixMs() / 1000),
      metrics_(std::make_shared<Metrics>(RouteNames())),
      next_id_((uint64_t{std::random_device()()} << 32) | 1) {
  AddBuiltInRoutes();
}

std::vector<std::string> Api::RouteNames() {
  return {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/", "/tokenize",
          "/detokenize",     "/tokenizer_info",      "/health",    "/ready",      "/version",
          "/metrics"};
}

void Api::AddBuiltInRoutes() {
  using ExchangePtr = std::shared_ptr<Exchange>;
  const auto at_once = [this](const char* path, auto make) {
    routes_.push_back({"GET", path, true, [make](ExchangePtr e) { e->Respond(make()); }});
  };
  at_once("/health", [] { return JsonResponse({{"status", "ok"}}); });
  at_once("/ready", [this] { return Ready(); });
  at_once("/version", [this] { return JsonResponse({{"version", version_}}); });
  at_once("/metrics", [this] {
    return HttpResponse{.content_type = "text/plain; version=0.0.4; charset=utf-8",
                        .body = metrics_->Render(model().get())};
  });
  AddRoute("POST", "/v1/completions", [this](ExchangePtr e) { Completions(std::move(e)); });
  AddRoute("POST", "/v1/chat/completions",
           [this](ExchangePtr e) { ChatCompletions(std::move(e)); });
  AddRoute("GET", "/v1/models", [this](ExchangePtr e) { e->Respond(Models()); });
  AddRoute("GET", "/v1/models/", [this](ExchangePtr e) {
    e->Respond(ModelById(e->request().path.substr(std::string_view("/v1/models/").size())));
  });
  AddRoute("POST", "/tokenize", [this](ExchangePtr e) { e->Respond(Tokenize(e->request().body)); });
  AddRoute("POST", "/detokenize",
           [this](ExchangePtr e) { e->Respond(Detokenize(e->request().body)); });
  AddRoute("GET", "/tokenizer_info",
           [this](ExchangePtr e) { e->Respond(TokenizerInfo(e->request().query)); });
}

void Api::AddRoute(std::string method, std::string path, HttpHandler handler) {
  routes_.push_back({std::move(method), std::move(path), false, std::move(handler)});
}

void Api::SetModel(std::shared_ptr<const ServingModel> model) {
  std::lock_guard lock(mutex_);
  model_ = std::move(model);
}

std::shared_ptr<const ServingModel> Api::model() const {
  std::lock_guard lock(mutex_);
  return model_;
}

const Api::Route* Api::FindRoute(const HttpRequest& request, std::string* allow) const {
  const Route* found = nullptr;
  for (const Route& route : routes_) {
    const bool below = route.path.back() == '/' && request.path.size() > route.path.size() &&
                       request.path.starts_with(route.path);
    if (!below && request.path != route.path) continue;
    if (route.method == request.method) {
      if (!found || route.path.size() > found->path.size()) found = &route;
    } else {
      if (!allow->empty()) *allow += ", ";
      *allow += route.method;
    }
  }
  return found;
}

void Api::Handle(std::shared_ptr<Exchange> exchange) {
  const HttpRequest& request = exchange->request();
  std::string allow;
  const Route* route = FindRoute(request, &allow);
  if (!route && allow.empty()) {
    return exchange->Respond(ErrorResponse(NotFound("no such path: " + request.path)));
  }
  if (!route) {
    HttpResponse response =
        PlainHttpError(405, request.path + " does not take " + request.method + ", only " + allow);
    response.headers.emplace_back("allow", allow);
    return exchange->Respond(std::move(response));
  }
  if (route->on_io_thread) return route->handler(std::move(exchange));
  executor_(
      [route, exchange = std::move(exchange)]() mutable { route->handler(std::move(exchange)); });
}

void Api::Observe(const HttpRequest& request, int status) {
  const bool by_id = request.path.starts_with("/v1/models/");
  metrics_->CountRequest(by_id ? "/v1/models/" : std::string_view(request.path), status);
}

ApiResult<Api::Target> Api::FindTarget(const std::string& name) const {
  Target target{.model = model()};
  if (!target.model) {
    return Unavailable("no base model is loaded yet; import one with `stockpot import-base`");
  }
  Result<Resolved> resolved =
      target.model->router.Resolve(name.empty() ? target.model->base_name : name);
  if (!resolved.ok()) {
    const bool unknown = resolved.status().code() == StatusCode::kNotFound;
    return ApiError(resolved.status(), "model", unknown ? "model_not_found" : "");
  }
  if (!name.empty()) target.model->router.CountRequest(name);
  target.resolved = *resolved;
  auto text = target.model->text.Get(resolved->digest);
  if (!text.ok()) {
    // The client's request is fine; what is stored is not.
    const bool wrong = text.status().code() == StatusCode::kInvalidArgument ||
                       text.status().code() == StatusCode::kNotFound;
    return ApiError(wrong ? Internal(text.status().message()) : text.status(), "model");
  }
  target.text = std::move(*text);
  return target;
}

ReplyHead Api::MakeHead(const char* prefix, const std::string& name, const Target& target) {
  char id[40];
  std::snprintf(id, sizeof id, "%s-%016llx", prefix,
                static_cast<unsigned long long>(next_id_.fetch_add(1)));
  return {.id = id,
          .created = UnixMs() / 1000,
          .model = name,
          .fingerprint = target.resolved.digest.Hex()};
}

// Reports how long after its route's commit a variant first answered here; null if it has already.
std::function<void()> Api::FirstTokenObserver(const Target& target, const std::string& name) {
  if (target.resolved.is_base) return nullptr;
  {
    std::lock_guard lock(mutex_);
    if (answered_variants_.size() >= kMaxAnsweredVariants) answered_variants_.clear();
    if (!answered_variants_.insert(target.resolved.digest).second) return nullptr;
  }
  for (const ServedModel& served : target.model->router.Models()) {
    if (served.name != name || served.digest != target.resolved.digest) continue;
    return [metrics = metrics_, moved_ms = served.moved_ms] {
      metrics->publish_to_first_token.Observe(
          std::max(0.0, static_cast<double>(UnixMs() - moved_ms) / 1000));
    };
  }
  return nullptr;
}

void Api::Launch(std::shared_ptr<Exchange> exchange, Target target, GenerationPlan plan,
                 std::unique_ptr<ReplyFormat> format) {
  const std::string name = plan.head.model;
  auto generation = std::make_shared<Generation>(
      Generation::Context{.exchange = std::move(exchange),
                          .model = target.model,
                          .text = target.text,
                          .metrics = metrics_,
                          .executor = executor_,
                          .on_first_token = FirstTokenObserver(target, name)},
      std::move(plan), std::move(format));
  generation->Watch();
  if (target.resolved.is_base) return generation->Start(VariantLease());
  target.model->cache.Acquire(
      target.resolved.digest, [generation, executor = executor_](Result<VariantLease> lease) {
        executor([generation, lease = std::move(lease)] { generation->Start(lease); });
      });
}

void Api::Completions(std::shared_ptr<Exchange> exchange) {
  if (draining_)
    return exchange->Respond(ErrorResponse(Unavailable("the server is shutting down")));
  ApiResult<CompletionRequest> request = ParseCompletionRequest(exchange->request().body);
  if (!request.ok()) return exchange->Respond(ErrorResponse(request.error()));
  ApiResult<Target> target = FindTarget(request->generation.model);
  if (!target.ok()) return exchange->Respond(ErrorResponse(target.error()));
  ApiResult<GenerationPlan> plan =
      PlanCompletion(*request, *target->text, target->model->engine.max_context());
  if (!plan.ok()) return exchange->Respond(ErrorResponse(plan.error()));
  plan->head = MakeHead("cmpl", request->generation.model, *target);
  auto format = MakeCompletionFormat(*target->text->tokenizer, plan->report_tokens);
  Launch(std::move(exchange), std::move(*target), std::move(*plan), std::move(format));
}

void Api::ChatCompletions(std::shared_ptr<Exchange> exchange) {
  if (draining_)
    return exchange->Respond(ErrorResponse(Unavailable("the server is shutting down")));
  ApiResult<ChatRequest> request = ParseChatRequest(exchange->request().body);
  if (!request.ok()) return exchange->Respond(ErrorResponse(request.error()));
  ApiResult<Target> target = FindTarget(request->generation.model);
  if (!target.ok()) return exchange->Respond(ErrorResponse(target.error()));
  ApiResult<GenerationPlan> plan =
      PlanChat(*request, *target->text, target->model->engine.max_context());
  if (!plan.ok()) return exchange->Respond(ErrorResponse(plan.error()));
  plan->head = MakeHead("chatcmpl", request->generation.model, *target);
  auto format = MakeChatFormat(*target->text->tokenizer, plan->report_tokens);
  Launch(std::move(exchange), std::move(*target), std::move(*plan), std::move(format));
}

HttpResponse Api::Models() const {
  Json data = Json::array();
  if (const auto current = model()) {
    for (const ServedModel& served : current->router.Models()) {
      data.push_back(ModelJson(served, *current, started_s_));
    }
  }
  return JsonResponse({{"object", "list"}, {"data", std::move(data)}});
}

HttpResponse Api::ModelById(const std::string& id) const {
  const auto current = model();
  if (!current) return ErrorResponse(Unavailable("no base model is loaded yet"));
  const Result<Resolved> resolved = current->router.Resolve(id);
  if (!resolved.ok()) {
    return ErrorResponse(ApiError(resolved.status(), "model", "model_not_found"));
  }
  for (const ServedModel& served : current->router.Models()) {
    if (served.name == id) return JsonResponse(ModelJson(served, *current, started_s_));
  }
  return ErrorResponse(
      ApiError(NotFound("the model '" + id + "' does not exist"), "model", "model_not_found"));
}

HttpResponse Api::Tokenize(const std::string& body) const {
  ApiResult<TokenizeRequest> request = ParseTokenizeRequest(body);
  if (!request.ok()) return ErrorResponse(request.error());
  ApiResult<Target> target = FindTarget(request->model);
  if (!target.ok()) return ErrorResponse(target.error());
  std::string text = request->prompt;
  bool add_special_tokens = request->add_special_tokens;
  if (request->messages) {
    ApiResult<std::string> rendered = RenderChat(*target->text, *request->messages,
                                                 request->add_generation_prompt, request->extra);
    if (!rendered.ok()) return ErrorResponse(rendered.error());
    text = std::move(*rendered);
    add_special_tokens = false;  // the template writes them
  }
  auto tokens = EncodeText(*target->text, text, add_special_tokens, "prompt");
  if (!tokens.ok()) return ErrorResponse(tokens.error());
  return JsonResponse({{"count", tokens->size()},
                       {"max_model_len", target->model->engine.max_context()},
                       {"tokens", *tokens}});
}

HttpResponse Api::Detokenize(const std::string& body) const {
  ApiResult<DetokenizeRequest> request = ParseDetokenizeRequest(body);
  if (!request.ok()) return ErrorResponse(request.error());
  ApiResult<Target> target = FindTarget(request->model);
  if (!target.ok()) return ErrorResponse(target.error());
  return JsonResponse(
      {{"prompt", target->text->tokenizer->Decode(request->tokens, /*skip_special=*/false)}});
}

HttpResponse Api::TokenizerInfo(const std::string& query) const {
  ApiResult<Target> target = FindTarget(QueryField(query, "model").value_or(""));
  if (!target.ok()) return ErrorResponse(target.error());
  const TextAssets& text = *target->text;
  return JsonResponse({{"bos_token", OrNull(text.bos_token)},
                       {"eos_token", OrNull(text.eos_token)},
                       {"pad_token", OrNull(text.pad_token)},
                       {"chat_template", OrNull(text.chat_template_source)},
                       {"vocab_size", text.tokenizer->vocab_size()},
                       {"model_max_length", target->model->engine.max_context()}});
}

HttpResponse Api::Ready() const {
  if (draining_) return ErrorResponse(Unavailable("the server is shutting down"));
  if (!model()) return ErrorResponse(Unavailable("no base model is loaded yet"));
  return JsonResponse({{"status", "ready"}});
}

}  // namespace stockpot
