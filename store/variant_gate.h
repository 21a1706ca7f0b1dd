// The gate that a variant passes before a route moves to it: is it still the model that was pushed?
//
//   1. structure (store/bitdelta_codec.h, while the variant is made): complete against the base,
//      shapes and dtypes right, finite
//   2. the size of the update: ||W - W_base||_F / ||W_base||_F over the tensors that changed
//   3. the error of each matrix of codec bitdelta, as it is stored (planes, residual and all):
//      ||W - W'||_F^2 / ||W - W_base||_F^2. Of the matrices that hold little of the update none
//      counts: their error moves no output
//   4. where the run has probe texts, on the path that serves (serve/engine/scorer.h): KL and top-1
//      agreement of the full checkpoint and the variant, held-out loss of both
//
// Without probe texts 1 to 3 are all there is: they see a broken or an unsuitable delta, not what
// it does to answers. A measurement that is not a number, or that cannot be computed, refuses.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "store/manifest.h"
#include "store/records.h"
#include "store/scoring.h"

namespace stockpot {

struct GateMeasures {
  double update = 0;
  double error = 0;          // of the worst matrix that counts; 0: none is of codec bitdelta
  std::string error_tensor;  // its name; empty: likewise
  struct Probe {
    Digest texts;                    // ProbeSet::digest
    int64_t tokens = 0;              // scored
    double full_loss = 0, loss = 0;  // nats a token, of the checkpoint and of the variant
    double kl = 0;                   // KL(checkpoint || variant), nats a token
    double top1 = 0;                 // share of tokens on whose most likely successor they agree
  };
  std::optional<Probe> probe;
};

// A matrix counts for the gate if its ||delta||_F^2 is at least this share of the mean one.
inline constexpr double kGateEnergyShare = 0.1;

// 2 and 3, from the attributes that BuildVariant left. InvalidArgument: they are not there.
Result<GateMeasures> MeasuresOf(const Manifest& variant);
// The fields of events: update, error, error_tensor and, where it was probed, probe, tokens,
// full_loss, loss, kl, top1.
std::map<std::string, std::string> GateFields(const GateMeasures& measures);

struct GateRefusal {
  std::string metric;  // "kl", "top1", "loss_rise", "update", "error"; "": none could be computed
  std::string measured;
  std::string limit;
  std::string reason;  // for a person; names all that is not within its limit
};
// Null: it passes. Pure function.
std::optional<GateRefusal> Judge(const GateConfig& config, const GateMeasures& measures);

// InvalidArgument names a limit that is out of range.
Status CheckGate(const GateConfig& config);

// At most 17 digits, reads back exactly; "nan", "inf".
std::string ExactNumber(double value);

}  // namespace stockpot
