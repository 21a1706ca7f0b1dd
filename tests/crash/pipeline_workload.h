// A training run in small, through the doors that the daemon uses: sessions of Ingest, jobs of the
// Pipeline (publish of every step, merges, retention and collection of garbage). The weights of a
// step follow from its number, so whoever checks needs no word of who wrote.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "store/checkpoint_store.h"
#include "store/ingest.h"
#include "store/pipeline.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot::crash {

inline constexpr char kRun[] = "crash";
inline constexpr char kBase[] = "crash-base";

// A Llama of one layer whose embeddings and MLP are chunks of packs and whose rest is inline.
class StepModels {
 public:
  StepModels();
  const TestModel& base() const { return base_; }
  TestModel At(int64_t step) const;  // the base plus noise

 private:
  TestModel base_;
};

// The metric falls and rises: RUN@best moves and rests.
inline double Loss(int64_t step) { return static_cast<double>((step * 37) % 101); }

// What somebody was told is stored.
struct Acknowledged {
  std::map<int64_t, Digest> steps;
  std::map<std::string, Digest> routes;  // those that do not move
};

class Workload {
 public:
  struct Options {
    MergeFunction merge;      // null: no merges
    int64_t merge_every = 0;  // steps
    std::shared_ptr<Failpoints> failpoints;
  };
  // Opens the store, no pipeline yet. `models` must outlive it.
  static Result<std::unique_ptr<Workload>> Open(const std::filesystem::path& directory,
                                                const StepModels& models, Options options);

  // Base, run and rules, unless they are there.
  Status Prepare();
  void StartPipeline();
  void StopPipeline() { pipeline_.reset(); }
  int64_t NextStep() const;
  Result<Digest> Save(int64_t step);
  // Publishes by hand, under a name of its own; returns the variant.
  Result<Digest> Publish(int64_t step, const std::string& name);
  // All jobs are done; one that failed is an error.
  Status WaitForJobs();
  // Takes away the routes of steps before `step`, so that their variants can go.
  Status Unpublish(int64_t before_step);

  CheckpointStore& store() { return *store_; }

 private:
  Workload(const StepModels& models, Options options);
  Result<CommitReply> Send(const SessionRequest& request, const TensorSource& model,
                           std::map<std::string, double> metrics);

  const StepModels& models_;
  const Options options_;
  std::unique_ptr<CheckpointStore> store_;
  std::unique_ptr<Ingest> ingest_;
  std::unique_ptr<Pipeline> pipeline_;
};

// That everything acknowledged is there, complete and bit for bit what was sent, but for what the
// rules purged (it leaves `acknowledged`); that every name resolves to a complete artifact, every
// finished job's outcome is there, events have no gap. An error says what is not so. `deep`: every
// artifact, and a scrub.
Status CheckStore(const CheckpointStore& store, const StepModels& models,
                  Acknowledged& acknowledged, bool deep);

// As a client does: again, while it may succeed unchanged.
Status Retry(const std::function<Status()>& body);

}  // namespace stockpot::crash
