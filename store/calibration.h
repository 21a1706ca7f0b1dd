// Better scales for a variant: step between its making (store/bitdelta_codec.h) and the gate.
// Signs, and everything else of the draft, stay as they are; the scales of its 1-bit tensors are
// found on texts. The computation needs the model (serve/calibrate/), so the composition root hands
// it to the pipeline as a function.
//
//   mean         alpha_i = mean |delta_i|: what the draft has. No texts
//   closed-form  alpha_i = (d_i C s_i^T) / (s_i C s_i^T), the least squares of the layer's outputs: C
//                is the uncentred covariance of its inputs under the full checkpoint, d_i and s_i
//                are the i-th rows of delta and signs; of several planes the solution of their
//                normal equations. mean |delta| where that is not positive and finite
//   distilled    from there by gradient steps: mean squared difference of the logits of full
//                checkpoint and variant; everything but the scales frozen (arXiv 2402.10193, 3.2).
//                Kept where it is better on texts that no step has seen. May take minutes; one that
//                is interrupted goes on from its last state (store/distillation_state.h)
//
// The texts are a run's calibration texts, never its probe texts (store/text_overlap.h).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "store/checkpoint_store.h"
#include "store/progress.h"
#include "store/records.h"

namespace stockpot {

// Where a distillation that was interrupted goes on from.
struct DistillationState {
  struct Tensor {  // [planes * d_out] each: log(alpha / alpha at the start), Adam's moments of it
    std::vector<float> log_scale, first_moment, second_moment;
    std::vector<float> best;  // the log_scale that had the least loss on what is held back
  };
  int64_t step = 0;
  double seconds = 0;  // of computing
  double loss_before = 0, best_loss = 0;
  std::map<std::string, Tensor> tensors;  // by name
};
using SaveDistillation = std::function<Status(const DistillationState&)>;

// The outcome of one. Losses are means of the squared difference of two logits, on texts that no
// step has seen.
struct Distillation {
  int64_t steps = 0;
  int64_t resumed_at = 0;  // the step at which the last start went on; 0: it was the only one
  int64_t tokens = 0;      // that steps could take
  int64_t held_back = 0;   // tokens that judged
  double loss_before = 0;  // with the scales of the closed form
  double loss = 0;         // of the best; not more than before
  std::map<std::string, std::vector<std::vector<float>>> alpha;  // by tensor name: [planes][d_out]
};

struct CalibrationRequest {
  Digest base;
  const Manifest* full = nullptr;   // the checkpoint as a variant (store/scoring.h DenseVariantOf)
  const Manifest* draft = nullptr;  // with the scales of `mean`; its chunks put and guarded
  std::vector<std::string> texts;
  AlphaMethod method = AlphaMethod::kClosedForm;  // not kMean
  // Of kDistilled: the state that an interrupted one left, if any, and who keeps the next one. Both
  // may be null.
  const DistillationState* resume = nullptr;
  SaveDistillation save;
};

struct CalibratedTensor {
  std::vector<std::vector<float>> alpha;  // [planes][d_out]
  int64_t rows_kept = 0;                  // output rows that have the draft's scales
  // Squared error of the layer's output on its inputs under the full checkpoint, over the squared
  // output of the delta there: with the draft's scales, and with those of the closed form. 0:
  // nothing goes through it.
  double error_before = 0, error = 0;
};

struct Calibration {
  AlphaMethod method = AlphaMethod::kClosedForm;    // that these scales are of
  std::string why;                                  // it is not the one that was asked for
  int64_t tokens = 0;                               // that were looked at
  std::map<std::string, CalibratedTensor> tensors;  // by name
  std::optional<Distillation> distillation;         // its scales are in `tensors`, where it helped
};

// NotFound: the base is not the one that is served here. InvalidArgument: a model cannot be served
// (its tensor is named), or the texts are too short. Unavailable: not yet, or stopped.
using CalibrateFunction = std::function<Result<Calibration>(const CalibrationRequest& request,
                                                            const ProgressFunction& progress)>;

// The draft with these scales; puts the new parts. InvalidArgument: a tensor or plane that is not
// in the draft, scales that are not finite. Attributes:
//   "alpha"          JSON {"method", "tokens", "texts" (12 hex digits), "rows", "rows_kept",
//                    "error_before", "error"}; the errors are means over the tensors. Of a
//                    distillation also "steps", "resumed_at", "held_back" (tokens), "loss_before",
//                    "loss"; where another method was asked for "asked" and "why"
//   "tensor/<name>"  also "output_error_mean" (with mean |delta|) and "output_error"
// "row_error" there stays what mean |delta| misses of the weights, which these scales are not made
// for: it says how well signs suit the delta, and the gate looks at that.
Result<Manifest> WithCalibration(CheckpointStore& store, Manifest draft,
                                 const Calibration& calibration, const Digest& texts);

// The draft as it is, and in its attribute "alpha" that `asked` could not be had, and why.
Manifest WithoutCalibration(Manifest draft, AlphaMethod asked, const std::string& why);

// Fields of events from the attribute "alpha": alpha (the method), alpha_<key>. Without it: none.
std::map<std::string, std::string> AlphaFields(const Manifest& variant);

}  // namespace stockpot
