// Compressed history beside plain storage and beside zstd -3 alone, on consecutive checkpoints.
//
//   history_bench [--quick] [--only SUBSTRING] [--dir DIRECTORY]
//
// STOCKPOT_HISTORY_DIR names a folder that tests/bench/make_history.py made: base and
// step_NNNN.GROUP of real training. Without it there is nothing to measure: made-up checkpoints
// would say what their maker wanted.
#include <zstd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "store/checkpoint_store.h"
#include "store/safetensors.h"
#include "tests/bench/bench.h"

namespace stockpot {
namespace {

constexpr int kZstdLevel = 3;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "history_bench: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T Get(Result<T> result) {
  if (!result.ok()) Die(result.status().ToString());
  return std::move(result).value();
}

void Check(const Status& status) {
  if (!status.ok()) Die(status.ToString());
}

struct ZstdAlone {
  int64_t bytes = 0;
  int64_t packed = 0;
  double seconds = 0;
};

class History {
 public:
  explicit History(const std::filesystem::path& directory)
      : store_(Get(CheckpointStore::Open({.directory = directory, .clock = SystemClock()}))) {}

  // One folder as an artifact; checkpoints and states of a run, or the base.
  void Put(const std::filesystem::path& folder, ArtifactKind kind, int64_t step) {
    const auto source = Get(OpenModelFolder(folder));
    Manifest manifest{.kind = kind, .step = step};
    if (kind != ArtifactKind::kBase) {
      manifest.base = base_;
      manifest.run = "r";
    }
    if (kind == ArtifactKind::kState) manifest.group = "optimizer";
    for (const TensorInfo& info : source->tensors()) {
      TensorEntry entry{.name = info.name, .dtype = info.dtype, .shape = info.shape};
      const std::vector<std::byte> data = Get(source->ReadAll(info.name));
      entry.parts["data"] = Get(store_->PutBytes(data));
      if (kind != ArtifactKind::kBase) {
        for (const Digest& chunk : entry.parts["data"].chunks) chunks_[kind].push_back(chunk);
      }
      manifest.tensors.push_back(std::move(entry));
    }
    Commit commit;
    commit.artifacts.push_back(manifest);
    if (kind == ArtifactKind::kBase) {
      base_ = manifest.digest();
      commit.runs.push_back({.name = "r", .base = base_});
    } else {
      commit.steps.push_back({.run = "r",
                              .step = step,
                              .kind = kind,
                              .group = manifest.group,
                              .artifact = manifest.digest()});
    }
    Check(store_->Apply(std::move(commit)).status());
  }

  CheckpointStore& store() { return *store_; }
  const std::vector<Digest>& chunks(ArtifactKind kind) { return chunks_[kind]; }

  ZstdAlone CompressAlone(ArtifactKind kind) {
    ZstdAlone alone;
    std::vector<std::byte> packed(ZSTD_compressBound(static_cast<size_t>(kChunkBytes)));
    for (const Digest& chunk : chunks_[kind]) {
      const std::vector<std::byte> data = Get(store_->ReadChunk(chunk));
      const double begin = Seconds();
      const size_t bytes =
          ZSTD_compress(packed.data(), packed.size(), data.data(), data.size(), kZstdLevel);
      alone.seconds += Seconds() - begin;
      if (ZSTD_isError(bytes)) Die("zstd");
      alone.bytes += static_cast<int64_t>(data.size());
      alone.packed += static_cast<int64_t>(bytes);
    }
    return alone;
  }

  // Bytes a second of reading every chunk once.
  double ReadSpeed(ArtifactKind kind) {
    int64_t bytes = 0;
    const double begin = Seconds();
    for (const Digest& chunk : chunks_[kind]) {
      bytes += static_cast<int64_t>(Get(store_->ReadChunk(chunk)).size());
    }
    return static_cast<double>(bytes) / (Seconds() - begin);
  }

 private:
  std::unique_ptr<CheckpointStore> store_;
  Digest base_;
  std::map<ArtifactKind, std::vector<Digest>> chunks_;
};

void BenchGroup(const BenchReport& report, const std::filesystem::path& source,
                const std::string& group, const std::string& ratio_name) {
  if (!report.Wants({ratio_name})) return;
  const std::filesystem::path directory = report.options().directory / "history";
  std::filesystem::remove_all(directory);
  {
    History history(directory);
    history.Put(source / "base", ArtifactKind::kBase, -1);
    std::map<int64_t, std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(source)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("step_") && name.ends_with("." + group)) {
        files[std::strtoll(name.c_str() + 5, nullptr, 10)] = entry.path();
      }
    }
    if (files.size() < 3) Die("fewer than three steps of " + group + " in " + source.string());
    const ArtifactKind kind =
        group == "weights" ? ArtifactKind::kCheckpoint : ArtifactKind::kState;
    for (const auto& [step, file] : files) history.Put(file, kind, step);

    const ZstdAlone alone = history.CompressAlone(kind);
    const double plain_read = history.ReadSpeed(kind);
    const double begin = Seconds();
    // The newest stays whole; a state without a checkpoint has no such reason.
    const HistoryReport done = Get(history.store().CompressHistory({.run = "r"}));
    const double seconds = Seconds() - begin;
    const double read = history.ReadSpeed(kind);
    const double ratio =
        static_cast<double>(done.stored_bytes) / static_cast<double>(done.chunk_bytes);
    char sizes[400];
    std::snprintf(sizes, sizeof sizes,
                  "%zu consecutive checkpoints of SmolLM2-135M, %s, %.0f MB of which %.0f MB were "
                  "compressed; plain 1.00, zstd -3 %.2f at %.0f MB/s; compressing %.0f MB/s, "
                  "reading %.0f MB/s (plain %.0f)",
                  files.size(), group.c_str(), static_cast<double>(alone.bytes) / 1e6,
                  static_cast<double>(done.chunk_bytes) / 1e6,
                  static_cast<double>(alone.packed) / static_cast<double>(alone.bytes),
                  static_cast<double>(alone.bytes) / 1e6 / alone.seconds,
                  static_cast<double>(done.chunk_bytes) / 1e6 / seconds, read / 1e6,
                  plain_read / 1e6);
    std::fprintf(stderr, "%s\n%ld chunks kept as they are\n", sizes,
                 static_cast<long>(done.kept_chunks));
    report.Ratio(ratio_name, ratio, {.goal = 0.5}, sizes);
  }
  std::filesystem::remove_all(directory);
}

void Bench(const BenchReport& report) {
  if (!report.Wants({"history_ratio", "history_optimizer_ratio"})) return;
  const char* source = std::getenv("STOCKPOT_HISTORY_DIR");
  if (source == nullptr) {
    std::fprintf(stderr, "history_bench: STOCKPOT_HISTORY_DIR is not set (make_history.py)\n");
    return;
  }
  BenchGroup(report, source, "weights", "history_ratio");
  BenchGroup(report, source, "optimizer", "history_optimizer_ratio");
}

}  // namespace
}  // namespace stockpot

int main(int argc, char** argv) { return stockpot::BenchMain(argc, argv, stockpot::Bench); }
