// The store's write path beside its yardstick, measured in one run: bytes in memory to durable in
// the store, over one raw direct-I/O file with one fdatasync, alternating round by round, medians
// divided.
//
//   store_bench [--quick] [--only SUBSTRING] [--threads N] [--dir DIRECTORY]
//
// The disk drifts within a run: each round is divided by the raw writes right before and after it,
// which Google Benchmark cannot say, so this bench keeps its own clock.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "store/checkpoint_store.h"
#include "tests/bench/bench.h"
#include "tests/bench/raw_disk.h"

namespace stockpot {
namespace {

constexpr int64_t kTensorBytes = int64_t{64} << 20;

// Bytes this process has caused to be written to disk.
int64_t WrittenBytes() {
  std::ifstream in("/proc/self/io");
  for (std::string word; in >> word;) {
    int64_t value = 0;
    in >> value;
    if (word == "write_bytes:") return value;
  }
  Die("/proc/self/io does not count writes here");
}

struct Ingested {
  double seconds = 0;
  double amplification = 0;
};

Ingested IngestSeconds(const BenchFolder& folder, std::span<const std::byte> data, int threads) {
  const std::filesystem::path directory = folder.path() / "store";
  auto store = CheckpointStore::Open({.directory = directory, .clock = SystemClock()});
  if (!store.ok()) Die(store.status().ToString());
  const int64_t tensors = static_cast<int64_t>(data.size()) / kTensorBytes;
  Manifest manifest;
  manifest.kind = ArtifactKind::kBase;
  manifest.tensors.resize(static_cast<size_t>(tensors));
  const int64_t written_before = WrittenBytes();
  const double begin = Seconds();
  std::atomic<int64_t> next{0};
  std::vector<std::thread> putters;
  for (int t = 0; t < threads; ++t) {
    putters.emplace_back([&] {
      for (int64_t i; (i = next.fetch_add(1)) < tensors;) {
        TensorEntry& tensor = manifest.tensors[static_cast<size_t>(i)];
        char name[32];
        std::snprintf(name, sizeof name, "tensor%05ld", static_cast<long>(i));
        tensor = {.name = name, .dtype = DType::kU8, .shape = {kTensorBytes}};
        Result<Part> part = (*store)->PutBytes(
            data.subspan(static_cast<size_t>(i * kTensorBytes), static_cast<size_t>(kTensorBytes)));
        if (!part.ok()) Die(part.status().ToString());
        tensor.parts["data"] = *std::move(part);
      }
    });
  }
  for (std::thread& putter : putters) putter.join();
  Commit commit;
  commit.artifacts.push_back(std::move(manifest));
  const Result<int64_t> applied = (*store)->Apply(std::move(commit));
  if (!applied.ok()) Die(applied.status().ToString());
  Ingested result{.seconds = Seconds() - begin};
  result.amplification =
      static_cast<double>(WrittenBytes() - written_before) / static_cast<double>(data.size());
  store->reset();
  std::filesystem::remove_all(directory);
  return result;
}

void Bench(const BenchReport& report) {
  if (!report.Wants({"ingest_inproc", "write_amp"})) return;
  const BenchOptions& options = report.options();
  const int64_t bytes = options.quick ? int64_t{256} << 20 : int64_t{1} << 30;
  const int rounds = options.Rounds(7);
  const BenchFolder folder(options.directory);
  BenchData data(bytes);
  std::vector<double> ratios;
  std::vector<double> amplifications;
  for (int round = 0; round < rounds; ++round) {
    data.Stamp(2 * round);
    const double raw = RawWriteSeconds(folder, data.span());
    data.Stamp(2 * round + 1);
    const Ingested ingested = IngestSeconds(folder, data.span(), options.threads);
    const double again = RawWriteSeconds(folder, data.span());  // before and after: the disk drifts
    ratios.push_back((raw + again) / 2 / ingested.seconds);
    amplifications.push_back(ingested.amplification);
    const double mb = static_cast<double>(bytes) / 1e6;
    std::fprintf(stderr, "round %d: raw %.0f and %.0f MB/s, store %.0f MB/s, written/data %.4f\n",
                 round, mb / raw, mb / again, mb / ingested.seconds, ingested.amplification);
  }
  const std::string sizes = std::to_string(bytes >> 20) + " MiB in tensors of 64 MiB, " +
                            std::to_string(options.threads) + " threads put, median of " +
                            std::to_string(rounds);
  report.Ratio("ingest_inproc", Median(ratios),
               {.goal = 0.8, .limit = 1.0, .better = Budget::Better::kHigher}, sizes);
  report.Ratio("write_amp", Median(amplifications), {.goal = 1.05, .limit = 1.0}, sizes);
}

}  // namespace
}  // namespace stockpot

int main(int argc, char** argv) { return stockpot::BenchMain(argc, argv, stockpot::Bench); }
