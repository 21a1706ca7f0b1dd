#include "store/catalog.h"

#include <fcntl.h>
#include <rocksdb/db.h>
#include <rocksdb/snapshot.h>
#include <rocksdb/utilities/write_batch_with_index.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "store/catalog_keys.h"
#include "store/commit_mark.h"
#include "store/file_handle.h"
#include "store/rocksdb_options.h"

namespace stockpot {
namespace {

constexpr char kCatalogFormat[] = "1";

// --- limits ---
constexpr int kAttempts = 4;  // of what the disk did not answer to
constexpr std::chrono::milliseconds kFirstPause{5};  // between two; doubles
constexpr std::chrono::milliseconds kHealWait{2000};  // for readers to leave
constexpr int64_t kReopenBytes = int64_t{16} << 20;  // free ones that opening may need

using ReadLock = std::shared_lock<std::shared_mutex>;

rocksdb::Slice ToSlice(std::string_view text) { return {text.data(), text.size()}; }
std::string_view ToView(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

Status FromRocksDb(const rocksdb::Status& status) {
  if (status.ok()) return OkStatus();
  const std::string message = "catalogue: " + status.ToString();
  if (status.IsNoSpace()) return ResourceExhausted(message);
  // A file that is not there was lost: it does not come back.
  if (status.IsCorruption() || status.IsPathNotFound()) return Corruption(message);
  if (status.IsBusy() || status.IsTryAgain() || status.IsTimedOut() || status.IsIOError()) {
    return Unavailable(message);
  }
  return Internal(message);
}

// Two outcomes of opening that RocksDB calls an invalid argument: the file CURRENT is gone, or it
// cannot be opened now.
Status FromOpening(const rocksdb::Status& status) {
  const std::string message = "catalogue: " + status.ToString();
  if (!status.IsInvalidArgument()) return FromRocksDb(status);
  if (message.find("does not exist") != std::string::npos) return Corruption(message);
  if (message.find("Direct I/O") != std::string::npos) return Unavailable(message);
  return Internal(message);
}

// Calls `body` again, with a growing pause before, while it is Unavailable.
template <typename Body>
Status Persist(Body body) {
  Status status = body();
  auto pause = kFirstPause;
  for (int i = 1; i < kAttempts && status.code() == StatusCode::kUnavailable; ++i) {
    std::this_thread::sleep_for(pause);
    pause *= 2;
    status = body();
  }
  return status;
}

// Whether the file system has room, and takes a write and a sync.
Status ReadyToReopen(const std::filesystem::path& directory) {
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t free_bytes, FreeBytes(directory));
  if (free_bytes < kReopenBytes) return ResourceExhausted("the disk is full");
  const std::filesystem::path path = directory / "probe.tmp";
  STOCKPOT_ASSIGN_OR_RETURN(const auto file, OpenFile(path, O_WRONLY | O_CREAT | O_TRUNC));
  bool direct = false;
  const std::vector<std::byte> block(4096);
  Status status = WriteExactly(*file, 0, block, direct);
  if (status.ok()) status = SyncFileData(*file);
  ::unlink(path.c_str());
  return status;
}

}  // namespace

struct Catalog::Impl {
  std::filesystem::path directory;
  std::unique_ptr<CommitMark> mark;

  // Shared by whoever uses the database, exclusive while it is opened anew.
  mutable std::shared_mutex mutex;
  std::unique_ptr<rocksdb::DB> db;  // null: it could not be opened again
  std::vector<rocksdb::ColumnFamilyHandle*> columns;
  std::mutex columns_mutex;  // the vector, for those who do not use the database

  std::mutex heal_mutex;            // one heals at a time
  std::atomic<bool> failed{false};  // the last write did not succeed
  std::atomic<int64_t> openings{0};

  ~Impl() { CloseDatabase(); }

  // REQUIRES for both: mutex held exclusively, or nobody else there.
  Status OpenDatabase();
  void CloseDatabase();

  // The right to use the database, opening it if that failed before.
  Result<ReadLock> Use();
  Status Heal();
  Status OpenAnew();
  Status WriteOnce(const CatalogBatch& batch, bool synced);

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
  const std::lock_guard lock(catalog_.impl_->columns_mutex);
  impl_->batch.Put(catalog_.impl_->Handle(column), ToSlice(key), ToSlice(value))
      .PermitUncheckedError();
}

void CatalogBatch::Delete(Column column, std::string_view key) {
  const std::lock_guard lock(catalog_.impl_->columns_mutex);
  impl_->batch.Delete(catalog_.impl_->Handle(column), ToSlice(key)).PermitUncheckedError();
}

Result<std::optional<std::string>> CatalogBatch::Get(Column column, std::string_view key) const {
  STOCKPOT_ASSIGN_OR_RETURN(const ReadLock lock, catalog_.impl_->Use());
  std::string value;
  rocksdb::Status found;
  STOCKPOT_RETURN_IF_ERROR(Persist([&] {
    found = impl_->batch.GetFromBatchAndDB(catalog_.impl_->db.get(), rocksdb::ReadOptions(),
                                           catalog_.impl_->Handle(column), ToSlice(key), &value);
    return found.IsNotFound() ? OkStatus() : FromRocksDb(found);
  }));
  if (found.IsNotFound()) return std::optional<std::string>();
  return std::optional<std::string>(std::move(value));
}

bool CatalogBatch::empty() const { return impl_->batch.GetWriteBatch()->Count() == 0; }

Catalog::Catalog(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Catalog::~Catalog() = default;

Status Catalog::Impl::OpenDatabase() {
  rocksdb::DBOptions options = CatalogDbOptions();
  // A database that was there and is not is damage, and making one deletes what is left of it.
  options.create_if_missing = mark->last() == 0;
  STOCKPOT_RETURN_IF_ERROR(mark->CheckFileList(directory));
  rocksdb::DB* opened = nullptr;
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  const rocksdb::Status status = rocksdb::DB::Open(options, directory.string(), CatalogColumns(),
                                                   &handles, &opened);
  db.reset(opened);
  if (!status.ok()) {
    return FromOpening(status).WithContext("open " + directory.string());
  }
  {
    const std::lock_guard lock(columns_mutex);
    columns = std::move(handles);
  }
  ++openings;
  STOCKPOT_RETURN_IF_ERROR(
      mark->Check(db->GetLatestSequenceNumber()).WithContext("open " + directory.string()));
  mark->NoteFileList(directory, /*opened=*/true);
  return OkStatus();
}

void Catalog::Impl::CloseDatabase() {
  if (db == nullptr) return;
  for (rocksdb::ColumnFamilyHandle* column : columns) db->DestroyColumnFamilyHandle(column);
  db->Close().PermitUncheckedError();
  db = nullptr;
  if (!failed) mark->NoteFileList(directory);
}

Result<ReadLock> Catalog::Impl::Use() {
  ReadLock lock(mutex);
  if (db != nullptr) return Result<ReadLock>(std::move(lock));
  lock.unlock();
  STOCKPOT_RETURN_IF_ERROR(Heal());
  lock.lock();
  if (db == nullptr) return Unavailable("the catalogue is closed: it could not be opened again");
  return Result<ReadLock>(std::move(lock));
}

Status Catalog::Impl::Heal() {
  if (!failed) return OkStatus();
  const std::lock_guard one(heal_mutex);
  if (!failed) return OkStatus();
  {
    const ReadLock lock(mutex);
    // It is not closed before the disk has room and takes writes again: until then, reads go on.
    // DB::Resume() is no way: it goes on with the log that failed, which asserts where asserts are.
    const Status ready = db == nullptr ? OkStatus() : ReadyToReopen(directory);
    if (!ready.ok()) {
      return Unavailable("the catalogue takes no writes after one failed (" + ready.message() +
                         "); reads go on");
    }
  }
  return OpenAnew();
}

Status Catalog::Impl::OpenAnew() {
  const auto deadline = std::chrono::steady_clock::now() + kHealWait;
  std::unique_lock lock(mutex, std::try_to_lock);
  while (!lock.owns_lock()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return Unavailable("the catalogue takes no writes after one failed, until those who read it "
                         "let it be opened anew");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    static_cast<void>(lock.try_lock());
  }
  CloseDatabase();
  const Status status = OpenDatabase();
  if (!status.ok()) {
    CloseDatabase();
    return status;
  }
  failed = false;
  return OkStatus();
}

Result<std::unique_ptr<Catalog>> Catalog::Open(const std::filesystem::path& directory) {
  auto impl = std::make_unique<Impl>();
  impl->directory = directory;
  STOCKPOT_ASSIGN_OR_RETURN(impl->mark, CommitMark::Open(directory.parent_path() / "COMMITTED"));
  STOCKPOT_RETURN_IF_ERROR(Persist([&] {
    impl->CloseDatabase();
    return impl->OpenDatabase();
  }));
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
  STOCKPOT_ASSIGN_OR_RETURN(const ReadLock lock, impl_->Use());
  std::string value;
  rocksdb::Status found;
  STOCKPOT_RETURN_IF_ERROR(Persist([&] {
    found = impl_->db->Get(rocksdb::ReadOptions(), impl_->Handle(column), ToSlice(key), &value);
    return found.IsNotFound() ? OkStatus() : FromRocksDb(found);
  }));
  if (found.IsNotFound()) return std::optional<std::string>();
  return std::optional<std::string>(std::move(value));
}

bool Catalog::Has(Column column, std::string_view key) const {
  const Result<std::optional<std::string>> value = Get(column, key);
  return value.ok() && value->has_value();
}

// REQUIRES: the lock of Use() held.
Status Catalog::Impl::Scan(const rocksdb::ReadOptions& options, Column column,
                           std::string_view prefix, std::string_view first,
                           const Visit& visit) const {
  std::string from(first.empty() ? prefix : first);
  bool visited = false;  // the key `from`
  rocksdb::ReadOptions one_moment = options;
  std::optional<rocksdb::ManagedSnapshot> snapshot;  // the same one in every attempt
  if (one_moment.snapshot == nullptr) {
    snapshot.emplace(db.get());
    one_moment.snapshot = snapshot->snapshot();
  }
  return Persist([&] {
    const std::unique_ptr<rocksdb::Iterator> it(db->NewIterator(one_moment, Handle(column)));
    it->Seek(ToSlice(from));
    if (visited && it->Valid() && it->key() == ToSlice(from)) it->Next();
    for (; it->Valid() && it->key().starts_with(ToSlice(prefix)); it->Next()) {
      if (!visit(ToView(it->key()), ToView(it->value()))) return OkStatus();
      from.assign(it->key().data(), it->key().size());
      visited = true;
    }
    return FromRocksDb(it->status());
  });
}

Status Catalog::Scan(Column column, std::string_view prefix, std::string_view first,
                     const Visit& visit) const {
  STOCKPOT_ASSIGN_OR_RETURN(const ReadLock lock, impl_->Use());
  return impl_->Scan(rocksdb::ReadOptions(), column, prefix, first, visit);
}

// Holds the right to use the database as long as it lives: it is not opened anew meanwhile.
struct CatalogMoment::Impl {
  ReadLock lock;
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

Result<std::unique_ptr<CatalogMoment>> Catalog::Freeze() const {
  STOCKPOT_ASSIGN_OR_RETURN(ReadLock lock, impl_->Use());
  return std::unique_ptr<CatalogMoment>(
      new CatalogMoment(std::unique_ptr<CatalogMoment::Impl>(new CatalogMoment::Impl{
          std::move(lock), *impl_, rocksdb::ManagedSnapshot(impl_->db.get())})));
}

Result<std::optional<std::string>> Catalog::LastKey(Column column) const {
  STOCKPOT_ASSIGN_OR_RETURN(const ReadLock lock, impl_->Use());
  std::optional<std::string> key;
  STOCKPOT_RETURN_IF_ERROR(Persist([&] {
    const std::unique_ptr<rocksdb::Iterator> it(
        impl_->db->NewIterator(rocksdb::ReadOptions(), impl_->Handle(column)));
    it->SeekToLast();
    if (it->Valid()) key = it->key().ToString();
    return FromRocksDb(it->status());
  }));
  return key;
}

Status Catalog::Impl::WriteOnce(const CatalogBatch& batch, bool synced) {
  STOCKPOT_ASSIGN_OR_RETURN(const ReadLock lock, Use());
  rocksdb::WriteBatch* writes = batch.impl_->batch.GetWriteBatch();
  // Others may write beside this: at least so many writes are on disk once it is.
  const uint64_t last = db->GetLatestSequenceNumber() + static_cast<uint64_t>(writes->Count());
  const Status status =
      FromRocksDb(db->Write(synced ? SyncedWrite() : UnsyncedWrite(), writes));
  if (!status.ok()) failed = true;
  if (status.ok() && synced) {
    mark->Advance(last);
    mark->NoteFileList(directory);
  }
  return status;
}

// The same batch again after the database was brought back is the same outcome, whether or not the
// first attempt reached the disk.
Status Catalog::Write(const CatalogBatch& batch, bool synced) {
  return Persist([&]() -> Status {
    STOCKPOT_RETURN_IF_ERROR(impl_->Heal());
    return impl_->WriteOnce(batch, synced);
  });
}

Status Catalog::Heal() { return Persist([&] { return impl_->Heal(); }); }

int64_t Catalog::openings() const { return impl_->openings; }

Status Catalog::Verify() const {
  STOCKPOT_ASSIGN_OR_RETURN(const ReadLock lock, impl_->Use());
  return Persist([&] { return FromRocksDb(impl_->db->VerifyChecksum()); });
}

}  // namespace stockpot
