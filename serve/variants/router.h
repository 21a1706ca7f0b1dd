// Names -> what answers. Follows the store's events: when a route moves, the new variant is loaded
// first and the name flips afterwards, so that there is no moment in which it is unavailable;
// requests that run keep the lease they started with. A name that is new has nothing to fall back
// on: it resolves at once, and its first requests wait for the load in the cache.
//
// If the new variant cannot be loaded because of what it is (damaged, made wrongly), the name stays
// where it was and Models() says why; if it cannot be loaded now (the cache is full of variants in
// use), the name flips and the first request loads it. A route that is removed is gone at once; the
// memory of a variant that no name leads to goes with its last lease.
//
// Names (design section 5): the base's name, and every route of the store (`RUN@STEP`,
// `RUN@latest`, `RUN@best`, `RUN@STEP.merge`, given names). A name that is none of these is
// NotFound: never the base. Routes to variants of another base are not served here, and Resolve
// says so. Thread promise: any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "serve/variants/variant_cache.h"

namespace stockpot {

struct ServedModel {
  std::string name;
  Digest digest;  // of the variant, or of the base
  bool is_base = false;
  std::string state;  // "ready": resident; "stored": loads on the first request; "loading"
  int64_t resident_bytes = 0;
  int64_t moved_ms = 0;
  std::string error;  // why the variant the route leads to could not be loaded; empty: it could
};

struct Resolved {
  Digest digest;
  bool is_base = false;
};

class Router {
 public:
  // Knows the store's routes when it returns, and starts the follower thread. All must outlive it.
  Router(std::string base_name, std::shared_ptr<const BaseModel> base, const CheckpointStore& store,
         VariantCache& cache);
  ~Router();
  Router(const Router&) = delete;
  Router& operator=(const Router&) = delete;

  // NotFound names the model and lists a few that exist.
  Result<Resolved> Resolve(std::string_view name) const;
  std::vector<ServedModel> Models() const;  // the base first, then by name
  // That somebody asked for a name that resolves; how often in the last day.
  void CountRequest(std::string_view name) const;
  int64_t Requests(std::string_view name) const;
  // The event sequence up to which the routes here are those of the store (for tests and
  // readiness): moves whose variant is still loading hold it back.
  int64_t followed_sequence() const;
  // Seconds from a route's commit to its flip here, of the last flip.
  double last_flip_seconds() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the loads under way
};

}  // namespace stockpot
