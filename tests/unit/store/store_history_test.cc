// Compressed history on a real store: less bytes, the same bits, whatever is deleted, pinned,
// damaged, repaired or killed in between.
#include <gmock/gmock.h>

#include <fcntl.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <set>

#include "store/catalog.h"
#include "store/pack_format.h"
#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using ::testing::HasSubstr;

constexpr size_t kElements = 50'000;  // of a tensor; four bytes each: over the limit of inline ones

class StoreHistoryTest : public StoreTest {
 protected:
  void SetUp() override {
    pack_bytes_ = 2 << 20;
    Reopen();
    Begin();
  }

  void Begin() {
    weights_.assign(kElements, 0.0f);
    for (float& w : weights_) w = Noise();
    Manifest base;
    base.kind = ArtifactKind::kBase;
    base.tensors = {PutWeights("w", weights_)};
    base.files["config.json"] = *store_->PutBytes(Bytes("{}"));
    Commit commit;
    commit.artifacts.push_back(base);
    ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
    run_ = CommitRun("r", base.digest());
    last_ = weights_;
  }

  float Noise() { return static_cast<float>(static_cast<int64_t>(random_() % 2001) - 1000) / 500; }

  TensorEntry PutWeights(const std::string& name, const std::vector<float>& values) {
    TensorEntry tensor = PutTensor(*store_, name, std::as_bytes(std::span(values)));
    tensor.dtype = DType::kF32;
    tensor.shape = {static_cast<int64_t>(values.size())};
    return tensor;
  }

  // A step of training: most weights move by a part in a thousand.
  std::vector<float> Trained(std::vector<float> values) {
    for (float& w : values) {
      if (random_() % 4 != 0) w *= 1.0f + static_cast<float>(random_() % 1000) * 1e-6f;
    }
    return values;
  }

  Digest CommitStep(int64_t step, const std::vector<float>& values) {
    Manifest m{.kind = ArtifactKind::kCheckpoint, .base = run_.base, .run = "r", .step = step};
    m.tensors = {PutWeights("w", values)};
    Commit commit = CheckpointCommit(m);
    commit.aliases.push_back({"r@latest", m.digest(), std::nullopt, "test"});
    const auto applied = store_->Apply(std::move(commit));
    EXPECT_TRUE(applied.ok()) << applied.status().ToString();
    data_[step] = values;
    steps_[step] = m.digest();
    return m.digest();
  }
  Digest Train(int64_t step) {
    last_ = Trained(last_);
    return CommitStep(step, last_);
  }

  HistoryReport Compress(std::optional<Digest> artifact = std::nullopt) {
    const auto report = store_->CompressHistory({.run = "r", .artifact = artifact});
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    return report.ok() ? *report : HistoryReport{};
  }
  void Collect() {
    const auto report = store_->CollectGarbage({.live_ratio = 0.9});
    ASSERT_TRUE(report.ok()) << report.status().ToString();
  }
  void Delete(int64_t step) {
    Commit commit;
    commit.deletions.push_back({.artifact = steps_[step], .purge_ms = now_ms_, .by = "ann"});
    const auto applied = store_->Apply(std::move(commit));
    ASSERT_TRUE(applied.ok()) << applied.status().ToString();
    data_.erase(step);
  }

  Status ReadStep(int64_t step, std::vector<float>& out) {
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_->GetManifest(steps_[step]));
    out.assign(data_[step].size(), 0.0f);
    return store_->ReadPart(manifest.tensors[0].parts.at("data"), 0,
                            std::as_writable_bytes(std::span(out)));
  }
  void ExpectAll() {
    for (const auto& [step, values] : data_) {
      std::vector<float> out;
      const Status read = ReadStep(step, out);
      ASSERT_TRUE(read.ok()) << "step " << step << ": " << read.ToString();
      ASSERT_EQ(std::memcmp(out.data(), values.data(), out.size() * 4), 0) << step;
    }
  }
  void ExpectWhole() {
    const auto report = store_->Scrub(nullptr);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    for (const auto& damage : report->damaged) ADD_FAILURE() << damage.error;
  }

  // The index, read behind the store's back.
  std::map<Digest, ChunkLocation> Index() {
    store_.reset();
    std::map<Digest, ChunkLocation> index;
    {
      const auto catalog = Catalog::Open(folder_.path() / "data" / "catalog");
      EXPECT_TRUE(catalog.ok());
      const Status scanned = (*catalog)->Scan(
          Column::kChunks, "", "", [&](std::string_view key, std::string_view value) {
            index[*Digest::FromRaw(key)] = *ChunkLocation::Decode(value);
            return true;
          });
      EXPECT_TRUE(scanned.ok());
    }
    Open();
    return index;
  }
  Digest ChunkOf(int64_t step) {
    const auto manifest = store_->GetManifest(steps_[step]);
    return manifest->tensors[0].parts.at("data").chunks.at(0);
  }
  static int Depth(const std::map<Digest, ChunkLocation>& index, Digest chunk) {
    int depth = 0;
    while (index.at(chunk).form == ChunkForm::kDelta) {
      chunk = index.at(chunk).parent;
      ++depth;
      EXPECT_LE(depth, 100);
      if (depth > 100) break;
    }
    return depth;
  }
  void FlipByteOf(const ChunkLocation& location) {
    char name[32];
    std::snprintf(name, sizeof name, "%08u.pack", location.pack);
    const int fd = ::open((packs() / name).c_str(), O_RDWR);
    ASSERT_GE(fd, 0);
    const auto at = static_cast<off_t>(location.offset + kRecordHeaderBytes + 200);
    char byte = 0;
    ASSERT_EQ(::pread(fd, &byte, 1, at), 1);
    byte = static_cast<char>(byte ^ 0x10);
    ASSERT_EQ(::pwrite(fd, &byte, 1, at), 1);
    ::close(fd);
  }

  RunRecord run_;
  std::vector<float> weights_, last_;
  std::map<int64_t, std::vector<float>> data_;
  std::map<int64_t, Digest> steps_;
};

TEST_F(StoreHistoryTest, ChainsOfEightThenAnewAtTheBase) {
  for (int step = 0; step < 21; ++step) Train(step);
  const HistoryReport report = Compress();
  EXPECT_EQ(report.artifacts, 20);  // the latest stays whole
  EXPECT_EQ(report.chunks, 20);
  EXPECT_LT(report.stored_bytes, report.chunk_bytes * 0.75);
  ExpectAll();
  Collect();
  ExpectAll();
  ExpectWhole();
  std::vector<Digest> chunks;
  for (int step = 0; step < 21; ++step) chunks.push_back(ChunkOf(step));
  const auto index = Index();
  std::vector<int> depths;
  for (const Digest& chunk : chunks) depths.push_back(Depth(index, chunk));
  EXPECT_EQ(depths, (std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4,
                                      0}));
  const StoreUsage usage = store_->Usage();
  EXPECT_LT(usage.stored_bytes, usage.chunk_bytes * 0.8);
  EXPECT_LT(usage.pack_bytes, usage.chunk_bytes * 0.9) << "the old bytes came back";
  EXPECT_EQ(Compress().chunks, 0) << "nothing is done twice";
}

TEST_F(StoreHistoryTest, WhatMustBeWholeStaysAndBecomesWhole) {
  for (int step = 0; step < 5; ++step) Train(step);
  Commit commit;
  commit.pins.push_back({{.artifact = steps_[1]}, true});
  commit.aliases.push_back({"kept", steps_[2], std::nullopt, "ann"});
  ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
  EXPECT_EQ(Compress().chunks, 2);
  for (const int64_t step : {1, 2, 4}) {
    const auto refused = store_->CompressHistory({.run = "r", .artifact = steps_[step]});
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument) << step;
    EXPECT_THAT(refused.status().message(), HasSubstr("stays whole"));
  }
  std::vector<Digest> chunks;
  for (int step = 0; step < 5; ++step) chunks.push_back(ChunkOf(step));
  auto index = Index();
  for (const int step : {1, 2, 4}) EXPECT_TRUE(index.at(chunks[step]).is_whole()) << step;
  for (const int step : {0, 3}) EXPECT_FALSE(index.at(chunks[step]).is_whole()) << step;
  EXPECT_TRUE(store_->IsCompressed(steps_[3]));
  EXPECT_FALSE(store_->IsCompressed(steps_[1]));

  Commit change;
  change.pins.push_back({{.artifact = steps_[3]}, true});
  change.pins.push_back({{.artifact = steps_[1]}, false});
  ASSERT_TRUE(store_->Apply(std::move(change)).ok());
  const HistoryReport report = Compress();
  EXPECT_EQ(report.whole_chunks, 1);
  EXPECT_EQ(report.chunks, 1);
  index = Index();
  EXPECT_TRUE(index.at(chunks[3]).is_whole());
  EXPECT_FALSE(index.at(chunks[1]).is_whole());
  EXPECT_FALSE(store_->IsCompressed(steps_[3]));
  Collect();
  ExpectAll();
  ExpectWhole();
}

// Everything that a variant or merge consists of is read by whoever serves or merges it.
TEST_F(StoreHistoryTest, ChunksOfServedArtifactsStayWhole) {
  for (int step = 0; step < 3; ++step) Train(step);
  Manifest variant{.kind = ArtifactKind::kVariant, .base = run_.base, .run = "r", .step = 0};
  variant.tensors = {PutWeights("w", data_[0])};
  Commit commit;
  commit.artifacts.push_back(variant);
  commit.edges.push_back({EdgeType::kCompressedFrom, variant.digest(), steps_[0]});
  commit.routes.push_back({"r@0", variant.digest(), std::nullopt, "test"});
  ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
  EXPECT_EQ(Compress().chunks, 1);
  const Digest chunk = ChunkOf(0);
  EXPECT_TRUE(Index().at(chunk).is_whole());
}

TEST_F(StoreHistoryTest, NoiseIsLeftAsItIs) {
  for (int step = 0; step < 3; ++step) {
    std::vector<float> noise(kElements);
    const auto bytes = RandomBytes(random_, kElements * 4);
    std::memcpy(noise.data(), bytes.data(), bytes.size());
    CommitStep(step, noise);
  }
  const HistoryReport report = Compress();
  EXPECT_EQ(report.chunks, 0);
  EXPECT_EQ(report.kept_chunks, 2);
  EXPECT_EQ(Compress().kept_chunks, 0) << "not tried again";
  ExpectAll();
}

// A value that comes back: the chunk of step 2 is that of step 0. No circle.
TEST_F(StoreHistoryTest, ValuesThatComeBackMakeNoCircle) {
  const auto a = Trained(weights_), b = Trained(a);
  for (int step = 0; step < 6; ++step) CommitStep(step, step % 2 == 0 ? a : b);
  CommitStep(6, Trained(b));
  EXPECT_EQ(Compress().chunks, 2);
  ExpectAll();
  Collect();
  ExpectAll();
  ExpectWhole();
}

// Deleting a step in the middle of a chain gives its bytes back and harms nobody.
TEST_F(StoreHistoryTest, DeletedParentsGoAndTheirChildrenStay) {
  for (int step = 0; step < 12; ++step) Train(step);
  Compress();
  Collect();
  const int64_t before = store_->Usage().chunks;
  for (const int step : {1, 3, 4, 5, 9}) Delete(step);
  const auto report = store_->CollectGarbage({});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->artifacts.size(), 5u);
  EXPECT_EQ(store_->Usage().chunks, before - 5) << "nothing is held by a difference to it";
  ExpectAll();
  ExpectWhole();
  std::vector<Digest> chunks;
  for (const auto& [step, values] : data_) chunks.push_back(ChunkOf(step));
  const auto index = Index();
  for (const Digest& chunk : chunks) EXPECT_LE(Depth(index, chunk), kMaxHistoryDepth);
}

// Where a difference cannot be encoded anew, its parent stays.
TEST_F(StoreHistoryTest, ParentsStayWhileDifferencesNeedThem) {
  for (int step = 0; step < 4; ++step) Train(step);
  Compress();
  Delete(1);
  reserve_bytes_ = int64_t{1} << 60;  // no room for a new form
  Reopen();
  const Digest parent = *store_->ResolveName(steps_[1].Hex());
  ASSERT_EQ(parent, steps_[1]);
  const Digest chunk = ChunkOf(1);
  const auto report = store_->CollectGarbage({});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->artifacts.size(), 1u);
  EXPECT_TRUE(Index().contains(chunk));
  ExpectAll();
  reserve_bytes_ = 0;
  Reopen();
  Collect();
  EXPECT_FALSE(Index().contains(chunk));
  ExpectAll();
  ExpectWhole();
}

TEST_F(StoreHistoryTest, DamageIsNamedAndRepaired) {
  for (int step = 0; step < 5; ++step) Train(step);
  const auto backup = folder_.path() / "backup";
  ASSERT_TRUE(store_->BackupTo(backup, nullptr).ok());
  Compress();
  Collect();
  const Digest chunk = ChunkOf(1);
  FlipByteOf(Index().at(chunk));
  std::vector<float> out;
  const Status read = ReadStep(3, out);
  EXPECT_EQ(read.code(), StatusCode::kCorruption);
  EXPECT_THAT(read.message(), HasSubstr(chunk.Hex())) << "the damaged one";
  EXPECT_THAT(read.message(), HasSubstr("a difference to it"));
  EXPECT_TRUE(ReadStep(0, out).ok());
  EXPECT_TRUE(ReadStep(4, out).ok());
  const auto found = store_->Scrub(nullptr);
  ASSERT_TRUE(found.ok());
  std::set<std::string> who;
  for (const auto& damage : found->damaged) who.insert(damage.needed_by.at(0));
  EXPECT_EQ(who, (std::set<std::string>{"artifact " + steps_[1].Hex() + " tensor w",
                                        "artifact " + steps_[2].Hex() + " tensor w",
                                        "artifact " + steps_[3].Hex() + " tensor w"}));
  ASSERT_TRUE(store_->Repair(backup, nullptr).ok());
  ExpectAll();
  ExpectWhole();
}

// Pushed again, a damaged link of a chain is whole; what is a difference to it reads again.
TEST_F(StoreHistoryTest, PushingAgainRepairsAChain) {
  for (int step = 0; step < 4; ++step) Train(step);
  Compress();
  FlipByteOf(Index().at(ChunkOf(0)));
  ASSERT_FALSE(store_->Scrub(nullptr)->damaged.empty());
  CommitStep(0, data_[0]);
  ExpectAll();
  ExpectWhole();
}

TEST_F(StoreHistoryTest, BackupsHoldChunksWhole) {
  for (int step = 0; step < 6; ++step) Train(step);
  Compress();
  const auto backup = folder_.path() / "backup";
  const auto first = store_->BackupTo(backup, nullptr);
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_EQ(store_->BackupTo(backup, nullptr)->copied_chunks, 0);
  store_.reset();
  const auto data = folder_.path() / "data";
  std::filesystem::remove_all(data);
  const auto restored = RestoreStore(backup, data, SystemClock(), nullptr);
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  Open();
  ExpectAll();
  EXPECT_FALSE(store_->IsCompressed(steps_[0]));
  EXPECT_EQ(Compress().chunks, 5);
  ExpectAll();
}

// Stopped by whoever watches: what is done is done, and the rest is done the next time.
TEST_F(StoreHistoryTest, ProgressRisesAndStops) {
  for (int step = 0; step < 8; ++step) Train(step);
  int calls = 0;
  double last = 0;
  const auto stopped = store_->CompressHistory({.run = "r", .progress = [&](double share) {
    EXPECT_GE(share, last);
    EXPECT_LE(share, 1);
    last = share;
    return ++calls == 3 ? Unavailable("enough") : OkStatus();
  }});
  EXPECT_EQ(stopped.status().code(), StatusCode::kUnavailable);
  ExpectAll();
  EXPECT_EQ(Compress().chunks, 4);
  ExpectAll();
}

// Each failpoint of compression and of what follows fails once: the store is right at once, and the
// second attempt does the rest.
TEST_F(StoreHistoryTest, EveryFailpointFailsOnce) {
  std::vector<std::string> names;
  for (const std::string_view name : Failpoints::Names()) {
    if (name.starts_with("history.") || name.starts_with("gc.reb")) names.emplace_back(name);
  }
  ASSERT_EQ(names.size(), 12u);
  int64_t step = 0;
  for (const std::string& name : names) {
    for (const char* at : {"", "@2"}) {
      for (int i = 0; i < 4; ++i) Train(step++);
      const int64_t parent = step - 4;
      StoreOptions options = Options();
      options.failpoints = *Failpoints::FromText(name + "=error" + at);
      store_.reset();
      store_ = *CheckpointStore::Open(options);
      Commit pin;
      pin.pins.push_back({{.artifact = steps_[step - 4]}, true});
      ASSERT_TRUE(store_->Apply(std::move(pin)).ok());
      static_cast<void>(store_->CompressHistory({.run = "r"}));
      Commit unpin;  // the pinned one's turn: compressed, and later whole again
      unpin.pins.push_back({{.artifact = steps_[step - 4]}, false});
      unpin.pins.push_back({{.artifact = steps_[step - 2]}, true});
      ASSERT_TRUE(store_->Apply(std::move(unpin)).ok());
      static_cast<void>(store_->CompressHistory({.run = "r"}));
      Delete(parent);
      static_cast<void>(store_->CollectGarbage({}));
      EXPECT_GE(options.failpoints->Reached(name), 1) << name;
      ExpectAll();
      Reopen();
      ExpectAll();
      Compress();
      Collect();
      ExpectAll();
      ExpectWhole();
    }
  }
}

// A pending difference whose commit failed gets its index entry with a later commit: its parent must
// not go in between, though nothing in the index needs it.
TEST_F(StoreHistoryTest, APendingDifferenceKeepsItsParent) {
  for (int step = 0; step < 4; ++step) Train(step);
  StoreOptions options = Options();
  options.failpoints = *Failpoints::FromText("history.before_flip=error");
  store_.reset();
  store_ = *CheckpointStore::Open(options);
  ASSERT_FALSE(store_->CompressHistory({.run = "r", .artifact = steps_[2]}).ok());
  Delete(1);
  ASSERT_TRUE(store_->CollectGarbage({}).ok());
  ASSERT_TRUE(store_->Apply({}).ok());
  ExpectAll();
  ExpectWhole();
  Reopen();
  ExpectAll();
  ExpectWhole();
}

// A model of what must be readable, against random saves, deletions, pins, names, compression,
// collections, damage and restarts.
TEST_F(StoreHistoryTest, RandomOperationsKeepEveryBit) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  random_.seed(seed);
  int64_t step = 0;
  std::set<int64_t> pinned;
  for (int i = 0; i < 250; ++i) {
    now_ms_ += 1000;
    const uint64_t what = random_() % 10;
    if (what < 4 || data_.size() < 3) {
      if (random_() % 8 == 0 && !data_.empty()) last_ = data_.begin()->second;
      Train(step++);
    } else if (what < 6) {
      auto it = data_.begin();
      std::advance(it, random_() % (data_.size() - 1));  // never the latest
      if (!pinned.contains(it->first)) Delete(it->first);
    } else if (what == 6) {
      auto it = data_.begin();
      std::advance(it, random_() % data_.size());
      const bool on = !pinned.contains(it->first);
      Commit commit;
      commit.pins.push_back({{.artifact = steps_[it->first]}, on});
      ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
      on ? static_cast<void>(pinned.insert(it->first)) : static_cast<void>(pinned.erase(it->first));
    } else if (what == 7) {
      Collect();
    } else if (what == 8) {
      Compress();
    } else {
      Reopen();
    }
    if (i % 10 == 0) ExpectAll();
    if (HasFatalFailure()) return;
  }
  Compress();
  Collect();
  ExpectAll();
  ExpectWhole();
  for (const auto& [digest, location] : Index()) {
    if (location.form == ChunkForm::kDelta) {
      EXPECT_LE(Depth(Index(), digest), kMaxHistoryDepth);
      break;
    }
  }
}

}  // namespace
}  // namespace stockpot::test
