#include "store/variant_gate.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

namespace stockpot {
namespace {

using nlohmann::json;

constexpr std::string_view kTensorAttribute = "tensor/";

struct MatrixFacts {
  std::string name;
  double energy = 0;  // ||delta||_F^2
  double error = 0;   // share of it that the variant does not have
};

// Facts of a variant's matrices of codec bitdelta.
Result<std::vector<MatrixFacts>> OneBitMatrices(const Manifest& variant) {
  std::vector<MatrixFacts> matrices;
  for (const TensorEntry& entry : variant.tensors) {
    if (entry.codec != Codec::kBitDelta) continue;
    const auto it = variant.attributes.find(std::string(kTensorAttribute) + entry.name);
    const json facts =
        it == variant.attributes.end() ? json() : json::parse(it->second, nullptr, false);
    const auto number = [&](const char* key) {
      return facts.is_object() && facts.contains(key) && facts[key].is_number()
                 ? facts[key].get<double>()
                 : std::nan("");
    };
    const double delta = number("delta");
    matrices.push_back({entry.name, delta * delta, number("row_error")});
    if (!std::isfinite(matrices.back().energy) || !std::isfinite(matrices.back().error)) {
      return InvalidArgument("tensor '" + entry.name + "': nothing says how good its one bit is");
    }
  }
  return matrices;
}

std::string Short(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

// Collects what is not within its limit; a NaN never is.
class Verdict {
 public:
  void AtMost(const char* metric, double measured, double limit, const std::string& what) {
    if (!(measured <= limit)) Refuse(metric, measured, limit, what, "over");
  }
  void AtLeast(const char* metric, double measured, double limit, const std::string& what) {
    if (!(measured >= limit)) Refuse(metric, measured, limit, what, "under");
  }
  std::optional<GateRefusal> refusal;

 private:
  void Refuse(const char* metric, double measured, double limit, const std::string& what,
              const char* side) {
    const std::string text = what + " is " + Short(measured) + ", " + side + " the limit " +
                             Short(limit) + " (" + metric + ")";
    if (refusal) {
      refusal->reason += "; " + text;
    } else {
      refusal = {metric, ExactNumber(measured), ExactNumber(limit), "the gate: " + text};
    }
  }
};

}  // namespace

std::string ExactNumber(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return {text, end};
}

Result<GateMeasures> MeasuresOf(const Manifest& variant) {
  GateMeasures measures;
  const auto update = variant.attributes.find("update");
  if (update == variant.attributes.end()) {
    return InvalidArgument("nothing says how large the update is");
  }
  const std::string& text = update->second;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), measures.update);
  if (error != std::errc() || end != text.data() + text.size()) {
    return InvalidArgument("the size of the update is no number");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<MatrixFacts> matrices, OneBitMatrices(variant));
  double energy = 0;
  for (const MatrixFacts& matrix : matrices) energy += matrix.energy;
  const double least = kGateEnergyShare * energy / static_cast<double>(matrices.size());
  for (const MatrixFacts& matrix : matrices) {
    if (matrix.energy < least || matrix.error < measures.error) continue;
    measures.error = matrix.error;
    measures.error_tensor = matrix.name;
  }
  return measures;
}

std::map<std::string, std::string> GateFields(const GateMeasures& measures) {
  std::map<std::string, std::string> fields = {{"update", ExactNumber(measures.update)}};
  if (!measures.error_tensor.empty()) {
    fields["error"] = ExactNumber(measures.error);
    fields["error_tensor"] = measures.error_tensor;
  }
  if (measures.probe) {
    fields["probe"] = measures.probe->texts.ShortHex();
    fields["tokens"] = std::to_string(measures.probe->tokens);
    fields["full_loss"] = ExactNumber(measures.probe->full_loss);
    fields["loss"] = ExactNumber(measures.probe->loss);
    fields["kl"] = ExactNumber(measures.probe->kl);
    fields["top1"] = ExactNumber(measures.probe->top1);
  }
  return fields;
}

std::optional<GateRefusal> Judge(const GateConfig& config, const GateMeasures& measures) {
  Verdict verdict;
  if (measures.probe) {
    const GateMeasures::Probe& probe = *measures.probe;
    verdict.AtMost("kl", probe.kl, config.max_kl, "the KL of the checkpoint and the variant");
    verdict.AtLeast("top1", probe.top1, config.min_top1, "their top-1 agreement");
    verdict.AtMost("loss_rise", probe.loss - probe.full_loss, config.max_loss_rise,
                   "the held-out loss of the variant (" + Short(probe.loss) +
                       ") over the checkpoint's (" + Short(probe.full_loss) + ")");
  }
  verdict.AtMost("update", measures.update, config.max_update, "the relative size of the update");
  verdict.AtLeast("update", measures.update, config.min_update, "the relative size of the update");
  if (!measures.error_tensor.empty()) {
    verdict.AtMost("error", measures.error, config.max_error,
                   "the error of '" + measures.error_tensor + "'");
  }
  return std::move(verdict.refusal);
}

Status CheckGate(const GateConfig& config) {
  const auto in_range = [](double value, double least, double most, const char* what) {
    if (value >= least && value <= most) return OkStatus();
    return InvalidArgument(std::string("the gate's ") + what + " must be " + Short(least) + ".." +
                           Short(most));
  };
  STOCKPOT_RETURN_IF_ERROR(in_range(config.max_kl, 0, kGateNoLimit, "max_kl"));
  STOCKPOT_RETURN_IF_ERROR(in_range(config.min_top1, 0, 1, "min_top1"));
  STOCKPOT_RETURN_IF_ERROR(
      in_range(config.max_loss_rise, -kGateNoLimit, kGateNoLimit, "max_loss_rise"));
  STOCKPOT_RETURN_IF_ERROR(in_range(config.max_update, 0, kGateNoLimit, "max_update"));
  STOCKPOT_RETURN_IF_ERROR(in_range(config.min_update, 0, config.max_update, "min_update"));
  return in_range(config.max_error, 0, 1, "max_error");
}

}  // namespace stockpot
