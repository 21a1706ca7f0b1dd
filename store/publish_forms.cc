#include "store/publish_forms.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace stockpot {
namespace {

// Relative squared error of the signs over which a larger, exact form is taken: a tenth of the
// elements changed gives about 0.93 for one bit, a dense update 0.36 to 0.5.
constexpr double kOneBitMaxError = 0.9;
// Codec auto where nothing is asked for: one bit's error on a Gaussian update is 0.363.
constexpr double kAutoMaxError = 0.4;
constexpr int64_t kAutoPlanes = 4;

double RelativeLeft(const Candidate& form, const DeltaStats& stats) {
  return stats.sum_square == 0 ? 0 : form.left / stats.sum_square;
}

}  // namespace

WaysToEncode WaysOf(const PublishForms& how, const TensorEntry& entry, TensorRole role,
                    bool has_base, const WeightMatrix& tuned) {
  const bool is_auto = how.codec == PublishCodec::kAuto;
  const bool is_matrix = how.codec != PublishCodec::kDense && entry.shape.size() == 2;
  WaysToEncode ways;
  ways.sparse = is_matrix && has_base;
  const bool block = role == TensorRole::kBlockLinear;
  ways.signs = is_matrix && how.codec != PublishCodec::kSparse &&
               (block || (is_auto && role == TensorRole::kTable && has_base));
  ways.planes = how.options.planes > 0 ? how.options.planes : is_auto ? kAutoPlanes : 1;
  if (block) ways.ranks = RanksUpTo(how.options.residual_rank, tuned);
  if (!is_auto && !ways.ranks.empty()) ways.ranks.erase(ways.ranks.begin(), ways.ranks.end() - 1);
  if (!is_auto) ways.ranks_from = ways.planes;
  return ways;
}

Candidate FixedForm(PublishCodec codec, TensorRole role, const DeltaStats& stats,
                    const std::vector<Candidate>& candidates, const Candidate& raw) {
  const bool has_sparse = !candidates.empty() && candidates.front().codec == Codec::kSparse;
  const bool has_signs = !candidates.empty() && candidates.back().codec == Codec::kBitDelta;
  int64_t exact_limit = codec == PublishCodec::kSparse ? raw.bytes - 1 : raw.bytes / 2;
  if (has_signs) {
    const Candidate& signs = candidates.back();
    const double error =
        signs.planes == 1 && signs.rank == 0 ? stats.OneBitError() : RelativeLeft(signs, stats);
    if (error <= kOneBitMaxError) exact_limit = signs.bytes;
  }
  if (has_sparse && candidates.front().bytes <= exact_limit) return candidates.front();
  return has_signs && role == TensorRole::kBlockLinear ? candidates.back() : raw;
}

ChoiceLimits LimitsOf(const PublishOptions& options, int64_t logical_bytes, int64_t fixed_bytes,
                      double update_square) {
  ChoiceLimits limits{.bytes = {}, .fixed_bytes = fixed_bytes, .left = {}};
  if (options.max_bytes > 0) limits.bytes = options.max_bytes;
  if (options.max_share > 0) {
    const auto share = static_cast<int64_t>(options.max_share * static_cast<double>(logical_bytes));
    limits.bytes = std::min(limits.bytes.value_or(share), share);
  }
  const bool no_limit = !limits.bytes && options.max_error < 0;
  const double max_error = no_limit ? kAutoMaxError : options.max_error;
  if (max_error >= 0) limits.left = max_error * update_square;
  return limits;
}

double SixDigits(double value) {
  if (value == 0 || !std::isfinite(value)) return 0;
  const double scale = std::pow(10.0, 5 - std::floor(std::log10(std::fabs(value))));
  return std::round(value * scale) / scale;
}

nlohmann::json FactsOf(TensorRole role, const DeltaStats& stats, const Candidate& form,
                       const Candidate* next) {
  const double changed = static_cast<double>(stats.changed) /
                         static_cast<double>(std::max<int64_t>(1, stats.elements));
  nlohmann::json facts = {{"role", TensorRoleName(role)},
                          {"codec", CodecName(form.codec)},
                          {"bytes", form.bytes},
                          {"changed", SixDigits(changed)},
                          {"delta", SixDigits(std::sqrt(stats.sum_square))},
                          {"error", SixDigits(stats.OneBitError())}};
  const auto say = [&](nlohmann::json& out, const Candidate& of) {
    if (of.planes > 1) out["planes"] = of.planes;
    if (of.rank > 0) out["rank"] = of.rank;
    if (of.codec == Codec::kBitDelta) out["row_error"] = SixDigits(RelativeLeft(of, stats));
  };
  say(facts, form);
  if (next == nullptr) return facts;
  nlohmann::json better = {{"codec", CodecName(next->codec)}, {"bytes", next->bytes}};
  say(better, *next);
  facts["next"] = std::move(better);
  return facts;
}

}  // namespace stockpot
