// Whether the texts that a run is judged on and those that its variants are calibrated on are
// different ones.
#pragma once

#include "kernels/base/status.h"
#include "store/records.h"

namespace stockpot {

// InvalidArgument names a text that stands for the most part in a text of the other set: half or
// more of it, in bytes of lines (without the space around them; empty ones do not count). Time and
// memory grow with the texts. Pure function.
Status CheckApart(const ProbeSet& probe, const ProbeSet& calibration);

}  // namespace stockpot
