#include "kernels/svd/sketch.h"

#include <cmath>
#include <numbers>

namespace stockpot {
namespace {

uint64_t Mix(uint64_t z) {  // SplitMix64's output function
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;  // SplitMix64's increment

// Uniform in (0, 1): never 0, whose logarithm is infinite.
double Uniform(uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

}  // namespace

uint64_t SketchKey(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return Mix(Mix(seed + kGamma) ^ hash);
}

float SketchGaussian(uint64_t key, uint64_t counter) {
  const double u1 = Uniform(Mix(key + (2 * counter + 1) * kGamma));
  const double u2 = Uniform(Mix(key + (2 * counter + 2) * kGamma));
  return static_cast<float>(std::sqrt(-2 * std::log(u1)) * std::cos(2 * std::numbers::pi * u2));
}

}  // namespace stockpot
