// Scale distillation: gradient steps on the scales of a 1-bit variant, everything else frozen, that
// make its logits those of the full checkpoint (arXiv 2402.10193, section 3.2).
//
// The texts are cut into sequences; every fifth of them (kHeldBackEvery), at most kMaxHeldBack, is
// held back and judges: the scales with the least loss there are the result, those at the start
// among them. A step takes `batch` of the others, in an order that is drawn anew each time all were
// taken.
//
// Scales are tens of thousandths in one model and a tenth of that in another, so a step of a fixed
// size is nothing here and everything there. What Adam moves (0.9, 0.999) is log(alpha / alpha at
// the start): `learning_rate` is about the relative change of a scale in one step, and no scale
// changes its sign. It falls linearly to 0 with the share of steps, or of time, that is done.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "serve/calibrate/closed_form.h"
#include "serve/calibrate/logit_loss.h"

namespace stockpot {

struct DistillOptions {
  int64_t sequence = 128;  // tokens; fewer where no text has as many
  int64_t batch = 4;       // sequences of a step
  int64_t steps = 200;     // at most
  double seconds = 300;    // of computing, at most; over all starts of an interrupted one
  double learning_rate = 3e-3;
  int64_t evaluate_every = 20;  // steps
  int64_t save_every = 5;       // steps
  int64_t max_tokens = 65536;   // of all texts, taken from each in turn
  int threads = 1;
  int nice = 19;
};

// Starts from `start`, the scales of every 1-bit layer. `resume` (may be null) is a state that was
// saved by the same distillation; `save` (may be null) keeps one. InvalidArgument: the texts have
// fewer than two sequences; the errors of `progress` and of `save`. Thread promise: any thread.
Result<Distillation> Distill(const CalibratedModels& models, const ModelScales& start,
                             std::span<const std::vector<int32_t>> texts,
                             const DistillOptions& options, const DistillationState* resume,
                             const SaveDistillation& save, const ProgressFunction& progress);

}  // namespace stockpot
