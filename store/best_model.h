// Which model of a run is the best one, once evaluations count: RUN@best and what follows when it
// moves. The metric is the run's (RunConfig::best_metric): as a step brought it, or, where the step
// did not, the newest evaluation of that TASK/METRIC. Of evaluations on probe texts only those on
// the run's present texts count: losses on different texts do not compare.
//
// A merge becomes the best only by such an evaluation: no trainer reports a metric of it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "store/checkpoint_store.h"

namespace stockpot {

// Gives the steps that lack the run's metric the value of their evaluations; `pending` ones count
// as if they were committed, and as the newest.
Status AddEvaluatedMetric(const CheckpointStore& store, const Run& run,
                          std::span<const Eval> pending, std::vector<StepRecord>& steps);

// Adds to `commit` what its own evaluations and steps, committed now, do to RUN@best: the name's
// move by compare-and-set, its event, and, where the run publishes by itself, the publish job that
// lets the route follow. Nothing where the best stays. A commit that loses the race for the name is
// AlreadyExists: make it anew. `by`: who moved it.
Status FollowBest(const CheckpointStore& store, const Run& run, const std::string& by,
                  Commit& commit);

// The newest held-out loss of an artifact on these texts. Null: nobody measured it.
std::optional<double> HeldOutLoss(const CheckpointStore& store, const Digest& artifact,
                                  const Digest& probe);

}  // namespace stockpot
