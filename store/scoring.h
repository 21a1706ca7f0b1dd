// How good a model is, said in numbers: the held-out loss of any artifact on probe texts, and how
// far two of them are apart. The computation is the serving endpoint's own (serve/engine/scorer.h);
// the composition root hands it to the pipeline as a function, since the store knows no model.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "store/manifest.h"
#include "store/progress.h"

namespace stockpot {

// One model on the scored tokens. Means over tokens, in nats where it says so; NaN where a logit is.
struct ModelScore {
  double loss = 0;  // -log p(token), nats
  double kl = 0;    // KL(first || this) of the next token's distribution, nats; of the first: 0
  double top1 = 1;  // share of tokens whose most likely one is the first model's; of the first: 1
};

struct ProbeScores {
  int64_t tokens = 0;  // scored ones
  std::vector<ModelScore> models;
};

struct ScoreRequest {
  Digest base;
  std::vector<std::string> texts;  // each is scored by itself (serve/engine/scorer.h)
  // Variants over `base`, stored or not, with their chunks put; null: the base itself. At least
  // one. All are in memory at once: the weights in which they differ from the base.
  std::vector<const Manifest*> models;
};

// NotFound: the base is not the one that is served here. InvalidArgument: a model cannot be served
// (its tensor is named), or the texts are too short. Unavailable: not yet, or stopped.
using ScoreFunction =
    std::function<Result<ProbeScores>(const ScoreRequest& request, const ProgressFunction& progress)>;

// A checkpoint, merge or the like as a variant over its base: tensors that are stored as the base's
// are references to it, all others are what they are. Nothing is read and nothing checked: the
// loader does that. Pure function.
Manifest DenseVariantOf(const Manifest& full, const Manifest& base);

}  // namespace stockpot
