// Reading a Hugging Face folder: config files and one or several safetensors files.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "store/lora_adapter.h"
#include "store/manifest.h"
#include "store/safetensors.h"

namespace stockpot {
namespace {

constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kAdapterWeightFile = "adapter_model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";
constexpr int64_t kMaxIndexBytes = int64_t{64} << 20;
constexpr size_t kMaxShards = 4096;

// A regular file, read by offset. Thread promise: any thread.
class ReadOnlyFile {
 public:
  static Result<ReadOnlyFile> Open(const std::filesystem::path& path) {
    // O_NONBLOCK: a FIFO under a file's name must not hang the open.
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return ErrnoStatus(errno, "open");
    ReadOnlyFile file(fd);
    struct stat info = {};
    if (::fstat(fd, &info) != 0) return ErrnoStatus(errno, "stat");
    if (!S_ISREG(info.st_mode)) return InvalidArgument("not a regular file");
    file.size_ = info.st_size;
    return file;
  }
  ReadOnlyFile(ReadOnlyFile&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}
  ReadOnlyFile& operator=(ReadOnlyFile&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~ReadOnlyFile() {
    if (fd_ >= 0) ::close(fd_);
  }

  int64_t size() const { return size_; }

  Status ReadAt(int64_t offset, std::span<std::byte> out) const {
    size_t done = 0;
    while (done < out.size()) {
      const ssize_t n =
          ::pread(fd_, out.data() + done, out.size() - done, offset + static_cast<int64_t>(done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ErrnoStatus(errno, "read");
      if (n == 0) {
        return Corruption("the file ends at byte " +
                          std::to_string(offset + static_cast<int64_t>(done)) + ", it was " +
                          std::to_string(size_) + " bytes long when it was opened");
      }
      done += static_cast<size_t>(n);
    }
    return OkStatus();
  }

 private:
  explicit ReadOnlyFile(int fd) : fd_(fd) {}
  int fd_ = -1;
  int64_t size_ = 0;
};

Result<std::string> ReadSmallFile(const std::filesystem::path& path, int64_t limit_bytes) {
  const Result<ReadOnlyFile> file = ReadOnlyFile::Open(path);
  if (!file.ok()) return file.status().WithContext(path.string());
  if (file->size() > limit_bytes) {
    return InvalidArgument(path.string() + ": " + std::to_string(file->size()) +
                           " bytes, over the limit of " + std::to_string(limit_bytes));
  }
  std::string text(static_cast<size_t>(file->size()), '\0');
  const Status status = file->ReadAt(0, std::as_writable_bytes(std::span(text)));
  if (!status.ok()) return status.WithContext(path.string());
  return text;
}

// index := {"metadata": anything, "weight_map": {tensor: file}}
class IndexReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::map<std::string, std::string> weight_map;
  std::string error;

  bool null() override { return Scalar(); }
  bool boolean(bool) override { return Scalar(); }
  bool number_integer(number_integer_t) override { return Scalar(); }
  bool number_unsigned(number_unsigned_t) override { return Scalar(); }
  bool number_float(number_float_t, const string_t&) override { return Scalar(); }
  bool binary(binary_t&) override { return Scalar(); }
  bool string(string_t& value) override {
    if (!in_map_) return Scalar();
    if (static_cast<int64_t>(weight_map.size()) == kMaxTensors) return Refuse("too many tensors");
    if (!weight_map.emplace(key_, value).second) return Refuse("'" + key_ + "' appears twice");
    return true;
  }
  bool key(string_t& key) override {
    if (depth_ > 2) return true;
    if (static_cast<int64_t>(key.size()) > kMaxNameBytes) return Refuse("a name is too long");
    if (depth_ == 1) top_ = key;
    key_ = key;
    return true;
  }
  bool start_object(std::size_t) override {
    if (in_map_ || ++depth_ > kMaxDepth) return Refuse("nested too deeply");
    in_map_ = depth_ == 2 && top_ == "weight_map";
    return true;
  }
  bool end_object() override {
    --depth_;
    in_map_ = false;
    return true;
  }
  bool start_array(std::size_t) override {
    if (in_map_ || depth_ == 0 || ++depth_ > kMaxDepth) return Refuse("an array out of place");
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Refuse("not valid JSON at byte " + std::to_string(position));
  }

 private:
  static constexpr int kMaxDepth = 16;
  bool Refuse(const std::string& what) {
    error = what;
    return false;
  }
  bool Scalar() {
    if (in_map_) return Refuse("'" + key_ + "' names no file");
    return depth_ > 0 || Refuse("no JSON object");
  }

  int depth_ = 0;
  bool in_map_ = false;
  std::string top_;
  std::string key_;
};

class FolderSource : public TensorSource {
 public:
  // Those of `names` that are there; `required`, a JSON object, must be.
  Status AddConfigFiles(const std::filesystem::path& folder, std::span<const std::string> names,
                        const std::string& required, const std::string& otherwise) {
    for (const std::string& name : names) {
      std::error_code error;
      const std::filesystem::path path = folder / name;
      if (std::filesystem::exists(path, error)) config_files_[name] = path;
    }
    if (!config_files_.contains(required)) {
      return InvalidArgument(folder.string() + ": no " + required + ", so this is no " + otherwise);
    }
    STOCKPOT_ASSIGN_OR_RETURN(const std::string config, ReadFile(required));
    // accept() keeps no tree, so depth costs a bit a level.
    const size_t first = config.find_first_not_of(" \t\r\n");
    if (first == std::string::npos || config[first] != '{' || !nlohmann::json::accept(config)) {
      return InvalidArgument((folder / required).string() + ": not a JSON object");
    }
    return OkStatus();
  }

  // Adds the tensors of one weight file; `expected`: the names the index puts there, null: any.
  Status AddWeightFile(const std::filesystem::path& path, const std::set<std::string>* expected) {
    STOCKPOT_ASSIGN_OR_RETURN(ReadOnlyFile file, ReadOnlyFile::Open(path));
    std::array<std::byte, 8> first = {};
    const size_t have = std::min<size_t>(first.size(), static_cast<size_t>(file.size()));
    STOCKPOT_RETURN_IF_ERROR(file.ReadAt(0, std::span(first).first(have)));
    STOCKPOT_ASSIGN_OR_RETURN(const int64_t head_bytes,
                              SafetensorsHeaderBytes(std::span(first).first(have), file.size()));
    std::vector<std::byte> head(static_cast<size_t>(head_bytes));
    STOCKPOT_RETURN_IF_ERROR(file.ReadAt(0, head));
    STOCKPOT_ASSIGN_OR_RETURN(SafetensorsHeader header, ParseSafetensorsHeader(head, file.size()));
    for (SafetensorsEntry& entry : header.tensors) {
      if (expected != nullptr && !expected->contains(entry.info.name)) {
        return InvalidArgument("tensor '" + entry.info.name + "' is here, but not by the index");
      }
      located_.push_back(
          {std::move(entry.info), weights_.size(), header.data_offset + entry.begin});
    }
    if (expected != nullptr && header.tensors.size() != expected->size()) {
      std::set<std::string> missing = *expected;
      for (size_t i = located_.size() - header.tensors.size(); i < located_.size(); ++i) {
        missing.erase(located_[i].info.name);
      }
      return InvalidArgument("tensor '" + *missing.begin() +
                             "' is not here, but the index says so");
    }
    weights_.push_back({path, std::move(file)});
    return OkStatus();
  }

  Status Finish() {
    std::sort(located_.begin(), located_.end(),
              [](const Located& a, const Located& b) { return a.info.name < b.info.name; });
    if (located_.empty()) return InvalidArgument("the model has no tensors");
    for (const Located& located : located_) tensors_.push_back(located.info);
    return OkStatus();
  }

  const std::vector<TensorInfo>& tensors() const override { return tensors_; }

  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override {
    const TensorInfo* info = Find(name);
    if (info == nullptr) return NotFound("no tensor '" + std::string(name) + "'");
    if (offset < 0 || offset > info->bytes() ||
        static_cast<int64_t>(out.size()) > info->bytes() - offset) {
      return InvalidArgument("tensor '" + info->name + "': read past the end");
    }
    const Located& located = located_[static_cast<size_t>(info - tensors_.data())];
    const auto& [path, file] = weights_[located.file];
    return file.ReadAt(located.offset + offset, out)
        .WithContext(path.string() + ": tensor '" + info->name + "'");
  }

  Result<std::string> ReadFile(std::string_view name) const override {
    const auto it = config_files_.find(name);
    if (it == config_files_.end()) return NotFound("no file '" + std::string(name) + "'");
    return ReadSmallFile(it->second, kMaxConfigFileBytes);
  }

  std::vector<std::string> files() const override {
    std::vector<std::string> names;
    for (const auto& [name, path] : config_files_) names.push_back(name);
    return names;
  }

 private:
  struct Located {
    TensorInfo info;
    size_t file = 0;
    int64_t offset = 0;  // in the file
  };
  std::map<std::string, std::filesystem::path, std::less<>> config_files_;
  std::vector<std::pair<std::filesystem::path, ReadOnlyFile>> weights_;
  std::vector<Located> located_;  // parallel to tensors_ after Finish
  std::vector<TensorInfo> tensors_;
};

// File name -> the tensors the index puts there.
Result<std::map<std::string, std::set<std::string>>> ReadIndex(const std::filesystem::path& path) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, kMaxIndexBytes));
  IndexReader reader;
  if (!nlohmann::json::sax_parse(text, &reader)) {
    return Corruption(path.string() + ": " +
                      (reader.error.empty() ? "not valid JSON" : reader.error));
  }
  if (reader.weight_map.empty()) return Corruption(path.string() + ": no weight_map");
  std::map<std::string, std::set<std::string>> shards;
  for (const auto& [tensor, file] : reader.weight_map) {
    if (!IsPlainFileName(file)) {
      return InvalidArgument(path.string() + ": tensor '" + tensor + "' names '" +
                             file.substr(0, 64) + "', which is no file of the folder");
    }
    shards[file].insert(tensor);
    if (shards.size() > kMaxShards) {
      return InvalidArgument(path.string() + ": more than " + std::to_string(kMaxShards) +
                             " files");
    }
  }
  return shards;
}

}  // namespace

bool IsPlainFileName(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

const std::vector<std::string>& ModelConfigFiles() {
  static const auto* const names = new std::vector<std::string>{
      "config.json",           "generation_config.json",  "tokenizer.json",
      "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"};
  return *names;
}

Result<std::unique_ptr<TensorSource>> OpenModelFolder(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    return NotFound(folder.string() + ": no such folder");
  }
  auto source = std::make_unique<FolderSource>();
  STOCKPOT_RETURN_IF_ERROR(
      source->AddConfigFiles(folder, ModelConfigFiles(), "config.json", "model folder"));
  if (std::filesystem::exists(folder / kSingleFile, error)) {
    const Status status = source->AddWeightFile(folder / kSingleFile, nullptr);
    if (!status.ok()) return status.WithContext((folder / kSingleFile).string());
  } else if (std::filesystem::exists(folder / kIndexFile, error)) {
    STOCKPOT_ASSIGN_OR_RETURN(const auto shards, ReadIndex(folder / kIndexFile));
    for (const auto& [file, tensors] : shards) {
      const Status status = source->AddWeightFile(folder / file, &tensors);
      if (!status.ok()) return status.WithContext((folder / file).string());
    }
  } else {
    return InvalidArgument(folder.string() + ": neither " + std::string(kSingleFile) + " nor " +
                           std::string(kIndexFile));
  }
  const Status status = source->Finish();
  if (!status.ok()) return status.WithContext(folder.string());
  return std::unique_ptr<TensorSource>(std::move(source));
}

Result<std::unique_ptr<TensorSource>> OpenAdapterFolder(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    return NotFound(folder.string() + ": no such folder");
  }
  auto source = std::make_unique<FolderSource>();
  const std::string config(kAdapterConfigFile);
  STOCKPOT_RETURN_IF_ERROR(
      source->AddConfigFiles(folder, {&config, 1}, config, "folder of an adapter"));
  const std::filesystem::path weights = folder / kAdapterWeightFile;
  if (!std::filesystem::exists(weights, error)) {
    return InvalidArgument(folder.string() + ": no " + std::string(kAdapterWeightFile) +
                           " (PEFT's save_pretrained writes it; a pickled adapter_model.bin is not "
                           "read)");
  }
  Status status = source->AddWeightFile(weights, nullptr).WithContext(weights.string());
  if (status.ok()) status = source->Finish().WithContext(folder.string());
  if (!status.ok()) return status;
  return std::unique_ptr<TensorSource>(std::move(source));
}

}  // namespace stockpot
