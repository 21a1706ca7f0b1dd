#include "serve/model/kv_cache.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

ModelConfig TinyConfig() {
  ModelConfig config;
  config.layers = 3;
  config.kv_heads = 2;
  config.head_dim = 6;
  return config;
}

constexpr int64_t kPageBytes = 3 * 2 * kKvPageTokens * 12 * sizeof(float);

TEST(KvPool, HoldsAsManyPagesAsFit) {
  EXPECT_EQ(KvPool(TinyConfig(), 5 * kPageBytes).total_pages(), 5);
  EXPECT_EQ(KvPool(TinyConfig(), 5 * kPageBytes - 1).total_pages(), 4);
  EXPECT_EQ(KvPool(TinyConfig(), 0).total_pages(), 0);
  EXPECT_EQ(KvPool(TinyConfig(), -1).total_pages(), 0);
  EXPECT_EQ(KvPool(TinyConfig(), kPageBytes).page_bytes(), kPageBytes);
}

TEST(KvPool, ExhaustionChangesNothing) {
  KvPool pool(TinyConfig(), 3 * kPageBytes);
  KvSequence a = pool.NewSequence();
  KvSequence b = pool.NewSequence();
  ASSERT_OK(a.Reserve(2 * kKvPageTokens));
  const Status status = b.Reserve(kKvPageTokens + 1);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("1 of 3 pages free"), std::string::npos);
  EXPECT_EQ(b.capacity(), 0);
  EXPECT_EQ(pool.free_pages(), 1);
  EXPECT_OK(b.Reserve(kKvPageTokens));
  EXPECT_EQ(pool.free_pages(), 0);
  { const KvSequence gone = std::move(a); }
  EXPECT_EQ(pool.free_pages(), 2);
  EXPECT_OK(b.Reserve(3 * kKvPageTokens));
}

TEST(KvPool, MovedSequencesKeepTheirPages) {
  KvPool pool(TinyConfig(), 4 * kPageBytes);
  KvSequence a = pool.NewSequence();
  ASSERT_OK(a.Reserve(20));
  a.Advance(20);
  float* const row = a.KeyRow(1, 17);
  KvSequence b = std::move(a);
  EXPECT_EQ(b.KeyRow(1, 17), row);
  EXPECT_EQ(b.length(), 20);
  b = pool.NewSequence();  // the old pages go back
  EXPECT_EQ(pool.free_pages(), 4);
}

// Random sequences grow, shrink to nothing and write their own values; nobody sees another's.
TEST(KvPool, PagesBelongToOneSequence) {
  std::mt19937_64 random(TestSeed());
  const ModelConfig config = TinyConfig();
  KvPool pool(config, 20 * kPageBytes);
  std::map<int, KvSequence> live;
  const auto expected = [](int id, int64_t layer, int64_t position, bool value) {
    return static_cast<float>(id * 10000 + layer * 1000 + position * 2 + (value ? 1 : 0));
  };
  for (int id = 0; id < 400; ++id) {
    if (!live.empty() && random() % 3 == 0) live.erase(live.begin());
    if (live.empty() || random() % 2 == 0) live.emplace(id, pool.NewSequence());
    auto it = std::next(live.begin(), static_cast<long>(random() % live.size()));
    KvSequence& sequence = it->second;
    const int64_t more = 1 + static_cast<int64_t>(random() % 40);
    if (!sequence.Reserve(more).ok()) continue;
    for (int64_t i = sequence.length(); i < sequence.length() + more; ++i) {
      for (int64_t layer = 0; layer < config.layers; ++layer) {
        std::fill_n(sequence.KeyRow(layer, i), 12, expected(it->first, layer, i, false));
        std::fill_n(sequence.ValueRow(layer, i), 12, expected(it->first, layer, i, true));
      }
    }
    sequence.Advance(more);
    int64_t held = 0;
    for (auto& [owner, one] : live) {
      held += one.capacity() / kKvPageTokens;
      for (int64_t layer = 0; layer < config.layers; ++layer) {
        const PagedKv pages = one.Layer(layer);
        for (int64_t i = 0; i < one.length(); ++i) {
          const size_t page = static_cast<size_t>(i / kKvPageTokens);
          const int64_t offset = i % kKvPageTokens * 12 + 11;
          ASSERT_EQ(pages.key_pages[page][offset], expected(owner, layer, i, false));
          ASSERT_EQ(pages.value_pages[page][offset], expected(owner, layer, i, true));
        }
      }
    }
    ASSERT_EQ(held + pool.free_pages(), pool.total_pages());
  }
}

}  // namespace
}  // namespace stockpot
