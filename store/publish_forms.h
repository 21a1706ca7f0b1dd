// What a publish codec means for one tensor: the forms that are looked at, the one that is taken
// where nothing is measured against other tensors, the limits of codec auto, and what is told about
// a choice. The rules are in store/bitdelta_codec.h. Thread promise: pure functions.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "kernels/bitdelta/compress.h"
#include "store/model_structure.h"
#include "store/records.h"
#include "store/tensor_choice.h"
#include "store/tensor_encoder.h"

namespace stockpot {

// How a variant's tensors are to be stored.
struct PublishForms {
  PublishCodec codec = PublishCodec::kBitDelta;
  PublishOptions options;
};

// Of a tensor that changed; `has_base`: whoever reads it finds its base's under the same name.
WaysToEncode WaysOf(const PublishForms& how, const TensorEntry& entry, TensorRole role,
                    bool has_base, const WeightMatrix& tuned);

// Of all codecs but auto: the smallest that is exact enough. `candidates`: what those ways
// measured.
Candidate FixedForm(PublishCodec codec, TensorRole role, const DeltaStats& stats,
                    const std::vector<Candidate>& candidates, const Candidate& raw);

// Of codec auto, for an artifact of so many logical bytes whose squared update is `update_square`.
ChoiceLimits LimitsOf(const PublishOptions& options, int64_t logical_bytes, int64_t fixed_bytes,
                      double update_square);

// At most six digits, which are what a person reads.
double SixDigits(double value);
// The attribute "tensor/<name>"; `next`: the next better form, null: none was looked at.
nlohmann::json FactsOf(TensorRole role, const DeltaStats& stats, const Candidate& form,
                       const Candidate* next);

}  // namespace stockpot
