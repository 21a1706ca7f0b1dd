// An artifact of the store as a TensorSource: what the loader, the merge, publish and export read.
#pragma once

#include <memory>

#include "store/checkpoint_store.h"
#include "store/raw_tensor_reader.h"
#include "store/tensor_source.h"

namespace stockpot {

// Reads parts from `store`, which must outlive it. Thread promise: any thread.
PartReader PartReaderOf(const CheckpointStore& store);

// The tensors of `artifact` by their LOGICAL values: codec raw as stored, codec base read from the
// base, codec bitdelta decoded (base + alpha * sign, rounded once to the entry's dtype, or kept in
// float32 when `decode_f32`: then such tensors report dtype F32). Files the artifact lacks come
// from its base, but for an adapter's, which is no model by itself. `store` must outlive the source. The source holds a lease: the artifact is not
// purged meanwhile.
Result<std::unique_ptr<TensorSource>> OpenArtifact(const CheckpointStore& store,
                                                   const Digest& artifact, bool decode_f32 = false);

}  // namespace stockpot
