#include "store/publish_draft.h"

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>

namespace stockpot {
namespace {

constexpr const char* kStateAttribute = "draft";

bool HasChunks(const CheckpointStore& store, const Manifest& made) {
  for (const TensorEntry& entry : made.tensors) {
    for (const auto& [role, part] : entry.parts) {
      const std::vector<bool> have = store.HaveChunks(part.chunks);
      if (std::find(have.begin(), have.end(), false) != have.end()) return false;
    }
  }
  return true;
}

}  // namespace

Status SavePublishState(CheckpointStore& store, const std::string& job, PublishState state) {
  const nlohmann::json json = {{"of", state.of},
                               {"next", state.next},
                               {"aliases", state.aliases},
                               {"head_untied", state.head_untied},
                               {"update_square", state.update_square},
                               {"base_square", state.base_square},
                               {"left_square", state.left_square},
                               {"block_elements", state.block_elements},
                               {"block_compressed", state.block_compressed},
                               {"block_sparse", state.block_sparse},
                               {"other_changed", state.other_changed}};
  Manifest& made = state.made;
  made.attributes[kStateAttribute] = json.dump();
  std::sort(made.tensors.begin(), made.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  Commit commit;
  commit.drafts.push_back({job, std::move(made)});
  return store.Apply(std::move(commit)).status();
}

std::optional<PublishState> LoadPublishState(const CheckpointStore& store, const std::string& job,
                                             const std::string& of) {
  std::optional<Manifest> made = store.GetDraft(job);
  if (!made || !HasChunks(store, *made)) return std::nullopt;
  try {
    const auto json = nlohmann::json::parse(made->attributes.at(kStateAttribute));
    PublishState state{.of = json.at("of")};
    if (state.of != of) return std::nullopt;
    json.at("next").get_to(state.next);
    json.at("aliases").get_to(state.aliases);
    json.at("head_untied").get_to(state.head_untied);
    json.at("update_square").get_to(state.update_square);
    json.at("base_square").get_to(state.base_square);
    json.at("left_square").get_to(state.left_square);
    json.at("block_elements").get_to(state.block_elements);
    json.at("block_compressed").get_to(state.block_compressed);
    json.at("block_sparse").get_to(state.block_sparse);
    json.at("other_changed").get_to(state.other_changed);
    made->attributes.erase(kStateAttribute);
    state.made = *std::move(made);
    return state;
  } catch (const std::exception&) {  // another version's: begin anew
    return std::nullopt;
  }
}

}  // namespace stockpot
