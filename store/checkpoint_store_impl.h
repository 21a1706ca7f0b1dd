// What is behind CheckpointStore. Private to store/: checkpoint_store.cc (chunks and commits),
// checkpoint_store_reads.cc, scrub.cc.
#pragma once

#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "store/catalog.h"
#include "store/checkpoint_store.h"
#include "store/commit_writer.h"
#include "store/file_handle.h"
#include "store/pack_reader.h"
#include "store/pack_writer.h"

namespace stockpot {

// Chunks below this are values of the catalogue: a record in a pack would cost a seek and a header
// each.
inline constexpr int64_t kInlineChunkBytes = int64_t{64} << 10;

struct CheckpointStore::Impl {
  // Constant once open. Destroyed from the last to the first: the writer before the catalogue, and
  // the lock on the directory at the very end.
  StoreOptions options;
  std::filesystem::path packs_directory;
  std::shared_ptr<FileHandle> lock;
  std::unique_ptr<Catalog> catalog;
  std::unique_ptr<PackReader> reader;
  std::unique_ptr<PackWriter> writer;

  // One waiting Apply.
  struct Waiter {
    const PreparedCommit* prepared = nullptr;
    Result<int64_t> outcome = Internal("the commit did not run");
    bool done = false;
  };

  // Group commit: who finds no leader becomes it and commits all that wait.
  std::mutex commit_mutex;
  std::condition_variable commit_done;
  std::vector<Waiter*> waiting;  // guarded by commit_mutex
  bool leading = false;          // guarded by commit_mutex
  int64_t last_job = 0;          // the leader's alone

  mutable std::mutex event_mutex;
  mutable std::condition_variable event_added;
  int64_t last_event = 0;  // guarded by event_mutex; written by the leader alone
  bool shut_down = false;  // guarded by event_mutex

  // The last chunks that were read in pieces, so that small reads verify each chunk once.
  struct CachedChunk {
    Digest digest;
    std::shared_ptr<const std::vector<std::byte>> data;
  };
  mutable std::mutex cache_mutex;
  mutable std::array<CachedChunk, 4> cache;  // guarded by cache_mutex
  mutable size_t cache_next = 0;             // guarded by cache_mutex

  // Where a chunk is; null: not stored.
  Result<std::optional<ChunkLocation>> FindChunk(const Digest& digest) const;
  bool HasChunk(const Digest& digest) const;
  // Fills `out`, whose size is the length the caller expects, with the verified chunk.
  Status ReadChunkInto(const Digest& digest, const ChunkLocation& location,
                       std::span<std::byte> out, bool check_record) const;
  // A verified chunk out of the cache above, or into it.
  Result<std::shared_ptr<const std::vector<std::byte>>> ReadCached(const Digest& digest) const;
  Status CheckReserve(size_t bytes) const;
  Status PutInline(const Digest& digest, std::span<const std::byte> data);
  void CommitGroup(std::span<Waiter* const> group);
};

}  // namespace stockpot
