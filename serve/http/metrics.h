// What /metrics reports, in Prometheus' text format. Names follow vLLM's, with the prefix
// stockpot_. Labels come from closed sets (routes, status codes, reasons, base or variant), never
// from clients. Thread promise: any thread; counting takes no lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "serve/engine/engine.h"
#include "store/digest.h"

namespace stockpot {

struct ServingModel;

class Histogram {
 public:
  // Upper bounds in seconds, ascending; borrowed.
  explicit Histogram(std::span<const double> bounds);
  void Observe(double seconds);
  // Appends the _bucket, _sum and _count lines. `labels`: `kind="base"`, or empty.
  void Append(std::string_view name, std::string_view labels, std::string* out) const;

 private:
  const std::span<const double> bounds_;
  std::vector<std::atomic<uint64_t>> buckets_;  // one more than bounds
  std::atomic<double> sum_{0};
};

class Metrics {
 public:
  // The routes that requests are counted by; any other path counts as "other".
  explicit Metrics(std::vector<std::string> routes);

  void CountRequest(std::string_view route, int status);
  void CountFinish(FinishReason reason) { ++finished_[static_cast<size_t>(reason)]; }

  struct ByKind {
    Histogram base, variant;
    Histogram& of(bool is_variant) { return is_variant ? variant : base; }
  };
  ByKind time_to_first_token;
  ByKind inter_token_latency;
  ByKind request_latency;
  Histogram publish_to_first_token;

  std::atomic<int64_t> connections{0};
  std::atomic<int64_t> disconnects_total{0};  // clients that left before their reply was complete

  // `model` may be null: then what belongs to a model is left out.
  std::string Render(const ServingModel* model) const;

 private:
  struct Route {
    std::string name;
    std::array<std::atomic<int64_t>, 5> by_class{};  // 1xx .. 5xx
  };
  std::vector<Route> routes_;  // the last one is "other"
  std::array<std::atomic<int64_t>, kFinishReasons> finished_{};
};

}  // namespace stockpot
