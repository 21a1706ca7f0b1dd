// Saves, merges, publishes, deletes, compresses history, collects garbage and backs up, until it is killed; prints
// "STEP DIGEST" for each acknowledged checkpoint. STOCKPOT_FAILPOINTS (store/failpoints.h) makes it
// die or fail at named places; what fails is tried again, as a client would.
//
// Usage: store_crash_child DIRECTORY loop        for ever
//        store_crash_child DIRECTORY once        one round that passes every failpoint
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>

#include "tests/crash/crash_workload.h"

namespace stockpot::crash {
namespace {

constexpr int kTries = 6;
constexpr int64_t kStepsOfARound = 14;
constexpr int64_t kCollectEvery = 4;  // steps
constexpr int64_t kBackUpEvery = 9;
constexpr int64_t kCompressEvery = 3;

int Fail(const Status& status) {
  std::fprintf(stderr, "child: %s\n", status.ToString().c_str());
  return 1;
}

// Again, while it may succeed unchanged.
Status Retry(const std::function<Status()>& body) {
  Status status;
  for (int i = 0; i < kTries; ++i) {
    status = body();
    if (status.ok() || !IsRetryable(status.code())) break;
  }
  return status;
}

class Workload {
 public:
  Workload(std::string directory, CheckpointStore& store)
      : directory_(std::move(directory)), store_(store), ingest_(store, {}, SystemClock()) {}

  Status Prepare() {
    STOCKPOT_RETURN_IF_ERROR(Retry([&] { return ImportBase(); }));
    return Retry([&]() -> Status {
      RunConfig config;
      config.merge_every = 0;
      config.publish = PublishPolicy::kOnRequest;
      STOCKPOT_RETURN_IF_ERROR(ingest_.CreateRun(kRun, kBase, config, {}).status());
      Commit commit;
      commit.retention.push_back({kRun, WorkloadPolicy()});
      return store_.Apply(std::move(commit)).status();
    });
  }

  int64_t NextStep() const {
    const std::vector<StepRecord> steps = store_.ListSteps(kRun);
    return steps.empty() ? 0 : steps.back().step + 1;
  }

  Status DoStep(int64_t step) {
    STOCKPOT_RETURN_IF_ERROR(Retry([&] { return Save(step); }));
    if (step % 3 == 2) STOCKPOT_RETURN_IF_ERROR(Retry([&] { return Merge(step); }));
    if (step % 2 == 0) STOCKPOT_RETURN_IF_ERROR(Retry([&] { return Publish(step); }));
    STOCKPOT_RETURN_IF_ERROR(Retry([&] { return store_.ApplyRetention(kRun).status(); }));
    if (step % kCollectEvery == kCollectEvery - 1) {
      STOCKPOT_RETURN_IF_ERROR(
          Retry([&] { return store_.CollectGarbage({.live_ratio = 0.8}).status(); }));
    }
    if (step % kCompressEvery == kCompressEvery - 1) {
      STOCKPOT_RETURN_IF_ERROR(Retry([&] { return CompressHistory(step); }));
    }
    if (step % kBackUpEvery == kBackUpEvery - 1) {
      STOCKPOT_RETURN_IF_ERROR(Retry([&] { return BackUp(); }));
    }
    return OkStatus();
  }

  // What an earlier life damaged and did not come to repair.
  Status RepairWhatIsLeft() {
    if (!std::filesystem::exists(directory_ + ".backup/catalog")) return OkStatus();
    return Retry([&] { return store_.Repair(directory_ + ".backup", nullptr).status(); });
  }

  // Damages the newest checkpoint's second tensor on disk and takes it back from the backup.
  Status DamageAndRepair(int64_t step) {
    STOCKPOT_RETURN_IF_ERROR(Retry([&] { return BackUp(); }));
    STOCKPOT_RETURN_IF_ERROR(FlipInPacks(TensorBytes(step, 1)));
    STOCKPOT_ASSIGN_OR_RETURN(const ScrubReport found, store_.Scrub(nullptr));
    if (found.damaged.size() != 1) return Internal("the damage was not found");
    STOCKPOT_RETURN_IF_ERROR(
        Retry([&] { return store_.Repair(directory_ + ".backup", nullptr).status(); }));
    STOCKPOT_ASSIGN_OR_RETURN(const ScrubReport left, store_.Scrub(nullptr));
    return left.damaged.empty() ? OkStatus() : Internal("the damage was not repaired");
  }

 private:
  Result<TensorEntry> Put(const std::string& name, int64_t step, int tensor) {
    const std::vector<std::byte> bytes = TensorBytes(step, tensor);
    TensorEntry entry{
        .name = name, .dtype = DType::kU8, .shape = {static_cast<int64_t>(bytes.size())}};
    STOCKPOT_ASSIGN_OR_RETURN(entry.parts["data"], store_.PutBytes(bytes));
    return entry;
  }

  Status ImportBase() {
    if (store_.GetAlias(kBase)) return OkStatus();
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session,
                              ingest_.OpenSession({.kind = ArtifactKind::kBase, .run = kBase}));
    ShardCommit shard;
    TensorEntry tensor{.name = "w", .dtype = DType::kU8, .shape = {100'000}};
    STOCKPOT_ASSIGN_OR_RETURN(tensor.parts["data"],
                              store_.PutBytes(std::vector<std::byte>(100'000)));
    STOCKPOT_ASSIGN_OR_RETURN(shard.files["config.json"],
                              store_.PutBytes(std::vector<std::byte>(2)));
    shard.tensors.push_back(std::move(tensor));
    return ingest_.CommitShard(session, std::move(shard)).status();
  }

  Status Save(int64_t step) {
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session,
                              ingest_.OpenSession({.run = kRun, .step = step}));
    ShardCommit shard;
    for (int i = 0; i < 2; ++i) {
      STOCKPOT_ASSIGN_OR_RETURN(TensorEntry tensor, Put("t" + std::to_string(i), step, i));
      shard.tensors.push_back(std::move(tensor));
    }
    shard.metrics["loss"] = Loss(step);
    STOCKPOT_ASSIGN_OR_RETURN(const CommitReply reply,
                              ingest_.CommitShard(session, std::move(shard)));
    const std::string line = std::to_string(step) + " " + reply.artifact.Hex() + "\n";
    if (::write(STDOUT_FILENO, line.data(), line.size()) < 0) return Internal("nobody reads");
    return OkStatus();
  }

  // As a merge job commits it: artifact, lineage and step together.
  Status Merge(int64_t step) {
    STOCKPOT_ASSIGN_OR_RETURN(const Digest base, store_.ResolveName(kBase));
    STOCKPOT_ASSIGN_OR_RETURN(const Digest parent,
                              store_.ResolveName(kRun + ("@" + std::to_string(step))));
    const ChunkGuard guard = store_.GuardChunks();
    Manifest merged{.kind = ArtifactKind::kMerge, .base = base, .run = kRun, .step = step};
    STOCKPOT_ASSIGN_OR_RETURN(TensorEntry tensor, Put("t0", step, 2));
    merged.tensors.push_back(std::move(tensor));
    Commit commit;
    commit.artifacts.push_back(merged);
    commit.edges.push_back({EdgeType::kMergedFrom, merged.digest(), parent});
    commit.steps.push_back(
        {.run = kRun, .step = step, .kind = ArtifactKind::kMerge, .artifact = merged.digest()});
    return store_.Apply(std::move(commit)).status();
  }

  // As a publish job: the variant and its routes; an older route goes.
  Status Publish(int64_t step) {
    STOCKPOT_ASSIGN_OR_RETURN(const Digest base, store_.ResolveName(kBase));
    STOCKPOT_ASSIGN_OR_RETURN(const Digest source,
                              store_.ResolveName(kRun + ("@" + std::to_string(step))));
    const ChunkGuard guard = store_.GuardChunks();
    Manifest variant{.kind = ArtifactKind::kVariant, .base = base, .run = kRun, .step = step};
    STOCKPOT_ASSIGN_OR_RETURN(TensorEntry tensor, Put("t0", step, 3));
    variant.tensors.push_back(std::move(tensor));
    Commit commit;
    commit.artifacts.push_back(variant);
    commit.edges.push_back({EdgeType::kCompressedFrom, variant.digest(), source});
    commit.routes.push_back({std::string(kRun) + "@served", variant.digest(), std::nullopt, "pub"});
    return store_.Apply(std::move(commit)).status();
  }

  // Older steps become differences; one of them is whole while it is pinned.
  Status CompressHistory(int64_t step) {
    STOCKPOT_RETURN_IF_ERROR(store_.CompressHistory({.run = kRun}).status());
    const Result<Digest> before = store_.ResolveName(kRun + ("@" + std::to_string(step - 1)));
    if (!before.ok()) return OkStatus();
    for (const bool on : {true, false}) {
      Commit commit;
      commit.pins.push_back({{.artifact = *before, .by = "child"}, on});
      STOCKPOT_RETURN_IF_ERROR(store_.Apply(std::move(commit)).status());
      STOCKPOT_RETURN_IF_ERROR(store_.CompressHistory({.run = kRun}).status());
    }
    return OkStatus();
  }

  Status BackUp() { return store_.BackupTo(directory_ + ".backup", nullptr).status(); }

  Status FlipInPacks(const std::vector<std::byte>& bytes) const {
    const std::string needle(reinterpret_cast<const char*>(bytes.data()), 64);
    for (const auto& entry : std::filesystem::directory_iterator(directory_ + "/packs")) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::string content{std::istreambuf_iterator<char>(file), {}};
      for (size_t at = content.find(needle); at != std::string::npos;
           at = content.find(needle, at + 1)) {
        const int fd = ::open(entry.path().c_str(), O_WRONLY);
        const char flipped = static_cast<char>(content[at] ^ 1);
        const bool wrote = ::pwrite(fd, &flipped, 1, static_cast<off_t>(at)) == 1;
        ::close(fd);
        if (!wrote) return Internal("cannot damage " + entry.path().string());
      }
    }
    return OkStatus();
  }

  const std::string directory_;
  CheckpointStore& store_;
  Ingest ingest_;
};

Result<std::unique_ptr<CheckpointStore>> OpenAgain(const char* directory) {
  StoreOptions options = WorkloadOptions(directory);
  if (const char* text = std::getenv("STOCKPOT_FAILPOINTS")) {
    STOCKPOT_ASSIGN_OR_RETURN(options.failpoints, Failpoints::FromText(text));
  }
  for (int i = 0; i < kTries; ++i) {
    auto store = CheckpointStore::Open(options);
    if (store.ok() || !IsRetryable(store.status().code())) return store;
  }
  return Internal("it does not open");
}

int Main(const char* directory, std::string_view mode) {
  auto store = OpenAgain(directory);
  if (!store.ok()) return Fail(store.status());
  Workload workload(directory, **store);
  Status status = workload.Prepare();
  const int64_t first = workload.NextStep();
  const bool once = mode == "once";
  if (status.ok() && once) status = workload.RepairWhatIsLeft();
  int64_t step = first;
  for (; status.ok() && (!once || step < first + kStepsOfARound); ++step) {
    status = workload.DoStep(step);
  }
  if (status.ok()) status = workload.DamageAndRepair(step - 1);
  return status.ok() ? 0 : Fail(status);
}

}  // namespace
}  // namespace stockpot::crash

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: store_crash_child DIRECTORY loop|once\n");
    return 2;
  }
  return stockpot::crash::Main(argv[1], argv[2]);
}
