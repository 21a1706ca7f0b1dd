#include "serve/http/connection.h"

#include <algorithm>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <string>
#include <utility>

#include "serve/http/api_error.h"
#include "serve/http/connection_exchange.h"
#include "serve/http/connection_state.h"
#include "serve/http/limits.h"
#include "serve/http/url.h"

namespace stockpot {
namespace {

constexpr int64_t kRefusalWriteMs = 5'000;

}  // namespace

void Connection::Start(bool refuse) {
  asio::dispatch(executor(), [self = shared_from_this(), refuse] {
    error_code ignored;
    self->socket_.set_option(tcp::no_delay(true), ignored);
    if (!refuse) return self->ReadRequest();
    self->SetDeadline(kRefusalWriteMs);
    self->Refuse(503, "too many connections");
  });
}

void Connection::Close() {
  asio::post(executor(), [self = shared_from_this()] { self->Disconnect(); });
}

void Connection::CloseIfIdle() {
  asio::post(executor(), [self = shared_from_this()] {
    if (self->phase_ == Phase::kReading && !self->writing_) self->Disconnect();
  });
}

void Connection::ReadRequest() {
  if (phase_ == Phase::kClosed) return;
  phase_ = Phase::kReading;
  replied_ = false;
  parser_.emplace();
  parser_->header_limit(kMaxHeaderBytes);
  parser_->body_limit(kMaxBodyBytes);
  SetDeadline(buffer_.size() > 0 ? context_.read_timeout_ms : context_.idle_timeout_ms);
  http::async_read_header(
      socket_, buffer_, *parser_,
      [self = shared_from_this()](error_code error, size_t) { self->OnHeader(error); });
}

void Connection::OnHeader(error_code error) {
  if (phase_ == Phase::kClosed) return;
  if (error == http::error::body_limit) {
    return Refuse(413, "the body is larger than " + std::to_string(kMaxBodyBytes) + " bytes");
  }
  if (error == http::error::header_limit) return Refuse(431, "the headers are too large");
  if (error) return OnReadError(error);
  const auto length = parser_->content_length();
  int64_t wanted = 0;
  if (length) {
    wanted = static_cast<int64_t>(std::min<uint64_t>(*length, kMaxBodyBytes));
  } else if (parser_->chunked()) {
    wanted = static_cast<int64_t>(kMaxBodyBytes);
  }
  if (!ReserveBody(wanted)) return Refuse(503, "too many large requests at once");
  SetDeadline(context_.read_timeout_ms);
  if (beast::iequals(parser_->get()[http::field::expect], "100-continue")) {
    asio::async_write(socket_, asio::buffer(std::string_view("HTTP/1.1 100 Continue\r\n\r\n")),
                      [self = shared_from_this()](error_code e, size_t) {
                        if (e) return self->Disconnect();
                        self->ReadBody();
                      });
    return;
  }
  ReadBody();
}

// Broken HTTP is answered; a client that closed, or a socket that failed, is not there to read it.
void Connection::OnReadError(error_code error) {
  const bool broken = error.category() == http::make_error_code(http::error::bad_chunk).category();
  const bool left = error == http::error::end_of_stream || error == http::error::partial_message;
  if (!broken || left) return Disconnect();
  Refuse(400, "malformed HTTP: " + error.message());
}

void Connection::ReadBody() {
  if (phase_ == Phase::kClosed) return;
  http::async_read(socket_, buffer_, *parser_,
                   [self = shared_from_this()](error_code error, size_t) { self->OnBody(error); });
}

void Connection::OnBody(error_code error) {
  if (phase_ == Phase::kClosed) return;
  if (error == http::error::body_limit) {
    return Refuse(413, "the body is larger than " + std::to_string(kMaxBodyBytes) + " bytes");
  }
  if (error) return OnReadError(error);
  ClearDeadline();
  Dispatch();
}

void Connection::Dispatch() {
  auto message = parser_->release();
  parser_.reset();
  keep_alive_ = message.keep_alive() && !context_.closing;
  chunked_ = message.version() >= 11;
  head_only_ = message.method() == http::verb::head;
  const std::string_view target(message.target().data(), message.target().size());
  const size_t question = target.find('?');
  auto path = PercentDecode(target.substr(0, question), /*plus_is_space=*/false);
  if (!path || path->empty() || path->front() != '/') {
    return Refuse(400, "malformed request target");
  }
  HttpRequest request{
      .method = std::string(message.method_string()),
      .path = std::move(*path),
      .query = question == std::string_view::npos ? "" : std::string(target.substr(question + 1)),
      .body = std::move(message.body()),
      .arrival = std::chrono::steady_clock::now()};
  phase_ = Phase::kHandling;
  context_.handler(
      std::make_shared<ConnectionExchange>(shared_from_this(), std::move(request), ++number_));
  if (phase_ == Phase::kHandling && !replied_) Watch();
}

// Replies on its own, before or without a handler, and closes.
void Connection::Refuse(int status, std::string_view message) {
  keep_alive_ = false;
  linger_ = true;
  phase_ = Phase::kHandling;
  Respond({}, PlainHttpError(status, message));
}

void Connection::Watch() {
  if (watching_ || buffer_.size() >= kMaxPipelinedBytes) return;
  watching_ = true;
  socket_.async_read_some(buffer_.prepare(4096),
                          [self = shared_from_this()](error_code error, size_t bytes) {
                            self->OnWatched(error, bytes);
                          });
}

void Connection::OnWatched(error_code error, size_t bytes) {
  watching_ = false;
  if (phase_ == Phase::kClosed) return;
  const bool ended_by_us = error == asio::error::operation_aborted && phase_ == Phase::kReading;
  if (error && !ended_by_us) return Disconnect();
  buffer_.commit(bytes);
  if (phase_ == Phase::kReading) return ReadRequest();  // the reply is out; these start the next
  Watch();
}

void Connection::SetDeadline(int64_t ms) {
  deadline_.expires_after(std::chrono::milliseconds(ms));
  deadline_.async_wait([weak = weak_from_this()](error_code error) {
    if (error) return;  // moved or cleared
    const auto self = weak.lock();
    // A handler that was queued before the deadline moved finds it in the future.
    if (self && self->deadline_.expiry() <= std::chrono::steady_clock::now()) self->Disconnect();
  });
}

void Connection::Disconnect() {
  if (phase_ == Phase::kClosed) return;
  phase_ = Phase::kClosed;
  deadline_.cancel();
  error_code ignored;
  socket_.close(ignored);
  if (!writing_) unsent_.clear();  // else the write that fails now still reads the front
  ReleaseBody();
  if (auto callback = std::exchange(on_disconnect_, nullptr)) callback();
}

bool Connection::ReserveBody(int64_t bytes) {
  if (context_.body_bytes.fetch_add(bytes) + bytes > kMaxBodiesInFlightBytes) {
    context_.body_bytes.fetch_sub(bytes);
    return false;
  }
  reserved_body_ = bytes;
  return true;
}

void Connection::ReleaseBody() { context_.body_bytes.fetch_sub(std::exchange(reserved_body_, 0)); }

std::shared_ptr<ConnectionHandle> StartConnection(tcp::socket socket, ConnectionContext& context,
                                                  bool refuse) {
  auto connection = std::make_shared<Connection>(std::move(socket), context);
  connection->Start(refuse);
  return connection;
}

}  // namespace stockpot
