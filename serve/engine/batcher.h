// The inference state and one step of it. Lives on the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "serve/engine/admission.h"
#include "serve/engine/engine.h"
#include "serve/engine/sampler.h"
#include "serve/engine/sequence.h"
#include "serve/model/kv_cache.h"
#include "serve/model/transformer.h"

namespace stockpot {

class Batcher {
 public:
  Batcher(std::shared_ptr<const BaseModel> base, const EngineLimits& limits, ThreadPool& threads);

  void Add(std::unique_ptr<Sequence> sequence) { waiting_.Push(std::move(sequence)); }
  // Finishes it with kCancelled wherever it is.
  void Cancel(uint64_t id);
  void CancelAll();
  // Admits, computes one batch and delivers its events. Does nothing when idle.
  void Step();

  bool idle() const { return running_.empty() && waiting_.size() == 0; }
  // Totals and gauges; `waiting` counts what was added here.
  EngineStats stats() const;

 private:
  void Admit();
  bool PreemptYoungest(const Sequence& for_whom);
  void PlanChunks();
  void BuildSegments();
  void OnLogits(Sequence& sequence, int64_t position, std::span<const float> logits);
  void Generate(Sequence& sequence, std::span<const float> logits);
  TokenEvent Score(const Sequence& sequence, int32_t token, std::span<const float> logits) const;
  void DeliverPrompt(Sequence& sequence);
  void AfterForward(const Status& status);
  void RemoveFinished();

  const std::shared_ptr<const BaseModel> base_;
  const EngineLimits limits_;
  KvPool pool_;
  Transformer transformer_;
  Sampler sampler_;
  AdmissionQueue waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;  // in order of arrival
  RunningVariants variants_;
  std::vector<Sequence*> batch_;         // of this step, by variant
  std::vector<BatchSegment> segments_;   // likewise
  std::vector<int64_t> segment_starts_;  // position of a segment's first token
  LogitsSink sink_;
  EngineStats totals_;
};

}  // namespace stockpot
