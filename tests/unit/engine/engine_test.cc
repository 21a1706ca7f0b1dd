// The engine over a tiny random Llama: the same request gives the same bits whatever else runs,
// whoever is cancelled or preempted; limits; ends; scores.
#include "serve/engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <deque>
#include <random>
#include <thread>

#include "tests/unit/engine/collector.h"
#include "tests/unit/engine/tiny_model.h"
#include "tests/unit/model/run_model.h"
#include "tests/unit/model/world.h"

namespace stockpot {
namespace {

using test::Collector;
using test::SameEvents;
using test::World;

// Loading and publishing once is enough for all tests.
class EngineTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const TestModel base = test::TinyChatModel(1);
    world_ = new World(base);
    variants_ = new std::vector<VariantLease>{nullptr};
    for (uint64_t seed : {2, 3}) {
      variants_->push_back(world_->Load(world_->Publish(test::TunedFrom(base, seed))));
    }
  }
  static void TearDownTestSuite() {
    delete variants_;
    delete world_;
  }

  static std::unique_ptr<Engine> MakeEngine(EngineLimits limits = {}, int threads = 1) {
    if (limits.kv_bytes == EngineLimits().kv_bytes) limits.kv_bytes = int64_t{16} << 20;
    return std::make_unique<Engine>(world_->base, limits, threads);
  }
  static int64_t PageBytes() {
    const ModelConfig& config = world_->base->config();
    return config.layers * 2 * config.kv_heads * config.head_dim * kKvPageTokens *
           static_cast<int64_t>(sizeof(float));
  }
  static std::vector<int32_t> Prompt(uint64_t seed, int64_t length) {
    std::mt19937_64 random(seed);
    std::vector<int32_t> prompt(static_cast<size_t>(length));
    for (int32_t& token : prompt) token = static_cast<int32_t>(3 + random() % 256);
    return prompt;
  }
  static EngineRequest Request(uint64_t seed, int64_t length = 20, int64_t max_tokens = 16,
                               size_t variant = 0) {
    EngineRequest request;
    request.variant = (*variants_)[variant];
    request.prompt = Prompt(seed, length);
    request.max_tokens = max_tokens;
    request.ignore_eos = true;
    request.sampling.temperature = seed % 2 ? 0.0f : 1.0f;
    request.sampling.seed = seed;
    return request;
  }
  static void Run(Engine& engine, EngineRequest request, Collector* collector) {
    ASSERT_OK(engine.Submit(std::move(request), collector->Callbacks()));
    collector->Wait();
  }

  static World* world_;
  static std::vector<VariantLease>* variants_;
};
World* EngineTest::world_ = nullptr;
std::vector<VariantLease>* EngineTest::variants_ = nullptr;

TEST_F(EngineTest, GreedyTokensAreThoseOfTheTransformerAlone) {
  auto engine = MakeEngine({.step_rows = 7});
  ThreadPool threads(1);
  Transformer transformer(world_->base, threads);
  KvPool pool(world_->base->config(), int64_t{16} << 20);
  for (size_t variant = 0; variant < variants_->size(); ++variant) {
    EngineRequest request = Request(1, 30, 40, variant);
    request.sampling.temperature = 0;
    const std::vector<int32_t> expected =
        test::Greedy(transformer, pool, (*variants_)[variant].get(), request.prompt, 64, 40);
    Collector collector;
    Run(*engine, std::move(request), &collector);
    EXPECT_EQ(collector.ids(), expected) << "variant " << variant;
    EXPECT_EQ(collector.reason, FinishReason::kLength);
    EXPECT_EQ(collector.done_calls, 1);
  }
}

TEST_F(EngineTest, ABatchChangesNothing) {
  std::mt19937_64 random(TestSeed());
  constexpr int kRequests = 40;
  std::vector<EngineRequest> requests;
  for (int i = 0; i < kRequests; ++i) {
    EngineRequest request = Request(random(), 1 + static_cast<int64_t>(random() % 150),
                                    1 + static_cast<int64_t>(random() % 30), random() % 3);
    request.prompt_logprobs = random() % 2;
    request.logprobs = static_cast<int32_t>(random() % 4) - 1;
    if (random() % 3 == 0) request.sampling.top_p = 0.9f;
    if (random() % 3 == 0) request.sampling.repetition_penalty = 1.3f;
    requests.push_back(std::move(request));
  }
  std::deque<Collector> alone(kRequests), mixed(kRequests);
  {
    auto engine = MakeEngine({.step_rows = 512}, 1);
    for (int i = 0; i < kRequests; ++i)
      Run(*engine, requests[static_cast<size_t>(i)], &alone[static_cast<size_t>(i)]);
  }
  auto engine =
      MakeEngine({.running_sequences = 16, .step_rows = 64, .decode_prefill_rows = 40}, 2);
  for (size_t i = 0; i < kRequests; ++i) {
    ASSERT_OK(engine->Submit(requests[i], mixed[i].Callbacks()));
  }
  for (size_t i = 0; i < kRequests; ++i) {
    mixed[i].Wait();
    EXPECT_TRUE(SameEvents(alone[i].tokens, mixed[i].tokens)) << "request " << i;
    EXPECT_TRUE(SameEvents(alone[i].prompt, mixed[i].prompt)) << "request " << i;
    EXPECT_EQ(mixed[i].prompt_calls, requests[i].prompt_logprobs ? 1 : 0);
    EXPECT_EQ(alone[i].reason, mixed[i].reason);
  }
}

// serving.md S15, and the others' outputs do not change.
TEST_F(EngineTest, SixtyFourStreamsWithCancels) {
  std::mt19937_64 random(TestSeed());
  constexpr size_t kStreams = 64;
  auto engine = MakeEngine({.running_sequences = 64, .step_rows = 128}, 2);
  std::deque<Collector> expected(kStreams), streams(kStreams);
  for (size_t i = 0; i < kStreams; ++i) Run(*engine, Request(i, 60, 40, i % 3), &expected[i]);
  std::vector<uint64_t> ids;
  for (size_t i = 0; i < kStreams; ++i) {
    const auto id = engine->Submit(Request(i, 60, 40, i % 3), streams[i].Callbacks());
    ASSERT_OK(id);
    ids.push_back(*id);
  }
  // A third is cancelled: some at once (in the queue or in prefill), some after a few tokens.
  for (size_t i = 0; i < kStreams; i += 3) {
    streams[i].WaitForTokens(random() % 8);
    engine->Cancel(ids[i]);
    engine->Cancel(ids[i]);  // twice is once
  }
  for (size_t i = 0; i < kStreams; ++i) {
    streams[i].Wait();
    EXPECT_FALSE(streams[i].token_after_done);
    if (streams[i].reason == FinishReason::kCancelled) {
      EXPECT_EQ(i % 3, 0u);
      const std::vector<int32_t> got = streams[i].ids(), whole = expected[i].ids();
      EXPECT_LE(got.size(), whole.size());
      EXPECT_TRUE(std::equal(got.begin(), got.end(), whole.begin())) << "stream " << i;
    } else {
      EXPECT_TRUE(SameEvents(expected[i].tokens, streams[i].tokens)) << "stream " << i;
    }
  }
  ASSERT_TRUE(engine->Drain(60'000));
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.kv_pages_used, 0);
  for (const Collector& stream : streams) EXPECT_EQ(stream.done_calls, 1);
}

TEST_F(EngineTest, CancelInPrefillFreesTheSlotBeforeTheNextStep) {
  auto engine = MakeEngine({.running_sequences = 1, .step_rows = 1});
  Collector slow, next;
  const auto id = engine->Submit(Request(1, 400, 1), slow.Callbacks());
  ASSERT_OK(id);
  ASSERT_OK(engine->Submit(Request(2, 3, 1), next.Callbacks()));
  engine->Cancel(*id);
  slow.Wait();
  next.Wait();
  EXPECT_EQ(slow.reason, FinishReason::kCancelled);
  EXPECT_TRUE(slow.tokens.empty());
  EXPECT_EQ(next.reason, FinishReason::kLength);
  EXPECT_LT(engine->stats().steps_total, 350);
}

// More sequences than the KV pool can hold to their end: some are put back and computed again.
TEST_F(EngineTest, PreemptionChangesNothing) {
  constexpr size_t kStreams = 12;
  std::deque<Collector> expected(kStreams), streams(kStreams);
  const auto request = [](size_t i) {
    EngineRequest r = Request(i, 10 + static_cast<int64_t>(i) * 7, 120, i % 3);
    r.logprobs = 2;
    r.prompt_logprobs = i % 2;
    return r;
  };
  {
    auto engine = MakeEngine();
    for (size_t i = 0; i < kStreams; ++i) Run(*engine, request(i), &expected[i]);
    EXPECT_EQ(engine->stats().preemptions_total, 0);
  }
  auto engine =
      MakeEngine({.running_sequences = 12, .step_rows = 64, .kv_bytes = 40 * PageBytes()}, 2);
  ASSERT_EQ(engine->stats().kv_pages_total, 40);
  for (size_t i = 0; i < kStreams; ++i)
    ASSERT_OK(engine->Submit(request(i), streams[i].Callbacks()));
  for (size_t i = 0; i < kStreams; ++i) {
    streams[i].Wait();
    EXPECT_TRUE(SameEvents(expected[i].tokens, streams[i].tokens)) << "stream " << i;
    EXPECT_TRUE(SameEvents(expected[i].prompt, streams[i].prompt)) << "stream " << i;
  }
  EXPECT_GT(engine->stats().preemptions_total, 0);
  ASSERT_TRUE(engine->Drain(60'000));
  EXPECT_EQ(engine->stats().kv_pages_used, 0);
  int64_t prompt_tokens = 0;
  for (size_t i = 0; i < kStreams; ++i)
    prompt_tokens += static_cast<int64_t>(request(i).prompt.size());
  EXPECT_EQ(engine->stats().prompt_tokens_total, prompt_tokens);  // each counted once
  EXPECT_EQ(engine->stats().generation_tokens_total, static_cast<int64_t>(kStreams) * 120);
}

TEST_F(EngineTest, ARequestThatFillsTheWholePoolRuns) {
  auto engine = MakeEngine({.step_rows = 64, .kv_bytes = 4 * PageBytes()});
  EXPECT_EQ(engine->max_context(), 4 * kKvPageTokens);
  Collector whole, scored;
  Run(*engine, Request(1, 60, 4), &whole);
  EXPECT_EQ(whole.reason, FinishReason::kLength);
  EngineRequest score = Request(2, 64, 0);
  score.prompt_logprobs = true;
  Run(*engine, std::move(score), &scored);
  EXPECT_EQ(scored.prompt.size(), 64u);
}

TEST_F(EngineTest, ScoresAreTheModelsOwn) {
  auto engine = MakeEngine({.step_rows = 16});
  EngineRequest request = Request(5, 70, 1, 1);
  request.prompt_logprobs = true;
  request.logprobs = 3;
  request.sampling = {.temperature = 0.5f, .top_k = 2, .logit_bias = {{7, 50.0f}}};
  const std::vector<int32_t> prompt = request.prompt;
  Collector collector;
  Run(*engine, std::move(request), &collector);

  ThreadPool threads(1);
  Transformer transformer(world_->base, threads);
  KvPool pool(world_->base->config(), int64_t{16} << 20);
  const std::vector<float> logits =
      test::PromptLogits(transformer, pool, (*variants_)[1].get(), prompt);
  const size_t vocab = static_cast<size_t>(world_->base->config().vocab_size);
  ASSERT_EQ(collector.prompt.size(), prompt.size());
  EXPECT_EQ(collector.prompt[0].token, prompt[0]);
  EXPECT_EQ(collector.tokens.at(0).token, 7);  // the bias decides
  for (size_t i = 1; i <= prompt.size(); ++i) {
    const TokenEvent& event = i < prompt.size() ? collector.prompt[i] : collector.tokens[0];
    const std::span<const float> row(logits.data() + (i - 1) * vocab, vocab);
    double sum = 0;
    const float highest = *std::max_element(row.begin(), row.end());
    for (const float logit : row) sum += std::exp(static_cast<double>(logit) - highest);
    const auto logprob = [&](int32_t token) {
      return static_cast<double>(row[static_cast<size_t>(token)]) - highest - std::log(sum);
    };
    EXPECT_NEAR(event.logprob, logprob(event.token), 1e-5);
    ASSERT_EQ(event.top.size(), 3u);
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_NEAR(event.top[k].logprob, logprob(event.top[k].token), 1e-5);
      if (event.top[k].token == event.token) {
        EXPECT_EQ(event.top[k].logprob, event.logprob);
      }
    }
    EXPECT_EQ(row[static_cast<size_t>(event.top[0].token)], highest);
  }
}

TEST_F(EngineTest, ScoringOnlyGeneratesNothing) {
  auto engine = MakeEngine({.step_rows = 16});
  for (const int64_t length : {1, 2, 16, 17, 100}) {
    EngineRequest request = Request(9, length, 0);
    request.prompt_logprobs = true;
    request.logprobs = 1;
    Collector scored;
    Run(*engine, request, &scored);
    EXPECT_EQ(scored.prompt.size(), static_cast<size_t>(length));
    EXPECT_EQ(scored.prompt_calls, 1);
    EXPECT_TRUE(scored.tokens.empty());
    EXPECT_EQ(scored.reason, FinishReason::kLength);
    request.max_tokens = 1;
    Collector generated;
    Run(*engine, request, &generated);
    EXPECT_TRUE(SameEvents(scored.prompt, generated.prompt));
    EXPECT_EQ(generated.tokens.size(), 1u);
  }
  // Neither scores nor tokens were asked for: nothing to compute.
  auto fresh = MakeEngine();
  Collector nothing;
  Run(*fresh, Request(9, 100, 0), &nothing);
  EXPECT_EQ(nothing.reason, FinishReason::kLength);
  ASSERT_TRUE(fresh->Drain(60'000));
  EXPECT_EQ(fresh->stats().steps_total, 0);
}

TEST_F(EngineTest, EndsAsAsked) {
  auto engine = MakeEngine();
  EngineRequest request = Request(1, 20, 30);
  Collector free_run;
  Run(*engine, request, &free_run);
  const std::vector<int32_t> ids = free_run.ids();
  const int32_t fifth = ids[4];
  const auto first = std::find(ids.begin(), ids.end(), fifth) - ids.begin() + 1;

  EngineRequest with_eos = request;
  with_eos.ignore_eos = false;
  with_eos.eos_tokens = std::vector<int32_t>{fifth};
  Collector at_eos;
  Run(*engine, with_eos, &at_eos);
  EXPECT_EQ(at_eos.reason, FinishReason::kStop);
  ASSERT_EQ(at_eos.tokens.size(), static_cast<size_t>(first));  // EOS is reported
  EXPECT_TRUE(at_eos.tokens.back().ends);
  for (size_t i = 0; i + 1 < at_eos.tokens.size(); ++i) EXPECT_FALSE(at_eos.tokens[i].ends);

  with_eos.ignore_eos = true;
  Collector ignored;
  Run(*engine, with_eos, &ignored);
  EXPECT_EQ(ignored.ids(), ids);

  EngineRequest with_stop = request;
  with_stop.stop_tokens = {fifth};  // holds with ignore_eos too
  Collector at_stop;
  Run(*engine, with_stop, &at_stop);
  EXPECT_EQ(at_stop.reason, FinishReason::kStop);
  EXPECT_EQ(at_stop.tokens.size(), static_cast<size_t>(first));

  with_stop.min_tokens = 10;
  Collector later;
  Run(*engine, with_stop, &later);
  for (size_t i = 0; i < std::min<size_t>(10, later.tokens.size()); ++i) {
    EXPECT_NE(later.tokens[i].token, fifth);
  }
  EXPECT_GE(later.tokens.size(), 10u);

  Collector by_callback;
  ASSERT_OK(engine->Submit(request, by_callback.Callbacks([&](const TokenEvent& event) {
    return event.token != fifth;
  })));
  by_callback.Wait();
  EXPECT_EQ(by_callback.reason, FinishReason::kStop);
  EXPECT_EQ(by_callback.tokens.size(), static_cast<size_t>(first));
}

TEST_F(EngineTest, EverythingMaskedIsAnErrorNotAToken) {
  auto engine = MakeEngine();
  EngineRequest request = Request(1, 5, 3);
  request.min_tokens = 3;
  for (int32_t id = 0; id < test::kTinyVocab; ++id) request.stop_tokens.push_back(id);
  Collector collector;
  Run(*engine, std::move(request), &collector);
  EXPECT_EQ(collector.reason, FinishReason::kError);
  EXPECT_EQ(collector.status.code(), StatusCode::kInternal);
}

TEST_F(EngineTest, RefusesWhatCanNotRun) {
  auto engine = MakeEngine();
  const auto refused = [&](auto change) {
    EngineRequest request = Request(1);
    change(request);
    Collector collector;
    const auto id = engine->Submit(std::move(request), collector.Callbacks());
    EXPECT_EQ(collector.done_calls, 0);
    return id.ok() ? StatusCode::kOk : id.status().code();
  };
  const auto kInvalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(refused([](EngineRequest& r) { r.prompt.clear(); }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.prompt = {-1}; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.prompt = {test::kTinyVocab}; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.max_tokens = -1; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.max_tokens = INT64_MAX; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.max_tokens = test::kTinyContext - 19; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.prompt.resize(test::kTinyContext + 1, 5); }),
            kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.min_tokens = 17; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.logprobs = 10'000; }), kInvalid);
  const float nan = std::nanf("");
  EXPECT_EQ(refused([&](EngineRequest& r) { r.sampling.temperature = nan; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.sampling.temperature = -1; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.sampling.top_p = 0; }), kInvalid);
  EXPECT_EQ(refused([&](EngineRequest& r) { r.sampling.top_p = nan; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.sampling.top_k = -1; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.sampling.min_p = 2; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.sampling.repetition_penalty = 0; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.sampling.logit_bias = {{-1, 1.0f}}; }), kInvalid);
  EXPECT_EQ(refused([](EngineRequest& r) { r.sampling.logit_bias = {{9999, 1.0f}}; }), kInvalid);
}

TEST_F(EngineTest, AFullQueueTakesAllOrNothing) {
  auto engine = MakeEngine({.running_sequences = 1, .waiting_requests = 4, .step_rows = 1});
  Collector running;
  const auto id = engine->Submit(Request(1, 20, 400), running.Callbacks());
  ASSERT_OK(id);
  running.WaitForTokens(1);
  std::deque<Collector> collectors(8);
  const auto submissions = [&](size_t from, size_t count) {
    std::vector<Engine::Submission> all(count);
    for (size_t i = 0; i < count; ++i) all[i] = {Request(i), collectors[from + i].Callbacks()};
    return all;
  };
  ASSERT_OK(engine->SubmitAll(submissions(0, 3)));
  EXPECT_EQ(engine->SubmitAll(submissions(3, 2)).status().code(), StatusCode::kResourceExhausted);
  ASSERT_OK(engine->SubmitAll(submissions(5, 1)));
  EXPECT_EQ(engine->SubmitAll(submissions(6, 1)).status().code(), StatusCode::kResourceExhausted);
  engine->Cancel(*id);
  for (size_t i : {0, 1, 2, 5}) collectors[i].Wait();
  for (size_t i : {3, 4, 6, 7}) EXPECT_FALSE(collectors[i].done());
  ASSERT_TRUE(engine->Drain(60'000));
  EXPECT_EQ(engine->SubmitAll(submissions(7, 1)).status().code(), StatusCode::kUnavailable);
}

TEST_F(EngineTest, DrainTellsTheTruth) {
  auto engine = MakeEngine({.step_rows = 1});
  Collector slow;
  const auto id = engine->Submit(Request(1, 20, 450), slow.Callbacks());
  ASSERT_OK(id);
  slow.WaitForTokens(1);
  EXPECT_FALSE(engine->Drain(1));
  engine->Cancel(*id);
  EXPECT_TRUE(engine->Drain(60'000));
  EXPECT_TRUE(slow.done());
}

TEST_F(EngineTest, TheEndOfTheEngineEndsEverything) {
  std::deque<Collector> collectors(20);
  {
    auto engine = MakeEngine({.running_sequences = 4, .step_rows = 4});
    for (size_t i = 0; i < collectors.size(); ++i) {
      ASSERT_OK(engine->Submit(Request(i, 20, 450, i % 3), collectors[i].Callbacks()));
    }
  }
  for (Collector& collector : collectors) {
    EXPECT_EQ(collector.done_calls, 1);
    EXPECT_EQ(collector.reason, FinishReason::kCancelled);
  }
}

// serving.md S13: the last lease goes with the sequence.
TEST_F(EngineTest, LeasesEndWithTheirSequences) {
  const TestModel base = test::TinyChatModel(1);
  VariantLease lease = world_->Load(world_->Publish(test::TunedFrom(base, 9)));
  const std::weak_ptr<const VariantModel> weak = lease;
  auto engine = MakeEngine();
  EngineRequest request = Request(3);
  request.variant = std::move(lease);
  Collector collector;
  Run(*engine, std::move(request), &collector);
  ASSERT_TRUE(engine->Drain(60'000));
  EXPECT_TRUE(weak.expired());
}

TEST_F(EngineTest, AnIdleEngineDoesNotSpin) {
  auto engine = MakeEngine();
  Collector collector;
  Run(*engine, Request(1), &collector);
  ASSERT_TRUE(engine->Drain(60'000));
  timespec before, after;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // what is measured: idle time
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  const double busy = static_cast<double>(after.tv_sec - before.tv_sec) +
                      1e-9 * static_cast<double>(after.tv_nsec - before.tv_nsec);
  EXPECT_LT(busy, 0.1);
}

}  // namespace
}  // namespace stockpot
