// The part of JobWork that measures models: held-out loss, and what follows from it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "store/best_model.h"
#include "store/job_arguments.h"
#include "store/job_work.h"

namespace stockpot {
namespace {

constexpr std::string_view kMergeTask = "merge";  // evaluations of a merge beside its parents
constexpr int kCommitAttempts = 5;                // when somebody moves RUN@best meanwhile

Result<Digest> ArtifactOf(const Job& job) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string hex, Argument(job, "artifact"));
  return Digest::FromHex(hex);
}

}  // namespace

Result<ProbeScores> JobWork::ScoreOn(const ProbeSet& probe,
                                     const std::vector<const Manifest*>& models,
                                     const ProgressFunction& progress) const {
  if (score_ == nullptr) return InvalidArgument("no model is served here that could be scored");
  ScoreRequest request;
  for (const Manifest* model : models) request.base = *model->base;
  for (const ProbeSet::Text& text : probe.texts) request.texts.push_back(text.text);
  // As the endpoint would serve them: what is no variant yet, exactly.
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest base, store_.GetManifest(request.base));
  std::vector<Manifest> variants;
  variants.reserve(models.size());
  for (const Manifest* model : models) {
    variants.push_back(model->kind == ArtifactKind::kVariant ? *model
                                                             : DenseVariantOf(*model, base));
    request.models.push_back(&variants.back());
  }
  return score_(request, progress);
}

Result<double> JobWork::MeasureLoss(const ProbeSet& probe, const Manifest& model,
                                    const ProgressFunction& progress) const {
  STOCKPOT_ASSIGN_OR_RETURN(const ProbeScores scores, ScoreOn(probe, {&model}, progress));
  if (std::isfinite(scores.models[0].loss)) return scores.models[0].loss;
  return InvalidArgument("the held-out loss is not finite: the model computes NaN or infinities");
}

bool JobWork::ScoreStands(const Job& job) const {
  const Result<Digest> artifact = ArtifactOf(job);
  if (!artifact.ok()) return false;
  const Result<Manifest> manifest = store_.GetManifest(*artifact);
  if (!manifest.ok()) return false;
  const auto probe = store_.GetProbe(manifest->run);
  return probe.ok() && *probe && HeldOutLoss(store_, *artifact, (*probe)->digest()).has_value();
}

Status JobWork::Score(const Job& job, const ProgressFunction& progress) {
  STOCKPOT_ASSIGN_OR_RETURN(const Digest artifact, ArtifactOf(job));
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(artifact));
  if (manifest.run.empty() || manifest.kind == ArtifactKind::kState) {
    return InvalidArgument("artifact " + artifact.ShortHex() + " is no model of a run");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Run run, store_.GetRun(manifest.run));
  STOCKPOT_ASSIGN_OR_RETURN(const std::optional<ProbeSet> probe, store_.GetProbe(run.name));
  if (!probe) {
    return InvalidArgument("run '" + run.name + "' has no probe texts: `stockpot probe set`");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const ProbeScores scores, ScoreOn(*probe, {&manifest}, progress));
  const double loss = scores.models[0].loss;
  if (!std::isfinite(loss)) {
    return InvalidArgument("the held-out loss is not finite: the model computes NaN or infinities");
  }
  const Digest set = probe->digest();
  Status status;
  for (int attempt = 0; attempt < kCommitAttempts; ++attempt) {
    Commit commit;
    commit.evals.push_back(
        {artifact, std::string(kProbeTask), "loss", loss, clock_(), ProbeAuthor(set)});
    commit.jobs.push_back(Finished(job, artifact));
    commit.events.push_back({.type = "score",
                             .subject = artifact.Hex(),
                             .fields = {{"artifact", artifact.Hex()},
                                        {"run", run.name},
                                        {"step", std::to_string(manifest.step)},
                                        {"probe", set.ShortHex()},
                                        {"tokens", std::to_string(scores.tokens)},
                                        {"loss", ExactNumber(loss)},
                                        {"job", job.key}}});
    STOCKPOT_RETURN_IF_ERROR(FollowBest(store_, run, "score", commit));
    status = store_.Apply(std::move(commit)).status();
    if (status.code() != StatusCode::kAlreadyExists) return status;
  }
  return Unavailable(run.name + "@best keeps moving: " + status.message());
}

Result<JobWork::MergeScores> JobWork::ScoreMerge(const MergeArguments& args, const Manifest& merged,
                                                 const ProgressFunction& progress) {
  MergeScores scores;
  STOCKPOT_ASSIGN_OR_RETURN(const std::optional<ProbeSet> probe, store_.GetProbe(args.run));
  if (!probe) return scores;
  const Status status = MeasureMerge(args, merged, *probe, progress, scores);
  if (status.ok()) return scores;
  if (IsRetryable(status.code())) return status.WithContext("scoring the merge");
  // It stands beside its parents all the same; without a score it is nobody's best, and the gate
  // refuses what it cannot measure.
  MergeScores none;
  none.fields["unscored"] = status.message();
  return none;
}

Status JobWork::MeasureMerge(const MergeArguments& args, const Manifest& merged,
                             const ProbeSet& probe, const ProgressFunction& progress,
                             MergeScores& scores) {
  const Digest set = probe.digest();
  const auto keep = [&](const Digest& artifact, std::string_view task, const char* metric,
                        double value) {
    scores.evals.push_back(
        {artifact, std::string(task), metric, value, clock_(), ProbeAuthor(set)});
  };
  STOCKPOT_ASSIGN_OR_RETURN(const double loss, MeasureLoss(probe, merged, progress));
  const Digest made = merged.digest();
  keep(made, kProbeTask, "loss", loss);
  double best_parent = std::numeric_limits<double>::infinity();
  std::string parent_losses;
  for (const Digest& parent : args.parents) {
    std::optional<double> parent_loss = HeldOutLoss(store_, parent, set);
    if (!parent_loss) {
      STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(parent));
      STOCKPOT_ASSIGN_OR_RETURN(parent_loss, MeasureLoss(probe, manifest, progress));
      if (parent != made) keep(parent, kProbeTask, "loss", *parent_loss);
    }
    best_parent = std::min(best_parent, *parent_loss);
    parent_losses += (parent_losses.empty() ? "" : ",") + ExactNumber(*parent_loss);
  }
  const bool is_mean = args.options.method == MergeMethod::kMean && args.options.weights.empty();
  double mean_loss = loss;
  if (!is_mean) {
    leftovers_ = true;
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest mean,
                              merge_(store_, args.parents, args.run, args.step,
                                     {.method = MergeMethod::kMean}, progress));
    STOCKPOT_ASSIGN_OR_RETURN(mean_loss, MeasureLoss(probe, mean, progress));
  }
  keep(made, kMergeTask, "best_parent_loss", best_parent);
  keep(made, kMergeTask, "mean_loss", mean_loss);
  scores.worse = loss > best_parent;
  scores.fields = {{"probe", set.ShortHex()},
                   {"loss", ExactNumber(loss)},
                   {"parent_losses", parent_losses},
                   {"best_parent_loss", ExactNumber(best_parent)},
                   {"mean_loss", ExactNumber(mean_loss)}};
  return OkStatus();
}

}  // namespace stockpot
