#include "trainer_hooks/cpp/spool_entry.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "store/digest.h"
#include "store/names.h"
#include "store/run_config_json.h"
#include "store/safetensors.h"

namespace stockpot {
namespace {

using nlohmann::json;
using std::filesystem::path;

// --- limits ---
constexpr int64_t kCopyBytes = int64_t{4} << 20;        // read, hashed and written at a time
constexpr int64_t kMaxRecordBytes = int64_t{64} << 20;  // of manifest.json
constexpr int64_t kMaxFileBytes = int64_t{64} << 20;    // of a file beside the weights

constexpr std::string_view kFormat = "stockpot-spool";
constexpr int kVersion = 1;
constexpr const char* kRecordName = "manifest.json";
constexpr const char* kTensorsName = "tensors.safetensors";
constexpr const char* kFilesName = "files";

// A file that is hashed while it is written, and durable after Finish.
class HashedFile {
 public:
  explicit HashedFile(const path& name)
      : name_(name), fd_(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)) {
    if (fd_.get() < 0) status_ = ErrnoStatus(errno, name_.string());
  }
  void Append(std::span<const std::byte> bytes) {
    if (!status_.ok()) return;
    hash_.Update(bytes);
    bytes_ += static_cast<int64_t>(bytes.size());
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd_.get(), bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        status_ = ErrnoStatus(errno, name_.string());
        return;
      }
      bytes = bytes.subspan(static_cast<size_t>(n));
    }
  }
  void Append(std::string_view text) { Append(std::as_bytes(std::span(text))); }
  // {"bytes", "sha256"} as the manifest has it.
  Result<json> Finish() {
    if (status_.ok() && ::fdatasync(fd_.get()) != 0) status_ = ErrnoStatus(errno, name_.string());
    if (!status_.ok()) return status_;
    return json{{"bytes", bytes_}, {"sha256", hash_.Finish().Hex()}};
  }

 private:
  const path name_;
  const SpoolDescriptor fd_;
  Sha256Stream hash_;
  int64_t bytes_ = 0;
  Status status_;
};

// --- writing ---

Result<json> WriteTensors(const path& name, const TensorSource& source) {
  HashedFile file(name);
  std::vector<const TensorInfo*> tensors;
  for (const TensorInfo& tensor : source.tensors()) {
    if (tensor.alias_of.empty()) tensors.push_back(&tensor);
  }
  file.Append(SafetensorsHead(tensors));
  std::vector<std::byte> buffer(kCopyBytes);
  for (const TensorInfo* tensor : tensors) {
    for (int64_t at = 0; at < tensor->bytes(); at += kCopyBytes) {
      const auto block =
          std::span(buffer).first(static_cast<size_t>(std::min(kCopyBytes, tensor->bytes() - at)));
      STOCKPOT_RETURN_IF_ERROR(source.Read(tensor->name, at, block));
      file.Append(block);
    }
  }
  return file.Finish();
}

json ToJson(const std::map<std::string, double>& metrics) {
  json out = json::object();
  for (const auto& [name, value] : metrics) {
    if (std::isfinite(value)) {
      out[name] = value;
    } else {
      out[name] = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
    }
  }
  return out;
}

json ShardsOf(const TensorPlacements& placements) {
  json shards = json::object();
  for (const auto& [name, placement] : placements) {
    if (placement.offsets.empty()) continue;
    shards[name] = {{"global_shape", placement.global_shape}, {"offset", placement.offsets}};
  }
  return shards;
}

json GroupsOf(const TensorPlacements& placements) {
  json groups = json::object();
  for (const auto& [name, placement] : placements) {
    if (!placement.group.empty()) groups[name] = placement.group;
  }
  return groups;
}

json ToJson(const SpoolRecord& record) {
  json manifest = {{"format", kFormat},       {"version", kVersion},       {"run", record.run},
                   {"base", record.base},     {"step", record.step},       {"rank", record.rank},
                   {"world", record.world},   {"attempt", record.attempt}, {"tags", record.tags},
                   {"files", json::object()}, {"aliases", json::object()}};
  if (record.config) manifest["config"] = ToJson(*record.config);
  manifest["metrics"] = ToJson(record.metrics);
  manifest["groups"] = GroupsOf(record.placements);
  manifest["shards"] = ShardsOf(record.placements);
  if (!record.resumed_from.empty()) manifest["resumed_from"] = record.resumed_from;
  return manifest;
}

// --- reading ---

Result<std::string> ReadWhole(const path& name, int64_t max_bytes) {
  const SpoolDescriptor fd(::open(name.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(errno, name.string());
  const off_t size = ::lseek(fd.get(), 0, SEEK_END);
  if (size < 0 || size > max_bytes) return Corruption(name.string() + " has an impossible length");
  std::string text(static_cast<size_t>(size), '\0');
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = ::pread(fd.get(), text.data() + at, text.size() - at, at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoStatus(n < 0 ? errno : EIO, name.string());
    at += static_cast<size_t>(n);
  }
  return text;
}

double MetricFromJson(const json& value) {
  if (value.is_number()) return value.get<double>();
  const auto text = value.get<std::string>();
  if (text == "inf") return INFINITY;
  return text == "-inf" ? -INFINITY : NAN;
}

Result<SpoolRecord> RecordFromJson(const json& in) {
  SpoolRecord record;
  record.run = in.at("run").get<std::string>();
  record.base = in.at("base").get<std::string>();
  record.step = in.at("step").get<int64_t>();
  record.rank = in.value("rank", 0);
  record.world = in.value("world", 1);
  if (in.contains("config")) {
    STOCKPOT_ASSIGN_OR_RETURN(record.config, RunConfigFromJson(in["config"]));
  }
  record.tags = in.value("tags", std::map<std::string, std::string>{});
  record.attempt = in.value("attempt", "");
  record.resumed_from = in.value("resumed_from", "");
  const json groups = in.value("groups", json::object());
  for (const auto& [name, group] : groups.items()) {
    record.placements[name].group = group.get<std::string>();
  }
  const json shards = in.value("shards", json::object());
  for (const auto& [name, shard] : shards.items()) {
    TensorPlacement& placement = record.placements[name];
    placement.global_shape = shard.at("global_shape").get<std::vector<int64_t>>();
    placement.offsets = shard.at("offset").get<std::vector<int64_t>>();
  }
  const json metrics = in.value("metrics", json::object());
  for (const auto& [name, value] : metrics.items()) {
    record.metrics[name] = MetricFromJson(value);
  }
  return record;
}

class OpenEntry : public SpooledCheckpoint {
 public:
  static Result<std::unique_ptr<SpooledCheckpoint>> Open(const path& folder) {
    std::unique_ptr<OpenEntry> entry(new OpenEntry(folder));
    try {
      STOCKPOT_RETURN_IF_ERROR(entry->Load());
    } catch (const json::exception& error) {
      return Corruption((folder / kRecordName).string() + ": " + error.what());
    }
    return std::unique_ptr<SpooledCheckpoint>(std::move(entry));
  }

  const SpoolRecord& record() const override { return record_; }
  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  std::vector<std::string> files() const override {
    std::vector<std::string> names;
    for (const auto& [name, contents] : files_) names.push_back(name);
    return names;
  }
  Result<std::string> ReadFile(std::string_view name) const override {
    const auto found = files_.find(std::string(name));
    if (found == files_.end()) return NotFound("no file '" + std::string(name) + "'");
    return found->second;
  }
  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override;

 private:
  explicit OpenEntry(const path& folder)
      : folder_(folder), fd_(::open((folder / kTensorsName).c_str(), O_RDONLY | O_CLOEXEC)) {}

  Status Load();
  Status LoadFiles(const json& files);
  Status LoadTensors(const json& stated);
  Status AddAliases(const json& aliases);
  Status ReadAt(int64_t offset, std::span<std::byte> out) const;
  Status Mismatch(const std::string& name) const {
    return Corruption(folder_.string() + ": " + name + " is not what was written");
  }

  const path folder_;
  const SpoolDescriptor fd_;
  SpoolRecord record_;
  std::vector<TensorInfo> infos_;                       // by name
  std::map<std::string, int64_t, std::less<>> begins_;  // in tensors.safetensors
  std::map<std::string, std::string> files_;
};

Status OpenEntry::Load() {
  if (fd_.get() < 0) return ErrnoStatus(errno, (folder_ / kTensorsName).string());
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text,
                            ReadWhole(folder_ / kRecordName, kMaxRecordBytes));
  const json manifest = json::parse(text);
  if (manifest.at("format").get<std::string>() != kFormat ||
      manifest.at("version").get<int>() != kVersion) {
    return InvalidArgument(folder_.string() + " is of another version of the spool");
  }
  STOCKPOT_ASSIGN_OR_RETURN(record_, RecordFromJson(manifest));
  STOCKPOT_RETURN_IF_ERROR(LoadFiles(manifest.value("files", json::object())));
  STOCKPOT_RETURN_IF_ERROR(LoadTensors(manifest.at("tensors")));
  return AddAliases(manifest.value("aliases", json::object()));
}

Status OpenEntry::LoadFiles(const json& files) {
  for (const auto& [name, stated] : files.items()) {
    if (!IsValidFileName(name)) return Corruption(folder_.string() + ": '" + name + "' as a file");
    STOCKPOT_ASSIGN_OR_RETURN(std::string contents,
                              ReadWhole(folder_ / kFilesName / name, kMaxFileBytes));
    if (Sha256(contents).Hex() != stated.at("sha256").get<std::string>()) return Mismatch(name);
    files_[name] = std::move(contents);
  }
  return OkStatus();
}

Status OpenEntry::ReadAt(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_.get(), out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, (folder_ / kTensorsName).string());
    if (n == 0) return Mismatch(kTensorsName);
    out = out.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return OkStatus();
}

// Every byte is hashed before anything of the header is believed.
Status OpenEntry::LoadTensors(const json& stated) {
  const int64_t bytes = ::lseek(fd_.get(), 0, SEEK_END);
  if (bytes != stated.at("bytes").get<int64_t>()) return Mismatch(kTensorsName);
  Sha256Stream hash;
  std::vector<std::byte> buffer(kCopyBytes);
  for (int64_t at = 0; at < bytes; at += kCopyBytes) {
    const auto block =
        std::span(buffer).first(static_cast<size_t>(std::min(kCopyBytes, bytes - at)));
    STOCKPOT_RETURN_IF_ERROR(ReadAt(at, block));
    hash.Update(block);
  }
  if (hash.Finish().Hex() != stated.at("sha256").get<std::string>()) return Mismatch(kTensorsName);

  std::vector<std::byte> head(static_cast<size_t>(std::min<int64_t>(bytes, 8)));
  STOCKPOT_RETURN_IF_ERROR(ReadAt(0, head));
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t head_bytes, SafetensorsHeaderBytes(head, bytes));
  head.resize(static_cast<size_t>(head_bytes));
  STOCKPOT_RETURN_IF_ERROR(ReadAt(0, head));
  STOCKPOT_ASSIGN_OR_RETURN(const SafetensorsHeader header, ParseSafetensorsHeader(head, bytes));
  for (const SafetensorsEntry& entry : header.tensors) {
    infos_.push_back(entry.info);
    begins_[entry.info.name] = header.data_offset + entry.begin;
  }
  return OkStatus();
}

Status OpenEntry::AddAliases(const json& aliases) {
  const auto by_name = [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; };
  std::sort(infos_.begin(), infos_.end(), by_name);
  std::vector<TensorInfo> tied;
  for (const auto& [name, target] : aliases.items()) {
    const TensorInfo* of = Find(target.get<std::string>());
    if (of == nullptr || Find(name) != nullptr) {
      return Corruption(folder_.string() + ": '" + name + "' is tied to nothing");
    }
    const auto placed = record_.placements.find(of->name);
    const bool is_piece = placed != record_.placements.end() && !placed->second.offsets.empty();
    tied.push_back({name, of->dtype, is_piece ? placed->second.global_shape : of->shape, of->name});
    if (placed != record_.placements.end()) record_.placements[name].group = placed->second.group;
  }
  infos_.insert(infos_.end(), tied.begin(), tied.end());
  std::sort(infos_.begin(), infos_.end(), by_name);
  return OkStatus();
}

Status OpenEntry::Read(std::string_view name, int64_t offset, std::span<std::byte> out) const {
  const TensorInfo* info = Find(name);
  if (info != nullptr && !info->alias_of.empty()) info = Find(info->alias_of);
  if (info == nullptr) return NotFound("no tensor '" + std::string(name) + "'");
  const auto size = static_cast<int64_t>(out.size());
  if (offset < 0 || size > info->bytes() || offset > info->bytes() - size) {
    return InvalidArgument("a read past the end of '" + info->name + "'");
  }
  return ReadAt(begins_.find(info->name)->second + offset, out);
}

}  // namespace

SpoolDescriptor::~SpoolDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Status SyncFolder(const path& folder) {
  const SpoolDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0 || ::fsync(fd.get()) != 0) return ErrnoStatus(errno, folder.string());
  return OkStatus();
}

Status WriteSpoolEntry(const path& folder, const SpoolRecord& record, const TensorSource& source) {
  std::error_code error;
  std::filesystem::create_directories(folder / kFilesName, error);
  if (error) return ErrnoStatus(error.value(), folder.string());
  json manifest = ToJson(record);
  for (const std::string& name : source.files()) {
    if (!IsValidFileName(name)) return InvalidArgument("'" + name + "' as a file");
    STOCKPOT_ASSIGN_OR_RETURN(const std::string contents, source.ReadFile(name));
    HashedFile file(folder / kFilesName / name);
    file.Append(contents);
    STOCKPOT_ASSIGN_OR_RETURN(manifest["files"][name], file.Finish());
  }
  for (const TensorInfo& tensor : source.tensors()) {
    if (!tensor.alias_of.empty()) manifest["aliases"][tensor.name] = tensor.alias_of;
  }
  STOCKPOT_ASSIGN_OR_RETURN(manifest["tensors"], WriteTensors(folder / kTensorsName, source));
  HashedFile file(folder / kRecordName);
  file.Append(manifest.dump(1) + "\n");
  STOCKPOT_RETURN_IF_ERROR(file.Finish().status());
  STOCKPOT_RETURN_IF_ERROR(SyncFolder(folder / kFilesName));
  return SyncFolder(folder);
}

Result<std::unique_ptr<SpooledCheckpoint>> ReadSpoolEntry(const path& folder) {
  return OpenEntry::Open(folder);
}

}  // namespace stockpot
