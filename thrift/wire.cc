#include "thrift/wire.h"

#include <thrift/TOutput.h>
#include <thrift/transport/TSSLSocket.h>

#include <algorithm>
#include <mutex>

namespace stockpot {

using apache::thrift::TConfiguration;
using apache::thrift::protocol::TMessageType;
using apache::thrift::protocol::TProtocolException;
using apache::thrift::protocol::TType;
using apache::thrift::transport::TSocket;
using apache::thrift::transport::TTransport;
using apache::thrift::transport::TTransportException;

namespace {

using BinaryProtocol = apache::thrift::protocol::TBinaryProtocolT<TTransport>;
using SteadyClock = std::chrono::steady_clock;

int64_t ElementBytes(TType type) {
  switch (type) {
    case apache::thrift::protocol::T_STRUCT:
      return rpc_limits::kStructElementBytes;
    case apache::thrift::protocol::T_STRING:
    case apache::thrift::protocol::T_MAP:
    case apache::thrift::protocol::T_SET:
    case apache::thrift::protocol::T_LIST:
      return rpc_limits::kStringElementBytes;
    default:
      return rpc_limits::kOtherElementBytes;
  }
}

}  // namespace

std::shared_ptr<TConfiguration> WireConfiguration(int32_t max_message_bytes) {
  return std::make_shared<TConfiguration>(max_message_bytes, max_message_bytes,
                                          rpc_limits::kRecursionDepth);
}

void SilenceThriftOutput() {
  static std::once_flag once;
  std::call_once(once, [] {
    apache::thrift::GlobalOutput.setOutputFunction([](const char*) {});
    apache::thrift::transport::TSSLSocketFactory::setManualOpenSSLInitialization(true);
  });
}

WireTransport::WireTransport(std::shared_ptr<TSocket> socket, const WireOptions& options)
    : TBufferedTransport(socket, options.read_buffer_bytes, options.write_buffer_bytes,
                         WireConfiguration(options.max_message_bytes)),
      socket_(std::move(socket)),
      options_(options) {
  if (options_.message_timeout_ms > 0) socket_->setRecvTimeout(options_.message_timeout_ms);
}

void WireTransport::Received(uint32_t bytes) {
  if (idle_) socket_->setRecvTimeout(options_.message_timeout_ms);
  idle_ = false;
  if (message_bytes_ == 0) message_start_ = SteadyClock::now();
  message_bytes_ += bytes;
  if (message_bytes_ > int64_t{options_.max_message_bytes} + rpc_limits::kBufferBytes) {
    throw TTransportException(TTransportException::CORRUPTED_DATA, "message over the size limit");
  }
  if (options_.message_timeout_ms == 0) return;
  const auto lasts =
      std::chrono::duration_cast<std::chrono::milliseconds>(SteadyClock::now() - message_start_);
  if (lasts.count() > options_.message_timeout_ms + message_bytes_ / rpc_limits::kMinBytesPerMs) {
    throw TTransportException(TTransportException::TIMED_OUT, "message arrives too slowly");
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

bool CallMemory::Take(int64_t bytes) {
  if (left_.fetch_sub(bytes) >= bytes) return true;
  left_ += bytes;
  return false;
}

WireProtocol::WireProtocol(std::shared_ptr<TTransport> transport, int32_t max_string_bytes,
                           CallMemory* memory)
    : TVirtualProtocol(std::move(transport)),
      piece_bytes_(rpc_limits::kStringPieceBytes),
      memory_(memory) {
  setStringSizeLimit(max_string_bytes);
  setContainerSizeLimit(rpc_limits::kMaxContainerElements);
  setStrict(/*strict_read=*/true, /*strict_write=*/true);
}

void WireProtocol::Take(int64_t bytes) {
  if (memory_ == nullptr) return;
  call_bytes_ += bytes;
  const int64_t missing = call_bytes_ - rpc_limits::kFreeCallBytes - taken_;
  if (missing <= 0) return;
  if (!memory_->Take(missing)) {
    throw TProtocolException(TProtocolException::SIZE_LIMIT, "calls in progress hold too much");
  }
  taken_ += missing;
}

void WireProtocol::EndCall() {
  if (taken_ > 0) memory_->GiveBack(taken_);
  call_bytes_ = 0;
  taken_ = 0;
}

uint32_t WireProtocol::readMessageBegin(std::string& name, TMessageType& type, int32_t& sequence) {
  int32_t head = 0;
  uint32_t read = readI32(head);
  if ((head & VERSION_MASK) != VERSION_1) {
    throw TProtocolException(TProtocolException::BAD_VERSION, "no strict binary protocol");
  }
  const int32_t number = head & 0xff;
  if (number < apache::thrift::protocol::T_CALL || number > apache::thrift::protocol::T_ONEWAY) {
    throw TProtocolException(TProtocolException::INVALID_DATA, "unknown type of message");
  }
  type = static_cast<TMessageType>(number);
  read += readString(name);
  return read + readI32(sequence);
}

uint32_t WireProtocol::ReadType(TType& type) {
  int8_t number = 0;
  const uint32_t read = readByte(number);
  if (number < 0 || number > apache::thrift::protocol::T_LIST) {
    throw TProtocolException(TProtocolException::INVALID_DATA, "unknown type of value");
  }
  type = static_cast<TType>(number);
  return read;
}

uint32_t WireProtocol::ReadSize(uint32_t& size) {
  int32_t number = 0;
  const uint32_t read = readI32(number);
  if (number < 0) throw TProtocolException(TProtocolException::NEGATIVE_SIZE);
  if (number > container_limit_) throw TProtocolException(TProtocolException::SIZE_LIMIT);
  size = static_cast<uint32_t>(number);
  return read;
}

uint32_t WireProtocol::readFieldBegin(std::string& /*name*/, TType& type, int16_t& id) {
  const uint32_t read = ReadType(type);
  id = 0;
  return type == apache::thrift::protocol::T_STOP ? read : read + readI16(id);
}

uint32_t WireProtocol::readListBegin(TType& element, uint32_t& size) {
  uint32_t read = ReadType(element);
  read += ReadSize(size);
  apache::thrift::protocol::TList announced(element, size);
  checkReadBytesAvailable(announced);
  Take(size * ElementBytes(element));
  return read;
}

uint32_t WireProtocol::readSetBegin(TType& element, uint32_t& size) {
  uint32_t read = ReadType(element);
  read += ReadSize(size);
  apache::thrift::protocol::TSet announced(element, size);
  checkReadBytesAvailable(announced);
  Take(size * ElementBytes(element));
  return read;
}

uint32_t WireProtocol::readMapBegin(TType& key, TType& value, uint32_t& size) {
  uint32_t read = ReadType(key);
  read += ReadType(value);
  read += ReadSize(size);
  apache::thrift::protocol::TMap announced(key, value, size);
  checkReadBytesAvailable(announced);
  Take(size * (ElementBytes(key) + ElementBytes(value)));
  return read;
}

// In pieces, so that memory follows what has arrived: half of a chunk that never comes costs
// nothing.
uint32_t WireProtocol::readString(std::string& text) {
  int32_t size = 0;
  const uint32_t read = readI32(size);
  if (size < piece_bytes_) {
    Take(std::max(size, 0));
    return read + readStringBody(text, size);
  }
  if (string_limit_ > 0 && size > string_limit_) {
    throw TProtocolException(TProtocolException::SIZE_LIMIT);
  }
  text.clear();
  text.reserve(static_cast<size_t>(size));  // address space: pages come with the bytes
  for (int32_t have = 0; have < size;) {
    const int32_t piece = std::min(piece_bytes_, size - have);
    Take(piece);
    text.resize(static_cast<size_t>(have + piece));
    trans_->readAll(reinterpret_cast<uint8_t*>(text.data()) + have, static_cast<uint32_t>(piece));
    have += piece;
  }
  return read + static_cast<uint32_t>(size);
}

std::shared_ptr<WireProtocol> MakeWireProtocol(std::shared_ptr<TTransport> transport,
                                               int32_t max_string_bytes, CallMemory* memory) {
  return std::make_shared<WireProtocol>(std::move(transport), max_string_bytes, memory);
}

}  // namespace stockpot
