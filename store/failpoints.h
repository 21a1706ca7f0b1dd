// Named places where a test makes the store fail or die. The composition root makes one from an
// environment variable or not at all; without one a place costs a comparison with null.
//
//   auto failpoints = Failpoints::FromText("commit.before_write=kill");   // or "=error", "=kill@3"
//   CheckpointStore::Open({..., .failpoints = *failpoints});
//
// Thread promise: any thread.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "kernels/base/status.h"

namespace stockpot {

class Failpoints {
 public:
  // "NAME=ACTION[@N]", several joined by ','. ACTION: "kill" (SIGKILL of the process), "error"
  // (Unavailable, once), both at the N-th time the place is reached, 1 by default. InvalidArgument
  // names what is unknown.
  static Result<std::shared_ptr<Failpoints>> FromText(std::string_view text);

  // Every place there is.
  static std::span<const std::string_view> Names();

  // REQUIRES: `name` is one of Names().
  Status Reach(std::string_view name);
  // How often a place was reached, so that a test knows it was there.
  int64_t Reached(std::string_view name) const;

 private:
  struct Action {
    bool kill = false;
    int64_t at = 1;
  };
  mutable std::mutex mutex_;
  std::map<std::string, Action, std::less<>> actions_;   // guarded by mutex_
  std::map<std::string, int64_t, std::less<>> reached_;  // guarded by mutex_
};

inline Status ReachFailpoint(const std::shared_ptr<Failpoints>& failpoints, std::string_view name) {
  return failpoints == nullptr ? OkStatus() : failpoints->Reach(name);
}

}  // namespace stockpot
