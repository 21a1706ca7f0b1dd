// Mutations of a JSON text that keep it JSON: a fuzzer that flips bytes of a document spends its
// time in the tokenizer and hardly ever meets what a parser does with what it has read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

namespace stockpot::fuzz {

using Random = std::minstd_rand;

// Repairs a document after its mutation, so that it passes the checks that stand before deeper ones
// (lengths that must fit each other, an order). May do nothing.
using JsonRepair = std::function<void(nlohmann::json& document, Random& random)>;

// As LLVMFuzzerCustomMutator. Text that is no JSON, or is nested deeply, is mutated as bytes, and
// so is one in eight others. What comes out of a document has sorted keys and no spaces.
size_t MutateJson(uint8_t* data, size_t size, size_t max_size, unsigned int seed,
                  const JsonRepair& repair = {});

// One to three changes of a document.
void MutateDocument(nlohmann::json& document, Random& random);

// Changes bytes of a string, by the engine's own mutation.
void MutateText(std::string& text, size_t max_size);

}  // namespace stockpot::fuzz
