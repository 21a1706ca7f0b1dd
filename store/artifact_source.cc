#include "store/artifact_source.h"

#include <optional>
#include <set>

#include "store/delta_reader.h"
#include "store/raw_tensor_reader.h"

namespace stockpot {
namespace {

std::string Quoted(std::string_view name) { return "tensor '" + std::string(name) + "'"; }

class ArtifactSource : public TensorSource {
 public:
  ArtifactSource(const CheckpointStore& store, bool decode_f32)
      : store_(store), decode_f32_(decode_f32) {}

  Status Open(const Digest& artifact) {
    STOCKPOT_ASSIGN_OR_RETURN(lease_, store_.Lease(artifact));
    STOCKPOT_ASSIGN_OR_RETURN(manifest_, store_.GetManifest(artifact));
    if (manifest_.base && manifest_.kind != ArtifactKind::kAdapter) {
      STOCKPOT_ASSIGN_OR_RETURN(base_, store_.GetManifest(*manifest_.base));
    }
    located_.reserve(manifest_.tensors.size());
    for (const TensorEntry& listed : manifest_.tensors) {
      const TensorEntry* entry = manifest_.Resolve(listed.name);
      if (entry == nullptr) return Corruption(Quoted(listed.name) + ": tied to nothing");
      STOCKPOT_ASSIGN_OR_RETURN(const TensorEntry* base, BaseOf(*entry));
      Located& located = located_.emplace_back();
      DType dtype = entry->dtype;
      if (entry->codec == Codec::kRaw || entry->codec == Codec::kBase) {
        located.raw.emplace(base == nullptr ? *entry : *base, PartReaderOf(store_));
      } else {
        located.delta.emplace(*entry, *base, PartReaderOf(store_), decode_f32_);
        dtype = located.delta->dtype();
      }
      tensors_.push_back({listed.name, dtype, listed.shape, listed.alias_of});
    }
    return OkStatus();
  }

  const std::vector<TensorInfo>& tensors() const override { return tensors_; }

  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override {
    const TensorInfo* info = Find(name);
    if (info == nullptr) return NotFound("no tensor '" + std::string(name) + "'");
    if (offset < 0 || offset > info->bytes() ||
        static_cast<int64_t>(out.size()) > info->bytes() - offset) {
      return InvalidArgument(Quoted(name) + ": read past the end");
    }
    const Located& located = located_[static_cast<size_t>(info - tensors_.data())];
    return (located.raw ? located.raw->Read(offset, out) : located.delta->Read(offset, out))
        .WithContext(Quoted(name));
  }

  Status ReadBox(std::string_view name, const TensorBox& box,
                 std::span<std::byte> out) const override {
    const TensorInfo* info = Find(name);
    if (info == nullptr) return NotFound("no tensor '" + std::string(name) + "'");
    const Located& located = located_[static_cast<size_t>(info - tensors_.data())];
    if (!located.raw) return TensorSource::ReadBox(name, box, out);
    return located.raw->ReadBox(box, out).WithContext(Quoted(name));
  }

  Result<std::string> ReadFile(std::string_view name) const override {
    const std::string key(name);
    const Part* part = nullptr;
    if (const auto it = manifest_.files.find(key); it != manifest_.files.end()) {
      part = &it->second;
    } else if (const auto of_base = base_.files.find(key); of_base != base_.files.end()) {
      part = &of_base->second;
    }
    if (part == nullptr) return NotFound("no file '" + key + "'");
    std::string text(static_cast<size_t>(part->bytes), '\0');
    const Status status = store_.ReadPart(*part, 0, std::as_writable_bytes(std::span(text)));
    if (!status.ok()) return status.WithContext("file '" + key + "'");
    return text;
  }

  std::vector<std::string> files() const override {
    std::set<std::string> names;
    for (const auto& [name, part] : base_.files) names.insert(name);
    for (const auto& [name, part] : manifest_.files) names.insert(name);
    return {names.begin(), names.end()};
  }

 private:
  // One of the two: bytes that are stored, or made of the base's and a difference.
  struct Located {
    std::optional<RawTensorReader> raw;
    std::optional<DeltaReader> delta;
  };

  // The base's tensor that `entry` is relative to, checked to be the one it was made against.
  Result<const TensorEntry*> BaseOf(const TensorEntry& entry) const {
    if (entry.codec == Codec::kRaw) return static_cast<const TensorEntry*>(nullptr);
    const TensorEntry* base = base_.Resolve(entry.name);
    if (base == nullptr) return Corruption(Quoted(entry.name) + ": the base has no such tensor");
    if (entry.codec != Codec::kBase) {
      STOCKPOT_RETURN_IF_ERROR(DeltaReader::Check(entry, *base).WithContext(Quoted(entry.name)));
    } else if (base->codec != Codec::kRaw || base->dtype != entry.dtype ||
               base->shape != entry.shape || base->parts.at("data").digest() != entry.content) {
      return Corruption(Quoted(entry.name) + ": made against other bytes than the base's");
    }
    return base;
  }

  const CheckpointStore& store_;
  const bool decode_f32_;
  ArtifactLease lease_;
  Manifest manifest_;
  Manifest base_;
  std::vector<TensorInfo> tensors_;
  std::vector<Located> located_;  // parallel to tensors_
};

}  // namespace

PartReader PartReaderOf(const CheckpointStore& store) {
  return [&store](const Part& part, int64_t offset, std::span<std::byte> out) {
    return store.ReadPart(part, offset, out);
  };
}

Result<std::unique_ptr<TensorSource>> OpenArtifact(const CheckpointStore& store,
                                                   const Digest& artifact, bool decode_f32) {
  auto source = std::make_unique<ArtifactSource>(store, decode_f32);
  const Status status = source->Open(artifact);
  if (!status.ok()) return status.WithContext("artifact " + artifact.ShortHex());
  return std::unique_ptr<TensorSource>(std::move(source));
}

}  // namespace stockpot
