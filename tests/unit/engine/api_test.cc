// The API's surface: which requests are accepted, and with exactly which error the others are not.
#include <gtest/gtest.h>

#include <set>

#include "serve/http/limits.h"
#include "serve/http/plan.h"
#include "tests/unit/engine/endpoint.h"

namespace stockpot::test {
namespace {

class ApiTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { endpoint_ = new Endpoint; }
  static void TearDownTestSuite() { delete endpoint_; }
  static Endpoint* endpoint_;
};
Endpoint* ApiTest::endpoint_ = nullptr;

// Every error has this shape and nothing else.
void ExpectError(const HttpReply& reply, int status, const Json& param, const std::string& what) {
  EXPECT_EQ(reply.status, status) << what << "\n" << reply.body;
  const Json body = reply.json();
  ASSERT_TRUE(body.is_object() && body.size() == 1 && body.contains("error")) << reply.body;
  const Json& error = body["error"];
  std::set<std::string> fields;
  for (const auto& [key, value] : error.items()) fields.insert(key);
  EXPECT_EQ(fields, (std::set<std::string>{"message", "type", "param", "code"}));
  EXPECT_TRUE(error["message"].is_string() && !error["message"].get<std::string>().empty());
  EXPECT_TRUE(error["type"].is_string());
  EXPECT_TRUE(error["code"].is_null() || error["code"].is_string());
  EXPECT_EQ(error["param"], param) << what;
  EXPECT_EQ(reply.headers.at("content-type"), "application/json");
}

TEST_F(ApiTest, CompletionRequests) {
  const Json null;
  struct Case {
    const char* change;  // merged into a good request
    int status;
    Json param;
  };
  const Case cases[] = {
      {R"({})", 200, null},
      {R"({"prompt": ["a", "bc"]})", 200, null},
      {R"({"prompt": [70, 71]})", 200, null},
      {R"({"prompt": [[70, 71], [72]]})", 200, null},
      {R"({"prompt": [70.0]})", 200, null},
      {R"({"stop": null})", 200, null},
      {R"({"stop": []})", 200, null},
      {R"({"stop": "x"})", 200, null},
      {R"({"stop": ["a", "b", "c", "d", "e", "f", "\n\n"]})", 200, null},
      {R"({"stop": ""})", 200, null},
      {R"({"unknown_field": {"x": 1}, "user": "me"})", 200, null},
      {R"({"best_of": 1})", 200, null},
      {R"({"best_of": 2, "n": 2})", 200, null},
      {R"({"n": 3})", 200, null},
      {R"({"seed": -5})", 200, null},
      {R"({"top_k": -1})", 200, null},
      {R"({"max_tokens": 0, "echo": true})", 200, null},
      {R"({"logprobs": 20})", 200, null},
      {R"({"logprobs": 0})", 200, null},
      {R"({"logit_bias": {"70": -100, "71": 5.5}})", 200, null},
      {R"({"stop_token_ids": [70]})", 200, null},
      {R"({"min_tokens": 2, "ignore_eos": true})", 200, null},
      {R"({"temperature": 0, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1,
           "frequency_penalty": -2, "presence_penalty": 2})",
       200, null},
      {R"({"stream_options": {"include_usage": true}})", 200, null},
      {R"({"model": null})", 400, "model"},
      {R"({"model": ""})", 400, "model"},
      {R"({"model": 7})", 400, "model"},
      {R"({"model": "nobody"})", 404, "model"},
      {R"({"model": "TINY"})", 404, "model"},
      {R"({"model": "tiny "})", 404, "model"},
      {R"({"prompt": null})", 400, "prompt"},
      {R"({"prompt": ""})", 400, "prompt"},
      {R"({"prompt": []})", 400, "prompt"},
      {R"({"prompt": [[]]})", 400, "prompt"},
      {R"({"prompt": 5})", 400, "prompt"},
      {R"({"prompt": {"a": 1}})", 400, "prompt"},
      {R"({"prompt": [true]})", 400, "prompt"},
      {R"({"prompt": ["a", 1]})", 400, "prompt"},
      {R"({"prompt": [1, "a"]})", 400, "prompt"},
      {R"({"prompt": [[1], "a"]})", 400, "prompt"},
      {R"({"prompt": [1.5]})", 400, "prompt"},
      {R"({"prompt": [-1]})", 400, "prompt"},
      {R"({"prompt": [99999999999]})", 400, "prompt"},
      {R"({"prompt": [18446744073709551615]})", 400, "prompt"},
      {R"({"prompt": [272]})", 400, null},  // the model has 272 ids
      {R"({"max_tokens": -1})", 400, "max_tokens"},
      {R"({"max_tokens": 0})", 400, "max_tokens"},
      {R"({"max_tokens": 1.5})", 400, "max_tokens"},
      {R"({"max_tokens": "5"})", 400, "max_tokens"},
      {R"({"max_tokens": 512})", 400, "prompt"},
      {R"({"max_tokens": 99999999999})", 400, "max_tokens"},
      {R"({"min_tokens": 9})", 400, "min_tokens"},
      {R"({"n": 0})", 400, "n"},
      {R"({"n": 129})", 400, "n"},
      {R"({"best_of": 3})", 400, "best_of"},
      {R"({"temperature": -0.1})", 400, "temperature"},
      {R"({"temperature": "hot"})", 400, "temperature"},
      {R"({"temperature": true})", 400, "temperature"},
      {R"({"temperature": 1e999})", 400, null},  // no JSON number
      {R"({"top_p": 0})", 400, "top_p"},
      {R"({"top_p": 1.1})", 400, "top_p"},
      {R"({"top_k": -2})", 400, "top_k"},
      {R"({"min_p": 1.5})", 400, "min_p"},
      {R"({"repetition_penalty": 0})", 400, "repetition_penalty"},
      {R"({"frequency_penalty": 2.1})", 400, "frequency_penalty"},
      {R"({"presence_penalty": -2.1})", 400, "presence_penalty"},
      {R"({"seed": 1.5})", 400, "seed"},
      {R"({"logprobs": 21})", 400, "logprobs"},
      {R"({"logprobs": -1})", 400, "logprobs"},
      {R"({"logprobs": true})", 400, "logprobs"},
      {R"({"echo": 1})", 400, "echo"},
      {R"({"stream": "yes"})", 400, "stream"},
      {R"({"stream_options": 1})", 400, "stream_options"},
      {R"({"stream_options": {"include_usage": 1}})", 400, "stream_options"},
      {R"({"stop": 5})", 400, "stop"},
      {R"({"stop": [5]})", 400, "stop"},
      {R"({"stop_token_ids": "a"})", 400, "stop_token_ids"},
      {R"({"stop_token_ids": [-1]})", 400, "stop_token_ids"},
      {R"({"logit_bias": []})", 400, "logit_bias"},
      {R"({"logit_bias": {"a": 1}})", 400, "logit_bias"},
      {R"({"logit_bias": {"70": 101}})", 400, "logit_bias"},
      {R"({"logit_bias": {"70": "1"}})", 400, "logit_bias"},
      {R"({"ignore_eos": "no"})", 400, "ignore_eos"},
      {R"({"add_special_tokens": 0})", 400, "add_special_tokens"},
  };
  HttpClient client(endpoint_->port());  // one connection: no error breaks keep-alive
  for (const Case& c : cases) {
    Json request = {{"model", kBaseName}, {"prompt", "hello"}, {"max_tokens", 3}};
    const Json change = Json::parse(c.change, nullptr, false);
    std::string text;
    if (change.is_discarded()) {
      text = c.change;
    } else {
      for (const auto& [key, value] : change.items()) request[key] = value;
      text = request.dump();
    }
    const HttpReply reply = client.Post("/v1/completions", text);
    if (c.status == 200) {
      EXPECT_EQ(reply.status, 200) << c.change << "\n" << reply.body;
    } else {
      ExpectError(reply, c.status, c.param, c.change);
    }
  }
}

TEST_F(ApiTest, ChatRequests) {
  const Json null;
  struct Case {
    const char* change;
    int status;
    Json param;
  };
  const Case cases[] = {
      {R"({})", 200, null},
      {R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
                                                     {"type": "text", "text": "b"}]}]})",
       200, null},
      {R"({"messages": [{"role": "user", "content": "a", "type": "text", "name": "x"}]})", 200,
       null},
      {R"({"messages": [{"role": "assistant", "content": null}]})", 200, null},
      {R"({"logprobs": true, "top_logprobs": 5})", 200, null},
      {R"({"max_completion_tokens": 2})", 200, null},
      {R"({"tools": null, "response_format": {"type": "text"}})", 200, null},
      {R"({"messages": null})", 400, "messages"},
      {R"({"messages": []})", 400, "messages"},
      {R"({"messages": "hi"})", 400, "messages"},
      {R"({"messages": ["hi"]})", 400, "messages"},
      {R"({"messages": [{"content": "a"}]})", 400, "messages"},
      {R"({"messages": [{"role": 1, "content": "a"}]})", 400, "messages"},
      {R"({"messages": [{"role": "user", "content": 1}]})", 400, "messages"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})", 400, "messages"},
      {R"({"messages": [{"role": "user", "content": ["a"]}]})", 400, "messages"},
      {R"({"top_logprobs": 3})", 400, "top_logprobs"},
      {R"({"logprobs": 3})", 400, "logprobs"},
      {R"({"max_tokens": 0})", 400, "max_tokens"},
      {R"({"max_completion_tokens": 0})", 400, "max_completion_tokens"},
      {R"({"chat_template_kwargs": 1})", 400, "chat_template_kwargs"},
      {R"({"model": "nobody"})", 404, "model"},
  };
  HttpClient client(endpoint_->port());
  for (const Case& c : cases) {
    Json request = {{"model", kBaseName},
                    {"messages", {{{"role", "user"}, {"content", "hi"}}}},
                    {"max_tokens", 3}};
    const Json change = Json::parse(c.change);
    for (const auto& [key, value] : change.items()) request[key] = value;
    const HttpReply reply = client.Post("/v1/chat/completions", request);
    if (c.status == 200) {
      EXPECT_EQ(reply.status, 200) << c.change << "\n" << reply.body;
    } else {
      ExpectError(reply, c.status, c.param, c.change);
    }
  }
}

// A text that the tokenizer cannot get through never will: 400 for every way in, so that no client
// sends it again as it does after 429 and 503.
TEST(EncodingTest, TextsThatAreTooMuchAreNotRetried) {
  Json growing = Json::parse(TinyTokenizerJson());
  const Json grow = {
      {"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(1000, 'a')}};
  growing["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json(10, grow)}};
  const auto text = TextAssets::Load([&](std::string_view name) -> Result<std::string> {
    if (name == "tokenizer.json") return growing.dump();
    if (name == "chat_template.jinja") return std::string(kTinyChatTemplate);
    return NotFound(std::string(name));
  });
  ASSERT_TRUE(text.ok()) << text.status().ToString();

  auto ids = EncodeText(**text, "a", false, "prompt");
  ASSERT_FALSE(ids.ok());
  EXPECT_EQ(ErrorResponse(ids.error()).status, 400);
  EXPECT_EQ(ids.error().param, "prompt");

  CompletionRequest completion;
  completion.prompts = {std::string("a")};
  const auto completed = PlanCompletion(completion, **text, kTinyContext);
  ASSERT_FALSE(completed.ok());
  EXPECT_EQ(ErrorResponse(completed.error()).status, 400);

  ChatRequest chat;
  chat.messages = {{{"role", "user"}, {"content", "a"}}};
  const auto chatted = PlanChat(chat, **text, kTinyContext);
  ASSERT_FALSE(chatted.ok());
  EXPECT_EQ(ErrorResponse(chatted.error()).status, 400);
  EXPECT_EQ(chatted.error().param, "messages");
}

TEST_F(ApiTest, BodiesThatAreNoRequest) {
  HttpClient client(endpoint_->port());
  const std::string deep(10'000, '[');
  std::string wide = "{\"a\": [1";
  for (int64_t i = 0; i < kMaxJsonValues; ++i) wide += ",1";
  wide += "]}";
  std::string keys = "{";
  for (int64_t i = 0; i <= kMaxJsonKeysPerObject; ++i) keys += "\"k" + std::to_string(i) + "\":1,";
  keys += "\"z\":1}";
  for (const std::string& body :
       {std::string(), std::string("{"), std::string("[]"), std::string("null"), std::string("7"),
        std::string("{\"model\": \"tiny\", }"), std::string("{\"model\": \"\xff\"}"), deep,
        "{\"a\": " + deep, wide, keys, std::string("]]]]:::,,,"), std::string("{\"a\":\"\\"),
        std::string("\0", 1)}) {
    for (const char* path :
         {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}) {
      ExpectError(client.Post(path, body), 400, nullptr, body.substr(0, 60));
    }
  }
  EXPECT_EQ(client.Get("/health").status, 200);
}

TEST_F(ApiTest, PathsAndMethods) {
  HttpClient client(endpoint_->port());
  ExpectError(client.Get("/nowhere"), 404, nullptr, "path");
  ExpectError(client.Get("/v1"), 404, nullptr, "path");
  const HttpReply wrong = client.Get("/v1/completions");
  ExpectError(wrong, 405, nullptr, "method");
  EXPECT_EQ(wrong.headers.at("allow"), "POST");
  const HttpReply also_wrong = client.Post("/health", std::string("{}"));
  ExpectError(also_wrong, 405, nullptr, "method");
  EXPECT_EQ(also_wrong.headers.at("allow"), "GET");
  EXPECT_EQ(client.Get("/health?x=1").body, R"({"status":"ok"})");
  EXPECT_EQ(client.Get("/ready").body, R"({"status":"ready"})");
  EXPECT_EQ(client.Get("/version").body, R"({"version":"9.8.7"})");
}

// serving.md: clients must not retry a name that does not exist.
TEST_F(ApiTest, UnknownModelsAreNotRetried) {
  const HttpReply reply = endpoint_->Complete({{"model", "nobody@9"}, {"prompt", "a"}});
  ExpectError(reply, 404, "model", "unknown");
  EXPECT_EQ(reply.headers.at("x-should-retry"), "false");
  EXPECT_EQ(reply.json()["error"]["code"], "model_not_found");
  EXPECT_NE(reply.body.find("nobody@9"), std::string::npos);
}

TEST_F(ApiTest, Models) {
  Endpoint endpoint;
  const Digest variant = endpoint.Publish("demo@latest", 2);
  const Json list = endpoint.Get("/v1/models").json();
  EXPECT_EQ(list["object"], "list");
  ASSERT_EQ(list["data"].size(), 2u);
  std::map<std::string, Json> by_id;
  for (const Json& model : list["data"]) by_id[model["id"]] = model;
  const Json& base = by_id.at(kBaseName);
  EXPECT_EQ(base["object"], "model");
  EXPECT_EQ(base["owned_by"], "stockpot");
  EXPECT_EQ(base["root"], endpoint.world().base_digest.Hex());
  EXPECT_TRUE(base["parent"].is_null());
  EXPECT_EQ(base["max_model_len"], kTinyContext);
  EXPECT_TRUE(base["created"].is_number_integer());
  const Json& served = by_id.at("demo@latest");
  EXPECT_EQ(served["root"], variant.Hex());
  EXPECT_EQ(served["parent"], kBaseName);
  EXPECT_TRUE(served["status"].is_string());
  for (const char* path : {"/v1/models/demo@latest", "/v1/models/demo%40latest"}) {
    const HttpReply one = endpoint.Get(path);
    EXPECT_EQ(one.status, 200);
    EXPECT_EQ(one.json()["root"], variant.Hex());
  }
  ExpectError(endpoint.Get("/v1/models/nobody"), 404, "model", "unknown");
}

TEST_F(ApiTest, RemoteTokenizer) {
  const Json info = endpoint_->Get("/tokenizer_info").json();
  EXPECT_EQ(info["bos_token"], "<|im_start|>");
  EXPECT_EQ(info["eos_token"], "<|im_end|>");
  EXPECT_EQ(info["pad_token"], "<|endoftext|>");
  EXPECT_EQ(info["chat_template"], kTinyChatTemplate);
  const Json tokens =
      endpoint_
          ->Post("/tokenize", {{"prompt", "h\xc3\xa9<|im_end|>"}, {"add_special_tokens", false}})
          .json();
  EXPECT_EQ(tokens["tokens"], Json({ByteToken('h'), ByteToken(0xc3), ByteToken(0xa9), kImEnd}));
  EXPECT_EQ(tokens["count"], 4);
  EXPECT_EQ(endpoint_->Post("/detokenize", {{"tokens", tokens["tokens"]}}).json(),
            Json({{"prompt", "h\xc3\xa9<|im_end|>"}}));
  EXPECT_EQ(endpoint_->Post("/tokenize", {{"prompt", ""}}).json()["tokens"], Json::array());
  const Json chat =
      endpoint_->Post("/tokenize", {{"messages", {{{"role", "user"}, {"content", "x"}}}}}).json();
  EXPECT_EQ(endpoint_->Post("/detokenize", {{"tokens", chat["tokens"]}}).json()["prompt"],
            "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n");
  ExpectError(endpoint_->Post("/tokenize", Json::object()), 400, "prompt", "no prompt");
  ExpectError(endpoint_->Post("/tokenize", {{"prompt", 5}}), 400, "prompt", "type");
  ExpectError(endpoint_->Post("/detokenize", Json::object()), 400, "tokens", "no tokens");
  ExpectError(endpoint_->Post("/detokenize", {{"tokens", {-1}}}), 400, "tokens", "range");
  ExpectError(endpoint_->Post("/detokenize", {{"tokens", {1}}, {"model", "x"}}), 404, "model", "");
}

TEST_F(ApiTest, WithoutAModel) {
  Endpoint endpoint({.with_model = false});
  EXPECT_EQ(endpoint.Get("/health").status, 200);
  EXPECT_EQ(endpoint.Get("/metrics").status, 200);
  EXPECT_EQ(endpoint.Get("/v1/models").json()["data"], Json::array());
  const HttpReply ready = endpoint.Get("/ready");
  ExpectError(ready, 503, nullptr, "ready");
  const HttpReply refused = endpoint.Complete({{"model", kBaseName}, {"prompt", "a"}});
  ExpectError(refused, 503, nullptr, "no model");
  EXPECT_TRUE(refused.headers.contains("retry-after"));
  endpoint.SetModel();
  EXPECT_EQ(endpoint.Get("/ready").status, 200);
  EXPECT_EQ(endpoint.Complete({{"model", kBaseName}, {"prompt", "a"}}).status, 200);
  endpoint.server().BeginDrain();
  ExpectError(endpoint.Get("/ready"), 503, nullptr, "draining");
  ExpectError(endpoint.Complete({{"model", kBaseName}, {"prompt", "a"}}), 503, nullptr, "draining");
  EXPECT_EQ(endpoint.Get("/health").status, 200);
}

TEST_F(ApiTest, Metrics) {
  Endpoint endpoint;
  endpoint.Publish("demo@1", 2);
  ASSERT_EQ(
      endpoint
          .Complete(
              {{"model", kBaseName}, {"prompt", "abc"}, {"max_tokens", 4}, {"ignore_eos", true}})
          .status,
      200);
  ASSERT_EQ(
      endpoint
          .Complete(
              {{"model", "demo@1"}, {"prompt", "abc"}, {"max_tokens", 4}, {"ignore_eos", true}})
          .status,
      200);
  endpoint.Get("/some/path/nobody/knows");
  endpoint.WaitUntilIdle();
  EXPECT_EQ(endpoint.Metric("stockpot_num_requests_running"), 0);
  EXPECT_GE(endpoint.Metric("stockpot_generation_tokens_total"), 8);
  EXPECT_GE(endpoint.Metric("stockpot_delta_cache_misses_total"), 1);
  EXPECT_EQ(endpoint.Metric("stockpot_time_to_first_token_seconds_count{kind=\"base\"}"), 1);
  EXPECT_EQ(endpoint.Metric("stockpot_time_to_first_token_seconds_count{kind=\"variant\"}"), 1);
  EXPECT_EQ(endpoint.Metric("stockpot_inter_token_latency_seconds_count{kind=\"base\"}"), 3);
  EXPECT_EQ(endpoint.Metric("stockpot_publish_to_first_token_seconds_count"), 1);
  EXPECT_EQ(endpoint.Metric("stockpot_request_success_total{finished_reason=\"length\"}"), 2);
  EXPECT_EQ(
      endpoint.Metric("stockpot_http_requests_total{route=\"/v1/completions\",status=\"2xx\"}"), 2);
  EXPECT_EQ(endpoint.Metric("stockpot_http_requests_total{route=\"other\",status=\"4xx\"}"), 1);
  // Every line is a comment or "name{labels} value"; every sample has a TYPE before it.
  const std::string text = endpoint.Get("/metrics").body;
  std::set<std::string> types;
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = text.find('\n', at);
    ASSERT_NE(end, std::string::npos);
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    if (line.starts_with("# TYPE ")) types.insert(line.substr(7, line.find(' ', 7) - 7));
    if (line.starts_with("#")) continue;
    std::string name = line.substr(0, line.find_first_of("{ "));
    bool typed = types.contains(name);
    for (const char* suffix : {"_bucket", "_sum", "_count"}) {
      if (name.ends_with(suffix)) {
        typed |= types.contains(name.substr(0, name.size() - std::string(suffix).size()));
      }
    }
    EXPECT_TRUE(typed) << line;
    EXPECT_EQ(text.find("demo"), std::string::npos) << "client's words in a label";
  }
}

}  // namespace
}  // namespace stockpot::test
