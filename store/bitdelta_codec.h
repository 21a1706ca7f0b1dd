// Publish: a checkpoint or merge becomes a variant, tensor by tensor (references: BitDelta, the
// rule in kernels/bitdelta/signs.h).
//
//   identical values to the base    -> codec base, 0 bytes
//   2-D, few elements changed       -> codec sparse, exactly: where that is at most as large as one
//                                      bit a weight (a linear weight of a block: up to 3 % of bf16
//                                      elements); or half of the raw bytes (another 2-D weight, and
//                                      one of a block of whose update one bit would miss over 0.9:
//                                      short RL and SFT steps, which change 3 to 10 %)
//   2-D linear weight of a block    -> codec bitdelta: sign bits + float32 alpha per output row
//   anything else that changed      -> codec raw, exactly: norms, biases, embeddings, head,
//   routers,
//                                      3-D experts, weights stored transposed (Conv1D)
//
// Half, because a raw tensor shares the checkpoint's chunks while that is kept.
//
// Which weights are linear layers of a block is decided by structure (store/model_structure.h),
// never by a substring such as "proj".
//
// Dtypes. A raw or bitdelta tensor has the checkpoint's dtype (for bitdelta it says how the decoded
// weight is rounded on export; the served one is never rounded). A checkpoint may be in another
// float type than its base (fp32 training from a bf16 base): deltas are taken against the base as
// it is, and a tensor whose values all equal the base's is codec base with the BASE's dtype.
//
// Ties. An alias stays an alias. Where the base ties its head and the checkpoint holds one of its
// own: equal to the checkpoint's embedding -> alias, else raw, and config.json says so
// ("tie_word_embeddings": false). Where the base has a head and the checkpoint ties it by leaving
// it out, the variant gets the alias.
#pragma once

#include <string>

#include "kernels/base/threads.h"
#include "store/checkpoint_store.h"
#include "store/progress.h"

namespace stockpot {

// Builds the variant's manifest and puts its chunks; does not commit. Memory: a few tensors.
// Deterministic: the same artifact gives the same manifest. `progress` may be null.
//
// The gate, InvalidArgument naming the tensor: every tensor of the base is present (or tied) with
// its shape and nothing is extra; tensors that changed are F32, F16 or BF16 and finite; the
// artifact is a checkpoint or merge. A vocabulary of another size than the base's is refused in
// this version.
//
// Config files are in the variant where they differ from the base's. Attributes:
//   "source"         hex digest of the artifact
//   "codec"          "bitdelta" or "dense"
//   "bytes"          stored bytes of the variant: tensors and config files
//   "bytes_full"     logical bytes of the artifact
//   "coverage"       JSON {"block_elements", "block_compressed", "block_sparse", "other_changed"}:
//                    elements of the linear layers of blocks that changed, how many of these are 1
//                    bit or sparse, and how many elements beside them changed tensors have (stored
//                    exactly)
//   "update"         ||W - W_base||_F / ||W_base||_F over the tensors that changed; 0: none
//   "tensor/<name>"  per changed tensor, JSON {"role", "codec", "bytes", "changed": share of the
//                    elements that differ from the base, "delta": ||W - W_base||_F, "error": relative
//                    squared error of one bit and one scale, whether or not that was chosen,
//                    "row_error": likewise with a scale a row, as it is stored (of 1-bit tensors)}
Result<Manifest> BuildVariant(CheckpointStore& store, const Digest& artifact, PublishCodec codec,
                              ThreadPool& threads, const ProgressFunction& progress,
                              const PublishOptions& options = {});

}  // namespace stockpot
