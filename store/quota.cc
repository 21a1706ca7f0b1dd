// Quotas: what the packs may take on disk, and what a run may consist of.
#include <algorithm>

#include "store/checkpoint_store_impl.h"

namespace stockpot {
namespace {

constexpr int64_t kSurveyBytes = int64_t{64} << 20;  // put between two looks at the packs' sizes
constexpr int64_t kRoomEveryMs = 60'000;             // a collection costs reading every manifest
constexpr size_t kRunsRemembered = 16;
// What a chunk may cost beside its bytes: its header, the padding of its block, a pack's header.
constexpr int64_t kOverheadBytes = kRecordHeaderBytes + kPackBlockBytes + kPackHeaderBytes;

std::string MiB(int64_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

}  // namespace

int64_t CheckpointStore::quota_bytes() const { return impl_->options.quota_bytes; }

bool CheckpointStore::Impl::FitsQuota(int64_t bytes) {
  const std::lock_guard guard(quota_mutex);
  const bool known = surveyed_bytes >= 0 && put_since_survey < kSurveyBytes;
  bytes += kOverheadBytes;
  if (!known || surveyed_bytes + put_since_survey + bytes > options.quota_bytes) {
    surveyed_bytes = PackBytes() + writer->unwritten_bytes();
    put_since_survey = 0;
  }
  if (surveyed_bytes + bytes > options.quota_bytes) return false;
  put_since_survey += bytes;
  return true;
}

Status CheckpointStore::CheckQuota(int64_t bytes) {
  if (impl_->options.quota_bytes <= 0 || impl_->FitsQuota(bytes)) return OkStatus();
  if (MakeRoom() && impl_->FitsQuota(bytes)) return OkStatus();
  return ResourceExhausted("the store's quota of " + MiB(impl_->options.quota_bytes) +
                           " is met: set or tighten the retention of runs, delete artifacts and "
                           "run `stockpot gc`, or start the daemon with a larger --quota-mib");
}

bool CheckpointStore::MakeRoom() {
  {
    const std::lock_guard lock(impl_->quota_mutex);
    const int64_t now_ms = impl_->options.clock();
    if (impl_->made_room_ms >= 0 && now_ms - impl_->made_room_ms < kRoomEveryMs) return false;
    impl_->made_room_ms = now_ms;
  }
  const Status applied = ApplyRetention("").status();
  return applied.ok() && CollectGarbage({}).ok();
}

// --- runs ---

int64_t CheckpointStore::Impl::RunUse::Add(const Manifest& manifest, bool keep) {
  int64_t added = 0;
  std::unordered_set<Digest, DigestHash> fresh;
  const auto add = [&](const Part& part) {
    for (size_t i = 0; i < part.chunks.size(); ++i) {
      if (chunks.contains(part.chunks[i]) || !fresh.insert(part.chunks[i]).second) continue;
      added += std::min(kChunkBytes, part.bytes - static_cast<int64_t>(i) * kChunkBytes);
    }
  };
  for (const TensorEntry& tensor : manifest.tensors) {
    for (const auto& [role, part] : tensor.parts) add(part);
  }
  for (const auto& [name, part] : manifest.files) add(part);
  if (keep) {
    chunks.merge(fresh);
    bytes += added;
  }
  return added;
}

// REQUIRES: quota_mutex held.
Result<CheckpointStore::Impl::RunUse*> CheckpointStore::Impl::UseOfRun(
    const std::string& run, const std::vector<StepRecord>& steps) const {
  if (run_uses.size() >= kRunsRemembered && !run_uses.contains(run)) run_uses.clear();
  RunUse& use = run_uses[run];
  std::set<Digest> now;
  for (const StepRecord& step : steps) now.insert(step.artifact);
  // What is gone takes bytes along that nobody knows without looking at the rest.
  if (!std::includes(now.begin(), now.end(), use.artifacts.begin(), use.artifacts.end())) use = {};
  for (const Digest& artifact : now) {
    if (use.artifacts.contains(artifact)) continue;
    const Result<Manifest> manifest = ReadManifest(artifact);
    if (manifest.status().code() == StatusCode::kNotFound) continue;  // purged since
    if (!manifest.ok()) return manifest.status();
    use.Add(*manifest, /*keep=*/true);
    use.artifacts.insert(artifact);
  }
  return &use;
}

Result<int64_t> CheckpointStore::RunBytesWith(const std::string& run,
                                              std::span<const Manifest> more) const {
  const std::vector<StepRecord> steps = ListSteps(run);
  const std::lock_guard lock(impl_->quota_mutex);
  STOCKPOT_ASSIGN_OR_RETURN(Impl::RunUse* const use, impl_->UseOfRun(run, steps));
  int64_t bytes = use->bytes;
  for (const Manifest& manifest : more) bytes += use->Add(manifest, /*keep=*/false);
  return bytes;
}

Status CheckpointStore::CheckRunQuota(const Run& run, std::span<const Manifest> more) {
  const int64_t quota = run.config.quota_bytes;
  if (quota <= 0) return OkStatus();
  STOCKPOT_ASSIGN_OR_RETURN(int64_t bytes, RunBytesWith(run.name, more));
  if (bytes <= quota) return OkStatus();
  if (MakeRoom()) {
    STOCKPOT_ASSIGN_OR_RETURN(bytes, RunBytesWith(run.name, more));
    if (bytes <= quota) return OkStatus();
  }
  return ResourceExhausted("run '" + run.name + "' would hold " + MiB(bytes) + ", its quota is " +
                           MiB(quota) + ": set or tighten its retention, delete steps of it and " +
                           "run `stockpot gc`, or give the run a larger quota");
}

}  // namespace stockpot
