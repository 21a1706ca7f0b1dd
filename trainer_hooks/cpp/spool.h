// Checkpoints on the trainer's own disk, while the daemon is away. Internal to the hook. What is on
// disk, and what holds whatever happens: trainer_hooks/SPOOL.md.
//
// Thread promise: one thread at a time; a SpooledCheckpoint by as many as its TensorSource
// promises.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "store/records.h"
#include "store/tensor_source.h"

namespace stockpot {

// What an entry says about itself, beside its tensors and files.
struct SpoolRecord {
  std::string run;
  std::string base;  // name or digest
  int64_t step = 0;
  int32_t rank = 0;
  int32_t world = 1;
  RunConfig config;
  std::map<std::string, std::string> tags;
  std::map<std::string, double> metrics;  // not finite ones too
};

// An entry that was read: its bytes are verified. Immutable; any thread.
class SpooledCheckpoint : public TensorSource {
 public:
  virtual const SpoolRecord& record() const = 0;
};

class Spool {
 public:
  // The folder of one rank of one run, made where it is missing; what a killed writer left is
  // removed. Unavailable: another process has it open.
  static Result<std::unique_ptr<Spool>> Open(const std::filesystem::path& directory,
                                             const std::string& run, int32_t rank, int32_t world,
                                             int64_t max_bytes);
  ~Spool();
  Spool(const Spool&) = delete;
  Spool& operator=(const Spool&) = delete;

  // The checkpoint is on disk when this returns OK. AlreadyExists: an entry of the step is there.
  // ResourceExhausted: over the limit, or the disk is full; nothing of it is left then.
  Status Write(const SpoolRecord& record, const TensorSource& source);

  bool empty() const { return entries_.empty(); }
  int64_t first_step() const { return entries_.begin()->first; }  // REQUIRES: !empty()
  int64_t entries() const { return static_cast<int64_t>(entries_.size()); }
  int64_t bytes() const { return bytes_; }

  // Reads all of it once. Corruption: it is not what was written; InvalidArgument: of a version
  // that this one does not know. REQUIRES: !empty().
  Result<std::unique_ptr<SpooledCheckpoint>> ReadFirst() const;
  // The first entry is done with: it is removed.
  Status RemoveFirst();
  // The first entry cannot be sent: it is renamed to PREFIX-..., for a person to look at.
  Status SetFirstAside(const std::string& prefix);

 private:
  Spool(std::filesystem::path folder, int64_t max_bytes, int lock)
      : folder_(std::move(folder)), max_bytes_(max_bytes), lock_(lock) {}
  Status Survey();
  Status WriteFolder(const std::filesystem::path& folder, const SpoolRecord& record,
                     const TensorSource& source) const;
  std::filesystem::path PathOf(int64_t step) const;
  void ForgetFirst();

  const std::filesystem::path folder_;
  const int64_t max_bytes_;
  const int lock_;                      // descriptor that holds the folder
  std::map<int64_t, int64_t> entries_;  // step -> bytes
  int64_t bytes_ = 0;
};

}  // namespace stockpot
