// Publish: a checkpoint or merge becomes a variant, tensor by tensor (references: BitDelta, the
// rule in kernels/bitdelta/signs.h). A tensor with the base's values is codec base, 0 bytes. What
// changed is stored by the publish codec:
//
//   bitdelta  2-D, few elements changed -> codec sparse, exactly: where that is at most as large
//             as the signs (of one bit and a linear weight of a block: up to 3 % of bf16
//             elements); or half of the raw bytes (another 2-D weight, and one of a block of
//             whose update the signs would miss over 0.9: short RL and SFT steps, which change 3
//             to 10 %)
//             2-D linear weight of a block -> codec bitdelta: `planes` sign planes (1) with a
//             float32 alpha per output row, and a residual of rank `residual_rank` (0)
//             anything else -> codec raw, exactly: norms, biases, embeddings, head, routers, 3-D
//             experts, weights stored transposed (Conv1D)
//   sparse    exactly: changed elements where that is smaller, else raw
//   dense     every changed tensor raw
//   auto      what is measured to be worth its bytes. Every form of every tensor is measured:
//             sparse, raw, 1 .. `planes` (4) planes for linear weights of blocks, embeddings and
//             head, and for linear weights beside each number of planes residuals of rank
//             `residual_rank` / 4, / 2 and itself. Then the choice of store/tensor_choice.h over
//             all tensors: the fewest bytes that meet `max_error`, a share of the squared update
//             of the whole variant; or the least error within `max_bytes` or `max_share`, tensors
//             and files; with both, what meets the error, refused where it is over the budget;
//             with neither, max_error 0.4. Reads the artifact twice
//
// A vocabulary of another size than the base's: of an embedding or head the rows that both have are
// judged like that; the rows behind them are stored exactly. config.json must say the new vocab_size.
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
#include "store/publish_draft.h"

namespace stockpot {

// Builds the variant's manifest and puts its chunks; does not commit. Memory: a few tensors.
// Deterministic: the same artifact gives the same manifest, also one that goes on from the draft of
// an interrupted publish. `progress` may be null; it begins with the share that the draft has.
//
// The gate, InvalidArgument naming the tensor: every tensor of the base is present (or tied) with
// its shape (a table may have other rows) and nothing is extra; tensors that changed are F32, F16 or
// BF16 and finite; the artifact is a checkpoint or merge.
//
// Config files are in the variant where they differ from the base's. Attributes:
//   "source"         hex digest of the artifact
//   "codec"          "bitdelta", "dense", "auto" or "sparse"
//   "bytes"          stored bytes of the variant: tensors and config files
//   "bytes_full"     logical bytes of the artifact
//   "coverage"       JSON {"block_elements", "block_compressed", "block_sparse", "other_changed"}:
//                    elements of the linear layers of blocks that changed, how many of these are of
//                    codec bitdelta or sparse, and how many elements beside them changed tensors
//                    have
//   "update"         ||W - W_base||_F / ||W_base||_F over the tensors that changed; 0: none
//   "update_error"   sum ||W - W'||_F^2 / sum ||W - W_base||_F^2 over them: what is lost
//   "tensor/<name>"  per changed tensor, JSON {"role", "codec", "bytes", "changed": share of the
//                    elements that differ from the base, "delta": ||W - W_base||_F, "error": relative
//                    squared error of one bit and one scale, whether or not that was chosen; of
//                    bitdelta "planes" and "rank" where over 1 and 0, and "row_error": likewise of
//                    what is stored; of codec auto "next": the next better form, {"codec", "bytes",
//                    "planes", "rank", "row_error"}}
// InvalidArgument also for options that the codec does not have, and for a budget that is too
// small, with the number of bytes that it would take.
Result<Manifest> BuildVariant(CheckpointStore& store, const Digest& artifact, PublishCodec codec,
                              ThreadPool& threads, const ProgressFunction& progress,
                              const PublishOptions& options = {},
                              const PublishDraft& draft = {});

}  // namespace stockpot
