#include "serve/calibrate/calibrate.h"

#include <utility>

namespace stockpot {
namespace {

constexpr double kClosedFormShare = 0.2;  // of the progress of a distillation

}  // namespace

Result<Calibration> Calibrate(const CalibratedModels& models, const CalibrationRequest& request,
                              std::span<const std::vector<int32_t>> texts,
                              const CalibrateOptions& options, const ProgressFunction& progress) {
  const bool distils = request.method == AlphaMethod::kDistilled;
  const auto part = [&](double from, double share_of_all) -> ProgressFunction {
    if (progress == nullptr) return nullptr;
    return [&progress, from, share_of_all](double share) {
      return progress(from + share * share_of_all);
    };
  };
  STOCKPOT_ASSIGN_OR_RETURN(Calibration found,
                            CalibrateClosedForm(models, texts, options.closed_form,
                                                part(0, distils ? kClosedFormShare : 1)));
  if (!distils || found.tensors.empty()) return found;
  ModelScales start;
  for (const auto& [name, tensor] : found.tensors) start[name] = tensor.alpha;
  Result<Distillation> distilled =
      Distill(models, start, texts, options.distill, request.resume, request.save,
              part(kClosedFormShare, 1 - kClosedFormShare));
  if (distilled.status().code() == StatusCode::kInvalidArgument) {
    found.why = distilled.status().message();
    return found;
  }
  if (!distilled.ok()) return distilled.status().WithContext("distilling");
  if (distilled->loss < distilled->loss_before) {
    found.method = AlphaMethod::kDistilled;
    for (auto& [name, tensor] : found.tensors) tensor.alpha = std::move(distilled->alpha.at(name));
  } else {
    found.why = "no step was better on the texts that were held back";
  }
  distilled->alpha.clear();
  found.distillation = *std::move(distilled);
  return found;
}

}  // namespace stockpot
