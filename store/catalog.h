// RocksDB behind a narrow wall: keys and values in columns, batches that see their own writes, and
// Status instead of RocksDB's. What the keys and values mean: catalog_keys.h, record_codec.h.
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
  // Makes the database if it is missing. Corruption if it does not open or is of another format.
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
  std::unique_ptr<CatalogMoment> Freeze() const;
  // The greatest key of a column; null: empty.
  std::optional<std::string> LastKey(Column column) const;

  // `synced`: on disk when it returns, with everything written before. After a failure nothing of
  // the batch is visible, and the next write first tries to bring the database back.
  Status Write(const CatalogBatch& batch, bool synced);

 private:
  friend class CatalogBatch;
  friend class CatalogMoment;
  struct Impl;
  explicit Catalog(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace stockpot
