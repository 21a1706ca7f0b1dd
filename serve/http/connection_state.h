// A connection's state and its two halves: connection.cc reads requests, connection_reply.cc writes
// replies. Everything runs on the connection's strand.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "serve/http/connection.h"
#include "serve/http/exchange.h"

namespace stockpot {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using boost::system::error_code;
using tcp = asio::ip::tcp;

// Counts a connection as open until the last of its members is gone: HttpServer::Stop waits for
// that before it destroys what sockets and timers belong to.
class OpenCount {
 public:
  explicit OpenCount(std::atomic<int64_t>& open) : open_(open) { ++open_; }
  ~OpenCount() { --open_; }
  OpenCount(const OpenCount&) = delete;
  OpenCount& operator=(const OpenCount&) = delete;

 private:
  std::atomic<int64_t>& open_;
};

class Connection final : public ConnectionHandle, public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, ConnectionContext& context)
      : open_(context.open),
        context_(context),
        socket_(std::move(socket)),
        deadline_(socket_.get_executor()) {}
  ~Connection() override { ReleaseBody(); }

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

  const OpenCount open_;  // first, so that it goes last
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

}  // namespace stockpot
