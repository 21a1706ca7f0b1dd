#include "store/artifact_source.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "kernels/bitdelta/signs.h"
#include "store/raw_tensor_reader.h"
#include "store/weight_rounding.h"

namespace stockpot {
namespace {

constexpr int64_t kDecodeBytes = kChunkBytes;  // base bytes that are decoded at a time

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
      located_.push_back({entry, base, {}});
      if (entry->codec != Codec::kBitDelta) {
        located_.back().raw.emplace(entry->codec == Codec::kRaw ? *entry : *base,
                                    PartReaderOf(store_));
      }
      const bool as_f32 = decode_f32_ && entry->codec == Codec::kBitDelta;
      tensors_.push_back(
          {listed.name, as_f32 ? DType::kF32 : entry->dtype, listed.shape, listed.alias_of});
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
    return ReadLocated(located, info->dtype, offset, out).WithContext(Quoted(name));
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
  struct Located {
    const TensorEntry* entry;            // never an alias
    const TensorEntry* base;             // raw; null: the entry needs none
    std::optional<RawTensorReader> raw;  // of the bytes that are stored; none: they are made
  };

  // The base's tensor that `entry` is relative to, checked to be the one it was made against.
  Result<const TensorEntry*> BaseOf(const TensorEntry& entry) const {
    if (entry.codec == Codec::kRaw) return static_cast<const TensorEntry*>(nullptr);
    const TensorEntry* base = base_.Resolve(entry.name);
    if (base == nullptr || base->codec != Codec::kRaw) {
      return Corruption(Quoted(entry.name) + ": the base has no such tensor");
    }
    if (base->shape != entry.shape) {
      return Corruption(Quoted(entry.name) + ": shape " + ShapeText(entry.shape) +
                        ", the base has " + ShapeText(base->shape));
    }
    if (entry.codec == Codec::kBase &&
        (base->dtype != entry.dtype || base->parts.at("data").digest() != entry.content)) {
      return Corruption(Quoted(entry.name) + ": made against other bytes than the base's");
    }
    if (entry.codec == Codec::kBitDelta && !IsWeightDType(base->dtype)) {
      return Corruption(Quoted(entry.name) + ": the base's is not float");
    }
    return base;
  }

  Status ReadLocated(const Located& located, DType dtype, int64_t offset,
                     std::span<std::byte> out) const {
    if (located.raw) return located.raw->Read(offset, out);
    const int64_t cols = located.entry->shape[1];
    if (out.empty() || cols == 0) return OkStatus();
    // Whole rows that cover the range, a few at a time; the range is cut out of them.
    const int64_t row_bytes = cols * DTypeSize(dtype);
    const int64_t end = offset + static_cast<int64_t>(out.size());
    const int64_t block_rows =
        std::max<int64_t>(1, kDecodeBytes / (cols * DTypeSize(located.base->dtype)));
    const int64_t end_row = (end + row_bytes - 1) / row_bytes;
    std::vector<std::byte> decoded;
    for (int64_t row = offset / row_bytes; row < end_row; row += block_rows) {
      const int64_t rows = std::min(block_rows, end_row - row);
      decoded.resize(static_cast<size_t>(rows * row_bytes));
      STOCKPOT_RETURN_IF_ERROR(DecodeRows(located, dtype, row, rows, decoded.data()));
      const int64_t from = std::max(offset, row * row_bytes);
      const int64_t to = std::min(end, (row + rows) * row_bytes);
      std::memcpy(out.data() + (from - offset), decoded.data() + (from - row * row_bytes),
                  static_cast<size_t>(to - from));
    }
    return OkStatus();
  }

  // Rows [row, row + rows) of base + alpha * sign, rounded once to `dtype`.
  Status DecodeRows(const Located& located, DType dtype, int64_t row, int64_t rows,
                    void* out) const {
    const TensorEntry& base = *located.base;
    const int64_t cols = base.shape[1];
    const int64_t base_row_bytes = cols * DTypeSize(base.dtype);
    std::vector<std::byte> weights(static_cast<size_t>(rows * base_row_bytes));
    std::vector<uint8_t> signs(static_cast<size_t>(SignBytes(rows, cols)));
    std::vector<float> alpha(static_cast<size_t>(rows));
    STOCKPOT_RETURN_IF_ERROR(store_.ReadPart(base.parts.at("data"), row * base_row_bytes, weights));
    STOCKPOT_RETURN_IF_ERROR(store_.ReadPart(located.entry->parts.at("signs"),
                                             row * SignRowBytes(cols),
                                             std::as_writable_bytes(std::span(signs))));
    STOCKPOT_RETURN_IF_ERROR(store_.ReadPart(located.entry->parts.at("alpha"), row * 4,
                                             std::as_writable_bytes(std::span(alpha))));
    for (int64_t r = 0; r < rows; ++r) {
      const double scale = alpha[static_cast<size_t>(r)];
      for (int64_t c = 0; c < cols; ++c) {
        const double weight = LoadWeight(weights.data(), base.dtype, r * cols + c);
        const double sign = SignAt(signs.data(), cols, r, c);
        StoreWeight(weight + scale * sign, dtype, out, r * cols + c);
      }
    }
    return OkStatus();
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
