// The way from a trainer's memory over loopback into a daemon's store, beside its yardsticks,
// measured in one run: one raw direct-I/O file with one fdatasync, and one raw TCP copy.
//
//   rpc_bench [--quick] [--only SUBSTRING] [--dir DIRECTORY]
//
// ingest_loopback: client and server are two processes that share the cores; both hash every chunk.
// connection_vs_tcp: one connection, put_chunk calls of a session that does not exist, so that they
// are received whole and answered before anybody hashes.
#include <netinet/in.h>
#include <sys/socket.h>
#include <thrift/protocol/TMultiplexedProtocol.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "stockpot_rpc/CheckpointService.h"
#include "tests/bench/bench.h"
#include "tests/bench/raw_disk.h"
#include "tests/unit/thrift/ingest_process.h"
#include "thrift/upload.h"
#include "thrift/wire.h"

namespace stockpot {
namespace {

constexpr int64_t kTensorBytes = int64_t{64} << 20;
constexpr int kConnections = 4;
constexpr int kInFlight = 4;

double IngestSeconds(std::span<Client* const> clients, const std::string& name,
                     std::span<const std::byte> data) {
  rpc::SessionRequest request;
  request.kind = rpc::Kind::BASE;
  request.run = name;
  const MemoryModel model(data, kTensorBytes);
  const double begin = Seconds();
  const Result<UploadReport> report =
      UploadArtifact(clients, request, model, {},
                     {.borrow = [&](const std::string& tensor, int64_t offset, int64_t size) {
                       return model.Borrow(tensor, offset, size);
                     }});
  if (!report.ok()) Die(report.status().ToString());
  return Seconds() - begin;
}

void BenchIngest(const BenchReport& report, const std::string& address, const BenchFolder& folder) {
  if (!report.Wants({"ingest_loopback"})) return;
  const int64_t bytes = report.options().quick ? int64_t{256} << 20 : int64_t{1} << 30;
  const int rounds = report.options().Rounds(7);
  BenchData data(bytes);
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<Client*> borrowed;
  for (int i = 0; i < kConnections; ++i) {
    Result<std::unique_ptr<Client>> client = Client::Connect(address);
    if (!client.ok()) Die(client.status().ToString());
    clients.push_back(*std::move(client));
    borrowed.push_back(clients.back().get());
  }
  std::vector<double> ratios;
  for (int round = 0; round < rounds; ++round) {
    data.Stamp(2 * round);
    const double raw = RawWriteSeconds(folder, data.span());
    data.Stamp(2 * round + 1);
    const double ingest = IngestSeconds(borrowed, "round" + std::to_string(round), data.span());
    const double again = RawWriteSeconds(folder, data.span());
    ratios.push_back((raw + again) / 2 / ingest);
    const double mb = static_cast<double>(bytes) / 1e6;
    std::fprintf(stderr, "round %d: raw %.0f and %.0f MB/s, over loopback %.0f MB/s\n", round,
                 mb / raw, mb / again, mb / ingest);
  }
  report.Ratio("ingest_loopback", Median(ratios),
               {.goal = 0.5, .limit = 1.0, .better = Budget::Better::kHigher},
               std::to_string(bytes >> 20) + " MiB in tensors of 64 MiB, C++ client, " +
                   std::to_string(kConnections) +
                   " connections, SHA-256 on both sides, median of " + std::to_string(rounds));
}

// Sends to a thread that throws the bytes away.
double RawTcpSeconds(std::span<const std::byte> data) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::listen(listener, 1) != 0 ||
      ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    Die("no loopback socket");
  }
  std::thread sink([&] {
    std::vector<char> buffer(size_t{4} << 20);
    const int peer = ::accept(listener, nullptr, nullptr);
    while (::recv(peer, buffer.data(), buffer.size(), 0) > 0) {
    }
    ::close(peer);
  });
  const int out = ::socket(AF_INET, SOCK_STREAM, 0);
  if (::connect(out, reinterpret_cast<sockaddr*>(&address), size) != 0) Die("connect");
  const double begin = Seconds();
  for (std::span<const std::byte> rest = data; !rest.empty();) {
    const ssize_t sent = ::send(out, rest.data(), rest.size(), 0);
    if (sent <= 0) Die("send");
    rest = rest.subspan(static_cast<size_t>(sent));
  }
  ::close(out);
  sink.join();
  ::close(listener);
  return Seconds() - begin;
}

double CallsSeconds(const RpcAddress& address, int64_t calls, const std::string& chunk) {
  const auto socket = std::make_shared<apache::thrift::transport::TSocket>(
      address.host, address.port, WireConfiguration());
  socket->setNoDelay(true);
  const auto transport = std::make_shared<WireTransport>(socket, WireOptions{});
  rpc::CheckpointServiceClient client(
      std::make_shared<apache::thrift::protocol::TMultiplexedProtocol>(
          MakeWireProtocol(transport, rpc_limits::kClientMaxStringBytes), "checkpoint"));
  transport->open();
  const auto receive = [&] {
    try {
      client.recv_put_chunk();
      Die("a session that does not exist took a chunk");
    } catch (const rpc::Error&) {
      // As expected: received, and refused.
    }
  };
  const std::string digest(32, 'd');
  const double begin = Seconds();
  for (int64_t i = 0; i < calls; ++i) {
    if (i >= kInFlight) receive();
    client.send_put_chunk("nobody", digest, chunk);
  }
  for (int i = 0; i < kInFlight; ++i) receive();
  return Seconds() - begin;
}

void BenchConnection(const BenchReport& report, const std::string& address) {
  if (!report.Wants({"connection_vs_tcp"})) return;
  const int64_t calls = report.options().quick ? 64 : 256;
  const int rounds = report.options().Rounds(7);
  const std::string chunk(kChunkBytes, 'c');
  const BenchData data(calls * kChunkBytes);
  std::vector<double> ratios;
  std::vector<double> rates;
  for (int round = 0; round < rounds; ++round) {
    const double raw = RawTcpSeconds(data.span());
    const double ours = CallsSeconds(*ParseRpcAddress(address), calls, chunk);
    const double again = RawTcpSeconds(data.span());
    const double gb = static_cast<double>(calls * kChunkBytes) / 1e9;
    ratios.push_back((raw + again) / 2 / ours);
    rates.push_back(gb / ours);
    std::fprintf(stderr, "round %d: raw TCP %.2f and %.2f GB/s, put_chunk %.2f GB/s\n", round,
                 gb / raw, gb / again, gb / ours);
  }
  char sizes[160];
  std::snprintf(sizes, sizeof sizes,
                "put_chunk of 4 MiB, %d in flight, one connection: %.2f GB/s; median of %d",
                kInFlight, Median(rates), rounds);
  report.Ratio("connection_vs_tcp", Median(ratios),
               {.goal = 1 / 1.5, .limit = 1.0, .better = Budget::Better::kHigher}, sizes);
}

void Bench(const BenchReport& report) {
  if (!report.Wants({"ingest_loopback", "connection_vs_tcp"})) return;
  const BenchFolder folder(report.options().directory);
  const auto process = IngestProcess::Start(STOCKPOT_INGEST_SERVER, folder.path() / "store");
  if (!process.ok()) Die(process.status().ToString());
  BenchIngest(report, (*process)->address(), folder);
  BenchConnection(report, (*process)->address());
}

}  // namespace
}  // namespace stockpot

int main(int argc, char** argv) { return stockpot::BenchMain(argc, argv, stockpot::Bench); }
