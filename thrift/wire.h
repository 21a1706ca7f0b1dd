// How bytes travel, the same on both sides: strict binary protocol over a buffered transport whose
// buffers are large and whose every limit is ours. Internal to thrift/.
//
// Thrift 0.17 leaves three holes that WireTransport closes:
//   - the count of received bytes is never reset on a server's input, so that a connection is
//   dropped
//     after 100 MiB of strings: here every message starts at zero;
//   - that count covers only strings that fit the buffer: here everything that comes off the
//   socket;
//   - one receive time-out serves a client that is idle and one that stopped in the middle of a
//     message: here they differ (rpc_limits).
#pragma once

#include <thrift/protocol/TBinaryProtocol.h>
#include <thrift/transport/TBufferTransports.h>
#include <thrift/transport/TSocket.h>

#include <cstdint>
#include <memory>

#include "thrift/limits.h"

namespace stockpot {

struct WireOptions {
  int idle_timeout_ms = 0;     // of receiving between two messages; 0: the socket's own
  int message_timeout_ms = 0;  // of receiving within a message, and before the first; likewise
  int32_t max_message_bytes = rpc_limits::kMaxMessageBytes;
};

std::shared_ptr<apache::thrift::TConfiguration> WireConfiguration(
    int32_t max_message_bytes = rpc_limits::kMaxMessageBytes);

// Thrift writes what it thinks about to stderr from wherever it stands; here every error is a
// Status or a closed connection, so it is told to be quiet. Once a process, both sides call it.
void SilenceThriftOutput();

// One direction (server) or both (client) of one connection. Thread promise: one thread at a time.
class WireTransport : public apache::thrift::transport::TBufferedTransport {
 public:
  WireTransport(std::shared_ptr<apache::thrift::transport::TSocket> socket,
                const WireOptions& options);

  // Long reads go straight into the caller's memory. Throws TTransportException when one message is
  // longer than max_message_bytes.
  uint32_t readSlow(uint8_t* buffer, uint32_t length) override;
  uint32_t readEnd() override;  // the message is complete: the next one starts at zero

 private:
  void Received(uint32_t bytes);

  const std::shared_ptr<apache::thrift::transport::TSocket> socket_;
  const WireOptions options_;
  bool idle_ = false;          // between two messages: the idle time-out is set
  int64_t message_bytes_ = 0;  // off the socket since the last readEnd
};

using WireProtocol =
    apache::thrift::protocol::TBinaryProtocolT<apache::thrift::transport::TTransport>;

// `max_string_bytes`: rpc_limits::kServerMaxStringBytes or kClientMaxStringBytes.
std::shared_ptr<WireProtocol> MakeWireProtocol(
    std::shared_ptr<apache::thrift::transport::TTransport> transport, int32_t max_string_bytes);

}  // namespace stockpot
