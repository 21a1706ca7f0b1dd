// The hook over a real daemon's server: what arrives, and what happens when nobody answers.
#include "trainer_hooks/cpp/checkpoint_hook.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>

#include "tests/unit/thrift/rpc_world.h"
#include "thrift/remote_source.h"

namespace stockpot {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int64_t kFlushMs = 60'000;

int64_t MillisecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(SteadyClock::now() - start).count();
}

// A model whose memory the test may change after the call.
struct LiveModel {
  std::vector<float> weight = std::vector<float>(3'000'000);  // three chunks
  std::vector<float> norm = std::vector<float>(16, 1.0f);

  std::vector<TensorView> Views() const {
    return {{.name = "model.layers.0.mlp.up_proj.weight",
             .dtype = DType::kF32,
             .shape = {1000, 3000},
             .data = weight.data()},
            {.name = "model.norm.weight", .dtype = DType::kF32, .shape = {16}, .data = norm.data()},
            {.name = "tied", .dtype = DType::kF32, .shape = {16}, .alias_of = "model.norm.weight"}};
  }
  int64_t bytes() const { return static_cast<int64_t>(4 * (weight.size() + norm.size())); }
};

class CheckpointHookTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::mt19937_64 random(TestSeed());
    for (float& value : model_.weight) value = static_cast<float>(random() % 1000);
    UploadBase(*world_.NewClient(), "tiny", TinyLlama(random));
  }

  CheckpointHookOptions Options() {
    CheckpointHookOptions options;
    options.address = world_.tcp();
    options.run = "hooked";
    options.base = "tiny";
    options.run_config.publish = PublishPolicy::kOnRequest;
    options.run_config.merge_every = 0;
    options.files = {{"config.json", "{}"}};
    options.close_ms = 0;
    options.on_error = [this](const Status& status) {
      const std::lock_guard lock(mutex_);
      errors_.push_back(status);
    };
    return options;
  }

  std::unique_ptr<CheckpointHook> MakeHook(CheckpointHookOptions options) {
    auto hook = CheckpointHook::Create(std::move(options));
    EXPECT_OK(hook);
    return *std::move(hook);
  }

  std::vector<Status> Errors() {
    const std::lock_guard lock(mutex_);
    return errors_;
  }

  // The float values of a tensor of a stored step.
  std::vector<float> Stored(const std::string& id, const std::string& tensor) {
    const auto client = world_.NewClient();
    const auto source = OpenRemoteArtifact(*client, id);
    EXPECT_OK(source);
    const auto bytes = (*source)->ReadAll(tensor);
    EXPECT_OK(bytes);
    std::vector<float> values(bytes->size() / sizeof(float));
    std::memcpy(values.data(), bytes->data(), bytes->size());
    return values;
  }

  RpcWorld world_;
  LiveModel model_;
  std::mutex mutex_;
  std::vector<Status> errors_;
};

TEST_F(CheckpointHookTest, StoresTheValuesAtTheCall) {
  const auto hook = MakeHook(Options());
  const std::vector<float> weight = model_.weight;
  ASSERT_TRUE(hook->OnStep(5, model_.Views(), {{"loss", 1.25}, {"bad", NAN}}));
  std::fill(model_.weight.begin(), model_.weight.end(), -1.0f);  // the optimizer goes on at once
  std::fill(model_.norm.begin(), model_.norm.end(), -1.0f);
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(Stored("hooked@5", "model.layers.0.mlp.up_proj.weight"), weight);
  EXPECT_EQ(Stored("hooked@5", "tied"), std::vector<float>(16, 1.0f));
  const CheckpointHookStats stats = hook->Stats();
  EXPECT_EQ(stats.committed, 1);
  EXPECT_EQ(stats.last_committed_step, 5);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.staged_bytes, 0);
  EXPECT_GE(stats.sent_bytes, model_.bytes());
  EXPECT_OK(stats.last_error);
  EXPECT_TRUE(Errors().empty());
  const auto shown = world_.NewClient()->Show("hooked@5");
  ASSERT_OK(shown);
  EXPECT_EQ(shown->metrics, (std::map<std::string, double>{{"loss", 1.25}}));
}

TEST_F(CheckpointHookTest, SendsOnlyWhatChanged) {
  const auto hook = MakeHook(Options());
  ASSERT_TRUE(hook->OnStep(1, model_.Views(), {}));
  ASSERT_TRUE(hook->Flush(kFlushMs));
  const int64_t first = hook->Stats().sent_bytes;
  model_.norm[0] = 7;
  ASSERT_TRUE(hook->OnStep(2, model_.Views(), {}));
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().committed, 2);
  EXPECT_EQ(hook->Stats().sent_bytes - first, static_cast<int64_t>(4 * model_.norm.size()));
}

TEST_F(CheckpointHookTest, DeadDaemonCostsACopyAndIsCounted) {
  world_.Stop();
  CheckpointHookOptions options = Options();
  options.staging_bytes = 2 * model_.bytes() + 1000;
  const auto hook = MakeHook(std::move(options));
  for (int64_t step = 1; step <= 6; ++step) {
    const auto start = SteadyClock::now();
    EXPECT_EQ(hook->OnStep(step, model_.Views(), {}), step <= 2) << step;
    EXPECT_LT(MillisecondsSince(start), 2'000) << step;
  }
  const CheckpointHookStats stats = hook->Stats();
  EXPECT_EQ(stats.offered, 6);
  EXPECT_EQ(stats.skipped, 4);
  EXPECT_EQ(stats.committed, 0);
  EXPECT_EQ(stats.waiting, 2);
  EXPECT_LE(stats.staged_bytes, 2 * model_.bytes() + 1000);
  EXPECT_FALSE(hook->Flush(50));

  world_.Start();  // it comes back: what was staged arrives
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().committed, 2);
  EXPECT_GE(hook->Stats().retries, 1);
  EXPECT_OK(hook->Stats().last_error);
  EXPECT_EQ(Stored("hooked@2", "model.layers.0.mlp.up_proj.weight"), model_.weight);
  // One kind of trouble is told once.
  EXPECT_EQ(Errors().size(), 1u);
  EXPECT_EQ(Errors()[0].code(), StatusCode::kUnavailable);
}

TEST_F(CheckpointHookTest, WaitsForStagingAtMostAsLongAsItWasTold) {
  world_.Stop();
  CheckpointHookOptions options = Options();
  options.staging_bytes = model_.bytes() + 1000;
  options.when_full = WhenStagingIsFull::kWait;
  options.wait_ms = 200;
  const auto hook = MakeHook(std::move(options));
  ASSERT_TRUE(hook->OnStep(1, model_.Views(), {}));
  const auto start = SteadyClock::now();
  EXPECT_FALSE(hook->OnStep(2, model_.Views(), {}));
  const int64_t waited_ms = MillisecondsSince(start);
  EXPECT_GE(waited_ms, 200);
  EXPECT_LT(waited_ms, 2'200);
  EXPECT_EQ(hook->Stats().skipped, 1);
}

TEST_F(CheckpointHookTest, WaitingEndsWhenAnUploadDoes) {
  CheckpointHookOptions options = Options();
  options.staging_bytes = model_.bytes() + 1000;  // one at a time
  options.when_full = WhenStagingIsFull::kWait;
  options.wait_ms = kFlushMs;
  const auto hook = MakeHook(std::move(options));
  for (int64_t step = 1; step <= 4; ++step) {
    model_.weight[step] += 1;
    ASSERT_TRUE(hook->OnStep(step, model_.Views(), {})) << step;
  }
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().committed, 4);
  EXPECT_EQ(hook->Stats().skipped, 0);
}

TEST_F(CheckpointHookTest, SurvivesARestartInBetween) {
  const auto hook = MakeHook(Options());
  ASSERT_TRUE(hook->OnStep(1, model_.Views(), {}));
  ASSERT_TRUE(hook->Flush(kFlushMs));
  world_.Stop();
  world_.Start();
  model_.weight[0] += 1;
  ASSERT_TRUE(hook->OnStep(2, model_.Views(), {}));
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().committed, 2);
}

TEST_F(CheckpointHookTest, RefusalIsCountedAndTheLoopGoesOn) {
  const auto hook = MakeHook(Options());
  ASSERT_TRUE(hook->OnStep(1, model_.Views(), {}));
  ASSERT_TRUE(hook->Flush(kFlushMs));
  model_.weight[0] += 1;
  ASSERT_TRUE(hook->OnStep(1, model_.Views(), {}));  // the step exists with other values
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().failed, 1);
  EXPECT_EQ(hook->Stats().last_error.code(), StatusCode::kAlreadyExists);
  ASSERT_EQ(Errors().size(), 1u);
  ASSERT_TRUE(hook->OnStep(2, model_.Views(), {}));
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().committed, 2);
}

TEST_F(CheckpointHookTest, UnknownBaseIsReportedNotRetriedForEver) {
  CheckpointHookOptions options = Options();
  options.base = "nobody";
  const auto hook = MakeHook(std::move(options));
  ASSERT_TRUE(hook->OnStep(1, model_.Views(), {}));
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().failed, 1);
  EXPECT_EQ(hook->Stats().last_error.code(), StatusCode::kNotFound);
}

TEST_F(CheckpointHookTest, MalformedViewsAreRefusedWithTheirName) {
  const auto hook = MakeHook(Options());
  const auto refused = [&](const std::function<void(std::vector<TensorView>&)>& change) {
    std::vector<TensorView> views = model_.Views();
    change(views);
    EXPECT_FALSE(hook->OnStep(1, views, {}));
    return hook->Stats().last_error.message();
  };
  const auto names = [](const std::string& message, const std::string& name) {
    return message.find(name) != std::string::npos;
  };
  EXPECT_TRUE(names(refused([](auto& v) { v[0].shape = {-1}; }), "up_proj"));
  EXPECT_TRUE(names(refused([](auto& v) { v[0].shape = {1LL << 40, 1LL << 40}; }), "up_proj"));
  EXPECT_TRUE(names(refused([](auto& v) { v[0].data = nullptr; }), "up_proj"));
  EXPECT_TRUE(names(refused([](auto& v) { v[1].name = v[0].name; }), "up_proj"));
  EXPECT_TRUE(names(refused([](auto& v) { v[2].alias_of = "gone"; }), "gone"));
  refused([](auto& v) { v.clear(); });
  EXPECT_FALSE(hook->OnStep(-1, model_.Views(), {}));
  EXPECT_EQ(hook->Stats().failed, 7);
  EXPECT_EQ(hook->Stats().staged_bytes, 0);
}

TEST_F(CheckpointHookTest, DestructionIsBoundedWhileNobodyAnswers) {
  world_.Stop();
  CheckpointHookOptions options = Options();
  options.close_ms = 100;
  auto hook = MakeHook(std::move(options));
  ASSERT_TRUE(hook->OnStep(1, model_.Views(), {}));
  const auto start = SteadyClock::now();
  hook.reset();
  EXPECT_LT(MillisecondsSince(start), 5'000);
}

TEST(CheckpointHookOptionsTest, RefusesWhatCannotWork) {
  const auto code = [](const std::function<void(CheckpointHookOptions&)>& change) {
    CheckpointHookOptions options{.run = "r", .base = "b"};
    change(options);
    return CheckpointHook::Create(options).status().code();
  };
  EXPECT_EQ(code([](auto&) {}), StatusCode::kOk);
  EXPECT_EQ(code([](auto& o) { o.run = ""; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.base = ""; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.address = "nonsense"; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.connections = 9; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.copy_threads = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.staging_bytes = 0; }), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stockpot
