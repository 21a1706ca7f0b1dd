// What publish asks of the values of whole weights. Views have rows back to back. Thread promise:
// pure functions, beside the pool they are given.
#pragma once

#include "kernels/base/threads.h"
#include "kernels/base/view.h"

namespace stockpot {

// Same shape, perhaps another dtype: same numbers bit for bit (-0 is not 0)?
bool SameValues(const WeightMatrix& a, const WeightMatrix& b);
bool AllFinite(const WeightMatrix& w);
// Sum of squares, in float64 and in an order that does not depend on the threads.
double SquaredNorm(const WeightMatrix& w, ThreadPool& threads);

}  // namespace stockpot
