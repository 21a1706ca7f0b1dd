#include "store/calibration.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "store/bitdelta_parts.h"

namespace stockpot {
namespace {

using nlohmann::json;

constexpr const char* kAlphaAttribute = "alpha";

// Why something failed may quote bytes that are no UTF-8.
std::string Text(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

// Six digits, as in the other facts of a variant.
double Rounded(double value) {
  if (value == 0 || !std::isfinite(value)) return 0;
  const double scale = std::pow(10.0, 5 - std::floor(std::log10(std::fabs(value))));
  return std::round(value * scale) / scale;
}

Status CheckScales(const TensorEntry* entry, const CalibratedTensor& tensor) {
  if (entry == nullptr || entry->codec != Codec::kBitDelta) {
    return InvalidArgument("the variant does not have it in one bit");
  }
  for (size_t plane = 0; plane < tensor.alpha.size(); ++plane) {
    const auto part = entry->parts.find(AlphaRole(static_cast<int64_t>(plane)));
    const auto bytes = static_cast<int64_t>(tensor.alpha[plane].size() * sizeof(float));
    if (part == entry->parts.end() || part->second.bytes != bytes) {
      return InvalidArgument("plane " + std::to_string(plane) + " has other scales");
    }
    for (const float alpha : tensor.alpha[plane]) {
      if (!std::isfinite(alpha)) return InvalidArgument("a scale is not finite");
    }
  }
  if (entry->parts.contains(AlphaRole(static_cast<int64_t>(tensor.alpha.size())))) {
    return InvalidArgument("the scales of plane " + std::to_string(tensor.alpha.size()) +
                           " are missing");
  }
  return OkStatus();
}

// Adds to the facts of a tensor that BuildVariant left.
void AddFacts(const CalibratedTensor& tensor, std::string& facts) {
  json parsed = json::parse(facts, nullptr, false);
  if (!parsed.is_object()) return;
  parsed["output_error_mean"] = Rounded(tensor.error_before);
  parsed["output_error"] = Rounded(tensor.error);
  facts = parsed.dump();
}

TensorEntry* FindTensor(Manifest& manifest, const std::string& name) {
  return const_cast<TensorEntry*>(manifest.Find(name));
}

}  // namespace

Result<Manifest> WithCalibration(CheckpointStore& store, Manifest draft,
                                 const Calibration& calibration, const Digest& texts) {
  int64_t rows = 0;
  int64_t rows_kept = 0;
  double error_before = 0;
  double error = 0;
  for (const auto& [name, tensor] : calibration.tensors) {
    TensorEntry* const entry = FindTensor(draft, name);
    const Status fits = CheckScales(entry, tensor);
    if (!fits.ok()) return fits.WithContext("scales of tensor '" + name + "'");
    for (size_t plane = 0; plane < tensor.alpha.size(); ++plane) {
      STOCKPOT_ASSIGN_OR_RETURN(entry->parts[AlphaRole(static_cast<int64_t>(plane))],
                                store.PutBytes(std::as_bytes(std::span(tensor.alpha[plane]))));
    }
    const auto facts = draft.attributes.find("tensor/" + name);
    if (facts != draft.attributes.end()) AddFacts(tensor, facts->second);
    rows += entry->shape[0];
    rows_kept += tensor.rows_kept;
    error_before += tensor.error_before;
    error += tensor.error;
  }
  const double count = std::max<double>(1, static_cast<double>(calibration.tensors.size()));
  json report = {{"method", AlphaMethodName(calibration.method)},
                 {"tokens", calibration.tokens},
                 {"texts", texts.ShortHex()},
                 {"rows", rows},
                 {"rows_kept", rows_kept},
                 {"error_before", Rounded(error_before / count)},
                 {"error", Rounded(error / count)}};
  if (const std::optional<Distillation>& distillation = calibration.distillation) {
    report["steps"] = distillation->steps;
    report["resumed_at"] = distillation->resumed_at;
    report["held_back"] = distillation->held_back;
    report["loss_before"] = Rounded(distillation->loss_before);
    report["loss"] = Rounded(distillation->loss);
  }
  if (!calibration.why.empty()) {
    report["asked"] = AlphaMethodName(AlphaMethod::kDistilled);
    report["why"] = calibration.why;
  }
  draft.attributes[kAlphaAttribute] = Text(report);
  return draft;
}

Manifest WithoutCalibration(Manifest draft, AlphaMethod asked, const std::string& why) {
  draft.attributes[kAlphaAttribute] = Text({{"method", AlphaMethodName(AlphaMethod::kMean)},
                                            {"asked", AlphaMethodName(asked)},
                                            {"why", why}});
  return draft;
}

std::map<std::string, std::string> AlphaFields(const Manifest& variant) {
  const auto it = variant.attributes.find(kAlphaAttribute);
  if (it == variant.attributes.end()) return {};
  const json parsed = json::parse(it->second, nullptr, false);
  std::map<std::string, std::string> fields;
  for (const auto& [key, value] : parsed.items()) {
    const std::string name = key == "method" ? "alpha" : "alpha_" + key;
    fields[name] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  return fields;
}

}  // namespace stockpot
