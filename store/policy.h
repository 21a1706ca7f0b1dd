// What follows from a commit: which checkpoint is the best, which jobs a new one causes, which
// routes a published one moves. Pure functions over records; the caller puts the outcome in the
// same commit.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "store/records.h"

namespace stockpot {

// The best of the checkpoints in `steps` by the run's metric (RunConfig::best_metric); ties go to
// the earlier step; steps without the metric and deleted ones do not count. Null: none. Points into
// `steps`.
const StepRecord* BestStep(const RunConfig& config, const std::vector<StepRecord>& steps);

// Likewise of the checkpoints and merges: what RUN@best is.
const StepRecord* BestModel(const RunConfig& config, const std::vector<StepRecord>& steps);

// The jobs a new checkpoint causes: a merge of {it, the best previous one} when
// step % merge_every == 0 (the latest previous one where no step has the metric; none without a
// previous one), and a publish according to the run's policy. Where neither scores it on the run's
// probe texts (`probe`, their digest, if it has any) a job that does. `previous`: the run's earlier
// steps.
std::vector<Job> JobsForCheckpoint(const Run& run, const StepRecord& checkpoint,
                                   const std::vector<StepRecord>& previous,
                                   const std::optional<Digest>& probe = std::nullopt);

// The jobs a finished merge causes (publish, by policy).
std::vector<Job> JobsForMerge(const Run& run, const StepRecord& merge);

// The options that a run's own merges have: of its configuration, what its method uses.
MergeOptions MergeOptionsOf(const RunConfig& config);

// key "publish/<artifact hex>/<codec>/<name>"; args artifact, codec, name ("": the default route).
// An option that is no default is an argument of its own, and in the key beside the codec:
// "publish/<artifact hex>/auto+planes=2+max_bytes=1000/<name>". Numbers read back exactly.
Job MakePublishJob(const Digest& artifact, PublishCodec codec, const std::string& route_name,
                   const PublishOptions& options = {});
// One that the gate measures and does not stop. key "publish_forced/..."; args also force (why) and
// by (who).
Job MakeForcedPublishJob(const Digest& artifact, PublishCodec codec, const std::string& route_name,
                         const std::string& why, const std::string& by,
                         const PublishOptions& options = {});

// InvalidArgument names the option that is out of range, or that the method does not use, or that
// does not fit so many parents.
Status CheckMergeOptions(const MergeOptions& options, size_t parents);

// key "merge/<run>/<step>/<12 hex digits>", a hash of the sorted parents and the options; args run,
// step, parents (hex digests in the given order, joined by ','), method, weights (by ',', or empty),
// energy, rank, force ("true" or "false"), spectral. Numbers read back exactly.
Job MakeMergeJob(const std::string& run, int64_t step, const std::vector<Digest>& parents,
                 const MergeOptions& options);

// key "expire/<run>"; args run. Applies the run's retention, then collects garbage. Queued by every
// checkpoint of a run that has rules, in the commit of the checkpoint: never before it.
Job MakeExpireJob(const std::string& run);

// key "compress/<run>"; args run: CheckpointStore::CompressHistory of a run. With an artifact: key
// "compress/<run>/<artifact hex>", args run, artifact.
Job MakeCompressJob(const std::string& run, const std::optional<Digest>& artifact = std::nullopt);

// key "score/<artifact hex>/<12 hex digits of the probe texts>"; args artifact.
Job MakeScoreJob(const Digest& artifact, const Digest& probe);

// Where a variant of `source` answers: the given name, or by default
//   checkpoint: RUN@STEP, RUN@latest (if no newer step is served), RUN@best (if it is the best)
//   merge:      RUN@STEP.merge, RUN@best (likewise)
//   dense codec: RUN@STEP.full, RUN@STEP.merge.full
// `latest_served_step`: step behind the route RUN@latest now, -1 if none.
std::vector<std::string> RouteNamesFor(const StepRecord& source, PublishCodec codec,
                                       const std::string& given_name, int64_t latest_served_step,
                                       bool is_best);

}  // namespace stockpot
