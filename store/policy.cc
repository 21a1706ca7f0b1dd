#include "store/policy.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace stockpot {
namespace {

// Null: the step does not have the metric, or not as a number.
const double* FindMetric(const StepRecord& step, const std::string& metric) {
  const auto it = step.metrics.find(metric);
  if (it == step.metrics.end() || !std::isfinite(it->second)) return nullptr;
  return &it->second;
}

const StepRecord* BestOf(const RunConfig& config, const std::vector<StepRecord>& steps,
                         bool merges) {
  const StepRecord* best = nullptr;
  double best_value = 0;
  for (const StepRecord& step : steps) {
    const double* metric = FindMetric(step, config.best_metric);
    const bool counts = step.kind == ArtifactKind::kCheckpoint ||
                        (merges && step.kind == ArtifactKind::kMerge);
    if (!counts || step.deleted || metric == nullptr) continue;
    const bool wins = best == nullptr ||
                      (config.best_is_lower ? *metric < best_value : *metric > best_value) ||
                      (*metric == best_value && step.step < best->step);
    if (!wins) continue;
    best = &step;
    best_value = *metric;
  }
  return best;
}

std::string ExactDouble(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

}  // namespace

const StepRecord* BestStep(const RunConfig& config, const std::vector<StepRecord>& steps) {
  return BestOf(config, steps, /*merges=*/false);
}

const StepRecord* BestModel(const RunConfig& config, const std::vector<StepRecord>& steps) {
  return BestOf(config, steps, /*merges=*/true);
}

std::vector<Job> JobsForCheckpoint(const Run& run, const StepRecord& checkpoint,
                                   const std::vector<StepRecord>& previous,
                                   const std::optional<Digest>& probe) {
  // A checkpoint that arrives late does not merge with what came after it.
  std::vector<StepRecord> earlier;
  for (const StepRecord& step : previous) {
    if (step.kind == ArtifactKind::kCheckpoint && !step.deleted && step.step < checkpoint.step) {
      earlier.push_back(step);
    }
  }
  std::vector<Job> jobs;
  const RunConfig& config = run.config;
  if (config.merge_every > 0 && checkpoint.step % config.merge_every == 0 && !earlier.empty()) {
    const StepRecord* partner = BestStep(config, earlier);
    if (partner == nullptr) {
      partner = &*std::max_element(earlier.begin(), earlier.end(),
                                   [](const auto& a, const auto& b) { return a.step < b.step; });
    }
    jobs.push_back(MakeMergeJob(run.name, checkpoint.step,
                                {checkpoint.artifact, partner->artifact},
                                MergeOptionsOf(config)));
  }
  bool publish = config.publish == PublishPolicy::kEvery;
  if (config.publish == PublishPolicy::kBest) {
    std::vector<StepRecord> all = previous;
    all.push_back(checkpoint);
    const StepRecord* best = BestModel(config, all);
    publish = best != nullptr && best->artifact == checkpoint.artifact;
  }
  if (publish) {
    jobs.push_back(MakePublishJob(checkpoint.artifact, config.publish_codec, "",
                                  config.publish_options));
  }
  if (probe && jobs.empty()) jobs.push_back(MakeScoreJob(checkpoint.artifact, *probe));
  return jobs;
}

std::vector<Job> JobsForMerge(const Run& run, const StepRecord& merge) {
  const PublishPolicy policy = run.config.publish;
  if (policy != PublishPolicy::kEvery && policy != PublishPolicy::kMerges) return {};
  return {MakePublishJob(merge.artifact, run.config.publish_codec, "",
                         run.config.publish_options)};
}

MergeOptions MergeOptionsOf(const RunConfig& config) {
  MergeOptions options{.method = config.merge_method};
  if (options.method == MergeMethod::kMonoSoup) {
    options.energy = config.merge_energy;
    options.rank = config.merge_rank;
  }
  if (options.method == MergeMethod::kMonoSoupSpectral) options.spectral = config.merge_spectral;
  return options;
}

Job MakePublishJob(const Digest& artifact, PublishCodec codec, const std::string& route_name,
                   const PublishOptions& options) {
  Job job;
  job.kind = JobKind::kPublish;
  job.args = {{"artifact", artifact.Hex()},
              {"codec", std::string(PublishCodecName(codec))},
              {"name", route_name}};
  const PublishOptions defaults;
  std::string how = job.args["codec"];
  const auto add = [&](const std::string& name, const std::string& value, bool is_default) {
    if (is_default) return;
    job.args[name] = value;
    how += "+" + name + "=" + value;
  };
  add("alpha", std::string(AlphaMethodName(options.alpha)), options.alpha == defaults.alpha);
  add("planes", std::to_string(options.planes), options.planes == defaults.planes);
  add("residual_rank", std::to_string(options.residual_rank),
      options.residual_rank == defaults.residual_rank);
  add("max_bytes", std::to_string(options.max_bytes), options.max_bytes == defaults.max_bytes);
  add("max_share", ExactDouble(options.max_share), options.max_share == defaults.max_share);
  add("max_error", ExactDouble(options.max_error), options.max_error == defaults.max_error);
  job.key = "publish/" + job.args["artifact"] + "/" + how + "/" + route_name;
  return job;
}

Job MakeForcedPublishJob(const Digest& artifact, PublishCodec codec, const std::string& route_name,
                         const std::string& why, const std::string& by,
                         const PublishOptions& options) {
  Job job = MakePublishJob(artifact, codec, route_name, options);
  job.key.replace(0, std::string_view("publish").size(), "publish_forced");
  job.args["force"] = why;
  job.args["by"] = by;
  return job;
}

Status CheckMergeOptions(const MergeOptions& options, size_t parents) {
  const MergeOptions defaults;
  const auto unused = [&](const char* option) {
    return InvalidArgument(std::string(option) + " is no option of the method " +
                           std::string(MergeMethodName(options.method)));
  };
  if (!(options.energy > 0 && options.energy <= 1)) {
    return InvalidArgument("energy " + std::to_string(options.energy) + " is not in (0, 1]");
  }
  if (options.rank < 0) {
    return InvalidArgument("rank " + std::to_string(options.rank) +
                           " is negative: 0 goes by energy");
  }
  if (!(options.spectral >= 0 && options.spectral <= 1)) {
    return InvalidArgument("spectral " + std::to_string(options.spectral) + " is not in [0, 1]");
  }
  if (options.method != MergeMethod::kMonoSoup &&
      (options.energy != defaults.energy || options.rank != 0 || options.force)) {
    return unused("energy, rank or force");
  }
  if (options.method != MergeMethod::kMonoSoupSpectral && options.spectral != 0) {
    return unused("spectral");
  }
  if (options.weights.empty()) return OkStatus();
  if (options.method != MergeMethod::kMean) return unused("weights");
  if (options.weights.size() != parents) {
    return InvalidArgument(std::to_string(options.weights.size()) + " weights for " +
                           std::to_string(parents) + " parents");
  }
  double sum = 0;
  for (const double weight : options.weights) {
    if (!(weight >= 0)) return InvalidArgument("a weight is negative or no number");
    sum += weight;
  }
  if (!(sum > 0) || !std::isfinite(sum)) return InvalidArgument("the weights add up to nothing");
  return OkStatus();
}

Job MakeMergeJob(const std::string& run, int64_t step, const std::vector<Digest>& parents,
                 const MergeOptions& options) {
  Job job;
  job.kind = JobKind::kMerge;
  std::string joined, weights;
  for (const Digest& parent : parents) joined += (joined.empty() ? "" : ",") + parent.Hex();
  for (const double w : options.weights) weights += (weights.empty() ? "" : ",") + ExactDouble(w);
  job.args = {{"run", run},
              {"step", std::to_string(step)},
              {"parents", joined},
              {"method", std::string(MergeMethodName(options.method))},
              {"weights", weights},
              {"energy", ExactDouble(options.energy)},
              {"rank", std::to_string(options.rank)},
              {"force", options.force ? "true" : "false"},
              {"spectral", ExactDouble(options.spectral)}};
  // The same parents (with their weights) in another order make the same merge; other options make
  // another one.
  std::vector<std::string> sorted;
  for (size_t i = 0; i < parents.size(); ++i) {
    sorted.push_back(parents[i].Hex());
    if (i < options.weights.size()) sorted.back() += "*" + ExactDouble(options.weights[i]);
  }
  std::sort(sorted.begin(), sorted.end());
  std::string made = job.args["energy"] + "/" + job.args["rank"] + "/" + job.args["force"];
  for (const std::string& parent : sorted) made += "/" + parent;
  // Nothing for the first method: jobs of before there were others keep their keys.
  if (options.method != MergeMethod::kMonoSoup) {
    made += "/" + job.args["method"] + "/" + job.args["spectral"];
  }
  job.key = "merge/" + run + "/" + std::to_string(step) + "/" + Sha256(made).ShortHex();
  return job;
}

Job MakeExpireJob(const std::string& run) {
  return {.key = "expire/" + run, .kind = JobKind::kExpire, .args = {{"run", run}}};
}

Job MakeCompressJob(const std::string& run, const std::optional<Digest>& artifact) {
  Job job{.key = "compress/" + run, .kind = JobKind::kCompress, .args = {{"run", run}}};
  if (!artifact) return job;
  job.args["artifact"] = artifact->Hex();
  job.key += "/" + artifact->Hex();
  return job;
}

Job MakeScoreJob(const Digest& artifact, const Digest& probe) {
  return {.key = "score/" + artifact.Hex() + "/" + probe.ShortHex(),
          .kind = JobKind::kScore,
          .args = {{"artifact", artifact.Hex()}}};
}

std::vector<std::string> RouteNamesFor(const StepRecord& source, PublishCodec codec,
                                       const std::string& given_name, int64_t latest_served_step,
                                       bool is_best) {
  if (!given_name.empty()) return {given_name};
  std::string name = source.run + "@" + std::to_string(source.step);
  const bool is_merge = source.kind == ArtifactKind::kMerge;
  if (is_merge) name += ".merge";
  if (codec == PublishCodec::kDense) return {name + ".full"};
  std::vector<std::string> names = {name};
  if (!is_merge && source.step >= latest_served_step) names.push_back(source.run + "@latest");
  if (is_best) names.push_back(source.run + "@best");
  return names;
}

}  // namespace stockpot
