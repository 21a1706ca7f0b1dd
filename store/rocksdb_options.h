// Every RocksDB setting of the catalogue, with its reason, in one place (rocksdb_options.cc).
#pragma once

#include <rocksdb/db.h>

#include <vector>

namespace stockpot {

rocksdb::DBOptions CatalogDbOptions();
// In the order of Column (store/catalog.h).
std::vector<rocksdb::ColumnFamilyDescriptor> CatalogColumns();

// For commits: on disk when the write returns.
rocksdb::WriteOptions SyncedWrite();
// For small chunks: made durable by the commit that names them, whose sync covers the log before
// it.
rocksdb::WriteOptions UnsyncedWrite();

}  // namespace stockpot
