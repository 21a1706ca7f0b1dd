// What an artifact is made of. A manifest is immutable; its canonical JSON (sorted keys, no spaces,
// UTF-8) is what is hashed, stored and sent, and SHA-256 of it is the artifact's digest.
//
//   {"base": "<hex>", "files": {"config.json": {"bytes": 704, "chunks": ["<hex>"]}}, "format": 1,
//    "kind": "variant", "run": "demo", "step": 40, "attributes": {...},
//    "tensors": [{"codec": "bitdelta", "dtype": "BF16", "name": "model...q_proj.weight",
//                 "parts": {"alpha": {...}, "signs": {...}}, "shape": [576, 576]}, ...]}
//
// Invariants, checked by Validate() on every manifest that enters, also on our own:
//   - tensor names are unique, 1..512 bytes of valid UTF-8 without control characters; sorted by
//   name
//   - a base has no base, run or step; checkpoints, merges and states have all three; run and step
//   come together
//   - a state, and nothing else, has a group (store/names.h); its tensors are raw, and so are an
//     adapter's
//   - file names are plain names (store/names.h), never paths
//   - a part has exactly ChunkCount(bytes) chunks; its digest is TreeDigest(chunks)
//   - raw: one part "data" of prod(shape) * size(dtype) bytes; or, where ranks sent it in pieces,
//     two or more boxes "pieces", sorted by offsets, none empty, that hold each element exactly
//     once, and for the i-th of them a part "data/<i>" of its bytes, row-major. Only in artifacts
//     with a base. One cut has one spelling: the same content, cut the same way, has the same
//     digest.
//   - base: no parts, `content` names the base tensor's bytes; only in artifacts with a base
//   - bitdelta: 2-D, of float; "signs" of SignBytes(shape) and "alpha" of 4 * shape[0] bytes (F32).
//     Further planes, up to kMaxSignPlanes of them without a gap: "signs/1" and "alpha/1", ...
//     Perhaps a low-rank residual: "residual_a" [r, shape[1]] and "residual_b" [shape[0], r] of
//     BF16, 1 <= r <= min(shape)
//   - sparse: 2-D, of float; "counts" of 4 * overlap_rows() bytes, "columns" and "values" of as many
//     elements; and where it has more rows than the base's tensor (a vocabulary that grew), "rows":
//     the bytes of those behind
//   - alias_of names a tensor of the same manifest that is no alias, of the same dtype and shape
//   - counts, ranks and sizes within the limits below, products without overflow
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/base/status.h"
#include "store/digest.h"
#include "store/tensor_box.h"

namespace stockpot {

inline constexpr int kManifestFormat = 1;
inline constexpr int64_t kMaxManifestBytes = int64_t{256} << 20;
inline constexpr int64_t kMaxTensors = 200'000;
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 42;  // 4 TiB
inline constexpr int64_t kMaxManifestPieces = 1'000'000;      // of all tensors
inline constexpr int64_t kMaxNameBytes = 512;
inline constexpr int64_t kMaxConfigFiles = 64;
inline constexpr int64_t kMaxConfigFileBytes = int64_t{64} << 20;
inline constexpr int64_t kMaxAttributes = kMaxTensors + 1000;  // one a tensor, and the totals
inline constexpr int64_t kMaxAttributeKeyBytes = kMaxNameBytes + 64;
inline constexpr int64_t kMaxAttributeBytes = int64_t{64} << 10;

// A state is one group of a step's tensors that are no weights: the optimizer's, the random
// numbers'.
enum class ArtifactKind : uint8_t { kBase, kCheckpoint, kMerge, kVariant, kAdapter, kState };
std::string_view ArtifactKindName(ArtifactKind kind);  // "base", "checkpoint", ...
Result<ArtifactKind> ArtifactKindFromName(std::string_view name);

// How a tensor's values are stored.
enum class Codec : uint8_t {
  kRaw,       // "raw": the bytes themselves
  kBase,      // "base": identical to the base's tensor of this name; no bytes
  kBitDelta,  // "bitdelta": base + sum of alpha * sign [+ B A], see store/bitdelta_parts.h
  kSparse,    // "sparse": the base with its changed elements, see store/sparse_codec.h
};
std::string_view CodecName(Codec codec);
Result<Codec> CodecFromName(std::string_view name);

// A run of bytes in the chunk store.
struct Part {
  int64_t bytes = 0;
  std::vector<Digest> chunks;  // each kChunkBytes long, the last one shorter
  Digest digest() const { return TreeDigest(chunks); }
};

struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  Codec codec = Codec::kRaw;
  std::string alias_of;               // not empty: tied to that tensor; no parts, no codec
  std::vector<TensorBox> pieces;      // raw, not empty: cut like this, piece i in "data/<i>"
  std::map<std::string, Part> parts;  // by role: "data" | "data/0", ... | "signs", "alpha",
                                      // "signs/1", ..., "residual_a", "residual_b" | "counts",
                                      // "columns", "values" and perhaps "rows"
  Digest content;                     // codec base: TreeDigest of the base tensor's bytes

  int64_t elements() const;       // product of the shape (1 for a scalar)
  int64_t logical_bytes() const;  // elements * size(dtype)
  int64_t stored_bytes() const;   // sum of the parts
  // The rows that lie over the base's: all of them, but for those in a part "rows".
  int64_t overlap_rows() const;
};

// Whether a tensor that is stored over the base's has its shape; of codec sparse it may have
// another number of rows: then what both have lies one over the other.
bool FitsOver(const TensorEntry& tensor, const TensorEntry& base);

// InvalidArgument: a negative size, over kMaxRank dimensions or kMaxTensorBytes.
Status CheckTensorShape(DType dtype, const std::vector<int64_t>& shape);
// "data/3": the role of the part that holds the bytes of `pieces[index]`.
std::string PieceRole(size_t index);
// Whether two raw tensors of one dtype and shape hold the same bytes, as far as digests say: null
// where they are cut differently, or one is not raw.
std::optional<bool> SameContent(const TensorEntry& a, const TensorEntry& b);

struct Manifest {
  ArtifactKind kind = ArtifactKind::kCheckpoint;
  std::optional<Digest> base;                     // of everything but a base
  std::string run;                                // checkpoint, merge, state, variant of one
  int64_t step = -1;                              // likewise; -1: none
  std::string group;                              // of a state: "optimizer", "rng"; else empty
  std::vector<TensorEntry> tensors;               // sorted by name
  std::map<std::string, Part> files;              // config.json, tokenizer.json, ... by file name
  std::map<std::string, std::string> attributes;  // free facts: method, kept energy, errors, ...

  const TensorEntry* Find(std::string_view name) const;  // binary search; null: none
  // Follows alias_of once. Null: none.
  const TensorEntry* Resolve(std::string_view name) const;
  // As a full model: codecs counted as the weights they stand for, tied tensors once.
  int64_t logical_bytes() const;
  int64_t stored_bytes() const;  // parts of tensors and files

  // InvalidArgument names the tensor and the rule.
  Status Validate() const;

  std::string ToJson() const;  // canonical
  // Validates. InvalidArgument on anything that is not a canonical, valid manifest.
  static Result<Manifest> FromJson(std::string_view json);
  Digest digest() const;  // SHA-256 of ToJson()
};

}  // namespace stockpot
