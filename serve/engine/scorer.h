// Scores models on texts with the forward pass that answers requests: the same kernels, the same
// base, the same two ways of summing a delta. Beside the engine, on memory and threads of its own.
//
// Which tokens: each text's are cut into windows of `window`; a window is a sequence of its own, and
// every token of it but the first is scored given those before it in the window. The first half of
// a window counts as prompt and the second as generated, so that both sums are measured
// (serve/model/transformer.h, prompt_rows).
//
// Memory: weights of the models beyond the base, keys and values of one window for each, and
// `rows` x vocabulary logits twice; never tokens x vocabulary.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "serve/model/transformer.h"
#include "serve/variants/variant_cache.h"
#include "store/progress.h"
#include "store/scoring.h"

namespace stockpot {

struct ScorerOptions {
  int64_t window = 512;  // tokens; fewer where a model has fewer positions
  int64_t rows = 64;     // of one forward pass: bounds memory and how soon it stops
  int threads = 1;
  // Nice value of its threads, 0..19: requests that run meanwhile keep the processor.
  int nice = 19;
};

// `models`: null: the base. The first is the one that the others are compared with. Works on
// threads of its own and returns when they are done. InvalidArgument: no text has two tokens, or one
// has a token that the model does not have; the error of `progress` (which may be null), called after each pass.
// Thread promise: any thread.
Result<ProbeScores> ScoreModels(std::shared_ptr<const BaseModel> base,
                                std::span<const VariantLease> models,
                                std::span<const std::vector<int32_t>> texts,
                                const ScorerOptions& options, const ProgressFunction& progress);

}  // namespace stockpot
