// Waits until the base is imported, loads it, and brings up what serves it: engine, variant cache,
// router, text assets. One base for the life of the process.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "serve/engine/engine.h"
#include "serve/engine/scorer.h"
#include "serve/http/serving_model.h"
#include "serve/http/text_assets.h"
#include "serve/variants/router.h"
#include "serve/variants/variant_cache.h"
#include "store/calibration.h"
#include "store/checkpoint_store.h"
#include "store/scoring.h"

namespace stockpot {

struct ModelHostOptions {
  std::string base;  // name; empty: the first base imported
  int threads = 1;
  EngineLimits engine;
  VariantCache::Options cache;
  double distill_seconds = 300;  // of computing, for the scales of one variant
  int64_t distill_steps = 200;
};

// Thread promise: any thread.
class ModelHost {
 public:
  // `on_ready` is called once, from the host's thread, when the model can answer; what it is given lives
  // as long as the host. `store` must outlive the host.
  ModelHost(const CheckpointStore& store, ModelHostOptions options,
            std::function<void(std::shared_ptr<ServingModel>)> on_ready);
  ~ModelHost();
  ModelHost(const ModelHost&) = delete;
  ModelHost& operator=(const ModelHost&) = delete;

  struct State {
    std::string base;    // name, once known
    std::string phase;   // "missing", "loading", "ready", "failed: <reason>"
  };
  State state() const;
  // Null until ready.
  const Router* router() const;

  // As store/scoring.h: beside the engine, over its base, on threads of low priority. Waits while
  // the base is being loaded. Texts are tokenised by the base, without special tokens around them.
  Result<ProbeScores> Score(const ScoreRequest& request, const ProgressFunction& progress);

  // As store/calibration.h, likewise.
  Result<Calibration> Calibrate(const CalibrationRequest& request,
                                const ProgressFunction& progress);

  // Waits for running requests; true once none runs.
  bool Drain(int64_t timeout_ms);

 private:
  struct Serving;  // engine and all it stands on, in the order of their making

  void Run();
  Result<Digest> WaitForBase();
  Status Load(const Digest& digest);
  void SetPhase(std::string phase);
  // By the tokenizer of `speaker` (null: the base's), without special tokens around them.
  static Result<std::vector<std::vector<int32_t>>> Tokenize(
      Serving& serving, const Manifest* speaker, const std::vector<std::string>& texts);
  // What serves this base, once it does.
  Result<Serving*> WaitForServing(const Digest& base, const ProgressFunction& progress) const;

  const CheckpointStore& store_;
  const ModelHostOptions options_;
  const std::function<void(std::shared_ptr<ServingModel>)> on_ready_;

  mutable std::mutex mutex_;  // guards the members below
  State state_;
  bool looked_ = false;  // for the base, and it was not there
  std::unique_ptr<Serving> serving_;
  bool stop_ = false;

  std::thread thread_;
};

}  // namespace stockpot
