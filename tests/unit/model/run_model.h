// Runs a prompt through a transformer, as the tests of the model need it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "serve/model/transformer.h"

namespace stockpot::test {

// Logits [tokens.size(), vocab] of every token of a sequence that is given in one chunk. The first
// `prompt_rows` are its prompt: all of them by default.
std::vector<float> PromptLogits(Transformer& transformer, KvPool& pool, const VariantModel* variant,
                                std::span<const int32_t> tokens,
                                std::optional<int64_t> prompt_rows = std::nullopt);

// The prompt in chunks of at most `chunk`, then `count` greedy tokens one by one.
std::vector<int32_t> Greedy(Transformer& transformer, KvPool& pool, const VariantModel* variant,
                            std::span<const int32_t> prompt, int64_t chunk, int64_t count);

}  // namespace stockpot::test
