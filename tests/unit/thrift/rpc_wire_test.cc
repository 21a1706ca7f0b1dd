// What holds whatever travels: long connections, garbage, stalls, restarts, addresses.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "tests/unit/thrift/fickle_proxy.h"
#include "tests/unit/thrift/raw_connection.h"
#include "tests/unit/thrift/rpc_world.h"
#include "thrift/limits.h"

namespace stockpot {
namespace {

using SteadyClock = std::chrono::steady_clock;

int64_t MillisecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(SteadyClock::now() - start).count();
}

std::string RandomBytes(std::mt19937_64& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

// Big-endian, as the protocol writes it.
std::string Int32(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

std::string CallHeader(const std::string& name) {
  return Int32(0x80010001) + Int32(static_cast<uint32_t>(name.size())) + name + Int32(0);
}

// A base whose session takes chunks.
std::string OpenBaseSession(Client& client) {
  rpc::SessionRequest request;
  request.kind = rpc::Kind::BASE;
  request.run = "big";
  const auto session = client.OpenSession(request);
  EXPECT_OK(session);
  return *session;
}

TEST(RpcWire, OneConnectionCarriesMoreThan300MiBEachWay) {
  RpcWorld world;
  std::mt19937_64 random(TestSeed());
  const auto client = world.NewClient();
  const std::string session = OpenBaseSession(*client);
  const std::string data = RandomBytes(random, kChunkBytes);
  const ChunkView chunk{Sha256(data), std::as_bytes(std::span(data))};
  const std::vector<ChunkView> chunks(80, chunk);  // 320 MiB
  ASSERT_OK(client->PutChunks(session, chunks));
  const std::vector<Digest> digests(80, chunk.digest);
  size_t received = 0;
  ASSERT_OK(client->FetchChunks(digests, [&](size_t index, std::string&& bytes) {
    EXPECT_EQ(index, received);
    ++received;
    return bytes == data ? OkStatus() : Corruption("other bytes");
  }));
  EXPECT_EQ(received, digests.size());
}

// Thrift counts the strings that it finds whole in its buffer and never forgets them, so that a
// connection ends when it has received the limit of ONE message. Small strings are found whole.
TEST(RpcWire, ManySmallMessagesAreNotOneLargeOne) {
  constexpr int32_t kLimit = 8 << 20;
  RpcWorld world({.max_message_bytes = kLimit});
  std::mt19937_64 random(TestSeed());
  const auto client = world.NewClient({.chunks_in_flight = 16});
  const std::string session = OpenBaseSession(*client);
  const std::string data = RandomBytes(random, 8 << 10);
  const ChunkView chunk{Sha256(data), std::as_bytes(std::span(data))};
  const std::vector<ChunkView> chunks(3 * kLimit / data.size(), chunk);
  ASSERT_OK(client->PutChunks(session, chunks));
}

TEST(RpcWire, GarbageClosesItsConnectionAndNothingElse) {
  RpcWorld world;
  const RpcAddress address = world.server().addresses()[0];
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  const std::string call = ValidCallBytes();
  const auto client = world.NewClient();
  const auto spoiled = [&] {
    std::string bytes = call;
    const int flips = 1 + static_cast<int>(random() % 8);
    for (int i = 0; i < flips; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    return bytes;
  };
  const std::vector<std::string> set_pieces = {
      "",
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
      std::string("\x82\x21\x00\x05hello", 9),                             // compact protocol
      Int32(64) + CallHeader("checkpoint:hello") + std::string(64, '\0'),  // framed
      Int32(0x80010001) + Int32(0x7fffffff),                               // a name of 2 GiB
      Int32(0x80010001) + Int32(0xffffffff),
      CallHeader("checkpoint:put_chunk") + "\x0b" + std::string("\0\x03", 2) + Int32(0x7fffffff),
      CallHeader("checkpoint:have_chunks") + "\x0f" + std::string("\0\x02", 2) + "\x0b" +
          Int32(0x7fffffff),
      CallHeader("checkpoint:have_chunks") + "\x0f" + std::string("\0\x02", 2) + "\x0b" +
          Int32(rpc_limits::kMaxContainerElements),
      CallHeader("checkpoint:commit_shard") + "\x0c" + std::string("\0\x02", 2) + "\x0f" +
          std::string("\0\x01", 2) + "\x0c" + Int32(rpc_limits::kMaxContainerElements),
      // Types that there are not: of a field, of an element, of a key, of a message.
      CallHeader("checkpoint:put_chunk") + std::string("\x6e\0\x01", 3),
      CallHeader("checkpoint:have_chunks") + std::string("\xff\0\x02", 3),
      CallHeader("checkpoint:have_chunks") + "\x0f" + std::string("\0\x02", 2) + "\x6e" + Int32(1),
      CallHeader("checkpoint:nothing") + "\x0e" + std::string("\0\x02", 2) + "\x80" + Int32(1),
      CallHeader("checkpoint:create_run") + "\x0d" + std::string("\0\x04", 2) + "\x6e\x0b" +
          Int32(1),
      Int32(0x80010000) + Int32(5) + "hello" + Int32(0),
      Int32(0x800100ff) + Int32(5) + "hello" + Int32(0),
      CallHeader("nobody:hello") + std::string(1, '\0'),
      CallHeader("hello") + std::string(1, '\0'),
      CallHeader("a:b:c") + std::string(1, '\0'),
      CallHeader("checkpoint:nothing") + std::string(1, '\0'),
      // Structs in structs, deeper than anything of ours.
      CallHeader("checkpoint:nothing") +
          [] {
            std::string nested;
            for (int i = 0; i < 100'000; ++i) nested += std::string("\x0c\0\x01", 3);
            return nested;
          }(),
  };
  const int64_t before = ResidentBytes();
  for (int i = 0; i < 400; ++i) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " stream " + std::to_string(i));
    RawConnection connection(address);
    const size_t kind = static_cast<size_t>(i);
    if (kind < set_pieces.size()) {
      connection.Send(set_pieces[kind]);
    } else if (random() % 3 == 0) {
      connection.Send(RandomBytes(random, random() % 4096));
    } else if (random() % 2 == 0) {
      connection.Send(std::string_view(call).substr(0, random() % call.size()));
    } else {
      connection.Send(spoiled());
    }
    connection.FinishSending();
    EXPECT_TRUE(connection.WaitForEnd(10'000));
    if (i % 20 == 0) {
      ASSERT_OK(client->Hello());
    }
  }
  ASSERT_OK(client->Hello());
  const int64_t grown = ResidentBytes() - before;
  EXPECT_LT(grown, int64_t{192} << 20) << "of resident memory";
  std::printf("resident memory grew by %.1f MB over 400 streams\n", grown / 1e6);
}

// A call that sends for ever: strings that are each allowed.
TEST(RpcWire, OneMessageHasALimit) {
  constexpr int32_t kLimit = 32 << 20;
  RpcWorld world({.max_message_bytes = kLimit});
  RawConnection connection(world.server().addresses()[0]);
  connection.Send(CallHeader("checkpoint:have_chunks") + "\x0f" + std::string("\0\x02", 2) +
                  "\x0b" + Int32(rpc_limits::kMaxContainerElements));
  const std::string element = Int32(rpc_limits::kServerMaxStringBytes) +
                              std::string(rpc_limits::kServerMaxStringBytes, 'x');
  const int64_t before = ResidentBytes();
  for (int64_t sent = 0; sent < int64_t{16} * kLimit;
       sent += static_cast<int64_t>(element.size())) {
    connection.Send(element);
  }
  EXPECT_TRUE(connection.WaitForEnd(10'000));
  EXPECT_LT(ResidentBytes() - before, int64_t{kLimit} + (int64_t{64} << 20));
  ASSERT_OK(world.NewClient()->Hello());
}

TEST(RpcWire, HalfOpenConnectionsDoNotKeepOthersWaiting) {
  RpcWorld world({.message_timeout_ms = 1000});
  const RpcAddress address = world.server().addresses()[0];
  std::vector<RawConnection> idle;
  for (int i = 0; i < 64; ++i) {
    idle.emplace_back(address);
    if (i % 2 == 0) idle.back().Send(Int32(0x80010001));
  }
  const auto start = SteadyClock::now();
  const auto client = world.NewClient();
  for (int i = 0; i < 100; ++i) ASSERT_OK(client->Hello());
  EXPECT_LT(MillisecondsSince(start), 5'000);
  for (RawConnection& connection : idle) EXPECT_TRUE(connection.WaitForEnd(10'000));
}

TEST(RpcWire, ConnectionsOverTheLimitWaitForATimeoutOnly) {
  RpcWorld world({.max_connections = 4, .message_timeout_ms = 500});
  const auto start = SteadyClock::now();
  std::vector<RawConnection> idle;
  for (int i = 0; i < 8; ++i) idle.emplace_back(world.server().addresses()[0]);
  const auto client = world.NewClient({.receive_timeout_ms = 20'000});
  ASSERT_NE(client, nullptr);
  for (RawConnection& connection : idle) EXPECT_TRUE(connection.WaitForEnd(20'000));
  EXPECT_GE(MillisecondsSince(start), 900);  // four at a time, half a second each
}

// Announced, never sent: what a few bytes make the server allocate stays within its account,
// however many connections do it, and is given back when they end.
TEST(RpcWire, AnnouncedLengthsCostNothingUntilTheyArrive) {
  RpcWorld world({.message_timeout_ms = 20'000});
  const RpcAddress address = world.server().addresses()[0];
  const auto client = world.NewClient();
  const std::string structs = CallHeader("checkpoint:commit_shard") + "\x0c" +
                              std::string("\0\x02", 2) + "\x0f" + std::string("\0\x01", 2) +
                              "\x0c" + Int32(rpc_limits::kMaxContainerElements);
  const std::string chunk = CallHeader("checkpoint:put_chunk") + "\x0b" + std::string("\0\x03", 2) +
                            Int32(rpc_limits::kServerMaxStringBytes) + std::string(1000, 'c');
  const int64_t before = ResidentBytes();
  {
    std::vector<RawConnection> hostile;
    for (int i = 0; i < 100; ++i) {
      hostile.emplace_back(address);
      hostile.back().Send(i % 2 == 0 ? structs : chunk);
      if (i % 10 == 0) ASSERT_OK(client->Hello());
    }
    // A list of structs takes 128 MiB of the account: at most two of the fifty have theirs.
    int64_t grown = 0;
    for (int i = 0; i < 200; ++i) {
      ASSERT_OK(client->Hello());
      grown = std::max(grown, ResidentBytes() - before);
    }
    EXPECT_LT(grown, rpc_limits::kAllCallsBytes + (int64_t{100} << 20));
    std::printf("resident memory grew by %.1f MB over 100 half-sent calls\n", grown / 1e6);
    std::mt19937_64 random(TestSeed());
    UploadBase(*client, "tiny", TinyLlama(random));
  }
  // What the hostile ones took is given back once their threads see that they are gone: until then
  // a call of 13 MB finds no room.
  const std::vector<Digest> many(200'000);
  const auto deadline = SteadyClock::now() + std::chrono::seconds(20);
  while (IsRetryable(client->HaveChunks("nobody", many).status().code())) {
    ASSERT_LT(SteadyClock::now(), deadline) << "nothing was given back";
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  // What a call took is given back after it: thirty of them would be too many together.
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(client->HaveChunks("nobody", many).status().code(), StatusCode::kInvalidArgument);
  }
}

// One byte a moment starts the receive time-out anew each time; the message as a whole has one too.
TEST(RpcWire, AMessageThatDripsIsCut) {
  RpcWorld world({.message_timeout_ms = 400});
  RawConnection connection(world.server().addresses()[0]);
  const std::string call = ValidCallBytes();
  const auto start = SteadyClock::now();
  bool ended = false;
  for (size_t i = 0; i < call.size() && !ended; ++i) {
    connection.Send(call.substr(i, 1));
    ended = connection.WaitForEnd(100);
  }
  EXPECT_TRUE(ended);
  EXPECT_LT(MillisecondsSince(start), 10'000);
}

TEST(RpcWire, IdleConnectionIsMadeAnewBeforeTheNextCall) {
  RpcWorld world({.idle_timeout_ms = 50});
  const auto client = world.NewClient();
  for (int i = 0; i < 3; ++i) {
    // The server hangs up on connections of that age about now: before the next call, or while it
    // is on its way. Either way it is answered.
    RawConnection other(world.server().addresses()[0]);
    other.Send(CallHeader("checkpoint:nothing") + std::string(1, '\0'));
    EXPECT_TRUE(other.WaitForEnd(10'000));
    ASSERT_OK(client->Hello());
  }
}

// A peer that answers hello on every connection, one call on the first, and then hangs up instead
// of answering: the call after it is sent once more, on a connection of its own.
TEST(RpcWire, ACallThatMeetsTheHangUpIsRepeatedOnce) {
  RpcWorld world;
  FickleProxy proxy(world.server().addresses()[0], /*answers_first=*/2);
  const auto client = Client::Connect(proxy.address());
  ASSERT_OK(client);             // two hellos: of the connection and Connect's own
  EXPECT_OK((*client)->Runs());  // meets the hang-up
  EXPECT_EQ(proxy.connections(), 2);
}

TEST(RpcWire, ClientOutlivesARestartOfTheDaemon) {
  RpcWorld world;
  const auto client = world.NewClient();
  world.Stop();
  const Status gone = client->Hello().status();
  EXPECT_EQ(gone.code(), StatusCode::kUnavailable) << gone.ToString();
  world.Start();
  ASSERT_OK(client->Hello());
}

TEST(RpcWire, StopIsQuickWhateverConnectionsDo) {
  RpcWorld world;
  const auto watcher = world.NewClient();
  std::thread watching([&] { (void)watcher->Watch(1'000'000, 10, 30'000); });
  std::vector<RawConnection> idle;
  for (int i = 0; i < 4; ++i) {
    idle.emplace_back(world.server().addresses()[0]);
    if (i % 2 == 0) idle.back().Send(Int32(0x80010001));
  }
  // One that asks for much and reads nothing.
  const auto client = world.NewClient();
  const std::string session = OpenBaseSession(*client);
  const std::string data(kChunkBytes, 'd');
  const ChunkView chunk{Sha256(data), std::as_bytes(std::span(data))};
  ASSERT_OK(client->PutChunks(session, {&chunk, 1}));
  RawConnection deaf(world.server().addresses()[0]);
  for (int i = 0; i < 64; ++i) {
    deaf.Send(CallHeader("checkpoint:fetch_chunk") + "\x0b" + std::string("\0\x01", 2) + Int32(32) +
              std::string(chunk.digest.raw()) + std::string(1, '\0'));
  }
  ASSERT_OK(client->Hello());
  const auto start = SteadyClock::now();
  world.server().Stop();
  EXPECT_LT(MillisecondsSince(start), 3'000);
  watching.join();
}

// The order of the daemon's: the store first, so that calls that read all of it end.
TEST(RpcWire, StopDoesNotWaitForAScrub) {
  RpcWorld world;
  std::mt19937_64 random(TestSeed());
  const auto client = world.NewClient();
  UploadBase(*client, "tiny", TinyLlama(random));
  ASSERT_OK(client->Scrub());
  world.store().Shutdown();
  const auto status = client->Scrub().status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
}

TEST(RpcWire, ShutdownEndsAWaitingCall) {
  RpcWorld world;
  const auto client = world.NewClient();
  std::thread shutter([&] { client->Shutdown(); });
  const auto start = SteadyClock::now();
  EXPECT_EQ(client->Watch(1'000'000, 10, 30'000).status().code(), StatusCode::kUnavailable);
  shutter.join();
  EXPECT_LT(MillisecondsSince(start), 10'000);
  EXPECT_EQ(client->Hello().status().code(), StatusCode::kUnavailable);
}

class UnixSocketTest : public ::testing::Test {
 protected:
  Result<std::unique_ptr<RpcServer>> StartAt(const std::string& address) {
    return RpcServer::Start({.store = *store_,
                             .ingest = ingest_,
                             .pipeline = pipeline_,
                             .control = {.version = "test"}},
                            {.addresses = {address}});
  }
  // The file that a killed daemon leaves.
  void LeaveDeadSocket() {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    ASSERT_LT(path_.size(), sizeof address.sun_path);
    std::copy(path_.begin(), path_.end(), address.sun_path);
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ::close(fd);
  }

  TemporaryFolder folder_;
  const std::string path_ = (folder_.path() / "s.sock").string();
  std::unique_ptr<CheckpointStore> store_ = OpenStore(folder_.path() / "store");
  Ingest ingest_{*store_, {}, SystemClock()};
  Pipeline pipeline_{*store_, {.merge = RefuseToMerge, .threads = 1, .clock = SystemClock()}};
};

TEST_F(UnixSocketTest, IsPrivateAndRemovedAtTheEnd) {
  {
    const auto server = StartAt("unix:" + path_);
    ASSERT_OK(server);
    struct stat info {};
    ASSERT_EQ(::stat(path_.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    ASSERT_OK(Client::Connect("unix:" + path_));
  }
  EXPECT_NE(::access(path_.c_str(), F_OK), 0);
}

TEST_F(UnixSocketTest, ReplacesADeadOneOnly) {
  LeaveDeadSocket();
  const auto server = StartAt("unix:" + path_);
  ASSERT_OK(server);
  const Status second = StartAt("unix:" + path_).status();
  EXPECT_EQ(second.code(), StatusCode::kUnavailable) << second.ToString();
  ASSERT_OK(Client::Connect("unix:" + path_));
}

TEST_F(UnixSocketTest, LeavesOtherFilesAlone) {
  std::ofstream(path_) << "precious";
  const Status status = StartAt("unix:" + path_).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
  std::string content;
  std::ifstream(path_) >> content;
  EXPECT_EQ(content, "precious");
}

TEST_F(UnixSocketTest, TakenPortIsUnavailable) {
  const auto first = StartAt("127.0.0.1:0");
  ASSERT_OK(first);
  const Status second = StartAt((*first)->addresses()[0].ToString()).status();
  EXPECT_EQ(second.code(), StatusCode::kUnavailable) << second.ToString();
  EXPECT_NE(second.message().find((*first)->addresses()[0].ToString()), std::string::npos);
}

TEST(RpcAddressTest, ReadsAndRefuses) {
  const auto tcp = ParseRpcAddress("localhost:7070");
  ASSERT_OK(tcp);
  EXPECT_EQ(tcp->host, "localhost");
  EXPECT_EQ(tcp->port, 7070);
  const auto ipv6 = ParseRpcAddress("[::1]:80");
  ASSERT_OK(ipv6);
  EXPECT_EQ(ipv6->host, "::1");
  EXPECT_EQ(ipv6->ToString(), "[::1]:80");
  const auto local = ParseRpcAddress("unix:/run/x.sock");
  ASSERT_OK(local);
  EXPECT_TRUE(local->is_unix());
  EXPECT_EQ(local->ToString(), "unix:/run/x.sock");
  for (const std::string bad : {"", "host", "host:", ":80", "host:65536", "host:-1", "host:8o",
                                "host:80 ", "::1:80", "unix:", "[]:80"}) {
    EXPECT_EQ(ParseRpcAddress(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_FALSE(ParseRpcAddress("unix:/" + std::string(200, 'x')).ok());
}

TEST(RpcClientTest, NobodyThereIsUnavailableAndNamesTheAddress) {
  for (const std::string address : {"127.0.0.1:1", "unix:/nonexistent/stockpot.sock"}) {
    const Status status = Client::Connect(address).status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
    EXPECT_NE(status.message().find(address), std::string::npos) << status.ToString();
  }
  EXPECT_EQ(Client::Connect("nonsense").status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stockpot
