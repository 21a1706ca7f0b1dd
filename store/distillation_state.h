// The state of an interrupted distillation as the draft of its job (CheckpointStore::GetDraft): its
// vectors as raw F32 tensors "<tensor>/log_scale", "/first_moment", "/second_moment" and "/best",
// its numbers in the attribute "distillation".
#pragma once

#include <optional>

#include "store/calibration.h"
#include "store/checkpoint_store.h"

namespace stockpot {

// A draft of a job that publishes `source`; its chunks are put. `of` names what is distilled: the
// same bytes go on, others begin anew.
Result<Manifest> PutDistillation(CheckpointStore& store, const DistillationState& state,
                                 const Manifest& source, const Digest& of);

// Null: the draft is none of these, or of another distillation, or cannot be read: begin anew.
std::optional<DistillationState> ReadDistillation(const CheckpointStore& store,
                                                  const Manifest& draft, const Digest& of);

}  // namespace stockpot
