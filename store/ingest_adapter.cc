// The commit of an adapter: checked to be one that can be served before a name leads to it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "store/ingest_commit.h"
#include "store/lora_adapter.h"
#include "store/raw_tensor_reader.h"

namespace stockpot {
namespace {

constexpr int64_t kReadBytes = int64_t{4} << 20;  // of a tensor at a time

Status CheckFinite(const CheckpointStore& store, const TensorEntry& tensor) {
  const RawTensorReader reader(tensor,
                               [&](const Part& part, int64_t offset, std::span<std::byte> out) {
                                 return store.ReadPart(part, offset, out);
                               });
  std::vector<std::byte> buffer;
  for (int64_t at = 0; at < tensor.logical_bytes(); at += kReadBytes) {
    buffer.resize(static_cast<size_t>(std::min(kReadBytes, tensor.logical_bytes() - at)));
    STOCKPOT_RETURN_IF_ERROR(reader.Read(at, buffer));
    const int64_t count = static_cast<int64_t>(buffer.size()) / DTypeSize(tensor.dtype);
    for (int64_t i = 0; i < count; ++i) {
      if (std::isfinite(LoadWeight(buffer.data(), tensor.dtype, i))) continue;
      return InvalidArgument("element " + std::to_string(at / DTypeSize(tensor.dtype) + i) +
                             " is not finite");
    }
  }
  return OkStatus();
}

Status CheckServable(const CheckpointStore& store, const Manifest& adapter, const Manifest& base) {
  const auto config = adapter.files.find(std::string(kAdapterConfigFile));
  if (config == adapter.files.end() || adapter.files.size() > 1) {
    return InvalidArgument("an adapter has one file, " + std::string(kAdapterConfigFile));
  }
  std::string text(static_cast<size_t>(config->second.bytes), '\0');
  STOCKPOT_RETURN_IF_ERROR(
      store.ReadPart(config->second, 0, std::as_writable_bytes(std::span(text))));
  std::vector<TensorInfo> tensors;
  for (const TensorEntry& entry : adapter.tensors) {
    tensors.push_back({entry.name, entry.dtype, entry.shape, entry.alias_of});
  }
  STOCKPOT_RETURN_IF_ERROR(ParseLoraAdapter(text, tensors, base).status());
  for (const TensorEntry& entry : adapter.tensors) {
    STOCKPOT_RETURN_IF_ERROR(
        CheckFinite(store, entry).WithContext("tensor '" + entry.name + "'"));
  }
  return OkStatus();
}

}  // namespace

Result<CommitReply> CommitAdapter(CheckpointStore& store, const SessionRequest& request,
                                  const ShardCommit& shard) {
  if (!shard.states.empty() || !shard.metrics.empty()) {
    return InvalidArgument("an adapter has factors only, no other groups and no metrics");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Digest base, ResolveBase(store, request.base));
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest base_manifest, store.GetManifest(base));
  Manifest adapter{.kind = ArtifactKind::kAdapter, .base = base};
  adapter.tensors = shard.tensors;
  adapter.files = shard.files;
  STOCKPOT_RETURN_IF_ERROR(adapter.Validate());
  STOCKPOT_RETURN_IF_ERROR(CheckServable(store, adapter, base_manifest));

  CommitReply reply{.artifact = adapter.digest()};
  if (SplitPoolRoute(request.run)) {
    reply.existed = store.HasArtifact(reply.artifact) && !store.GetTombstone(reply.artifact);
    Commit commit;
    commit.artifacts.push_back(std::move(adapter));
    commit.edges.push_back({EdgeType::kAdapterOf, reply.artifact, base});
    commit.events.push_back(
        {.type = "adapter",
         .subject = request.run,
         .fields = {{"artifact", reply.artifact.Hex()}, {"base", base.Hex()}}});
    STOCKPOT_ASSIGN_OR_RETURN(reply.event_sequence, store.Apply(std::move(commit)));
    return reply;
  }
  if (store.GetAlias(request.run)) {
    return AlreadyExists("the name '" + request.run + "' belongs to a base or an alias");
  }
  if (const std::optional<Route> route = store.GetRoute(request.run)) {
    if (route->variant != reply.artifact) {
      return AlreadyExists("the name '" + request.run + "' leads to artifact " +
                           route->variant.ShortHex() +
                           ": unpublish it first, or choose another name");
    }
    reply.existed = true;
    reply.event_sequence = store.LastEvent();
    return reply;
  }
  Commit commit;
  commit.artifacts.push_back(std::move(adapter));
  commit.edges.push_back({EdgeType::kAdapterOf, reply.artifact, base});
  commit.routes.push_back({request.run, reply.artifact, Digest{}, "import"});
  commit.events.push_back(
      {.type = "adapter",
       .subject = request.run,
       .fields = {{"artifact", reply.artifact.Hex()}, {"base", base.Hex()}}});
  commit.events.push_back({.type = "route",
                           .subject = request.run,
                           .fields = {{"variant", reply.artifact.Hex()}, {"was", ""}}});
  STOCKPOT_ASSIGN_OR_RETURN(reply.event_sequence, store.Apply(std::move(commit)));
  return reply;
}

}  // namespace stockpot
