#include "tests/bench/bench.h"

#include <benchmark/benchmark.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "kernels/base/check.h"
#include "kernels/base/device.h"

namespace stockpot {
namespace {

// Another runtime's threads spin for milliseconds after their last loop (OpenMP): they fall asleep
// before the next body is timed.
constexpr auto kPause = std::chrono::milliseconds(20);

std::string CpuModel() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

// Keeps the seconds of each benchmark by its name, and writes Google Benchmark's JSON.
class Collector : public benchmark::JSONReporter {
 public:
  explicit Collector(std::ostream& out) {
    SetOutputStream(&out);
    SetErrorStream(&out);
  }

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      seconds_[run.run_name.function_name].push_back(run.real_accumulated_time /
                                                     static_cast<double>(run.iterations));
    }
    benchmark::JSONReporter::ReportRuns(runs);
  }

  std::vector<double> seconds(const std::string& name) const { return seconds_.at(name); }

 private:
  std::map<std::string, std::vector<double>> seconds_;
};

nlohmann::ordered_json NumberOrNull(const std::optional<double>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

}  // namespace

double Median(std::vector<double> values) {
  STOCKPOT_CHECK(!values.empty(), values.size());
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

BenchReport::BenchReport(const BenchOptions& options)
    : options_(options),
      machine_(CpuModel() + ", " + std::to_string(options.threads) + " threads of " +
               std::to_string(std::thread::hardware_concurrency()) + ", " +
               ProbeDevices().simd_target) {}

bool BenchReport::Wants(std::initializer_list<std::string_view> names) const {
  return std::any_of(names.begin(), names.end(), [&](std::string_view name) {
    return name.find(options_.only) != std::string_view::npos;
  });
}

void BenchReport::Ratio(std::string_view name, double value, const Budget& budget,
                        std::string_view sizes) const {
  if (!Wants({name})) return;
  const nlohmann::ordered_json row = {
      {"name", name},
      {"value", value},
      {"goal", NumberOrNull(budget.goal)},
      {"limit", NumberOrNull(budget.limit)},
      {"better", budget.better == Budget::Better::kLower ? "lower" : "higher"},
      {"sizes", sizes},
      {"machine", machine_}};
  std::printf("%s\n", row.dump().c_str());
  std::fflush(stdout);
}

Comparison::Comparison(const BenchReport& report, std::string group, int rounds)
    : report_(report), group_(std::move(group)), rounds_(rounds) {}

void Comparison::Add(std::string name, std::function<void()> body, double per_call) {
  entries_.push_back({std::move(name), std::move(body), per_call, {}});
}

void Comparison::Run() {
  for (const Entry& entry : entries_) entry.body();  // pages, scratch memory, caches of plans
  benchmark::ClearRegisteredBenchmarks();
  for (int round = 0; round < rounds_; ++round) {  // they run in the order of registration
    for (const Entry& entry : entries_) {
      const auto timed = [&entry](benchmark::State& state) {
        std::this_thread::sleep_for(kPause);
        for (auto _ : state) entry.body();
      };
      benchmark::RegisterBenchmark((group_ + "/" + entry.name).c_str(), timed)
          ->ArgName("round")
          ->Arg(round)
          ->Iterations(1)
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
  std::ostringstream raw;
  Collector collector(raw);
  benchmark::RunSpecifiedBenchmarks(&collector, "all");
  benchmark::ClearRegisteredBenchmarks();
  const std::filesystem::path& folder = report_.options().raw;
  if (!folder.empty()) {
    std::filesystem::create_directories(folder);
    std::ofstream(folder / (group_ + ".json")) << raw.str();
  }
  for (Entry& entry : entries_) {
    entry.seconds = collector.seconds(group_ + "/" + entry.name);
    const auto [least, most] = std::minmax_element(entry.seconds.begin(), entry.seconds.end());
    std::fprintf(stderr, "%s/%-24s %10.3f ms  (%.3f to %.3f, %zu rounds)\n", group_.c_str(),
                 entry.name.c_str(), Seconds(entry.name) * 1e3, *least / entry.per_call * 1e3,
                 *most / entry.per_call * 1e3, entry.seconds.size());
  }
}

double Comparison::Seconds(std::string_view name) const {
  const bool group = !name.empty() && name.back() == '/';
  double best = std::numeric_limits<double>::infinity();
  for (const Entry& entry : entries_) {
    if (group ? entry.name.rfind(name, 0) != 0 : entry.name != name) continue;
    best = std::min(best, Median(entry.seconds) / entry.per_call);
  }
  STOCKPOT_CHECK(std::isfinite(best), name);
  return best;
}

int BenchMain(int argc, char** argv, const std::function<void(const BenchReport&)>& body) {
  BenchOptions options;
  options.directory = std::filesystem::temp_directory_path();
  CLI::App app("Ratios of BENCHMARKS.md, one JSON line each");
  app.add_flag("--quick", options.quick, "Few rounds");
  app.add_option("--only", options.only, "Ratios whose name contains this");
  app.add_option("--threads", options.threads, "Threads of every pool")->check(CLI::PositiveNumber);
  app.add_option("--raw", options.raw, "Folder for Google Benchmark's JSON");
  app.add_option("--dir", options.directory, "Folder on the disk to measure");
  CLI11_PARSE(app, argc, argv);
  int no_arguments = 1;
  benchmark::Initialize(&no_arguments, argv);
  try {
    body(BenchReport(options));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
  return 0;
}

}  // namespace stockpot
