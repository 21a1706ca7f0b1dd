// Names -> what answers. Follows the store's events: when a route moves, the new variant is loaded first
// and the name flips afterwards, so that there is no moment in which it is unavailable; requests that
// run keep the lease they started with.
//
// Names (design section 5): the base's name, and every route of the store (`RUN@STEP`, `RUN@latest`,
// `RUN@best`, `RUN@STEP.merge`, given names). A name that is none of these is NotFound: never the base.
// Thread promise: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "serve/variants/variant_cache.h"

namespace stockpot {

struct ServedModel {
  std::string name;
  Digest digest;            // of the variant, or of the base
  bool is_base = false;
  std::string state;        // "ready": resident; "stored": loads on the first request; "loading"
  int64_t resident_bytes = 0;
  int64_t moved_ms = 0;
};

struct Resolved {
  Digest digest;
  bool is_base = false;
};

class Router {
 public:
  // Starts the follower thread. All must outlive the router.
  Router(std::string base_name, std::shared_ptr<const BaseModel> base, const CheckpointStore& store,
         VariantCache& cache);
  ~Router();

  // NotFound names the model and lists a few that exist.
  Result<Resolved> Resolve(std::string_view name) const;
  std::vector<ServedModel> Models() const;
  // The event sequence up to which the routes here are those of the store (for tests and readiness).
  int64_t followed_sequence() const;
  // Seconds from a route's commit to its flip here, of the last flip.
  double last_flip_seconds() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stockpot
