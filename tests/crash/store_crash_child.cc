// Commits one checkpoint after the other until it is killed; prints "STEP DIGEST" for each
// acknowledged one. Usage: store_crash_child DIRECTORY
#include <unistd.h>

#include <cstdio>
#include <string>

#include "tests/crash/crash_workload.h"

namespace stockpot::crash {
namespace {

int Fail(const Status& status) {
  std::fprintf(stderr, "child: %s\n", status.ToString().c_str());
  return 1;
}

Status EnsureRun(CheckpointStore& store, Ingest& ingest) {
  if (!store.GetAlias(kBase)) {
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session,
                              ingest.OpenSession({.kind = ArtifactKind::kBase, .run = kBase}));
    ShardCommit shard;
    TensorEntry tensor{.name = "w", .dtype = DType::kU8, .shape = {100'000}};
    STOCKPOT_ASSIGN_OR_RETURN(tensor.parts["data"],
                              store.PutBytes(std::vector<std::byte>(100'000)));
    STOCKPOT_ASSIGN_OR_RETURN(shard.files["config.json"],
                              store.PutBytes(std::vector<std::byte>(2)));
    shard.tensors.push_back(std::move(tensor));
    STOCKPOT_RETURN_IF_ERROR(ingest.CommitShard(session, std::move(shard)).status());
  }
  return ingest.CreateRun(kRun, kBase, {}, {}).status();
}

Result<Digest> CommitStep(CheckpointStore& store, Ingest& ingest, int64_t step) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string session,
                            ingest.OpenSession({.run = kRun, .step = step}));
  ShardCommit shard;
  for (int i = 0; i < 2; ++i) {
    const std::vector<std::byte> bytes = TensorBytes(step, i);
    TensorEntry tensor{.name = "t" + std::to_string(i),
                       .dtype = DType::kU8,
                       .shape = {static_cast<int64_t>(bytes.size())}};
    STOCKPOT_ASSIGN_OR_RETURN(tensor.parts["data"], store.PutBytes(bytes));
    shard.tensors.push_back(std::move(tensor));
  }
  shard.metrics["loss"] = Loss(step);
  STOCKPOT_ASSIGN_OR_RETURN(const CommitReply reply, ingest.CommitShard(session, std::move(shard)));
  return reply.artifact;
}

int Main(const char* directory) {
  auto store = CheckpointStore::Open(WorkloadOptions(directory));
  if (!store.ok()) return Fail(store.status());
  Ingest ingest(**store, {}, SystemClock());
  const Status ready = EnsureRun(**store, ingest);
  if (!ready.ok()) return Fail(ready);
  const std::vector<StepRecord> steps = (*store)->ListSteps(kRun);
  for (int64_t step = steps.empty() ? 0 : steps.back().step + 1;; ++step) {
    const Result<Digest> artifact = CommitStep(**store, ingest, step);
    if (!artifact.ok()) return Fail(artifact.status());
    const std::string line = std::to_string(step) + " " + artifact->Hex() + "\n";
    if (::write(STDOUT_FILENO, line.data(), line.size()) < 0) return 1;
  }
}

}  // namespace
}  // namespace stockpot::crash

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: store_crash_child DIRECTORY\n");
    return 2;
  }
  return stockpot::crash::Main(argv[1]);
}
