#include "store/scoring.h"

namespace stockpot {
namespace {

// Where both are stored as one run of bytes, and it is the same one.
bool StoredAlike(const TensorEntry& a, const TensorEntry& b) {
  if (a.codec != Codec::kRaw || b.codec != Codec::kRaw) return false;
  if (a.dtype != b.dtype || a.shape != b.shape) return false;
  const auto data_a = a.parts.find("data");
  const auto data_b = b.parts.find("data");
  return data_a != a.parts.end() && data_b != b.parts.end() &&
         data_a->second.digest() == data_b->second.digest();
}

}  // namespace

Manifest DenseVariantOf(const Manifest& full, const Manifest& base) {
  Manifest variant = full;
  variant.kind = ArtifactKind::kVariant;
  variant.attributes.clear();
  for (TensorEntry& entry : variant.tensors) {
    const TensorEntry* origin = base.Find(entry.name);
    if (!entry.alias_of.empty() || origin == nullptr || !StoredAlike(entry, *origin)) continue;
    entry.content = entry.parts.at("data").digest();
    entry.codec = Codec::kBase;
    entry.parts.clear();
  }
  return variant;
}

}  // namespace stockpot
