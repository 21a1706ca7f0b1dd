#include "store/distillation_state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

namespace stockpot {
namespace {

using nlohmann::json;

constexpr const char* kAttribute = "distillation";
constexpr const char* kGroup = "distillation";

using Tensor = DistillationState::Tensor;
constexpr std::array<std::pair<const char*, std::vector<float> Tensor::*>, 4> kVectors = {{
    {"best", &Tensor::best},
    {"first_moment", &Tensor::first_moment},
    {"log_scale", &Tensor::log_scale},
    {"second_moment", &Tensor::second_moment},
}};

// Of finite values.
std::optional<std::vector<float>> ReadVector(const CheckpointStore& store,
                                             const TensorEntry& entry) {
  if (entry.codec != Codec::kRaw || entry.dtype != DType::kF32 || entry.shape.size() != 1 ||
      !entry.parts.contains("data")) {
    return std::nullopt;
  }
  std::vector<float> values(static_cast<size_t>(entry.shape[0]));
  const Status status =
      store.ReadPart(entry.parts.at("data"), 0, std::as_writable_bytes(std::span(values)));
  const bool finite =
      std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
  if (!status.ok() || !finite) return std::nullopt;
  return values;
}

bool ReadNumbers(const std::string& text, const Digest& of, DistillationState& state) {
  const json numbers = json::parse(text, nullptr, false);
  if (!numbers.is_object() || numbers.value("of", json()) != of.Hex()) return false;
  const json step = numbers.value("step", json());
  if (!step.is_number_unsigned() || step.get<uint64_t>() > (uint64_t{1} << 40)) return false;
  state.step = step.get<int64_t>();
  const auto number = [&](const char* key, double& value) {
    const json found = numbers.value(key, json());
    if (!found.is_number()) return false;
    value = found.get<double>();
    return std::isfinite(value) && value >= 0;
  };
  return number("seconds", state.seconds) && number("loss_before", state.loss_before) &&
         number("best_loss", state.best_loss);
}

}  // namespace

Result<Manifest> PutDistillation(CheckpointStore& store, const DistillationState& state,
                                 const Manifest& source, const Digest& of) {
  Manifest draft{.kind = ArtifactKind::kState,
                 .base = source.base,
                 .run = source.run,
                 .step = source.step,
                 .group = kGroup};
  for (const auto& [name, tensor] : state.tensors) {
    for (const auto& [role, member] : kVectors) {
      const std::vector<float>& values = tensor.*member;
      TensorEntry entry{.name = name + "/" + role,
                        .dtype = DType::kF32,
                        .shape = {static_cast<int64_t>(values.size())}};
      STOCKPOT_ASSIGN_OR_RETURN(entry.parts["data"],
                                store.PutBytes(std::as_bytes(std::span(values))));
      draft.tensors.push_back(std::move(entry));
    }
  }
  std::sort(draft.tensors.begin(), draft.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  draft.attributes[kAttribute] = json({{"of", of.Hex()},
                                       {"step", state.step},
                                       {"seconds", state.seconds},
                                       {"loss_before", state.loss_before},
                                       {"best_loss", state.best_loss}})
                                     .dump();
  return draft;
}

std::optional<DistillationState> ReadDistillation(const CheckpointStore& store,
                                                  const Manifest& draft, const Digest& of) {
  DistillationState state;
  const auto numbers = draft.attributes.find(kAttribute);
  if (numbers == draft.attributes.end() || !ReadNumbers(numbers->second, of, state)) {
    return std::nullopt;
  }
  for (const TensorEntry& entry : draft.tensors) {
    const size_t slash = entry.name.rfind('/');
    if (slash == std::string::npos) return std::nullopt;
    const auto role = std::find_if(kVectors.begin(), kVectors.end(), [&](const auto& known) {
      return entry.name.substr(slash + 1) == known.first;
    });
    std::optional<std::vector<float>> values = ReadVector(store, entry);
    if (role == kVectors.end() || !values) return std::nullopt;
    state.tensors[entry.name.substr(0, slash)].*(role->second) = *std::move(values);
  }
  return state;
}

}  // namespace stockpot
