// Whether a variant that comes from elsewhere is whole over its base: what BuildVariant and the
// gate see of one that is made here, as far as the variant alone shows it.
#pragma once

#include <string_view>

#include "kernels/base/status.h"
#include "store/manifest.h"
#include "store/raw_tensor_reader.h"

namespace stockpot {

// The size of its update: ||W - W_base||_F / ||W_base||_F over the tensors that changed (0: none
// did; kGateNoLimit where the base is zero there). `config_json` is the variant's own config.json,
// or its base's; empty: neither has one. Decodes every changed tensor, a few MiB at a time.
//
// InvalidArgument names the tensor: one of the base's is missing, or has another shape (a table may
// have other rows); one that is not the base's, but for a head that the base ties; one that changed
// and is not F32, F16 or BF16; a value that is not finite. Corruption: parts that contradict
// themselves.
Result<double> CheckVariant(const Manifest& variant, const Manifest& base,
                            std::string_view config_json, const PartReader& read);

}  // namespace stockpot
