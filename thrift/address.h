// Where a daemon listens: "HOST:PORT", "[IPV6]:PORT" or "unix:/path/of/socket".
#pragma once

#include <string>
#include <string_view>

#include "kernels/base/status.h"

namespace stockpot {

// What clients and the daemon use when nothing is said.
inline constexpr std::string_view kDefaultRpcAddress = "127.0.0.1:7070";

struct RpcAddress {
  std::string unix_path;  // not empty: a unix socket, host and port unused
  std::string host;
  int port = 0;  // 0: the server picks one

  bool is_unix() const { return !unix_path.empty(); }
  std::string ToString() const;  // the form that ParseRpcAddress reads
};

// Bytes to it do not leave the machine: a unix socket, "localhost", 127.0.0.0/8 or ::1. Any other
// host name may be somewhere else.
bool IsLocal(const RpcAddress& address);

// InvalidArgument quotes the text and says what is accepted.
Result<RpcAddress> ParseRpcAddress(std::string_view text);

}  // namespace stockpot
