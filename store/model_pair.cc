#include "store/model_pair.h"

#include <utility>

namespace stockpot {
namespace {

std::string Quoted(std::string_view name) { return "tensor '" + std::string(name) + "'"; }

// Empty: there is none.
Result<std::string> ReadConfig(const TensorSource& source) {
  Result<std::string> text = source.ReadFile("config.json");
  if (text.status().code() == StatusCode::kNotFound) return std::string();
  return text;
}

}  // namespace

Digest ContentOf(const TensorEntry& entry) {
  return entry.codec == Codec::kBase ? entry.content : entry.parts.at("data").digest();
}

Result<std::unique_ptr<ModelPair>> ModelPair::Open(CheckpointStore& store, const Digest& artifact) {
  std::unique_ptr<ModelPair> pair(new ModelPair());
  STOCKPOT_ASSIGN_OR_RETURN(pair->source_, store.GetManifest(artifact));
  STOCKPOT_RETURN_IF_ERROR(pair->CheckKinds(artifact));
  const Digest base = *pair->source_.base;
  STOCKPOT_ASSIGN_OR_RETURN(pair->base_, store.GetManifest(base));
  pair->DirectTies();
  STOCKPOT_ASSIGN_OR_RETURN(pair->source_reader_, OpenArtifact(store, artifact));
  STOCKPOT_ASSIGN_OR_RETURN(pair->base_reader_, OpenArtifact(store, base));
  STOCKPOT_RETURN_IF_ERROR(pair->KnowStructure());
  STOCKPOT_RETURN_IF_ERROR(pair->CheckComplete());
  return pair;
}

Status ModelPair::CheckKinds(const Digest& artifact) const {
  if (source_.kind != ArtifactKind::kCheckpoint && source_.kind != ArtifactKind::kMerge) {
    return InvalidArgument("artifact " + artifact.ShortHex() + " is a " +
                           std::string(ArtifactKindName(source_.kind)) +
                           ": only checkpoints and merges are published");
  }
  for (const TensorEntry& entry : source_.tensors) {
    if (entry.codec == Codec::kBitDelta || entry.codec == Codec::kSparse) {
      return InvalidArgument(Quoted(entry.name) + " is compressed already");
    }
  }
  return OkStatus();
}

// What is told from the base's tensors is told by the base's vocabulary.
Status ModelPair::KnowStructure() {
  STOCKPOT_ASSIGN_OR_RETURN(config_text_, ReadConfig(*source_reader_));
  STOCKPOT_ASSIGN_OR_RETURN(StructureConfig config, ParseStructureConfig(config_text_));
  vocabulary_ = config.vocab_size;
  STOCKPOT_ASSIGN_OR_RETURN(const std::string of_base, ReadConfig(*base_reader_));
  if (!of_base.empty()) {
    STOCKPOT_ASSIGN_OR_RETURN(const StructureConfig parsed, ParseStructureConfig(of_base));
    config.vocab_size = parsed.vocab_size;
  }
  structure_.emplace(std::move(config), base_reader_->tensors());
  return OkStatus();
}

// Which of two tied tensors holds the bytes is the writer's whim. Where the base's choice is the
// other one, follow the base, so that like is compared with like.
void ModelPair::DirectTies() {
  for (TensorEntry& alias : source_.tensors) {
    if (alias.alias_of.empty()) continue;
    const TensorEntry* base_alias = base_.Find(alias.name);
    const TensorEntry* base_target = base_.Find(alias.alias_of);
    const bool base_holds_alias = base_alias != nullptr && base_alias->alias_of.empty();
    const bool base_holds_target = base_target != nullptr && base_target->alias_of.empty();
    if (!base_holds_alias || base_holds_target) continue;
    const std::string old_name = alias.alias_of;
    TensorEntry& target = const_cast<TensorEntry&>(*source_.Find(old_name));
    std::swap(target.name, alias.name);
    std::swap(target, alias);
    for (TensorEntry& entry : source_.tensors) {
      if (entry.alias_of == old_name) entry.alias_of = alias.name;
    }
  }
}

Status ModelPair::CheckComplete() {
  for (const TensorEntry& base : base_.tensors) {
    const TensorEntry* entry = source_.Find(base.name);
    STOCKPOT_RETURN_IF_ERROR(entry == nullptr ? TieMissing(base) : CheckShape(*entry, base));
  }
  for (const TensorEntry& entry : source_.tensors) {
    if (!entry.alias_of.empty()) {
      ties_.push_back({entry.name, entry.alias_of});
    } else if (base_.Find(entry.name) == nullptr && !IsUntiedHead(entry)) {
      return InvalidArgument(Quoted(entry.name) + " is not in the base");
    }
  }
  return OkStatus();
}

Status ModelPair::TieMissing(const TensorEntry& base) {
  std::string target = base.alias_of;
  if (target.empty() && ModelStructure::IsHeadName(base.name) &&
      structure_->config().ties_embeddings.value_or(false)) {
    target = structure_->embedding();
  }
  const TensorEntry* tied = source_.Find(target);
  if (tied == nullptr || (tied->shape != base.shape && !IsResized(*tied, base))) {
    return InvalidArgument(Quoted(base.name) + " of the base is missing");
  }
  ties_.push_back({base.name, tied->alias_of.empty() ? target : tied->alias_of});
  return OkStatus();
}

bool ModelPair::IsResized(const TensorEntry& entry, const TensorEntry& base) const {
  return entry.shape != base.shape && entry.shape.size() == 2 && base.shape.size() == 2 &&
         entry.shape[1] == base.shape[1] &&
         structure_->RoleOf(base.name, base.shape) == TensorRole::kTable;
}

Status ModelPair::CheckShape(const TensorEntry& entry, const TensorEntry& base) const {
  if (entry.shape == base.shape) return OkStatus();
  const std::string shapes = Quoted(entry.name) + " has shape " + ShapeText(entry.shape) +
                             ", the base's is " + ShapeText(base.shape);
  if (!IsResized(entry, base)) return InvalidArgument(shapes);
  if (vocabulary_ && *vocabulary_ != entry.shape[0]) {
    return InvalidArgument(shapes + ", and config.json says vocab_size " +
                           std::to_string(*vocabulary_));
  }
  return OkStatus();
}

// A head of its own where the base ties it by leaving it out.
bool ModelPair::IsUntiedHead(const TensorEntry& entry) const {
  const TensorEntry* embedding = source_.Resolve(structure_->embedding());
  return embedding != nullptr && ModelStructure::IsHeadName(entry.name) &&
         entry.shape == embedding->shape;
}

// By the digests where they tell, by reading both where one of them is in pieces.
Result<bool> ModelPair::Equals(const TensorEntry& entry, const TensorSource& reader,
                               const TensorEntry& other) const {
  if (entry.dtype != other.dtype || entry.shape != other.shape) return false;
  if (entry.pieces.empty() && other.pieces.empty()) return ContentOf(entry) == ContentOf(other);
  if (const std::optional<bool> same = SameContent(entry, other)) return *same;
  return SameBytes(*source_reader_, entry.name, reader, other.name);
}

}  // namespace stockpot
