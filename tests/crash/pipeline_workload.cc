#include "tests/crash/pipeline_workload.h"

#include <bit>
#include <cstring>

#include "store/artifact_source.h"

namespace stockpot::crash {
namespace {

constexpr int kTries = 6;
constexpr int64_t kPatienceMs = 120'000;
constexpr int64_t kPackBytes = int64_t{1} << 20;  // several packs are made, closed and compacted
constexpr float kNoise = 0.02F;

RetentionPolicy Rules() {
  return {.keep_last = 3, .best = {{"loss", true, 1}}, .every = 10, .grace_ms = 0};
}

std::string StepName(int64_t step) { return kRun + ("@" + std::to_string(step)); }

int64_t BestOf(int64_t newest) {
  int64_t best = 0;
  for (int64_t step = 0; step <= newest; ++step) {
    if (Loss(step) < Loss(best)) best = step;
  }
  return best;
}

// Whether the rules may have taken this step once `newest` was there.
bool MayBeGone(int64_t step, int64_t newest) {
  const RetentionPolicy rules = Rules();
  return step + rules.keep_last <= newest && step % rules.every != 0 && step != BestOf(newest);
}

Status ReadWhole(const CheckpointStore& store, const Digest& artifact) {
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store.GetManifest(artifact));
  std::vector<std::byte> bytes;
  for (const TensorEntry& tensor : manifest.tensors) {
    for (const auto& [role, part] : tensor.parts) {
      bytes.resize(static_cast<size_t>(part.bytes));
      STOCKPOT_RETURN_IF_ERROR(store.ReadPart(part, 0, bytes).WithContext(tensor.name));
    }
  }
  for (const auto& [name, part] : manifest.files) {
    bytes.resize(static_cast<size_t>(part.bytes));
    STOCKPOT_RETURN_IF_ERROR(store.ReadPart(part, 0, bytes).WithContext(name));
  }
  return OkStatus();
}

Status CheckStep(const CheckpointStore& store, const Digest& artifact, const TestModel& expected) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto stored, OpenArtifact(store, artifact));
  for (const TensorInfo& tensor : expected.tensors()) {
    if (stored->Find(tensor.name) == nullptr) return Internal("no tensor " + tensor.name);
    STOCKPOT_ASSIGN_OR_RETURN(const auto bytes, stored->ReadAll(tensor.name));
    if (bytes != expected.ReadAll(tensor.name).value()) {
      return Internal(tensor.name + " has other bytes");
    }
  }
  return OkStatus();
}

Status CheckEvents(const CheckpointStore& store) {
  const std::vector<Event> events = store.EventsSince(0, 1'000'000);
  for (size_t i = 0; i < events.size(); ++i) {
    if (events[i].sequence != static_cast<int64_t>(i) + 1) {
      return Internal("a gap in the events after " + std::to_string(i));
    }
  }
  return OkStatus();
}

Status CheckNames(const CheckpointStore& store) {
  for (const Alias& alias : store.ListAliases()) {
    STOCKPOT_RETURN_IF_ERROR(ReadWhole(store, alias.artifact).WithContext("alias " + alias.name));
    if (store.GetTombstone(alias.artifact)) return Internal("alias to deleted " + alias.name);
  }
  for (const Route& route : store.ListRoutes()) {
    STOCKPOT_RETURN_IF_ERROR(ReadWhole(store, route.variant).WithContext("route " + route.name));
  }
  for (const Job& job : store.ListJobs()) {
    if (job.state != JobState::kDone || job.result.empty()) continue;
    STOCKPOT_ASSIGN_OR_RETURN(const Digest made, Digest::FromHex(job.result));
    if (!store.HasArtifact(made) && !store.WasPurged(made)) {
      return Internal("what " + job.key + " made is lost");
    }
  }
  return OkStatus();
}

Status CheckSteps(const CheckpointStore& store) {
  int64_t newest = -1;
  Digest latest;
  for (const StepRecord& step : store.ListSteps(kRun)) {
    STOCKPOT_RETURN_IF_ERROR(store.GetManifest(step.artifact).status());
    if (step.kind != ArtifactKind::kCheckpoint) continue;
    newest = step.step;
    latest = step.artifact;
  }
  if (newest < 0) return OkStatus();
  for (int64_t step = 0; step <= newest; ++step) {
    if (MayBeGone(step, newest)) continue;
    STOCKPOT_RETURN_IF_ERROR(store.ResolveName(StepName(step)).status());
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Digest named, store.ResolveName(StepName(newest)));
  STOCKPOT_ASSIGN_OR_RETURN(const Digest best, store.ResolveName(StepName(BestOf(newest))));
  const auto alias = [&](const char* name) {
    const auto found = store.GetAlias(std::string(kRun) + name);
    return found ? found->artifact : Digest{};
  };
  if (alias("@latest") != latest || latest != named) return Internal("@latest is not the newest");
  return alias("@best") == best ? OkStatus() : Internal("@best is not the best");
}

Status CheckAcknowledged(const CheckpointStore& store, const StepModels& models,
                         Acknowledged& acknowledged) {
  int64_t newest = -1;
  for (const StepRecord& step : store.ListSteps(kRun)) newest = std::max(newest, step.step);
  for (auto it = acknowledged.steps.begin(); it != acknowledged.steps.end();) {
    const auto& [step, artifact] = *it;
    const Result<Digest> found = store.ResolveName(StepName(step));
    // Where the step is gone, its route may answer to the name.
    const bool gone = !found.ok() || *found != artifact;
    if (gone && store.WasPurged(artifact) && MayBeGone(step, newest)) {
      it = acknowledged.steps.erase(it);
      continue;
    }
    if (!found.ok()) return found.status().WithContext("acknowledged and lost");
    if (*found != artifact) return Internal(StepName(step) + " is another artifact");
    STOCKPOT_RETURN_IF_ERROR(
        CheckStep(store, artifact, models.At(step)).WithContext(StepName(step)));
    ++it;
  }
  for (const auto& [name, variant] : acknowledged.routes) {
    const auto route = store.GetRoute(name);
    if (!route) return Internal("route " + name + " was acknowledged and is lost");
    if (route->variant != variant) return Internal("route " + name + " moved");
  }
  return OkStatus();
}

}  // namespace

StepModels::StepModels() {
  std::mt19937_64 random(11);
  base_ = TinyLlama(
      random, {.vocab = 600, .hidden = 64, .kv = 16, .intermediate = 520, .layers = 1});
}

TestModel StepModels::At(int64_t step) const {
  TestModel model = base_;
  uint64_t state = static_cast<uint64_t>(step) * 0x9E3779B97F4A7C15u + 1;
  for (const TensorInfo& tensor : base_.tensors()) {
    std::vector<std::byte> bytes = base_.ReadAll(tensor.name).value();
    for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
      uint16_t half;
      std::memcpy(&half, &bytes[i], 2);
      state = state * 6364136223846793005u + 1442695040888963407u;
      const float noise = static_cast<float>(state >> 40) / static_cast<float>(1 << 24) - 0.5F;
      const float value = std::bit_cast<float>(uint32_t{half} << 16) + kNoise * noise;
      half = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
      std::memcpy(&bytes[i], &half, 2);
    }
    model.SetBytes(tensor.name, tensor.dtype, tensor.shape, std::move(bytes));
  }
  return model;
}

Status Retry(const std::function<Status()>& body) {
  Status status;
  for (int i = 0; i < kTries; ++i) {
    status = body();
    if (status.ok() || !IsRetryable(status.code())) break;
  }
  return status;
}

Workload::Workload(const StepModels& models, Options options)
    : models_(models), options_(std::move(options)) {}

Result<std::unique_ptr<Workload>> Workload::Open(const std::filesystem::path& directory,
                                                 const StepModels& models, Options options) {
  std::unique_ptr<Workload> workload(new Workload(models, std::move(options)));
  STOCKPOT_ASSIGN_OR_RETURN(
      workload->store_, CheckpointStore::Open({.directory = directory,
                                               .clock = SystemClock(),
                                               .pack_bytes = kPackBytes,
                                               .free_bytes_reserve = 0,
                                               .failpoints = workload->options_.failpoints}));
  workload->ingest_ = std::make_unique<Ingest>(*workload->store_, IngestLimits{}, SystemClock());
  return workload;
}

Status Workload::Prepare() {
  if (!store_->GetAlias(kBase)) {
    STOCKPOT_RETURN_IF_ERROR(
        Send({.kind = ArtifactKind::kBase, .run = kBase}, models_.base(), {}).status());
  }
  const RunConfig config{.merge_every = options_.merge_every, .publish = PublishPolicy::kEvery};
  STOCKPOT_RETURN_IF_ERROR(ingest_->CreateRun(kRun, kBase, config, {}).status());
  if (store_->GetRetention(kRun) == Rules()) return OkStatus();
  Commit commit;
  commit.retention.push_back({kRun, Rules()});
  return store_->Apply(std::move(commit)).status();
}

void Workload::StartPipeline() {
  Pipeline::Options options{.merge = options_.merge,
                            .backoff_ms = 1,
                            .clock = SystemClock(),
                            .expire_bytes_per_second = 0};
  if (options.merge == nullptr) {
    options.merge = [](CheckpointStore&, std::span<const Digest>, const std::string&, int64_t,
                       const MergeOptions&, const ProgressFunction&) -> Result<Manifest> {
      return Internal("no merges here");
    };
  }
  pipeline_ = std::make_unique<Pipeline>(*store_, std::move(options));
}

int64_t Workload::NextStep() const {
  int64_t newest = -1;
  for (const StepRecord& step : store_->ListSteps(kRun)) newest = std::max(newest, step.step);
  return newest + 1;
}

Result<CommitReply> Workload::Send(const SessionRequest& request, const TensorSource& model,
                                   std::map<std::string, double> metrics) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string session, ingest_->OpenSession(request));
  ShardCommit shard{.metrics = std::move(metrics)};
  for (const TensorInfo& info : model.tensors()) {
    TensorEntry entry{.name = info.name, .dtype = info.dtype, .shape = info.shape};
    STOCKPOT_ASSIGN_OR_RETURN(const auto bytes, model.ReadAll(info.name));
    STOCKPOT_ASSIGN_OR_RETURN(entry.parts["data"], store_->PutBytes(bytes));
    shard.tensors.push_back(std::move(entry));
  }
  for (const std::string& name : model.files()) {
    STOCKPOT_ASSIGN_OR_RETURN(const std::string text, model.ReadFile(name));
    STOCKPOT_ASSIGN_OR_RETURN(shard.files[name], store_->PutBytes(std::as_bytes(std::span(text))));
  }
  return ingest_->CommitShard(session, std::move(shard));
}

Result<Digest> Workload::Save(int64_t step) {
  STOCKPOT_ASSIGN_OR_RETURN(
      const CommitReply reply,
      Send({.run = kRun, .step = step}, models_.At(step), {{"loss", Loss(step)}}));
  return reply.artifact;
}

Result<Digest> Workload::Publish(int64_t step, const std::string& name) {
  STOCKPOT_ASSIGN_OR_RETURN(const Digest artifact, store_->ResolveName(StepName(step)));
  const Job job = MakePublishJob(artifact, PublishCodec::kBitDelta, name);
  STOCKPOT_RETURN_IF_ERROR(pipeline_->Submit(job).status());
  STOCKPOT_RETURN_IF_ERROR(WaitForJobs());
  const auto done = store_->GetJob(job.key);
  if (!done) return Internal("job " + job.key + " is gone");
  return Digest::FromHex(done->result);
}

Status Workload::WaitForJobs() {
  if (!pipeline_->WaitIdle(kPatienceMs)) return Internal("the jobs do not end");
  for (const Job& job : store_->ListJobs()) {
    if (job.state == JobState::kFailed) {
      return Unavailable("job " + job.key + " failed: " + job.error);
    }
  }
  return OkStatus();
}

Status Workload::Unpublish(int64_t before_step) {
  Commit commit;
  for (const Route& route : store_->ListRoutes()) {
    const Result<Manifest> variant = store_->GetManifest(route.variant);
    if (!variant.ok()) return variant.status();
    const bool moves = route.name.ends_with("@latest") || route.name.ends_with("@best");
    if (moves || variant->step >= before_step) continue;
    commit.routes.push_back({route.name, Digest{}, std::nullopt, "test"});
  }
  return commit.routes.empty() ? OkStatus() : store_->Apply(std::move(commit)).status();
}

Status CheckStore(const CheckpointStore& store, const StepModels& models,
                  Acknowledged& acknowledged, bool deep) {
  STOCKPOT_RETURN_IF_ERROR(CheckEvents(store));
  STOCKPOT_RETURN_IF_ERROR(CheckNames(store));
  STOCKPOT_RETURN_IF_ERROR(CheckSteps(store));
  STOCKPOT_RETURN_IF_ERROR(CheckAcknowledged(store, models, acknowledged));
  if (!deep) return OkStatus();
  for (const Digest& artifact : store.ListArtifacts()) {
    STOCKPOT_RETURN_IF_ERROR(ReadWhole(store, artifact).WithContext(artifact.ShortHex()));
  }
  STOCKPOT_ASSIGN_OR_RETURN(const ScrubReport report, store.Scrub(nullptr));
  return report.damaged.empty() ? OkStatus() : Corruption(report.damaged[0].error);
}

}  // namespace stockpot::crash
