#include "store/manifest.h"

#include <algorithm>
#include <array>

#include "store/bitdelta_parts.h"
#include "store/names.h"
#include "store/sparse_codec.h"

namespace stockpot {
namespace {

constexpr std::array<std::string_view, 6> kKindNames = {"base",    "checkpoint", "merge",
                                                        "variant", "adapter",    "state"};
constexpr std::array<std::string_view, 4> kCodecNames = {"raw", "base", "bitdelta", "sparse"};

Status CheckPart(const Part& part, int64_t max_bytes) {
  if (part.bytes < 0) return InvalidArgument("negative size");
  if (part.bytes > max_bytes) {
    return InvalidArgument(std::to_string(part.bytes) + " bytes, over the limit of " +
                           std::to_string(max_bytes));
  }
  const auto chunks = static_cast<int64_t>(part.chunks.size());
  if (chunks != ChunkCount(part.bytes)) {
    return InvalidArgument(std::to_string(part.bytes) + " bytes are " +
                           std::to_string(ChunkCount(part.bytes)) + " chunks, not " +
                           std::to_string(chunks));
  }
  for (const Digest& chunk : part.chunks) {
    if (chunk.IsZero()) return InvalidArgument("a zero chunk digest");
  }
  return OkStatus();
}

// A part of this role, of exactly this size.
Status CheckRole(const TensorEntry& tensor, const std::string& role, int64_t bytes) {
  const auto it = tensor.parts.find(role);
  if (it == tensor.parts.end()) return InvalidArgument("part '" + role + "' is missing");
  if (it->second.bytes != bytes) {
    return InvalidArgument("part '" + role + "' has " + std::to_string(it->second.bytes) +
                           " bytes, shape and dtype make " + std::to_string(bytes));
  }
  return CheckPart(it->second, kMaxTensorBytes).WithContext("part '" + role + "'");
}

// The rows behind the base's last: whole ones, and some.
Status CheckRowsBehind(const TensorEntry& tensor) {
  const auto rows = tensor.parts.find("rows");
  if (rows == tensor.parts.end()) return OkStatus();
  const int64_t row_bytes = tensor.shape[1] * DTypeSize(tensor.dtype);
  if (row_bytes == 0 || rows->second.bytes <= 0 || rows->second.bytes % row_bytes != 0 ||
      rows->second.bytes > tensor.logical_bytes()) {
    return InvalidArgument("part 'rows' has " + std::to_string(rows->second.bytes) +
                           " bytes, a row has " + std::to_string(row_bytes));
  }
  return CheckPart(rows->second, kMaxTensorBytes).WithContext("part 'rows'");
}

Status CheckSparse(const TensorEntry& tensor) {
  STOCKPOT_RETURN_IF_ERROR(CheckRowsBehind(tensor));
  const int64_t column_bytes = SparseColumnBytes(tensor.shape[1]);
  const auto columns = tensor.parts.find("columns");
  const int64_t changed = columns == tensor.parts.end() ? 0 : columns->second.bytes / column_bytes;
  if (changed > tensor.overlap_rows() * tensor.shape[1])
    return InvalidArgument("more changed elements than elements");
  STOCKPOT_RETURN_IF_ERROR(CheckRole(tensor, "counts", 4 * tensor.overlap_rows()));
  STOCKPOT_RETURN_IF_ERROR(CheckRole(tensor, "columns", changed * column_bytes));
  return CheckRole(tensor, "values", changed * DTypeSize(tensor.dtype));
}

Status CheckAlias(const Manifest& manifest, const TensorEntry& tensor) {
  if (!tensor.parts.empty() || !tensor.pieces.empty() || tensor.codec != Codec::kRaw ||
      !tensor.content.IsZero()) {
    return InvalidArgument("an alias has no parts, codec or content");
  }
  const TensorEntry* target = manifest.Find(tensor.alias_of);
  if (target == nullptr) return InvalidArgument("alias of an unknown tensor");
  if (!target->alias_of.empty()) return InvalidArgument("alias of an alias");
  if (target->dtype != tensor.dtype || target->shape != tensor.shape) {
    return InvalidArgument("alias of a tensor of another dtype or shape");
  }
  return OkStatus();
}

// A raw tensor in pieces: that they are in their one spelling, and are the tensor.
Status CheckPieces(const Manifest& manifest, const TensorEntry& tensor) {
  if (!manifest.base) return InvalidArgument("a base's tensors are stored whole, not in pieces");
  const size_t count = tensor.pieces.size();
  if (count < 2 || static_cast<int64_t>(count) > kMaxPieces) {
    return InvalidArgument(std::to_string(count) + " pieces: 2 to " + std::to_string(kMaxPieces) +
                           " are allowed");
  }
  if (tensor.parts.size() != count) {
    return InvalidArgument(std::to_string(count) + " pieces with " +
                           std::to_string(tensor.parts.size()) + " parts");
  }
  for (size_t i = 0; i < count; ++i) {
    const TensorBox& piece = tensor.pieces[i];
    STOCKPOT_RETURN_IF_ERROR(CheckBox(tensor.shape, piece));
    if (piece.elements() == 0) return InvalidArgument("a piece without elements");
    if (i > 0 && !(tensor.pieces[i - 1].offsets < piece.offsets)) {
      return InvalidArgument("piece " + BoxText(piece) + " is there twice or out of order");
    }
    STOCKPOT_RETURN_IF_ERROR(
        CheckRole(tensor, PieceRole(i), piece.elements() * DTypeSize(tensor.dtype)));
  }
  const std::optional<CoverFault> fault = FindCoverFault(tensor.shape, tensor.pieces);
  if (!fault) return OkStatus();
  return InvalidArgument(BoxText(fault->range) +
                         (fault->is_overlap ? " is in two pieces" : " is in no piece"));
}

Status CheckTensor(const Manifest& manifest, const TensorEntry& tensor) {
  STOCKPOT_RETURN_IF_ERROR(CheckTensorShape(tensor.dtype, tensor.shape));
  if (!tensor.alias_of.empty()) return CheckAlias(manifest, tensor);
  if (tensor.codec != Codec::kRaw &&
      (manifest.kind == ArtifactKind::kState || manifest.kind == ArtifactKind::kAdapter)) {
    return InvalidArgument("a state or an adapter holds raw tensors");
  }
  if (tensor.codec != Codec::kRaw && !manifest.base) {
    return InvalidArgument("codec '" + std::string(CodecName(tensor.codec)) +
                           "' needs an artifact with a base");
  }
  if ((tensor.codec == Codec::kBase) == tensor.content.IsZero()) {
    return InvalidArgument("'content' belongs to codec base, and only there");
  }
  if (!tensor.pieces.empty()) {
    if (tensor.codec == Codec::kRaw) return CheckPieces(manifest, tensor);
    return InvalidArgument("pieces of a tensor that is not raw");
  }
  constexpr std::array<size_t, kCodecNames.size()> kParts = {1, 0, 2, 3};  // by codec
  const size_t behind = tensor.codec == Codec::kSparse ? tensor.parts.count("rows") : 0;
  const size_t parts = kParts[static_cast<size_t>(tensor.codec)] + behind;
  if (tensor.codec != Codec::kBitDelta && tensor.parts.size() != parts) {
    return InvalidArgument("codec '" + std::string(CodecName(tensor.codec)) + "' has " +
                           std::to_string(parts) + " parts, not " +
                           std::to_string(tensor.parts.size()));
  }
  switch (tensor.codec) {
    case Codec::kBase:
      return OkStatus();
    case Codec::kRaw:
      return CheckRole(tensor, "data", tensor.logical_bytes());
    case Codec::kBitDelta:
    case Codec::kSparse:
      break;
  }
  if (tensor.shape.size() != 2 || !IsWeightDType(tensor.dtype)) {
    return InvalidArgument(std::string(CodecName(tensor.codec)) +
                           " of a tensor that is not 2-D or not float");
  }
  if (tensor.codec == Codec::kSparse) return CheckSparse(tensor);
  STOCKPOT_RETURN_IF_ERROR(CheckBitDeltaRoles(tensor));
  for (const auto& [role, part] : tensor.parts) {
    STOCKPOT_RETURN_IF_ERROR(
        CheckPart(part, kMaxTensorBytes).WithContext("part '" + role + "'"));
  }
  return OkStatus();
}

// What must hold between kind, base, run and step.
Status CheckOrigin(const Manifest& manifest) {
  const bool is_base = manifest.kind == ArtifactKind::kBase;
  if (is_base == manifest.base.has_value()) {
    return InvalidArgument("every artifact but a base, and no base, has a base");
  }
  if (manifest.base && manifest.base->IsZero()) return InvalidArgument("a zero base digest");
  if (manifest.run.empty() != (manifest.step == -1) || manifest.step < -1) {
    return InvalidArgument("run and step come together; a step is at least 0");
  }
  if (!manifest.run.empty() && !IsValidRunName(manifest.run)) {
    return InvalidArgument("not a run name");
  }
  const bool is_state = manifest.kind == ArtifactKind::kState;
  const bool of_run = manifest.kind == ArtifactKind::kCheckpoint ||
                      manifest.kind == ArtifactKind::kMerge || is_state;
  if (of_run && manifest.run.empty()) {
    return InvalidArgument("a checkpoint, merge or state has a run");
  }
  if (is_state ? !IsValidGroupName(manifest.group) : !manifest.group.empty()) {
    return InvalidArgument("a state has the name of a group, and nothing else has");
  }
  if (is_base && !manifest.run.empty()) return InvalidArgument("a base has no run");
  return OkStatus();
}

// The work of the proofs is bounded before the first is done.
Status CheckPieceCounts(const Manifest& manifest) {
  int64_t pieces = 0;
  int64_t corners = 0;
  for (const TensorEntry& tensor : manifest.tensors) {
    if (tensor.pieces.empty()) continue;
    pieces += static_cast<int64_t>(tensor.pieces.size());
    if (pieces > kMaxManifestPieces) {
      return InvalidArgument("more than " + std::to_string(kMaxManifestPieces) + " pieces");
    }
    for (const TensorBox& piece : tensor.pieces) {
      if (piece.shape.size() == tensor.shape.size()) continue;
      return InvalidArgument("tensor '" + tensor.name + "': a piece of another rank");
    }
    corners += CoverCorners(tensor.shape, tensor.pieces);
    if (corners > kMaxCorners) {
      return InvalidArgument("tensor '" + tensor.name +
                             "': too many pieces, cut in too many dimensions");
    }
  }
  return OkStatus();
}

Status CheckFilesAndAttributes(const Manifest& manifest) {
  if (static_cast<int64_t>(manifest.files.size()) > kMaxConfigFiles) {
    return InvalidArgument("more than " + std::to_string(kMaxConfigFiles) + " files");
  }
  for (const auto& [name, part] : manifest.files) {
    if (!IsValidFileName(name)) return InvalidArgument("a file name that is not a plain name");
    STOCKPOT_RETURN_IF_ERROR(CheckPart(part, kMaxConfigFileBytes).WithContext("file " + name));
  }
  if (static_cast<int64_t>(manifest.attributes.size()) > kMaxAttributes) {
    return InvalidArgument("more than " + std::to_string(kMaxAttributes) + " attributes");
  }
  for (const auto& [key, value] : manifest.attributes) {
    if (!IsPrintableName(key, kMaxAttributeKeyBytes)) {
      return InvalidArgument("an attribute key that is empty, too long or not printable");
    }
    if (static_cast<int64_t>(value.size()) > kMaxAttributeBytes || !IsUtf8(value)) {
      return InvalidArgument("attribute '" + key + "' is too long or not UTF-8");
    }
  }
  return OkStatus();
}

}  // namespace

std::string_view ArtifactKindName(ArtifactKind kind) {
  return kKindNames[static_cast<size_t>(kind)];
}

Result<ArtifactKind> ArtifactKindFromName(std::string_view name) {
  for (size_t i = 0; i < kKindNames.size(); ++i) {
    if (kKindNames[i] == name) return static_cast<ArtifactKind>(i);
  }
  return InvalidArgument("unknown kind of artifact");
}

std::string_view CodecName(Codec codec) { return kCodecNames[static_cast<size_t>(codec)]; }

Result<Codec> CodecFromName(std::string_view name) {
  for (size_t i = 0; i < kCodecNames.size(); ++i) {
    if (kCodecNames[i] == name) return static_cast<Codec>(i);
  }
  return InvalidArgument("unknown codec");
}

Status CheckTensorShape(DType dtype, const std::vector<int64_t>& shape) {
  if (static_cast<int64_t>(shape.size()) > kMaxRank) {
    return InvalidArgument("rank " + std::to_string(shape.size()) + " is over " +
                           std::to_string(kMaxRank));
  }
  // The product of the non-zero sizes is bounded too, so that no order of multiplication overflows.
  int64_t bytes = DTypeSize(dtype);
  for (const int64_t size : shape) {
    if (size < 0) return InvalidArgument("negative size in the shape");
    if (size > 0 && __builtin_mul_overflow(bytes, size, &bytes)) bytes = kMaxTensorBytes + 1;
    if (bytes > kMaxTensorBytes) return InvalidArgument("larger than 4 TiB");
  }
  return OkStatus();
}

std::string PieceRole(size_t index) { return "data/" + std::to_string(index); }

std::optional<bool> SameContent(const TensorEntry& a, const TensorEntry& b) {
  if (a.codec != Codec::kRaw || b.codec != Codec::kRaw || a.pieces != b.pieces) return std::nullopt;
  return std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(),
                    [](const auto& x, const auto& y) {
                      return x.first == y.first && x.second.chunks == y.second.chunks;
                    });
}

int64_t TensorEntry::elements() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

int64_t TensorEntry::logical_bytes() const { return elements() * DTypeSize(dtype); }

int64_t TensorEntry::stored_bytes() const {
  int64_t bytes = 0;
  for (const auto& [role, part] : parts) bytes += part.bytes;
  return bytes;
}

int64_t TensorEntry::overlap_rows() const {
  const int64_t rows = shape.empty() ? 1 : shape[0];
  const auto behind = parts.find("rows");
  if (behind == parts.end() || elements() == 0) return rows;
  return rows - behind->second.bytes / (elements() / rows * DTypeSize(dtype));
}

bool FitsOver(const TensorEntry& tensor, const TensorEntry& base) {
  if (tensor.codec != Codec::kSparse) return tensor.shape == base.shape;
  if (tensor.shape.size() != 2 || base.shape.size() != 2) return false;
  return tensor.shape[1] == base.shape[1] &&
         tensor.overlap_rows() == std::min(tensor.shape[0], base.shape[0]);
}

const TensorEntry* Manifest::Find(std::string_view name) const {
  const auto it = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const TensorEntry& entry, std::string_view wanted) { return entry.name < wanted; });
  return it != tensors.end() && it->name == name ? &*it : nullptr;
}

const TensorEntry* Manifest::Resolve(std::string_view name) const {
  const TensorEntry* entry = Find(name);
  return entry != nullptr && !entry->alias_of.empty() ? Find(entry->alias_of) : entry;
}

int64_t Manifest::logical_bytes() const {
  int64_t bytes = 0;
  for (const TensorEntry& tensor : tensors) {
    if (tensor.alias_of.empty()) bytes += tensor.logical_bytes();
  }
  return bytes;
}

int64_t Manifest::stored_bytes() const {
  int64_t bytes = 0;
  for (const TensorEntry& tensor : tensors) bytes += tensor.stored_bytes();
  for (const auto& [name, part] : files) bytes += part.bytes;
  return bytes;
}

Status Manifest::Validate() const {
  STOCKPOT_RETURN_IF_ERROR(CheckOrigin(*this).WithContext("manifest"));
  STOCKPOT_RETURN_IF_ERROR(CheckFilesAndAttributes(*this).WithContext("manifest"));
  if (static_cast<int64_t>(tensors.size()) > kMaxTensors) {
    return InvalidArgument("manifest: more than " + std::to_string(kMaxTensors) + " tensors");
  }
  // Names and their order first: Find() relies on them.
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string& name = tensors[i].name;
    if (!IsPrintableName(name, kMaxNameBytes)) {
      return InvalidArgument("manifest: the name of tensor " + std::to_string(i) +
                             " is empty, over 512 bytes, or not printable UTF-8");
    }
    if (i > 0 && !(tensors[i - 1].name < name)) {
      return InvalidArgument("manifest: tensor '" + name + "' is there twice or out of order");
    }
  }
  STOCKPOT_RETURN_IF_ERROR(CheckPieceCounts(*this).WithContext("manifest"));
  for (const TensorEntry& tensor : tensors) {
    const Status status = CheckTensor(*this, tensor);
    if (!status.ok()) return status.WithContext("manifest: tensor '" + tensor.name + "'");
  }
  return OkStatus();
}

Digest Manifest::digest() const { return Sha256(ToJson()); }

}  // namespace stockpot
