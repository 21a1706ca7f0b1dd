#include "store/catalog.h"

#include <rocksdb/db.h>
#include <rocksdb/snapshot.h>
#include <rocksdb/utilities/write_batch_with_index.h>

#include <atomic>
#include <vector>

#include "store/catalog_keys.h"
#include "store/rocksdb_options.h"

namespace stockpot {
namespace {

constexpr char kCatalogFormat[] = "1";

rocksdb::Slice ToSlice(std::string_view text) { return {text.data(), text.size()}; }
std::string_view ToView(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

Status FromRocksDb(const rocksdb::Status& status) {
  if (status.ok()) return OkStatus();
  const std::string message = "catalogue: " + status.ToString();
  if (status.IsNoSpace()) return ResourceExhausted(message);
  if (status.IsCorruption()) return Corruption(message);
  if (status.IsBusy() || status.IsTryAgain() || status.IsTimedOut()) return Unavailable(message);
  return Internal(message);
}

}  // namespace

struct Catalog::Impl {
  std::unique_ptr<rocksdb::DB> db;
  std::vector<rocksdb::ColumnFamilyHandle*> columns;
  std::atomic<bool> failed{false};  // the last write did not succeed

  ~Impl() {
    if (db == nullptr) return;
    for (rocksdb::ColumnFamilyHandle* column : columns) db->DestroyColumnFamilyHandle(column);
    db->Close().PermitUncheckedError();
  }
  Status Scan(const rocksdb::ReadOptions& options, Column column, std::string_view prefix,
              std::string_view first, const Visit& visit) const;
  rocksdb::ColumnFamilyHandle* Handle(Column column) const {
    return columns[static_cast<size_t>(column)];
  }
};

struct CatalogBatch::Impl {
  // Overwrite mode: one entry a key, the last write wins.
  rocksdb::WriteBatchWithIndex batch{rocksdb::BytewiseComparator(), 0, true};
};

CatalogBatch::CatalogBatch(const Catalog& catalog)
    : catalog_(catalog), impl_(std::make_unique<Impl>()) {}
CatalogBatch::~CatalogBatch() = default;

// A batch in memory without a size limit and with a default comparator cannot refuse a write.
void CatalogBatch::Put(Column column, std::string_view key, std::string_view value) {
  impl_->batch.Put(catalog_.impl_->Handle(column), ToSlice(key), ToSlice(value))
      .PermitUncheckedError();
}

void CatalogBatch::Delete(Column column, std::string_view key) {
  impl_->batch.Delete(catalog_.impl_->Handle(column), ToSlice(key)).PermitUncheckedError();
}

Result<std::optional<std::string>> CatalogBatch::Get(Column column, std::string_view key) const {
  std::string value;
  const rocksdb::Status status =
      impl_->batch.GetFromBatchAndDB(catalog_.impl_->db.get(), rocksdb::ReadOptions(),
                                     catalog_.impl_->Handle(column), ToSlice(key), &value);
  if (status.IsNotFound()) return std::optional<std::string>();
  if (!status.ok()) return FromRocksDb(status);
  return std::optional<std::string>(std::move(value));
}

bool CatalogBatch::empty() const { return impl_->batch.GetWriteBatch()->Count() == 0; }

Catalog::Catalog(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Catalog::~Catalog() = default;

Result<std::unique_ptr<Catalog>> Catalog::Open(const std::filesystem::path& directory) {
  auto impl = std::make_unique<Impl>();
  rocksdb::DB* db = nullptr;
  const rocksdb::Status opened = rocksdb::DB::Open(CatalogDbOptions(), directory.string(),
                                                   CatalogColumns(), &impl->columns, &db);
  impl->db.reset(db);
  if (!opened.ok()) return FromRocksDb(opened).WithContext("open " + directory.string());
  std::unique_ptr<Catalog> catalog(new Catalog(std::move(impl)));

  STOCKPOT_ASSIGN_OR_RETURN(const auto format,
                            catalog->Get(Column::kRecords, catalog_keys::kFormat));
  const std::string stored = format.value_or(kCatalogFormat);
  if (stored != kCatalogFormat) {
    return Corruption("the store has format " + stored + ", this version reads " + kCatalogFormat);
  }
  if (!format) {
    CatalogBatch batch(*catalog);
    batch.Put(Column::kRecords, catalog_keys::kFormat, kCatalogFormat);
    STOCKPOT_RETURN_IF_ERROR(catalog->Write(batch, /*synced=*/true));
  }
  return catalog;
}

Result<std::optional<std::string>> Catalog::Get(Column column, std::string_view key) const {
  std::string value;
  const rocksdb::Status status =
      impl_->db->Get(rocksdb::ReadOptions(), impl_->Handle(column), ToSlice(key), &value);
  if (status.IsNotFound()) return std::optional<std::string>();
  if (!status.ok()) return FromRocksDb(status);
  return std::optional<std::string>(std::move(value));
}

bool Catalog::Has(Column column, std::string_view key) const {
  const Result<std::optional<std::string>> value = Get(column, key);
  return value.ok() && value->has_value();
}

Status Catalog::Impl::Scan(const rocksdb::ReadOptions& options, Column column,
                           std::string_view prefix, std::string_view first,
                           const Visit& visit) const {
  const std::unique_ptr<rocksdb::Iterator> it(db->NewIterator(options, Handle(column)));
  it->Seek(ToSlice(first.empty() ? prefix : first));
  for (; it->Valid() && it->key().starts_with(ToSlice(prefix)); it->Next()) {
    if (!visit(ToView(it->key()), ToView(it->value()))) break;
  }
  return FromRocksDb(it->status());
}

Status Catalog::Scan(Column column, std::string_view prefix, std::string_view first,
                     const Visit& visit) const {
  return impl_->Scan(rocksdb::ReadOptions(), column, prefix, first, visit);
}

struct CatalogMoment::Impl {
  const Catalog::Impl& catalog;
  rocksdb::ManagedSnapshot snapshot;
};

CatalogMoment::CatalogMoment(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CatalogMoment::~CatalogMoment() = default;

Status CatalogMoment::Scan(Column column, std::string_view prefix, std::string_view first,
                           const Catalog::Visit& visit) const {
  rocksdb::ReadOptions options;
  options.snapshot = impl_->snapshot.snapshot();
  return impl_->catalog.Scan(options, column, prefix, first, visit);
}

std::unique_ptr<CatalogMoment> Catalog::Freeze() const {
  return std::unique_ptr<CatalogMoment>(new CatalogMoment(std::unique_ptr<CatalogMoment::Impl>(
      new CatalogMoment::Impl{*impl_, rocksdb::ManagedSnapshot(impl_->db.get())})));
}

std::optional<std::string> Catalog::LastKey(Column column) const {
  const std::unique_ptr<rocksdb::Iterator> it(
      impl_->db->NewIterator(rocksdb::ReadOptions(), impl_->Handle(column)));
  it->SeekToLast();
  if (!it->Valid()) return std::nullopt;
  return it->key().ToString();
}

Status Catalog::Write(const CatalogBatch& batch, bool synced) {
  if (impl_->failed) {
    // A failed log write stops the database. After a full disk it recovers by itself, within
    // seconds of there being room; after other errors of the log only opening it anew helps.
    const rocksdb::Status resumed = impl_->db->Resume();
    if (!resumed.ok()) {
      return Unavailable("the catalogue takes no writes after one failed (" + resumed.ToString() +
                         "); reads go on; make room on the disk, or restart");
    }
    impl_->failed = false;
  }
  const Status status = FromRocksDb(impl_->db->Write(synced ? SyncedWrite() : UnsyncedWrite(),
                                                     batch.impl_->batch.GetWriteBatch()));
  if (!status.ok()) impl_->failed = true;
  return status;
}

}  // namespace stockpot
