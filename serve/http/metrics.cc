#include "serve/http/metrics.h"

#include <algorithm>
#include <cstdio>

#include "serve/http/serving_model.h"

namespace stockpot {
namespace {

// vLLM's buckets, thinned.
constexpr double kFirstTokenBounds[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25,
                                        0.5,   0.75,  1,    2.5,  5,    7.5,  10,   30,  60};
constexpr double kTokenBounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1,
                                   0.15,  0.2,    0.3,   0.4,  0.5,   0.75, 1,     2.5};
constexpr double kRequestBounds[] = {0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1,  1.5, 2,
                                     2.5,  5,    10,  15,  20,  30,  40, 60,  300};
constexpr double kPublishBounds[] = {0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600};

constexpr const char* kFinishLabels[kFinishReasons] = {"stop", "length", "abort", "error"};

std::string Number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

void Head(std::string_view name, std::string_view type, std::string_view help, std::string* out) {
  out->append("# HELP ").append(name).append(" ").append(help).append("\n# TYPE ");
  out->append(name).append(" ").append(type).append("\n");
}

void Sample(std::string_view name, std::string_view labels, double value, std::string* out) {
  out->append(name);
  if (!labels.empty()) out->append("{").append(labels).append("}");
  out->append(" ").append(Number(value)).append("\n");
}

void Single(std::string_view name, std::string_view type, std::string_view help, double value,
            std::string* out) {
  Head(name, type, help, out);
  Sample(name, "", value, out);
}

void RenderEngine(const EngineStats& stats, std::string* out) {
  Single("stockpot_num_requests_running", "gauge", "Sequences in the batch.",
         static_cast<double>(stats.running), out);
  Single("stockpot_num_requests_waiting", "gauge", "Sequences in the queue.",
         static_cast<double>(stats.waiting), out);
  Single("stockpot_prompt_tokens_total", "counter", "Prompt tokens computed.",
         static_cast<double>(stats.prompt_tokens_total), out);
  Single("stockpot_generation_tokens_total", "counter", "Tokens generated.",
         static_cast<double>(stats.generation_tokens_total), out);
  Single("stockpot_engine_steps_total", "counter", "Forward passes.",
         static_cast<double>(stats.steps_total), out);
  Single("stockpot_num_preemptions_total", "counter", "Sequences put back for want of KV pages.",
         static_cast<double>(stats.preemptions_total), out);
  const auto total = static_cast<double>(std::max<int64_t>(stats.kv_pages_total, 1));
  Single("stockpot_kv_cache_usage_perc", "gauge", "Share of the KV pages in use, 0 to 1.",
         static_cast<double>(stats.kv_pages_used) / total, out);
}

void RenderCache(const VariantCacheStats& stats, std::string* out) {
  Single("stockpot_delta_cache_hits_total", "counter",
         "Requests that found their variant resident.", static_cast<double>(stats.hits), out);
  Single("stockpot_delta_cache_misses_total", "counter", "Loads of variants started.",
         static_cast<double>(stats.misses), out);
  Single("stockpot_delta_cache_evictions_total", "counter", "Variants dropped from memory.",
         static_cast<double>(stats.evictions), out);
  Single("stockpot_delta_load_failures_total", "counter", "Loads of variants that failed.",
         static_cast<double>(stats.failures), out);
  Single("stockpot_delta_cache_bytes", "gauge", "Bytes of resident variants.",
         static_cast<double>(stats.resident_bytes), out);
  Single("stockpot_delta_cache_resident", "gauge", "Resident variants.",
         static_cast<double>(stats.resident), out);
  Head("stockpot_delta_load_seconds", "summary", "Time to load a variant.", out);
  Sample("stockpot_delta_load_seconds_sum", "", stats.load_seconds_sum, out);
  Sample("stockpot_delta_load_seconds_count", "", static_cast<double>(stats.misses), out);
}

}  // namespace

Histogram::Histogram(std::span<const double> bounds)
    : bounds_(bounds), buckets_(bounds.size() + 1) {}

void Histogram::Observe(double seconds) {
  const auto it = std::lower_bound(bounds_.begin(), bounds_.end(), seconds);
  ++buckets_[static_cast<size_t>(it - bounds_.begin())];
  sum_.fetch_add(seconds);
}

void Histogram::Append(std::string_view name, std::string_view labels, std::string* out) const {
  const std::string prefix = labels.empty() ? "" : std::string(labels) + ",";
  uint64_t count = 0;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    count += buckets_[i].load();
    const std::string bound = i < bounds_.size() ? Number(bounds_[i]) : "+Inf";
    Sample(std::string(name) + "_bucket", prefix + "le=\"" + bound + "\"",
           static_cast<double>(count), out);
  }
  Sample(std::string(name) + "_sum", labels, sum_.load(), out);
  Sample(std::string(name) + "_count", labels, static_cast<double>(count), out);
}

Metrics::Metrics(std::vector<std::string> routes)
    : time_to_first_token{Histogram(kFirstTokenBounds), Histogram(kFirstTokenBounds)},
      inter_token_latency{Histogram(kTokenBounds), Histogram(kTokenBounds)},
      request_latency{Histogram(kRequestBounds), Histogram(kRequestBounds)},
      publish_to_first_token(kPublishBounds),
      routes_(routes.size() + 1) {
  for (size_t i = 0; i < routes.size(); ++i) routes_[i].name = std::move(routes[i]);
  routes_.back().name = "other";
}

void Metrics::CountRequest(std::string_view route, int status) {
  auto it = std::find_if(routes_.begin(), routes_.end() - 1,
                         [&](const Route& r) { return r.name == route; });
  ++it->by_class[static_cast<size_t>(std::clamp(status / 100, 1, 5) - 1)];
}

std::string Metrics::Render(const ServingModel* model) const {
  std::string out;
  if (model) {
    RenderEngine(model->engine.stats(), &out);
    RenderCache(model->cache.stats(), &out);
    Single("stockpot_route_flip_seconds", "gauge",
           "From the last route's commit to its flip in the router.",
           model->router.last_flip_seconds(), &out);
  }
  Head("stockpot_request_success_total", "counter", "Finished sequences by reason.", &out);
  for (int i = 0; i < kFinishReasons; ++i) {
    Sample("stockpot_request_success_total",
           std::string("finished_reason=\"") + kFinishLabels[i] + "\"",
           static_cast<double>(finished_[static_cast<size_t>(i)].load()), &out);
  }
  const auto by_kind = [&](const char* name, const char* help, const ByKind& histograms) {
    Head(name, "histogram", help, &out);
    histograms.base.Append(name, "kind=\"base\"", &out);
    histograms.variant.Append(name, "kind=\"variant\"", &out);
  };
  by_kind("stockpot_time_to_first_token_seconds", "From the request's arrival to its first token.",
          time_to_first_token);
  by_kind("stockpot_inter_token_latency_seconds", "Between tokens of one sequence.",
          inter_token_latency);
  by_kind("stockpot_e2e_request_latency_seconds", "From arrival to the end of the reply.",
          request_latency);
  Head("stockpot_publish_to_first_token_seconds", "histogram",
       "From a route's commit to the first token its variant gave here.", &out);
  publish_to_first_token.Append("stockpot_publish_to_first_token_seconds", "", &out);
  Head("stockpot_http_requests_total", "counter", "Requests by route and class of status.", &out);
  for (const Route& route : routes_) {
    for (size_t c = 0; c < route.by_class.size(); ++c) {
      const int64_t count = route.by_class[c].load();
      if (count == 0) continue;
      Sample("stockpot_http_requests_total",
             "route=\"" + route.name + "\",status=\"" + std::to_string(c + 1) + "xx\"",
             static_cast<double>(count), &out);
    }
  }
  Single("stockpot_http_connections", "gauge", "Open connections.",
         static_cast<double>(connections.load()), &out);
  Single("stockpot_http_disconnects_total", "counter",
         "Clients that left before their reply was complete.",
         static_cast<double>(disconnects_total.load()), &out);
  return out;
}

}  // namespace stockpot
