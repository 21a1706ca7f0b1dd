// Counts every operator new of a test program, which count_allocations.cc replaces.
#pragma once

#include <cstdint>

namespace stockpot {

// So far, of all threads.
int64_t CountedAllocations();

}  // namespace stockpot
