// Several ranks over the wire: each a client of its own, on threads that never meet but in the
// daemon.
#include <gmock/gmock.h>

#include <thread>

#include "tests/unit/thrift/rpc_world.h"
#include "thrift/conversions.h"
#include "thrift/remote_source.h"

namespace stockpot {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int32_t kWaitMs = 30'000;

TensorBox RowsOf(const std::vector<int64_t>& shape, int rank, int world) {
  TensorBox box = WholeBox(shape);
  if (shape.empty()) return box;
  const int64_t each = (shape[0] + world - 1) / world;
  box.offsets[0] = std::min<int64_t>(shape[0], each * rank);
  box.shape[0] = std::min<int64_t>(shape[0], each * (rank + 1)) - box.offsets[0];
  return box;
}

class RpcRanksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    client_ = world_.NewClient();
    ASSERT_NE(client_, nullptr);
    UploadBase(*client_, "tiny", model_);
    rpc::RunConfig config;
    config.publish = "request";
    config.merge_every = 0;
    ASSERT_OK(client_->CreateRun("demo", "tiny", config, {}));
  }

  static rpc::StepKey Key(int32_t world, int64_t step = 1) {
    rpc::StepKey key;
    key.run = "demo";
    key.step = step;
    key.world = world;
    key.attempt = "job-0";
    return key;
  }

  // What one rank of a job does to save: its rows of every tensor.
  Result<rpc::CommitReply> Save(int rank, int world, int64_t step = 1) {
    const auto client = world_.NewClient();
    if (client == nullptr) return Internal("no client");
    rpc::SessionRequest request;
    request.run = "demo";
    request.step = step;
    request.rank = rank;
    request.world = world;
    request.attempt = "job-0";
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session, client->OpenSession(request));
    rpc::Shard shard;
    for (const TensorInfo& info : model_.tensors()) {
      rpc::Tensor& tensor = shard.tensors.emplace_back();
      tensor.name = info.name;
      tensor.dtype = DTypeName(info.dtype);
      tensor.shape = info.shape;
      tensor.alias_of = info.alias_of;
      if (!info.alias_of.empty()) continue;
      const TensorBox box = RowsOf(info.shape, rank, world);
      std::vector<std::byte> bytes(static_cast<size_t>(box.elements() * DTypeSize(info.dtype)));
      STOCKPOT_RETURN_IF_ERROR(model_.ReadBox(info.name, box, bytes));
      tensor.shape = box.shape;
      tensor.global_shape = info.shape;
      tensor.offsets = box.offsets;
      tensor.data.bytes = static_cast<int64_t>(bytes.size());
      if (bytes.empty()) continue;
      const ChunkView chunk{Sha256(bytes), bytes};
      tensor.data.chunks.push_back(RawBytes(chunk.digest));
      STOCKPOT_RETURN_IF_ERROR(client->PutChunks(session, {&chunk, 1}));
    }
    return client->CommitShard(session, shard);
  }

  std::mt19937_64 random_{TestSeed()};
  RpcWorld world_;
  std::unique_ptr<Client> client_;
  TestModel model_ = TinyLlama(random_);
};

TEST_F(RpcRanksTest, C11_RanksSaveAtOnceAndAnyNumberLoads) {
  constexpr int kSavers = 4;
  model_.PerturbAll(random_, 0.01);
  std::vector<std::thread> ranks;
  std::vector<Result<rpc::CommitReply>> replies(kSavers, Internal("not run"));
  for (int rank = 0; rank < kSavers; ++rank) {
    ranks.emplace_back([&, rank] { replies[static_cast<size_t>(rank)] = Save(rank, kSavers); });
  }
  const Result<rpc::StepState> waited = [&]() -> Result<rpc::StepState> {
    while (true) {  // until the first of them opened it
      Result<rpc::StepState> state = client_->StepState(Key(kSavers), kWaitMs);
      if (state.ok() || state.status().code() != StatusCode::kNotFound) return state;
    }
  }();
  for (std::thread& rank : ranks) rank.join();
  ASSERT_OK(waited);
  ASSERT_EQ(waited->state, rpc::GatherState::COMPLETE) << waited->why;
  int complete = 0;
  for (const auto& reply : replies) {
    ASSERT_OK(reply);
    complete += reply->complete;
    if (reply->complete) {
      EXPECT_EQ(reply->artifact, waited->artifact);
    }
  }
  EXPECT_EQ(complete, 1);
  const auto source = OpenRemoteArtifact(*client_, "demo@1");
  ASSERT_OK(source);
  EXPECT_TRUE(SameTensors(**source, model_));
  for (const int loaders : {1, 3, 5}) {
    for (int rank = 0; rank < loaders; ++rank) {
      for (const TensorInfo& info : model_.tensors()) {
        const TensorBox box = RowsOf(info.shape, rank, loaders);
        std::vector<std::byte> mine(static_cast<size_t>(box.elements() * DTypeSize(info.dtype)));
        std::vector<std::byte> expected(mine.size());
        ASSERT_OK((*source)->ReadBox(info.name, box, mine));
        ASSERT_OK(model_.ReadBox(info.name, box, expected));
        ASSERT_EQ(mine, expected) << info.name << BoxText(box);
      }
    }
  }
}

// Otherwise the ranks over the limit wait for a connection until others hang up.
TEST(RpcRanksLimits, AWorldThatCannotConnectIsRefusedByName) {
  RpcWorld world({.max_connections = 3 * rpc_limits::kConnectionsOfARank});
  const auto client = world.NewClient();
  ASSERT_NE(client, nullptr);
  std::mt19937_64 random(TestSeed());
  UploadBase(*client, "tiny", TinyLlama(random));
  ASSERT_OK(client->CreateRun("demo", "tiny", {}, {}));
  rpc::SessionRequest request;
  request.run = "demo";
  request.step = 1;
  request.attempt = "job-0";
  request.world = 4;
  const Status refused = client->OpenSession(request).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("4 ranks"));
  EXPECT_THAT(refused.message(), HasSubstr("--thrift-clients 12"));
  request.world = 3;
  EXPECT_OK(client->OpenSession(request));
}

// The limit is what it says: so many connections are open at once and answered.
TEST(RpcRanksLimits, AWorldThatIsNotRefusedConnects) {
  constexpr int32_t kWorld = 20;
  RpcWorld world({.max_connections = kWorld * rpc_limits::kConnectionsOfARank});
  std::vector<std::unique_ptr<Client>> clients;
  clients.push_back(world.NewClient());
  std::mt19937_64 random(TestSeed());
  UploadBase(*clients[0], "tiny", TinyLlama(random));
  ASSERT_OK(clients[0]->CreateRun("demo", "tiny", {}, {}));
  for (int64_t i = 1; i < kWorld * rpc_limits::kConnectionsOfARank; ++i) {
    clients.push_back(world.NewClient());
    ASSERT_NE(clients.back(), nullptr) << i;
  }
  for (int32_t rank = 0; rank < kWorld; ++rank) {
    rpc::SessionRequest request;
    request.run = "demo";
    request.step = 1;
    request.rank = rank;
    request.world = kWorld;
    request.attempt = "job-0";
    EXPECT_OK(clients[rank * rpc_limits::kConnectionsOfARank]->OpenSession(request));
  }
}

TEST_F(RpcRanksTest, C9_AMissingRankIsInTheStatusAndTheState) {
  const auto reply = Save(1, 3);
  ASSERT_OK(reply);
  EXPECT_FALSE(reply->complete);
  EXPECT_EQ(reply->artifact, "");
  EXPECT_THAT(reply->missing, ElementsAre(0, 2));
  const auto state = client_->StepState(Key(3), 0);
  ASSERT_OK(state);
  EXPECT_EQ(state->state, rpc::GatherState::OPEN);
  EXPECT_THAT(state->missing, ElementsAre(0, 2));
  const auto status = client_->GetStatus();
  ASSERT_OK(status);
  ASSERT_EQ(status->gatherings.size(), 1u);
  EXPECT_EQ(status->gatherings[0].key, Key(3));
  EXPECT_THAT(status->gatherings[0].missing, ElementsAre(0, 2));
  EXPECT_GT(status->gatherings[0].expires_ms, status->gatherings[0].opened_ms);
  EXPECT_EQ(client_->StepState(Key(3, 2), 0).status().code(), StatusCode::kNotFound);
  // The daemon stops while a rank waits for the others: the rank is told at once.
  Result<rpc::StepState> waited = Internal("not run");
  const auto waiting = world_.NewClient();
  std::thread waiter([&] { waited = waiting->StepState(Key(3), kWaitMs); });
  ASSERT_OK(Save(0, 3));
  world_.Stop();
  waiter.join();
  EXPECT_TRUE(!waited.ok() || waited->state == rpc::GatherState::OPEN);
  world_.Start();
  // It forgot what was not complete; the ranks come again.
  for (int rank = 0; rank < 3; ++rank) ASSERT_OK(Save(rank, 3));
  const auto made = client_->StepState(Key(3), kWaitMs);
  ASSERT_OK(made);
  EXPECT_EQ(made->state, rpc::GatherState::COMPLETE);
  EXPECT_THAT(client_->GetStatus()->gatherings, IsEmpty());
}

TEST_F(RpcRanksTest, C16_RanksAskWhereToResumeFrom) {
  const auto from_base = client_->ResumePoint("demo", "start-0");
  ASSERT_OK(from_base);
  EXPECT_EQ(from_base->artifact, "");
  EXPECT_EQ(from_base->step, -1);
  const Digest one = UploadCheckpoint(*client_, "demo", 1, model_);
  EXPECT_EQ(client_->ResumePoint("demo", "start-0")->step, -1);
  EXPECT_EQ(client_->ResumePoint("demo", "start-1")->artifact, RawBytes(one));
  model_.PerturbAll(random_, 0.01);
  UploadCheckpoint(*client_, "demo", 2, model_);
  const auto again = client_->ResumePoint("demo", "start-1");
  ASSERT_OK(again);
  EXPECT_EQ(again->artifact, RawBytes(one));
  EXPECT_EQ(again->step, 1);
  EXPECT_EQ(client_->ResumePoint("demo", "").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->ResumePoint("nobody", "x").status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace stockpot
