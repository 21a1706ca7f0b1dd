// The logits of a token depend on its sequence, its variant and the SIMD target alone
// (transformer.h), bit for bit: prompts in one chunk, in random chunks, token by token, alone or
// among sequences on other variants, in any order, on 1 to 3 threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <numeric>
#include <random>

#include "serve/model/transformer.h"
#include "tests/unit/model/run_model.h"
#include "tests/unit/model/world.h"

namespace {

// Allocations of all threads while counting is on.
std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};

void* CountedAllocation(std::size_t size, std::size_t alignment) {
  if (counting) ++allocations;
  void* memory = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t size) {
  return CountedAllocation(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return CountedAllocation(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace stockpot {
namespace {

using test::World;

constexpr int64_t kKvBytes = int64_t{16} << 20;
constexpr int kSequences = 7;
constexpr int64_t kLongestPrompt = 70;  // several pages, several blocks of attention

// A sequence and the logits that a run of it alone, in one chunk, gives.
struct Sequence {
  const VariantModel* variant = nullptr;
  std::vector<int32_t> tokens;
  int64_t prompt_tokens = 0;  // of them; the rest as if they had been generated
  std::vector<float> logits;  // [tokens, vocab]
};

class BatchInvariance : public ::testing::Test {
 protected:
  BatchInvariance()
      : base_model_(test::RandomBase(
            1, {.vocab = 67, .hidden = 40, .kv = 8, .intermediate = 52, .layers = 3})),
        world_(base_model_) {
    variants_ = {
        nullptr, world_.Load(world_.Publish(test::TunedFrom(base_model_, 2))),
        world_.Load(world_.Publish(test::TunedFrom(base_model_, 3))),
        world_.Load(world_.Publish(test::TunedFrom(base_model_, 4), PublishCodec::kDense)),
        world_.Load(world_.Publish(test::TunedFrom(base_model_, 5), PublishCodec::kBitDelta,
                                   {.planes = 2, .residual_rank = 3})),
        world_.Load(world_.Publish(test::TunedFrom(base_model_, 6), PublishCodec::kAuto,
                                   {.max_error = 0.1}))};
    std::mt19937_64 random(TestSeed());
    ThreadPool threads(1);
    Transformer transformer(world_.base, threads);
    KvPool pool(world_.base->config(), kKvBytes);
    for (int i = 0; i < kSequences; ++i) {
      Sequence sequence{.variant = variants_[static_cast<size_t>(i) % variants_.size()].get()};
      sequence.tokens.resize(1 + random() % kLongestPrompt);
      for (int32_t& token : sequence.tokens) token = static_cast<int32_t>(random() % 67);
      sequence.prompt_tokens = static_cast<int64_t>(random() % (sequence.tokens.size() + 1));
      sequence.logits = test::PromptLogits(transformer, pool, sequence.variant, sequence.tokens,
                                           sequence.prompt_tokens);
      sequences_.push_back(std::move(sequence));
    }
  }

  // Feeds all sequences in batches that `random` cuts and orders; at most `longest` tokens a chunk.
  void RunMixed(std::mt19937_64& random, int thread_count, int64_t longest, double share) {
    ThreadPool threads(thread_count);
    Transformer transformer(world_.base, threads);
    KvPool pool(world_.base->config(), kKvBytes);
    std::vector<KvSequence> caches;
    for (size_t i = 0; i < sequences_.size(); ++i) caches.push_back(pool.NewSequence());
    std::vector<std::vector<float>> logits(sequences_.size());
    std::bernoulli_distribution takes_part(share);
    for (;;) {
      std::vector<size_t> order;
      bool left = false;
      for (size_t i = 0; i < sequences_.size(); ++i) {
        if (caches[i].length() == static_cast<int64_t>(sequences_[i].tokens.size())) continue;
        left = true;
        if (takes_part(random)) order.push_back(i);
      }
      if (!left) break;
      std::shuffle(order.begin(), order.end(), random);
      std::vector<BatchSegment> batch;
      for (const size_t i : order) {
        const auto rest =
            std::span(sequences_[i].tokens).subspan(static_cast<size_t>(caches[i].length()));
        const int64_t chunk = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(longest));
        const auto tokens = rest.first(std::min(rest.size(), static_cast<size_t>(chunk)));
        ASSERT_OK(caches[i].Reserve(static_cast<int64_t>(tokens.size())));
        const int64_t prompt_left = sequences_[i].prompt_tokens - caches[i].length();
        batch.push_back({.kv = &caches[i],
                         .tokens = tokens,
                         .variant = sequences_[i].variant,
                         .prompt_rows = std::max<int64_t>(0, prompt_left)});
      }
      ASSERT_OK(transformer.Forward(batch, [&](int64_t segment, int64_t, auto row) {
        std::vector<float>& all = logits[order[static_cast<size_t>(segment)]];
        all.insert(all.end(), row.begin(), row.end());
      }));
    }
    for (size_t i = 0; i < sequences_.size(); ++i) {
      EXPECT_EQ(logits[i], sequences_[i].logits) << "sequence " << i;
    }
  }

  TestModel base_model_;
  World world_;
  std::vector<std::shared_ptr<const VariantModel>> variants_;
  std::vector<Sequence> sequences_;
};

TEST_F(BatchInvariance, TokenByToken) {
  std::mt19937_64 random(TestSeed());
  RunMixed(random, 1, /*longest=*/1, /*share=*/1.0);
}

TEST_F(BatchInvariance, RandomChunksAndCompany) {
  std::mt19937_64 random(TestSeed());
  for (int thread_count = 1; thread_count <= 3; ++thread_count) {
    for (const int64_t longest : {2, 9, 33, 100}) {
      SCOPED_TRACE(::testing::Message() << thread_count << " threads, chunks to " << longest);
      RunMixed(random, thread_count, longest, /*share=*/0.6);
    }
  }
}

TEST_F(BatchInvariance, SinkIsCalledInOrderForTheWantedRows) {
  ThreadPool threads(2);
  Transformer transformer(world_.base, threads);
  KvPool pool(world_.base->config(), kKvBytes);
  const std::vector<int32_t> tokens(5, 3);
  std::vector<KvSequence> caches;
  for (int i = 0; i < 4; ++i) caches.push_back(pool.NewSequence());
  std::vector<BatchSegment> batch;
  for (size_t i = 0; i < caches.size(); ++i) {
    ASSERT_OK(caches[i].Reserve(5));
    batch.push_back({.kv = &caches[i],
                     .tokens = tokens,
                     .variant = variants_[3 - i].get(),
                     .logits_from = static_cast<int64_t>(2 + i)});
  }
  std::vector<std::pair<int64_t, int64_t>> calls;
  ASSERT_OK(transformer.Forward(batch, [&](int64_t segment, int64_t row, auto logits) {
    EXPECT_EQ(logits.size(), 67u);
    calls.emplace_back(segment, row);
  }));
  const std::vector<std::pair<int64_t, int64_t>> wanted = {{0, 2}, {0, 3}, {0, 4},
                                                           {1, 3}, {1, 4}, {2, 4}};
  EXPECT_EQ(calls, wanted);  // segment 3 asked from row 5 on: nothing
}

TEST_F(BatchInvariance, SteadyStateAllocatesNothing) {
  ThreadPool threads(2);
  Transformer transformer(world_.base, threads);
  KvPool pool(world_.base->config(), kKvBytes);
  std::vector<KvSequence> caches;
  std::vector<BatchSegment> batch;
  const std::vector<int32_t> tokens(3, 1);
  for (size_t i = 0; i < variants_.size(); ++i) caches.push_back(pool.NewSequence());
  for (size_t i = 0; i < variants_.size(); ++i) {
    ASSERT_OK(caches[i].Reserve(30));
    batch.push_back({.kv = &caches[i], .tokens = tokens, .variant = variants_[i].get()});
  }
  const LogitsSink sink = [](int64_t, int64_t, std::span<const float>) {};
  ASSERT_OK(transformer.Forward(batch, sink));  // the first of its size
  counting = true;
  const Status status = transformer.Forward(batch, sink);
  counting = false;
  ASSERT_OK(status);
  EXPECT_EQ(allocations.load(), 0);
}

TEST_F(BatchInvariance, WrongInputChangesNothing) {
  ThreadPool threads(1);
  Transformer transformer(world_.base, threads);
  KvPool pool(world_.base->config(), kKvBytes);
  KvSequence good = pool.NewSequence();
  KvSequence bad = pool.NewSequence();
  ASSERT_OK(good.Reserve(2500));
  ASSERT_OK(bad.Reserve(2500));
  const std::vector<int32_t> fine = {1, 2};
  const auto forward = [&](std::span<const int32_t> tokens, const VariantModel* variant) {
    const std::vector<BatchSegment> batch = {{.kv = &good, .tokens = fine},
                                             {.kv = &bad, .tokens = tokens, .variant = variant}};
    return transformer.Forward(batch, [](int64_t, int64_t, std::span<const float>) {
      ADD_FAILURE() << "logits of a batch that was refused";
    });
  };
  for (const int32_t token : {-1, 67, INT32_MAX, INT32_MIN}) {
    const std::vector<int32_t> tokens = {0, token};
    const Status status = forward(tokens, variants_[1].get());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("token id " + std::to_string(token)), std::string::npos);
  }
  const std::vector<int32_t> too_many(2049, 1);  // the config says nothing: 2048 positions
  EXPECT_EQ(forward(too_many, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(good.length(), 0);
  EXPECT_EQ(bad.length(), 0);
  EXPECT_OK(transformer.Forward({}, [](int64_t, int64_t, std::span<const float>) {}));
}

}  // namespace
}  // namespace stockpot
