// One checkpoint, or one rank's part of it, as a folder on the trainer's disk: writing and reading
// it. Internal to the hook. The format: trainer_hooks/SPOOL.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "kernels/base/status.h"
#include "store/records.h"
#include "store/tensor_source.h"
#include "thrift/upload.h"

namespace stockpot {

// What an entry says about itself, beside its tensors and files.
struct SpoolRecord {
  std::string run;
  std::string base;  // name or digest
  int64_t step = 0;
  int32_t rank = 0;
  int32_t world = 1;
  std::string attempt;              // world > 1
  std::string resumed_from;         // hex digest; empty: none
  std::optional<RunConfig> config;  // none: the run's own
  std::map<std::string, std::string> tags;
  std::map<std::string, double> metrics;  // not finite ones too
  TensorPlacements placements;            // of tensors that are not whole weights
};

// An entry that was read: its bytes are verified. Immutable; any thread.
class SpooledCheckpoint : public TensorSource {
 public:
  virtual const SpoolRecord& record() const = 0;
};

// Makes `folder` and all that is in it, durably but for its own name.
Status WriteSpoolEntry(const std::filesystem::path& folder, const SpoolRecord& record,
                       const TensorSource& source);

// Reads all of it once. Corruption: it is not what was written; InvalidArgument: of a version that
// this one does not know.
Result<std::unique_ptr<SpooledCheckpoint>> ReadSpoolEntry(const std::filesystem::path& folder);

Status SyncFolder(const std::filesystem::path& folder);

// An open file, closed when it dies.
class SpoolDescriptor {
 public:
  explicit SpoolDescriptor(int fd) : fd_(fd) {}
  ~SpoolDescriptor();
  SpoolDescriptor(const SpoolDescriptor&) = delete;
  SpoolDescriptor& operator=(const SpoolDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

}  // namespace stockpot
