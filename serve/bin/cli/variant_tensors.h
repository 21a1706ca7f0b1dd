// The tensors of a variant for a person: how each is stored, and why.
#pragma once

#include "stockpot_rpc/stockpot_types.h"

namespace stockpot::cli {

// A table on stdout, from the attributes "tensor/..." (store/bitdelta_codec.h): the share of
// elements that changed, the error that one bit would have, what is stored, and what the next
// better form would take.
void PrintTensors(const rpc::ArtifactInfo& variant);

}  // namespace stockpot::cli
