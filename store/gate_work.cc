// The part of JobWork that lets a variant through to its routes, or does not.
#include <cmath>

#include "store/best_model.h"
#include "store/job_work.h"

namespace stockpot {
namespace {

constexpr int kCommitAttempts = 5;  // when somebody moves RUN@best meanwhile

}  // namespace

Result<GateMeasures> JobWork::MeasureVariant(const PublishRequest& request, const Manifest& variant,
                                             const ProgressFunction& progress) const {
  STOCKPOT_ASSIGN_OR_RETURN(GateMeasures measures, MeasuresOf(variant));
  if (request.source.run.empty()) return measures;
  STOCKPOT_ASSIGN_OR_RETURN(const auto probe, store_.GetProbe(request.source.run));
  if (!probe) return measures;
  STOCKPOT_ASSIGN_OR_RETURN(const ProbeScores scores,
                            ScoreOn(*probe, {&request.source, &variant}, progress));
  measures.probe = {.texts = probe->digest(),
                    .tokens = scores.tokens,
                    .full_loss = scores.models.at(0).loss,
                    .loss = scores.models.at(1).loss,
                    .kl = scores.models.at(1).kl,
                    .top1 = scores.models.at(1).top1};
  return measures;
}

Result<JobWork::GateOutcome> JobWork::PassGate(const PublishRequest& request,
                                               const Manifest& variant,
                                               const ProgressFunction& progress) const {
  GateOutcome outcome;
  const Result<GateMeasures> measures = MeasureVariant(request, variant, progress);
  if (!measures.ok() && IsRetryable(measures.status().code())) {
    return measures.status().WithContext("the gate");
  }
  const Result<GateConfig> config = request.source.run.empty() ? Result<GateConfig>(GateConfig{})
                                                               : store_.GetGate(request.source.run);
  if (measures.ok() && config.ok()) {
    outcome.fields = GateFields(*measures);
    outcome.probe = measures->probe;
    outcome.refusal = Judge(*config, *measures);
  } else {
    const Status& why = measures.ok() ? config.status() : measures.status();
    outcome.refusal = {.metric = "",
                       .measured = "",
                       .limit = "",
                       .reason = "the gate cannot be computed: " + why.message()};
  }
  outcome.fields["gate"] = outcome.refusal ? "refused" : "passed";
  if (!outcome.refusal) return outcome;
  if (!request.force.empty()) {
    outcome.fields["gate"] = "forced";
    outcome.fields["overruled"] = outcome.refusal->reason;
    outcome.fields["force"] = request.force;
    outcome.fields["by"] = request.by;
  }
  return outcome;
}

Status JobWork::Refuse(const Job& job, const PublishRequest& request, const GateOutcome& gate) {
  std::map<std::string, std::string> fields = gate.fields;
  fields["metric"] = gate.refusal->metric;
  fields["measured"] = gate.refusal->measured;
  fields["limit"] = gate.refusal->limit;
  fields["run"] = request.source.run;
  fields["step"] = std::to_string(request.source.step);
  return Fail(job, InvalidArgument(gate.refusal->reason), fields);
}

void JobWork::AddGate(const GateOutcome& gate, const Digest& made, Commit& commit) const {
  for (const auto& [name, value] : gate.fields) commit.events.back().fields[name] = value;
  if (!gate.probe) return;
  const auto add = [&](std::string_view task, const char* metric, double value) {
    if (!std::isfinite(value)) return;
    commit.evals.push_back(
        {made, std::string(task), metric, value, clock_(), ProbeAuthor(gate.probe->texts)});
  };
  add(kProbeTask, "loss", gate.probe->loss);
  add("gate", "kl", gate.probe->kl);
  add("gate", "top1", gate.probe->top1);
  add("gate", "loss_rise", gate.probe->loss - gate.probe->full_loss);
}

Status JobWork::KeepLoss(const Manifest& model, const Digest& artifact, const Digest& probe,
                         double loss) {
  if (HeldOutLoss(store_, artifact, probe) == loss) return OkStatus();  // known, and followed
  STOCKPOT_ASSIGN_OR_RETURN(const Run run, store_.GetRun(model.run));
  Status status;
  for (int attempt = 0; attempt < kCommitAttempts; ++attempt) {
    Commit commit;
    commit.evals.push_back(
        {artifact, std::string(kProbeTask), "loss", loss, clock_(), ProbeAuthor(probe)});
    STOCKPOT_RETURN_IF_ERROR(FollowBest(store_, run, "gate", commit));
    status = store_.Apply(std::move(commit)).status();
    if (status.code() != StatusCode::kAlreadyExists) return status;
  }
  return Unavailable(run.name + "@best keeps moving: " + status.message());
}

}  // namespace stockpot
