// What a daemon's store and server need while ranks push, measured in a process that is only that.
#include <thread>

#include "tests/unit/thrift/ingest_process.h"
#include "tests/unit/thrift/rpc_world.h"
#include "thrift/upload.h"

namespace stockpot {
namespace {

constexpr int kRanks = 4;
constexpr int kConnections = 4;  // of a rank; the hook has 2
constexpr int64_t kTensorBytes = int64_t{64} << 20;
constexpr int64_t kRankBytes = 3 * kTensorBytes;
constexpr int64_t kMemoryLimit = int64_t{300} * 1000 * 1000;

void Push(const std::string& address, int rank, std::span<const std::byte> data) {
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<Client*> borrowed;
  for (int i = 0; i < kConnections; ++i) {
    auto client = Client::Connect(address);
    ASSERT_OK(client);
    clients.push_back(*std::move(client));
    borrowed.push_back(clients.back().get());
  }
  rpc::SessionRequest request;
  request.kind = rpc::Kind::BASE;
  request.run = "rank" + std::to_string(rank);
  ASSERT_OK(UploadArtifact(borrowed, request, MemoryModel(data, kTensorBytes), {}));
}

TEST(RpcMemory, StaysUnder300MBWhileFourRanksPush64MiBTensors) {
  TemporaryFolder folder;
  const auto process = IngestProcess::Start(STOCKPOT_INGEST_SERVER, folder.path() / "store");
  ASSERT_OK(process);
  const int64_t before = (*process)->resident_bytes();
  std::mt19937_64 random(TestSeed());
  std::vector<std::byte> data(kRanks * kRankBytes);
  for (size_t i = 0; i < data.size(); i += 8) {
    const uint64_t word = random();
    std::memcpy(data.data() + i, &word, sizeof word);
  }
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      Push((*process)->address(), rank,
           std::span(data).subspan(static_cast<size_t>(rank * kRankBytes), kRankBytes));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  const int64_t peak = (*process)->peak_resident_bytes();
  std::printf("resident memory: %.0f MB at the start, %.0f MB at its peak, for %.0f MB of data\n",
              before / 1e6, peak / 1e6, static_cast<double>(data.size()) / 1e6);
  EXPECT_GT(before, 0);
  EXPECT_LT(peak, kMemoryLimit);
}

}  // namespace
}  // namespace stockpot
