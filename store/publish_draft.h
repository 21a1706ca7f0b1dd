// What a publish has made so far, so that one that is interrupted goes on behind it: the draft of
// its job (CheckpointStore::GetDraft). Internal to store/bitdelta_codec.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/bitdelta/compress.h"
#include "store/checkpoint_store.h"
#include "store/model_pair.h"
#include "store/tensor_choice.h"

namespace stockpot {

// Where a publish keeps its draft, after every `save_bytes` of the checkpoint. No job: nowhere.
struct PublishDraft {
  std::string job;  // key
  int64_t save_bytes = int64_t{64} << 20;
};

// A tensor that changed. Of codec auto it waits for the others' measurements.
struct MeasuredTensor {
  std::string name;
  std::string base;  // the base's tensor that its delta is over
  TensorRole role = TensorRole::kNotMatrix;
  DeltaStats stats;
  std::vector<Candidate> forms;  // a hull, raw included
};

// Everything that the tensors before `next` (of the checkpoint, in order) have left behind.
struct PublishState {
  std::string of;  // what is published and how: a draft of something else is not used
  size_t next = 0;
  Manifest made;  // their tensors and attributes
  std::vector<Tie> ties;
  std::vector<MeasuredTensor> measured;  // of codec auto, and how many of them are stored: the
  size_t stored = 0;                     // second pass
  bool head_untied = false;
  double update_square = 0, base_square = 0, left_square = 0;
  int64_t block_elements = 0, block_compressed = 0, block_sparse = 0, other_changed = 0;
};

// One commit. The chunks that `state.made` names are durable then, and stay until the job ends.
Status SavePublishState(CheckpointStore& store, const std::string& job, PublishState state);
// Null: there is no draft, or it is of something else, of another version, or lost a chunk.
std::optional<PublishState> LoadPublishState(const CheckpointStore& store, const std::string& job,
                                             const std::string& of);

}  // namespace stockpot
