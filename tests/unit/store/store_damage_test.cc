// Any flipped or truncated stored byte is found and named; wrong bytes are never returned.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <set>

#include "store/pack_format.h"
#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

constexpr int kFlips = 300;

class StoreDamageTest : public StoreTest {
 protected:
  struct Record {
    std::filesystem::path pack;
    int64_t offset = 0;  // of the record header
    Digest chunk;
    std::vector<std::byte> data;
  };

  // A base of several tensors over several packs. Where each chunk lies is found by its own bytes,
  // so that the test trusts no index.
  void Fill() {
    pack_bytes_ = 1 << 20;
    Reopen();
    Manifest manifest;
    manifest.kind = ArtifactKind::kBase;
    for (int i = 0; i < 6; ++i) {
      const auto data = RandomBytes(random_, 250'000 + static_cast<size_t>(i) * 1000);
      manifest.tensors.push_back(PutTensor(*store_, "tensor" + std::to_string(i), data));
      records_.push_back({.chunk = Sha256(data), .data = data});
    }
    const auto config = Bytes("{\"model_type\": \"llama\"}");
    manifest.files["config.json"] = *store_->PutBytes(config);
    artifact_ = manifest.digest();
    Commit commit;
    commit.artifacts.push_back(manifest);
    ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
    for (const auto& entry : std::filesystem::directory_iterator(packs())) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::string content{std::istreambuf_iterator<char>(file), {}};
      for (Record& record : records_) {
        const std::string needle(reinterpret_cast<const char*>(record.data.data()), 64);
        const size_t at = content.find(needle);
        if (at == std::string::npos) continue;
        record.pack = entry.path();
        record.offset = static_cast<int64_t>(at) - kRecordHeaderBytes;
      }
    }
    for (const Record& record : records_) ASSERT_FALSE(record.pack.empty());
  }

  static void Flip(const std::filesystem::path& path, int64_t offset, int bit) {
    const int fd = ::open(path.c_str(), O_RDWR);
    ASSERT_GE(fd, 0);
    uint8_t byte;
    ASSERT_EQ(::pread(fd, &byte, 1, offset), 1);
    byte = static_cast<uint8_t>(byte ^ (1 << bit));
    ASSERT_EQ(::pwrite(fd, &byte, 1, offset), 1);
    ::close(fd);
  }

  // Exactly this chunk is reported, with its place and everybody who needs it.
  void ExpectScrubNames(const Record& record, const std::string& tensor) {
    const Result<ScrubReport> report = store_->Scrub(nullptr);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    ASSERT_EQ(report->damaged.size(), 1u);
    const ScrubReport::Damage& damage = report->damaged[0];
    EXPECT_EQ(damage.chunk, record.chunk);
    EXPECT_NE(damage.error.find(record.pack.filename().string()), std::string::npos)
        << damage.error;
    EXPECT_NE(damage.error.find("offset " + std::to_string(record.offset)), std::string::npos);
    ASSERT_EQ(damage.needed_by.size(), 1u);
    EXPECT_EQ(damage.needed_by[0], "artifact " + artifact_.Hex() + " tensor " + tensor);
  }

  std::vector<Record> records_;
  Digest artifact_;
};

TEST_F(StoreDamageTest, RandomFlipsAreAllFoundAndNamed) {
  const char* given = std::getenv("STOCKPOT_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  std::mt19937_64 random(seed);
  Fill();
  for (int i = 0; i < kFlips; ++i) {
    const size_t index = random() % records_.size();
    const Record& record = records_[index];
    const int64_t length = kRecordHeaderBytes + static_cast<int64_t>(record.data.size());
    // A third of the flips go into the header, which is a small share of the bytes.
    const int64_t at = random() % 3 == 0 ? static_cast<int64_t>(random() % kRecordHeaderBytes)
                                         : static_cast<int64_t>(random() % length);
    const int bit = static_cast<int>(random() % 8);
    Flip(record.pack, record.offset + at, bit);
    const auto read = store_->ReadChunk(record.chunk);
    if (at >= kRecordHeaderBytes) {
      ASSERT_EQ(read.status().code(), StatusCode::kCorruption) << "flip " << i << " at " << at;
      ASSERT_NE(read.status().message().find(record.chunk.Hex()), std::string::npos);
    } else {
      ASSERT_TRUE(read.ok()) << "the chunk itself is whole";
      ASSERT_EQ(*read, record.data);
    }
    ExpectScrubNames(record, "tensor" + std::to_string(index));
    if (HasFailure()) FAIL() << "flip " << i << " at " << at << " bit " << bit;
    Flip(record.pack, record.offset + at, bit);
  }
  EXPECT_TRUE(store_->Scrub(nullptr)->damaged.empty()) << "all flips were undone";
}

TEST_F(StoreDamageTest, ADamagedPackHeaderIsFound) {
  Fill();
  Flip(records_[0].pack, 3, 1);
  const auto report = store_->Scrub(nullptr);
  ASSERT_TRUE(report.ok());
  size_t expected = 0;
  for (const Record& record : records_) expected += record.pack == records_[0].pack;
  EXPECT_EQ(report->damaged.size(), expected);
  EXPECT_EQ(*store_->ReadChunk(records_[0].chunk), records_[0].data);
}

TEST_F(StoreDamageTest, TruncatedAndMissingPacksAreFound) {
  Fill();
  const Record& record = records_.back();
  for (const int64_t keep : {record.offset + 10'000, record.offset + 10, record.offset}) {
    Reopen();
    std::filesystem::resize_file(record.pack, static_cast<uintmax_t>(keep));
    const auto read = store_->ReadChunk(record.chunk);
    EXPECT_EQ(read.status().code(), StatusCode::kCorruption) << read.status().ToString();
    ExpectScrubNames(record, "tensor5");
  }
  const std::filesystem::path first = records_[0].pack;
  std::filesystem::remove(first);
  Reopen();
  std::set<Digest> expected = {record.chunk};
  for (const Record& r : records_) {
    if (r.pack == first) expected.insert(r.chunk);
  }
  const auto report = store_->Scrub(nullptr);
  ASSERT_TRUE(report.ok());
  std::set<Digest> found;
  for (const ScrubReport::Damage& damage : report->damaged) {
    found.insert(damage.chunk);
    EXPECT_EQ(damage.needed_by.size(), 1u);
  }
  EXPECT_EQ(found, expected);
  EXPECT_EQ(store_->ReadChunk(records_[0].chunk).status().code(), StatusCode::kCorruption);
}

// The catalogue's own files: RocksDB's checksums must turn every flip into an error or nothing.
TEST_F(StoreDamageTest, FlipsInTheCatalogueNeverYieldWrongBytes) {
  const char* given = std::getenv("STOCKPOT_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  std::mt19937_64 random(seed);
  Fill();
  const std::string manifest = store_->GetManifest(artifact_)->ToJson();
  store_.reset();
  const std::filesystem::path data = folder_.path() / "data";
  const std::filesystem::path copy = folder_.path() / "copy";
  std::filesystem::copy(data, copy, std::filesystem::copy_options::recursive);
  int noticed = 0;
  for (int i = 0; i < 40; ++i) {
    std::filesystem::remove_all(data);
    std::filesystem::copy(copy, data, std::filesystem::copy_options::recursive);
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(data / "catalog")) {
      const std::string extension = entry.path().extension();
      if ((extension == ".sst" || extension == ".log") && entry.file_size() > 0) {
        files.push_back(entry.path());
      }
    }
    std::sort(files.begin(), files.end());
    ASSERT_FALSE(files.empty());
    const auto& file = files[random() % files.size()];
    Flip(file, static_cast<int64_t>(random() % std::filesystem::file_size(file)),
         static_cast<int>(random() % 8));
    auto store = CheckpointStore::Open(Options());
    if (!store.ok()) {
      ++noticed;
      continue;
    }
    const Result<Manifest> read = (*store)->GetManifest(artifact_);
    ASSERT_TRUE(!read.ok() || read->ToJson() == manifest);
    bool whole = read.ok();
    for (const Record& record : records_) {
      const auto chunk = (*store)->ReadChunk(record.chunk);
      ASSERT_TRUE(!chunk.ok() || *chunk == record.data);
      whole = whole && chunk.ok();
    }
    noticed += !whole;
  }
  std::printf("%d of 40 flips were noticed, the others hit unused bytes\n", noticed);
}

// RocksDB takes a list of its files that was cut for a shorter one, and deletes the files that are
// not on it. So it must not be let near one: put back, the store is what it was.
TEST_F(StoreDamageTest, ADamagedListOfFilesIsRefusedBeforeAnythingIsDeleted) {
  Fill();
  for (int i = 0; i < 3; ++i) Reopen();  // each turns the log into tables
  CommitBase("last");
  store_.reset();
  const std::filesystem::path catalog = folder_.path() / "data" / "catalog";
  const auto files = [&] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(catalog)) {
      names.insert(entry.path().filename().string());
    }
    return names;
  };
  std::string current;
  std::ifstream(catalog / "CURRENT") >> current;
  const std::filesystem::path list = catalog / current;
  const std::set<std::string> before = files();
  std::ifstream in(list, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  ASSERT_GT(whole.size(), 100u);
  for (size_t at = 0; at < whole.size(); at += 1 + whole.size() / 40) {
    for (const bool cut : {true, false}) {
      std::string damaged = cut ? whole.substr(0, at) : whole;
      if (!cut) damaged[at] = static_cast<char>(damaged[at] ^ 16);
      std::ofstream(list, std::ios::binary | std::ios::trunc) << damaged;
      const Status status = CheckpointStore::Open(Options()).status();
      EXPECT_EQ(status.code(), StatusCode::kCorruption) << status.ToString();
      EXPECT_NE(status.message().find(current), std::string::npos) << status.ToString();
      EXPECT_NE(status.message().find("stockpot restore"), std::string::npos) << status.ToString();
    }
  }
  EXPECT_EQ(files(), before);
  std::ofstream(list, std::ios::binary | std::ios::trunc) << whole;
  Reopen();
  EXPECT_TRUE(store_->GetManifest(artifact_).ok());
  EXPECT_TRUE(store_->ResolveName("last").ok());
}

// An older list of files than the one that was open last is not the store's either.
TEST_F(StoreDamageTest, AnOlderListOfFilesIsRefused) {
  Fill();
  store_.reset();
  const std::filesystem::path catalog = folder_.path() / "data" / "catalog";
  const std::filesystem::path copy = folder_.path() / "copy";
  std::filesystem::copy(catalog, copy, std::filesystem::copy_options::recursive);
  Open();
  store_.reset();
  std::filesystem::remove_all(catalog);
  std::filesystem::copy(copy, catalog, std::filesystem::copy_options::recursive);
  const Status status = CheckpointStore::Open(Options()).status();
  EXPECT_EQ(status.code(), StatusCode::kCorruption) << status.ToString();
  EXPECT_NE(status.message().find("MANIFEST"), std::string::npos) << status.ToString();
  std::filesystem::remove(folder_.path() / "data" / "COMMITTED");  // as the message says
  Open();
  EXPECT_TRUE(store_->GetManifest(artifact_).ok());
}

TEST_F(StoreDamageTest, ADamagedChunkCanBeReadAgainAfterRepairOfTheFile) {
  Fill();
  std::vector<std::byte> out(records_[1].data.size());
  const Manifest manifest = *store_->GetManifest(artifact_);
  const Part& part = manifest.Find("tensor1")->parts.at("data");
  Flip(records_[1].pack, records_[1].offset + kRecordHeaderBytes, 0);
  EXPECT_EQ(store_->ReadPart(part, 0, out).code(), StatusCode::kCorruption);
  EXPECT_EQ(store_->ReadPart(part, 5, std::span(out).first(7)).code(), StatusCode::kCorruption);
  Flip(records_[1].pack, records_[1].offset + kRecordHeaderBytes, 0);
  EXPECT_TRUE(store_->ReadPart(part, 0, out).ok());
  EXPECT_EQ(out, records_[1].data);
}

}  // namespace
}  // namespace stockpot::test
