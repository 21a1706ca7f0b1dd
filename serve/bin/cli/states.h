// A checkpoint's states in a folder: DIR/states/GROUP holds the tensors of a group as safetensors,
// and a config.json of "{}" that says it is complete.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "store/tensor_source.h"
#include "thrift/upload.h"

namespace stockpot::cli {

std::filesystem::path StateFolder(const std::filesystem::path& model, const std::string& group);

// Writes one. InvalidArgument: it holds tensors already.
Status WriteState(const TensorSource& state, const std::filesystem::path& folder);

// The model of a folder and its states, if it has some, as one source to upload.
class FolderWithStates : public TensorSource {
 public:
  static Result<std::unique_ptr<FolderWithStates>> Open(const std::filesystem::path& folder);

  const TensorPlacements& placements() const { return placements_; }
  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override;
  Result<std::string> ReadFile(std::string_view name) const override {
    return model_->ReadFile(name);
  }
  std::vector<std::string> files() const override { return model_->files(); }

 private:
  explicit FolderWithStates(std::unique_ptr<TensorSource> model) : model_(std::move(model)) {}
  Status AddState(const std::string& group, std::unique_ptr<TensorSource> state);

  const std::unique_ptr<TensorSource> model_;
  std::map<std::string, std::unique_ptr<TensorSource>> states_;  // by group
  TensorPlacements placements_;                                  // of the states' tensors
  std::vector<TensorInfo> infos_;                                // by name
};

}  // namespace stockpot::cli
