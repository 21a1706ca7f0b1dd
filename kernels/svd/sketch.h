// The random test matrix Omega of a randomised SVD: a pure function of (seed, name, row, column).
//
// Counter-based: entry (i, j) comes from the counter j * rows + i through SplitMix64 (Steele, Lea,
// Flood, OOPSLA 2014) and Box-Muller, so threads, tiling and the number of columns do not change
// it. Thread promise: pure functions, any thread.
#pragma once

#include <cstdint>
#include <string_view>

namespace stockpot {

// One stream per (seed, tensor name).
uint64_t SketchKey(uint64_t seed, std::string_view name);

// Standard normal number `counter` of the stream `key`.
float SketchGaussian(uint64_t key, uint64_t counter);

}  // namespace stockpot
