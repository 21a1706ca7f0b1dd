#include "tests/unit/thrift/raw_connection.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <thrift/protocol/TMultiplexedProtocol.h>
#include <thrift/transport/TBufferTransports.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <fstream>
#include <utility>

#include "stockpot_rpc/CheckpointService.h"
#include "stockpot_rpc/stockpot_constants.h"
#include "thrift/limits.h"
#include "thrift/wire.h"

namespace stockpot {

RawConnection::RawConnection(const RpcAddress& address) {
  fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(address.port));
  EXPECT_EQ(::inet_pton(AF_INET, address.host.c_str(), &to.sin_addr), 1) << address.host;
  EXPECT_EQ(::connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
}

RawConnection::RawConnection(RawConnection&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), received_(std::move(other.received_)) {}

RawConnection::~RawConnection() {
  if (fd_ >= 0) ::close(fd_);
}

void RawConnection::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;  // closed on us, as it should
    bytes.remove_prefix(sent);
  }
}

void RawConnection::FinishSending() { ::shutdown(fd_, SHUT_WR); }

bool RawConnection::WaitForEnd(int timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  std::array<char, 65536> buffer;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
                          deadline - std::chrono::steady_clock::now())
                          .count();
    pollfd ready{.fd = fd_, .events = POLLIN, .revents = 0};
    if (left <= 0 || ::poll(&ready, 1, static_cast<int>(left)) <= 0) return false;
    const ssize_t got = ::recv(fd_, buffer.data(), buffer.size(), 0);
    if (got <= 0) return true;
    received_.append(buffer.data(), got);
  }
}

std::string ValidCallBytes() {
  using apache::thrift::protocol::TMultiplexedProtocol;
  using apache::thrift::transport::TMemoryBuffer;
  const auto memory = std::make_shared<TMemoryBuffer>();
  rpc::CheckpointServiceClient client(std::make_shared<TMultiplexedProtocol>(
      MakeWireProtocol(memory, rpc_limits::kClientMaxStringBytes), "checkpoint"));
  rpc::Shard shard;
  for (int i = 0; i < 4; ++i) {
    rpc::Tensor tensor;
    tensor.name = "model.layers." + std::to_string(i) + ".weight";
    tensor.dtype = "BF16";
    tensor.shape = {64, 32};
    tensor.data.bytes = 4096;
    tensor.data.chunks = {std::string(32, 'c')};
    shard.tensors.push_back(tensor);
  }
  shard.files["config.json"].bytes = 2;
  shard.metrics["loss"] = 1.5;
  client.send_commit_shard("0123456789abcdef", shard);
  return memory->getBufferAsString();
}

std::string HelloBytes(const std::string& token) {
  using apache::thrift::protocol::TMultiplexedProtocol;
  const auto memory = std::make_shared<apache::thrift::transport::TMemoryBuffer>();
  rpc::CheckpointServiceClient client(std::make_shared<TMultiplexedProtocol>(
      MakeWireProtocol(memory, rpc_limits::kClientMaxStringBytes), "checkpoint"));
  client.send_hello(rpc::g_stockpot_constants.PROTOCOL_VERSION, token);
  return memory->getBufferAsString();
}

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

}  // namespace stockpot
