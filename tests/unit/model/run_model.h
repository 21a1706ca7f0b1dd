// Runs a prompt through a transformer, as the tests of the model need it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "serve/model/transformer.h"

namespace stockpot::test {

// Logits [prompt.size(), vocab] of every token of a prompt that is given in one chunk.
std::vector<float> PromptLogits(Transformer& transformer, KvPool& pool, const VariantModel* variant,
                                std::span<const int32_t> prompt);

// The prompt in chunks of at most `chunk`, then `count` greedy tokens one by one.
std::vector<int32_t> Greedy(Transformer& transformer, KvPool& pool, const VariantModel* variant,
                            std::span<const int32_t> prompt, int64_t chunk, int64_t count);

}  // namespace stockpot::test
