// What one client sees of the store: chunks, commits, names, events, refusals.
#include <sys/resource.h>

#include <csignal>
#include <set>
#include <thread>

#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using StoreBasicTest = StoreTest;

TEST_F(StoreBasicTest, ChunksOfEverySizeComeBackBeforeAndAfterACommitAndAReopen) {
  std::vector<std::vector<std::byte>> chunks;
  for (const size_t size : {size_t{1}, size_t{17}, size_t{65535}, size_t{65536}, size_t{65537},
                            size_t{1'000'003}, static_cast<size_t>(kChunkBytes)}) {
    chunks.push_back(RandomBytes(random_, size));
  }
  for (const auto& chunk : chunks) {
    const Digest digest = Sha256(chunk);
    EXPECT_FALSE(store_->HaveChunks(std::span(&digest, 1))[0]);
    EXPECT_EQ(store_->ReadChunk(digest).status().code(), StatusCode::kNotFound);
    ASSERT_TRUE(store_->PutChunk(digest, chunk).ok());
    ASSERT_TRUE(store_->PutChunk(digest, chunk).ok()) << "again";
    EXPECT_TRUE(store_->HaveChunks(std::span(&digest, 1))[0]);
    const auto read = store_->ReadChunk(digest);
    ASSERT_TRUE(read.ok()) << read.status().ToString();
    EXPECT_EQ(*read, chunk);
  }
  ASSERT_TRUE(store_->Apply({}).ok());
  for (int round = 0; round < 2; ++round) {
    for (const auto& chunk : chunks) {
      const auto read = store_->ReadChunk(Sha256(chunk));
      ASSERT_TRUE(read.ok()) << read.status().ToString();
      EXPECT_EQ(*read, chunk);
    }
    Reopen();
  }
}

TEST_F(StoreBasicTest, PutChunkRefusesWrongBytesAndSizes) {
  const auto data = RandomBytes(random_, 100'000);
  EXPECT_EQ(store_->PutChunk(Sha256("other"), data).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->PutChunk(Sha256(""), {}).code(), StatusCode::kInvalidArgument);
  const std::vector<std::byte> large(static_cast<size_t>(kChunkBytes) + 1);
  EXPECT_EQ(store_->PutChunk(Sha256(large), large).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->Usage().chunks, 0);
}

TEST_F(StoreBasicTest, ReadPartReturnsEveryRange) {
  const auto data = RandomBytes(random_, static_cast<size_t>(2 * kChunkBytes) + 12345);
  const Result<Part> part = store_->PutBytes(data);
  ASSERT_TRUE(part.ok());
  ASSERT_EQ(part->chunks.size(), 3u);
  ASSERT_TRUE(store_->Apply({}).ok());
  for (int i = 0; i < 40; ++i) {
    const int64_t offset = static_cast<int64_t>(random_() % (data.size() + 1));
    const size_t length = random_() % (data.size() - static_cast<size_t>(offset) + 1);
    std::vector<std::byte> out(length);
    ASSERT_TRUE(store_->ReadPart(*part, offset, out).ok());
    ASSERT_TRUE(std::equal(out.begin(), out.end(), data.begin() + offset)) << offset;
  }
  std::vector<std::byte> one(1);
  EXPECT_TRUE(store_->ReadPart(*part, part->bytes, {}).ok());
  EXPECT_EQ(store_->ReadPart(*part, part->bytes, one).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->ReadPart(*part, -1, one).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->ReadPart(*part, INT64_MAX, one).code(), StatusCode::kInvalidArgument);
  Part lying = *part;
  lying.bytes += 1;
  std::vector<std::byte> whole(data.size() + 1);
  EXPECT_FALSE(store_->ReadPart(lying, 0, whole).ok());
}

TEST_F(StoreBasicTest, SecondOpenIsRefused) {
  const auto second = CheckpointStore::Open(Options());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), StatusCode::kUnavailable);
  store_.reset();
  EXPECT_TRUE(CheckpointStore::Open(Options()).ok());
}

TEST_F(StoreBasicTest, NamesResolve) {
  const Digest base = CommitBase("smollm2");
  const RunRecord run = CommitRun("demo", base);
  const Manifest step = MakeCheckpoint(run, 40, RandomBytes(random_, 70'000));
  Commit commit = CheckpointCommit(step);
  Manifest merge = step;
  merge.kind = ArtifactKind::kMerge;
  commit.artifacts.push_back(merge);
  commit.steps.push_back(
      {.run = "demo", .step = 40, .kind = ArtifactKind::kMerge, .artifact = merge.digest()});
  commit.aliases.push_back({"demo@latest", step.digest(), std::nullopt, "test"});
  commit.routes.push_back({"my-model", step.digest(), std::nullopt, "test"});
  ASSERT_TRUE(store_->Apply(commit).ok());

  const auto expect = [&](std::string_view name, const Digest& digest) {
    const Result<Digest> found = store_->ResolveName(name);
    ASSERT_TRUE(found.ok()) << name << ": " << found.status().ToString();
    EXPECT_EQ(found->Hex(), digest.Hex()) << name;
  };
  expect("smollm2", base);
  expect("demo@40", step.digest());
  expect("demo@40.merge", merge.digest());
  expect("demo@latest", step.digest());
  expect("my-model", step.digest());
  expect(step.digest().Hex(), step.digest());
  expect(step.digest().Hex().substr(0, 6), step.digest());
  for (const std::string_view unknown :
       {"", "demo", "demo@41", "demo@-1", "demo@40x", "demo@", "ffffff", "abcde", "SMOLLM2"}) {
    EXPECT_EQ(store_->ResolveName(unknown).status().code(), StatusCode::kNotFound) << unknown;
  }
  EXPECT_EQ(store_->ResolveName(step.digest().Hex().substr(0, 5)).status().code(),
            StatusCode::kNotFound)
      << "too short";
}

TEST_F(StoreBasicTest, ACommitIsVisibleWholeOrNotAtAll) {
  const Digest base = CommitBase();
  const RunRecord run = CommitRun("r", base);
  const Manifest good = MakeCheckpoint(run, 1, RandomBytes(random_, 70'000));
  const int64_t events = store_->LastEvent();

  struct Case {
    const char* what;
    StatusCode code;
    std::function<void(Commit&)> spoil;
  };
  const Digest unknown = Sha256("unknown");
  const std::vector<Case> cases = {
      {"missing chunk", StatusCode::kInvalidArgument,
       [&](Commit& c) { c.artifacts[0].tensors[0].parts["data"].chunks[0] = unknown; }},
      {"chunk of another length", StatusCode::kInvalidArgument,
       [&](Commit& c) {
         c.artifacts[0].tensors[0].shape = {70'001};
         c.artifacts[0].tensors[0].parts["data"].bytes = 70'001;
       }},
      {"unknown base", StatusCode::kInvalidArgument,
       [&](Commit& c) { c.artifacts[0].base = unknown; }},
      {"base that is no base", StatusCode::kInvalidArgument,
       [&](Commit& c) {
         Manifest on_checkpoint = c.artifacts[0];
         on_checkpoint.base = c.artifacts[0].digest();
         c.artifacts.push_back(on_checkpoint);
       }},
      {"dangling edge", StatusCode::kInvalidArgument,
       [&](Commit& c) { c.edges[0].parent = unknown; }},
      {"edge to itself", StatusCode::kInvalidArgument,
       [&](Commit& c) { c.edges[0].parent = c.edges[0].child; }},
      {"unknown run", StatusCode::kInvalidArgument, [&](Commit& c) { c.steps[0].run = "q"; }},
      {"step of an unknown artifact", StatusCode::kInvalidArgument,
       [&](Commit& c) { c.steps[0].artifact = unknown; }},
      {"step of another kind", StatusCode::kInvalidArgument,
       [&](Commit& c) { c.steps[0].kind = ArtifactKind::kMerge; }},
      {"negative step", StatusCode::kInvalidArgument, [&](Commit& c) { c.steps[0].step = -1; }},
      {"metric that is not finite", StatusCode::kInvalidArgument,
       [&](Commit& c) { c.steps[0].metrics["loss"] = std::nan(""); }},
      {"alias to nowhere", StatusCode::kInvalidArgument,
       [&](Commit& c) {
         c.aliases.push_back({"a", unknown, std::nullopt, ""});
       }},
      {"alias moved twice", StatusCode::kInvalidArgument,
       [&](Commit& c) {
         c.aliases = {{"a", base, std::nullopt, ""}, {"a", base, std::nullopt, ""}};
       }},
      {"alias without a name", StatusCode::kInvalidArgument,
       [&](Commit& c) {
         c.aliases.push_back({"", base, std::nullopt, ""});
       }},
      {"lost compare-and-set", StatusCode::kAlreadyExists,
       [&](Commit& c) {
         c.aliases.push_back({"base", base, Digest{}, ""});
       }},
      {"route lost compare-and-set", StatusCode::kAlreadyExists,
       [&](Commit& c) {
         c.routes.push_back({"x", base, base, ""});
       }},
      {"run with another base", StatusCode::kInvalidArgument,
       [&](Commit& c) { c.runs.push_back({.name = "r", .base = unknown}); }},
      {"run with a bad config", StatusCode::kInvalidArgument,
       [&](Commit& c) {
         RunRecord bad = run;
         bad.config.merge_energy = 0;
         c.runs.push_back(bad);
       }},
      {"eval that is not finite", StatusCode::kInvalidArgument,
       [&](Commit& c) {
         c.evals.push_back({base, "t", "m", INFINITY, 0, ""});
       }},
      {"eval of nothing", StatusCode::kInvalidArgument,
       [&](Commit& c) {
         c.evals.push_back({unknown, "t", "m", 1, 0, ""});
       }},
      {"event without a type", StatusCode::kInvalidArgument,
       [&](Commit& c) { c.events.push_back({}); }},
      {"job without a key", StatusCode::kInvalidArgument, [&](Commit& c) { c.jobs.push_back({}); }},
      {"invalid manifest", StatusCode::kInvalidArgument,
       [&](Commit& c) { c.artifacts[0].tensors[0].name = ""; }},
  };
  for (const Case& one : cases) {
    Commit commit = CheckpointCommit(good);
    one.spoil(commit);
    const Result<int64_t> applied = store_->Apply(commit);
    EXPECT_EQ(applied.status().code(), one.code) << one.what << ": " << applied.status().ToString();
    EXPECT_FALSE(store_->HasArtifact(good.digest())) << one.what;
    EXPECT_TRUE(store_->ListSteps("r").empty()) << one.what;
    EXPECT_TRUE(store_->Parents(good.digest()).empty()) << one.what;
    EXPECT_EQ(store_->ListAliases().size(), 1u) << one.what;
    EXPECT_EQ(store_->LastEvent(), events) << one.what;
  }
  ASSERT_TRUE(store_->Apply(CheckpointCommit(good)).ok());
  EXPECT_EQ(store_->Children(base).size(), 1u);
  EXPECT_EQ(store_->Parents(good.digest())[0].parent, base);

  // The step is taken now: another artifact is refused, the same one is no error.
  const Manifest other = MakeCheckpoint(run, 1, RandomBytes(random_, 80'000));
  EXPECT_EQ(store_->Apply(CheckpointCommit(other)).status().code(), StatusCode::kAlreadyExists);
  EXPECT_FALSE(store_->HasArtifact(other.digest()));
  EXPECT_TRUE(store_->Apply(CheckpointCommit(good)).ok());
  EXPECT_EQ(store_->ListSteps("r").size(), 1u);
}

TEST_F(StoreBasicTest, TensorsThatReferToTheBaseMustFitIt) {
  const Digest base = CommitBase();
  const Manifest base_manifest = *store_->GetManifest(base);
  const TensorEntry& origin = base_manifest.tensors[0];
  Manifest variant;
  variant.kind = ArtifactKind::kVariant;
  variant.base = base;
  variant.tensors.push_back({.name = "w", .dtype = origin.dtype, .shape = origin.shape});
  variant.tensors[0].codec = Codec::kBase;
  variant.tensors[0].content = origin.parts.at("data").digest();
  const auto apply = [&](const Manifest& manifest) {
    Commit commit;
    commit.artifacts.push_back(manifest);
    return store_->Apply(std::move(commit)).status().code();
  };
  Manifest bad = variant;
  bad.tensors[0].content = Sha256("other");
  EXPECT_EQ(apply(bad), StatusCode::kInvalidArgument);
  bad = variant;
  bad.tensors[0].name = "v";
  EXPECT_EQ(apply(bad), StatusCode::kInvalidArgument);
  bad = variant;
  bad.tensors[0].shape.push_back(1);
  EXPECT_EQ(apply(bad), StatusCode::kInvalidArgument);
  bad = variant;
  bad.tensors[0].dtype = DType::kI8;
  EXPECT_EQ(apply(bad), StatusCode::kInvalidArgument);
  EXPECT_EQ(apply(variant), StatusCode::kOk);
}

TEST_F(StoreBasicTest, RecordsSurviveAReopen) {
  const Digest base = CommitBase();
  RunRecord run{.name = "r", .base = base, .tags = {{"team", "a \"quoted\" one"}}};
  run.config.publish = PublishPolicy::kBest;
  run.config.merge_energy = 0.9;
  Commit commit;
  commit.runs.push_back(run);
  Job job{.key = "publish/x", .args = {{"a", "b"}}};
  commit.jobs.push_back(job);
  commit.jobs.push_back({.key = "merge/y", .kind = JobKind::kMerge});
  commit.evals.push_back({base, "arc", "acc", 0.25, 0, "harness"});
  commit.evals.push_back({base, "arc", "acc", 0.5, 7, "harness"});
  commit.events.push_back({.type = "note", .subject = "\xff not UTF-8", .fields = {{"k", "v"}}});
  ASSERT_TRUE(store_->Apply(commit).ok());
  Reopen();
  const Result<RunRecord> stored = store_->GetRun("r");
  ASSERT_TRUE(stored.ok());
  EXPECT_EQ(stored->tags, run.tags);
  EXPECT_EQ(stored->config.publish, PublishPolicy::kBest);
  EXPECT_EQ(stored->config.merge_energy, 0.9);
  EXPECT_EQ(stored->created_ms, 1'000'000);
  ASSERT_EQ(store_->ListJobs().size(), 2u);
  EXPECT_EQ(store_->ListJobs()[0].key, "publish/x");
  EXPECT_EQ(store_->ListJobs()[1].key, "merge/y");
  ASSERT_EQ(store_->ListEvals(base).size(), 2u);
  EXPECT_EQ(store_->ListEvals(base)[0].value, 0.5) << "by time";
  const auto events = store_->EventsSince(0, 100);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].fields.at("k"), "v");
  EXPECT_EQ(events[0].sequence, store_->LastEvent());

  // A known job keeps its place; a new one comes last, also after a reopen.
  job.state = JobState::kDone;
  Commit again;
  again.jobs = {{.key = "publish/z"}, job};
  ASSERT_TRUE(store_->Apply(again).ok());
  const auto jobs = store_->ListJobs();
  ASSERT_EQ(jobs.size(), 3u);
  EXPECT_EQ(jobs[0].key, "publish/x");
  EXPECT_EQ(jobs[0].state, JobState::kDone);
  EXPECT_EQ(jobs[2].key, "publish/z");
}

TEST_F(StoreBasicTest, AliasesMoveByCompareAndSet) {
  const Digest one = CommitBase("one");
  const Digest two = CommitBase("two");
  const auto move = [&](const Digest& to, std::optional<Digest> expected) {
    Commit commit;
    commit.aliases.push_back({"name", to, expected, "me"});
    return store_->Apply(std::move(commit)).status().code();
  };
  EXPECT_EQ(move(one, Digest{}), StatusCode::kOk);
  EXPECT_EQ(move(two, Digest{}), StatusCode::kAlreadyExists);
  EXPECT_EQ(move(two, two), StatusCode::kAlreadyExists);
  EXPECT_EQ(move(two, one), StatusCode::kOk);
  EXPECT_EQ(store_->GetAlias("name")->artifact, two);
  EXPECT_EQ(store_->GetAlias("name")->moved_by, "me");
  EXPECT_EQ(move(Digest{}, one), StatusCode::kAlreadyExists);
  EXPECT_EQ(move(Digest{}, two), StatusCode::kOk);
  EXPECT_FALSE(store_->GetAlias("name").has_value());
  EXPECT_EQ(move(Digest{}, Digest{}), StatusCode::kOk) << "nothing to delete is no error";
}

TEST_F(StoreBasicTest, WaitForEventsWakesOnACommitATimeoutAndShutdown) {
  EXPECT_FALSE(store_->WaitForEvents(0, 1));
  std::thread waiter([&] { EXPECT_TRUE(store_->WaitForEvents(0, 60'000)); });
  Commit commit;
  commit.events.push_back({.type = "note"});
  ASSERT_TRUE(store_->Apply(commit).ok());
  waiter.join();
  std::thread second([&] { EXPECT_FALSE(store_->WaitForEvents(1, 60'000)); });
  store_->Shutdown();
  second.join();
  EXPECT_EQ(store_->Apply(commit).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(store_->EventsSince(0, 10).size(), 1u);
}

TEST_F(StoreBasicTest, PacksRotateAndPreallocationIsGivenBack) {
  pack_bytes_ = 1 << 20;
  Reopen();
  std::vector<std::vector<std::byte>> chunks;
  for (int i = 0; i < 20; ++i) chunks.push_back(RandomBytes(random_, 300'000));
  for (const auto& chunk : chunks) ASSERT_TRUE(store_->PutChunk(Sha256(chunk), chunk).ok());
  ASSERT_TRUE(store_->Apply({}).ok());
  const StoreUsage usage = store_->Usage();
  EXPECT_EQ(usage.chunks, 20);
  EXPECT_EQ(usage.chunk_bytes, 20 * 300'000);
  EXPECT_LE(usage.pack_bytes, usage.chunk_bytes * 105 / 100);
  store_.reset();
  int64_t packs_seen = 0;
  for (const auto& entry : std::filesystem::directory_iterator(packs())) {
    struct stat info;
    ASSERT_EQ(::stat(entry.path().c_str(), &info), 0);
    EXPECT_LE(info.st_blocks * 512, info.st_size + (1 << 20)) << entry.path();
    ++packs_seen;
  }
  EXPECT_GE(packs_seen, 5);
  Open();
  for (const auto& chunk : chunks) EXPECT_EQ(*store_->ReadChunk(Sha256(chunk)), chunk);
}

TEST_F(StoreBasicTest, AReopenedStoreNeverAppendsToAnOldPack) {
  const auto first = RandomBytes(random_, 100'000);
  ASSERT_TRUE(store_->PutChunk(Sha256(first), first).ok());
  ASSERT_TRUE(store_->Apply({}).ok());
  Reopen();
  const auto size_before = std::filesystem::file_size(packs() / "00000001.pack");
  const auto second = RandomBytes(random_, 100'000);
  ASSERT_TRUE(store_->PutChunk(Sha256(second), second).ok());
  ASSERT_TRUE(store_->Apply({}).ok());
  EXPECT_EQ(std::filesystem::file_size(packs() / "00000001.pack"), size_before);
  EXPECT_TRUE(std::filesystem::exists(packs() / "00000002.pack"));
}

TEST_F(StoreBasicTest, C15_TheReserveStopsWritesNotReads) {
  const Digest base = CommitBase();
  const RunRecord run = CommitRun("r", base);
  const auto data = RandomBytes(random_, 200'000);
  const Manifest before = MakeCheckpoint(run, 1, data);
  reserve_bytes_ = int64_t{1} << 60;
  ASSERT_TRUE(store_->Apply(CheckpointCommit(before)).ok());
  Reopen();
  const auto large = RandomBytes(random_, 200'000);
  EXPECT_EQ(store_->PutChunk(Sha256(large), large).code(), StatusCode::kResourceExhausted);
  const auto small = RandomBytes(random_, 100);
  EXPECT_EQ(store_->PutChunk(Sha256(small), small).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(store_->PutBytes(large).status().code(), StatusCode::kResourceExhausted);
  const Digest missing[] = {Sha256(large), Sha256(small)};
  EXPECT_EQ(store_->HaveChunks(missing), (std::vector<bool>{false, false}));
  EXPECT_TRUE(store_->PutChunk(Sha256(data), data).ok()) << "what is stored needs no space";
  EXPECT_EQ(*store_->ReadChunk(Sha256(data)), data);
  reserve_bytes_ = 0;
  Reopen();
  EXPECT_TRUE(store_->PutChunk(Sha256(large), large).ok());
}

// The kernel refuses every write past a file size of 1 MiB: packs fail, the catalogue's log is
// short enough to go on. What a full or failing disk looks like from inside.
TEST_F(StoreBasicTest, AFailedPackLosesNothingAcknowledgedAndTheStoreGoesOn) {
  const Digest base = CommitBase();
  const RunRecord run = CommitRun("r", base);
  const auto safe = RandomBytes(random_, 200'000);
  ASSERT_TRUE(store_->Apply(CheckpointCommit(MakeCheckpoint(run, 1, safe))).ok());
  Reopen();  // a new pack for what comes

  ASSERT_NE(std::signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1 << 20;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto data = RandomBytes(random_, 3'000'000);
  const Manifest lost = MakeCheckpoint(run, 2, data);
  const Digest chunk = Sha256(data);
  EXPECT_TRUE(store_->HaveChunks(std::span(&chunk, 1))[0]) << "accepted, not durable yet";
  const Result<int64_t> refused = store_->Apply(CheckpointCommit(lost));
  EXPECT_EQ(refused.status().code(), StatusCode::kUnavailable) << refused.status().ToString();
  EXPECT_FALSE(store_->HaveChunks(std::span(&chunk, 1))[0]);
  EXPECT_FALSE(store_->HasArtifact(lost.digest()));
  EXPECT_EQ(*store_->ReadChunk(Sha256(safe)), safe);
  EXPECT_EQ(store_->ReadChunk(chunk).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(store_->Apply(CheckpointCommit(lost)).status().code(), StatusCode::kUnavailable);

  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  ASSERT_TRUE(store_->PutChunk(chunk, data).ok());
  ASSERT_TRUE(store_->Apply(CheckpointCommit(lost)).ok());
  Reopen();
  EXPECT_EQ(*store_->ReadChunk(chunk), data);
  EXPECT_EQ(*store_->ReadChunk(Sha256(safe)), safe);
  const Result<ScrubReport> report = store_->Scrub(nullptr);
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(report->damaged.empty());
}

// The catalogue's log cannot be written: commits fail, nothing of them is visible, reads go on. When
// the disk answers again the store goes on by itself, without a gap in its events.
TEST_F(StoreBasicTest, AFailedCatalogueWriteIsSurvived) {
  const Digest base = CommitBase();
  const RunRecord run = CommitRun("r", base);
  ASSERT_TRUE(
      store_->Apply(CheckpointCommit(MakeCheckpoint(run, 1, RandomBytes(random_, 1000)))).ok());
  const Manifest next = MakeCheckpoint(run, 2, RandomBytes(random_, 70'000));
  ASSERT_NE(std::signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_TRUE(store_->Apply({}).ok()) << "the pack is durable: only the catalogue will fail";
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
  const Status refused = store_->Apply(CheckpointCommit(next)).status();
  const Status again = store_->Apply(CheckpointCommit(next)).status();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_FALSE(refused.ok());
  EXPECT_FALSE(again.ok());
  EXPECT_FALSE(store_->HasArtifact(next.digest()));
  EXPECT_EQ(store_->LastEvent(), 1);
  EXPECT_EQ(store_->ListSteps("r").size(), 1u);

  EXPECT_TRUE(store_->GetManifest(base).ok());
  const Result<int64_t> applied = store_->Apply(CheckpointCommit(next));
  ASSERT_TRUE(applied.ok()) << applied.status().ToString();
  EXPECT_EQ(*applied, 2);
  Reopen();
  const auto events = store_->EventsSince(0, 10);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].sequence, 2);
  EXPECT_TRUE(store_->HasArtifact(next.digest()));
}

TEST_F(StoreBasicTest, AChunkPutByOneIsDurableWithTheCommitOfAnother) {
  const Digest base = CommitBase();
  const RunRecord run = CommitRun("r", base);
  const auto data = RandomBytes(random_, 500'000);
  std::thread putter([&] { EXPECT_TRUE(store_->PutChunk(Sha256(data), data).ok()); });
  putter.join();
  Manifest manifest = MakeCheckpoint(run, 1, data);
  ASSERT_TRUE(store_->Apply(CheckpointCommit(manifest)).ok());
  Reopen();
  EXPECT_EQ(*store_->ReadChunk(Sha256(data)), data);
}

}  // namespace
}  // namespace stockpot::test
