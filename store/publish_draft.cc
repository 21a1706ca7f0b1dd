#include "store/publish_draft.h"

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace stockpot {
namespace {

constexpr const char* kStateAttribute = "draft";

nlohmann::json ToJson(const MeasuredTensor& tensor) {
  nlohmann::json forms = nlohmann::json::array();
  for (const Candidate& form : tensor.forms) {
    forms.push_back({CodecName(form.codec), form.planes, form.rank, form.bytes, form.left});
  }
  const DeltaStats& stats = tensor.stats;
  return {{"name", tensor.name},
          {"base", tensor.base},
          {"role", static_cast<int>(tensor.role)},
          {"stats",
           {stats.elements, stats.changed, stats.non_finite, stats.sum_abs, stats.sum_square,
            stats.max_abs}},
          {"forms", std::move(forms)}};
}

// Throws where it is another version's.
MeasuredTensor MeasuredFromJson(const nlohmann::json& json) {
  const nlohmann::json& stats = json.at("stats");
  MeasuredTensor tensor{.name = json.at("name"),
                        .base = json.at("base"),
                        .role = static_cast<TensorRole>(json.at("role").get<int>()),
                        .stats = {.elements = stats.at(0),
                                  .changed = stats.at(1),
                                  .non_finite = stats.at(2),
                                  .sum_abs = stats.at(3),
                                  .sum_square = stats.at(4),
                                  .max_abs = stats.at(5)},
                        .forms = {}};
  for (const nlohmann::json& form : json.at("forms")) {
    const Result<Codec> codec = CodecFromName(form.at(0).get<std::string>());
    if (!codec.ok()) throw std::invalid_argument(codec.status().ToString());
    tensor.forms.push_back({.codec = *codec,
                            .planes = form.at(1),
                            .rank = form.at(2),
                            .bytes = form.at(3),
                            .left = form.at(4)});
  }
  return tensor;
}

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
  nlohmann::json ties = nlohmann::json::array(), measured = nlohmann::json::array();
  for (const Tie& tie : state.ties) ties.push_back({tie.name, tie.target});
  for (const MeasuredTensor& tensor : state.measured) measured.push_back(ToJson(tensor));
  const nlohmann::json json = {{"of", state.of},
                               {"next", state.next},
                               {"ties", std::move(ties)},
                               {"measured", std::move(measured)},
                               {"stored", state.stored},
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
    for (const auto& tie : json.at("ties")) state.ties.push_back({tie.at(0), tie.at(1)});
    for (const auto& tensor : json.at("measured")) {
      state.measured.push_back(MeasuredFromJson(tensor));
    }
    json.at("stored").get_to(state.stored);
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
