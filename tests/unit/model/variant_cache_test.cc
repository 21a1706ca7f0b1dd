#include "serve/variants/variant_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <fstream>
#include <future>
#include <mutex>
#include <thread>

#include "tests/unit/model/world.h"

namespace stockpot {
namespace {

using test::World;

// Calls Acquire and waits for the answer.
Result<VariantLease> AcquireNow(VariantCache& cache, const Digest& digest) {
  std::promise<Result<VariantLease>> answer;
  cache.Acquire(digest, [&](Result<VariantLease> lease) { answer.set_value(std::move(lease)); });
  return answer.get_future().get();
}

class VariantCacheTest : public ::testing::Test {
 protected:
  VariantCacheTest() {
    for (uint64_t i = 0; i < 5; ++i) {
      digests_.push_back(world_.Publish(test::TunedFrom(base_model_, 10 + i)));
    }
    bytes_ = world_.Load(digests_[0])->resident_bytes();
  }

  // Room for `variants`; time moves only where a test moves it.
  VariantCache::Options Options(double variants) {
    return {.budget_bytes = static_cast<int64_t>(variants * static_cast<double>(bytes_)),
            .clock = [this] { return now_ms_.load(); }};
  }
  TestModel base_model_ = test::RandomBase(1);
  World world_{base_model_};
  std::vector<Digest> digests_;
  int64_t bytes_ = 0;
  std::atomic<int64_t> now_ms_{1'000'000};
};

// Inverts every byte but the first page of each pack: doing it twice restores them.
void InvertPacks(const std::filesystem::path& folder) {
  int packs = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".pack") continue;
    ++packs;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    std::vector<char> bytes(std::filesystem::file_size(entry.path()));
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    for (size_t i = 4096; i < bytes.size(); ++i) bytes[i] = static_cast<char>(~bytes[i]);
    file.seekp(0);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  EXPECT_GT(packs, 0);
}

// S5.
TEST_F(VariantCacheTest, HundredFirstRequestsAreOneLoad) {
  VariantCache cache(world_.base, *world_.store, Options(5));
  std::atomic<int> answers{0};
  std::mutex mutex;
  std::condition_variable all;
  std::vector<VariantLease> leases;
  std::vector<std::thread> threads;
  for (int i = 0; i < 100; ++i) {
    threads.emplace_back([&] {
      cache.Acquire(digests_[0], [&](Result<VariantLease> lease) {
        std::lock_guard lock(mutex);
        ASSERT_OK(lease);
        leases.push_back(*lease);
        if (++answers == 100) all.notify_one();
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::unique_lock lock(mutex);
  all.wait(lock, [&] { return answers == 100; });
  for (const VariantLease& lease : leases) EXPECT_EQ(lease, leases[0]);
  EXPECT_EQ(cache.stats().misses, 1);
  EXPECT_EQ(cache.stats().resident, 1);
  EXPECT_EQ(cache.stats().resident_bytes, bytes_);
  ASSERT_EQ(cache.entries().size(), 1u);
  EXPECT_EQ(cache.entries()[0].leases, 100);
  EXPECT_EQ(cache.entries()[0].state, "resident");
}

TEST_F(VariantCacheTest, ResidentAnswersOnTheCallersThread) {
  VariantCache cache(world_.base, *world_.store, Options(5));
  ASSERT_OK(AcquireNow(cache, digests_[0]));
  bool answered = false;
  cache.Acquire(digests_[0], [&](const Result<VariantLease>& lease) { answered = lease.ok(); });
  EXPECT_TRUE(answered);
  EXPECT_EQ(cache.stats().hits, 1);
}

TEST_F(VariantCacheTest, EvictsTheColdestWithinTheBudget) {
  VariantCache cache(world_.base, *world_.store, Options(3.5));
  // 0 is hot: many requests, the last of them oldest.
  for (int i = 0; i < 10; ++i) ASSERT_OK(AcquireNow(cache, digests_[0]));
  now_ms_ += 1000;
  ASSERT_OK(AcquireNow(cache, digests_[1]));
  now_ms_ += 1000;
  ASSERT_OK(AcquireNow(cache, digests_[2]));
  now_ms_ += 1000;
  ASSERT_OK(AcquireNow(cache, digests_[3]));  // 1 is the least recent of the cold ones
  const auto resident = [&] {
    std::vector<Digest> list;
    for (const auto& entry : cache.entries()) list.push_back(entry.digest);
    return list;
  };
  const auto sorted = [](std::vector<Digest> list) {
    std::sort(list.begin(), list.end());
    return list;
  };
  EXPECT_EQ(resident(), sorted({digests_[0], digests_[2], digests_[3]}));
  EXPECT_EQ(cache.stats().evictions, 1);
  EXPECT_LE(cache.stats().resident_bytes, Options(3.5).budget_bytes);
  // An hour later being hot once counts for nothing.
  now_ms_ += 3'600'000;
  ASSERT_OK(AcquireNow(cache, digests_[2]));
  ASSERT_OK(AcquireNow(cache, digests_[3]));
  ASSERT_OK(AcquireNow(cache, digests_[4]));
  EXPECT_EQ(resident(), sorted({digests_[2], digests_[3], digests_[4]}));
}

TEST_F(VariantCacheTest, LeasedVariantsStay) {
  VariantCache cache(world_.base, *world_.store, Options(2.5));
  Result<VariantLease> first = AcquireNow(cache, digests_[0]);
  Result<VariantLease> second = AcquireNow(cache, digests_[1]);
  ASSERT_OK(first);
  ASSERT_OK(second);
  const Status full = AcquireNow(cache, digests_[2]).status();
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find("in use"), std::string::npos);
  EXPECT_EQ(cache.stats().resident, 2);
  first = Unavailable("given back");
  EXPECT_OK(AcquireNow(cache, digests_[2]));
  EXPECT_EQ(cache.entries().size(), 2u);
}

TEST_F(VariantCacheTest, LargerThanTheBudgetIsRefusedUnread) {
  VariantCache cache(world_.base, *world_.store, Options(0.2));
  const Status status = AcquireNow(cache, digests_[0]).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("budget"), std::string::npos);
  EXPECT_EQ(cache.stats().resident_bytes, 0);
  EXPECT_EQ(cache.stats().failures, 1);
}

// A damaged pack: the tensor is named, nobody else notices, and the load works again once it is
// repaired.
TEST_F(VariantCacheTest, DamageIsNamedAndForgotten) {
  // A vocabulary large enough that the embeddings are in a pack file, not inline in the catalogue.
  const TestModel base_model = test::RandomBase(1, {.vocab = 4096});
  World world(base_model);
  const Digest good = world.Publish(test::TunedFrom(base_model, 2));
  const Digest damaged = world.Publish(test::TunedFrom(base_model, 3));
  VariantCache cache(world.base, *world.store, {});
  ASSERT_OK(AcquireNow(cache, good));
  InvertPacks(world.folder.path());
  const Status status = AcquireNow(cache, damaged).status();
  EXPECT_EQ(status.code(), StatusCode::kCorruption) << status.ToString();
  EXPECT_NE(status.message().find("tensor 'model.embed_tokens.weight'"), std::string::npos)
      << status.ToString();
  EXPECT_NE(status.message().find(damaged.ShortHex()), std::string::npos);
  EXPECT_OK(AcquireNow(cache, good));  // resident
  InvertPacks(world.folder.path());
  EXPECT_OK(AcquireNow(cache, damaged));
  EXPECT_EQ(cache.stats().failures, 1);
}

// S13, the cache's half: what nothing names is freed with its last lease, and not before.
TEST_F(VariantCacheTest, RetiredVariantsGoWithTheirLastLease) {
  VariantCache cache(world_.base, *world_.store, Options(5));
  Result<VariantLease> lease = AcquireNow(cache, digests_[0]);
  ASSERT_OK(lease);
  cache.Retire(digests_[0]);
  EXPECT_EQ(cache.entries().size(), 0u);
  EXPECT_EQ(cache.stats().resident_bytes, bytes_);  // in use still
  {
    // Asked for again while it lives: the same one, not a second copy.
    const Result<VariantLease> again = AcquireNow(cache, digests_[0]);
    ASSERT_OK(again);
    EXPECT_EQ(*again, *lease);
    EXPECT_EQ(cache.stats().misses, 1);
  }
  cache.Retire(digests_[0]);
  lease = Unavailable("given back");
  EXPECT_EQ(cache.stats().resident_bytes, 0);
  cache.Retire(digests_[0]);  // nothing to do
  EXPECT_OK(AcquireNow(cache, digests_[0]));
  EXPECT_EQ(cache.stats().misses, 2);
}

TEST_F(VariantCacheTest, LeasesOutliveTheCache) {
  VariantLease lease;
  {
    VariantCache cache(world_.base, *world_.store, Options(5));
    lease = AcquireNow(cache, digests_[0]).value();
  }
  EXPECT_EQ(lease->digest(), digests_[0]);
}

TEST_F(VariantCacheTest, WaitingRequestsAreBounded) {
  VariantCache::Options options = Options(5);
  options.waiting_requests = 2;
  // The loader is held inside the first answer, so that what follows has to wait.
  std::promise<void> held;
  std::promise<void> release;
  std::atomic<int> unavailable{0};
  std::atomic<int> refused{0};
  {
    VariantCache cache(world_.base, *world_.store, options);
    cache.Acquire(digests_[0], [&](const Result<VariantLease>&) {
      held.set_value();
      release.get_future().wait();
    });
    held.get_future().wait();
    for (size_t i = 1; i < 5; ++i) {
      cache.Acquire(digests_[i], [&](const Result<VariantLease>& lease) {
        const StatusCode code = lease.status().code();
        if (code == StatusCode::kResourceExhausted) ++refused;
        if (code == StatusCode::kUnavailable) ++unavailable;
      });
    }
    EXPECT_EQ(refused, 2);
    std::thread later([&] { release.set_value(); });
    later.join();
  }
  // Two waited: each was loaded or told that the cache goes.
  EXPECT_LE(unavailable, 2);
}

// Many threads, few variants, a tight budget: leases always show the digest that was asked for, the
// budget holds whenever nothing is in use, and nothing leaks.
TEST_F(VariantCacheTest, StormKeepsItsPromises) {
  VariantCache cache(world_.base, *world_.store, Options(2.5));
  const uint64_t seed = TestSeed();
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(seed + t);
      for (int i = 0; i < 100; ++i) {
        const Digest& digest = digests_[random() % digests_.size()];
        if (random() % 8 == 0) {
          cache.Retire(digest);
          continue;
        }
        const Result<VariantLease> lease = AcquireNow(cache, digest);
        if (lease.ok()) {
          ASSERT_EQ((*lease)->digest(), digest);
        } else {
          ASSERT_EQ(lease.status().code(), StatusCode::kResourceExhausted);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const VariantCacheStats stats = cache.stats();
  EXPECT_LE(stats.resident_bytes, Options(2.5).budget_bytes);
  EXPECT_EQ(stats.resident_bytes, stats.resident * bytes_);
}

}  // namespace
}  // namespace stockpot
