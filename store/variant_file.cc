#include "store/variant_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernels/bitdelta/signs.h"
#include "store/pending_files.h"
#include "store/sparse_codec.h"

namespace stockpot {
namespace {

constexpr std::string_view kFormatKey = "stockpot.format";
constexpr std::string_view kManifestKey = "stockpot.manifest";
constexpr std::string_view kBaseKey = "stockpot.base";
constexpr std::string_view kBaseTensorsKey = "stockpot.base_tensors";
constexpr std::string_view kHowKey = "stockpot.how";
constexpr std::string_view kFilePrefix = "file:";

constexpr std::string_view kHow =
    "W = W_base + alpha[row] * sign: a U8 row of NAME.signs has ceil(columns / 8) bytes, bit i of "
    "byte w is column 8 * w + i, 1 is plus and 0 is minus. NAME.signs/1, NAME.alpha/1, ...: "
    "further "
    "planes, added likewise; so is NAME.residual_b @ NAME.residual_a. NAME.counts, NAME.columns "
    "and "
    "NAME.values: the base's tensor with counts[row] elements of each row replaced, NAME.rows: "
    "rows "
    "behind the base's last. NAME alone: the tensor itself. What the manifest says has codec "
    "\"base\" is the base's tensor.";

std::string Quoted(std::string_view name) { return "tensor '" + std::string(name) + "'"; }

std::string NameOf(const std::string& tensor, const std::string& role) {
  return role == "data" ? tensor : tensor + "." + role;
}

// A part as a reader would like to see it; bytes where that is not known.
TensorInfo InfoOf(const TensorEntry& tensor, const std::string& role, const Part& part) {
  TensorInfo info{.name = NameOf(tensor.name, role), .dtype = DType::kU8, .shape = {}};
  const std::string kind = role.substr(0, role.find('/'));  // "signs/1": another plane
  const int64_t rows = tensor.shape.empty() ? 1 : tensor.shape[0];
  const int64_t cols = tensor.shape.size() < 2 ? 1 : tensor.shape[1];
  const auto as = [&](DType dtype, std::vector<int64_t> shape) {
    TensorInfo other{.name = info.name, .dtype = dtype, .shape = std::move(shape)};
    if (other.bytes() == part.bytes) info = std::move(other);
  };
  info.shape = {part.bytes};
  if (role == "data") as(tensor.dtype, tensor.shape);
  if (kind == "signs") as(DType::kU8, {rows, SignRowBytes(cols)});
  if (kind == "alpha") as(DType::kF32, {rows});
  if (kind == "residual_a" && cols > 0) as(DType::kBF16, {part.bytes / (2 * cols), cols});
  if (kind == "residual_b" && rows > 0) as(DType::kBF16, {rows, part.bytes / (2 * rows)});
  if (kind == "counts") as(DType::kU32, {part.bytes / 4});
  if (kind == "columns") {
    const int64_t width = SparseColumnBytes(cols);
    as(width == 2 ? DType::kU16 : DType::kU32, {part.bytes / width});
  }
  if (kind == "values") as(tensor.dtype, {part.bytes / DTypeSize(tensor.dtype)});
  if (kind == "rows") as(tensor.dtype, {rows - tensor.overlap_rows(), cols});
  for (size_t i = 0; i < tensor.pieces.size(); ++i) {
    if (role == PieceRole(i)) as(tensor.dtype, tensor.pieces[i].shape);
  }
  return info;
}

// What the file holds, by name: every part and every config file. InvalidArgument: one name twice.
struct FilePart {
  TensorInfo info;
  const Part* part = nullptr;
};
Result<std::map<std::string, FilePart>> PartsOf(const Manifest& variant) {
  std::map<std::string, FilePart> parts;
  const auto add = [&](TensorInfo info, const Part& part) {
    const std::string name = info.name;
    if (parts.emplace(name, FilePart{std::move(info), &part}).second) return OkStatus();
    return InvalidArgument("two parts of the variant would be called '" + name + "'");
  };
  for (const TensorEntry& tensor : variant.tensors) {
    for (const auto& [role, part] : tensor.parts) {
      STOCKPOT_RETURN_IF_ERROR(add(InfoOf(tensor, role, part), part));
    }
  }
  for (const auto& [name, part] : variant.files) {
    TensorInfo info{
        .name = std::string(kFilePrefix) + name, .dtype = DType::kU8, .shape = {part.bytes}};
    STOCKPOT_RETURN_IF_ERROR(add(std::move(info), part));
  }
  for (const auto& [name, part] : parts) {
    if (static_cast<int64_t>(name.size()) > kMaxNameBytes) {
      return InvalidArgument("the name '" + name.substr(0, 64) + "...' is too long for a file");
    }
  }
  return parts;
}

// The tensors of the base that the variant is over, by the name it has there for them.
nlohmann::json BaseTensors(const Manifest& variant, const Manifest& base) {
  nlohmann::json digests = nlohmann::json::object();
  for (const TensorEntry& tensor : variant.tensors) {
    if (tensor.codec == Codec::kRaw) continue;
    const TensorEntry* origin = base.Resolve(tensor.name);
    if (origin == nullptr || !origin->parts.contains("data")) continue;
    digests[tensor.name] = origin->parts.at("data").digest().Hex();
  }
  return digests;
}

}  // namespace

Status WriteVariantFile(const Manifest& variant, const Manifest& base, const PartFetcher& fetch,
                        const std::filesystem::path& file) {
  if (variant.kind != ArtifactKind::kVariant) {
    return InvalidArgument("the artifact is a " + std::string(ArtifactKindName(variant.kind)) +
                           ", not a variant: publish it first");
  }
  std::error_code error;
  if (std::filesystem::exists(file, error)) {
    return InvalidArgument(file.string() + " exists already");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto parts, PartsOf(variant));
  std::vector<const FilePart*> order;
  for (const auto& [name, part] : parts) order.push_back(&part);
  // Wide elements first, so that each tensor is aligned to its own.
  std::stable_sort(order.begin(), order.end(), [](const FilePart* a, const FilePart* b) {
    return DTypeSize(a->info.dtype) > DTypeSize(b->info.dtype);
  });
  std::vector<const TensorInfo*> infos;
  for (const FilePart* part : order) infos.push_back(&part->info);
  const std::string head =
      SafetensorsHead(infos, {{std::string(kFormatKey), std::string(kVariantFileFormat)},
                              {std::string(kManifestKey), variant.ToJson()},
                              {std::string(kBaseKey), variant.base->Hex()},
                              {std::string(kBaseTensorsKey), BaseTensors(variant, base).dump()},
                              {std::string(kHowKey), std::string(kHow)}});
  if (static_cast<int64_t>(head.size()) > kMaxSafetensorsHeaderBytes) {
    return InvalidArgument("the variant's manifest is too long for the header of a file");
  }
  const std::filesystem::path absolute = std::filesystem::absolute(file, error);
  if (error) return ErrnoStatus(error.value(), file.string());
  PendingFiles files(absolute.parent_path());
  STOCKPOT_RETURN_IF_ERROR(files.Begin(absolute.filename()));
  STOCKPOT_RETURN_IF_ERROR(files.Append(head));
  for (const FilePart* part : order) {
    const Status status =
        fetch(*part->part, [&](std::span<const std::byte> bytes) { return files.Append(bytes); });
    if (!status.ok()) return status.WithContext("part '" + part->info.name + "'");
  }
  STOCKPOT_RETURN_IF_ERROR(files.End());
  return files.Publish();
}

Result<std::unique_ptr<VariantFile>> VariantFile::Open(const std::filesystem::path& file) {
  std::unique_ptr<VariantFile> opened(new VariantFile);
  const Status status = opened->Read(file);
  if (!status.ok()) return status.WithContext(file.string());
  return opened;
}

VariantFile::~VariantFile() {
  if (fd_ >= 0) ::close(fd_);
}

namespace {

Status ReadAt(int fd, int64_t offset, std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd, out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "reading it");
    if (n == 0) return Corruption("the file was cut off while it was read");
    out = out.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return OkStatus();
}

}  // namespace

Status VariantFile::Read(const std::filesystem::path& file) {
  path_ = file.string();
  fd_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) return ErrnoStatus(errno, "opening it");
  struct stat stat {};
  if (::fstat(fd_, &stat) != 0) return ErrnoStatus(errno, "looking at it");
  if (!S_ISREG(stat.st_mode)) return InvalidArgument("not a file");
  const int64_t file_bytes = stat.st_size;
  std::vector<std::byte> head(static_cast<size_t>(std::min<int64_t>(8, file_bytes)));
  STOCKPOT_RETURN_IF_ERROR(ReadAt(fd_, 0, head));
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t head_bytes, SafetensorsHeaderBytes(head, file_bytes));
  head.resize(static_cast<size_t>(head_bytes));
  STOCKPOT_RETURN_IF_ERROR(ReadAt(fd_, 0, head));
  STOCKPOT_ASSIGN_OR_RETURN(SafetensorsHeader header, ParseSafetensorsHeader(head, file_bytes));
  data_offset_ = header.data_offset;
  for (SafetensorsEntry& entry : header.tensors) {
    std::string name = entry.info.name;
    entries_.emplace(std::move(name), std::move(entry));
  }
  STOCKPOT_RETURN_IF_ERROR(ReadMetadata(std::move(header.metadata)));
  return MatchParts();
}

Status VariantFile::ReadMetadata(std::map<std::string, std::string> metadata) {
  const std::string format = metadata[std::string(kFormatKey)];
  if (format != kVariantFileFormat) {
    return InvalidArgument(
        format.empty()
            ? "not a variant's file: its metadata has no '" + std::string(kFormatKey) + "'"
            : "a variant's file of another format, '" + format.substr(0, 64) +
                  "': this version reads '" + std::string(kVariantFileFormat) + "'");
  }
  Result<Manifest> manifest = Manifest::FromJson(metadata[std::string(kManifestKey)]);
  if (!manifest.ok()) return manifest.status().WithContext(kManifestKey);
  manifest_ = *std::move(manifest);
  if (manifest_.kind != ArtifactKind::kVariant) {
    return InvalidArgument("its manifest is of a " + std::string(ArtifactKindName(manifest_.kind)) +
                           ", not of a variant");
  }
  if (metadata[std::string(kBaseKey)] != manifest_.base->Hex()) {
    return Corruption("'" + std::string(kBaseKey) + "' is not the base of its manifest");
  }
  const auto digests = nlohmann::json::parse(metadata[std::string(kBaseTensorsKey)], nullptr,
                                             /*allow_exceptions=*/false);
  if (!digests.is_object()) {
    return Corruption("'" + std::string(kBaseTensorsKey) + "' is no JSON object");
  }
  for (const auto& [name, hex] : digests.items()) {
    if (!hex.is_string()) return Corruption(Quoted(name) + " of the base has no digest");
    STOCKPOT_ASSIGN_OR_RETURN(base_tensors_[name], Digest::FromHex(hex.get<std::string>()));
  }
  return OkStatus();
}

// Whether the file holds each part of the manifest with its length, and nothing else.
Status VariantFile::MatchParts() const {
  STOCKPOT_ASSIGN_OR_RETURN(const auto parts, PartsOf(manifest_));
  for (const auto& [name, part] : parts) {
    const auto entry = entries_.find(name);
    if (entry == entries_.end()) return Corruption("'" + name + "' is missing in the file");
    if (entry->second.info.bytes() != part.part->bytes) {
      return Corruption("'" + name + "' has " + std::to_string(entry->second.info.bytes()) +
                        " bytes, the manifest says " + std::to_string(part.part->bytes));
    }
  }
  for (const auto& [name, entry] : entries_) {
    if (!parts.contains(name)) {
      return Corruption("'" + name + "' is in the file, and no part of the variant");
    }
  }
  return OkStatus();
}

Status VariantFile::CheckBase(const std::string& name, const Digest& digest,
                              const Manifest& base) const {
  if (digest == *manifest_.base) return OkStatus();
  const std::string context = path_ + " was made against base " + manifest_.base->ShortHex() +
                              ", '" + name + "' is " + digest.ShortHex() + ": ";
  for (const auto& [tensor, want] : base_tensors_) {
    const TensorEntry* origin = base.Resolve(tensor);
    if (origin == nullptr) return InvalidArgument(context + "it has no " + Quoted(tensor));
    const auto data = origin->parts.find("data");
    if (data == origin->parts.end() || data->second.digest() != want) {
      return InvalidArgument(context + Quoted(tensor) + " differs");
    }
  }
  return InvalidArgument(context + "other tensors or its files differ");
}

Status VariantFile::ForEachChunk(const ChunkSink& sink) const {
  STOCKPOT_ASSIGN_OR_RETURN(const auto parts, PartsOf(manifest_));
  for (const auto& [name, part] : parts) {
    const Status status = ReadPart(name, *part.part, sink);
    if (!status.ok()) return status.WithContext(path_ + ": '" + name + "'");
  }
  return OkStatus();
}

Status VariantFile::ReadPart(const std::string& name, const Part& part,
                             const ChunkSink& sink) const {
  const int64_t begin = data_offset_ + entries_.find(name)->second.begin;
  std::vector<std::byte> chunk;
  for (size_t i = 0; i < part.chunks.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * kChunkBytes;
    chunk.resize(static_cast<size_t>(std::min(kChunkBytes, part.bytes - at)));
    STOCKPOT_RETURN_IF_ERROR(ReadAt(fd_, begin + at, chunk));
    if (Sha256(chunk) != part.chunks[i]) {
      return Corruption("bytes " + std::to_string(at) + ".. are not those that its manifest names");
    }
    STOCKPOT_RETURN_IF_ERROR(sink(part.chunks[i], chunk));
  }
  return OkStatus();
}

}  // namespace stockpot
