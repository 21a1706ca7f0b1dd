#include "thrift/wire.h"

#include <thrift/TOutput.h>

#include <mutex>

namespace stockpot {

using apache::thrift::TConfiguration;
using apache::thrift::transport::TSocket;
using apache::thrift::transport::TTransport;
using apache::thrift::transport::TTransportException;

std::shared_ptr<TConfiguration> WireConfiguration(int32_t max_message_bytes) {
  return std::make_shared<TConfiguration>(max_message_bytes, max_message_bytes,
                                          rpc_limits::kRecursionDepth);
}

void SilenceThriftOutput() {
  static std::once_flag once;
  std::call_once(once, [] { apache::thrift::GlobalOutput.setOutputFunction([](const char*) {}); });
}

WireTransport::WireTransport(std::shared_ptr<TSocket> socket, const WireOptions& options)
    : TBufferedTransport(socket, rpc_limits::kBufferBytes,
                         WireConfiguration(options.max_message_bytes)),
      socket_(std::move(socket)),
      options_(options) {
  if (options_.message_timeout_ms > 0) socket_->setRecvTimeout(options_.message_timeout_ms);
}

void WireTransport::Received(uint32_t bytes) {
  if (idle_) socket_->setRecvTimeout(options_.message_timeout_ms);
  idle_ = false;
  message_bytes_ += bytes;
  if (message_bytes_ > int64_t{options_.max_message_bytes} + rpc_limits::kBufferBytes) {
    throw TTransportException(TTransportException::CORRUPTED_DATA, "message over the size limit");
  }
}

uint32_t WireTransport::readSlow(uint8_t* buffer, uint32_t length) {
  if (rBase_ == rBound_ && length >= rBufSize_) {
    const uint32_t got = socket_->read(buffer, length);
    Received(got);
    return got;
  }
  const bool refills = rBase_ == rBound_;
  const uint32_t given = TBufferedTransport::readSlow(buffer, length);
  if (refills) Received(given + static_cast<uint32_t>(rBound_ - rBase_));
  return given;
}

uint32_t WireTransport::readEnd() {
  message_bytes_ = 0;
  resetConsumedMessageSize();
  // Bytes that are here already belong to a message that has begun.
  if (options_.idle_timeout_ms > 0 && rBase_ == rBound_) {
    socket_->setRecvTimeout(options_.idle_timeout_ms);
    idle_ = true;
  }
  return 0;
}

std::shared_ptr<WireProtocol> MakeWireProtocol(std::shared_ptr<TTransport> transport,
                                               int32_t max_string_bytes) {
  return std::make_shared<WireProtocol>(std::move(transport), max_string_bytes,
                                        rpc_limits::kMaxContainerElements, /*strict_read=*/true,
                                        /*strict_write=*/true);
}

}  // namespace stockpot
