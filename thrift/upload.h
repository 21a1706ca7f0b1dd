// A model on its way into the store: what `stockpot push`, `stockpot import-base` and the hook
// share.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "store/tensor_source.h"
#include "thrift/client.h"

namespace stockpot {

struct UploadProgress {
  int64_t total_bytes = 0;  // of the artifact
  int64_t done_bytes = 0;   // hashed, and sent where the daemon lacked them
  int64_t sent_bytes = 0;   // that travelled
};

// Where a tensor of a source belongs that is no weight, or that is a piece of a larger one
// (thrift/stockpot.thrift, Tensor). The source's own shape of it is the piece's.
struct TensorPlacement {
  std::string name = "";                   // as it is stored; empty: the source's
  std::string group = "";                  // empty: a weight
  std::vector<int64_t> global_shape = {};  // both empty: the whole tensor
  std::vector<int64_t> offsets = {};       // in elements
};
using TensorPlacements = std::map<std::string, TensorPlacement, std::less<>>;  // by name

struct UploadOptions {
  std::function<void(const UploadProgress&)> progress;  // null: none; one call at a time
  // Bytes [offset, offset + bytes) of a tensor of `source` where they are in memory and stay until
  // the upload returns: they are hashed and sent without a copy. Null, or an empty answer: Read()
  // copies.
  std::function<std::span<const std::byte>(const std::string& name, int64_t offset, int64_t bytes)>
      borrow;
  const TensorPlacements* placements = nullptr;  // of those that are not whole weights
  const std::atomic<bool>* cancel = nullptr;     // becomes true: the upload ends, Unavailable
};

struct UploadReport {
  rpc::CommitReply commit;
  UploadProgress bytes;
};

// Opens a session, cuts `source` into chunks, asks which of them the daemon lacks, sends those over
// all of `clients` at once (one thread and at most 16 MiB of memory each), and commits. On success
// the artifact is durable and visible, or, of one of several ranks, this rank's part is taken
// (`commit.complete` says which). On failure nothing of it is visible; the session is given
// up. After Unavailable the whole call may be repeated: chunks that arrived are not sent again
// while the daemon lives. REQUIRES: 1 <= clients.size() <= rpc_limits::kMaxUploadConnections, all
// of one daemon; Read of `source` may be called from as many threads.
Result<UploadReport> UploadArtifact(std::span<Client* const> clients,
                                    const rpc::SessionRequest& request, const TensorSource& source,
                                    const std::map<std::string, double>& metrics,
                                    const UploadOptions& options = {});

}  // namespace stockpot
