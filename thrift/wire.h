// How bytes travel, the same on both sides: strict binary protocol over a buffered transport whose
// every limit is ours. Internal to thrift/.
//
// Thrift 0.17 leaves holes that WireTransport and WireProtocol close:
//   - the count of received bytes is never reset on a server's input, so that a connection is
//     dropped after 100 MiB of strings: here every message starts at zero;
//   - that count covers only strings that fit the buffer: here everything that comes off the
//   socket;
//   - one receive time-out serves a client that is idle and one that stopped in the middle of a
//     message, and each byte that drips in starts it anew: here they differ, and a message has to
//     arrive at a least rate (rpc_limits);
//   - a string is allocated at its announced length: here it grows with what arrives;
//   - a list is allocated at its announced length, 50 MB for twenty bytes of a list of structs: the
//     generated code does that, so here it is accounted for before (CallMemory);
//   - the type of a message, field or element goes into an enum that cannot hold every byte, which
//     is undefined: here a type that there is not ends the connection before.
#pragma once

#include <thrift/protocol/TBinaryProtocol.h>
#include <thrift/transport/TBufferTransports.h>
#include <thrift/transport/TSocket.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "thrift/limits.h"

namespace stockpot {

struct WireOptions {
  int idle_timeout_ms = 0;     // of receiving between two messages; 0: the socket's own
  int message_timeout_ms = 0;  // of receiving within a message, and before the first; likewise
  int32_t max_message_bytes = rpc_limits::kMaxMessageBytes;
  uint32_t read_buffer_bytes = rpc_limits::kBufferBytes;
  uint32_t write_buffer_bytes = rpc_limits::kBufferBytes;
};

std::shared_ptr<apache::thrift::TConfiguration> WireConfiguration(
    int32_t max_message_bytes = rpc_limits::kMaxMessageBytes);

// Thrift writes what it thinks about to stderr from wherever it stands; here every error is a
// Status or a closed connection, so it is told to be quiet, and to leave OpenSSL's state to
// OpenSSL. Once a process, both sides call it.
void SilenceThriftOutput();

// One direction (server) or both (client) of one connection. Thread promise: one thread at a time.
class WireTransport : public apache::thrift::transport::TBufferedTransport {
 public:
  WireTransport(std::shared_ptr<apache::thrift::transport::TSocket> socket,
                const WireOptions& options);

  // Long reads go straight into the caller's memory. Throws TTransportException when one message is
  // longer than max_message_bytes, or arrives too slowly.
  uint32_t readSlow(uint8_t* buffer, uint32_t length) override;
  uint32_t readEnd() override;  // the message is complete: the next one starts at zero

 private:
  void Received(uint32_t bytes);

  const std::shared_ptr<apache::thrift::transport::TSocket> socket_;
  const WireOptions options_;
  bool idle_ = false;          // between two messages: the idle time-out is set
  int64_t message_bytes_ = 0;  // off the socket since the last readEnd
  std::chrono::steady_clock::time_point message_start_;  // set with its first bytes
};

// The memory that a server's calls hold beyond what each connection has free. Thread promise: any.
class CallMemory {
 public:
  explicit CallMemory(int64_t bytes) : left_(bytes) {}
  // False: there is not so much left; nothing is taken.
  bool Take(int64_t bytes);
  void GiveBack(int64_t bytes) { left_ += bytes; }

 private:
  std::atomic<int64_t> left_;
};

// Thread promise: one thread at a time.
class WireProtocol
    : public apache::thrift::protocol::TVirtualProtocol<
          WireProtocol,
          apache::thrift::protocol::TBinaryProtocolT<apache::thrift::transport::TTransport>> {
 public:
  // `memory`: of the server; null: a client, which trusts its daemon.
  WireProtocol(std::shared_ptr<apache::thrift::transport::TTransport> transport,
               int32_t max_string_bytes, CallMemory* memory);
  ~WireProtocol() override { EndCall(); }

  // What the call took is free again. The caller's duty, after its answer.
  void EndCall();

  uint32_t readMessageBegin(std::string& name, apache::thrift::protocol::TMessageType& type,
                            int32_t& sequence);
  uint32_t readFieldBegin(std::string& name, apache::thrift::protocol::TType& type, int16_t& id);
  uint32_t readListBegin(apache::thrift::protocol::TType& element, uint32_t& size);
  uint32_t readSetBegin(apache::thrift::protocol::TType& element, uint32_t& size);
  uint32_t readMapBegin(apache::thrift::protocol::TType& key,
                        apache::thrift::protocol::TType& value, uint32_t& size);
  uint32_t readString(std::string& text);
  uint32_t readBinary(std::string& data) { return readString(data); }

 private:
  void Take(int64_t bytes);
  uint32_t ReadType(apache::thrift::protocol::TType& type);
  uint32_t ReadSize(uint32_t& size);

  const int32_t piece_bytes_;
  CallMemory* const memory_;
  int64_t call_bytes_ = 0;
  int64_t taken_ = 0;  // of memory_
};

// `max_string_bytes`: rpc_limits::kServerMaxStringBytes or kClientMaxStringBytes.
std::shared_ptr<WireProtocol> MakeWireProtocol(
    std::shared_ptr<apache::thrift::transport::TTransport> transport, int32_t max_string_bytes,
    CallMemory* memory = nullptr);

}  // namespace stockpot
