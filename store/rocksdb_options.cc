#include "store/rocksdb_options.h"

#include <rocksdb/cache.h>
#include <rocksdb/env.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/listener.h>
#include <rocksdb/table.h>

#include <cstdarg>
#include <memory>

namespace stockpot {
namespace {

// --- limits ---
constexpr size_t kBlockCacheBytes = size_t{48} << 20;  // all columns together
constexpr size_t kMemtableBytes = size_t{8} << 20;     // of one column
constexpr size_t kAllMemtablesBytes = size_t{32} << 20;
constexpr uint64_t kMaxLogBytes = uint64_t{64} << 20;  // write-ahead log: bounds recovery time
constexpr int kMaxOpenFiles = 256;

rocksdb::ColumnFamilyOptions ColumnOptions(const std::shared_ptr<rocksdb::Cache>& cache,
                                           rocksdb::CompressionType compression) {
  rocksdb::ColumnFamilyOptions options;
  options.write_buffer_size = kMemtableBytes;
  options.compression = compression;
  options.level_compaction_dynamic_level_bytes = true;  // space amplification ~1.1
  // Reading a value that was damaged on disk must fail, not return it.
  options.paranoid_file_checks = false;  // rereading each new file doubles its I/O; scrub does that

  rocksdb::BlockBasedTableOptions table;
  table.block_cache = cache;
  // Index and filter blocks count against the cache: memory stays bounded whatever the store holds.
  table.cache_index_and_filter_blocks = true;
  table.pin_l0_filter_and_index_blocks_in_cache = true;
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));  // most lookups of new chunks miss
  table.whole_key_filtering = true;
  table.checksum = rocksdb::kXXH3;  // RocksDB's CRC32C is the slow software one here
  table.format_version = 5;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

// RocksDB's own text log is off. On a full disk a line of it fails to be written, and the next line
// then meets an assertion in builds that have them (Debian's has): the process would die of its
// log.
class NoLog : public rocksdb::Logger {
 public:
  NoLog() : Logger(rocksdb::InfoLogLevel::FATAL_LEVEL) {}
  using Logger::Logv;
  void Logv(const char*, va_list) override {}
};

// After a full disk RocksDB would bring itself back from a thread of its own, seconds later. It
// then uses the log that failed, which meets an assertion in builds that have them, and it would
// do so beside Catalog::Heal(), which knows when there is room and opens anew.
class NoRecoveryByItself : public rocksdb::EventListener {
 public:
  void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason, rocksdb::Status,
                            bool* auto_recovery) override {
    *auto_recovery = false;
  }
};

}  // namespace

rocksdb::DBOptions CatalogDbOptions() {
  rocksdb::DBOptions options;
  options.create_if_missing = true;
  options.create_missing_column_families = true;

  // After a crash the log is replayed up to the first record that is not whole: commits are a
  // prefix of what was written, and every acknowledged one (synced) is in it.
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kPointInTimeRecovery;
  options.paranoid_checks = true;  // open read-only rather than with silently missing data
  options.max_total_wal_size = kMaxLogBytes;

  // Left at their defaults on purpose, because they are unsafe or wrong together in 7.8:
  //   manual_wal_flush = false       a write must reach the log before it is acknowledged
  //   wal_compression = none         broken with recovery after a partial block in 7.8
  //   track_and_verify_wals_in_manifest = false   fails with synced writes over several logs
  //   atomic_flush = false           the log is on; it would only add a flush of every column
  //   recycle_log_file_num = 0       old records in a reused log defeat point-in-time recovery

  options.db_write_buffer_size = kAllMemtablesBytes;
  options.max_open_files = kMaxOpenFiles;
  options.max_background_jobs = 2;    // the cores belong to hashing, codecs and serving
  options.bytes_per_sync = 1 << 20;   // no burst of dirty pages beside the packs' direct I/O
  options.stats_dump_period_sec = 0;  // statistics are the daemon's to write
  options.stats_persist_period_sec = 0;
  options.info_log = std::make_shared<NoLog>();
  options.listeners.push_back(std::make_shared<NoRecoveryByItself>());
  options.max_bgerror_resume_count = 0;  // nor after other errors
  return options;
}

std::vector<rocksdb::ColumnFamilyDescriptor> CatalogColumns() {
  const std::shared_ptr<rocksdb::Cache> cache = rocksdb::NewLRUCache(kBlockCacheBytes);
  const auto text = ColumnOptions(cache, rocksdb::kLZ4Compression);
  const auto hashes =
      ColumnOptions(cache, rocksdb::kNoCompression);  // digests and weights do not shrink
  return {{rocksdb::kDefaultColumnFamilyName, text},
          {"chunks", hashes},
          {"inline", hashes},
          {"manifests", text},
          {"events", text}};
}

rocksdb::WriteOptions SyncedWrite() {
  rocksdb::WriteOptions options;
  options.sync = true;
  return options;
}

rocksdb::WriteOptions UnsyncedWrite() { return {}; }

}  // namespace stockpot
