#include "tests/unit/engine/http_client.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

namespace stockpot::test {
namespace {

constexpr int kPatienceSeconds = 120;

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

}  // namespace

Json HttpReply::json() const { return Json::parse(body, nullptr, /*allow_exceptions=*/false); }

HttpClient::HttpClient(uint16_t port) {
  socket_ = ::socket(AF_INET, SOCK_STREAM, 0);
  const timeval patience{.tv_sec = kPatienceSeconds};
  ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  ::setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  const int one = 1;
  ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) Close();
}

HttpClient::~HttpClient() { Close(); }

void HttpClient::Close() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
}

void HttpClient::SetReceiveBufferBytes(int bytes) {
  ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

bool HttpClient::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

bool HttpClient::Fill() {
  char bytes[16 << 10];
  const ssize_t got = ::recv(socket_, bytes, sizeof bytes, 0);
  if (got <= 0) return false;
  buffer_.append(bytes, static_cast<size_t>(got));
  return true;
}

bool HttpClient::ReadUntil(size_t bytes) {
  while (buffer_.size() < bytes) {
    if (!Fill()) return false;
  }
  return true;
}

bool HttpClient::WaitForData() { return !buffer_.empty() || Fill(); }

bool HttpClient::AtEnd() { return buffer_.empty() && !Fill(); }

HttpReply HttpClient::Receive() {
  HttpReply reply;
  size_t end;
  while ((end = buffer_.find("\r\n\r\n")) == std::string::npos) {
    if (!Fill()) return {};
  }
  const std::string head = buffer_.substr(0, end);
  buffer_.erase(0, end + 4);
  size_t at = head.find("\r\n");
  if (head.size() < 12 || !head.starts_with("HTTP/1.1 ")) return {};
  const int status = std::atoi(head.c_str() + 9);
  while (at != std::string::npos) {
    const size_t next = head.find("\r\n", at + 2);
    const std::string line = head.substr(at + 2, next == std::string::npos ? next : next - at - 2);
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) {
      reply.headers[Lower(line.substr(0, colon))] = line.substr(colon + 2);
    }
    at = next;
  }
  if (status == 100) return Receive();
  if (reply.headers.contains("content-length")) {
    const size_t length = std::stoul(reply.headers["content-length"]);
    if (!ReadUntil(length)) return {};
    reply.body = buffer_.substr(0, length);
    buffer_.erase(0, length);
  } else if (reply.headers.contains("transfer-encoding")) {
    for (;;) {
      size_t line;
      while ((line = buffer_.find("\r\n")) == std::string::npos) {
        if (!Fill()) return {};
      }
      const size_t size = std::stoul(buffer_, nullptr, 16);
      if (!ReadUntil(line + 2 + size + 2)) return {};
      reply.body += buffer_.substr(line + 2, size);
      buffer_.erase(0, line + 2 + size + 2);
      if (size == 0) break;
    }
  } else {
    while (Fill()) {
    }
    reply.body = std::exchange(buffer_, {});
  }
  reply.status = status;
  return reply;
}

HttpReply HttpClient::Get(const std::string& path) {
  if (!Send("GET " + path + " HTTP/1.1\r\nhost: test\r\n\r\n")) return {};
  return Receive();
}

HttpReply HttpClient::Post(const std::string& path, const std::string& body) {
  if (!Send(PostText(path, body))) return {};
  return Receive();
}

std::string PostText(const std::string& path, const std::string& body) {
  return "POST " + path +
         " HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body;
}

std::vector<std::string> SseData(const std::string& body) {
  std::vector<std::string> data;
  size_t at = 0;
  while (at < body.size()) {
    const size_t end = body.find("\n\n", at);
    if (end == std::string::npos) {
      ADD_FAILURE() << "an event without an end: " << body.substr(at);
      break;
    }
    const std::string event = body.substr(at, end - at);
    at = end + 2;
    if (event.starts_with(":")) continue;
    if (!event.starts_with("data: ") || event.find('\n') != std::string::npos) {
      ADD_FAILURE() << "no event of one data line: " << event;
      continue;
    }
    data.push_back(event.substr(6));
  }
  return data;
}

}  // namespace stockpot::test
