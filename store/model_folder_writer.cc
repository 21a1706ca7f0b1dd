// Writing a Hugging Face folder.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "store/lora_adapter.h"
#include "store/manifest.h"
#include "store/model_structure.h"
#include "store/pending_files.h"
#include "store/safetensors.h"

namespace stockpot {
namespace {

constexpr int64_t kCopyBytes = int64_t{4} << 20;  // read and written at a time

Status RefuseExistingModel(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::directory_iterator entries(folder, error);
  if (error) return ErrnoStatus(error.value(), folder.string());
  for (const auto& entry : entries) {
    const std::string name = entry.path().filename();
    if (name == "config.json" || name == kAdapterConfigFile || name.ends_with(".safetensors") ||
        name.ends_with(".safetensors.index.json")) {
      return InvalidArgument(folder.string() + ": holds a model already (" + name + ")");
    }
  }
  return OkStatus();
}

using TensorList = std::vector<const TensorInfo*>;

// What is written, in the order of the reference writer: wide element types first, so that every
// tensor is aligned to its element; then by name.
Result<TensorList> TensorsToWrite(const TensorSource& source) {
  std::string config;
  if (Result<std::string> file = source.ReadFile("config.json"); file.ok()) {
    config = std::move(*file);
  } else if (file.status().code() != StatusCode::kNotFound) {
    return file.status();
  }
  STOCKPOT_ASSIGN_OR_RETURN(const StructureConfig parsed, ParseStructureConfig(config));
  TensorList list;
  for (const TensorInfo& tensor : source.tensors()) {
    if (!tensor.alias_of.empty() && parsed.ties_embeddings.value_or(false)) continue;
    list.push_back(&tensor);
  }
  std::stable_sort(list.begin(), list.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return DTypeSize(a->dtype) > DTypeSize(b->dtype);
  });
  return list;
}

// Shards of at most `shard_bytes` of data; a tensor that is longer has a shard of its own.
std::vector<TensorList> SplitIntoShards(const TensorList& tensors, int64_t shard_bytes) {
  std::vector<TensorList> shards(1);
  int64_t bytes = 0;
  for (const TensorInfo* tensor : tensors) {
    if (!shards.back().empty() && bytes + tensor->bytes() > shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(tensor);
    bytes += tensor->bytes();
  }
  return shards;
}

Status WriteShard(const TensorSource& source, const TensorList& tensors, const std::string& name,
                  PendingFiles& files) {
  STOCKPOT_RETURN_IF_ERROR(files.Begin(name));
  STOCKPOT_RETURN_IF_ERROR(files.Append(SafetensorsHead(tensors)));
  std::vector<std::byte> buffer(static_cast<size_t>(kCopyBytes));
  for (const TensorInfo* tensor : tensors) {
    for (int64_t at = 0; at < tensor->bytes(); at += kCopyBytes) {
      const int64_t n = std::min(kCopyBytes, tensor->bytes() - at);
      const std::span<std::byte> block = std::span(buffer).first(static_cast<size_t>(n));
      const Status status = source.Read(tensor->name, at, block);
      if (!status.ok()) return status.WithContext("tensor '" + tensor->name + "'");
      STOCKPOT_RETURN_IF_ERROR(files.Append(std::span<const std::byte>(block)));
    }
  }
  return files.End();
}

// What a folder's files are called: a model's, or an adapter's as PEFT has them.
struct Layout {
  std::string weights;  // "model", "adapter_model"
  std::string config;   // the file that makes the folder one
};

Layout LayoutOf(const TensorSource& source) {
  const std::vector<std::string> files = source.files();
  const std::string adapter(kAdapterConfigFile);
  if (std::find(files.begin(), files.end(), adapter) != files.end()) {
    return {"adapter_model", adapter};
  }
  return {"model", "config.json"};
}

std::string ShardName(const Layout& layout, size_t index, size_t count) {
  if (count == 1) return layout.weights + ".safetensors";
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, "-%05zu-of-%05zu.safetensors", index + 1, count);
  return layout.weights + numbers;
}

Status WriteWeights(const TensorSource& source, const Layout& layout, int64_t shard_bytes,
                    PendingFiles& files) {
  STOCKPOT_ASSIGN_OR_RETURN(const TensorList tensors, TensorsToWrite(source));
  const std::vector<TensorList> shards = SplitIntoShards(tensors, shard_bytes);
  nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
  int64_t total = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = ShardName(layout, i, shards.size());
    STOCKPOT_RETURN_IF_ERROR(WriteShard(source, shards[i], name, files));
    for (const TensorInfo* tensor : shards[i]) {
      weight_map[tensor->name] = name;
      total += tensor->bytes();
    }
  }
  if (shards.size() == 1) return OkStatus();
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", total}}},
                                        {"weight_map", weight_map}};
  return files.Write(layout.weights + ".safetensors.index.json", index.dump(2));
}

Status WriteConfigFiles(const TensorSource& source, const Layout& layout, PendingFiles& files) {
  std::vector<std::string> names = source.files();
  // The file that makes a folder a model comes last.
  std::stable_partition(names.begin(), names.end(),
                        [&](const std::string& name) { return name != layout.config; });
  for (const std::string& name : names) {
    if (!IsPlainFileName(name) || name.ends_with(".safetensors") ||
        name.ends_with(".safetensors.index.json") || name.ends_with(kPartialSuffix)) {
      return InvalidArgument("'" + name.substr(0, 64) + "' is no name for a config file");
    }
    STOCKPOT_ASSIGN_OR_RETURN(const std::string text, source.ReadFile(name));
    STOCKPOT_RETURN_IF_ERROR(files.Write(name, text));
  }
  return OkStatus();
}

}  // namespace

Status WriteModelFolder(const TensorSource& source, const std::filesystem::path& folder,
                        int64_t shard_bytes) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return ErrnoStatus(error.value(), folder.string());
  STOCKPOT_RETURN_IF_ERROR(RefuseExistingModel(folder));
  PendingFiles files(folder);
  try {  // JSON refuses a name that is not UTF-8
    const Layout layout = LayoutOf(source);
    if (layout.config == kAdapterConfigFile) shard_bytes = INT64_MAX;  // PEFT reads one file
    STOCKPOT_RETURN_IF_ERROR(WriteWeights(source, layout, shard_bytes, files));
    STOCKPOT_RETURN_IF_ERROR(WriteConfigFiles(source, layout, files));
  } catch (const nlohmann::json::exception& e) {
    return InvalidArgument(folder.string() + ": " + e.what());
  }
  return files.Publish();
}

}  // namespace stockpot
