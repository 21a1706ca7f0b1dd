#include "serve/http/connection.h"

#include <algorithm>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "serve/http/api_error.h"
#include "serve/http/limits.h"
#include "serve/http/url.h"

namespace stockpot {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using boost::system::error_code;
using std::chrono::milliseconds;

constexpr int64_t kRefusalWriteMs = 5'000;

std::string_view ReasonPhrase(int status) {
  const auto text = http::obsolete_reason(http::int_to_status(static_cast<unsigned>(status)));
  return {text.data(), text.size()};
}

class Connection;

// The reply to one request. Keeps the connection alive; tells it when it is dropped unanswered.
class ConnectionExchange final : public Exchange {
 public:
  // `number`: of the request on its connection.
  ConnectionExchange(std::shared_ptr<Connection> connection, HttpRequest request, uint64_t number)
      : connection_(std::move(connection)), request_(std::move(request)), number_(number) {}
  ~ConnectionExchange() override;

  const HttpRequest& request() const override { return request_; }
  void Respond(HttpResponse response) override;
  void BeginStream(std::string content_type, HttpHeaders headers) override;
  void Write(std::string piece) override;
  void EndStream() override;
  void OnDisconnect(std::function<void()> callback) override;
  void Post(std::function<void()> task) override;

 private:
  // Runs task(connection) on its strand, unless it has gone on to another request.
  template <typename Task>
  void OnStrand(Task task);
  HttpRequest Line() const { return {.method = request_.method, .path = request_.path}; }

  const std::shared_ptr<Connection> connection_;
  const HttpRequest request_;
  const uint64_t number_;
};

class Connection final : public ConnectionHandle, public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, ConnectionContext& context)
      : context_(context), socket_(std::move(socket)), deadline_(socket_.get_executor()) {
    ++context_.open;
  }
  ~Connection() override {
    ReleaseBody();
    --context_.open;
  }

  void Start(bool refuse);
  void Close() override;
  void CloseIfIdle() override;

  // Of the exchange, on the strand.
  void Respond(const HttpRequest& request, HttpResponse response);
  void BeginStream(const HttpRequest& request, const std::string& content_type,
                   const HttpHeaders& headers);
  void WritePiece(std::string piece);
  void EndStream();
  void SetOnDisconnect(std::function<void()> callback);
  void Dropped();

  uint64_t request_number() const { return number_; }
  asio::any_io_executor executor() { return socket_.get_executor(); }

 private:
  enum class Phase : uint8_t { kReading, kHandling, kStreaming, kClosed };

  void ReadRequest();
  void OnHeader(error_code error);
  void ReadBody();
  void OnBody(error_code error);
  void OnReadError(error_code error);
  void Dispatch();
  void Refuse(int status, std::string_view message);
  void Watch();
  void OnWatched(error_code error, size_t bytes);
  void Send(std::string bytes);
  void WriteNext();
  void OnWritten(error_code error);
  void ReplyDone();
  void Linger();
  void SetDeadline(int64_t ms);
  void ClearDeadline() { deadline_.cancel(); }
  void Disconnect();
  bool ReserveBody(int64_t bytes);
  void ReleaseBody();
  std::string HeaderText(int status, const std::string& content_type, const HttpHeaders& headers,
                         std::optional<size_t> content_length) const;

  ConnectionContext& context_;
  tcp::socket socket_;
  asio::steady_timer deadline_;

  // All of it the strand's.
  Phase phase_ = Phase::kReading;
  uint64_t number_ = 0;  // of the current request
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::function<void()> on_disconnect_;
  bool watching_ = false;  // the small read is open
  bool replied_ = false;   // the reply to the current request is queued whole
  bool keep_alive_ = false;
  bool chunked_ = false;
  bool head_only_ = false;
  bool linger_ = false;  // the client may still be sending what we refused
  std::deque<std::string> unsent_;
  int64_t unsent_bytes_ = 0;
  bool writing_ = false;
  int64_t reserved_body_ = 0;
};

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

void Connection::SetDeadline(int64_t ms) {
  deadline_.expires_after(milliseconds(ms));
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

}  // namespace

std::shared_ptr<ConnectionHandle> StartConnection(tcp::socket socket, ConnectionContext& context,
                                                  bool refuse) {
  auto connection = std::make_shared<Connection>(std::move(socket), context);
  connection->Start(refuse);
  return connection;
}

}  // namespace stockpot
