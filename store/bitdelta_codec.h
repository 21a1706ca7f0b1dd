// Publish: a checkpoint or merge becomes a variant, tensor by tensor (references: BitDelta, the rule in
// kernels/bitdelta/signs.h).
//
//   identical bytes to the base     -> codec base, 0 bytes
//   2-D linear weight of a block    -> codec bitdelta: sign bits + float32 alpha per output row
//   anything else that changed      -> codec raw: norms and biases exactly; embeddings and head too
//
// Which weights are linear layers of a block is decided by structure (rank 2, not an embedding or head,
// name ends in ".weight", same shape as the base's), never by a substring such as "proj".
#pragma once

#include <functional>
#include <string>

#include "kernels/base/threads.h"
#include "store/checkpoint_store.h"

namespace stockpot {

// Builds the variant's manifest and puts its chunks; does not commit. Memory: a few tensors.
// The gate, InvalidArgument naming the tensor: every tensor of the base is present (or tied) with its
// shape and nothing is extra; dtypes are float; all values are finite; the artifact's base is the one
// it is compared with. Records per tensor: changed share and one-bit error, in `attributes`
// ("tensor/<name>" -> JSON) and the totals ("bytes", "bytes_full", "codec").
Result<Manifest> BuildVariant(CheckpointStore& store, const Digest& artifact, PublishCodec codec,
                              ThreadPool& threads,
                              const std::function<void(double share)>& progress);

}  // namespace stockpot
