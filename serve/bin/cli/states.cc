#include "serve/bin/cli/states.h"

#include <algorithm>

#include "store/names.h"
#include "store/safetensors.h"

namespace stockpot::cli {
namespace {

constexpr const char* kStatesFolder = "states";
constexpr const char* kConfigName = "config.json";

// A state as a folder's writer takes it: no file of the base's beside it.
class BareTensors : public TensorSource {
 public:
  explicit BareTensors(const TensorSource& inner) : inner_(inner) {}
  const std::vector<TensorInfo>& tensors() const override { return inner_.tensors(); }
  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override {
    return inner_.Read(name, offset, out);
  }
  Result<std::string> ReadFile(std::string_view name) const override {
    if (name != kConfigName) return NotFound("no file '" + std::string(name) + "'");
    return std::string("{}");
  }
  std::vector<std::string> files() const override { return {kConfigName}; }

 private:
  const TensorSource& inner_;
};

}  // namespace

std::filesystem::path StateFolder(const std::filesystem::path& model, const std::string& group) {
  return model / kStatesFolder / group;
}

Status WriteState(const TensorSource& state, const std::filesystem::path& folder) {
  return WriteModelFolder(BareTensors(state), folder);
}

Result<std::unique_ptr<FolderWithStates>> FolderWithStates::Open(
    const std::filesystem::path& folder) {
  STOCKPOT_ASSIGN_OR_RETURN(std::unique_ptr<TensorSource> model, OpenModelFolder(folder));
  std::unique_ptr<FolderWithStates> all(new FolderWithStates(std::move(model)));
  all->infos_ = all->model_->tensors();
  std::error_code error;
  if (std::filesystem::is_directory(folder / kStatesFolder, error)) {
    std::filesystem::directory_iterator entries(folder / kStatesFolder, error);
    if (error) return ErrnoStatus(error.value(), (folder / kStatesFolder).string());
    for (const auto& entry : entries) {
      const std::string group = entry.path().filename().string();
      if (!IsValidGroupName(group)) {
        return InvalidArgument(entry.path().string() + ": '" + group + "' is no name of a group");
      }
      STOCKPOT_ASSIGN_OR_RETURN(auto state, OpenModelFolder(entry.path()));
      STOCKPOT_RETURN_IF_ERROR(all->AddState(group, std::move(state)));
    }
  }
  std::sort(all->infos_.begin(), all->infos_.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  return all;
}

// Its tensors are called GROUP:NAME here, since a weight may have the same name.
Status FolderWithStates::AddState(const std::string& group, std::unique_ptr<TensorSource> state) {
  for (TensorInfo info : state->tensors()) {
    TensorPlacement placement{.name = info.name, .group = group};
    info.name = group + ":" + info.name;
    if (!info.alias_of.empty() || model_->Find(info.name) != nullptr) {
      return InvalidArgument("tensor '" + placement.name + "' of group '" + group +
                             "' is a tie, or a weight has its name");
    }
    placements_[info.name] = std::move(placement);
    infos_.push_back(std::move(info));
  }
  states_[group] = std::move(state);
  return OkStatus();
}

Status FolderWithStates::Read(std::string_view name, int64_t offset,
                              std::span<std::byte> out) const {
  const auto placed = placements_.find(name);
  if (placed == placements_.end()) return model_->Read(name, offset, out);
  return states_.at(placed->second.group)->Read(placed->second.name, offset, out);
}

}  // namespace stockpot::cli
