// Lossless compression of history: chunks of older checkpoints and states become differences to the
// checkpoint before, in the background. A chunk keeps its name, SHA-256 of its own bytes, and every
// read verifies it: only the form in the pack and in the index changes (store/history_codec.h).
//
// What is compressed: chunks of a run's checkpoints and states of 64 KiB and more that nothing else
// refers to. Whole stay, and become whole again: what is pinned, named by an alias (RUN@latest,
// RUN@best), the last good checkpoint, bases, merges and variants, that is all that is served.
// A chunk's parent is the chunk at the same place of the same tensor, dtype and shape in the
// checkpoint before, or in the base; without one its byte planes are stored alone; whole if that
// saves less than 5 %. A chain of differences is at most kMaxHistoryDepth long: a longer one begins
// anew at the base. Reading a chunk reads its chain.
//
// A difference needs its parent: a collection of garbage keeps chunks that one leads to, and encodes
// differences to what nobody else needs anew, against the nearest chunk of their chain that
// somebody does.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "store/digest.h"
#include "store/progress.h"

namespace stockpot {

inline constexpr int kMaxHistoryDepth = 8;  // differences between a chunk and the whole one

struct HistoryOptions {
  std::string run;                 // REQUIRED
  std::optional<Digest> artifact;  // of the run; null: all of them
  int64_t bytes_per_second = 0;    // of chunks read; 0: as fast as it goes
  ProgressFunction progress;       // may be null. An error ends the work, with what is done done
};

struct HistoryReport {
  int64_t artifacts = 0;     // compressed now
  int64_t chunks = 0;        // given a history form
  int64_t chunk_bytes = 0;   // their length
  int64_t stored_bytes = 0;  // that they take now
  int64_t whole_chunks = 0;  // made whole again
  int64_t kept_chunks = 0;   // left as they are: too little to save
};

}  // namespace stockpot
