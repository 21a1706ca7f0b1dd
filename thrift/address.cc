#include "thrift/address.h"

#include <arpa/inet.h>

#include <charconv>

namespace stockpot {
namespace {

constexpr size_t kMaxUnixPathBytes = 107;  // sockaddr_un::sun_path without its terminator

Status BadAddress(std::string_view text, std::string_view why) {
  return InvalidArgument("'" + std::string(text) + "' is no address (" + std::string(why) +
                         "): write HOST:PORT, [IPV6]:PORT or unix:/path");
}

}  // namespace

std::string RpcAddress::ToString() const {
  if (is_unix()) return "unix:" + unix_path;
  const bool ipv6 = host.find(':') != std::string::npos;
  return (ipv6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

bool IsLocal(const RpcAddress& address) {
  if (address.is_unix() || address.host == "localhost") return true;
  in_addr v4{};
  if (::inet_pton(AF_INET, address.host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6{};
  return ::inet_pton(AF_INET6, address.host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

Result<RpcAddress> ParseRpcAddress(std::string_view text) {
  RpcAddress address;
  if (text.substr(0, 5) == "unix:") {
    address.unix_path = text.substr(5);
    if (address.unix_path.empty()) return BadAddress(text, "no path");
    if (address.unix_path.size() > kMaxUnixPathBytes)
      return BadAddress(text, "path over 107 bytes");
    if (address.unix_path.find('\0') != std::string::npos) return BadAddress(text, "a zero byte");
    return address;
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return BadAddress(text, "no port");
  std::string_view host = text.substr(0, colon);
  const std::string_view port = text.substr(colon + 1);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return BadAddress(text, "IPv6 without brackets");
  }
  if (host.empty()) return BadAddress(text, "no host");
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (error != std::errc() || end != port.data() + port.size() || address.port < 0 ||
      address.port > 65535) {
    return BadAddress(text, "the port is not 0..65535");
  }
  address.host = host;
  return address;
}

}  // namespace stockpot
