// One forward pass of the decoder over a mixed batch: prompt chunks and single tokens, each
// sequence on the base or on its own variant, all over one resident base (Llama: arXiv 2302.13971;
// HF modeling_llama.py). Activations and accumulation in float32.
//
// Batch invariance (tested bit for bit): the logits of a token depend on its sequence, its variant
// and the SIMD target alone; not on what else is in the batch, on how a prompt is cut into chunks,
// or on the thread count.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "serve/model/kv_cache.h"
#include "serve/model/weights.h"

namespace stockpot {

// Consecutive tokens of one sequence; they stand at positions kv->length() ...
struct BatchSegment {
  KvSequence* kv = nullptr;               // with room reserved for the tokens; in one segment only
  std::span<const int32_t> tokens;        // ids in [0, vocab): the variant's own vocabulary
  const VariantModel* variant = nullptr;  // null: the base; else of the transformer's base
  int64_t logits_from = 0;                // rows >= this want logits; tokens.size(): none
  int64_t prompt_rows = 0;                // the first rows that belong to a prompt: their 1-bit
                                          // deltas are summed as prefill does (DeltaSum::kFolded),
                                          // those of later rows as decoding does
};

// Called for each wanted row, in order of segments and rows, from the calling thread; `logits`
// [vocab] is valid during the call only.
using LogitsSink = std::function<void(int64_t segment, int64_t row, std::span<const float> logits)>;

// Sees x [rows, d_in], the input of a linear layer of the blocks, in the order of computation, from
// the calling thread; x is valid during the call only.
using LinearObserver =
    std::function<void(int64_t layer, Projection projection, ConstFloatMatrix x)>;

class Transformer {
 public:
  // `threads` must outlive it.
  Transformer(std::shared_ptr<const BaseModel> base, ThreadPool& threads);
  ~Transformer();

  // Appends the tokens' keys and values to their caches and delivers the wanted logits. The
  // projection onto the vocabulary runs in blocks of rows, so memory does not grow with prompt x
  // vocabulary. InvalidArgument (a token id out of range, positions over the model's maximum):
  // nothing changed. Allocates nothing once it has seen a batch of this size. Segments may stand in
  // any order. `observer` may be null. REQUIRES: one caller at a time.
  Status Forward(std::span<const BatchSegment> segments, const LogitsSink& sink,
                 const LinearObserver* observer = nullptr);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
