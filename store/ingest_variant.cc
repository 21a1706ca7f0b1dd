// The commit of a variant that was made elsewhere: checked like one that is made here, as far as
// the variant alone shows it, before a name leads to it.
#include <vector>

#include "store/ingest_commit.h"
#include "store/variant_check.h"
#include "store/variant_gate.h"

namespace stockpot {
namespace {

PartReader ReaderOf(const CheckpointStore& store) {
  return [&store](const Part& part, int64_t offset, std::span<std::byte> out) {
    return store.ReadPart(part, offset, out);
  };
}

Result<std::string> ReadText(const CheckpointStore& store, const Part& part) {
  std::string text(static_cast<size_t>(part.bytes), '\0');
  STOCKPOT_RETURN_IF_ERROR(store.ReadPart(part, 0, std::as_writable_bytes(std::span(text))));
  return text;
}

Result<Manifest> ReadManifest(const CheckpointStore& store, const ShardCommit& shard) {
  const auto file = shard.files.find(std::string(kVariantManifestFile));
  if (!shard.tensors.empty() || !shard.states.empty() || !shard.metrics.empty() ||
      shard.files.size() != 1 || file == shard.files.end()) {
    return InvalidArgument("a variant is one file, " + std::string(kVariantManifestFile) +
                           ", and nothing else");
  }
  if (file->second.bytes > kMaxManifestBytes) return InvalidArgument("the manifest is too long");
  STOCKPOT_ASSIGN_OR_RETURN(const std::string json, ReadText(store, file->second));
  STOCKPOT_ASSIGN_OR_RETURN(Manifest manifest, Manifest::FromJson(json));
  if (manifest.kind == ArtifactKind::kVariant) return manifest;
  return InvalidArgument("its manifest is of a " + std::string(ArtifactKindName(manifest.kind)) +
                         ", not of a variant");
}

// Its chunks are there, so that reading it is reading what will be committed.
Status CheckChunks(const CheckpointStore& store, const Manifest& variant) {
  for (const TensorEntry& tensor : variant.tensors) {
    for (const auto& [role, part] : tensor.parts) {
      const std::vector<bool> have = store.HaveChunks(part.chunks);
      for (size_t i = 0; i < have.size(); ++i) {
        if (have[i]) continue;
        return InvalidArgument("tensor '" + tensor.name + "': chunk " + part.chunks[i].ShortHex() +
                               " of its " + role + " was not sent");
      }
    }
  }
  return OkStatus();
}

Result<GateMeasures> Measure(const CheckpointStore& store, const Manifest& variant,
                             const Manifest& base) {
  std::string config;
  for (const Manifest* manifest : {&variant, &base}) {
    const auto file = manifest->files.find("config.json");
    if (file == manifest->files.end()) continue;
    STOCKPOT_ASSIGN_OR_RETURN(config, ReadText(store, file->second));
    break;
  }
  GateMeasures measures;
  STOCKPOT_ASSIGN_OR_RETURN(measures.update, CheckVariant(variant, base, config, ReaderOf(store)));
  return measures;
}

// The limits of the run that it says it is of, where that run is here and has this base.
Result<GateConfig> GateOf(const CheckpointStore& store, const Manifest& variant) {
  if (variant.run.empty()) return GateConfig{};
  const Result<Run> run = store.GetRun(variant.run);
  if (run.status().code() == StatusCode::kNotFound || (run.ok() && run->base != *variant.base)) {
    return GateConfig{};
  }
  if (!run.ok()) return run.status();
  return store.GetGate(variant.run);
}

}  // namespace

Result<CommitReply> CommitVariant(CheckpointStore& store, const SessionRequest& request,
                                  const ShardCommit& shard) {
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest variant, ReadManifest(store, shard));
  STOCKPOT_ASSIGN_OR_RETURN(const Digest base_digest, ResolveBase(store, variant.base->Hex()));
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest base, store.GetManifest(base_digest));
  CommitReply reply{.artifact = variant.digest()};
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
  STOCKPOT_RETURN_IF_ERROR(CheckChunks(store, variant));
  STOCKPOT_ASSIGN_OR_RETURN(const GateMeasures measures, Measure(store, variant, base));
  STOCKPOT_ASSIGN_OR_RETURN(const GateConfig gate, GateOf(store, variant));
  if (const auto refusal = Judge(gate, measures)) return InvalidArgument(refusal->reason);

  Commit commit;
  commit.artifacts.push_back(variant);
  commit.routes.push_back({request.run, reply.artifact, Digest{}, "import"});
  Event event{.type = "variant",
              .subject = reply.artifact.Hex(),
              .fields = {{"variant", reply.artifact.Hex()},
                         {"base", base_digest.Hex()},
                         {"run", variant.run},
                         {"step", std::to_string(variant.step)},
                         {"bytes", std::to_string(variant.stored_bytes())},
                         {"bytes_full", std::to_string(variant.logical_bytes())},
                         {"routes", request.run},
                         {"by", "import"}}};
  event.fields.merge(GateFields(measures));
  // Lineage where it is known here: the checkpoint that it says it was compressed from.
  if (const auto source = variant.attributes.find("source"); source != variant.attributes.end()) {
    const Result<Digest> digest = Digest::FromHex(source->second);
    if (digest.ok() && *digest != reply.artifact && store.HasArtifact(*digest)) {
      commit.edges.push_back({EdgeType::kCompressedFrom, reply.artifact, *digest});
      event.fields["source"] = digest->Hex();
    }
  }
  commit.events.push_back(std::move(event));
  commit.events.push_back({.type = "route",
                           .subject = request.run,
                           .fields = {{"variant", reply.artifact.Hex()}, {"was", ""}}});
  STOCKPOT_ASSIGN_OR_RETURN(reply.event_sequence, store.Apply(std::move(commit)));
  return reply;
}

}  // namespace stockpot
