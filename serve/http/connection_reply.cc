// The writing half of a connection, and the exchange that handlers reply through.
#include <algorithm>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/status.hpp>
#include <cstdio>
#include <string>
#include <utility>

#include "serve/http/connection_exchange.h"
#include "serve/http/connection_state.h"
#include "serve/http/limits.h"

namespace stockpot {
namespace {

std::string_view ReasonPhrase(int status) {
  const auto text = http::obsolete_reason(http::int_to_status(static_cast<unsigned>(status)));
  return {text.data(), text.size()};
}

}  // namespace

template <typename Task>
void ConnectionExchange::OnStrand(Task task) {
  asio::dispatch(connection_->executor(),
                 [c = connection_, number = number_, task = std::move(task)]() mutable {
                   if (c->request_number() == number) task(*c);
                 });
}

ConnectionExchange::~ConnectionExchange() {
  asio::post(connection_->executor(), [c = connection_, number = number_] {
    if (c->request_number() == number) c->Dropped();
  });
}

void ConnectionExchange::Respond(HttpResponse response) {
  // The line is copied: the exchange may be gone when this runs.
  OnStrand([line = Line(), r = std::move(response)](Connection& c) mutable {
    c.Respond(line, std::move(r));
  });
}

void ConnectionExchange::BeginStream(std::string content_type, HttpHeaders headers) {
  OnStrand([line = Line(), type = std::move(content_type),
            headers = std::move(headers)](Connection& c) { c.BeginStream(line, type, headers); });
}

void ConnectionExchange::Write(std::string piece) {
  OnStrand([piece = std::move(piece)](Connection& c) mutable { c.WritePiece(std::move(piece)); });
}

void ConnectionExchange::EndStream() {
  OnStrand([](Connection& c) { c.EndStream(); });
}

void ConnectionExchange::OnDisconnect(std::function<void()> callback) {
  OnStrand([callback = std::move(callback)](Connection& c) mutable {
    c.SetOnDisconnect(std::move(callback));
  });
}

void ConnectionExchange::Post(std::function<void()> task) {
  asio::post(connection_->executor(), std::move(task));
}

std::string Connection::HeaderText(int status, const std::string& content_type,
                                   const HttpHeaders& headers,
                                   std::optional<size_t> content_length) const {
  std::string text = "HTTP/1.1 " + std::to_string(status) + " ";
  text.append(ReasonPhrase(status)).append("\r\ncontent-type: ").append(content_type);
  if (content_length) {
    text.append("\r\ncontent-length: ").append(std::to_string(*content_length));
  } else if (chunked_) {
    text.append("\r\ntransfer-encoding: chunked");
  }
  text.append("\r\nconnection: ").append(keep_alive_ ? "keep-alive" : "close");
  for (const auto& [name, value] : headers) {
    text.append("\r\n").append(name).append(": ").append(value);
  }
  return text.append("\r\n\r\n");
}

void Connection::Respond(const HttpRequest& request, HttpResponse response) {
  if (phase_ != Phase::kHandling || replied_) return;
  if (!request.path.empty()) context_.observer(request, response.status);
  std::string text =
      HeaderText(response.status, response.content_type, response.headers, response.body.size());
  if (!head_only_) text += response.body;
  replied_ = true;
  on_disconnect_ = nullptr;
  Send(std::move(text));
}

void Connection::BeginStream(const HttpRequest& request, const std::string& content_type,
                             const HttpHeaders& headers) {
  if (phase_ != Phase::kHandling || replied_) return;
  context_.observer(request, 200);
  if (!chunked_) keep_alive_ = false;  // HTTP/1.0: the end of the connection ends the body
  phase_ = Phase::kStreaming;
  Send(HeaderText(200, content_type, headers, std::nullopt));
}

void Connection::WritePiece(std::string piece) {
  if (phase_ != Phase::kStreaming || replied_ || piece.empty()) return;
  if (!unsent_.empty() && unsent_bytes_ + static_cast<int64_t>(piece.size()) > kMaxUnsentBytes) {
    return Disconnect();  // it does not read
  }
  if (!chunked_) return Send(std::move(piece));
  char size[24];
  const int digits = std::snprintf(size, sizeof size, "%zx\r\n", piece.size());
  std::string chunk;
  chunk.reserve(piece.size() + static_cast<size_t>(digits) + 2);
  Send(chunk.append(size).append(piece).append("\r\n"));
}

void Connection::EndStream() {
  if (phase_ != Phase::kStreaming || replied_) return;
  replied_ = true;
  on_disconnect_ = nullptr;
  if (chunked_) return Send("0\r\n\r\n");
  if (!writing_) ReplyDone();
}

void Connection::SetOnDisconnect(std::function<void()> callback) {
  if (replied_) return;
  if (phase_ == Phase::kClosed) return callback();
  on_disconnect_ = std::move(callback);
}

// The handler let go of the exchange: without a whole reply the client would wait for ever.
void Connection::Dropped() {
  const bool waits = phase_ == Phase::kHandling || phase_ == Phase::kStreaming;
  if (waits && !replied_) Disconnect();
}

void Connection::Send(std::string bytes) {
  unsent_bytes_ += static_cast<int64_t>(bytes.size());
  unsent_.push_back(std::move(bytes));
  if (!writing_) WriteNext();
}

void Connection::WriteNext() {
  writing_ = true;
  SetDeadline(context_.write_timeout_ms);
  asio::async_write(
      socket_, asio::buffer(unsent_.front()),
      [self = shared_from_this()](error_code error, size_t) { self->OnWritten(error); });
}

void Connection::OnWritten(error_code error) {
  writing_ = false;
  if (phase_ == Phase::kClosed) return;
  if (error) return Disconnect();
  unsent_bytes_ -= static_cast<int64_t>(unsent_.front().size());
  unsent_.pop_front();
  if (!unsent_.empty()) return WriteNext();
  ClearDeadline();
  if (replied_) ReplyDone();
}

void Connection::ReplyDone() {
  ReleaseBody();
  if (!keep_alive_ || context_.closing) return Linger();
  phase_ = Phase::kReading;
  if (watching_) {
    // The small read is still open. What it brings starts the next request, or is already here.
    SetDeadline(context_.idle_timeout_ms);
    if (buffer_.size() > 0) {
      error_code ignored;
      socket_.cancel(ignored);
    }
    return;
  }
  ReadRequest();
}

// Closing a socket with unread bytes resets it, and the client may lose the reply it has not read
// yet: say that we are done and read on for a moment.
void Connection::Linger() {
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  if (!linger_ || watching_) return Disconnect();
  SetDeadline(kLingerMs);
  linger_ = false;
  const auto drain = [](auto&& again, std::shared_ptr<Connection> self) -> void {
    self->buffer_.clear();
    self->socket_.async_read_some(self->buffer_.prepare(kMaxPipelinedBytes),
                                  [again, self](error_code error, size_t) {
                                    if (error || self->phase_ == Phase::kClosed) {
                                      return self->Disconnect();
                                    }
                                    again(again, self);
                                  });
  };
  drain(drain, shared_from_this());
}

}  // namespace stockpot
