// Every call of the three services, over a real store, through the real client.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <thread>

#include "store/artifact_source.h"
#include "store/merge.h"
#include "tests/unit/thrift/rpc_world.h"
#include "thrift/remote_source.h"
#include "thrift/upload.h"

namespace stockpot {
namespace {

constexpr int64_t kJobTimeoutMs = 60'000;

Result<Manifest> Merge(CheckpointStore& store, std::span<const Digest> parents,
                       const std::string& run, int64_t step, const MergeOptions& options,
                       const ProgressFunction& progress) {
  return BuildMerge(store, parents, run, step, options, progress);
}

rpc::RunConfig OnRequest() {
  rpc::RunConfig config;
  config.publish = "request";
  config.merge_every = 0;
  return config;
}

class RpcServicesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    client_ = world_.NewClient();
    ASSERT_NE(client_, nullptr);
    base_ = UploadBase(*client_, "tiny", model_);
    ASSERT_OK(client_->CreateRun("demo", "tiny", OnRequest(), {{"team", "a"}}));
  }

  Digest PushStep(int64_t step, double loss) {
    model_.PerturbAll(random_, 0.01);
    return UploadCheckpoint(*client_, "demo", step, model_, {{"loss", loss}});
  }

  rpc::Job Finished(const Result<rpc::Job>& job) {
    EXPECT_OK(job);
    EXPECT_TRUE(world_.pipeline().WaitIdle(kJobTimeoutMs));
    const Result<rpc::Job> now = client_->GetJob(job->key);
    EXPECT_OK(now);
    return *now;
  }

  std::mt19937_64 random_{TestSeed()};
  RpcWorld world_{{}, Merge};
  std::unique_ptr<Client> client_;
  TestModel model_ = TinyLlama(random_);
  Digest base_;
};

TEST_F(RpcServicesTest, HelloTellsVersions) {
  const Result<rpc::HelloReply> hello = client_->Hello();
  ASSERT_OK(hello);
  EXPECT_EQ(hello->version, "test");
  EXPECT_EQ(hello->protocol, 1);
  EXPECT_EQ(hello->chunk_bytes, kChunkBytes);
}

TEST_F(RpcServicesTest, UnixSocketServesTheSame) {
  const auto client = Client::Connect(world_.unix_socket());
  ASSERT_OK(client);
  const auto runs = (*client)->Runs();
  ASSERT_OK(runs);
  ASSERT_EQ(runs->size(), 1u);
  EXPECT_EQ((*runs)[0].name, "demo");
}

TEST_F(RpcServicesTest, RunKeepsWhatItWasToldAndItsBase) {
  const auto runs = client_->Runs();
  ASSERT_OK(runs);
  ASSERT_EQ(runs->size(), 1u);
  EXPECT_EQ((*runs)[0].base, base_.raw());
  EXPECT_EQ((*runs)[0].config.publish, "request");
  EXPECT_EQ((*runs)[0].tags.at("team"), "a");
  EXPECT_GT((*runs)[0].created_ms, 0);

  TestModel other = TinyLlama(random_);
  UploadBase(*client_, "other", other);
  EXPECT_EQ(client_->CreateRun("demo", "other", OnRequest(), {}).status().code(),
            StatusCode::kAlreadyExists);
  EXPECT_EQ(client_->CreateRun("new", "nobody", OnRequest(), {}).status().code(),
            StatusCode::kNotFound);
  rpc::RunConfig wrong = OnRequest();
  wrong.publish = "sometimes";
  EXPECT_EQ(client_->CreateRun("new", "tiny", wrong, {}).status().code(),
            StatusCode::kInvalidArgument);
  wrong = OnRequest();
  wrong.merge_method = "soup";
  EXPECT_EQ(client_->CreateRun("new", "tiny", wrong, {}).status().code(),
            StatusCode::kInvalidArgument);
  wrong = {};
  wrong.merge_spectral = 1.5;
  EXPECT_EQ(client_->CreateRun("new", "tiny", wrong, {}).status().code(),
            StatusCode::kInvalidArgument);
  wrong = {};
  wrong.publish_codec = "zip";
  EXPECT_EQ(client_->CreateRun("new", "tiny", wrong, {}).status().code(),
            StatusCode::kInvalidArgument);
  wrong = {};
  wrong.publish_max_bytes = 10;  // an option of auto alone
  EXPECT_EQ(client_->CreateRun("new", "tiny", wrong, {}).status().code(),
            StatusCode::kInvalidArgument);
  wrong = {};
  wrong.merge_energy = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(client_->CreateRun("new", "tiny", wrong, {}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->CreateRun(std::string(5000, 'a'), "tiny", OnRequest(), {}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST_F(RpcServicesTest, CheckpointComesBackBitForBit) {
  const Digest artifact = PushStep(10, 2.5);
  const auto source = OpenRemoteArtifact(*client_, "demo@10");
  ASSERT_OK(source);
  EXPECT_TRUE(SameTensors(model_, **source));
  EXPECT_EQ((*source)->files(), model_.files());
  for (const std::string& file : model_.files()) {
    EXPECT_EQ(*(*source)->ReadFile(file), *model_.ReadFile(file)) << file;
  }
  EXPECT_EQ(*client_->Resolve("demo@latest"), artifact);
  EXPECT_EQ(*client_->Resolve("demo@best"), artifact);
}

TEST_F(RpcServicesTest, SecondUploadOfTheSameMovesNothing) {
  const Digest artifact = PushStep(1, 2.5);
  rpc::SessionRequest request;
  request.run = "demo";
  request.step = 1;
  Client* const clients[] = {client_.get()};
  const auto again = UploadArtifact(clients, request, model_, {});
  ASSERT_OK(again);
  EXPECT_TRUE(again->commit.existed);
  EXPECT_EQ(again->commit.artifact, artifact.raw());
  EXPECT_EQ(again->bytes.sent_bytes, 0);
  EXPECT_GT(again->bytes.total_bytes, 0);
  EXPECT_EQ(again->bytes.done_bytes, again->bytes.total_bytes);
}

TEST_F(RpcServicesTest, SessionsRefuseWhatIsWrong) {
  rpc::SessionRequest request;
  request.run = "nobody";
  request.step = 1;
  EXPECT_EQ(client_->OpenSession(request).status().code(), StatusCode::kNotFound);
  request.run = "demo";
  request.kind = rpc::Kind::VARIANT;
  EXPECT_EQ(client_->OpenSession(request).status().code(), StatusCode::kInvalidArgument);
  for (const int32_t number : {6, 77, -1, 1'478'722'536, INT32_MIN, INT32_MAX}) {
    request.kind = rpc::Kind{number};
    EXPECT_EQ(client_->OpenSession(request).status().code(), StatusCode::kInvalidArgument);
  }
  request.kind = rpc::Kind::CHECKPOINT;
  request.__set_resumed_from("short");
  EXPECT_EQ(client_->OpenSession(request).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->HaveChunks("no such session", {}).status().code(), StatusCode::kNotFound);

  rpc::SessionRequest good;
  good.run = "demo";
  good.step = 3;
  const auto session = client_->OpenSession(good);
  ASSERT_OK(session);
  const std::string text = "some bytes";
  const auto bytes = std::as_bytes(std::span(text));
  const ChunkView lie{Sha256(std::string_view("others")), bytes};
  EXPECT_EQ(client_->PutChunks(*session, {&lie, 1}).code(), StatusCode::kInvalidArgument);
  // The refusal is in the middle of what is in flight; the connection goes on.
  const ChunkView truth{Sha256(bytes), bytes};
  const std::vector<ChunkView> mixed = {truth, lie, truth, truth, truth};
  EXPECT_EQ(client_->PutChunks(*session, mixed).code(), StatusCode::kInvalidArgument);
  ASSERT_OK(client_->PutChunks(*session, {&truth, 1}));
  EXPECT_EQ(*client_->HaveChunks(*session, std::vector{truth.digest, lie.digest}),
            (std::vector{true, false}));
  ASSERT_OK(client_->Abort(*session));
  EXPECT_EQ(client_->Abort(*session).code(), StatusCode::kNotFound);
}

TEST_F(RpcServicesTest, CommitRefusesLyingShards) {
  const auto commit = [&](const std::function<void(rpc::Shard&)>& change) {
    rpc::SessionRequest request;
    request.run = "demo";
    request.step = 5;
    const auto session = client_->OpenSession(request);
    EXPECT_OK(session);
    const std::string text(8, 'x');
    const ChunkView chunk{Sha256(text), std::as_bytes(std::span(text))};
    EXPECT_OK(client_->PutChunks(*session, {&chunk, 1}));
    rpc::Tensor tensor;
    tensor.name = "w";
    tensor.dtype = "F32";
    tensor.shape = {2};
    tensor.data.bytes = 8;
    tensor.data.chunks = {std::string(chunk.digest.raw())};
    rpc::Shard shard;
    shard.tensors = {tensor};
    change(shard);
    return client_->CommitShard(*session, shard).status();
  };
  const auto expect_refused = [&](const std::function<void(rpc::Shard&)>& change,
                                  const std::string& names) {
    const Status status = commit(change);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
    EXPECT_NE(status.message().find(names), std::string::npos) << status.ToString();
  };
  expect_refused([](rpc::Shard& s) { s.tensors[0].dtype = "F33"; }, "F33");
  expect_refused([](rpc::Shard& s) { s.tensors[0].shape = {3}; }, "w");
  expect_refused([](rpc::Shard& s) { s.tensors[0].shape = {-2}; }, "w");
  expect_refused([](rpc::Shard& s) { s.tensors[0].data.bytes = -1; }, "w");
  expect_refused([](rpc::Shard& s) { s.tensors[0].data.chunks.clear(); }, "w");
  expect_refused([](rpc::Shard& s) { s.tensors[0].data.chunks[0] = "abc"; }, "w");
  expect_refused([](rpc::Shard& s) { s.tensors[0].alias_of = "w2"; }, "alias");
  expect_refused([](rpc::Shard& s) { s.tensors.push_back(s.tensors[0]); }, "w");
  expect_refused([](rpc::Shard& s) { s.tensors[0].data.chunks[0] = std::string(32, 'z'); }, "");
  ASSERT_OK(commit([](rpc::Shard& s) { s.metrics = {{"loss", NAN}, {"grad", 2.0}}; }));
  EXPECT_EQ(client_->Show("demo@5")->metrics, (std::map<std::string, double>{{"grad", 2.0}}));
}

TEST_F(RpcServicesTest, PublishTakesTheRunsCodecOrTheCallers) {
  rpc::RunConfig config = OnRequest();
  config.publish_codec = "auto";
  config.publish_max_share = 1;
  ASSERT_OK(client_->CreateRun("demo", "tiny", config, {}));
  PushStep(7, 2.0);
  const auto attribute = [&](const rpc::Job& job, const std::string& key) {
    EXPECT_EQ(job.state, "done") << job.error;
    const auto shown = client_->Show(job.result);
    EXPECT_OK(shown);
    return shown.ok() ? shown->attributes.at(key) : "";
  };
  EXPECT_EQ(attribute(Finished(client_->Publish("demo@7", "", "")), "codec"), "auto");
  rpc::PublishOptions options;
  options.max_error = 0;
  const rpc::Job exact = Finished(client_->Publish("demo@7", "", "exact", options));
  EXPECT_EQ(exact.arguments.at("max_error"), "0");
  EXPECT_EQ(exact.arguments.at("max_share"), "1");  // the run's
  options = {};
  options.planes = 2;
  const rpc::Job two = Finished(client_->Publish("demo@7", "bitdelta", "two", options));
  EXPECT_EQ(attribute(two, "codec"), "bitdelta");
  EXPECT_FALSE(two.arguments.contains("max_share"));
  EXPECT_EQ(client_->Publish("demo@7", "dense", "", options).status().code(),
            StatusCode::kInvalidArgument);
}

TEST_F(RpcServicesTest, PublishAnswersShowsAndUnpublishes) {
  const Digest artifact = PushStep(7, 2.0);
  const rpc::Job job = Finished(client_->Publish("demo@7", "bitdelta", ""));
  ASSERT_EQ(job.state, "done") << job.error;
  EXPECT_EQ(job.share, 1);

  auto routes = client_->Routes();
  ASSERT_OK(routes);
  const auto has = [&](const std::string& name) {
    return std::any_of(routes->begin(), routes->end(),
                       [&](const rpc::Alias& route) { return route.name == name; });
  };
  EXPECT_TRUE(has("demo@7"));
  EXPECT_TRUE(has("demo@latest"));

  const auto log = client_->Log("demo");
  ASSERT_OK(log);
  ASSERT_EQ(log->size(), 1u);
  EXPECT_EQ((*log)[0].step.metrics.at("loss"), 2.0);
  EXPECT_EQ((*log)[0].artifact.digest, artifact.raw());
  ASSERT_EQ((*log)[0].variants.size(), 1u);
  const rpc::ArtifactInfo variant = (*log)[0].variants[0];
  EXPECT_EQ(variant.kind, rpc::Kind::VARIANT);
  EXPECT_LT(variant.stored_bytes, (*log)[0].artifact.stored_bytes);
  EXPECT_EQ(variant.logical_bytes, (*log)[0].artifact.logical_bytes);
  for (const auto& [key, value] : variant.attributes) EXPECT_NE(key.substr(0, 7), "tensor/");

  const auto shown = client_->Show("demo@7");
  ASSERT_OK(shown);
  EXPECT_EQ(shown->kind, rpc::Kind::CHECKPOINT);
  ASSERT_EQ(shown->parents.size(), 1u);
  EXPECT_EQ(shown->parents[0].type, "trained_from");
  EXPECT_EQ(shown->parents[0].parent, base_.raw());

  ASSERT_OK(client_->Unpublish("demo@7"));
  EXPECT_EQ(client_->Unpublish("demo@7").code(), StatusCode::kNotFound);
  routes = client_->Routes();
  EXPECT_FALSE(has("demo@7"));
  // Asking again brings the route back.
  EXPECT_EQ(Finished(client_->Publish("demo@7", "bitdelta", "")).state, "done");
  routes = client_->Routes();
  EXPECT_TRUE(has("demo@7"));
}

TEST_F(RpcServicesTest, RemoteVariantEqualsTheStoresDecoding) {
  PushStep(4, 2.0);
  const rpc::Job job = Finished(client_->Publish("demo@4", "bitdelta", "v"));
  ASSERT_EQ(job.state, "done") << job.error;
  const auto remote = OpenRemoteArtifact(*client_, job.result);
  ASSERT_OK(remote);
  const auto local = OpenArtifact(world_.store(), *Digest::FromHex(job.result));
  ASSERT_OK(local);
  EXPECT_TRUE(SameTensors(**local, **remote));
  EXPECT_EQ((*remote)->files(), (*local)->files());
  // Reads that begin and end inside elements, rows and bytes of signs.
  for (const TensorInfo& tensor : (*local)->tensors()) {
    for (int64_t offset : {int64_t{0}, int64_t{1}, tensor.bytes() / 3, tensor.bytes() - 1}) {
      const int64_t size = std::min<int64_t>(tensor.bytes() - offset, 77);
      std::vector<std::byte> a(size), b(size);
      ASSERT_OK((*local)->Read(tensor.name, offset, a));
      ASSERT_OK((*remote)->Read(tensor.name, offset, b));
      EXPECT_EQ(a, b) << tensor.name << " at " << offset;
    }
    std::vector<std::byte> past(8);
    EXPECT_FALSE((*remote)->Read(tensor.name, tensor.bytes() - 1, past).ok());
    EXPECT_FALSE((*remote)->Read(tensor.name, -1, past).ok());
  }
}

TEST_F(RpcServicesTest, PublishRefusesWhatIsNoCheckpoint) {
  EXPECT_EQ(client_->Publish("tiny", "bitdelta", "").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Publish("nobody", "bitdelta", "").status().code(), StatusCode::kNotFound);
  PushStep(1, 1.0);
  EXPECT_EQ(client_->Publish("demo@1", "zip", "").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Publish("demo@1", "dense", "a\nb").status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->GetJob("nothing").status().code(), StatusCode::kNotFound);
}

TEST_F(RpcServicesTest, MergeMakesAnArtifactWithBothParents) {
  const Digest first = PushStep(1, 3.0);
  const Digest second = PushStep(2, 2.0);
  Client::MergeRequest request;
  request.ids = {"demo@1", "demo@2"};
  const rpc::Job job = Finished(client_->Merge(request));
  ASSERT_EQ(job.state, "done") << job.error;
  const auto merged = client_->Show("demo@2.merge");
  ASSERT_OK(merged);
  EXPECT_EQ(Digest::FromRaw(merged->digest)->Hex(), job.result);
  std::vector<std::string> parents;
  for (const rpc::Edge& edge : merged->parents) parents.push_back(edge.parent);
  EXPECT_NE(std::find(parents.begin(), parents.end(), first.raw()), parents.end());
  EXPECT_NE(std::find(parents.begin(), parents.end(), second.raw()), parents.end());
  const auto jobs = client_->Jobs();
  ASSERT_OK(jobs);
  EXPECT_FALSE(jobs->empty());

  request.ids = {"demo@1", "demo@1"};
  EXPECT_EQ(client_->Merge(request).status().code(), StatusCode::kInvalidArgument);
  request.ids = {};
  EXPECT_EQ(client_->Merge(request).status().code(), StatusCode::kInvalidArgument);
  request.ids = {"demo@1", "tiny"};
  EXPECT_EQ(client_->Merge(request).status().code(), StatusCode::kInvalidArgument);
  request.ids = {"demo@1", "demo@2"};
  request.energy = 0;
  EXPECT_EQ(client_->Merge(request).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(RpcServicesTest, MergesTheLastCheckpointsByAnyMethod) {
  for (int64_t step = 1; step <= 4; ++step) PushStep(step, 3.0);
  const auto hex = [&](const std::string& name) { return client_->Resolve(name)->Hex(); };
  Client::MergeRequest request;
  request.ids = {"demo"};
  request.options.method = "mean";
  request.options.last = 3;
  request.options.weights = {1, 2, 4};
  const rpc::Job job = Finished(client_->Merge(request));
  ASSERT_EQ(job.state, "done") << job.error;
  EXPECT_EQ(job.arguments.at("parents"), hex("demo@2") + "," + hex("demo@3") + "," + hex("demo@4"));
  EXPECT_EQ(job.arguments.at("step"), "4");
  const auto merged = client_->Show("demo@4.merge");
  ASSERT_OK(merged);
  EXPECT_EQ(merged->attributes.at("method"), "mean");
  EXPECT_EQ(merged->attributes.at("weights"), "1.0,2.0,4.0");

  // What is deleted is not among them.
  ASSERT_OK(client_->Delete("demo@3", 1000, "me", "a spike"));
  request.options.weights.clear();
  const rpc::Job without = Finished(client_->Merge(request));
  EXPECT_EQ(without.arguments.at("parents"),
            hex("demo@1") + "," + hex("demo@2") + "," + hex("demo@4"));

  // Up to a checkpoint, and no further.
  request.ids = {"demo@2"};
  request.options.last = 2;
  const rpc::Job earlier = Finished(client_->Merge(request));
  EXPECT_EQ(earlier.arguments.at("parents"), hex("demo@1") + "," + hex("demo@2"));
  EXPECT_EQ(earlier.arguments.at("step"), "2");

  const auto refused = [&](const std::function<void(Client::MergeRequest&)>& change) {
    Client::MergeRequest wrong;
    wrong.ids = {"demo"};
    wrong.options.last = 2;
    change(wrong);
    return client_->Merge(wrong).status().code();
  };
  constexpr auto kInvalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(refused([](auto& r) { r.options.last = 4; }), kInvalid);
  EXPECT_EQ(refused([](auto& r) { r.options.last = -1; }), kInvalid);
  EXPECT_EQ(refused([](auto& r) { r.options.last = 65; }), kInvalid);
  EXPECT_EQ(refused([](auto& r) { r.ids = {"demo", "demo"}; }), kInvalid);
  EXPECT_EQ(refused([](auto& r) { r.ids = {"nowhere"}; }), StatusCode::kNotFound);
  EXPECT_EQ(refused([](auto& r) { r.options.method = "soup"; }), kInvalid);
  EXPECT_EQ(refused([](auto& r) { r.options.weights = {1, 1}; }), kInvalid);
  EXPECT_EQ(refused([](auto& r) { r.options.spectral = 0.5; }), kInvalid);
}

TEST_F(RpcServicesTest, AliasesMoveByCompareAndSet) {
  const Digest first = PushStep(1, 3.0);
  const Digest second = PushStep(2, 2.0);
  const auto moved = client_->MoveAlias("golden", "demo@1", "me", "");
  ASSERT_OK(moved);
  EXPECT_EQ(moved->target, first.raw());
  EXPECT_EQ(client_->MoveAlias("golden", "demo@2", "me", "").status().code(),
            StatusCode::kAlreadyExists);
  EXPECT_EQ(client_->MoveAlias("golden", "demo@2", "me", "demo@2").status().code(),
            StatusCode::kAlreadyExists);
  ASSERT_OK(client_->MoveAlias("golden", "demo@2", "me", "demo@1"));
  EXPECT_EQ(*client_->Resolve("golden"), second);
  const auto aliases = client_->Aliases();
  ASSERT_OK(aliases);
  const auto golden = std::find_if(aliases->begin(), aliases->end(),
                                   [](const rpc::Alias& a) { return a.name == "golden"; });
  ASSERT_NE(golden, aliases->end());
  EXPECT_EQ(golden->moved_by, "me");
  ASSERT_OK(client_->MoveAlias("golden", "", "me"));
  EXPECT_EQ(client_->Resolve("golden").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(client_->MoveAlias("golden", "", "me").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(client_->MoveAlias("demo@latest", "demo@1", "me").status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->MoveAlias("tiny", "demo@1", "me").status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->MoveAlias("new", "nobody", "me").status().code(), StatusCode::kNotFound);
}

TEST_F(RpcServicesTest, EvaluationsAreKept) {
  PushStep(1, 3.0);
  ASSERT_OK(client_->ReportEval("demo@1", "trivia", "acc", 0.5, "harness"));
  const auto shown = client_->Show("demo@1");
  ASSERT_OK(shown);
  ASSERT_EQ(shown->evals.size(), 1u);
  EXPECT_EQ(shown->evals[0].task, "trivia");
  EXPECT_EQ(shown->evals[0].value, 0.5);
  EXPECT_EQ(client_->ReportEval("demo@1", "trivia", "acc", INFINITY, "x").code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->ReportEval("demo@1", "", "acc", 1, "x").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->ReportEval("demo@9", "t", "acc", 1, "x").code(), StatusCode::kNotFound);
}

TEST_F(RpcServicesTest, EventsAreNumberedAndWatched) {
  const auto before = client_->Watch(0, 1000, 0);
  ASSERT_OK(before);
  ASSERT_FALSE(before->empty());
  for (size_t i = 0; i < before->size(); ++i) {
    EXPECT_EQ((*before)[i].sequence, static_cast<int64_t>(i) + 1);
  }
  const int64_t last = before->back().sequence;
  EXPECT_TRUE(client_->Watch(last, 10, 0)->empty());
  std::thread later([this] { PushStep(1, 1.0); });
  const auto watcher = world_.NewClient();
  const auto fresh = watcher->Watch(last, 10, 20'000);
  later.join();
  ASSERT_OK(fresh);
  ASSERT_FALSE(fresh->empty());
  EXPECT_EQ((*fresh)[0].sequence, last + 1);
  EXPECT_EQ(client_->Watch(-1, 10, 0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Watch(0, 0, 0).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(RpcServicesTest, StatusCountsAndScrubFindsDamage) {
  PushStep(1, 1.0);
  const auto status = client_->GetStatus();
  ASSERT_OK(status);
  EXPECT_EQ(status->version, "test");
  EXPECT_EQ(status->thrift_address, world_.tcp() + " " + world_.unix_socket());
  EXPECT_EQ(status->runs, 1);
  EXPECT_EQ(status->artifacts, 2);
  EXPECT_GT(status->chunk_bytes, 0);
  EXPECT_EQ(status->open_sessions, 0);
  const auto scrub = client_->Scrub();
  ASSERT_OK(scrub);
  EXPECT_GT(scrub->chunks, 0);
  EXPECT_TRUE(scrub->damaged.empty());
}

TEST_F(RpcServicesTest, RetentionPinsDeletionAndCollection) {
  const Digest first = PushStep(1, 3.0);
  const Digest second = PushStep(2, 2.0);
  const Digest third = PushStep(3, 4.0);
  PushStep(4, 5.0);
  auto report = client_->Retention("demo");
  ASSERT_OK(report);
  ASSERT_EQ(report->fates.size(), 4u);
  EXPECT_EQ(report->fates[0].artifact, first.raw());
  EXPECT_EQ(report->fates[0].reasons, std::vector<std::string>{"no rule"});
  EXPECT_GT(report->fates[0].stored_bytes, 0);

  rpc::RetentionPolicy policy;
  policy.keep_last = 1;
  policy.grace_ms = 0;
  policy.best.resize(1);
  policy.best[0].metric = "loss";
  policy.best[0].keep = 1;
  ASSERT_OK(client_->SetRetention("demo", policy));
  ASSERT_OK(client_->Pin("demo@3", "me", "the paper"));
  EXPECT_TRUE(client_->Show("demo@3")->pinned);
  EXPECT_EQ(client_->SetRetention("nobody", policy).status().code(), StatusCode::kNotFound);
  policy.keep_last = -1;
  EXPECT_EQ(client_->SetRetention("demo", policy).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Delete("demo@3", 0, "me", "").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Delete("demo@1", -5, "me", "").code(), StatusCode::kInvalidArgument);

  ASSERT_OK(client_->Delete("demo@1", 3'600'000, "me", "a test"));
  EXPECT_GT(client_->Show("demo@1")->purge_ms, 0);
  ASSERT_OK(client_->Undelete("demo@1"));
  EXPECT_EQ(client_->Show("demo@1")->purge_ms, 0);
  ASSERT_OK(client_->Delete("demo@1", 0, "me", "a test"));

  EXPECT_EQ(client_->CollectGarbage(/*dry_run=*/false, 1).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Show("demo@4")->purge_ms, 0);
  EXPECT_EQ(client_->Show("demo@2")->purge_ms, 0) << "refused before the rules are applied";
  const auto dry = client_->CollectGarbage(/*dry_run=*/true, 0);
  ASSERT_OK(dry);
  ASSERT_EQ(dry->purged.size(), 1u);
  EXPECT_EQ(dry->purged[0].artifact, first.raw());
  EXPECT_GT(dry->purged[0].bytes, 0);
  const auto done = client_->CollectGarbage(/*dry_run=*/false, 0);
  ASSERT_OK(done);
  EXPECT_EQ(done->purged.size(), 1u);
  EXPECT_EQ(done->chunk_bytes, dry->chunk_bytes);
  EXPECT_EQ(client_->Resolve("demo@1").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(*client_->Resolve("demo@2"), second) << "the best";
  EXPECT_EQ(*client_->Resolve("demo@3"), third) << "pinned";
  ASSERT_OK(client_->Unpin("demo@3"));
  EXPECT_EQ(client_->CollectGarbage(false, 0)->purged.size(), 1u) << "no rule wants it any more";
  EXPECT_EQ(client_->Log("demo")->size(), 2u);
}

// A checkpoint of a run with rules queues the job that applies them.
TEST_F(RpcServicesTest, ACheckpointExpiresOlderOnes) {
  rpc::RetentionPolicy policy;
  policy.keep_last = 2;
  policy.grace_ms = 0;
  ASSERT_OK(client_->SetRetention("demo", policy));
  for (int step = 1; step <= 6; ++step) PushStep(step, 10.0 - step);
  ASSERT_TRUE(world_.pipeline().WaitIdle(kJobTimeoutMs));
  const auto log = client_->Log("demo");
  ASSERT_OK(log);
  ASSERT_EQ(log->size(), 2u);
  EXPECT_EQ(log->front().step.step, 5);
  const auto job = client_->GetJob("expire/demo");
  ASSERT_OK(job);
  EXPECT_EQ(job->state, "done");
}

TEST_F(RpcServicesTest, BackupAndRepair) {
  PushStep(1, 3.0);
  const std::string folder = (world_.folder() / "backup").string();
  const auto first = client_->Backup(folder);
  ASSERT_OK(first);
  EXPECT_EQ(first->artifacts, 2);
  EXPECT_EQ(first->copied_chunks, first->total_chunks);
  EXPECT_EQ(client_->Backup(folder)->copied_chunks, 0);
  EXPECT_EQ(client_->Backup("relative").status().code(), StatusCode::kInvalidArgument);
  const auto scrub = client_->Scrub(folder);
  ASSERT_OK(scrub);
  EXPECT_TRUE(scrub->damaged.empty());
  EXPECT_EQ(client_->Scrub("/nowhere").status().code(), StatusCode::kInvalidArgument);
}

TEST_F(RpcServicesTest, UnknownThingsAreNotFoundByName) {
  for (const Status& status :
       {client_->Show("nobody").status(), client_->Log("nobody").status(),
        client_->Resolve("nobody").status(), client_->FetchManifest("nobody").status()}) {
    EXPECT_EQ(status.code(), StatusCode::kNotFound) << status.ToString();
    EXPECT_NE(status.message().find("nobody"), std::string::npos) << status.ToString();
  }
  const Digest absent = Sha256(std::string_view("absent"));
  const Status status =
      client_->FetchChunks({&absent, 1}, [](size_t, std::string&&) { return OkStatus(); });
  EXPECT_EQ(status.code(), StatusCode::kNotFound) << status.ToString();
  ASSERT_OK(client_->Hello());
}

TEST(RpcErrors, AnExceptionInTheDaemonIsInternalAndOnlyThat) {
  RpcWorld world({}, RefuseToMerge, {.version = "test", .describe = [](rpc::DaemonStatus&) {
                                       throw std::runtime_error("the engine is on fire");
                                     }});
  const auto client = world.NewClient();
  const Status status = client->GetStatus().status();
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_EQ(status.message(), "the engine is on fire");
  ASSERT_OK(client->Hello());
}

TEST(RpcErrors, CancelledUploadLeavesNothing) {
  RpcWorld world;
  std::mt19937_64 random(TestSeed());
  const auto client = world.NewClient();
  const std::atomic<bool> cancel{true};
  rpc::SessionRequest request;
  request.kind = rpc::Kind::BASE;
  request.run = "tiny";
  Client* const clients[] = {client.get()};
  const TestModel model = TinyLlama(random);
  EXPECT_EQ(UploadArtifact(clients, request, model, {}, {.cancel = &cancel}).status().code(),
            StatusCode::kUnavailable);
  EXPECT_EQ(client->Resolve("tiny").status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace stockpot
