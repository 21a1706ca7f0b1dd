// RocksDB behind a narrow wall: keys and values in columns, batches that see their own writes, and
// Status instead of RocksDB's. What the keys and values mean: catalog_keys.h, record_codec.h.
//
// Errors. Unavailable: the disk did not answer (EIO), after a few attempts with a growing pause
// between them; later may do. ResourceExhausted: it is full. Corruption: what is stored is not what
// was written; the message names the file.
//
// After a write that failed, the next one first brings the database back by opening it anew while
// nobody reads. A full disk is waited for.
//
// RocksDB's log ends where it is damaged, and what came after it is gone without a word. So the
// number of the last write that was synced also stands in the file COMMITTED beside the folder: a
// catalogue that opens with less is refused. So is one whose list of files (MANIFEST-*) was cut or
// damaged, before RocksDB sees it (commit_mark.h).
//
// Thread promise: Catalog any thread; a CatalogBatch one thread.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/base/status.h"

namespace stockpot {

// RocksDB's column families.
enum class Column : int {
  kRecords,    // "default": runs, steps, edges, aliases, routes, jobs, evals, counters
  kChunks,     // digest -> ChunkLocation
  kInline,     // digest -> the bytes of a small chunk
  kManifests,  // digest -> canonical JSON
  kEvents,     // sequence -> event
};

class Catalog;

// Changes that become visible together. Get() sees the batch's own writes over the catalogue.
class CatalogBatch {
 public:
  explicit CatalogBatch(const Catalog& catalog);
  ~CatalogBatch();

  void Put(Column column, std::string_view key, std::string_view value);
  void Delete(Column column, std::string_view key);
  Result<std::optional<std::string>> Get(Column column, std::string_view key) const;
  bool empty() const;

 private:
  friend class Catalog;
  struct Impl;
  const Catalog& catalog_;
  std::unique_ptr<Impl> impl_;
};

// One moment of the catalogue, whatever is written later. Must not outlive the catalogue.
class CatalogMoment {
 public:
  ~CatalogMoment();
  // As Catalog::Scan.
  Status Scan(Column column, std::string_view prefix, std::string_view first,
              const std::function<bool(std::string_view key, std::string_view value)>& visit) const;

 private:
  friend class Catalog;
  struct Impl;
  explicit CatalogMoment(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

class Catalog {
 public:
  // Makes the database if it is missing and was never there. Corruption if it does not open, is of
  // another format, or lacks writes that were acknowledged.
  static Result<std::unique_ptr<Catalog>> Open(const std::filesystem::path& directory);
  ~Catalog();

  // Null: no such key. An error: the catalogue could not be read.
  Result<std::optional<std::string>> Get(Column column, std::string_view key) const;
  bool Has(Column column, std::string_view key) const;

  // Calls `visit` on every key with this prefix, in byte order, from `first` (a key, or empty),
  // until it returns false. The views live for the call. Sees one moment of the catalogue.
  using Visit = std::function<bool(std::string_view key, std::string_view value)>;
  Status Scan(Column column, std::string_view prefix, std::string_view first,
              const Visit& visit) const;
  Result<std::unique_ptr<CatalogMoment>> Freeze() const;
  // The greatest key of a column; null: empty.
  Result<std::optional<std::string>> LastKey(Column column) const;

  // `synced`: on disk when it returns, with everything written before. After a failure nothing of
  // the batch is visible until the database was opened anew; then it may be, as a whole.
  Status Write(const CatalogBatch& batch, bool synced);
  // Brings the database back if a write failed. An error: it takes no writes now.
  Status Heal();
  // How often the database was opened. Whoever remembers what it read looks again when it changes.
  int64_t openings() const;

  // Reads every block of every file and verifies it. Corruption names the file.
  Status Verify() const;

 private:
  friend class CatalogBatch;
  friend class CatalogMoment;
  struct Impl;
  explicit Catalog(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace stockpot
