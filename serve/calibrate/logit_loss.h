// The objective of scale distillation and its gradient: the mean over tokens and vocabulary of the
// squared difference of the logits of the full checkpoint (teacher) and of the variant with other
// scales (student), as in BitDelta (arXiv 2402.10193, section 3.2).
//
// Both run over the resident base. Nothing is copied whole: a weight exists in float32 kBlockRows
// rows at a time, logits never as [tokens, vocabulary]. The backward pass keeps the input of each
// layer and computes the layer again, so memory is tokens x hidden x layers.
//
// Arithmetic: float32, LibTorch's products and derivatives; of the scales by hand,
//   d loss / d alpha_pi = sum_t g_ti (x_t s_pi^T) = s_pi (g^T x)_i
// Sums are LibTorch's, so the last bits are not those of the engine.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/threads.h"
#include "serve/calibrate/closed_form.h"
#include "serve/calibrate/weight_rows.h"
#include "store/progress.h"

namespace stockpot {

// Of every 1-bit layer, by tensor name.
using ModelScales = std::map<std::string, LayerScales>;

// The scales that a variant has, of the linear layers of its blocks.
ModelScales ScalesOf(const VariantModel& variant);

// Thread promise: one caller at a time.
class LogitLoss {
 public:
  // `models` and `threads` must outlive it.
  LogitLoss(const CalibratedModels& models, ThreadPool& threads);
  ~LogitLoss();

  // Sequences of one length, each from position 0.
  using Sequences = std::span<const std::span<const int32_t>>;

  // What the teacher's head multiplies: its last hidden states after the norm, [tokens, hidden].
  // An error: of `progress` (which may be null), asked once a layer.
  Result<std::vector<float>> Teacher(Sequences sequences, const ProgressFunction& progress);

  // The loss of the student with these scales; `teacher` of the same sequences. `gradient` (which
  // may be null) gets d loss / d alpha in the shape of `scales`.
  Result<double> Student(Sequences sequences, std::span<const float> teacher,
                         const ModelScales& scales, ModelScales* gradient,
                         const ProgressFunction& progress);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
