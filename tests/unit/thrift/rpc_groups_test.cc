// Over the wire: groups of tensors, their rules, and compression of history.
#include <gtest/gtest.h>

#include "tests/unit/thrift/rpc_world.h"

namespace stockpot {
namespace {

constexpr int64_t kJobTimeoutMs = 60'000;
constexpr size_t kFloats = 40'000;  // enough for a chunk of its own in a pack

class RpcGroupsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    client_ = world_.NewClient();
    ASSERT_NE(client_, nullptr);
    std::mt19937_64 random(TestSeed());
    UploadBase(*client_, "tiny", TinyLlama(random));
    rpc::RunConfig config;
    config.publish = "request";
    config.merge_every = 0;
    config.compress_history = true;
    const auto run = client_->CreateRun("demo", "tiny", config, {});
    ASSERT_TRUE(run.ok()) << run.status().ToString();
    EXPECT_TRUE(run->config.compress_history);
    weights_.assign(kFloats, 1.0f);
    for (float& w : weights_) w += static_cast<float>(random() % 1000) / 100;
  }

  rpc::Tensor Put(const std::string& session, const std::string& name, const std::string& group,
                  const std::vector<float>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    const ChunkView chunk{Sha256(bytes), bytes};
    EXPECT_TRUE(client_->PutChunks(session, {&chunk, 1}).ok());
    rpc::Tensor tensor;
    tensor.name = name;
    tensor.dtype = "F32";
    tensor.shape = {static_cast<int64_t>(values.size())};
    tensor.group = group;
    tensor.data.bytes = static_cast<int64_t>(bytes.size());
    tensor.data.chunks = {std::string(chunk.digest.raw())};
    return tensor;
  }

  Result<rpc::CommitReply> Save(int64_t step, const std::string& group = "optimizer") {
    for (size_t i = 0; i < weights_.size(); i += 2) weights_[i] *= 1.0001f;
    rpc::SessionRequest request;
    request.run = "demo";
    request.step = step;
    STOCKPOT_ASSIGN_OR_RETURN(const std::string session, client_->OpenSession(request));
    rpc::Shard shard;
    shard.tensors = {Put(session, "w", "", weights_), Put(session, "w", group, weights_)};
    return client_->CommitShard(session, shard);
  }

  RpcWorld world_;
  std::unique_ptr<Client> client_;
  std::vector<float> weights_;
};

TEST_F(RpcGroupsTest, StatesAreShownKeptAndCompressed) {
  EXPECT_EQ(Save(1, "no.group").status().code(), StatusCode::kInvalidArgument);
  for (int64_t step = 1; step <= 4; ++step) {
    const auto reply = Save(step);
    ASSERT_TRUE(reply.ok()) << reply.status().ToString();
    ASSERT_EQ(reply->states.size(), 1u);
    EXPECT_EQ(client_->Resolve("demo@" + std::to_string(step) + ".optimizer")->raw(),
              reply->states.at("optimizer"));
  }
  const auto log = client_->Log("demo");
  ASSERT_TRUE(log.ok());
  ASSERT_EQ(log->size(), 4u);
  ASSERT_EQ(log->at(0).states.size(), 1u);
  EXPECT_EQ(log->at(0).states[0].group, "optimizer");
  EXPECT_EQ(client_->Show("demo@latest.optimizer")->kind, rpc::Kind::STATE);
  EXPECT_EQ(client_->Publish("demo@1.optimizer", "dense", "").status().code(),
            StatusCode::kInvalidArgument);

  ASSERT_TRUE(world_.pipeline().WaitIdle(kJobTimeoutMs));
  EXPECT_EQ(client_->GetJob("compress/demo")->state, "done") << "queued by the checkpoints";
  EXPECT_TRUE(client_->Show("demo@2")->compressed);
  EXPECT_TRUE(client_->Show("demo@2.optimizer")->compressed);
  EXPECT_FALSE(client_->Show("demo@4")->compressed);
  ASSERT_TRUE(client_->Pin("demo@2", "me", "the paper").ok());
  ASSERT_TRUE(world_.pipeline().WaitIdle(kJobTimeoutMs));
  EXPECT_FALSE(client_->Show("demo@2")->compressed) << "pinned: whole again";
  const auto asked = client_->Compress("demo@3");
  ASSERT_TRUE(asked.ok()) << asked.status().ToString();
  EXPECT_EQ(asked->kind, "compress");
  EXPECT_EQ(client_->Compress("tiny").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Compress("nobody").status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(world_.pipeline().WaitIdle(kJobTimeoutMs)) << "one collection at a time";

  rpc::RetentionPolicy policy;
  policy.grace_ms = 0;
  policy.groups.resize(1);
  policy.groups[0].group = "optimizer";
  policy.groups[0].keep_last = 1;
  const auto set = client_->SetRetention("demo", policy);
  ASSERT_TRUE(set.ok()) << set.status().ToString();
  EXPECT_EQ(set->groups.size(), 1u);
  const auto gone = client_->CollectGarbage(false, 0);
  ASSERT_TRUE(gone.ok()) << gone.status().ToString();
  ASSERT_EQ(gone->purged.size(), 3u);
  EXPECT_EQ(gone->purged[0].group, "optimizer");
  EXPECT_EQ(client_->Resolve("demo@1.optimizer").status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(client_->Resolve("demo@1").ok());
  EXPECT_TRUE(client_->Scrub()->damaged.empty());
}

}  // namespace
}  // namespace stockpot
