// The hook over a real daemon's server: what arrives, and what happens when nobody answers.
#include "trainer_hooks/cpp/checkpoint_hook.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmath>

#include "tests/unit/hooks/hook_world.h"

namespace stockpot {
namespace {

using CheckpointHookTest = HookTest;

// C3.
TEST_F(CheckpointHookTest, C3_StoresTheValuesAtTheCall) {
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
    EXPECT_EQ(hook->OnStep(step, model_.Views(), {}).staged, step <= 2) << step;
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

// C10: it takes connections and calls, and never says a word.
TEST_F(CheckpointHookTest, C10_AStalledServerCostsACopyAndABoundedEnd) {
  const SilentServer silent;
  CheckpointHookOptions options = Options();
  options.address = silent.address();
  options.staging_bytes = 2 * model_.bytes() + 1000;
  options.close_ms = 100;
  auto hook = MakeHook(std::move(options));
  for (int64_t step = 1; step <= 6; ++step) {
    const auto start = SteadyClock::now();
    EXPECT_EQ(hook->OnStep(step, model_.Views(), {}).staged, step <= 2) << step;
    EXPECT_LT(MillisecondsSince(start), 5'000) << step;
  }
  EXPECT_EQ(hook->Stats().skipped, 4);
  const auto start = SteadyClock::now();
  hook.reset();
  EXPECT_LT(MillisecondsSince(start), 10'000);
}

// It is noticed that the daemon is silent, and the step arrives when it talks again.
TEST_F(CheckpointHookTest, C10_ASilentAnswerIsNotWaitedForLongerThanAnswerMs) {
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CheckpointHookOptions options = Options();
  TemporaryFolder folder;
  const std::string path = (folder.path() / "silent.sock").string();
  sockaddr_un silent{};
  silent.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), silent.sun_path);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&silent), sizeof silent), 0);
  ASSERT_EQ(::listen(listener, 64), 0);
  options.address = "unix:" + path;
  options.answer_ms = 200;
  const auto hook = MakeHook(std::move(options));
  ASSERT_TRUE(hook->OnStep(1, model_.Views(), {}));
  const auto start = SteadyClock::now();
  while (hook->Stats().retries == 0) {
    ASSERT_LT(MillisecondsSince(start), 30'000);
    EXPECT_FALSE(hook->Flush(20));
  }
  EXPECT_EQ(hook->Stats().last_error.code(), StatusCode::kUnavailable);
  ::close(listener);
}

// C4: the loop sees at its next call what went wrong behind its back, in status too, and goes on.
TEST_F(CheckpointHookTest, C4_ABackgroundFailureShowsAtTheNextCall) {
  const auto hook = MakeHook(Options());
  StepOutcome outcome = hook->OnStep(1, model_.Views(), {});
  EXPECT_TRUE(outcome.staged);
  ASSERT_TRUE(hook->Flush(kFlushMs));
  model_.weight[0] += 1;
  outcome = hook->OnStep(1, model_.Views(), {});  // staged; it will be refused
  EXPECT_TRUE(outcome.staged);
  EXPECT_OK(outcome.background);
  ASSERT_TRUE(hook->Flush(kFlushMs));
  outcome = hook->OnStep(2, model_.Views(), {});
  EXPECT_TRUE(outcome.staged) << "training goes on";
  EXPECT_EQ(outcome.background.code(), StatusCode::kAlreadyExists);
  EXPECT_NE(outcome.background.message().find("step 1"), std::string::npos)
      << outcome.background.ToString();
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().failed, 1);
  EXPECT_EQ(hook->Stats().committed, 2);
  EXPECT_OK(hook->OnStep(3, model_.Views(), {}).background);  // told once
  ASSERT_TRUE(hook->Flush(kFlushMs));
}

// What a GPU tensor is: bytes that only a function can copy.
TEST_F(CheckpointHookTest, ReadsViewsThatHaveNoPointer) {
  const auto hook = MakeHook(Options());
  std::vector<TensorView> views = model_.Views();
  views[0].data = nullptr;
  views[0].read = [&](std::span<std::byte> out) {
    std::memcpy(out.data(), model_.weight.data(), out.size());
    return OkStatus();
  };
  ASSERT_TRUE(hook->OnStep(1, views, {}));
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(Stored("hooked@1", views[0].name), model_.weight);
  views[0].read = [](std::span<std::byte>) { return Internal("the device is gone"); };
  EXPECT_FALSE(hook->OnStep(2, views, {}));
  EXPECT_NE(hook->Stats().last_error.message().find(views[0].name), std::string::npos);
  EXPECT_EQ(hook->Stats().staged_bytes, 0);
}

TEST_F(CheckpointHookTest, StagingComesFromTheGivenAllocator) {
  CheckpointHookOptions options = Options();
  int64_t allocated = 0;
  options.allocate = [&](int64_t bytes) -> std::shared_ptr<void> {
    allocated += bytes;
    return allocated > 2 * model_.bytes() ? nullptr
                                          : std::shared_ptr<void>(std::malloc(bytes), std::free);
  };
  const auto hook = MakeHook(std::move(options));
  for (int64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(hook->OnStep(step, model_.Views(), {})) << step;
    ASSERT_TRUE(hook->Flush(kFlushMs));
  }
  EXPECT_LT(allocated, 2 * model_.bytes()) << "buffers are used again";
  LiveModel larger;
  larger.weight.resize(model_.weight.size() * 2);
  std::vector<TensorView> views = larger.Views();
  views[0].shape = {2000, 3000};
  EXPECT_FALSE(hook->OnStep(4, views, {}));
  EXPECT_EQ(hook->Stats().last_error.code(), StatusCode::kResourceExhausted);
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
