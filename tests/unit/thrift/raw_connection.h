// A TCP connection without Thrift, for saying things to the server that no client says.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "thrift/address.h"

namespace stockpot {

class RawConnection {
 public:
  explicit RawConnection(const RpcAddress& address);
  ~RawConnection();
  RawConnection(RawConnection&& other) noexcept;
  RawConnection(const RawConnection&) = delete;

  // Sends what the server still takes.
  void Send(std::string_view bytes);
  void FinishSending();
  // Reads until the server closes; false if it did not within the time.
  bool WaitForEnd(int timeout_ms);
  const std::string& received() const { return received_; }

 private:
  int fd_ = -1;
  std::string received_;
};

// The call commit_shard of a session that does not exist, as it travels: something to spoil.
std::string ValidCallBytes();

// The call hello with that token, as it travels.
std::string HelloBytes(const std::string& token);

int64_t ResidentBytes();  // of this process

}  // namespace stockpot
