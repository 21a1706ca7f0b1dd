// Who gets in, and who can read along: TLS with real certificates, and the token.
#include <gmock/gmock.h>

#include <fstream>

#include "tests/unit/thrift/certificates.h"
#include "tests/unit/thrift/raw_connection.h"
#include "tests/unit/thrift/rpc_world.h"
#include "thrift/limits.h"
#include "thrift/remote_source.h"

namespace stockpot {
namespace {

using ::testing::HasSubstr;

constexpr const char* kToken = "0123456789abcdef-a-token";

class RpcTls : public ::testing::Test {
 protected:
  RpcServerOptions ServerOptions(bool ask_clients = false) {
    const auto server = ours_.Sign("server", "127.0.0.1");
    return {.tls = {.cert_file = server.cert_file,
                    .key_file = server.key_file,
                    .client_ca_file = ask_clients ? ours_.ca_file() : ""}};
  }
  static StatusCode Try(const RpcWorld& world, const ClientOptions& options,
                        std::string* message = nullptr) {
    const Status status = Client::Connect(world.tcp(), options).status();
    if (message != nullptr) *message = status.ToString();
    return status.code();
  }

  TemporaryFolder folder_;
  TestAuthority ours_{folder_.path(), "ours"};
  TestAuthority other_{folder_.path(), "other"};
};

TEST_F(RpcTls, CarriesCheckpointsBothWays) {
  RpcWorld world(ServerOptions());
  std::mt19937_64 random(TestSeed());
  const auto client = world.NewClient({.tls = {.ca_file = ours_.ca_file()}});
  ASSERT_NE(client, nullptr);
  TestModel model = TinyLlama(random);
  model.SetRandom("model.large", DType::kF32, {3, 1'000'001}, random, 1.0);  // several chunks
  UploadBase(*client, "tiny", model);
  const auto stored = OpenRemoteArtifact(*client, "tiny");
  ASSERT_OK(stored);
  for (const TensorInfo& tensor : model.tensors()) {
    const auto bytes = (*stored)->ReadAll(tensor.name);
    ASSERT_OK(bytes);
    EXPECT_EQ(*bytes, *model.ReadAll(tensor.name)) << tensor.name;
  }
  ASSERT_OK(Client::Connect(world.unix_socket()));  // which needs no TLS
}

TEST_F(RpcTls, PlainClientsAndStrangersGetNothing) {
  RpcWorld world(ServerOptions());
  EXPECT_EQ(Try(world, {.receive_timeout_ms = 5'000}), StatusCode::kUnavailable);
  std::string message;
  EXPECT_EQ(Try(world, {.tls = {.ca_file = other_.ca_file()}}, &message), StatusCode::kUnavailable);
  EXPECT_NE(message.find("certificate"), std::string::npos) << message;
  RawConnection garbage(world.server().addresses()[0]);
  garbage.Send(std::string(100, 'g'));
  EXPECT_TRUE(garbage.WaitForEnd(10'000));
  ASSERT_NE(world.NewClient({.tls = {.ca_file = ours_.ca_file()}}), nullptr);
}

TEST_F(RpcTls, TheCertificateMustNameTheHost) {
  const auto elsewhere = ours_.Sign("elsewhere", "example.org");
  RpcWorld world({.tls = {.cert_file = elsewhere.cert_file, .key_file = elsewhere.key_file}});
  EXPECT_EQ(Try(world, {.tls = {.ca_file = ours_.ca_file()}}), StatusCode::kUnavailable);
}

TEST_F(RpcTls, ClientCertificatesAreAskedForWhereItSaysSo) {
  RpcWorld world(ServerOptions(/*ask_clients=*/true));
  const auto good = ours_.Sign("client", "trainer");
  const auto bad = other_.Sign("client", "trainer");
  EXPECT_EQ(Try(world, {.tls = {.ca_file = ours_.ca_file()}}), StatusCode::kUnavailable);
  EXPECT_EQ(Try(world, {.tls = {.ca_file = ours_.ca_file(),
                                .cert_file = bad.cert_file,
                                .key_file = bad.key_file}}),
            StatusCode::kUnavailable);
  EXPECT_EQ(Try(world, {.tls = {.ca_file = ours_.ca_file(),
                                .cert_file = good.cert_file,
                                .key_file = good.key_file}}),
            StatusCode::kOk);
}

TEST_F(RpcTls, OlderVersionsAreRefused) {
  RpcWorld world(ServerOptions());
  const std::string address = world.tcp();
  const auto connect = [&](const std::string& version) {
    // Level 0: the client would do it.
    const std::string command = "openssl s_client -cipher DEFAULT@SECLEVEL=0 -" + version +
                                " -connect " + address + " < /dev/null 2>&1";
    FILE* pipe = ::popen(command.c_str(), "r");
    EXPECT_NE(pipe, nullptr);
    std::string output;
    char buffer[4096];
    for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) output.append(buffer, n);
    ::pclose(pipe);
    return output;
  };
  EXPECT_THAT(connect("tls1_2"), HasSubstr("Cipher is ECDHE"));
  EXPECT_THAT(connect("tls1_1"), HasSubstr("alert protocol version"));
  EXPECT_THAT(connect("tls1"), HasSubstr("alert protocol version"));
}

TEST_F(RpcTls, UnusableFilesAreNamed) {
  const auto server = ours_.Sign("server", "127.0.0.1");
  const auto another = ours_.Sign("another", "127.0.0.1");
  const auto refused = [](const ServerTls& tls) {
    const Status status = MakeTlsFactory(tls).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
    return status.message();
  };
  EXPECT_NE(refused({"/nonexistent.pem", server.key_file, ""}).find("/nonexistent.pem"),
            std::string::npos);
  EXPECT_NE(refused({server.key_file, server.key_file, ""}).find(server.key_file),
            std::string::npos);
  EXPECT_NE(refused({server.cert_file, another.key_file, ""}).find(another.key_file),
            std::string::npos);
  EXPECT_NE(refused({server.cert_file, "", ""}).find("key"), std::string::npos);
  EXPECT_NE(refused({"", server.key_file, ""}).find("certificate"), std::string::npos);
  EXPECT_EQ(MakeTlsFactory(ClientTls{.cert_file = server.cert_file}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(RpcToken, OpensEveryAddressAndNothingElseDoes) {
  RpcWorld world({.token = kToken});
  for (const std::string& address : {world.tcp(), world.unix_socket()}) {
    ASSERT_OK(Client::Connect(address, {.token = kToken}));
    const Status none = Client::Connect(address).status();
    EXPECT_EQ(none.code(), StatusCode::kInvalidArgument) << none.ToString();
    EXPECT_NE(none.message().find("--token-file"), std::string::npos) << none.ToString();
    for (const std::string wrong : {"0123456789abcdef-a-tokem", "0123456789abcdef",
                                    "0123456789abcdef-a-token-and-more", "x"}) {
      const Status status = Client::Connect(address, {.token = wrong}).status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
      EXPECT_NE(status.message().find("token"), std::string::npos) << status.ToString();
    }
  }
}

// A client that leaves hello out: every other call says what is missing, and does nothing.
TEST(RpcToken, NoCallGoesBeforeIt) {
  RpcWorld world({.token = kToken});
  RawConnection connection(world.server().addresses()[0]);
  connection.Send(ValidCallBytes());
  connection.FinishSending();
  EXPECT_TRUE(connection.WaitForEnd(10'000));
  EXPECT_NE(connection.received().find("asks for a token"), std::string::npos);
  EXPECT_EQ(connection.received().find("no such session"), std::string::npos) << "it was executed";
}

TEST(RpcToken, AWrongOneEndsTheConnection) {
  RpcWorld world({.token = kToken});
  RawConnection connection(world.server().addresses()[0]);
  connection.Send(HelloBytes("wrong-token-wrong-token"));
  EXPECT_TRUE(connection.WaitForEnd(10'000)) << "it may not try the next one";
  EXPECT_NE(connection.received().find("token"), std::string::npos);
}

// Before it, long strings and lists are not even read.
TEST(RpcToken, StrangersCannotMakeTheServerAllocate) {
  RpcWorld world({.token = kToken});
  RawConnection connection(world.server().addresses()[0]);
  connection.Send(HelloBytes(std::string(rpc_limits::kStrangerStringBytes + 1, 't')));
  EXPECT_TRUE(connection.WaitForEnd(10'000));
  EXPECT_TRUE(connection.received().empty());
}

TEST(RpcToken, NeverTravelsReadableToAnotherMachine) {
  RpcAddress far;
  far.host = "10.1.2.3";
  far.port = 7070;
  EXPECT_EQ(CheckTokenPath(far, true, false).code(), StatusCode::kInvalidArgument);
  EXPECT_OK(CheckTokenPath(far, true, true));
  EXPECT_OK(CheckTokenPath(far, false, false));
  EXPECT_EQ(Client::Create("10.1.2.3:7070", {.token = kToken}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(Client::Create("example.org:7070", {.token = kToken}).status().code(),
            StatusCode::kInvalidArgument);
  for (const std::string near :
       {"127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/run/x"}) {
    EXPECT_OK(Client::Create(near, {.token = kToken}));
  }
  TemporaryFolder folder;
  const auto store = OpenStore(folder.path() / "store");
  Ingest ingest(*store, {}, SystemClock());
  Pipeline pipeline(*store, {.merge = RefuseToMerge, .threads = 1, .clock = SystemClock()});
  const Status started =
      RpcServer::Start(
          {.store = *store, .ingest = ingest, .pipeline = pipeline, .control = {.version = "test"}},
          {.addresses = {"0.0.0.0:0"}, .token = kToken})
          .status();
  EXPECT_EQ(started.code(), StatusCode::kInvalidArgument) << started.ToString();
}

TEST(RpcToken, IsReadFromAFile) {
  TemporaryFolder folder;
  const std::string path = (folder.path() / "token").string();
  const auto read = [&](const std::string& contents) {
    std::ofstream(path) << contents;
    return ReadTokenFile(path);
  };
  ASSERT_OK(read("  0123456789abcdef\r\nsecond line\n"));
  EXPECT_EQ(*read("  0123456789abcdef\r\nsecond line\n"), "0123456789abcdef");
  for (const std::string& bad :
       {std::string("short"), std::string(), std::string("\n\n"), std::string(5000, 't')}) {
    EXPECT_EQ(read(bad).status().code(), StatusCode::kInvalidArgument) << bad.size();
  }
  EXPECT_EQ(ReadTokenFile("/nonexistent").status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(SameToken("a", "a"));
  EXPECT_FALSE(SameToken("a", "b"));
  EXPECT_FALSE(SameToken("a", "aa"));
}

}  // namespace
}  // namespace stockpot
