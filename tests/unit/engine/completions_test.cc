// What completions and chat answer: echo and log-probabilities as lm-evaluation-harness reads them,
// streams that join to the whole text, stop strings, seeds, variants and their own files.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <random>
#include <set>
#include <thread>

#include "serve/http/logprobs.h"
#include "serve/text/utf8.h"
#include "tests/unit/engine/endpoint.h"

namespace stockpot::test {
namespace {

class CompletionsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { endpoint_ = new Endpoint; }
  static void TearDownTestSuite() { delete endpoint_; }

  static Json Good(const Json& request) {
    const HttpReply reply = endpoint_->Complete(request);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply.json();
  }
  static std::vector<int32_t> RandomIds(std::mt19937_64& random, size_t count) {
    std::vector<int32_t> ids(count);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % kTinyVocab);
    return ids;
  }
  static Endpoint* endpoint_;
};
Endpoint* CompletionsTest::endpoint_ = nullptr;

// The request that lm-evaluation-harness sends, and what it asserts of the answer.
TEST_F(CompletionsTest, LogLikelihoodsForLmEvaluationHarness) {
  std::mt19937_64 random(TestSeed());
  std::vector<std::vector<int32_t>> prompts;
  for (const size_t length : {1, 2, 17, 200, 511}) prompts.push_back(RandomIds(random, length));
  prompts.push_back({ByteToken('a'), kMergedSpaceT, kAddedSpaceT, kUnknownToken, kImEnd});
  const Json answer = Good({{"model", kBaseName},
                            {"prompt", prompts},
                            {"temperature", 0},
                            {"max_tokens", 1},
                            {"logprobs", 1},
                            {"seed", 1234},
                            {"echo", true}});
  ASSERT_EQ(answer["choices"].size(), prompts.size());
  int64_t total = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Json& choice = answer["choices"][i];
    EXPECT_EQ(choice["index"], i);
    const Json& logprobs = choice["logprobs"];
    const size_t entries = prompts[i].size() + 1;
    total += static_cast<int64_t>(prompts[i].size());
    for (const char* field : {"tokens", "token_logprobs", "top_logprobs", "text_offset"}) {
      ASSERT_EQ(logprobs[field].size(), entries) << field;
    }
    EXPECT_TRUE(logprobs["token_logprobs"][0].is_null());
    EXPECT_TRUE(logprobs["top_logprobs"][0].is_null());
    for (size_t k = 1; k < entries; ++k) {
      const Json& value = logprobs["token_logprobs"][k];
      ASSERT_TRUE(value.is_number());
      EXPECT_LE(value.get<double>(), 0);
      const Json& top = logprobs["top_logprobs"][k];
      double highest = -std::numeric_limits<double>::infinity();
      bool has_own = false;
      for (const auto& [key, alternative] : top.items()) {
        highest = std::max(highest, alternative.get<double>());
        has_own |= alternative == value;  // the same bits
      }
      EXPECT_TRUE(has_own);
      EXPECT_LE(value.get<double>(), highest);
      EXPECT_LE(top.size(), 2u);
      // The last one is generated greedily: it is the best.
      if (k + 1 == entries) {
        EXPECT_EQ(value.get<double>(), highest);
      }
    }
  }
  EXPECT_EQ(answer["usage"]["prompt_tokens"], total);
  EXPECT_EQ(answer["usage"]["completion_tokens"], prompts.size());

  // One prompt alone, as a batch of one, gives the same numbers to the last bit.
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Json alone = Good({{"model", kBaseName},
                             {"prompt", {prompts[i]}},
                             {"temperature", 0},
                             {"max_tokens", 1},
                             {"logprobs", 1},
                             {"echo", true}});
    EXPECT_EQ(alone["choices"][0]["logprobs"].dump(), answer["choices"][i]["logprobs"].dump());
  }
  // Older tools score without generating.
  const Json scored = Good({{"model", kBaseName},
                            {"prompt", prompts[2]},
                            {"max_tokens", 0},
                            {"logprobs", 10},
                            {"echo", true}});
  const Json& values = scored["choices"][0]["logprobs"]["token_logprobs"];
  ASSERT_EQ(values.size(), prompts[2].size());
  for (size_t k = 1; k < values.size(); ++k) {
    EXPECT_EQ(values[k], answer["choices"][2]["logprobs"]["token_logprobs"][k]);
  }
}

// Ids that read the same, half characters and ids without a token do not hide the maximum.
TEST_F(CompletionsTest, AlternativesThatReadTheSame) {
  const auto tokenizer = Tokenizer::FromJson(TinyTokenizerJson());
  ASSERT_OK(tokenizer);
  const auto top_of = [&](int32_t token, float logprob, std::vector<TokenLogprob> top) {
    const ReportedToken reported{
        .event = {.token = token, .logprob = logprob, .top = std::move(top)}};
    return CompletionLogprobs(**tokenizer, std::span(&reported, 1))["top_logprobs"][0];
  };
  EXPECT_EQ(top_of(kAddedSpaceT, -3, {{kMergedSpaceT, -1}}).dump(),
            R"({" t":-1.0,"token_id:263":-3.0})");
  EXPECT_EQ(top_of(kMergedSpaceT, -1, {{kMergedSpaceT, -1}, {kAddedSpaceT, -2}}).dump(),
            R"({" t":-1.0,"token_id:263":-2.0})");
  EXPECT_EQ(top_of(ByteToken(0xe2), -1, {{kUnknownToken, -0.5f}}).dump(),
            R"({"token_id:270":-0.5,"bytes:\\xe2":-1.0})");
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(top_of(ByteToken('a'), minus_infinity, {}).dump(), R"({"a":-9999.0})");
}

TEST_F(CompletionsTest, EchoAndOffsets) {
  // The prompt's text comes back as it was sent; offsets count code points.
  const std::string text = "h\xc3\xa9 the t";
  const Json echoed = Good(
      {{"model", kBaseName}, {"prompt", text}, {"max_tokens", 0}, {"echo", true}, {"logprobs", 0}});
  const Json& choice = echoed["choices"][0];
  EXPECT_EQ(choice["text"], text);
  EXPECT_EQ(choice["finish_reason"], "length");
  // "h", the two bytes of the accent, " the", " t" (the added token, which the tokenizer prefers)
  const Json& tokens = choice["logprobs"]["tokens"];
  const Json& offsets = choice["logprobs"]["text_offset"];
  ASSERT_EQ(tokens.size(), offsets.size());
  EXPECT_EQ(tokens[0], "h");
  EXPECT_EQ(tokens[1], "bytes:\\xc3");
  EXPECT_EQ(offsets[0], 0);
  EXPECT_EQ(offsets[1], 1);
  EXPECT_EQ(offsets[2], 1);
  EXPECT_EQ(offsets[3], 2);
  // Special tokens in ids are shown.
  EXPECT_EQ(Good({{"model", kBaseName},
                  {"prompt", {kImStart, ByteToken('x')}},
                  {"max_tokens", 0},
                  {"echo", true}})["choices"][0]["text"],
            "<|im_start|>x");
}

TEST_F(CompletionsTest, ShapeOfAnAnswer) {
  const Json answer =
      Good({{"model", kBaseName}, {"prompt", "abc"}, {"max_tokens", 3}, {"ignore_eos", true}});
  EXPECT_EQ(answer["object"], "text_completion");
  EXPECT_TRUE(answer["id"].get<std::string>().starts_with("cmpl-"));
  EXPECT_EQ(answer["model"], kBaseName);
  EXPECT_EQ(answer["system_fingerprint"], endpoint_->world().base_digest.Hex());
  EXPECT_TRUE(answer["choices"][0]["logprobs"].is_null());
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(answer["usage"],
            Json({{"prompt_tokens", 2}, {"completion_tokens", 3}, {"total_tokens", 5}}));
}

// serving.md S17: pieces of a stream are whole characters and join to the text of the same request
// without a stream, also with stop strings across tokens.
TEST_F(CompletionsTest, AStreamJoinsToTheWholeText) {
  std::mt19937_64 random(TestSeed());
  HttpClient client(endpoint_->port());
  int stopped = 0;
  for (int round = 0; round < 60; ++round) {
    Json request = {{"model", kBaseName},
                    {"prompt", RandomIds(random, 1 + random() % 30)},
                    {"max_tokens", 1 + random() % 60},
                    {"temperature", round % 2 ? 0.0 : 1.5},
                    {"seed", random() % 1000},
                    {"echo", round % 5 == 0},
                    {"n", 1 + random() % 2}};
    if (round % 4 == 0) request["logprobs"] = 2;
    if (round % 3 == 0) {
      // Stop at something that will come: a piece of the unstopped text.
      const Json whole = client.Post("/v1/completions", request).json();
      const std::string text = whole["choices"][0]["text"];
      std::vector<size_t> starts;
      for (size_t i = 0; i < text.size(); ++i) {
        if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) starts.push_back(i);
      }
      if (starts.size() > 6) {
        const size_t middle = starts.size() / 2;
        request["stop"] = {text.substr(starts[middle], starts[middle + 3] - starts[middle]),
                           "zzzzzz"};
      }
    }
    const Json whole = client.Post("/v1/completions", request).json();
    ASSERT_TRUE(whole.contains("choices")) << whole.dump();
    request["stream"] = true;
    request["stream_options"] = {{"include_usage", true}};
    const HttpReply reply = client.Post("/v1/completions", request);
    ASSERT_EQ(reply.status, 200);
    EXPECT_EQ(reply.headers.at("content-type"), "text/event-stream");
    const std::vector<std::string> data = SseData(reply.body);
    ASSERT_GE(data.size(), 3u);
    EXPECT_EQ(data.back(), "[DONE]");
    const Json usage = Json::parse(data[data.size() - 2]);
    EXPECT_EQ(usage["choices"], Json::array());
    EXPECT_EQ(usage["usage"], whole["usage"]);
    std::map<int64_t, std::string> text;
    std::map<int64_t, std::string> finish;
    std::map<int64_t, Json> values;
    for (size_t i = 0; i + 2 < data.size(); ++i) {
      ASSERT_TRUE(IsValidUtf8(data[i]));
      const Json chunk = Json::parse(data[i]);
      EXPECT_TRUE(chunk.contains("usage") && chunk["usage"].is_null());
      ASSERT_EQ(chunk["choices"].size(), 1u);
      const Json& choice = chunk["choices"][0];
      const int64_t index = choice["index"];
      EXPECT_FALSE(finish.contains(index)) << "a chunk after the last one";
      text[index] += choice["text"].get<std::string>();
      if (!choice["finish_reason"].is_null()) finish[index] = choice["finish_reason"];
      if (choice["logprobs"].is_object()) {
        for (const Json& value : choice["logprobs"]["token_logprobs"])
          values[index].push_back(value);
      }
    }
    for (const Json& choice : whole["choices"]) {
      const int64_t index = choice["index"];
      EXPECT_EQ(text[index], choice["text"]) << request.dump();
      EXPECT_EQ(finish[index], choice["finish_reason"]);
      stopped += choice["finish_reason"] == "stop" && request.contains("stop");
      if (request.contains("logprobs")) {
        EXPECT_EQ(values[index], choice["logprobs"]["token_logprobs"]);
      }
      for (const std::string stop : request.value("stop", Json::array())) {
        if (!request["echo"]) {
          EXPECT_EQ(text[index].find(stop), std::string::npos);
        }
      }
    }
  }
  EXPECT_GT(stopped, 5);
}

TEST_F(CompletionsTest, SeedsDecide) {
  const auto text = [&](int seed) {
    return Good({{"model", kBaseName},
                 {"prompt", "ab"},
                 {"max_tokens", 30},
                 {"temperature", 1.5},
                 {"seed", seed},
                 {"ignore_eos", true}})["choices"][0]["text"]
        .get<std::string>();
  };
  EXPECT_EQ(text(1), text(1));
  EXPECT_NE(text(1), text(2));
  // n answers differ, the first is that of n = 1.
  const Json three = Good({{"model", kBaseName},
                           {"prompt", "ab"},
                           {"max_tokens", 30},
                           {"temperature", 1.5},
                           {"seed", 1},
                           {"ignore_eos", true},
                           {"n", 3}});
  std::set<std::string> texts;
  for (const Json& choice : three["choices"]) texts.insert(choice["text"].get<std::string>());
  EXPECT_EQ(texts.size(), 3u);
  EXPECT_EQ(three["choices"][0]["text"], text(1));
  EXPECT_EQ(three["usage"]["prompt_tokens"], 1);  // "ab" is one, counted once
  EXPECT_EQ(three["usage"]["completion_tokens"], 90);
  // Without a seed two answers differ.
  const Json request = {{"model", kBaseName},
                        {"prompt", "ab"},
                        {"max_tokens", 30},
                        {"temperature", 1.5},
                        {"ignore_eos", true}};
  EXPECT_NE(Good(request)["choices"][0]["text"], Good(request)["choices"][0]["text"]);
}

TEST_F(CompletionsTest, EosIsScoredButNotText) {
  Json request = {{"model", kBaseName}, {"prompt", "ab"},
                  {"max_tokens", 20},   {"temperature", 0},
                  {"logprobs", 1},      {"logit_bias", {{std::to_string(kImEnd), 100}}}};
  const Json answer = Good(request);
  EXPECT_EQ(answer["choices"][0]["text"], "");
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(answer["choices"][0]["logprobs"]["tokens"], Json({"<|im_end|>"}));
  EXPECT_EQ(answer["usage"]["completion_tokens"], 1);
  request["min_tokens"] = 4;
  EXPECT_EQ(Good(request)["usage"]["completion_tokens"], 5);
  request["ignore_eos"] = true;
  EXPECT_EQ(Good(request)["usage"]["completion_tokens"], 20);
}

TEST_F(CompletionsTest, Chat) {
  const Json messages = {{{"role", "user"}, {"content", "hi"}}};
  Json request = {{"model", kBaseName}, {"messages", messages}, {"max_tokens", 12},
                  {"temperature", 0},   {"logprobs", true},     {"top_logprobs", 2}};
  const HttpReply reply = endpoint_->Chat(request);
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json answer = reply.json();
  EXPECT_EQ(answer["object"], "chat.completion");
  EXPECT_TRUE(answer["id"].get<std::string>().starts_with("chatcmpl-"));
  const Json& choice = answer["choices"][0];
  EXPECT_EQ(choice["message"]["role"], "assistant");
  const Json& content = choice["logprobs"]["content"];
  EXPECT_EQ(content.size(), answer["usage"]["completion_tokens"].get<size_t>());
  for (const Json& token : content) {
    EXPECT_EQ(token["top_logprobs"].size(), 2u);
    EXPECT_EQ(token["top_logprobs"][0]["logprob"], token["logprob"]);  // greedy
    EXPECT_TRUE(token["bytes"].is_array());
  }
  // It is the completion of the rendered prompt.
  const Json same = Good({{"model", kBaseName},
                          {"prompt", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"},
                          {"add_special_tokens", false},
                          {"max_tokens", 12},
                          {"temperature", 0}});
  EXPECT_EQ(choice["message"]["content"], same["choices"][0]["text"]);
  EXPECT_EQ(answer["usage"], same["usage"]);

  request["stream"] = true;
  const std::vector<std::string> data =
      SseData(HttpClient(endpoint_->port()).Post("/v1/chat/completions", request).body);
  ASSERT_GE(data.size(), 3u);
  EXPECT_EQ(data.back(), "[DONE]");
  std::string text;
  for (size_t i = 0; i + 1 < data.size(); ++i) {
    const Json chunk = Json::parse(data[i]);
    EXPECT_EQ(chunk["object"], "chat.completion.chunk");
    EXPECT_EQ(chunk["id"], Json::parse(data[0])["id"]);
    EXPECT_FALSE(chunk.contains("usage"));
    const Json& delta = chunk["choices"][0]["delta"];
    EXPECT_EQ(delta.contains("role"), i == 0);
    text += delta.value("content", "");
    EXPECT_EQ(chunk["choices"][0]["finish_reason"].is_null(), i + 2 < data.size());
  }
  EXPECT_EQ(text, choice["message"]["content"]);
}

// A chat without max_tokens may use what the context has left.
TEST_F(CompletionsTest, ChatWithoutALimitEndsWithTheContext) {
  const HttpReply reply = endpoint_->Chat({{"model", kBaseName},
                                           {"messages", {{{"role", "user"}, {"content", "hi"}}}},
                                           {"ignore_eos", true}});
  ASSERT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(reply.json()["usage"]["total_tokens"], kTinyContext);
}

// serving.md S1, S2, S14: a name that moves answers from the new bytes with the new files.
TEST_F(CompletionsTest, VariantsAnswerForThemselves) {
  Endpoint endpoint;
  const Json request = {{"model", "demo@latest"}, {"prompt", "ab"},     {"max_tokens", 30},
                        {"temperature", 0},       {"ignore_eos", true}, {"logprobs", 1}};
  EXPECT_EQ(endpoint.Complete(request).status, 404);
  const auto scores = [](const HttpReply& reply) {
    return reply.json()["choices"][0]["logprobs"]["token_logprobs"];
  };
  std::vector<Json> by_version;
  std::vector<Digest> digests;
  for (uint64_t seed : {2, 3, 4}) {
    digests.push_back(endpoint.Publish("demo@latest", seed));
    const HttpReply reply = endpoint.Complete(request);
    ASSERT_EQ(reply.status, 200) << reply.body;
    EXPECT_EQ(reply.json()["system_fingerprint"], digests.back().Hex());
    EXPECT_EQ(reply.json()["model"], "demo@latest");
    by_version.push_back(scores(reply));
  }
  Json base_request = request;
  base_request["model"] = kBaseName;
  by_version.push_back(scores(endpoint.Complete(base_request)));
  for (size_t i = 0; i < by_version.size(); ++i) {
    for (size_t k = 0; k < i; ++k) EXPECT_NE(by_version[i], by_version[k]);
  }
  // A fresh endpoint that has only ever seen version 3 says the same: nothing stale is used.
  Endpoint cold;
  cold.Publish("demo@latest", 3);
  EXPECT_EQ(scores(cold.Complete(request)), by_version[1]);

  const Digest own = endpoint.Publish(
      "own", 5,
      {{"chat_template.jinja", "[{{ messages[0]['content'] }}]"},
       {"generation_config.json", R"({"temperature": 0.0, "eos_token_id": [0]})"}});
  const Json tokens = endpoint
                          .Post("/tokenize", {{"model", "own"},
                                              {"messages", {{{"role", "user"}, {"content", "x"}}}}})
                          .json();
  EXPECT_EQ(tokens["tokens"], Json({ByteToken('['), ByteToken('x'), ByteToken(']')}));
  // Its temperature is 0, so that answers without a seed are equal; its EOS is <|endoftext|>.
  const Json defaults = {{"model", "own"}, {"prompt", "ab"}, {"max_tokens", 20}};
  EXPECT_EQ(endpoint.Complete(defaults).json()["choices"],
            endpoint.Complete(defaults).json()["choices"]);
  Json biased = defaults;
  biased["logit_bias"] = {{std::to_string(kEndOfText), 100}};
  const HttpReply ended = endpoint.Complete(biased);
  EXPECT_EQ(ended.json()["usage"]["completion_tokens"], 1);
  EXPECT_EQ(ended.json()["system_fingerprint"], own.Hex());
  // The base still uses its own.
  EXPECT_EQ(endpoint.Get("/tokenizer_info").json()["chat_template"], kTinyChatTemplate);
  EXPECT_EQ(endpoint.Get("/tokenizer_info?model=own").json()["chat_template"],
            "[{{ messages[0]['content'] }}]");
}

// A template that can not be used breaks chat, not completions, and says why.
TEST_F(CompletionsTest, ABrokenChatTemplate) {
  Endpoint endpoint;
  endpoint.Publish("broken", 5, {{"chat_template.jinja", "{% include 'x' %}"}});
  EXPECT_EQ(endpoint.Complete({{"model", "broken"}, {"prompt", "a"}}).status, 200);
  const HttpReply chat =
      endpoint.Chat({{"model", "broken"}, {"messages", {{{"role", "user"}, {"content", "x"}}}}});
  EXPECT_EQ(chat.status, 400);
  EXPECT_EQ(chat.json()["error"]["param"], "messages");
  EXPECT_NE(chat.body.find("include"), std::string::npos) << chat.body;
}

// serving.md S5: 100 concurrent first requests for a variant are one load, and all are held and
// answered.
TEST_F(CompletionsTest, AHundredFirstRequestsAreOneLoad) {
  Endpoint endpoint;
  endpoint.Publish("cold@1", 2);
  const double loads_before = endpoint.Metric("stockpot_delta_cache_misses_total");
  constexpr size_t kClients = 100;
  std::vector<HttpReply> replies(kClients);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kClients; ++i) {
    threads.emplace_back([&, i] {
      replies[i] = endpoint.Complete(
          {{"model", "cold@1"}, {"prompt", "ab"}, {"max_tokens", 5}, {"temperature", 0}});
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const HttpReply& reply : replies) {
    ASSERT_EQ(reply.status, 200) << reply.body;
    EXPECT_EQ(reply.json()["choices"], replies[0].json()["choices"]);
  }
  EXPECT_LE(endpoint.Metric("stockpot_delta_cache_misses_total") - loads_before, 1);
}

// serving.md S3, S4: streams that run keep their version and their output while names move.
TEST_F(CompletionsTest, AStormOfPublishesDuringStreams) {
  Endpoint endpoint(
      {.engine = {.running_sequences = 64, .step_rows = 128, .kv_bytes = int64_t{64} << 20}});
  endpoint.Publish("demo@latest", 100);
  constexpr size_t kStreams = 16;
  const auto request = [](size_t i) {
    return Json{{"model", i % 4 ? "demo@latest" : kBaseName},
                {"prompt", {static_cast<int>(i) + 3, 80}},
                {"max_tokens", 200},
                {"temperature", 0},
                {"ignore_eos", true},
                {"stream", true}};
  };
  std::map<std::string, std::map<size_t, std::string>> expected;  // digest -> stream -> text
  std::mutex mutex;
  const auto text_of = [](const HttpReply& reply, std::string* fingerprint) {
    std::string text;
    for (const std::string& data : SseData(reply.body)) {
      if (data == "[DONE]") break;
      const Json chunk = Json::parse(data);
      EXPECT_TRUE(fingerprint->empty() || *fingerprint == chunk["system_fingerprint"]);
      *fingerprint = chunk["system_fingerprint"];
      text += chunk["choices"][0]["text"].get<std::string>();
    }
    return text;
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kStreams; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 3; ++round) {
        const HttpReply reply = HttpClient(endpoint.port()).Post("/v1/completions", request(i));
        EXPECT_EQ(reply.status, 200) << reply.body;
        std::string fingerprint;
        const std::string text = text_of(reply, &fingerprint);
        std::lock_guard lock(mutex);
        const auto [it, fresh] = expected[fingerprint].try_emplace(i, text);
        EXPECT_EQ(it->second, text) << "stream " << i << " of " << fingerprint;
      }
    });
  }
  std::set<std::string> published;
  for (uint64_t seed = 101; seed < 109; ++seed) {
    published.insert(endpoint.Publish("demo@latest", seed).Hex());
  }
  for (std::thread& thread : threads) thread.join();
  // The last version alone says what it said in the storm, if it was asked.
  for (size_t i = 1; i < kStreams; ++i) {
    if (i % 4 == 0) continue;
    std::string fingerprint;
    const std::string text =
        text_of(HttpClient(endpoint.port()).Post("/v1/completions", request(i)), &fingerprint);
    EXPECT_TRUE(published.contains(fingerprint));
    if (expected[fingerprint].contains(i)) {
      EXPECT_EQ(expected[fingerprint][i], text);
    }
  }
}

}  // namespace
}  // namespace stockpot::test
