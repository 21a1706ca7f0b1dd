// HTTP itself: clients that leave, stall, send too much or nonsense; health while all is busy.
#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <thread>

#include "serve/http/limits.h"
#include "tests/unit/engine/endpoint.h"

namespace stockpot::test {
namespace {

Json LongRequest(int64_t max_tokens = 480) {
  return {{"model", kBaseName}, {"prompt", "ab"}, {"max_tokens", max_tokens}, {"ignore_eos", true}};
}

// One row a step and a wider model: a request takes long enough to be disturbed.
EndpointOptions Slow() {
  return {.engine = {.running_sequences = 2, .step_rows = 2, .kv_bytes = int64_t{64} << 20},
          .hidden = 128,
          .layers = 6};
}

template <typename Condition>
void WaitFor(const char* what, Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << what;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(Transport, KeepAliveAndPipelining) {
  Endpoint endpoint;
  HttpClient client(endpoint.port());
  for (int i = 0; i < 50; ++i) ASSERT_EQ(client.Get("/health").status, 200);
  // Three requests at once, a slow one among them: three replies in order.
  const std::string health = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
  ASSERT_TRUE(client.Send(health + PostText("/v1/completions", LongRequest(50).dump()) + health));
  EXPECT_EQ(client.Receive().body, R"({"status":"ok"})");
  EXPECT_EQ(client.Receive().json()["object"], "text_completion");
  EXPECT_EQ(client.Receive().body, R"({"status":"ok"})");
  // A request in pieces of one byte.
  for (const char c : PostText("/tokenize", R"({"prompt": "hi"})")) {
    ASSERT_TRUE(client.Send(std::string_view(&c, 1)));
  }
  EXPECT_EQ(client.Receive().status, 200);
  ASSERT_TRUE(client.Send("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"));
  EXPECT_EQ(client.Receive().headers.at("connection"), "close");
  EXPECT_TRUE(client.AtEnd());
}

TEST(Transport, OldAndUnusualRequests) {
  Endpoint endpoint;
  {
    HttpClient client(endpoint.port());
    ASSERT_TRUE(client.Send("GET /health HTTP/1.0\r\n\r\n"));
    EXPECT_EQ(client.Receive().status, 200);
    EXPECT_TRUE(client.AtEnd());
  }
  {  // a stream to HTTP/1.0: no chunks, the end of the connection is the end
    HttpClient client(endpoint.port());
    Json request = LongRequest(5);
    request["stream"] = true;
    const std::string body = request.dump();
    ASSERT_TRUE(client.Send("POST /v1/completions HTTP/1.0\r\ncontent-length: " +
                            std::to_string(body.size()) + "\r\n\r\n" + body));
    const HttpReply reply = client.Receive();
    EXPECT_EQ(reply.status, 200);
    EXPECT_FALSE(reply.headers.contains("transfer-encoding"));
    EXPECT_EQ(SseData(reply.body).back(), "[DONE]");
  }
  {  // a chunked request body
    HttpClient client(endpoint.port());
    ASSERT_TRUE(
        client.Send("POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
                    "8\r\n{\"prompt\r\n8\r\n\": \"hi\"}\r\n0\r\n\r\n"));
    EXPECT_EQ(client.Receive().json()["count"], 2);
    // and Expect: 100-continue, as curl sends it
    const std::string body = R"({"prompt": "hi"})";
    ASSERT_TRUE(
        client.Send("POST /tokenize HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
                    "content-length: " +
                    std::to_string(body.size()) + "\r\n\r\n"));
    ASSERT_TRUE(client.WaitForData());
    ASSERT_TRUE(client.Send(body));
    EXPECT_EQ(client.Receive().json()["count"], 2);
    ASSERT_TRUE(client.Send("HEAD /nowhere HTTP/1.1\r\nhost: x\r\n\r\n"));
    ASSERT_TRUE(client.WaitForData());
  }
}

TEST(Transport, NonsenseIsRefused) {
  Endpoint endpoint;
  struct Case {
    std::string bytes;
    int status;
  };
  for (const Case& c :
       {Case{"\r\n\r\n\r\nwhat is this\r\n\r\n", 400}, Case{"GET\r\n\r\n", 400},
        Case{"GET /health HTTP/9.9\r\n\r\n", 400},
        Case{"GET /%zz HTTP/1.1\r\nhost: x\r\n\r\n", 400},
        Case{"GET health HTTP/1.1\r\nhost: x\r\n\r\n", 400},
        Case{"POST /tokenize HTTP/1.1\r\ncontent-length: -5\r\n\r\n", 400},
        Case{"POST /tokenize HTTP/1.1\r\ncontent-length: 5, 6\r\n\r\n", 400},
        Case{"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400},
        Case{"GET /health HTTP/1.1\r\nx: " + std::string(40'000, 'a') + "\r\n\r\n", 431},
        Case{"POST /tokenize HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413}}) {
    HttpClient client(endpoint.port());
    ASSERT_TRUE(client.Send(c.bytes));
    const HttpReply reply = client.Receive();
    EXPECT_EQ(reply.status, c.status) << c.bytes.substr(0, 60);
    EXPECT_TRUE(reply.json().contains("error")) << reply.body;
    EXPECT_EQ(reply.headers.at("connection"), "close");
    EXPECT_TRUE(client.AtEnd());
  }
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < 100; ++i) {  // random bytes never kill it
    HttpClient client(endpoint.port());
    std::string bytes(1 + random() % 300, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (i % 2) bytes = "POST /v1/completions HTTP/1.1\r\ncontent-length: 40\r\n\r\n" + bytes;
    client.Send(bytes);
    client.Close();
  }
  EXPECT_EQ(endpoint.Get("/health").status, 200);
}

TEST(Transport, HugeBodies) {
  Endpoint endpoint;
  {  // refused by its header alone; the client that sends anyway still reads the reply
    HttpClient client(endpoint.port());
    const std::string body(kMaxBodyBytes + 1, 'x');
    client.Send(PostText("/v1/completions", body));
    EXPECT_EQ(client.Receive().status, 413);
  }
  {  // chunked: refused when it grows over the limit
    HttpClient client(endpoint.port());
    client.Send("POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
    const std::string chunk = "100000\r\n" + std::string(1 << 20, 'x') + "\r\n";
    for (int i = 0; i < 17; ++i) {
      if (!client.Send(chunk)) break;
    }
    EXPECT_EQ(client.Receive().status, 413);
  }
  // The largest allowed body is read, and is no request.
  EXPECT_EQ(HttpClient(endpoint.port()).Post("/tokenize", std::string(kMaxBodyBytes, ' ')).status,
            400);
}

TEST(Transport, BodiesInFlightAreBounded) {
  Endpoint endpoint;
  // Connections that claim large bodies and never send them hold the whole allowance.
  std::deque<HttpClient> holders;
  const std::string claim =
      "POST /tokenize HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
      "content-length: " +
      std::to_string(kMaxBodyBytes) + "\r\n\r\n";
  for (uint64_t held = 0; held < kMaxBodiesInFlightBytes; held += kMaxBodyBytes) {
    holders.emplace_back(endpoint.port());
    ASSERT_TRUE(holders.back().Send(claim));
    ASSERT_TRUE(holders.back().WaitForData());
  }
  HttpClient late(endpoint.port());
  ASSERT_TRUE(late.Send(claim));
  const HttpReply refused = late.Receive();
  EXPECT_EQ(refused.status, 503);
  EXPECT_TRUE(refused.headers.contains("retry-after"));
  EXPECT_EQ(endpoint.Get("/health").status, 200);
  holders.clear();
  WaitFor("the allowance is free again", [&] {
    return HttpClient(endpoint.port()).Post("/tokenize", std::string(1 << 20, ' ')).status == 400;
  });
}

TEST(Transport, SlowClientsAreCut) {
  EndpointOptions options;
  options.http.idle_timeout_ms = 50;
  options.http.read_timeout_ms = 100;
  Endpoint endpoint(options);
  HttpClient silent(endpoint.port());
  EXPECT_TRUE(silent.AtEnd());
  HttpClient half(endpoint.port());
  ASSERT_TRUE(half.Send("POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc"));
  EXPECT_TRUE(half.AtEnd());
  HttpClient idle(endpoint.port());
  EXPECT_EQ(idle.Get("/health").status, 200);
  EXPECT_TRUE(idle.AtEnd());
  // One that waits for its reply is not idle.
  HttpClient busy(endpoint.port());
  EXPECT_EQ(busy.Post("/v1/completions", LongRequest()).status, 200);
}

TEST(Transport, TooManyConnections) {
  EndpointOptions options;
  options.http.max_connections = 8;
  Endpoint endpoint(options);
  std::deque<HttpClient> clients;
  for (int i = 0; i < 8; ++i) {
    clients.emplace_back(endpoint.port());
    ASSERT_EQ(clients.back().Get("/health").status, 200);
  }
  HttpClient refused(endpoint.port());
  const HttpReply reply = refused.Receive();
  EXPECT_EQ(reply.status, 503);
  EXPECT_TRUE(reply.headers.contains("retry-after"));
  clients.clear();
  WaitFor("places are free", [&] { return endpoint.Get("/health").status == 200; });
}

// serving.md S15: leaving frees the slot at once, in prefill, in decode, and in the queue.
TEST(Transport, LeavingCancels) {
  Endpoint endpoint(Slow());
  const auto leave_when = [&](const Json& request, auto ready) {
    HttpClient client(endpoint.port());
    ASSERT_TRUE(client.Send(PostText("/v1/completions", request.dump())));
    WaitFor("the request runs", ready);
    client.Close();
    endpoint.WaitUntilIdle();
  };
  const auto running = [&] { return endpoint.engine().stats().running > 0; };
  Json prefill = LongRequest(1);
  prefill["prompt"] = std::vector<int32_t>(500, 70);
  const int64_t before = endpoint.engine().stats().steps_total;
  leave_when(prefill, running);
  EXPECT_LT(endpoint.engine().stats().steps_total - before, 250) << "the whole prompt was computed";

  Json stream = LongRequest();
  stream["stream"] = true;
  stream["n"] = 6;  // some of them wait in the queue
  leave_when(stream, [&] { return endpoint.engine().stats().generation_tokens_total > 3; });
  leave_when(LongRequest(), running);
  EXPECT_LT(endpoint.engine().stats().generation_tokens_total, 2'000);
  EXPECT_GE(endpoint.Metric("stockpot_http_disconnects_total"), 3);
  EXPECT_GE(endpoint.Metric("stockpot_request_success_total{finished_reason=\"abort\"}"), 3);
  EXPECT_EQ(endpoint.engine().stats().kv_pages_used, 0);
}

// serving.md S16
TEST(Transport, HealthAnswersWhileEverythingIsBusy) {
  EndpointOptions options = Slow();
  options.http.io_threads = 1;
  options.http.worker_threads = 1;
  Endpoint endpoint(options);
  std::deque<HttpClient> busy;
  for (int i = 0; i < 20; ++i) {
    busy.emplace_back(endpoint.port());
    ASSERT_TRUE(busy.back().Send(PostText("/v1/completions", LongRequest().dump())));
  }
  // The only worker is busy as well: tokenising 4 MB takes it seconds.
  HttpClient tokenising(endpoint.port());
  ASSERT_TRUE(tokenising.Send(
      PostText("/tokenize", "{\"prompt\": \"" + std::string(4 << 20, 'q') + "\"}")));
  HttpClient client(endpoint.port());
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(client.Get("/health").status, 200);
    ASSERT_EQ(client.Get("/metrics").status, 200);
  }
  EXPECT_GT(endpoint.engine().stats().running, 0);
}

// A client that does not read its stream is cut before much waits for it, and its sequences end.
TEST(Transport, BackPressure) {
  EndpointOptions options;
  options.engine = {.running_sequences = 64, .step_rows = 64, .kv_bytes = int64_t{64} << 20};
  Endpoint endpoint(options);
  HttpClient deaf(endpoint.port());
  deaf.SetReceiveBufferBytes(4096);
  Json request = LongRequest();
  request["stream"] = true;
  request["n"] = 60;
  request["logprobs"] = 20;  // about 60 * 480 * 900 bytes, far over what may wait
  ASSERT_TRUE(deaf.Send(PostText("/v1/completions", request.dump())));
  WaitFor("it is cut", [&] { return endpoint.Metric("stockpot_http_disconnects_total") >= 1; });
  endpoint.WaitUntilIdle();
  EXPECT_LT(endpoint.engine().stats().generation_tokens_total, 60 * 480);
  EXPECT_EQ(endpoint.Get("/health").status, 200);
}

TEST(Transport, AHundredClientsAtOnce) {
  Endpoint endpoint;
  constexpr size_t kClients = 100;
  std::vector<std::string> texts(kClients);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kClients; ++i) {
    threads.emplace_back([&, i] {
      HttpClient client(endpoint.port());
      for (int round = 0; round < 2; ++round) {
        Json request = {{"model", kBaseName},
                        {"prompt", {static_cast<int>(i % 10) + 40}},
                        {"max_tokens", 20},
                        {"temperature", 1},
                        {"seed", 5}};
        const HttpReply reply = client.Post("/v1/completions", request);
        ASSERT_EQ(reply.status, 200) << reply.body;
        const std::string text = reply.json()["choices"][0]["text"];
        if (round > 0) {
          EXPECT_EQ(text, texts[i]);
        }
        texts[i] = text;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 10; i < kClients; ++i) EXPECT_EQ(texts[i], texts[i % 10]);
}

TEST(Transport, AFullQueueIsTooManyRequests) {
  EndpointOptions options = Slow();
  options.engine.running_sequences = 1;
  options.engine.waiting_requests = 3;
  Endpoint endpoint(options);
  Json request = LongRequest(20);
  request["n"] = 5;
  const HttpReply reply = endpoint.Complete(request);
  EXPECT_EQ(reply.status, 429);
  EXPECT_TRUE(reply.headers.contains("retry-after"));
  EXPECT_EQ(reply.json()["error"]["type"], "rate_limit_error");
  request["n"] = 2;
  EXPECT_EQ(endpoint.Complete(request).status, 200);
}

TEST(Transport, StopEndsWhatRuns) {
  Endpoint endpoint(Slow());
  std::deque<HttpClient> clients;
  for (int i = 0; i < 10; ++i) {
    clients.emplace_back(endpoint.port());
    Json request = LongRequest();
    request["stream"] = i % 2 == 0;
    ASSERT_TRUE(clients.back().Send(PostText("/v1/completions", request.dump())));
  }
  WaitFor("some run", [&] { return endpoint.engine().stats().running > 0; });
  endpoint.server().Stop();
  EXPECT_EQ(endpoint.engine().stats().kv_pages_used, 0);
  HttpClient late(endpoint.port());
  EXPECT_FALSE(late.Send("GET /health HTTP/1.1\r\n\r\n") && late.WaitForData());
}

TEST(Transport, TheAddressIsTakenOrNone) {
  Endpoint endpoint;
  HttpServer second({.port = endpoint.port(), .version = "1"});
  EXPECT_EQ(second.Start().code(), StatusCode::kUnavailable);
  HttpServer nowhere({.address = "example.com", .port = 0, .version = "1"});
  EXPECT_EQ(nowhere.Start().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stockpot::test
