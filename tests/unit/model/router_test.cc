#include "serve/variants/router.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "tests/unit/model/world.h"

namespace stockpot {
namespace {

using test::World;

constexpr char kBaseName[] = "tiny";

Result<VariantLease> AcquireNow(VariantCache& cache, const Digest& digest) {
  std::promise<Result<VariantLease>> answer;
  cache.Acquire(digest, [&](Result<VariantLease> lease) { answer.set_value(std::move(lease)); });
  return answer.get_future().get();
}

class RouterTest : public ::testing::Test {
 protected:
  RouterTest() : cache_(world_.base, *world_.store, {}) {
    for (uint64_t i = 0; i < 4; ++i) {
      digests_.push_back(world_.Publish(test::TunedFrom(base_model_, 10 + i)));
    }
  }

  // Polls until the router knows everything up to `sequence`; false after ten seconds.
  static bool WaitFollowed(const Router& router, int64_t sequence) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (router.followed_sequence() < sequence) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
  const ServedModel* Find(const std::vector<ServedModel>& models, const std::string& name) {
    for (const ServedModel& model : models) {
      if (model.name == name) return &model;
    }
    return nullptr;
  }

  TestModel base_model_ = test::RandomBase(1);
  World world_{base_model_};
  VariantCache cache_;
  std::vector<Digest> digests_;
};

// S11.
TEST_F(RouterTest, NamesThatDoNotMatchAreNotFound) {
  world_.Route("run@1", digests_[0]);
  Router router(kBaseName, world_.base, *world_.store, cache_);
  const Result<Resolved> base = router.Resolve(kBaseName);
  ASSERT_OK(base);
  EXPECT_TRUE(base->is_base);
  EXPECT_EQ(base->digest, world_.base_digest);
  const Result<Resolved> variant = router.Resolve("run@1");
  ASSERT_OK(variant);
  EXPECT_FALSE(variant->is_base);
  EXPECT_EQ(variant->digest, digests_[0]);
  for (const std::string& name :
       std::vector<std::string>{"", "run", "run@", "run@2", "RUN@1", "run@1 ", "Tiny", "tiny ",
                                "run@latest", "\n", std::string("run@1\0x", 7)}) {
    const Status status = router.Resolve(name).status();
    EXPECT_EQ(status.code(), StatusCode::kNotFound) << name;
    EXPECT_NE(status.message().find("run@1"), std::string::npos) << status.ToString();
  }
  EXPECT_EQ(router.Resolve(std::string(5000, 'x')).status().code(), StatusCode::kNotFound);
}

TEST_F(RouterTest, FollowsNewMovedAndRemovedRoutes) {
  Router router(kBaseName, world_.base, *world_.store, cache_);
  EXPECT_EQ(router.Models().size(), 1u);
  EXPECT_EQ(router.Models()[0].state, "ready");

  world_.Route("run@latest", digests_[0]);
  EXPECT_OK(router.Resolve("run@latest"));  // at once, whether followed or not
  ASSERT_TRUE(WaitFollowed(router, world_.Route("run@1", digests_[0])));
  ASSERT_TRUE(WaitFollowed(router, world_.Route("run@latest", digests_[1])));
  EXPECT_EQ(router.Resolve("run@latest")->digest, digests_[1]);
  EXPECT_EQ(router.Resolve("run@1")->digest, digests_[0]);
  EXPECT_GE(router.last_flip_seconds(), 0);
  EXPECT_LT(router.last_flip_seconds(), 60);
  const std::vector<ServedModel> models = router.Models();
  ASSERT_EQ(models.size(), 3u);
  EXPECT_TRUE(models[0].is_base);
  ASSERT_NE(Find(models, "run@latest"), nullptr);
  EXPECT_EQ(Find(models, "run@latest")->state, "ready");  // loaded before it flipped
  EXPECT_GT(Find(models, "run@latest")->resident_bytes, 0);
  EXPECT_GT(Find(models, "run@latest")->moved_ms, 0);

  ASSERT_TRUE(WaitFollowed(router, world_.Route("run@latest", Digest{})));
  EXPECT_EQ(router.Resolve("run@latest").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(router.Models().size(), 2u);
}

// S12: while a name moves again and again, it always answers, and with a variant it had.
TEST_F(RouterTest, MovingNameIsNeverUnavailable) {
  world_.Route("run@latest", digests_[0]);
  Router router(kBaseName, world_.base, *world_.store, cache_);
  std::atomic<bool> stop{false};
  std::atomic<int64_t> answered{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back([&] {
      while (!stop) {
        const Result<Resolved> resolved = router.Resolve("run@latest");
        ASSERT_OK(resolved);
        const Result<VariantLease> lease = AcquireNow(cache_, resolved->digest);
        ASSERT_OK(lease);
        ASSERT_EQ((*lease)->digest(), resolved->digest);
        ++answered;
      }
    });
  }
  int64_t sequence = 0;
  for (size_t i = 1; i <= 40; ++i) {
    sequence = world_.Route("run@latest", digests_[i % digests_.size()]);
  }
  EXPECT_TRUE(WaitFollowed(router, sequence));
  EXPECT_EQ(router.Resolve("run@latest")->digest, digests_[0]);
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_GT(answered, 0);
}

// S12, the order: the name does not flip before the new variant is resident.
TEST_F(RouterTest, LoadsBeforeItFlips) {
  world_.Route("run@latest", digests_[0]);
  Router router(kBaseName, world_.base, *world_.store, cache_);
  // The one loader is held inside an answer: the new variant cannot load yet.
  std::promise<void> held;
  std::promise<void> release;
  cache_.Acquire(digests_[2], [&](const Result<VariantLease>&) {
    held.set_value();
    release.get_future().wait();
  });
  held.get_future().wait();
  const int64_t sequence = world_.Route("run@latest", digests_[1]);
  // Seen (it is being loaded), not flipped.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  const auto is_loading = [&] {
    for (const auto& entry : cache_.entries()) {
      if (entry.digest == digests_[1] && entry.state == "loading") return true;
    }
    return false;
  };
  while (!is_loading() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  ASSERT_TRUE(is_loading());
  EXPECT_EQ(router.Resolve("run@latest")->digest, digests_[0]);
  EXPECT_LT(router.followed_sequence(), sequence);
  release.set_value();
  ASSERT_TRUE(WaitFollowed(router, sequence));
  EXPECT_EQ(router.Resolve("run@latest")->digest, digests_[1]);
}

// S3: who holds a lease keeps the version it started with. S13: the last lease frees it.
TEST_F(RouterTest, LeasesKeepTheirVersionUntilTheLastGoes) {
  world_.Route("run@latest", digests_[0]);
  Router router(kBaseName, world_.base, *world_.store, cache_);
  Result<VariantLease> running = AcquireNow(cache_, router.Resolve("run@latest")->digest);
  ASSERT_OK(running);
  const int64_t bytes = (*running)->resident_bytes();
  ASSERT_TRUE(WaitFollowed(router, world_.Route("run@latest", Digest{})));
  EXPECT_EQ(router.Resolve("run@latest").status().code(), StatusCode::kNotFound);
  EXPECT_EQ((*running)->digest(), digests_[0]);
  // The follower retires what no name leads to right after it removed the name.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!cache_.entries().empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(cache_.entries().empty());
  EXPECT_EQ(cache_.stats().resident_bytes, bytes);
  running = Unavailable("finished");
  EXPECT_EQ(cache_.stats().resident_bytes, 0);
}

// A variant that cannot be loaded: a name that answered goes on with what it had, a new name says
// why.
TEST_F(RouterTest, BrokenVariantDoesNotReplaceAGoodOne) {
  Manifest broken = world_.ManifestOf(digests_[1]);
  std::erase_if(broken.tensors, [](const TensorEntry& tensor) {
    return tensor.name == "model.layers.0.mlp.up_proj.weight";
  });
  const Digest bad = world_.Add(std::move(broken));
  world_.Route("run@latest", digests_[0]);
  Router router(kBaseName, world_.base, *world_.store, cache_);
  ASSERT_TRUE(WaitFollowed(router, world_.Route("run@latest", bad)));
  EXPECT_EQ(router.Resolve("run@latest")->digest, digests_[0]);
  const std::vector<ServedModel> models = router.Models();
  EXPECT_NE(Find(models, "run@latest")->error.find("up_proj"), std::string::npos);

  ASSERT_TRUE(WaitFollowed(router, world_.Route("run@bad", bad)));
  const Result<Resolved> resolved = router.Resolve("run@bad");
  ASSERT_OK(resolved);
  EXPECT_EQ(AcquireNow(cache_, resolved->digest).status().code(), StatusCode::kInvalidArgument);

  ASSERT_TRUE(WaitFollowed(router, world_.Route("run@latest", digests_[2])));
  EXPECT_EQ(router.Resolve("run@latest")->digest, digests_[2]);
  EXPECT_EQ(Find(router.Models(), "run@latest")->error, "");
}

TEST_F(RouterTest, RoutesOfAnotherBaseAreNotServed) {
  const TestModel other_model = test::RandomBase(20);
  const Digest other_base = StoreModel(*world_.store, other_model, ArtifactKind::kBase);
  Manifest foreign = PutModel(*world_.store, test::TunedFrom(other_model, 21),
                              ArtifactKind::kVariant, other_base, "other", 1);
  const Digest digest = world_.Add(std::move(foreign));
  world_.Route("other@1", digest);
  Router router(kBaseName, world_.base, *world_.store, cache_);
  const Status status = router.Resolve("other@1").status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_NE(status.message().find("another base"), std::string::npos);
  EXPECT_EQ(router.Models().size(), 1u);
  // The same for one that arrives later, and it may come home.
  ASSERT_TRUE(WaitFollowed(router, world_.Route("late", digest)));
  EXPECT_EQ(router.Resolve("late").status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(WaitFollowed(router, world_.Route("late", digests_[0])));
  EXPECT_EQ(router.Resolve("late")->digest, digests_[0]);
  EXPECT_EQ(cache_.stats().failures, 0);
}

TEST_F(RouterTest, StopsWhileTheStoreIsShutDown) {
  Router router(kBaseName, world_.base, *world_.store, cache_);
  world_.Route("run@1", digests_[0]);
  world_.store->Shutdown();
  EXPECT_OK(router.Resolve("run@1"));
}

}  // namespace
}  // namespace stockpot
