#include "thrift/remote_source.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "store/delta_reader.h"
#include "store/raw_tensor_reader.h"

namespace stockpot {
namespace {

class RemoteSource : public TensorSource {
 public:
  RemoteSource(Client& client, Manifest manifest, Manifest base)
      : client_(client), manifest_(std::move(manifest)), base_(std::move(base)) {
    for (const TensorEntry& entry : manifest_.tensors) {
      tensors_.push_back({entry.name, entry.dtype, entry.shape, entry.alias_of});
    }
  }

  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override;
  Status ReadBox(std::string_view name, const TensorBox& box,
                 std::span<std::byte> out) const override;
  Result<std::string> ReadFile(std::string_view name) const override;
  std::vector<std::string> files() const override;

 private:
  Status ReadPart(const Part& part, int64_t offset, std::span<std::byte> out) const;
  PartReader PartReaderOfThis() const;
  RawTensorReader ReaderOf(const TensorEntry& raw) const;
  Result<const Part*> BasePart(const TensorEntry& entry) const;
  Status ReadDelta(const TensorEntry& entry, int64_t offset, std::span<std::byte> out) const;

  Client& client_;
  const Manifest manifest_;
  const Manifest base_;  // empty where the artifact needs none
  std::vector<TensorInfo> tensors_;
  // A reader comes back to the chunk where it stopped: of the tensor, of the signs, of the base.
  struct RecentChunk {
    Digest digest;
    std::string data;
  };
  const std::string* FindRecent(const Digest& digest) const;
  mutable std::array<RecentChunk, 4> recent_;
  mutable size_t oldest_ = 0;
};

const std::string* RemoteSource::FindRecent(const Digest& digest) const {
  for (const RecentChunk& chunk : recent_) {
    if (!chunk.data.empty() && chunk.digest == digest) return &chunk.data;
  }
  return nullptr;
}

Status RemoteSource::ReadPart(const Part& part, int64_t offset, std::span<std::byte> out) const {
  const int64_t size = static_cast<int64_t>(out.size());
  if (offset < 0 || size > part.bytes || offset > part.bytes - size) {
    return InvalidArgument("bytes " + std::to_string(offset) + ".." +
                           std::to_string(offset + size) + " of " + std::to_string(part.bytes));
  }
  if (size == 0) return OkStatus();
  const int64_t first = offset / kChunkBytes;
  const int64_t last = (offset + size - 1) / kChunkBytes;
  const auto copy = [&](int64_t index, const std::string& data) -> Status {
    const int64_t begin = index * kChunkBytes;
    const int64_t from = std::max(offset, begin);
    const int64_t to = std::min(offset + size, begin + kChunkBytes);
    if (to - begin > static_cast<int64_t>(data.size())) {
      return Corruption("chunk " + part.chunks[index].ShortHex() +
                        " is shorter than its part says");
    }
    std::memcpy(out.data() + (from - offset), data.data() + (from - begin), to - from);
    return OkStatus();
  };
  int64_t next = first;
  if (const std::string* recent = FindRecent(part.chunks[first])) {
    STOCKPOT_RETURN_IF_ERROR(copy(first, *recent));
    ++next;
  }
  return client_.FetchChunks(std::span(part.chunks).subspan(next, last + 1 - next),
                             [&](size_t i, std::string&& data) -> Status {
                               const int64_t index = next + static_cast<int64_t>(i);
                               STOCKPOT_RETURN_IF_ERROR(copy(index, data));
                               if (index == last) {
                                 recent_[oldest_] = {part.chunks[index], std::move(data)};
                                 oldest_ = (oldest_ + 1) % recent_.size();
                               }
                               return OkStatus();
                             });
}

PartReader RemoteSource::PartReaderOfThis() const {
  return [this](const Part& part, int64_t offset, std::span<std::byte> out) {
    return ReadPart(part, offset, out);
  };
}

RawTensorReader RemoteSource::ReaderOf(const TensorEntry& raw) const {
  return RawTensorReader(raw, PartReaderOfThis());
}

Status RemoteSource::ReadDelta(const TensorEntry& entry, int64_t offset,
                               std::span<std::byte> out) const {
  const TensorEntry* base = base_.Resolve(entry.name);
  if (base == nullptr) return Corruption("the base has no such tensor");
  STOCKPOT_RETURN_IF_ERROR(DeltaReader::Check(entry, *base));
  return DeltaReader(entry, *base, PartReaderOfThis()).Read(offset, out);
}

Result<const Part*> RemoteSource::BasePart(const TensorEntry& entry) const {
  const TensorEntry* base = base_.Resolve(entry.name);
  if (base == nullptr || base->codec != Codec::kRaw || base->dtype != entry.dtype ||
      base->shape != entry.shape) {
    return Corruption("the base has no tensor '" + entry.name + "' of that dtype and shape");
  }
  return &base->parts.at("data");
}

Status RemoteSource::Read(std::string_view name, int64_t offset, std::span<std::byte> out) const {
  const TensorEntry* entry = manifest_.Resolve(name);
  if (entry == nullptr) return NotFound("there is no tensor '" + std::string(name) + "'");
  const std::string context = "tensor '" + std::string(name) + "'";
  switch (entry->codec) {
    case Codec::kRaw:
      return ReaderOf(*entry).Read(offset, out).WithContext(context);
    case Codec::kBase: {
      const Result<const Part*> part = BasePart(*entry);
      if (!part.ok()) return part.status();
      if ((*part)->digest() != entry->content) {
        return Corruption(context + ": the base holds other bytes than the artifact was made from");
      }
      return ReadPart(**part, offset, out).WithContext(context);
    }
    case Codec::kBitDelta:
    case Codec::kSparse:
      return ReadDelta(*entry, offset, out).WithContext(context);
  }
  return Corruption(context + ": unknown codec");
}

Status RemoteSource::ReadBox(std::string_view name, const TensorBox& box,
                             std::span<std::byte> out) const {
  const TensorEntry* entry = manifest_.Resolve(name);
  if (entry == nullptr || entry->codec != Codec::kRaw) return TensorSource::ReadBox(name, box, out);
  return ReaderOf(*entry).ReadBox(box, out).WithContext("tensor '" + std::string(name) + "'");
}

Result<std::string> RemoteSource::ReadFile(std::string_view name) const {
  const std::string key(name);
  for (const Manifest* manifest : {&manifest_, &base_}) {
    const auto found = manifest->files.find(key);
    if (found == manifest->files.end()) continue;
    std::string contents(found->second.bytes, '\0');
    STOCKPOT_RETURN_IF_ERROR(ReadPart(found->second, 0, std::as_writable_bytes(std::span(contents)))
                                 .WithContext("file '" + key + "'"));
    return contents;
  }
  return NotFound("the artifact has no file '" + key + "'");
}

std::vector<std::string> RemoteSource::files() const {
  std::vector<std::string> names;
  for (const auto& [name, part] : manifest_.files) names.push_back(name);
  for (const auto& [name, part] : base_.files) names.push_back(name);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

Result<std::unique_ptr<TensorSource>> OpenRemoteArtifact(Client& client, const std::string& id) {
  STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, client.Resolve(id));
  STOCKPOT_ASSIGN_OR_RETURN(Manifest manifest, client.FetchManifest(digest.Hex()));
  Manifest base;
  if (manifest.base && manifest.kind != ArtifactKind::kAdapter) {
    STOCKPOT_ASSIGN_OR_RETURN(base, client.FetchManifest(manifest.base->Hex()));
  }
  return std::unique_ptr<TensorSource>(
      std::make_unique<RemoteSource>(client, std::move(manifest), std::move(base)));
}

}  // namespace stockpot
