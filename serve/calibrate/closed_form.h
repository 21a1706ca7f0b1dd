// The closed form of the scales of a 1-bit variant (store/calibration.h), on the path that serves:
// the full checkpoint runs over the texts as the engine would run it, and at each linear layer that
// the variant has in one bit the layer's input goes through delta and signs as well. Streaming:
// what is kept of the tokens are a few sums a row (serve/calibrate/row_statistics.h).
//
// Cost: a forward pass, and for each such layer one more product a sign plane and one for the
// delta. Memory: the weights of the full checkpoint beyond the base, keys and values of one window,
// `rows` rows of activations, kBlockRows rows of one delta in float32.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "serve/model/weights.h"
#include "store/calibration.h"
#include "store/progress.h"

namespace stockpot {

struct CalibratorOptions {
  int64_t max_tokens = 16384;  // of all texts, taken from each in turn; what is over is left
  int64_t window = 512;        // tokens of a sequence; fewer where a model has fewer positions
  int64_t rows = 128;          // of one forward pass
  int threads = 1;
  int nice = 19;  // of its threads, 0..19: requests that run meanwhile keep the processor
};

// The models of a calibration, over one base.
struct CalibratedModels {
  std::shared_ptr<const BaseModel> base;
  std::shared_ptr<const VariantModel> full;   // the checkpoint, exactly
  std::shared_ptr<const VariantModel> draft;  // the variant whose scales are looked for
};

// Works on threads of its own and returns when they are done. A draft without 1-bit tensors: no
// tensors. InvalidArgument: the texts have no token, or one that the model does not have; the error
// of `progress` (which may be null). Thread promise: any thread.
Result<Calibration> CalibrateClosedForm(const CalibratedModels& models,
                                        std::span<const std::vector<int32_t>> texts,
                                        const CalibratorOptions& options,
                                        const ProgressFunction& progress);

}  // namespace stockpot
