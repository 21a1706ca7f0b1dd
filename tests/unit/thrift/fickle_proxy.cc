#include "tests/unit/thrift/fickle_proxy.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <climits>

namespace stockpot {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// False: the end, of either.
bool Pass(int from, int to) {
  std::array<char, 65536> buffer;
  const ssize_t got = ::recv(from, buffer.data(), buffer.size(), 0);
  return got > 0 && ::send(to, buffer.data(), got, MSG_NOSIGNAL) == got;
}

}  // namespace

FickleProxy::FickleProxy(const RpcAddress& server, int answers_first)
    : server_(server), answers_first_(answers_first) {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in own = Loopback(0);
  socklen_t size = sizeof own;
  EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&own), size), 0);
  EXPECT_EQ(::listen(listener_, 8), 0);
  EXPECT_EQ(::getsockname(listener_, reinterpret_cast<sockaddr*>(&own), &size), 0);
  address_ = "127.0.0.1:" + std::to_string(ntohs(own.sin_port));
  thread_ = std::thread([this] { Serve(); });
}

FickleProxy::~FickleProxy() {
  ::shutdown(listener_, SHUT_RDWR);
  thread_.join();
  ::close(listener_);
}

void FickleProxy::Serve() {
  std::vector<std::thread> threads;
  for (int client; (client = ::accept(listener_, nullptr, nullptr)) >= 0;) {
    const int answers = connections_++ == 0 ? answers_first_ : INT_MAX;
    threads.emplace_back([this, client, answers] { Forward(client, answers); });
  }
  for (std::thread& thread : threads) thread.join();
}

void FickleProxy::Forward(int client, int answers) {
  const int server = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in to = Loopback(server_.port);
  if (::connect(server, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0) {
    while (answers-- > 0 && Pass(client, server) && Pass(server, client)) {
    }
    std::array<char, 1> call;  // arrives, and is not answered
    if (answers < 0) (void)::recv(client, call.data(), call.size(), 0);
  }
  ::close(server);
  ::close(client);
}

}  // namespace stockpot
