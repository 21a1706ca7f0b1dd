// Reads what DecideRetention needs out of the catalogue. Private to store/.
#pragma once

#include <functional>
#include <vector>

#include "store/catalog.h"
#include "store/retention.h"

namespace stockpot {

// What the rules need of a manifest. Immutable, so the store reads it once.
struct ManifestFacts {
  std::string run;
  int64_t step = -1;
  std::string group;
  std::vector<Digest> needs;  // artifacts that this one is stored as a difference to
};
using FactsOf = std::function<Result<ManifestFacts>(const Digest&)>;

// Everything of one moment if nothing is committed meanwhile. Strict: a record that cannot be read
// is Corruption, since a name that is left out would protect nothing. An artifact whose manifest is
// damaged needs nothing that could go (bases never do).
Result<RetentionInputs> ReadRetention(const Catalog& catalog, const FactsOf& facts,
                                      const std::vector<Digest>& leased);

}  // namespace stockpot
