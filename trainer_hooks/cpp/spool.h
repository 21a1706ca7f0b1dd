// Checkpoints on the trainer's own disk, while the daemon is away. Internal to the hook. What is on
// disk, and what holds whatever happens: trainer_hooks/SPOOL.md.
//
// Thread promise: any thread, but an entry is one thread's at a time; writers take turns. A
// SpooledCheckpoint by as many as its TensorSource promises.
#pragma once

#include <compare>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "trainer_hooks/cpp/spool_entry.h"

namespace stockpot {

// An entry of a spool. Sorts as entries are sent.
struct SpoolKey {
  int64_t step = 0;
  std::filesystem::path folder;  // of the rank that wrote it
  auto operator<=>(const SpoolKey&) const = default;
  std::filesystem::path path() const;
};

class Spool {
 public:
  // The folder of one rank of one run, made where it is missing, and those that ranks of another
  // world left: rank r of `world` takes over rank R of another one if R % world == r and no
  // process has it open. What a killed writer left is removed. Unavailable: another process has
  // this rank's folder open.
  static Result<std::unique_ptr<Spool>> Open(const std::filesystem::path& directory,
                                             const std::string& run, int32_t rank, int32_t world,
                                             int64_t max_bytes);

  // The checkpoint is on disk when this returns OK. AlreadyExists: an entry of the step is there.
  // ResourceExhausted: over the limit, or the disk is full; nothing of it is left then.
  Status Write(const SpoolRecord& record, const TensorSource& source);

  int64_t entries() const;
  int64_t bytes() const;

  // The oldest entry that is not held, if there is one.
  std::optional<SpoolKey> First() const;
  // A held entry waits for other ranks' parts: it stays, and is not First().
  void Hold(const SpoolKey& key, bool is_held);

  // As ReadSpoolEntry(). REQUIRES, here and below: the entry is there.
  Result<std::unique_ptr<SpooledCheckpoint>> Read(const SpoolKey& key) const;
  // It is done with: it is removed.
  Status Remove(const SpoolKey& key);
  // It cannot be sent: it is renamed to PREFIX-..., for a person to look at.
  Status SetAside(const SpoolKey& key, const std::string& prefix);

 private:
  struct Entry {
    int64_t bytes = 0;
    bool is_held = false;
  };

  Spool(std::filesystem::path own, int64_t max_bytes)
      : own_(std::move(own)), max_bytes_(max_bytes) {}
  Status TakeOver(const std::filesystem::path& folder);
  Status TakeOverOthers(int32_t rank, int32_t world);
  Status CheckRoom(const SpoolKey& key, int64_t bytes) const;
  void Add(const SpoolKey& key);
  void Forget(const SpoolKey& key);

  const std::filesystem::path own_;  // this rank's folder
  const int64_t max_bytes_;
  std::vector<std::unique_ptr<SpoolDescriptor>> locks_;  // one a folder
  std::mutex writing_;                                   // held by Write()
  mutable std::mutex mutex_;                             // guards what follows
  std::map<SpoolKey, Entry> entries_;
  int64_t bytes_ = 0;
};

}  // namespace stockpot
