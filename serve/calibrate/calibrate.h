// Scales of a variant by any method (store/calibration.h): what the composition root hands to the
// pipeline, once texts are tokens and models are loaded.
#pragma once

#include <span>
#include <vector>

#include "serve/calibrate/closed_form.h"
#include "serve/calibrate/distill.h"

namespace stockpot {

struct CalibrateOptions {
  CalibratorOptions closed_form;
  DistillOptions distill;
};

// `request` says the method and where a distillation goes on. A distillation that cannot be, or
// that is not better than the closed form, gives the closed form, and why. Errors as of
// CalibrateClosedForm, and of `request.save`. Thread promise: any thread.
Result<Calibration> Calibrate(const CalibratedModels& models, const CalibrationRequest& request,
                              std::span<const std::vector<int32_t>> texts,
                              const CalibrateOptions& options, const ProgressFunction& progress);

}  // namespace stockpot
