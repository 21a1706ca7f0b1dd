// A hook over a real daemon's server, and a model whose memory the test may change after the call.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>

#include "tests/unit/thrift/rpc_world.h"
#include "thrift/remote_source.h"
#include "trainer_hooks/cpp/checkpoint_hook.h"

namespace stockpot {

using SteadyClock = std::chrono::steady_clock;

inline constexpr int64_t kFlushMs = 60'000;

inline int64_t MillisecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(SteadyClock::now() - start).count();
}

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

// Takes connections and never says a word.
class SilentServer {
 public:
  SilentServer() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listener_, 64), 0);  // the kernel completes connections; nobody accepts
    EXPECT_EQ(::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  ~SilentServer() { ::close(listener_); }
  SilentServer(const SilentServer&) = delete;
  const std::string& address() const { return address_; }

 private:
  const int listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string address_;
};

class HookTest : public ::testing::Test {
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
    options.run_config = {.merge_every = 0, .publish = PublishPolicy::kOnRequest};
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

}  // namespace stockpot
