// Sessions of several ranks: what gathers into one checkpoint, what is refused and by which name,
// and what every rank is told.
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <map>
#include <thread>

#include "store/ingest.h"
#include "store/raw_tensor_reader.h"
#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A tensor as the whole job sees it.
struct GlobalTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

// The bytes of a box of a tensor, row-major: element by element.
std::vector<std::byte> BoxBytes(const GlobalTensor& tensor, const TensorBox& box) {
  const int64_t width = DTypeSize(tensor.dtype);
  std::vector<std::byte> out;
  std::vector<int64_t> index = box.offsets;
  for (int64_t left = box.elements(); left > 0; --left) {
    int64_t flat = 0;
    for (size_t dim = 0; dim < index.size(); ++dim) flat = flat * tensor.shape[dim] + index[dim];
    const auto from = tensor.bytes.begin() + flat * width;
    out.insert(out.end(), from, from + width);
    for (size_t dim = index.size(); dim-- > 0;) {
      if (++index[dim] < box.offsets[dim] + box.shape[dim]) break;
      index[dim] = box.offsets[dim];
    }
  }
  return out;
}

// What rank `rank` of `world` holds of a dimension when it is dealt out as PyTorch's FSDP does:
// ceil(size / world) each, the last ones less or nothing.
TensorBox RowsOf(const std::vector<int64_t>& shape, size_t dim, int rank, int world) {
  TensorBox box = WholeBox(shape);
  const int64_t each = (shape[dim] + world - 1) / world;
  box.offsets[dim] = std::min<int64_t>(shape[dim], each * rank);
  box.shape[dim] = std::min<int64_t>(shape[dim], each * (rank + 1)) - box.offsets[dim];
  return box;
}

class IngestRanksTest : public StoreTest {
 protected:
  IngestRanksTest() {
    Restart();
    const auto data = RandomBytes(random_, 100);
    const auto session = ingest_->OpenSession({.kind = ArtifactKind::kBase, .run = "base"});
    ShardCommit shard;
    shard.tensors.push_back(PutTensor(*store_, "w", data));
    shard.files["config.json"] = store_->PutBytes(Bytes("{}")).value();
    EXPECT_TRUE(ingest_->CommitShard(*session, std::move(shard)).ok());
    RunConfig config;
    config.merge_every = 0;
    EXPECT_TRUE(ingest_->CreateRun("r", "base", config, {}).ok());
  }

  void Restart(IngestLimits limits = {.session_idle_ms = 1000}) {
    ingest_ = std::make_unique<Ingest>(*store_, limits, [this] { return now_ms_.load(); });
  }

  GlobalTensor MakeTensor(const std::string& name, DType dtype, std::vector<int64_t> shape) {
    GlobalTensor tensor{name, dtype, std::move(shape), {}};
    tensor.bytes = RandomBytes(
        random_, static_cast<size_t>(WholeBox(tensor.shape).elements() * DTypeSize(dtype)));
    return tensor;
  }

  // An entry of a shard that holds one box; its chunks are put.
  TensorEntry Piece(const GlobalTensor& tensor, const TensorBox& box) {
    TensorEntry entry{.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape};
    entry.pieces.push_back(box);
    entry.parts[PieceRole(0)] = store_->PutBytes(BoxBytes(tensor, box)).value();
    return entry;
  }
  TensorEntry Whole(const GlobalTensor& tensor) {
    TensorEntry entry{.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape};
    entry.parts["data"] = store_->PutBytes(tensor.bytes).value();
    return entry;
  }

  static SessionRequest Request(int rank, int world, int64_t step = 1,
                                const std::string& attempt = "job-0") {
    return {.run = "r", .step = step, .rank = rank, .world = world, .attempt = attempt};
  }
  static StepKey Key(int world, int64_t step = 1, const std::string& attempt = "job-0") {
    return {"r", step, world, attempt};
  }

  Result<CommitReply> Commit(const SessionRequest& request, ShardCommit shard) {
    const Result<std::string> session = ingest_->OpenSession(request);
    if (!session.ok()) return session.status();
    return ingest_->CommitShard(*session, std::move(shard));
  }
  static ShardCommit Shard(std::vector<TensorEntry> tensors) {
    ShardCommit shard;
    shard.tensors = std::move(tensors);
    return shard;
  }

  // Every tensor of an artifact, read back, is that of `tensors`.
  void ExpectStored(const Digest& artifact, const std::vector<GlobalTensor>& tensors) {
    const Result<Manifest> manifest = store_->GetManifest(artifact);
    ASSERT_TRUE(manifest.ok()) << manifest.status().ToString();
    ASSERT_EQ(manifest->tensors.size(), tensors.size());
    for (const GlobalTensor& tensor : tensors) {
      const TensorEntry* entry = manifest->Find(tensor.name);
      ASSERT_NE(entry, nullptr) << tensor.name;
      ASSERT_EQ(entry->shape, tensor.shape);
      EXPECT_EQ(ReadBox(*entry, WholeBox(tensor.shape)), tensor.bytes) << tensor.name;
    }
  }
  std::vector<std::byte> ReadBox(const TensorEntry& entry, const TensorBox& box) {
    const RawTensorReader reader(
        entry, [this](const Part& part, int64_t offset, std::span<std::byte> out) {
          return store_->ReadPart(part, offset, out);
        });
    std::vector<std::byte> out(static_cast<size_t>(box.elements() * DTypeSize(entry.dtype)));
    const Status status = reader.ReadBox(box, out);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return out;
  }

  // Commits rank after rank; the last reply, or the first failure.
  Result<CommitReply> CommitAll(int world, const std::function<ShardCommit(int)>& shard_of,
                                int64_t step = 1, const std::string& attempt = "job-0") {
    Result<CommitReply> reply = Internal("no rank");
    for (int rank = 0; rank < world; ++rank) {
      reply = Commit(Request(rank, world, step, attempt), shard_of(rank));
      if (!reply.ok()) return reply;
      EXPECT_EQ(reply->complete, rank + 1 == world);
    }
    return reply;
  }

  std::unique_ptr<Ingest> ingest_;
};

TEST_F(IngestRanksTest, ShardsGatherIntoOneCheckpoint) {
  const std::vector<GlobalTensor> tensors = {MakeTensor("a", DType::kBF16, {7, 5}),
                                             MakeTensor("b", DType::kF32, {6}),
                                             MakeTensor("scalar", DType::kI64, {})};
  const int64_t events = store_->LastEvent();
  const auto shard_of = [&](int rank) {
    ShardCommit shard = Shard({Piece(tensors[0], RowsOf(tensors[0].shape, 1, rank, 3)),
                               Piece(tensors[1], RowsOf(tensors[1].shape, 0, rank, 3))});
    if (rank == 2) shard.tensors.push_back(Whole(tensors[2]));
    shard.metrics["loss"] = 3 - rank;
    shard.metrics["of_rank_" + std::to_string(rank)] = 1;
    return shard;
  };
  const auto first = Commit(Request(1, 3), shard_of(1));
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_FALSE(first->complete);
  EXPECT_TRUE(first->artifact.IsZero());
  EXPECT_THAT(first->missing, ElementsAre(0, 2));
  EXPECT_EQ(store_->LastEvent(), events) << "nothing is visible before all are in";
  EXPECT_TRUE(store_->ListSteps("r").empty());
  const auto open = ingest_->OpenGatherings();
  ASSERT_EQ(open.size(), 1u);
  EXPECT_EQ(open[0].key, Key(3));
  EXPECT_THAT(open[0].missing, ElementsAre(0, 2));
  EXPECT_THAT(Commit(Request(2, 3), shard_of(2))->missing, ElementsAre(0));
  EXPECT_THAT(ingest_->GetStepState(Key(3), 0)->missing, ElementsAre(0));
  const auto last = Commit(Request(0, 3), shard_of(0));
  ASSERT_TRUE(last.ok()) << last.status().ToString();
  EXPECT_TRUE(last->complete);
  EXPECT_FALSE(last->existed);
  ExpectStored(last->artifact, tensors);
  EXPECT_EQ(*store_->ResolveName("r@latest"), last->artifact);
  const auto steps = store_->ListSteps("r");
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].metrics.at("loss"), 3) << "the lowest rank's";
  EXPECT_EQ(steps[0].metrics.size(), 4u);
  EXPECT_EQ(ingest_->GetStepState(Key(3), 0)->artifact, last->artifact);
  EXPECT_THAT(ingest_->OpenGatherings(), IsEmpty());
  EXPECT_EQ(ingest_->open_sessions(), 0);
  // The same content, cut the same way, is the same artifact, whoever sends it in which order.
  for (const int rank : {2, 0, 1}) {
    const auto again = Commit(Request(rank, 3, 1, "job-1"), shard_of(rank));
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_TRUE(again->complete && again->existed);
    EXPECT_EQ(again->artifact, last->artifact);
  }
  EXPECT_THAT(ingest_->OpenGatherings(), IsEmpty());
}

TEST_F(IngestRanksTest, C11_SaveOnNRanksLoadOnMForAll64Pairs) {
  // Odd sizes, fewer rows than ranks, columns cut too, a scalar, nothing at all.
  const std::vector<GlobalTensor> tensors = {
      MakeTensor("a.rows", DType::kBF16, {13, 7}), MakeTensor("b.columns", DType::kF32, {5, 11}),
      MakeTensor("c.few", DType::kF16, {3, 5}),    MakeTensor("d.vector", DType::kF64, {17}),
      MakeTensor("e.cube", DType::kU8, {7, 3, 9}), MakeTensor("f.scalar", DType::kI64, {}),
      MakeTensor("g.empty", DType::kF32, {0, 4})};
  const std::vector<size_t> cut = {0, 1, 0, 0, 2, 0, 0};  // the dimension of each tensor
  int pairs = 0;
  for (int n = 1; n <= 8; ++n) {
    const auto saved = CommitAll(
        n,
        [&](int rank) {
          ShardCommit shard;
          for (size_t t = 0; t < tensors.size(); ++t) {
            if (tensors[t].shape.empty()) {
              shard.tensors.push_back(Whole(tensors[t]));  // replicated
            } else {
              shard.tensors.push_back(Piece(tensors[t], RowsOf(tensors[t].shape, cut[t], rank, n)));
            }
          }
          return shard;
        },
        n);
    ASSERT_TRUE(saved.ok()) << n << " ranks: " << saved.status().ToString();
    ExpectStored(saved->artifact, tensors);
    const Manifest manifest = store_->GetManifest(saved->artifact).value();
    for (int m = 1; m <= 8; ++m) {
      for (int rank = 0; rank < m; ++rank) {
        for (size_t t = 0; t < tensors.size(); ++t) {
          // Along the saved dimension and across it: all kinds of boxes.
          for (size_t dim = 0; dim < tensors[t].shape.size(); ++dim) {
            const TensorBox box = RowsOf(tensors[t].shape, dim, rank, m);
            ASSERT_EQ(ReadBox(*manifest.Find(tensors[t].name), box), BoxBytes(tensors[t], box))
                << n << " -> " << m << ", rank " << rank << ", " << tensors[t].name << BoxText(box);
          }
        }
      }
      ++pairs;
    }
  }
  EXPECT_EQ(pairs, 64);
}

TEST_F(IngestRanksTest, C11_GapsOverlapsAndDisagreementsNameTensorRanksAndRange) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {8, 6});
  const GlobalTensor other = MakeTensor("w", DType::kF32, {8, 6});
  const GlobalTensor as_f64 = MakeTensor("w", DType::kF64, {8, 6});
  const GlobalTensor taller = MakeTensor("w", DType::kF32, {9, 6});
  const TensorBox upper{{0, 0}, {4, 6}};
  const TensorBox lower{{4, 0}, {4, 6}};
  struct Case {
    std::string what;
    std::vector<std::string> words;
    std::vector<TensorEntry> of_rank_0;
    std::vector<TensorEntry> of_rank_1;
  };
  const TensorEntry tied{.name = "w", .dtype = DType::kF32, .shape = {8, 6}, .alias_of = "v"};
  const std::vector<Case> cases = {
      {"a gap",
       {"no rank holds [5:8, 0:6] of [8, 6]", "ranks 0 and 1"},
       {Piece(w, upper)},
       {Piece(w, {{4, 0}, {1, 6}})}},
      {"an overlap",
       {"[3:4, 0:6] of [8, 6] is held twice", "rank 0", "rank 1"},
       {Piece(w, upper)},
       {Piece(w, {{3, 0}, {5, 6}})}},
      {"nothing of a tensor",
       {"no rank holds", "nobody"},
       {Piece(w, {{0, 0}, {0, 6}})},
       {Piece(w, {{8, 0}, {0, 6}})}},
      {"whole and in pieces", {"is held twice"}, {Whole(w)}, {Piece(w, lower)}},
      {"replicas that differ",
       {"rank 0 and rank 1 hold different bytes of [0:8, 0:6]"},
       {Whole(w)},
       {Whole(other)}},
      {"pieces that differ",
       {"rank 0 and rank 1 hold different bytes of [0:4, 0:6]"},
       {Piece(w, upper), Piece(w, lower)},
       {Piece(other, upper)}},
      {"twice from one rank",
       {"rank 1 sent [4:8, 0:6] twice"},
       {Piece(w, upper)},
       {Piece(w, lower), Piece(w, lower)}},
      {"whole and in pieces from one rank",
       {"rank 1 names it twice"},
       {Piece(w, upper)},
       {Piece(w, {{8, 0}, {0, 6}}), Whole(w)}},
      {"tied twice from one rank", {"rank 1 names it twice"}, {tied}, {tied, tied}},
      {"another dtype",
       {"the dtype is F32 on rank 0 and F64 on rank 1"},
       {Piece(w, upper)},
       {Piece(as_f64, lower)}},
      {"another shape",
       {"the whole shape is [8, 6] on rank 0 and [9, 6] on rank 1"},
       {Piece(w, upper)},
       {Piece(taller, {{4, 0}, {5, 6}})}},
      {"tied on one rank only",
       {"the tensor it is tied to is none on rank 0 and 'v' on rank 1"},
       {Whole(w)},
       {tied}},
  };
  int64_t step = 10;
  for (const Case& one : cases) {
    ++step;
    ASSERT_TRUE(Commit(Request(0, 2, step), Shard(one.of_rank_0)).ok()) << one.what;
    const auto waiting = ingest_->OpenSession(Request(0, 2, step));
    const auto reply = Commit(Request(1, 2, step), Shard(one.of_rank_1));
    ASSERT_EQ(reply.status().code(), StatusCode::kInvalidArgument) << one.what;
    EXPECT_THAT(reply.status().message(), HasSubstr("tensor 'w'")) << one.what;
    EXPECT_THAT(reply.status().message(), HasSubstr("r@" + std::to_string(step))) << one.what;
    const auto state = ingest_->GetStepState(Key(2, step), 0);
    ASSERT_TRUE(state.ok()) << state.status().ToString();
    EXPECT_EQ(state->state, GatherState::kFailed) << one.what;
    // The other rank hears of it too, at its next call and when it asks.
    const Status next = ingest_->HaveChunks(*waiting, {}).status();
    for (const std::string& words : one.words) {
      EXPECT_THAT(reply.status().message(), HasSubstr(words)) << one.what;
      EXPECT_THAT(state->why, HasSubstr(words)) << one.what;
      EXPECT_THAT(next.message(), HasSubstr(words)) << one.what;
    }
  }
  EXPECT_TRUE(store_->ListSteps("r").empty());
  EXPECT_THAT(ingest_->OpenGatherings(), IsEmpty());
  EXPECT_EQ(ingest_->open_sessions(), 0);
}

TEST_F(IngestRanksTest, FilesTiesAndReplicasAreTakenOnce) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {8, 6});
  const TensorEntry tied{.name = "z", .dtype = DType::kF32, .shape = {8, 6}, .alias_of = "w"};
  const Part config = store_->PutBytes(Bytes("{}")).value();
  const Part other = store_->PutBytes(Bytes("[]")).value();
  const auto replicated = CommitAll(3, [&](int) {  // plain data parallelism
    ShardCommit shard = Shard({Whole(w), tied});
    shard.files["config.json"] = config;
    return shard;
  });
  ASSERT_TRUE(replicated.ok()) << replicated.status().ToString();
  const Manifest manifest = store_->GetManifest(replicated->artifact).value();
  EXPECT_EQ(manifest.Find("w")->parts.size(), 1u);
  EXPECT_THAT(manifest.Find("w")->pieces, IsEmpty());
  EXPECT_EQ(manifest.Resolve("z")->name, "w");
  EXPECT_EQ(manifest.stored_bytes(), 8 * 6 * 4 + 2);
  // What one rank would have sent alone: the same artifact.
  ShardCommit alone = Shard({Whole(w), tied});
  alone.files["config.json"] = config;
  const auto single = Commit({.run = "r", .step = 1}, std::move(alone));
  ASSERT_TRUE(single.ok()) << single.status().ToString();
  EXPECT_EQ(single->artifact, replicated->artifact);
  EXPECT_TRUE(single->existed);
  const auto differing = CommitAll(
      2,
      [&](int rank) {
        ShardCommit shard = Shard({Whole(w)});
        shard.files["config.json"] = rank == 0 ? config : other;
        return shard;
      },
      2);
  EXPECT_THAT(differing.status().message(),
              HasSubstr("file config.json differs between rank 0 and rank 1"));
}

// What is no weight is gathered likewise, each group for itself.
TEST_F(IngestRanksTest, StatesAreGatheredAndProvenToo) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {8, 6});
  const GlobalTensor moment = MakeTensor("w", DType::kF32, {5, 3});
  const auto shard_of = [&](int rank) {
    ShardCommit shard = Shard({Piece(w, RowsOf(w.shape, 0, rank, 2))});
    shard.states["optimizer"] = {Piece(moment, RowsOf(moment.shape, 0, rank, 2))};
    return shard;
  };
  const auto made = CommitAll(2, shard_of);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  ExpectStored(made->artifact, {w});
  ExpectStored(made->states.at("optimizer"), {moment});
  for (const int rank : {0, 1}) {
    const auto again = Commit(Request(rank, 2), shard_of(rank));
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_TRUE(again->complete && again->existed);
    EXPECT_EQ(again->states, made->states);
  }
  const auto gap = CommitAll(
      2,
      [&](int rank) {
        ShardCommit shard = shard_of(rank);
        if (rank == 1) shard.states.clear();
        return shard;
      },
      2);
  EXPECT_THAT(gap.status().message(),
              HasSubstr("group 'optimizer': tensor 'w': no rank holds [3:5, 0:3] of [5, 3]"));
}

// Pieces in a session of one rank: gathered by the client, or a whole tensor as one piece.
TEST_F(IngestRanksTest, OneRankMaySendPieces) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {4, 6});
  const auto cut = Commit({.run = "r", .step = 1},
                          Shard({Piece(w, {{2, 0}, {2, 6}}), Piece(w, {{0, 0}, {2, 6}})}));
  ASSERT_TRUE(cut.ok()) << cut.status().ToString();
  ExpectStored(cut->artifact, {w});
  const auto whole = Commit({.run = "r", .step = 2}, Shard({Piece(w, WholeBox(w.shape))}));
  ASSERT_TRUE(whole.ok());
  EXPECT_THAT(store_->GetManifest(whole->artifact)->Find("w")->pieces, IsEmpty());
  ShardCommit base = Shard({Piece(w, {{2, 0}, {2, 6}}), Piece(w, {{0, 0}, {2, 6}})});
  base.files["config.json"] = store_->PutBytes(Bytes("{}")).value();
  const auto refused = Commit({.kind = ArtifactKind::kBase, .run = "other"}, std::move(base));
  EXPECT_THAT(refused.status().message(), HasSubstr("a base's tensors are stored whole"));
}

TEST_F(IngestRanksTest, C8_NRanksCommitAtOnceAndTwiceAndMakeOneCheckpoint) {
  const GlobalTensor w = MakeTensor("w", DType::kBF16, {64, 32});
  constexpr int kWorld = 6;
  constexpr int kThreads = 3;  // of each rank, all with the same content
  for (int64_t step = 1; step <= 12; ++step) {
    const int64_t checkpoints = static_cast<int64_t>(store_->ListSteps("r").size());
    std::vector<std::thread> ranks;
    std::vector<Result<CommitReply>> replies(kWorld * kThreads, Internal("not run"));
    for (int i = 0; i < kWorld * kThreads; ++i) {
      ranks.emplace_back([&, i] {
        const int rank = i % kWorld;
        replies[static_cast<size_t>(i)] = Commit(
            Request(rank, kWorld, step), Shard({Piece(w, RowsOf(w.shape, 0, rank, kWorld))}));
      });
    }
    for (std::thread& rank : ranks) rank.join();
    const auto state = ingest_->GetStepState(Key(kWorld, step), 0);
    ASSERT_TRUE(state.ok()) << state.status().ToString();
    ASSERT_EQ(state->state, GatherState::kComplete) << state->why;
    int made = 0;
    for (const auto& reply : replies) {
      ASSERT_TRUE(reply.ok()) << reply.status().ToString();
      made += reply->complete && !reply->existed;
      if (reply->complete) EXPECT_EQ(reply->artifact, state->artifact);
    }
    EXPECT_EQ(made, 1);
    EXPECT_EQ(static_cast<int64_t>(store_->ListSteps("r").size()), checkpoints + 1);
    ExpectStored(state->artifact, {w});
  }
  EXPECT_EQ(ingest_->open_sessions(), 0);
}

// The answer to a commit was lost on the way: the client asks again.
TEST_F(IngestRanksTest, C8_ACommitIsRepeatedThroughTheSameSessionAndAnother) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {4, 6});
  const auto shard_of = [&](int rank) { return Shard({Piece(w, RowsOf(w.shape, 0, rank, 2))}); };
  const auto session = ingest_->OpenSession(Request(0, 2));
  const auto first = ingest_->CommitShard(*session, shard_of(0));
  ASSERT_TRUE(first.ok());
  const auto same_session = ingest_->CommitShard(*session, shard_of(0));
  ASSERT_TRUE(same_session.ok()) << same_session.status().ToString();
  EXPECT_THAT(same_session->missing, ElementsAre(1));
  EXPECT_THAT(Commit(Request(0, 2), shard_of(0))->missing, ElementsAre(1));
  EXPECT_EQ(ingest_->CommitShard(*session, shard_of(1)).status().code(), StatusCode::kNotFound);
  const auto made = Commit(Request(1, 2), shard_of(1));
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const auto after = ingest_->CommitShard(*session, shard_of(0));
  ASSERT_TRUE(after.ok());
  EXPECT_TRUE(after->complete && after->existed);
  EXPECT_EQ(after->artifact, made->artifact);
  const int64_t events = store_->LastEvent();
  for (const int rank : {1, 0}) {
    const auto later = Commit(Request(rank, 2), shard_of(rank));
    ASSERT_TRUE(later.ok()) << later.status().ToString();
    EXPECT_TRUE(later->complete && later->existed);
    EXPECT_EQ(later->artifact, made->artifact);
  }
  EXPECT_EQ(store_->LastEvent(), events);
  // A session of one rank likewise.
  const auto alone = ingest_->OpenSession({.run = "r", .step = 7});
  const auto once = ingest_->CommitShard(*alone, Shard({Whole(w)}));
  const auto twice = ingest_->CommitShard(*alone, Shard({Whole(w)}));
  ASSERT_TRUE(once.ok() && twice.ok());
  EXPECT_EQ(once->artifact, twice->artifact);
  EXPECT_TRUE(twice->existed);
}

TEST_F(IngestRanksTest, C9_AMissingRankExpiresTheStepAndIsNamed) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {8, 6});
  const auto shard_of = [&](int rank) { return Shard({Piece(w, RowsOf(w.shape, 0, rank, 4))}); };
  const auto committed = ingest_->OpenSession(Request(0, 4));
  ASSERT_TRUE(ingest_->CommitShard(*committed, shard_of(0)).ok());
  const auto working = ingest_->OpenSession(Request(2, 4));
  now_ms_ += 900;
  EXPECT_TRUE(ingest_->HaveChunks(*working, {}).ok()) << "keeps the step open";
  now_ms_ += 900;
  EXPECT_EQ(ingest_->GetStepState(Key(4), 0)->state, GatherState::kOpen);
  EXPECT_THAT(ingest_->GetStepState(Key(4), 0)->missing, ElementsAre(1, 2, 3));
  now_ms_ += 900;
  ingest_->ExpireIdle();
  const auto state = ingest_->GetStepState(Key(4), 0);
  ASSERT_TRUE(state.ok());
  EXPECT_EQ(state->state, GatherState::kFailed);
  EXPECT_THAT(state->missing, ElementsAre(1, 2, 3));
  const std::string words = "ranks 1, 2 and 3 never committed";
  EXPECT_THAT(state->why, HasSubstr(words));
  EXPECT_THAT(state->why, HasSubstr("'job-0'"));
  EXPECT_THAT(ingest_->HaveChunks(*working, {}).status().message(), HasSubstr(words));
  EXPECT_THAT(ingest_->CommitShard(*committed, shard_of(0)).status().message(), HasSubstr(words));
  EXPECT_TRUE(store_->ListSteps("r").empty());
  EXPECT_EQ(ingest_->open_sessions(), 0);
  // They may begin anew; the step is made as if nothing had been.
  const auto made = CommitAll(4, shard_of);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  ExpectStored(made->artifact, {w});
}

// Nobody else has to call for the question to end, and no longer than it asked.
TEST_F(IngestRanksTest, C9_WaitingForAStepEndsWithItOrInTime) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {8, 6});
  const auto shard_of = [&](int rank) { return Shard({Piece(w, RowsOf(w.shape, 0, rank, 2))}); };
  ASSERT_TRUE(Commit(Request(0, 2), shard_of(0)).ok());
  EXPECT_EQ(ingest_->GetStepState(Key(2), 1)->state, GatherState::kOpen);
  Result<StepState> waited = Internal("not run");
  std::thread waiter([&] { waited = ingest_->GetStepState(Key(2), 30'000); });
  const auto made = Commit(Request(1, 2), shard_of(1));
  waiter.join();
  ASSERT_TRUE(waited.ok() && made.ok());
  EXPECT_EQ(waited->state, GatherState::kComplete);
  EXPECT_EQ(waited->artifact, made->artifact);
  // The clock ends it too.
  ASSERT_TRUE(Commit(Request(0, 2, 2), shard_of(0)).ok());
  std::thread other([&] { waited = ingest_->GetStepState(Key(2, 2), 30'000); });
  now_ms_ += 5000;
  other.join();
  ASSERT_TRUE(waited.ok());
  EXPECT_EQ(waited->state, GatherState::kFailed);
  EXPECT_THAT(waited->why, HasSubstr("rank 1 never committed"));
  EXPECT_EQ(ingest_->GetStepState(Key(2, 3), 0).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(ingest_->GetStepState({"no such run", 1, 2, "x"}, 0).status().code(),
            StatusCode::kInvalidArgument);
}

TEST_F(IngestRanksTest, AttemptsOfOneStepDoNotMix) {
  const GlobalTensor before = MakeTensor("w", DType::kF32, {8, 6});
  const GlobalTensor after = MakeTensor("w", DType::kF32, {8, 6});
  const auto shard_of = [&](const GlobalTensor& w, int rank, int world) {
    return Shard({Piece(w, RowsOf(w.shape, 0, rank, world))});
  };
  // A job of 3 ranks dies when two have committed; it comes back with 2 and with other weights.
  ASSERT_TRUE(Commit(Request(0, 3, 1, "job-0"), shard_of(before, 0, 3)).ok());
  ASSERT_TRUE(Commit(Request(1, 3, 1, "job-0"), shard_of(before, 1, 3)).ok());
  EXPECT_FALSE(Commit(Request(0, 2, 1, "job-1"), shard_of(after, 0, 2))->complete);
  const auto made = Commit(Request(1, 2, 1, "job-1"), shard_of(after, 1, 2));
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  EXPECT_TRUE(made->complete);
  ExpectStored(made->artifact, {after});
  // What is left of the first one cannot replace it.
  const auto late = Commit(Request(2, 3, 1, "job-0"), shard_of(before, 2, 3));
  EXPECT_EQ(late.status().code(), StatusCode::kAlreadyExists) << late.status().ToString();
  EXPECT_EQ(ingest_->GetStepState(Key(3, 1, "job-0"), 0)->state, GatherState::kFailed);
  EXPECT_EQ(ingest_->GetStepState(Key(2, 1, "job-1"), 0)->artifact, made->artifact);
  const auto later = Commit(Request(0, 2, 1, "job-2"), shard_of(before, 0, 2));
  EXPECT_EQ(later.status().code(), StatusCode::kAlreadyExists);
  EXPECT_THAT(later.status().message(), HasSubstr("tensor 'w' is not what rank 0 sends"));
  // The same world with another name, the same weights: it is there already.
  const auto same = Commit(Request(0, 2, 1, "job-3"), shard_of(after, 0, 2));
  ASSERT_TRUE(same.ok()) << same.status().ToString();
  EXPECT_TRUE(same->complete && same->existed);
  // Two jobs under one name: found out as soon as they differ, and neither is stored.
  ASSERT_TRUE(Commit(Request(0, 2, 2, "twin"), shard_of(before, 0, 2)).ok());
  const auto twin = Commit(Request(0, 2, 2, "twin"), shard_of(after, 0, 2));
  EXPECT_EQ(twin.status().code(), StatusCode::kAlreadyExists);
  EXPECT_THAT(twin.status().message(), HasSubstr("two different shards"));
  EXPECT_EQ(ingest_->GetStepState(Key(2, 2, "twin"), 0)->state, GatherState::kFailed);
}

// A daemon that restarts forgets what was not complete; the chunks stay, so that it is cheap.
TEST_F(IngestRanksTest, ARestartLosesGatheringsAndNoChunk) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {400, 600});
  const auto shard_of = [&](int rank) { return Shard({Piece(w, RowsOf(w.shape, 0, rank, 2))}); };
  ASSERT_TRUE(Commit(Request(0, 2), shard_of(0)).ok());
  ingest_.reset();
  Reopen();
  Restart();
  EXPECT_EQ(ingest_->GetStepState(Key(2), 0).status().code(), StatusCode::kNotFound);
  const auto rows = BoxBytes(w, RowsOf(w.shape, 0, 0, 2));
  const std::vector<Digest> chunks = {Sha256(rows)};
  const auto session = ingest_->OpenSession(Request(0, 2));
  EXPECT_THAT(*ingest_->HaveChunks(*session, chunks), ElementsAre(true));
  EXPECT_TRUE(ingest_->CommitShard(*session, shard_of(0)).ok());
  const auto made = Commit(Request(1, 2), shard_of(1));
  ASSERT_TRUE(made.ok());
  ingest_.reset();
  Reopen();
  Restart();
  const auto state = ingest_->GetStepState(Key(2), 0);
  ASSERT_TRUE(state.ok()) << state.status().ToString();
  EXPECT_EQ(state->artifact, made->artifact);
  EXPECT_TRUE(Commit(Request(0, 2), shard_of(0))->existed);
  EXPECT_EQ(ingest_->GetStepState(Key(2, 1, "other"), 0).status().code(), StatusCode::kNotFound);
}

TEST_F(IngestRanksTest, RequestsAreCheckedAndEverythingIsBounded) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {8, 6});
  const auto refused = [&](SessionRequest request, const std::string& words) {
    const auto session = ingest_->OpenSession(request);
    EXPECT_EQ(session.status().code(), StatusCode::kInvalidArgument) << words;
    EXPECT_THAT(session.status().message(), HasSubstr(words));
  };
  refused(Request(2, 2), "rank 2 of a world of 2");
  refused(Request(-1, 2), "rank -1");
  refused(Request(0, 0), "a world of 0");
  refused(Request(0, kMaxWorld + 1), "1 to 1024");
  refused(Request(0, 2, 1, ""), "name of their attempt");
  refused(Request(0, 2, 1, std::string(129, 'x')), "over 128 bytes");
  refused(Request(0, 2, 1, "a\nb"), "not printable");
  refused(Request(0, 2, -1), "step of at least 0");
  refused({.kind = ArtifactKind::kBase, .run = "b", .world = 2, .attempt = "x"}, "one rank");
  // Pieces that are none.
  const std::vector<std::pair<TensorBox, std::string>> pieces = {
      {{{8, 0}, {1, 6}}, "the tensor has 8"},
      {{{0}, {8}}, "rank 1"},
      {{{0, -1}, {8, 1}}, "from -1"}};
  for (const auto& [box, words] : pieces) {
    TensorEntry entry = Piece(w, {{0, 0}, {1, 6}});
    entry.pieces[0] = box;
    const auto reply = Commit(Request(0, 2), Shard({entry}));
    EXPECT_EQ(reply.status().code(), StatusCode::kInvalidArgument) << words;
    EXPECT_THAT(reply.status().message(), HasSubstr(words));
  }
  TensorEntry wrong_size = Piece(w, {{0, 0}, {1, 6}});
  wrong_size.pieces[0].shape[0] = 2;
  EXPECT_THAT(Commit(Request(0, 2), Shard({wrong_size})).status().message(),
              HasSubstr("24 bytes, shape and dtype make 48"));
  // A chunk that nobody put: the session lives, and the step too.
  TensorEntry lost = Piece(w, {{0, 0}, {4, 6}});
  lost.parts.begin()->second.chunks[0] = Sha256("nowhere");
  const auto session = ingest_->OpenSession(Request(0, 2));
  EXPECT_EQ(ingest_->CommitShard(*session, Shard({lost})).status().code(),
            StatusCode::kUnavailable);
  EXPECT_TRUE(ingest_->CommitShard(*session, Shard({Piece(w, {{0, 0}, {4, 6}})})).ok());

  Restart({.session_idle_ms = 1000, .gatherings = 2, .gathered_bytes = 1000});
  EXPECT_TRUE(ingest_->OpenSession(Request(0, 2, 1)).ok());
  EXPECT_TRUE(ingest_->OpenSession(Request(1, 2, 1)).ok());
  EXPECT_TRUE(ingest_->OpenSession(Request(0, 2, 2)).ok());
  EXPECT_EQ(ingest_->OpenSession(Request(0, 2, 3)).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(ingest_->OpenGatherings().size(), 2u);
  // Memory of shards that wait: one over the limit is still taken, the next is not.
  std::vector<TensorEntry> rows;
  for (int64_t i = 0; i < 4; ++i) rows.push_back(Piece(w, {{i, 0}, {1, 6}}));
  EXPECT_TRUE(Commit(Request(0, 2, 1), Shard(rows)).ok());
  EXPECT_EQ(Commit(Request(0, 2, 2), Shard(rows)).status().code(), StatusCode::kResourceExhausted);
}

TEST_F(IngestRanksTest, RanksResumeFromTheSameArtifact) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {8, 6});
  const auto one = Commit({.run = "r", .step = 1}, Shard({Whole(w)}));
  const auto two = Commit({.run = "r", .step = 2}, Shard({Whole(w)}));
  ASSERT_TRUE(one.ok() && two.ok());
  SessionRequest request = Request(0, 2, 3);
  request.resumed_from = one->artifact;
  ASSERT_TRUE(Commit(request, Shard({Piece(w, {{0, 0}, {4, 6}})})).ok());
  request.rank = 1;
  request.resumed_from = two->artifact;
  const auto differs = ingest_->OpenSession(request);
  EXPECT_THAT(differs.status().message(), HasSubstr("rank 1 resumed from artifact"));
  request.resumed_from.reset();
  const auto made = Commit(request, Shard({Piece(w, {{4, 0}, {4, 6}})}));
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const auto parents = store_->Parents(made->artifact);
  EXPECT_TRUE(std::any_of(parents.begin(), parents.end(), [&](const Edge& edge) {
    return edge.type == EdgeType::kResumedFrom && edge.parent == one->artifact;
  }));
}

TEST_F(IngestRanksTest, C16_WhatToResumeFromIsDecidedOnceForAllRanks) {
  const GlobalTensor w = MakeTensor("w", DType::kF32, {8, 6});
  const auto push = [&](int64_t step) {
    return Commit({.run = "r", .step = step}, Shard({Whole(w)}))->artifact;
  };
  const auto from_base = ingest_->ResumePoint("r", "start-0");
  ASSERT_TRUE(from_base.ok()) << from_base.status().ToString();
  EXPECT_TRUE(from_base->artifact.IsZero());
  EXPECT_EQ(from_base->step, -1);
  const Digest ten = push(10);
  EXPECT_EQ(ingest_->ResumePoint("r", "start-0")->step, -1) << "decided before";
  now_ms_ += 10;
  // Many ranks ask at once, while newer checkpoints come.
  std::vector<std::thread> ranks;
  std::vector<Result<ResumeDecision>> answers(8, Internal("not run"));
  for (size_t i = 0; i < answers.size(); ++i) {
    ranks.emplace_back([&, i] { answers[i] = ingest_->ResumePoint("r", "start-1"); });
  }
  const Digest eleven = push(11);
  for (std::thread& rank : ranks) rank.join();
  const auto decided = ingest_->ResumePoint("r", "start-1");
  ASSERT_TRUE(decided.ok());
  EXPECT_TRUE(decided->artifact == ten || decided->artifact == eleven);
  for (const auto& answer : answers) {
    ASSERT_TRUE(answer.ok()) << answer.status().ToString();
    EXPECT_EQ(answer->artifact, decided->artifact);
    EXPECT_EQ(answer->step, decided->step);
    EXPECT_EQ(answer->decided_ms, decided->decided_ms);
  }
  const Digest twelve = push(12);
  ingest_.reset();
  Reopen();
  Restart();
  EXPECT_EQ(ingest_->ResumePoint("r", "start-1")->artifact, decided->artifact);
  now_ms_ += 10;
  EXPECT_EQ(ingest_->ResumePoint("r", "start-2")->artifact, twelve);
  // The checkpoint of the newest start stays, whatever a person says; an older start's does not.
  push(13);
  stockpot::Commit commit;
  commit.deletions.push_back({.artifact = twelve, .purge_ms = now_ms_, .by = "somebody"});
  const auto deleted = store_->Apply(std::move(commit));
  EXPECT_THAT(deleted.status().message(), HasSubstr("resumed from by start-2"));
}

TEST_F(IngestRanksTest, C16_KeysAreBoundedAndChecked) {
  EXPECT_EQ(ingest_->ResumePoint("r", "").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ingest_->ResumePoint("r", std::string(129, 'k')).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(ingest_->ResumePoint("r", "a\x01").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ingest_->ResumePoint("nobody", "k").status().code(), StatusCode::kNotFound);
  for (int i = 0; i < 70; ++i) {
    now_ms_ += 1;
    ASSERT_TRUE(ingest_->ResumePoint("r", "start-" + std::to_string(i)).ok());
  }
  const auto kept = store_->ListResumeDecisions("r");
  EXPECT_EQ(kept.size(), kMaxResumeDecisions);
  EXPECT_TRUE(std::none_of(kept.begin(), kept.end(), [](const ResumeDecision& decision) {
    return decision.key == "start-5" || decision.key == "start-0";
  }));
}

}  // namespace
}  // namespace stockpot::test
